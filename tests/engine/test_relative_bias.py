"""Targets whose attention adds biases by the distance of tokens, with short convolutions around it (Inkling)."""

from functools import cache, partial

import pytest
import torch
from bulk import check_rows, prompts_of
from graph_stand_ins import replay_on_cpu
from lossless import PROMPTS, GreedyTexts, oracle
from oracle import copy_of, random_draft_model, random_eagle3
from targets import build_target, padded_prompts
from transformers import CONFIG_MAPPING

from hf_specdec.patching import attention

SETTINGS = {
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
    "sliding_window_size": 7,
    # Keys farther away have no bias.
    "rel_extent": 12,
    "d_rel": 8,
    "conv_kernel_size": 4,
    "swa_head_dim": 8,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
}
OWN = {
    "inkling_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "inkling2_text": {"unpadded_vocab_size": 96},
}
KINDS = [name for name in OWN if name in CONFIG_MAPPING]


@cache
def target_of(name, **options):
    target = build_target(name, **SETTINGS | OWN[name] | options)
    with torch.no_grad():
        for path, parameter in target.named_parameters():
            if path.endswith(("conv1d.weight", "static_weight", "rel_logits_proj.proj")):
                parameter.normal_(std=0.7)
    return target


TEXTS = GreedyTexts(target_of, max_new_tokens=20)


@pytest.mark.core_for(lengths=[[70, 9, 33]])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("lengths", [PROMPTS[1], [70, 9, 33]], ids=str)
def test_greedy_is_identical(name, lengths):
    for accuracy, num in [(0.6, 3), (1.0, 7)]:
        TEXTS.check(name, lengths, partial(oracle, accuracy=accuracy), num)
    TEXTS.check(name, lengths, oracle, prefill_chunk_size=7)
    assert len(TEXTS.plain(name, lengths).unique()) > 4


@pytest.mark.parametrize("name", KINDS)
def test_texts_tell_distances(name, monkeypatch):
    """A bias of the next distance, and none, would show."""
    run = attention.biased_attention
    TEXTS.check(name, PROMPTS[3], oracle)
    for change in (lambda biases: biases.roll(1, dims=-1), torch.zeros_like):

        def changed(query, key, value, positions, biases, *args, change=change):
            return run(query, key, value, positions, change(biases), *args)

        monkeypatch.setattr(attention, "biased_attention", changed)
        with pytest.raises(AssertionError):
            TEXTS.check(name, PROMPTS[3], oracle)
        monkeypatch.undo()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", [copy_of, random_eagle3])
def test_drafters(name, kind):
    TEXTS.check_draft_model(name, PROMPTS[3], kind)


def test_as_draft_model_of_another_target():
    """On the stock engine, where only the drafter runs on a cache of ours."""
    target = build_target("llama")
    inputs = padded_prompts([12])
    drafter = copy_of(target_of(KINDS[-1])).configure(engine="stock")
    drafter.bind(target)
    assert torch.equal(TEXTS.greedy(target, inputs, drafter, 3), TEXTS.greedy(target, inputs))


@pytest.mark.parametrize("name", KINDS)
def test_replayed_graphs(monkeypatch, name):
    replay_on_cpu(monkeypatch)
    TEXTS.check_replayed(name, random_draft_model(target_of(name)), [[5, 3], [4, 5]])


def test_rows_that_come_and_go():
    target = target_of(KINDS[-1])
    check_rows(target, copy_of(target), prompts_of((5, 12, 3, 9, 2)))


@pytest.mark.parametrize("name", KINDS)
def test_queries_that_are_scaled_by_the_length_of_the_text(name):
    """From a length on; before it the static engine runs the call."""
    for new, engine in ((8, "static"), (9, "stock")):
        target, inputs = target_of(name, log_scaling_n_floor=20), padded_prompts([12])
        plain = TEXTS.greedy(target, inputs, max_new_tokens=new)
        drafter = oracle(target, inputs, plain)
        assert torch.equal(TEXTS.greedy(target, inputs, drafter, 3, max_new_tokens=new), plain)
        assert drafter.stats.engine == engine, drafter.stats.reason
