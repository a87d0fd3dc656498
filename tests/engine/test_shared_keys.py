"""Targets with layers that read the keys and values of earlier ones, as Gemma 3n and Gemma 4 have them."""

from functools import cache, partial

import pytest
from case_counts import cases, num_cases
from graph_stand_ins import replay_on_cpu
from lossless import PROMPTS, GreedyTexts, oracle
from oracle import copy_of, random_draft_model, random_eagle3
from targets import build_target

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


@cache
def target_of(name):
    return build_target(name.split()[0], **SETTINGS[name])


TEXTS = GreedyTexts(target_of, max_new_tokens=num_cases(16, 12))


@pytest.mark.core_for(lengths=[(40, 9, 33)])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("lengths", cases([tuple(PROMPTS[3]), (9,), (40, 9, 33)], [(9,), (40, 9, 33)]), ids=str)
def test_greedy_is_identical(name, lengths):
    for accuracy, num in cases([(0.0, 1), (0.6, 3), (1.0, 7)], [(0.6, 3)]):
        TEXTS.check(name, lengths, partial(oracle, accuracy=accuracy), num)
    TEXTS.check(name, lengths, oracle, prefill_chunk_size=7)
    assert len(TEXTS.plain(name, lengths).unique()) > 4


@pytest.mark.core_for(kind=[copy_of])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", [copy_of, random_draft_model])
def test_draft_models(name, kind):
    TEXTS.check_draft_model(name, PROMPTS[3], kind)


@pytest.mark.parametrize("name", ["gemma4_text", "gemma4_text moe"])
@pytest.mark.parametrize("engine", ["static", "stock"])
def test_hidden_states_of_the_last_layers(name, engine):
    """Layers without keys of their own may run over the last token only, where nobody reads what they compute."""
    lengths = PROMPTS[3] if engine == "static" else PROMPTS[1]
    TEXTS.check(name, lengths, lambda target, *_: random_eagle3(target).configure(engine=engine), engine=engine)
    if engine == "static":
        first = [9, 21, 4]
        drafts = []
        for size in (None, 64, 5):
            drafter = TEXTS.check(name, first, lambda target, *_: random_eagle3(target), prefill_chunk_size=size)
            drafts.append((drafter.stats.rounds, drafter.stats.accepted))
        assert drafts[0] == drafts[1] == drafts[2]


@pytest.mark.parametrize("name", SETTINGS)
def test_caches(name):
    """The caller's cache has as many layers as have keys of their own."""
    TEXTS.check_continued_cache(name)


@pytest.mark.parametrize("name", SETTINGS)
def test_replayed_graphs(monkeypatch, name):
    replay_on_cpu(monkeypatch)
    TEXTS.check_replayed(name, random_draft_model(target_of(name)), [[5, 3], [4, 5]])
