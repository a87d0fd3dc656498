"""Greedy decoding with a drafter is token-identical to decoding without, whatever the drafter."""

from functools import cache, partial
from itertools import product

import lossless
import pytest
import torch
from case_counts import cases, num_cases
from lossless import PROMPTS, continuations
from oracle import RANDOM_DRAFTERS, SELDOM, OracleDrafter, copy_of, random_draft_model, random_eagle3
from targets import FAMILIES, PAD, STATIC_FAMILIES, WITHOUT_ATTENTION, padded_prompts, tiny_target

MAX_NEW_TOKENS = num_cases(24, 12)
greedy = partial(lossless.greedy, max_new_tokens=MAX_NEW_TOKENS)
# Of random drafters nearly nothing is accepted; a noisy copy of the target is right about every other time.
DRAFTERS = {kind: make for kind, make in RANDOM_DRAFTERS.items() if kind not in SELDOM}
DRAFTERS["noisy-copy"] = partial(copy_of, noise=0.08)

ALSO_TRIED = {
    "p-eagle": "gemma3",
    "dflash": "qwen3-moe",
    "dspark": "qwen3-next",
    "dflash2": "mistral",
    "domino": "deepseek-v3",
    "pard": "gpt-oss",
    "pard2": "gemma3",
    "draft-model": "deepseek-v3",
}
# EAGLE-3 reads hidden states of the target and MTP modules are made of its layers; others have models of their own.
KINDS_AND_FAMILIES = cases(
    every := list(product(["eagle3", "mtp", *ALSO_TRIED], STATIC_FAMILIES)),
    [(kind, family) for kind, family in every if kind in ("eagle3", "mtp") or family == ALSO_TRIED[kind]],
)


@cache
def plain_output(family: str, batch: int):
    return greedy(tiny_target(family), padded_prompts(PROMPTS[batch], seed=batch))


def prompts_and_plain(family: str, batch: int):
    return tiny_target(family), padded_prompts(PROMPTS[batch], seed=batch), plain_output(family, batch)


@cache
def ends_and_plain(position: int):
    """Options by which every row of three ends, at the latest after so many tokens, and what is said with them."""
    target, inputs, free = prompts_and_plain("llama", 3)
    tokens = free[:, inputs["input_ids"].shape[1] + position].unique().tolist()
    ends = {"eos_token_id": tokens, "pad_token_id": PAD}
    return ends, greedy(target, inputs, **ends)


