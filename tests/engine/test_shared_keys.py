"""Targets with layers that read the keys and values of earlier ones, as Gemma 3n and Gemma 4 have them."""

from functools import cache, partial

import lossless
import pytest
import torch
from case_counts import cases
from graph_stand_ins import replay_on_cpu
from lossless import PROMPTS, continuations
from oracle import OracleDrafter, copy_of, random_draft_model, random_eagle3
from targets import build_target, padded_prompts
from transformers import DynamicCache

pytestmark = pytest.mark.core

MAX_NEW_TOKENS = 16
WINDOWS = {"sliding_window": 7, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8}
SETTINGS = {
    # Embeddings of every layer, and another MLP in the layers that have no keys.
    "gemma4_text": {
        **WINDOWS,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 3,
        "global_head_dim": 16,
        "use_double_wide_mlp": True,
    },
    # Values that are the keys, and experts beside the MLP.
    "gemma4_text moe": {
        **WINDOWS,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 16,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "gemma3n_text": {
        **WINDOWS,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 3,
        "intermediate_size": [64] * 6,
        "activation_sparsity_pattern": [0.5] * 3 + [0.0] * 3,
        "altup_num_inputs": 2,
        "laurel_rank": 8,
    },
}
greedy = partial(lossless.greedy, max_new_tokens=MAX_NEW_TOKENS)


@cache
def target_of(name):
    return build_target(name.split()[0], **SETTINGS[name])


@cache
def plain_output(name, lengths):
    return greedy(target_of(name), padded_prompts(list(lengths)))


def check(name, lengths, drafter_of, num_draft_tokens=3, engine="static", **options):
    target, inputs, plain = target_of(name), padded_prompts(lengths), plain_output(name, tuple(lengths))
    drafter = drafter_of(target, inputs, plain)
    assert torch.equal(greedy(target, inputs, drafter, num_draft_tokens, **options), plain)
    assert drafter.stats.engine == engine, drafter.stats.reason
    return drafter


def oracle(target, inputs, plain, accuracy=0.6):
    lengths = inputs["attention_mask"].sum(dim=1).tolist()
    return OracleDrafter(target, continuations(inputs, plain), lengths, accuracy)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("lengths", [PROMPTS[3], PROMPTS[1], [40, 9, 33]], ids=str)
def test_greedy_is_identical(name, lengths):
    for accuracy, num in cases([(0.0, 1), (0.6, 3), (1.0, 7)], [(0.6, 3)]):
        check(name, lengths, partial(oracle, accuracy=accuracy), num)
    check(name, lengths, oracle, prefill_chunk_size=7)
    assert len(plain_output(name, tuple(lengths)).unique()) > 4


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", [copy_of, random_draft_model])
def test_draft_models(name, kind):
    drafter = check(name, PROMPTS[3], lambda target, *_: kind(target))
    if kind is copy_of:
        assert drafter.stats.acceptance_length == 4


@pytest.mark.parametrize("name", ["gemma4_text", "gemma4_text moe"])
@pytest.mark.parametrize("engine", ["static", "stock"])
def test_hidden_states_of_the_last_layers(name, engine):
    """Layers without keys of their own may run over the last token only, where nobody reads what they compute."""
    lengths = PROMPTS[3] if engine == "static" else PROMPTS[1]
    check(name, lengths, lambda target, *_: random_eagle3(target).configure(engine=engine), engine=engine)
    if engine == "static":
        first = [9, 21, 4]
        drafts = []
        for size in (None, 64, 5):
            drafter = check(name, first, lambda target, *_: random_eagle3(target), prefill_chunk_size=size)
            drafts.append((drafter.stats.rounds, drafter.stats.accepted))
        assert drafts[0] == drafts[1] == drafts[2]


@pytest.mark.parametrize("name", SETTINGS)
def test_caches(name):
    """The caller's cache has as many layers as have keys of their own."""
    target, drafter, texts = target_of(name), random_draft_model(target_of(name)), []
    first = padded_prompts([20, 12])
    for assistant in (None, drafter):
        cache = DynamicCache(config=target.config)
        out = greedy(target, first, assistant, 3, max_new_tokens=6, past_key_values=cache)
        longer = torch.cat([out, padded_prompts([4, 4], seed=1)["input_ids"]], dim=1)
        mask = torch.cat([first["attention_mask"], torch.ones(2, 10, dtype=torch.int64)], dim=1)
        texts.append(greedy(target, {"input_ids": longer, "attention_mask": mask}, assistant, 3, past_key_values=cache))
    assert torch.equal(*texts) and drafter.stats.engine == "static"


@pytest.mark.parametrize("name", SETTINGS)
def test_replayed_graphs(monkeypatch, name):
    capture = replay_on_cpu(monkeypatch)
    target = target_of(name)
    drafter = random_draft_model(target)
    for lengths in ([5, 3], [4, 5]):
        inputs = padded_prompts(lengths)
        assert torch.equal(greedy(target, inputs, drafter, 3), plain_output(name, tuple(lengths)))
    assert capture.count > 0
