"""Targets with indexers, which choose the tokens that a query sees (DeepSeek-V3.2): their keys are kept by slot."""

from contextlib import ExitStack
from functools import cache, partial

import pytest
import torch
from bulk import check_rows, prompts_of
from case_counts import cases, num_cases
from graph_stand_ins import replay_on_cpu
from lossless import PROMPTS, GreedyTexts, oracle
from oracle import copy_of, random_draft_model, random_eagle3, random_mtp
from targets import build_target, padded_prompts
from transformers import CONFIG_MAPPING, DynamicCache

from hf_specdec.host.caches import OUTPUT_NAME
from hf_specdec.patching.attention import ragged_attention

LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    # With few heads many scores are zero, and which of equals are chosen is open.
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 7,
}
KINDS = [name for name in ("deepseek_v32", "glm_moe_dsa") if name in CONFIG_MAPPING]


@cache
def target_of(name, **options):
    target = build_target(name, **LATENT | options)
    with torch.no_grad():
        # Otherwise that of padding is zero, and so are all scores of an indexer for it.
        target.get_input_embeddings().weight.normal_(std=0.3)
    return target


TEXTS = GreedyTexts(target_of, max_new_tokens=num_cases(24, 16))


@pytest.mark.core_for(lengths=[(70, 9, 33)])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("lengths", cases([tuple(PROMPTS[3]), (9,), (70, 9, 33)], [(9,), (70, 9, 33)]), ids=str)
def test_greedy_is_identical(name, lengths):
    for accuracy, num in cases([(0.0, 1), (0.6, 3), (1.0, 7)], [(0.6, 3)]):
        TEXTS.check(name, lengths, partial(oracle, accuracy=accuracy), num)
    TEXTS.check(name, lengths, oracle, prefill_chunk_size=7)
    assert len(TEXTS.plain(name, lengths).unique()) > 4


def test_texts_depend_on_the_indexers():
    """What would go unnoticed otherwise: that a query sees all tokens."""
    inputs = padded_prompts(PROMPTS[3])
    every = target_of(KINDS[0], index_topk=200)
    assert not torch.equal(TEXTS.greedy(every, inputs), TEXTS.plain(KINDS[0], PROMPTS[3]))


@pytest.mark.parametrize("kind", [copy_of, random_draft_model, random_eagle3])
def test_drafters(kind):
    TEXTS.check_draft_model(KINDS[0], PROMPTS[3], kind)


@pytest.mark.core
@pytest.mark.parametrize("name", KINDS)
def test_modules_with_indexers_are_refused(name):
    """When they are made: their layers are given no masks."""
    with pytest.raises(ValueError, match=f"'{name}' cannot be those of MTP modules: they have indexers"):
        random_mtp(target_of(name))


@pytest.mark.core
@pytest.mark.parametrize("name", KINDS)
def test_a_pass_of_others_that_begins_before_the_target_is_patched(name):
    """It has made its mask for the attention that the target has otherwise, and ends with it."""
    target, prompts = target_of(name), padded_prompts([12])
    with torch.no_grad(), ExitStack() as stack:
        alone = target(**prompts).logits
        hook = target.model.layers[1].register_forward_pre_hook(
            lambda *_: stack.enter_context(ragged_attention(target))
        )
        stack.callback(hook.remove)
        assert torch.equal(target(**prompts).logits, alone)


def test_replayed_graphs(monkeypatch):
    replay_on_cpu(monkeypatch)
    TEXTS.check_replayed(KINDS[0], random_draft_model(target_of(KINDS[0])), [[5, 3], [4, 5]])


@pytest.mark.core
def test_rows_that_come_and_go():
    target = target_of(KINDS[0])
    check_rows(target, copy_of(target), prompts_of((5, 12, 3, 9, 2)))


@pytest.mark.core
def test_caches_are_left_as_plain_generation_leaves_them():
    """Keys of indexers included, which only the model writes."""
    target, first, caches = target_of(KINDS[0]), padded_prompts([20]), []
    for assistant in (None, random_draft_model(target)):
        caches.append(cache := DynamicCache(config=target.config))
        text = TEXTS.greedy(target, first, assistant, 3, max_new_tokens=6, **{OUTPUT_NAME: cache})
    for plain, ours in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.allclose(plain.keys, ours.keys, atol=1e-4)
        assert torch.allclose(plain.indexer_keys, ours.indexer_keys, atol=1e-4)
    longer = {"input_ids": torch.cat([text, text[:, :3]], dim=1)}
    longer["attention_mask"] = torch.ones_like(longer["input_ids"])
    texts = [TEXTS.greedy(target, longer, **{OUTPUT_NAME: cache}) for cache in caches]
    assert torch.equal(*texts)
