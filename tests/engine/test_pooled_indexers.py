"""Hybrids with indexers that choose pools of tokens, and n-gram embeddings (Qwen4-exp, GLM-5-next)."""

from functools import cache, partial

import pytest
import torch
from bulk import check_rows, prompts_of
from case_counts import cases
from graph_stand_ins import replay_on_cpu
from lossless import PROMPTS, GreedyTexts, oracle
from oracle import copy_of, random_draft_model, random_eagle3
from targets import PAD, build_target, padded_prompts, set_policy
from transformers import AutoConfig, AutoModelForImageTextToText, DynamicCache

from hf_specdec.cache import recurrent_layers
from hf_specdec.host.caches import OUTPUT_NAME
from hf_specdec.patching.plugins import indexer_probes

LAYERS = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
# Two pools of four tokens, and the tokens after the last complete pool: fewer than the prompts have.
POOL, BUDGET = 4, 8
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
QWEN = {
    "layer_types": LAYERS,
    "num_experts": 4,
    "shared_expert_intermediate_size": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "hc_count": 2,
    "hc_lowrank": 16,
    "ple_layer_ids": [1, 3],
    "ngram_size": 3,
    "heads_per_ngram": 4,
    "ngram_vocab_size_base": 211,
    "split_ngram_parts": 1,
    # With few heads many scores are zero, and which of equals are chosen is open.
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": BUDGET,
    "indexer_compress_ratio": POOL,
    # What n-gram embeddings take for the tokens before a text, and between texts; `generate()` is told of none.
    "eos_token_id": 3,
    **EXPERTS,
}
GLM = {
    "model_type": "glm5_next_text",
    # The third layer sees what the indexer of the second has chosen.
    "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
    "indexer_types": ["full", "full", "shared", "full"],
    "num_hidden_layers": 4,
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": PAD,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "n_routed_experts": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": BUDGET,
    "index_kpool": POOL,
    **EXPERTS,
}
VISION = {"depth": 1, "hidden_size": 32, "num_heads": 4, "intermediate_size": 32, "out_hidden_size": 32}


def build_glm(seed=0, **options):
    config = AutoConfig.for_model(
        "glm5_next", text_config=GLM | options, vision_config=VISION | {"projection_intermediate_size": 32}
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = PAD, None
    return model


@cache
def target_of(name, **options):
    options = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
    target = build_target("qwen4_exp_text", **QWEN | options) if name == "qwen4-exp" else build_glm(**options)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-3, 0.7)
            elif name.endswith(
                ("dt_bias", "hc.base", "hc.scale", "hc.fn", "compress_ape", "compress_gate", "conv1d.weight")
            ):
                parameter.normal_(std=0.5)
        # Otherwise that of padding is zero, and so are all scores of an indexer for it.
        target.get_input_embeddings().weight.normal_(std=0.3)
    return target


KINDS = ["qwen4-exp", "glm5-next"]
TEXTS = GreedyTexts(target_of, max_new_tokens=20)


@pytest.mark.core_for(lengths=[(70, 9, 33)])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("lengths", cases([(1, 12, 5), (9,), (70, 9, 33)], [(1, 12, 5), (70, 9, 33)]), ids=str)
def test_greedy_is_identical(name, lengths):
    for accuracy, num in cases([(0.0, 1), (0.6, 3), (1.0, 7)], [(0.6, 3)]):
        TEXTS.check(name, lengths, partial(oracle, accuracy=accuracy), num)
    TEXTS.check(name, lengths, oracle, prefill_chunk_size=7)
    assert len(TEXTS.plain(name, lengths).unique()) > 8


@pytest.mark.parametrize("name", KINDS)
def test_texts_depend_on_what_is_new(name, monkeypatch):
    """What would go unnoticed otherwise: that a query sees all tokens; that inputs before a block are forgotten."""
    lengths = PROMPTS[3]
    every = target_of(name, **({"indexer_budget": 200} if name == "qwen4-exp" else {"index_topk": 200}))
    assert not torch.equal(TEXTS.greedy(every, padded_prompts(lengths)), TEXTS.plain(name, lengths))
    if name == "qwen4-exp":
        TEXTS.check(name, lengths, oracle)  # the equivalence check would find it, too
        with_former = recurrent_layers.RecurrentLayer.with_former

        def forget(layer, inputs, index, count, fill):
            whole = with_former(layer, inputs, index, count, fill)
            whole[:, :count] = fill
            return whole

        monkeypatch.setattr(recurrent_layers.RecurrentLayer, "with_former", forget)
        with pytest.raises(AssertionError, match="instead of"):
            TEXTS.check(name, lengths, oracle)


