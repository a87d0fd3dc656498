"""RoPE that depends on the length of the text: what plain `generate()` does across the length where it changes."""

import inspect
from functools import cache, partial

import pytest
import torch
from case_counts import cases
from graph_stand_ins import replay_on_cpu
from lossless import GreedyTexts, oracle
from oracle import copy_of, random_draft_model, random_eagle3
from targets import build_target, padded_prompts
from transformers import Phi3ForCausalLM, modeling_rope_utils

from hf_specdec.modules import signature
from hf_specdec.patching.plugins import length_rope
from hf_specdec.patching.plugins.length_rope import LengthRope, RopeLimits, length_limits, why_not_marked
from hf_specdec.patching.support import why_not_supported

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
# On one side of the limit, on both, and with rows that reach it together with the longest one.
SHORT, ACROSS, LONG = (3, 9, 5), (30, 9, 21), (40, 3, 34)


# transformers 5.17 drops the keys of Phi-3 without computing them again, and fails where such RoPE is of one kind of
# layers and the limit is passed twice.
IS_OLD = "next_sequence_length" not in inspect.getsource(Phi3ForCausalLM.prepare_inputs_for_generation)
# Versions with layers of their own RoPE read the frequencies of long texts before they have set them.
FAILS_BY_LAYER = "long_inv_freq = getattr(" not in inspect.getsource(modeling_rope_utils)


@cache
def built(name):
    return build_target("llama" if name == "dynamic" else name, **SETTINGS[name])


def target_of(name):
    target = built(name)
    target(torch.zeros(1, 1, dtype=torch.int64))  # transformers keeps the dynamic frequencies of the last call, if long
    return target


TEXTS = GreedyTexts(target_of, max_new_tokens=24)


def check(name, lengths, *args, **options):
    is_broken = (FAILS_BY_LAYER and name == "gemma3_text") or (IS_OLD and name == "phi3" and max(lengths) <= LIMIT)
    if is_broken and max(lengths) + TEXTS.max_new_tokens - 1 > LIMIT:
        pytest.skip("plain generate() of this version does not generate such a text")
    return TEXTS.check(name, lengths, *args, **options)


@pytest.mark.parametrize(
    ("name", "lengths"),
    cases(
        every := [
            (name, lengths)
            for name in ("llama", "gemma3_text")
            for lengths in (SHORT, ACROSS, LONG, (30,), (31,), (32,), (33,), (9, 30))
        ],
        [one for one in every if one[0] == "llama" or one[1] in (ACROSS, LONG, (31,))],
    ),
    ids=str,
)
def test_keys_that_stay_run_on_the_static_engine(name, lengths):
    for accuracy, num in cases([(0.0, 1), (0.6, 3), (1.0, 7)], [(0.6, 3), (1.0, 7)]):
        check(name, lengths, partial(oracle, accuracy=accuracy), num)
    check(name, lengths, oracle, prefill_chunk_size=None)


def test_texts_depend_on_the_limit():
    """What would go unnoticed otherwise: that the factors of long texts are not used."""
    inputs = padded_prompts(ACROSS)
    short = build_target("llama", rope_parameters=LONGROPE | {"original_max_position_embeddings": 200})
    long = build_target("llama", rope_parameters=LONGROPE | {"original_max_position_embeddings": 2})
    texts = [TEXTS.plain("llama", ACROSS), TEXTS.greedy(short, inputs), TEXTS.greedy(long, inputs)]
    assert not any(torch.equal(one, other) for one, other in ((texts[0], texts[1]), (texts[0], texts[2])))
    # A row of a batch changes with the longest one, not by itself.
    alone = TEXTS.greedy(target_of("llama"), {name: value[2:, -21:] for name, value in inputs.items()})
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
        check(name, lengths, oracle, num, engine)


@pytest.mark.parametrize(
    ("name", "lengths"),
    cases(
        every := [(name, lengths) for name in ("llama", "phi3") for lengths in ((20,), (31,), (40,))],
        [one for one in every if one[0] == "llama" or one[1] == (31,)],
    ),
    ids=str,
)
def test_stock_engine(name, lengths):
    """Its blocks of drafts end where the factors change."""
    for accuracy in (0.6, 1.0):
        check(name, lengths, lambda *given, a=accuracy: oracle(*given, a).configure(engine="stock"), engine="stock")


