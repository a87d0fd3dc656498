"""RoPE that depends on the length of the text: what plain `generate()` does across the length where it changes."""

import inspect
from functools import cache, partial

import lossless
import pytest
import torch
from case_counts import cases
from graph_stand_ins import replay_on_cpu
from lossless import continuations
from oracle import OracleDrafter, copy_of, random_draft_model, random_eagle3
from targets import build_target, padded_prompts
from transformers import DynamicCache, Phi3ForCausalLM

from hf_specdec.patching.length_rope import RopeLimits, why_not_marked
from hf_specdec.patching.support import length_limits, why_not_supported

MAX_NEW_TOKENS = 24
LIMIT = 32
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [4.0, 0.3, 8.0, 0.2],
    "factor": 8.0,
    "original_max_position_embeddings": LIMIT,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
SETTINGS = {
    # Keys stay as they were rotated.
    "llama": {"rope_parameters": LONGROPE},
    # Keys of all tokens are computed again once the text outgrows the limit.
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": LIMIT},
    # Different kinds of layers, of which one has such a RoPE.
    "gemma3_text": {
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": LONGROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": LIMIT},
}
greedy = partial(lossless.greedy, max_new_tokens=MAX_NEW_TOKENS)
# On one side of the limit, on both, and with rows that reach it together with the longest one.
SHORT, ACROSS, LONG = [3, 9, 5], [30, 9, 21], [40, 3, 34]


# transformers 5.17 drops the keys of Phi-3 without computing them again, and fails where such RoPE is of one kind of
# layers and the limit is passed twice.
IS_OLD = "next_sequence_length" not in inspect.getsource(Phi3ForCausalLM.prepare_inputs_for_generation)


@cache
def target_of(name):
    return build_target("llama" if name == "dynamic" else name, **SETTINGS[name])


@cache
def plain_output(name, lengths):
    target_of(name)(torch.zeros(1, 1, dtype=torch.int64))  # see `check`
    return greedy(target_of(name), padded_prompts(list(lengths)))


def check(name, lengths, drafter_of, engine, num_draft_tokens=3, **options):
    is_broken = name == "gemma3_text" or (name == "phi3" and max(lengths) <= LIMIT)
    if IS_OLD and is_broken and max(lengths) + MAX_NEW_TOKENS - 1 > LIMIT:
        pytest.skip("plain generate() of this version does not generate such a text")
    target, inputs = target_of(name), padded_prompts(lengths)
    plain = plain_output(name, tuple(lengths))
    drafter = drafter_of(target, inputs, plain)
    target(torch.zeros(1, 1, dtype=torch.int64))  # transformers keeps the dynamic frequencies of the last call, if long
    found = greedy(target, inputs, drafter, num_draft_tokens, **options)
    assert torch.equal(found, plain), f"{name} of {lengths}: {found.tolist()} instead of {plain.tolist()}"
    assert drafter.stats.engine == engine, drafter.stats.reason
    return drafter


def oracle(target, inputs, plain, accuracy=0.6):
    lengths = inputs["attention_mask"].sum(dim=1).tolist()
    return OracleDrafter(target, continuations(inputs, plain), lengths, accuracy)


@pytest.mark.core
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@pytest.mark.parametrize("lengths", [SHORT, ACROSS, LONG, [30], [31], [32], [33], [9, 30]], ids=str)
def test_keys_that_stay_run_on_the_static_engine(name, lengths):
    for accuracy, num in cases([(0.0, 1), (0.6, 3), (1.0, 7)], [(0.6, 3), (1.0, 7)]):
        check(name, lengths, partial(oracle, accuracy=accuracy), "static", num)
    check(name, lengths, oracle, "static", 3, prefill_chunk_size=None)


def test_texts_depend_on_the_limit():
    """What would go unnoticed otherwise: that the factors of long texts are not used."""
    inputs = padded_prompts(ACROSS)
    short = build_target("llama", rope_parameters=LONGROPE | {"original_max_position_embeddings": 200})
    long = build_target("llama", rope_parameters=LONGROPE | {"original_max_position_embeddings": 2})
    texts = [plain_output("llama", tuple(ACROSS)), greedy(short, inputs), greedy(long, inputs)]
    assert not any(torch.equal(one, other) for one, other in ((texts[0], texts[1]), (texts[0], texts[2])))
    # A row of a batch changes with the longest one, not by itself.
    alone = greedy(target_of("llama"), {name: value[2:, -21:] for name, value in inputs.items()})
    assert not torch.equal(alone[:, 21:], texts[0][2:, 30:])


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "lengths", "engine"),
    [
        ("phi3", SHORT, "static"),
        ("phi3", LONG, "static"),
        ("phi3", [9], "static"),
        ("phi3", [8, 8], "static"),
        ("phi3", [30], "stock"),
        ("phi3", [10], "stock"),
        ("phi3", [31, 31], "stock"),
        ("dynamic", [3, 8, 5], "static"),
        ("dynamic", [20], "stock"),
        ("dynamic", [40], "stock"),
    ],
    ids=str,
)
def test_texts_that_a_block_of_drafts_would_change_run_on_the_stock_engine(name, lengths, engine):
    for num in cases([1, 3, 7], [3]):
        check(name, lengths, oracle, engine, num)


