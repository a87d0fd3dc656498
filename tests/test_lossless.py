"""Greedy decoding with a drafter is token-identical to decoding without, whatever the drafter."""

import pytest
import torch
from oracle import OracleDrafter, random_eagle3
from targets import FAMILIES, PAD, STATIC_FAMILIES, padded_prompts, tiny_target

MAX_NEW_TOKENS = 24
PROMPTS = {1: [9], 3: [1, 12, 5], 8: [2, 13, 7, 1, 10, 11, 3, 6]}


def prompts_and_plain(family: str, batch: int, **options):
    target = tiny_target(family)
    inputs = padded_prompts(PROMPTS[batch], seed=batch)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS, **options)
    return target, inputs, plain


def continuations(inputs, plain):
    """What each row says when nothing stops it, long enough for any draft."""
    new = plain[:, inputs["input_ids"].shape[1] :]
    return torch.nn.functional.pad(new, (0, 16), value=PAD)


@pytest.mark.parametrize("family", STATIC_FAMILIES)
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_greedy_is_identical_for_drafters_from_terrible_to_perfect(family, batch):
    target, inputs, plain = prompts_and_plain(family, batch)
    answers = continuations(inputs, plain)
    for num_draft_tokens in range(1, 9):
        for accuracy in (0.0, 0.6, 1.0):
            drafter = OracleDrafter(target, answers, PROMPTS[batch], accuracy, seed=num_draft_tokens)
            out = target.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=MAX_NEW_TOKENS,
                assistant_model=drafter,
                num_assistant_tokens=num_draft_tokens,
            )
            assert torch.equal(out, plain), (num_draft_tokens, accuracy)
            assert drafter.stats.engine == "static"
            if accuracy == 1.0:
                assert drafter.stats.num_rounds == -(-MAX_NEW_TOKENS // (num_draft_tokens + 1))
            if accuracy == 0.0:
                assert drafter.stats.accepted == 0


@pytest.mark.core
@pytest.mark.parametrize("family", STATIC_FAMILIES)
@pytest.mark.parametrize("batch", [1, 3])
def test_greedy_is_identical_with_eagle3(family, batch):
    target, inputs, plain = prompts_and_plain(family, batch)
    drafter = random_eagle3(target)
    for num_draft_tokens in (1, 4, 8):
        out = target.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
            assistant_model=drafter,
            num_assistant_tokens=num_draft_tokens,
        )
        assert torch.equal(out, plain), num_draft_tokens


@pytest.mark.core
@pytest.mark.parametrize("accuracy", [0.5, 1.0])
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 6])
def test_end_of_sequence_anywhere_in_a_block(accuracy, num_draft_tokens):
    target, inputs, free = prompts_and_plain("llama", 3)
    answers = continuations(inputs, free)
    width = inputs["input_ids"].shape[1]
    for position in range(0, 14):
        ends = free[:, width + position].unique().tolist()
        plain = target.generate(
            **inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS, eos_token_id=ends, pad_token_id=PAD
        )
        drafter = OracleDrafter(target, answers, PROMPTS[3], accuracy)
        out = target.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
            eos_token_id=ends,
            pad_token_id=PAD,
            assistant_model=drafter,
            num_assistant_tokens=num_draft_tokens,
        )
        assert torch.equal(out, plain), position


@pytest.mark.core
@pytest.mark.parametrize("accuracy", [0.5, 1.0])
def test_length_limit_anywhere_in_a_block(accuracy):
    target, inputs, free = prompts_and_plain("qwen3", 3)
    answers = continuations(inputs, free)
    width = inputs["input_ids"].shape[1]
    for max_new_tokens in range(1, 12):
        for num_draft_tokens in (1, 4, 8):
            drafter = OracleDrafter(target, answers, PROMPTS[3], accuracy)
            out = target.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=max_new_tokens,
                assistant_model=drafter,
                num_assistant_tokens=num_draft_tokens,
            )
            assert torch.equal(out, free[:, : width + max_new_tokens])


@pytest.mark.core
@pytest.mark.parametrize("family", FAMILIES)
def test_stock_engine_is_identical(family):
    target, inputs, plain = prompts_and_plain(family, 1)
    drafters = [OracleDrafter(target, continuations(inputs, plain), PROMPTS[1], accuracy) for accuracy in (0.0, 0.6, 1)]
    for drafter in [*drafters, random_eagle3(target)]:
        drafter.configure(engine="stock")
        for num_draft_tokens in (1, 3, 8):
            out = target.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=MAX_NEW_TOKENS,
                assistant_model=drafter,
                num_assistant_tokens=num_draft_tokens,
            )
            assert torch.equal(out, plain), num_draft_tokens
            assert drafter.stats.engine == "stock"


@pytest.mark.core
@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
def test_greedy_is_identical_with_a_drafter_that_reads_the_last_hidden_state(family):
    target, inputs, plain = prompts_and_plain(family, 3)
    drafter = random_eagle3(target, use_aux_hidden_state=False)
    out = target.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS, assistant_model=drafter)
    assert torch.equal(out, plain)