def test_batches_of_the_stock_engine():
    """Rows by themselves would change by themselves."""
    target, inputs = target_of("phi3"), padded_prompts(ACROSS)
    plain = TEXTS.plain("phi3", ACROSS)
    with pytest.raises(ValueError, match=r"outgrows 32, and plain.*by the longest one"):
        TEXTS.greedy(target, inputs, oracle(target, inputs, plain), 3)


@pytest.mark.parametrize(
    ("family", "lengths"),
    cases(
        every := [
            (family, lengths) for family in (copy_of, random_eagle3, random_draft_model) for lengths in (ACROSS, LONG)
        ],
        [one for one in every if one[0] is copy_of or one[1] == ACROSS],
    ),
)
def test_families(family, lengths):
    drafter = check("llama", lengths, lambda target, *_: family(target))
    if family is copy_of:  # which rotates as the target does
        assert drafter.stats.accepted == drafter.stats.drafted > 0


def test_text_that_continues_a_cache():
    TEXTS.check_continued_cache("llama")


def test_replayed_graphs(monkeypatch):
    replay_on_cpu(monkeypatch)
    TEXTS.check_replayed("llama", random_eagle3(target_of("llama")), [SHORT, ACROSS, LONG])


def test_limits():
    assert length_limits(target_of("llama")) == RopeLimits(long=LIMIT)
    assert length_limits(target_of("phi3")) == RopeLimits(long=LIMIT, recomputes=True)
    assert length_limits(target_of("dynamic")) == RopeLimits(fixed=LIMIT)
    assert length_limits(build_target("llama")) == RopeLimits()
    for target, length, last in (
        (target_of("llama"), LIMIT - 2, LIMIT),
        (target_of("llama"), LIMIT + 1, None),
        (target_of("dynamic"), LIMIT - 2, LIMIT),
        (target_of("dynamic"), LIMIT + 8, LIMIT + 8),
        (build_target("llama"), LIMIT + 8, None),
    ):
        assert LengthRope.longest_with_drafts(target, length) == last


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


@pytest.mark.parametrize("name", ["llama", "dynamic"])
def test_rope_changed_between_calls(name):
    """The configuration alone changes nothing, but the rotary embedding that is made of it does."""
    target, inputs = build_target("llama"), padded_prompts([30])
    drafter = copy_of(target)
    for key, value in {"original_max_position_embeddings": LIMIT, **SETTINGS[name]}.items():
        setattr(target.config, key, value)
    for engine in ("static", "static" if name == "llama" else "stock"):
        plain = TEXTS.greedy(target, inputs)
        assert torch.equal(TEXTS.greedy(target, inputs, drafter, 3), plain) and drafter.stats.engine == engine
        target.model.rotary_emb = type(target.model.rotary_emb)(target.config)


def test_frequencies_that_are_kept(monkeypatch):
    """Not those of all places where a module was."""
    monkeypatch.setattr(signature, "MOST_KEPT", 3)
    module = build_target("llama", **SETTINGS["llama"]).model.rotary_emb
    held = []
    for _ in range(6):
        held.append(module.original_inv_freq)  # so that no address comes again
        module.original_inv_freq = module.original_inv_freq.clone()
        found = length_rope._frequencies_of(module)
    assert len(length_rope._frequencies[module]) == 3 and length_rope._frequencies_of(module) is found


def test_rotary_embedding_of_another_dtype():
    """Frequencies are those of the module as it is now."""
    rope = LONGROPE | {"short_factor": [1.0, 0.3, 0.3, 0.3], "original_max_position_embeddings": 224}
    target, inputs = build_target("llama", rope_parameters=rope), padded_prompts([200])
    drafter = copy_of(target)
    for dtype in (torch.float32, torch.bfloat16):
        target.model.rotary_emb.to(dtype)
        plain = TEXTS.greedy(target, inputs, max_new_tokens=16)
        assert torch.equal(TEXTS.greedy(target, inputs, drafter, 3, max_new_tokens=16), plain)
        assert drafter.stats.engine == "static"