@pytest.mark.parametrize("name", ["llama", "phi3"])
@pytest.mark.parametrize("lengths", [[20], [31], [40]], ids=str)
def test_stock_engine(name, lengths):
    """Its blocks of drafts end where the factors change."""
    for accuracy in (0.6, 1.0):
        check(name, lengths, lambda *given, a=accuracy: oracle(*given, a).configure(engine="stock"), "stock")


def test_batches_of_the_stock_engine():
    """Rows by themselves would change by themselves."""
    target, inputs = target_of("phi3"), padded_prompts(ACROSS)
    plain = plain_output("phi3", tuple(ACROSS))
    with pytest.raises(ValueError, match=r"outgrows 32, and plain.*by the longest one"):
        greedy(target, inputs, oracle(target, inputs, plain), 3)


@pytest.mark.parametrize("family", [copy_of, random_eagle3, random_draft_model])
@pytest.mark.parametrize("lengths", [ACROSS, LONG], ids=str)
def test_families(family, lengths):
    drafter = check("llama", lengths, lambda target, *_: family(target), "static")
    if family is copy_of:  # which rotates as the target does
        assert drafter.stats.acceptance_length == 4


def test_text_that_continues_a_cache():
    target, drafter, texts = target_of("llama"), random_draft_model(target_of("llama")), []
    first = padded_prompts([20, 12])
    for assistant in (None, drafter):
        cache = DynamicCache()
        out = greedy(target, first, assistant, 3, max_new_tokens=6, past_key_values=cache)
        longer = torch.cat([out, padded_prompts([4, 4], seed=1)["input_ids"]], dim=1)
        mask = torch.cat([first["attention_mask"], torch.ones(2, 10, dtype=torch.int64)], dim=1)
        inputs = {"input_ids": longer, "attention_mask": mask}
        texts.append(greedy(target, inputs, assistant, 3, past_key_values=cache))
    assert torch.equal(*texts) and drafter.stats.engine == "static"


def test_replayed_graphs(monkeypatch):
    capture = replay_on_cpu(monkeypatch)
    target = target_of("llama")
    drafter = random_eagle3(target)
    for lengths in (SHORT, ACROSS, LONG):
        inputs = padded_prompts(lengths)
        assert torch.equal(greedy(target, inputs, drafter, 3), plain_output("llama", tuple(lengths)))
    assert capture.count > 0


def test_limits():
    assert length_limits(target_of("llama")) == RopeLimits(long=LIMIT)
    assert length_limits(target_of("phi3")) == RopeLimits(long=LIMIT, recomputes=True)
    assert length_limits(target_of("dynamic")) == RopeLimits(fixed=LIMIT)
    assert length_limits(build_target("llama")) == RopeLimits()
    for limits, length, last in (
        (RopeLimits(long=32), 30, 32),
        (RopeLimits(long=32), 33, None),
        (RopeLimits(fixed=32), 30, 32),
        (RopeLimits(fixed=32), 40, 40),
        (RopeLimits(), 40, None),
    ):
        assert limits.last_draft(length) == last


def test_frequencies_that_are_not_read():
    """Phi-3.5-MoE computes them by itself."""
    longrope = LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.2}
    target = build_target("phimoe", rope_parameters=longrope, num_local_experts=4, num_experts_per_tok=2)
    assert "RoPE (longrope) changes with the length" in why_not_supported(target)


def test_position_ids_that_others_read():
    """Marked ones are for rotary embeddings only."""
    target = build_target("llama", rope_parameters=LONGROPE)

    def count(module, args, kwargs, output):
        output.last_hidden_state += kwargs["position_ids"][..., None]
        return output

    target.model.register_forward_hook(count, with_kwargs=True)
    assert f"a text of more than {LIMIT} tokens" in why_not_marked(target, LIMIT, 1e-3)
    assert why_not_marked(target_of("llama"), LIMIT, 1e-3) is None
