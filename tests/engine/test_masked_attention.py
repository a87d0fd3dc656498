"""Targets and draft models with attention of their own, outside of transformers' interface, which is given a mask."""

from functools import cache, partial

import lossless
import pytest
import torch
from bulk import check_rows
from case_counts import cases, num_cases
from graph_stand_ins import replay_on_cpu
from lossless import PROMPTS, continuations
from oracle import OracleDrafter, copy_of, random_eagle3
from targets import build_target, padded_prompts, tiny_target
from transformers import DynamicCache, FalconConfig, FalconForCausalLM

from hf_specdec import NoDrafter
from hf_specdec.host.caches import OUTPUT_NAME
from hf_specdec.hosting.equivalence import why_not_equivalent
from hf_specdec.patching.attention import ragged_attention, slot_mask
from hf_specdec.patching.masked_attention import why_not_masked
from hf_specdec.patching.support import cache_layers, num_positions

MAX_NEW_TOKENS = num_cases(16, 12)
MASKED = {
    # A table of rotations.
    "gptj": {"rotary_dim": 4},
    # ALiBi made of the number of keys; a mask of booleans.
    "mpt": {"max_seq_len": 256, "n_heads": 4},
    # ALiBi made of the padding mask.
    "bloom": {},
    # Fixed position embeddings; the shape of the mask is checked.
    "xglm": {"ffn_dim": 64},
    # Keys have to be contiguous.
    "gpt_neox_japanese": {"intermediate_multiple_size": 2},
}
greedy = partial(lossless.greedy, max_new_tokens=MAX_NEW_TOKENS)