@pytest.mark.parametrize(
    ("family", "batch"),
    cases(
        every := list(product(STATIC_FAMILIES, [1, 3, 8])),
        [one for one in every if one[1] == 3 or one[0] == "gemma3"],
    ),
)
def test_greedy_is_identical_for_drafters_of_any_accuracy(family, batch):
    target, inputs, plain = prompts_and_plain(family, batch)
    answers = continuations(inputs, plain)
    every = list(product((1, 3, 8, 16), (0.0, 0.6, 1.0)))
    few = {1: [(1, 0.6), (8, 0.0)], 3: [(3, 0.6), (3, 1.0)], 8: [(16, 0.6)]}
    for num_draft_tokens, accuracy in cases(every, few[batch]):
        drafter = OracleDrafter(target, answers, PROMPTS[batch], accuracy, seed=num_draft_tokens)
        assert torch.equal(greedy(target, inputs, drafter, num_draft_tokens), plain), (num_draft_tokens, accuracy)
        assert drafter.stats.engine == "static"
        if accuracy == 1.0:
            assert drafter.stats.num_rounds == -(-(MAX_NEW_TOKENS - 1) // (num_draft_tokens + 1))
        if accuracy == 0.0:
            assert drafter.stats.accepted == 0


@pytest.mark.core_for(kind=["eagle3"])
@pytest.mark.core_for(family=["llama"], kind=["mtp"])
@pytest.mark.parametrize(("kind", "family"), KINDS_AND_FAMILIES)
def test_greedy_is_identical_with_every_family_of_drafters(kind, family):
    target, inputs, plain = prompts_and_plain(family, 3)
    drafter = RANDOM_DRAFTERS[kind](target)
    assert torch.equal(greedy(target, inputs, drafter, 5), plain)
    assert drafter.stats.engine == "static"


@pytest.mark.parametrize(
    ("kind", "batch", "num_draft_tokens"),
    [("eagle3", 8, 16), ("mtp", 8, 16), ("noisy-copy", 8, 16), ("dspark", 1, 3), ("pard", 1, 3)],
)
def test_greedy_is_identical_in_batches_of_every_size(kind, batch, num_draft_tokens):
    target, inputs, plain = prompts_and_plain("gemma3", batch)
    assert torch.equal(greedy(target, inputs, DRAFTERS[kind](target), num_draft_tokens), plain)


@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_is_identical_for_every_number_of_drafts(kind):
    target, inputs, plain = prompts_and_plain("llama", 3)
    expected = plain[:, : inputs["input_ids"].shape[1] + 6]
    drafter, accepted = DRAFTERS[kind](target), 0
    for num_draft_tokens in cases(range(1, 17), (1, 2, 5, 11, 16) if kind == "noisy-copy" else (1, 5, 16)):
        found = greedy(target, inputs, drafter, num_draft_tokens, max_new_tokens=6)
        assert torch.equal(found, expected), num_draft_tokens
        accepted += drafter.stats.accepted
    assert kind != "noisy-copy" or accepted > 12


@pytest.mark.parametrize("family", STATIC_FAMILIES)
def test_copy_of_the_target_is_accepted_completely(family):
    for batch, num_draft_tokens in cases(((1, 1), (3, 5), (3, 11)), ((1, 1),) * (family == "llama") + ((3, 11),)):
        target, inputs, plain = prompts_and_plain(family, batch)
        drafter = copy_of(target)
        assert torch.equal(greedy(target, inputs, drafter, num_draft_tokens), plain)
        assert drafter.stats.accepted_per_position == drafter.stats.drafted_per_position
        # The first token is of no round, and the last block is cut by the limit.
        assert drafter.stats.num_rounds == -(-(MAX_NEW_TOKENS - 1) // (num_draft_tokens + 1))


@pytest.mark.parametrize(("num_draft_tokens", "accuracy"), [(1, 1.0), (3, 0.5), (6, 1.0)])
def test_end_of_sequence_anywhere_in_a_block(accuracy, num_draft_tokens):
    target, inputs, free = prompts_and_plain("llama", 3)
    answers = continuations(inputs, free)
    for position in range(num_cases(14, 9)):
        ends, plain = ends_and_plain(position)
        drafter = OracleDrafter(target, answers, PROMPTS[3], accuracy)
        assert torch.equal(greedy(target, inputs, drafter, num_draft_tokens, **ends), plain), position


@pytest.mark.parametrize(("num_draft_tokens", "accuracy"), [(4, 0.5), (8, 1.0)])
def test_length_limit_anywhere_in_a_block(num_draft_tokens, accuracy):
    target, inputs, free = prompts_and_plain("qwen3", 3)
    answers = continuations(inputs, free)
    width = inputs["input_ids"].shape[1]
    for max_new_tokens in range(1, 12):
        drafter = OracleDrafter(target, answers, PROMPTS[3], accuracy)
        out = greedy(target, inputs, drafter, num_draft_tokens, max_new_tokens=max_new_tokens)
        assert torch.equal(out, free[:, : width + max_new_tokens])


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("num_draft_tokens", cases([4, 16], [4]))
def test_ends_and_limits_with_every_family_of_drafters(kind, num_draft_tokens):
    target, inputs, free = prompts_and_plain("llama", 3)
    width, drafter = inputs["input_ids"].shape[1], DRAFTERS[kind](target)
    for position in cases((0, 3, 10), (3,)):
        ends, plain = ends_and_plain(position)
        assert torch.equal(greedy(target, inputs, drafter, num_draft_tokens, **ends), plain), position
        out = greedy(target, inputs, drafter, num_draft_tokens, max_new_tokens=position + 1)
        assert torch.equal(out, free[:, : width + position + 1]), position


@pytest.mark.core_for(family=["llama", "gemma3", "gpt-oss", "deepseek-v3", "qwen3-next"])
# Where transformers verifies drafts, in passes over several tokens, Nemotron-H bounds its time steps and Mamba-1 (Jamba
# and Zamba) begins without a state; the latter are refused, as are models without attention.
@pytest.mark.parametrize(
    "family", [one for one in FAMILIES if one not in ("nemotron-h", "jamba", "zamba", *WITHOUT_ATTENTION)]
)
def test_stock_engine_is_identical(family):
    target, inputs, plain = prompts_and_plain(family, 1)
    drafters = [
        OracleDrafter(target, continuations(inputs, plain), PROMPTS[1], accuracy)
        for accuracy in cases((0.0, 0.6, 1), (0.6,))
    ]
    for number, drafter in enumerate([*drafters, random_eagle3(target)]):
        drafter.configure(engine="stock")
        for num_draft_tokens in cases((1, 3, 8), ((8,), (1,), (3,))[number % 3]):
            assert torch.equal(greedy(target, inputs, drafter, num_draft_tokens), plain), num_draft_tokens
            assert drafter.stats.engine == "stock"


@pytest.mark.parametrize(
    ("kind", "family"),
    cases(
        every := [(kind, family) for kind in DRAFTERS if kind != "eagle3" for family in ("llama", "qwen3-next")],
        [one for one in every if one[1] == "llama" or one[0] in ("draft-model", "mtp")],
    ),
)
def test_stock_engine_is_identical_with_every_family_of_drafters(kind, family):
    target, inputs, plain = prompts_and_plain(family, 1)
    drafter = DRAFTERS[kind](target).configure(engine="stock")
    for num_draft_tokens in cases((3, 16), (3,)):
        assert torch.equal(greedy(target, inputs, drafter, num_draft_tokens), plain), num_draft_tokens
        assert drafter.stats.engine == "stock"


@pytest.mark.core
def test_copy_of_the_target_is_accepted_completely_on_the_stock_engine():
    target, inputs, plain = prompts_and_plain("llama", 1)
    drafter = copy_of(target).configure(engine="stock")
    assert torch.equal(greedy(target, inputs, drafter, 5), plain)
    assert drafter.stats.accepted == drafter.stats.drafted > 0


@pytest.mark.parametrize(
    ("vocab_size", "parallel", "engine"),
    cases(
        every := list(product([80, 112], [False, True], ["static", "stock"])),
        [one for one in every if (one[0] == 80) == (one[1] == (one[2] == "static"))],
    ),
)
def test_draft_models_with_another_vocabulary(vocab_size, parallel, engine):
    """Sizes differ by padding: neither knows what the other has more, but both may be shown it."""
    target, inputs, plain = prompts_and_plain("llama", 3 if engine == "static" else 1)
    assert (plain >= 80).any()
    drafter = random_draft_model(target, parallel, vocab_size, mask_token_id=vocab_size - 1).configure(engine=engine)
    for num_draft_tokens in cases((1, 6), (6,)):
        assert torch.equal(greedy(target, inputs, drafter, num_draft_tokens), plain)
        # One outcome, through the whole of rejection sampling with the drafter's distribution.
        drafter.configure(draft_probs=True)
        assert torch.equal(greedy(target, inputs, drafter, num_draft_tokens, do_sample=True, top_k=1), plain)
        assert drafter.stats.draft_probs
        drafter.configure(draft_probs="auto")


@pytest.mark.core_for(kind=["eagle3"], family=["deepseek-v3"])
@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
@pytest.mark.parametrize("kind", ["eagle3", "p-eagle"])
def test_greedy_is_identical_with_a_drafter_that_reads_the_last_hidden_state(kind, family):
    target, inputs, plain = prompts_and_plain(family, 3)
    drafter = RANDOM_DRAFTERS[kind](target, use_aux_hidden_state=False)
    assert torch.equal(greedy(target, inputs, drafter), plain)