@pytest.mark.parametrize("name", KINDS)
def test_drafters(name):
    target = target_of(name)
    for num in cases((1, 3, 7), (3,)):
        drafter = TEXTS.check(name, PROMPTS[3], lambda *_: copy_of(target), num)
        assert drafter.stats.accepted == drafter.stats.drafted > 0
    TEXTS.check(name, PROMPTS[3], lambda *_: random_draft_model(target))
    with pytest.raises(ValueError, match=r"reads hidden states of .* its layers return .* a draft model, which reads"):
        random_eagle3(target)


@pytest.mark.parametrize("name", KINDS)
def test_replayed_graphs(name, monkeypatch):
    replay_on_cpu(monkeypatch)
    TEXTS.check_replayed(name, copy_of(target_of(name), noise=0.02), [[5, 13], [4, 15]])


@pytest.mark.parametrize("name", KINDS)
def test_long_prompts_run_through_the_models_own_functions(name, monkeypatch):
    monkeypatch.setattr(recurrent_layers, "MOST_STEPS", 8)
    TEXTS.check(name, (30, 2, 21), oracle, prefill_chunk_size=12)


@pytest.mark.parametrize("name", KINDS)
def test_rows_that_come_and_go(name):
    target = target_of(name)
    check_rows(target, copy_of(target, noise=0.02), prompts_of((5, 20, 3, 13)))


@pytest.mark.parametrize("name", KINDS)
def test_caches_are_left_as_plain_generation_leaves_them(name):
    target, first, caches = target_of(name), padded_prompts([20]), []
    for assistant in (None, copy_of(target, noise=0.02)):
        caches.append(known := DynamicCache(config=target.config.get_text_config()))
        text = TEXTS.greedy(target, first, assistant, 3, max_new_tokens=6, **{OUTPUT_NAME: known})
    for plain, ours in zip(caches[0].layers, caches[1].layers, strict=True):
        for one in ("keys", "indexer_keys"):
            if getattr(plain, one, None) is not None:
                assert torch.allclose(getattr(plain, one), getattr(ours, one), atol=1e-4)
    longer = {"input_ids": torch.cat([text, text[:, :3]], dim=1)}
    longer["attention_mask"] = torch.ones_like(longer["input_ids"])
    assert torch.equal(*(TEXTS.greedy(target, longer, **{OUTPUT_NAME: known}) for known in caches))


@pytest.mark.parametrize("name", KINDS)
def test_modules_and_files_are_restored(name):
    target = target_of(name)
    before = [dict(vars(module)) for module in target.modules()]
    TEXTS.check(name, PROMPTS[3], oracle)
    assert [dict(vars(module)).keys() for module in target.modules()] == [one.keys() for one in before]


def test_other_indexers_are_left_as_they_are(monkeypatch):
    """An indexer that has what a known one has, and computes something else."""
    target = target_of("qwen4-exp")
    indexer = target.model.layers[1].self_attn.indexer
    kind = indexer_probes.kind_of(indexer)
    assert indexer_probes._form_of(indexer, kind) is not None
    monkeypatch.setattr(indexer_probes, "_found", {})
    other = kind._replace(choose=lambda module, **given: kind.choose(module, **given).clamp(min=0))
    monkeypatch.setattr(type(other), "arguments", kind.arguments)
    assert indexer_probes._form_of(indexer, other) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("triton", [False, True])
def test_round_with_the_gpu_policy(name, triton, monkeypatch):
    """One compiled graph, also with kernels in the interpreter: what a GPU runs."""
    few = (
        {"ple_layer_ids": (1,)}
        if name == "qwen4-exp"
        else {"mlp_layer_types": ("dense", "sparse"), "indexer_types": ("full",) * 2}
    )
    target = target_of(name, layer_types=tuple(LAYERS[:2]), num_hidden_layers=2, **few)
    inputs = padded_prompts([5, 11])
    plain = TEXTS.greedy(target, inputs, max_new_tokens=3)
    for option, value in (("triton", triton), ("transposed_linear", False), ("fused_linear", True)):
        set_policy(monkeypatch, "cpu", **{option: value})
    replay_on_cpu(monkeypatch)
    set_policy(monkeypatch, "cpu", compiler="aot_eager")
    drafter = oracle(target, inputs, plain, accuracy=1.0)  # a single round: without kernels each has another span
    drafter.configure(compile_rounds=True)
    assert torch.equal(TEXTS.greedy(target, inputs, drafter, 2, max_new_tokens=3), plain)
    assert drafter.stats.execution == "captured in one graph, compiled"