def lively(model):
    """`model` with weights so large that its texts vary."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model


@cache
def target_of(model_type):
    return lively(build_target(model_type, num_hidden_layers=3, **MASKED[model_type]))


@cache
def plain_output(model_type, lengths):
    return greedy(target_of(model_type), padded_prompts(list(lengths)))


def prompts_and_plain(model_type, lengths):
    return target_of(model_type), padded_prompts(list(lengths)), plain_output(model_type, tuple(lengths))


@pytest.mark.core
@pytest.mark.parametrize("model_type", MASKED)
def test_greedy_is_identical_in_padded_batches(model_type):
    for lengths, num_draft_tokens, accuracy in ((PROMPTS[3], 3, 0.6), ([40, 9, 33], 3, 1.0), (PROMPTS[1], 5, 0.6)):
        target, inputs, plain = prompts_and_plain(model_type, lengths)
        drafter = OracleDrafter(target, continuations(inputs, plain), lengths, accuracy)
        for options in ({}, {"prefill_chunk_size": 7}):
            assert torch.equal(greedy(target, inputs, drafter, num_draft_tokens, **options), plain)
            assert drafter.stats.engine == "static"
    assert len(plain.unique()) > 4, "texts tell positions apart"


@pytest.mark.core
@pytest.mark.parametrize("model_type", MASKED)
def test_copy_of_the_target_is_accepted_completely(model_type):
    target, inputs, plain = prompts_and_plain(model_type, PROMPTS[3])
    drafter = copy_of(target)
    assert torch.equal(greedy(target, inputs, drafter, 3), plain)
    assert drafter.stats.accepted == drafter.stats.drafted > 0


def test_other_drafters():
    for model_type in cases(list(MASKED), ["bloom"]):
        target, inputs, plain = prompts_and_plain(model_type, PROMPTS[3])
        for kind in (random_eagle3, NoDrafter, partial(copy_of, noise=0.05)):
            assert torch.equal(greedy(target, inputs, kind(target), 3), plain)


@pytest.mark.parametrize("model_type", cases(list(MASKED), ["bloom"]))
def test_draft_model_that_begins_in_the_middle_of_a_text(model_type):
    """The target's cache holds tokens that the call does not name: the draft model's first slot is not slot 0."""
    target, inputs = tiny_target("llama"), padded_prompts([12])
    drafter = copy_of(target_of(model_type))
    drafter.bind(target)
    texts = []
    for assistant in (None, drafter):
        cache = DynamicCache(config=target.config)
        first = greedy(target, inputs, **{OUTPUT_NAME: cache}, max_new_tokens=8)
        ids = torch.cat([first[:, cache.get_seq_length() :], torch.tensor([[5, 9, 11]])], dim=1)
        mask = torch.ones(1, cache.get_seq_length() + ids.shape[1], dtype=torch.int64)
        given = {"input_ids": ids, "attention_mask": mask}
        texts.append(greedy(target, given, assistant, assistant and 3, **{OUTPUT_NAME: cache}))
    assert torch.equal(*texts)


@pytest.mark.parametrize("model_type", cases(list(MASKED), ["gptj"]))
def test_continuous_batching(model_type):
    target = target_of(model_type)
    prompts = [padded_prompts([length], seed=length)["input_ids"][0].tolist() for length in (5, 1, 20, 3, 7)]
    check_rows(target, copy_of(target, noise=0.05), prompts, new=8)


def test_graphs_are_kept_for_the_next_call(monkeypatch):
    """Their buffers have 512 slots at least, but 256 positions and the dummy slot here: ALiBi is made of no more."""
    capture = replay_on_cpu(monkeypatch)
    target, drafter = target_of("mpt"), random_eagle3(target_of("mpt"))
    for lengths in ([5, 3], [4, 5]):
        inputs = padded_prompts(lengths)
        assert torch.equal(greedy(target, inputs, drafter), greedy(target, inputs))
        assert capture.count == 2 and len(drafter.sessions) == 1
        [(_, session)] = drafter.sessions._idle
    assert session.state.slots == 257


@pytest.mark.core
@pytest.mark.parametrize("pattern", ["global", "local"])
def test_attention_with_a_rule_of_its_own_runs_on_the_stock_engine(pattern):
    """GPT-Neo takes the queries for the last of the keys. In a window of 30 a few tokens do not tell."""
    options = {"attention_types": [[[pattern], 2]], "window_size": 30, "attention_layers": [pattern] * 2}
    target = lively(build_target("gpt_neo", num_hidden_layers=2, **options))
    reason = "its own attention does not do what a mask over 256 slots says"
    assert reason in why_not_equivalent(target, "static")
    with pytest.raises(ValueError, match=f"GPTNeoForCausalLM cannot draft here.*{reason}"):
        copy_of(target)


@pytest.mark.core
def test_eager_attention_that_differs_from_the_usual_one_runs_on_the_stock_engine():
    """Falcon with ALiBi adds it twice in its eager attention, and once in the one that plain `generate()` runs."""
    config = FalconConfig(vocab_size=96, hidden_size=64, num_attention_heads=4, num_hidden_layers=2, alibi=True)
    target = FalconForCausalLM(config).eval()
    assert "logits" in why_not_equivalent(target, "static")
    # In reduced precision the few tokens of the first comparison may not tell.
    assert why_not_masked(target, limit=0.05) is not None


@pytest.mark.core
@pytest.mark.parametrize("name", ["falcon", "gptj", "bloom"])
def test_calls_by_others_while_an_engine_runs(name):
    """Falcon calls another attention if its configuration names that of torch, with a mask of another kind."""
    torch.manual_seed(0)
    config = FalconConfig(vocab_size=96, hidden_size=64, num_attention_heads=4, num_hidden_layers=2)
    target = lively(FalconForCausalLM(config).eval()) if name == "falcon" else target_of(name)
    inputs = padded_prompts([9, 4])
    with torch.no_grad():
        expected = target(**inputs).logits
        with ragged_attention(target):
            found = target(**inputs).logits
            generated = greedy(target, inputs, pad_token_id=0)
    assert torch.allclose(found[inputs["attention_mask"].bool()], expected[inputs["attention_mask"].bool()], atol=1e-3)
    assert torch.equal(generated, greedy(target, inputs, pad_token_id=0))


def test_draft_models_without_the_interface_are_not_trained():
    with pytest.raises(ValueError, match="BloomForCausalLM cannot be trained here: it does not use"):
        copy_of(target_of("bloom")).head_weight  # noqa: B018


def test_tables_of_positions():
    assert num_positions(target_of("gptj")) == num_positions(target_of("xglm")) == 256
    assert num_positions(target_of("bloom")) is None
    assert cache_layers(target_of("bloom")).takes_mask
    assert not cache_layers(tiny_target("llama")).takes_mask


def test_slot_mask():
    """Slots of the queries [3, 5] and [1, dummy]; the second row begins at slot 1."""
    slots = torch.tensor([[3, 5], [1, 99]])
    seen = torch.tensor([[True] * 6, [False] + [True] * 5])

    def visible(mask_function):
        mask = slot_mask(slots, 6, mask_function, seen, torch.float16)
        assert mask.dtype == torch.float16 and set(mask.unique().tolist()) <= {0.0, -65504.0}
        return [["".join("x" if key == 0 else "." for key in row) for row in rows[0].tolist()] for rows in mask]

    assert visible(lambda row, head, query, key: key <= query) == [["xxxx..", "xxxxxx"], [".x....", ".xxxxx"]]
    window = visible(lambda row, head, query, key: (key <= query) & (key > query - 3))
    assert window == [[".xxx..", "...xxx"], [".x....", "......"]]
