"""Validation of calls: an error that names the argument, and no side effects."""

import logging
from itertools import product
from pathlib import PosixPath
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from case_counts import cases
from lossless import PROMPTS
from model_state import traces
from oracle import RANDOM_DRAFTERS, SELDOM, OracleDrafter, copy_of, random_eagle3
from targets import NUM_LAYERS, STOCK_FAMILY, build_target, padded_prompts, tiny_target
from torch.distributed.fsdp import fully_shard
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    SynthIDTextWatermarkingConfig,
    T5Config,
    T5ForConditionalGeneration,
    WatermarkingConfig,
)
from transformers.cache_utils import DynamicLayer, QuantizedLayer

from hf_specdec import AutoDrafter, Drafter, DrafterConfig
from hf_specdec.config import Eagle3Config
from hf_specdec.drafters import Eagle3Drafter
from hf_specdec.graphs.buckets import useful_drafts
from hf_specdec.host.caches import OUTPUT_NAME
from hf_specdec.integration.dispatch import UNUSED_SETTINGS
from hf_specdec.integration.validation import _OTHER_DRAFTERS
from hf_specdec.sampling.logits import RowTemperature


def refused(target, drafter, match, inputs=None, **options):
    """Assert that a call is refused with an error of several parts, and that nothing has changed by it."""
    before, bound = traces(target), drafter.is_bound
    inputs = padded_prompts(PROMPTS[1]) if inputs is None else inputs
    with pytest.raises(ValueError, match=match) as error:
        target.generate(**inputs, **{"max_new_tokens": 6, "assistant_model": drafter, **options})
    assert traces(target) == before and drafter.is_bound == bound
    return str(error.value)


@pytest.fixture
def target():
    return tiny_target("llama")


@pytest.fixture
def drafter(target):
    return random_eagle3(target)


def llama(**options):
    sizes = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **options})).eval()


# ---- drafters that do not fit


def test_the_base_class_is_no_drafter(drafter, tmp_path):
    drafter.save_pretrained(tmp_path)
    with pytest.raises(
        TypeError, match=r"base class of all drafters; AutoDrafter.from_pretrained\(..., target=model\)"
    ):
        Drafter.from_pretrained(tmp_path)


@pytest.mark.core
def test_unbound_drafter(target, drafter):
    unbound = Eagle3Drafter(drafter.config)
    message = refused(target, unbound, "Eagle3Drafter is not bound to a target")
    assert "drafter.bind(model)" in message


@pytest.mark.core
def test_drafter_bound_to_another_target(drafter):
    other, before = llama(), drafter.config.target
    refused(other, drafter, r"bound to another target; call drafter\.bind\(model\) first")
    with pytest.raises(ValueError, match="bound to another target"):
        drafter.sync_with(other)
    with pytest.raises(TypeError, match="target is a str; expected the model that generates"):
        drafter.sync_with("org/target")
    assert drafter.config.target is before


@pytest.mark.core
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"hidden_size": 64}, "made for a target with hidden_size 32, but llama has hidden_size 64"),
        ({"vocab_size": 128}, "made for a vocabulary of 96 tokens, but llama has 128"),
        ({"num_hidden_layers": 1}, r"reads the auxiliary hidden states \[0, 1, 2\], but llama has 1 layers"),
    ],
)
def test_drafter_for_another_model(target, drafter, options, match):
    other = llama(**options)
    before = traces(other)
    unbound = Eagle3Drafter(drafter.config)
    for one in (unbound, drafter):
        with pytest.raises(ValueError, match=match) as error:
            one.bind(other)
        assert "drafter for another model" in str(error.value)
    assert not unbound.is_bound and unbound.aux_hidden_state_layer_ids == drafter.config.aux_hidden_state_layer_ids
    assert traces(other) == before
    plain = target.generate(**padded_prompts(PROMPTS[1]), max_new_tokens=6)
    out = target.generate(**padded_prompts(PROMPTS[1]), max_new_tokens=6, assistant_model=drafter)
    assert torch.equal(out, plain), "a refused bind() broke the binding before it"


def test_default_layer_ids_need_a_deep_enough_target(drafter):
    config = Eagle3Config(
        **{**drafter.config.to_dict(), "aux_hidden_state_layer_ids": None, "num_aux_hidden_states": 3}
    )
    unbound = Eagle3Drafter(config)
    with pytest.raises(
        ValueError,
        match=r"reads 3 auxiliary hidden states, but the rule for 4 layers .* \[1, 2\]; pass `aux_hidden_state_",
    ):
        unbound.bind(llama(num_hidden_layers=4))
    assert not unbound.is_bound


@pytest.mark.parametrize("what", ["embedding", "head"])
def test_missing_weights_to_share(drafter, what):
    other = llama(hidden_size=64)
    options = {f"own_{what}": False, "target_hidden_size": 64}
    unbound = Eagle3Drafter(Eagle3Config(**{**drafter.config.to_dict(), **options}))
    with pytest.raises(ValueError, match=f"no {what} of its own, and the target's is 64 wide .* needs 32"):
        unbound.bind(other)
    with pytest.raises(ValueError, match=f"no {what} of its own and must share the target's, but that is offloaded"):
        unbound.bind(llama(hidden_size=64).to("meta"))
    assert not unbound.is_bound


@pytest.mark.core
def test_drafter_without_weights(target, drafter):
    refused(target, drafter.to("meta"), "drafter is on the meta device, so it has no weights")


def test_drafter_on_another_device(target, drafter, monkeypatch):
    monkeypatch.setattr(Eagle3Drafter, "device", torch.device("cuda", 1))
    message = refused(target, drafter, "drafter is on cuda:1 and LlamaForCausalLM on cpu; expected the same device")
    assert "drafter.to('cpu')" in message


def test_drafter_without_propose(target):
    class Nothing(Drafter):
        device = torch.device("cpu")

    nothing = Nothing(DrafterConfig(vocab_size=96))
    with pytest.raises(NotImplementedError, match=r"Nothing does not implement bind\(\)"):
        nothing.bind(target)
    nothing._target_config = target.config
    before = traces(target)
    with pytest.raises(NotImplementedError, match=r"Nothing does not implement propose\(\)"):
        target.generate(**padded_prompts(PROMPTS[1]), assistant_model=nothing, max_new_tokens=4)
    assert traces(target) == before


# ---- settings


@pytest.mark.core_for(number=[0])
@pytest.mark.parametrize("number", [0, -3, 2.5, True])
def test_number_of_drafts(target, drafter, number):
    match = rf'num_assistant_tokens is {number!r}; expected an integer of at least 1 .*, or "auto"\.'
    with pytest.raises(ValueError, match=match):
        drafter.configure(num_assistant_tokens=number)
    assert drafter.num_assistant_tokens == drafter.config.num_assistant_tokens
    with pytest.raises(ValueError, match=rf"num_assistant_tokens is {number!r}; expected"):
        DrafterConfig(num_assistant_tokens=number)
    for engine in ("static", "stock"):
        drafter.configure(engine=engine)
        refused(target, drafter, match, num_assistant_tokens=number)
        refused(target, drafter, match, generation_config=GenerationConfig(num_assistant_tokens=number))


def test_other_settings(drafter):
    with pytest.raises(ValueError, match='engine is \'fast\'; expected "auto", "static" or "stock"'):
        drafter.configure(engine="fast")
    with pytest.raises(ValueError, match="draft_probs is 'yes'; expected True, False or \"auto\""):
        drafter.configure(draft_probs="yes")
    with pytest.raises(ValueError, match='verification is \'tree\'; expected "token", "block" or "match"'):
        drafter.configure(verification="tree")
    for name in ("draft_probs", "engine", "verification", "compile_rounds", "batch_invariant", "kv_cache_dtype"):
        with pytest.raises(ValueError, match=f"{name} is 'x'; expected "):
            setattr(drafter, name, "x")
    assert drafter.engine == "auto" and drafter.draft_probs == "auto" and drafter.verification == "token"
    with pytest.raises(ValueError, match="draft_vocab_size is 200; expected 1 to vocab_size = 96"):
        DrafterConfig(vocab_size=96, draft_vocab_size=200)


# ---- targets and calls that cannot be sped up


@pytest.mark.core
def test_target_in_training_mode():
    target = llama().train()
    drafter = random_eagle3(target)
    refused(target, drafter, r"LlamaForCausalLM is in training mode.*; call model\.eval\(\) first")


def test_offloaded_target(drafter):
    target = llama()
    drafter.bind(target)
    target.to("meta")
    refused(target, drafter, "first weights of LlamaForCausalLM are offloaded .* expected them in memory")


@pytest.mark.core
def test_encoder_decoder(drafter):
    sizes = {"vocab_size": 96, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4}
    target = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
    refused(target, drafter, "T5ForConditionalGeneration is an encoder-decoder; hf_specdec drafts for decoder-only")


@pytest.mark.core
def test_encoder(drafter):
    refused(build_target("bert", is_decoder=False), drafter, "BertLMHeadModel is an encoder; hf_specdec drafts for")


@pytest.mark.core_for(engine=["static"])
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"use_cache": False}, "use_cache is False, .* drop that option"),
        ({"num_beams": 3}, "num_beams"),
        ({"num_beams": 3, "do_sample": True}, "num_beams"),
        ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight is 0.5, which accepts drafts lossily"),
        ({"seeds": [1, 2]}, r"seeds has shape \(2,\), but the call has 1 rows"),
        ({"seeds": [0.5]}, r"seeds is \[0.5\]; expected integers of 64 bits"),
        ({"seeds": [2**64]}, r"seeds is \[18446744073709551616\]; expected integers of 64 bits"),
        ({"seeds": ["a"]}, r"seeds is \['a'\]; expected integers of 64 bits"),
        ({"do_sample": False, "generator": 42}, "generator is 42; expected a torch.Generator, or a seed as seeds="),
        ({"do_sample": True, "generator": 42}, "generator is 42; expected a torch.Generator, or a seed as seeds="),
        (
            {"synced_gpus": True},
            r"synced_gpus is set: .* \(FSDP or .* expected a target that a process can run by itself",
        ),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens is 3, which asks for drafts of another kind"),
        ({"assistant_early_exit": 2}, "assistant_early_exit is 2, .* Drop that option or assistant_model"),
        ({"use_mtp": True}, "use_mtp is True, .* Drop that option or assistant_model"),
        ({"prefill_chunk_size": 0}, "prefill_chunk_size is 0; expected an int of at least 1, or None"),
        ({"prefill_chunk_size": -1}, "prefill_chunk_size is -1; expected an int of at least 1, or None"),
        ({"prefill_chunk_size": 2.0}, "prefill_chunk_size is 2.0; expected an int of at least 1, or None"),
        ({"dola_layers": []}, r"dola_layers is \[\], which asks for DoLa decoding, .* Drop that option"),
        ({"dola_layers": "low"}, "dola_layers is 'low', which asks for DoLa decoding, .* Drop that option"),
        (
            {"custom_generate": lambda model, input_ids, **_: input_ids},
            "custom_generate is '<lambda>', which transformers calls without a drafter; expected none",
        ),
        ({"speculation_type": "dflash"}, "speculation_type is 'dflash', .* Drop that option or assistant_model"),
        ({"assistant_tokenizer": object()}, "assistant_tokenizer was given, .* Drop that option"),
        ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor keeps state .* without a drafter"),
        (
            {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[3, 5, 7]), "do_sample": True},
            "SynthIDTextWatermarkLogitsProcessor keeps state .* without a drafter",
        ),
    ],
)
@pytest.mark.parametrize("engine", ["static", "stock"])
def test_unsupported_options(target, drafter, options, match, engine):
    refused(target, drafter.configure(engine=engine), match, **options)


class RoundedLayer(QuantizedLayer):
    """As transformers' layers that quantise, in eighths."""

    def _quantize(self, tensor, axis):
        return (tensor * 8).round().to(torch.int8)

    def _dequantize(self, quantised):
        return quantised / 8


class ShrinkingLayer(DynamicLayer):
    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(key_states, value_states / 2, *args, **kwargs)


class ShrinkingCache(DynamicCache):
    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(key_states, value_states / 2, *args, **kwargs)


def cache_with_a_function():
    cache = DynamicCache()
    cache.update = lambda *args, **kwargs: DynamicCache.update(cache, *args, **kwargs)
    return cache


@pytest.mark.core_for(engine=["static"])
@pytest.mark.parametrize("engine", ["static", "stock"])
@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {OUTPUT_NAME: Cache(layers=[RoundedLayer() for _ in range(NUM_LAYERS)])},
            "is a Cache, which .* rounded",
        ),
        (
            {OUTPUT_NAME: Cache(layer_class_to_replicate=ShrinkingLayer)},
            r"update\(\) of ShrinkingLayer is not tr",
        ),
        ({OUTPUT_NAME: ShrinkingCache()}, r"a ShrinkingCache, in which update\(\) of ShrinkingCache is not tra"),
        ({OUTPUT_NAME: cache_with_a_function()}, r"update\(\) of DynamicCache is not transformers' own"),
    ],
)
def test_caches_that_change_what_they_store(target, drafter, options, match, engine):
    refused(target, drafter.configure(engine=engine), match, **options)


@pytest.mark.core
@pytest.mark.parametrize(
    ("kind", "match"), [("offloaded_static", "a static .* Drop that option"), ("quantized", "which stores rounded")]
)
def test_kinds_of_caches_that_no_engine_runs(target, drafter, kind, match):
    """They are refused before one is made, which fails where there is no GPU, or a library is not installed."""
    with pytest.raises(ValueError, match=f"cache_implementation is '{kind}', {match}"):
        target.generate(**padded_prompts([3]), max_new_tokens=3, assistant_model=drafter, cache_implementation=kind)


@pytest.mark.core_for(assistant=[AutoDrafter])
@pytest.mark.parametrize("assistant", [AutoDrafter, Eagle3Drafter])
def test_class_in_place_of_a_drafter(target, assistant):
    with pytest.raises(ValueError, match=f"assistant_model is <class .*{assistant.__name__}'>; expected a drafter"):
        target.generate(**padded_prompts(PROMPTS[1]), max_new_tokens=4, assistant_model=assistant)


@pytest.mark.parametrize("method", ["generate", "generate_batch", "init_continuous_batching"])
def test_name_or_module_around_a_drafter(target, drafter, method):
    """As adapters, compilers and parallel modules are; transformers would ignore it in continuous batching."""
    prompts = {"generate": [torch.tensor([[3, 4]])], "generate_batch": [[[3, 4]]], "init_continuous_batching": []}
    wrong = {
        "assistant_model is a DataParallel around a Eagle3Drafter; expected the draft": torch.nn.DataParallel(drafter),
        r"assistant_model is 'OWNER/NAME'; .* AutoDrafter.from_pretrained\(..., target=model\) loads": "OWNER/NAME",
        r"assistant_model is PosixPath\('drafter'\); expected a drafter": PosixPath("drafter"),
    }
    for match, assistant in wrong.items():
        with pytest.raises(ValueError, match=match):
            getattr(target, method)(*prompts[method], assistant_model=assistant, max_new_tokens=4)


@pytest.mark.parametrize("engine", ["static", "stock"])
def test_use_cache_false_in_a_config(engine):
    """Training leaves the setting behind in a model; a call that asks for it is refused, see above."""
    target = llama(use_cache=False)
    target.generation_config.use_cache = False
    drafter = random_eagle3(target).configure(engine=engine)
    options = {**padded_prompts(PROMPTS[1]), "max_new_tokens": 8, "do_sample": False}
    plain, before = target.generate(**options), traces(target)
    out = target.generate(**options, assistant_model=drafter)
    assert torch.equal(out, plain) and drafter.stats.engine == engine and traces(target) == before
    refused(target, drafter, "use_cache is False", generation_config=GenerationConfig(use_cache=False))
    assert target.generation_config.use_cache is False


# ---- prompts


IDS = torch.tensor([[5, 9, 33, 7, 21]])


@pytest.mark.core_for(engine=["stock"])
@pytest.mark.parametrize("engine", ["static", "stock"])
@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        ({"input_ids": IDS[:0]}, r"input_ids has shape \[0, 5\]; expected \[batch, length\]"),
        ({"input_ids": IDS[:, :0]}, r"input_ids has shape \[1, 0\]; expected \[batch, length\]"),
        ({"input_ids": IDS[None]}, r"input_ids has shape \[1, 1, 5\]; expected \[batch, length\]"),
        ({"input_ids": IDS.float()}, r"input_ids is torch.float32; expected token ids, torch.int64 or torch.int32"),
        ({"input_ids": IDS.half()}, "input_ids is torch.float16; expected token ids"),
        ({"input_ids": IDS.bool()}, "input_ids is torch.bool; expected token ids"),
        ({"input_ids": IDS.to(torch.uint8)}, "input_ids is torch.uint8; expected token ids"),
        ({"attention_mask": [[0, 1, 1, 1, 1]] * 2}, r"attention_mask has shape \[2, 5\] and input_ids \[1, 5\]"),
        ({"attention_mask": [0, 1, 1, 1, 1]}, r"attention_mask has shape \[5\] and input_ids \[1, 5\]"),
        ({"attention_mask": [[0, 1, 1, 1, 1, 1]]}, r"attention_mask has shape \[1, 6\] and input_ids \[1, 5\]"),
        ({"attention_mask": [[0, 2, 2, 2, 2]]}, "attention_mask holds 2; expected 0 for padding and 1 for tokens"),
        ({"attention_mask": [[0.0, 0.5, 1.0, 1.0, 1.0]]}, "attention_mask holds 0.5; expected 0 for padding"),
    ],
)
def test_invalid_prompts(target, drafter, inputs, match, engine):
    inputs = {"input_ids": IDS, **inputs}
    if "attention_mask" in inputs:
        inputs["attention_mask"] = torch.tensor(inputs["attention_mask"])
    refused(target, drafter.configure(engine=engine), match, inputs=inputs)


@pytest.mark.core_for(token=[96], padded=[True])
@pytest.mark.parametrize("token", [96, 2000, -1])
@pytest.mark.parametrize("padded", [False, True])
def test_token_ids_outside_the_vocabulary(target, drafter, token, padded):
    """On a GPU such a token ends the process."""
    inputs = {"input_ids": torch.tensor([[5, token, 7], [4, 5, 6]])}
    if padded:
        inputs["attention_mask"] = torch.tensor([[1, 1, 1], [0, 1, 1]])
    match = f"input_ids holds the token {token}, but LlamaForCausalLM has tokens 0 to 95"
    refused(target, drafter, match, inputs=inputs)


@pytest.mark.core
def test_padding_token_outside_the_vocabulary(target, drafter):
    """It is not read."""
    inputs, strange = padded_prompts(PROMPTS[3]), padded_prompts(PROMPTS[3])
    strange["input_ids"] = strange["input_ids"].where(strange["attention_mask"] == 1, 500)
    options = {"max_new_tokens": 6, "do_sample": False}
    width, plain = inputs["input_ids"].shape[1], target.generate(**inputs, **options)
    out = target.generate(**strange, **options, assistant_model=drafter)
    assert torch.equal(out[:, width:], plain[:, width:])


@pytest.mark.core_for(engine=["static"])
@pytest.mark.parametrize("engine", ["static", "stock"])
@pytest.mark.parametrize(
    "inputs",
    [
        {"input_ids": IDS.int()},
        {"inputs": IDS, "input_ids": None},
        {"attention_mask": torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.0]])},
        {"attention_mask": torch.tensor([[False, True, True, True, True]])},
        {"max_new_tokens": 4.0},
        {"max_new_tokens": 4.5},
        {"num_return_sequences": 1},
    ],
)
def test_unusual_prompts(target, drafter, inputs, engine):
    options = {"input_ids": IDS, "max_new_tokens": 6, "do_sample": False, **inputs}
    plain = target.generate(**options)
    out = target.generate(**options, assistant_model=drafter.configure(engine=engine))
    assert torch.equal(out, plain) and out.dtype == plain.dtype


@pytest.mark.core_for(engine=["static"])
@pytest.mark.parametrize("engine", ["static", "stock"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": None, "max_length": 3},
        {"max_new_tokens": None, "max_length": 5},
        {"num_return_sequences": 2},
        {"inputs": IDS},
        {"temperature": -1.0, "do_sample": True},
    ],
)
def test_errors_of_transformers_are_unchanged(target, drafter, options, engine):
    options = {"input_ids": IDS, "max_new_tokens": 6, "do_sample": False, **options}
    with pytest.raises(ValueError) as plain:
        target.generate(**options)
    with pytest.raises(ValueError) as ours:
        target.generate(**options, assistant_model=drafter.configure(engine=engine))
    assert str(ours.value) == str(plain.value)


@pytest.mark.core_for(engine=["static"])
@pytest.mark.parametrize("engine", ["static", "stock"])
def test_number_of_drafts_from_numpy(target, drafter, engine):
    options = {"input_ids": IDS, "max_new_tokens": 6, "do_sample": False}
    number = np.int64(3)
    out = target.generate(**options, assistant_model=drafter.configure(engine=engine), num_assistant_tokens=number)
    assert torch.equal(out, target.generate(**options))
    assert drafter.stats.num_assistant_tokens == 3 and type(drafter.stats.num_assistant_tokens) is int


# ---- more drafts than remaining tokens


@pytest.mark.core_for(kind=["eagle3"])
@pytest.mark.parametrize(
    ("kind", "engine"),
    cases(
        every := list(product(RANDOM_DRAFTERS, ["static", "stock"])),
        [
            one
            for one in every
            if one[0] not in SELDOM and (one[1] == "static" or one[0] in ("eagle3", "dspark", "mtp"))
        ],
    ),
)
def test_no_drafts_beyond_the_remaining_tokens(target, kind, engine, monkeypatch):
    drafter, drawn = RANDOM_DRAFTERS[kind](target).configure(engine=engine), []
    join = drafter.join
    monkeypatch.setattr(drafter, "join", lambda *args: (drawn.append(join(*args)), drawn[-1])[1])
    options = {**padded_prompts(PROMPTS[1]), "max_new_tokens": 3, "do_sample": False}
    asked = getattr(drafter.config, "depth", 1000)  # of a drafter of blocks no more than it was trained for
    out = target.generate(**options, assistant_model=drafter, num_assistant_tokens=asked)
    assert torch.equal(out, target.generate(**options))
    assert drawn and all(proposal.tokens.shape[1] <= 3 for proposal in drawn)
    stats = drafter.stats
    assert stats.num_assistant_tokens == len(stats.drafted_per_position) == asked
    # The first token comes with the prompt, before there are drafts.
    assert sum(stats.drafted_per_position[2:]) == 0 and stats.committed == 2


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("room", [1, 2, 9])
def test_samples_do_not_depend_on_drafts_beyond_the_remaining_tokens(target, room, verification, monkeypatch):
    options = {**padded_prompts(PROMPTS[3]), "do_sample": True, "max_new_tokens": room, "seeds": 7}

    def generate(number):
        drafter = copy_of(target, noise=0.2).configure(verification=verification)
        out = target.generate(**options, assistant_model=drafter, num_assistant_tokens=number)
        return out.tolist(), [row.accepted for row in drafter.stats.rows]

    cut = generate(20)
    monkeypatch.setattr("hf_specdec.engine.lease.useful_drafts", lambda asked, room, is_kept: asked)
    assert generate(20) == cut


@pytest.mark.parametrize(
    ("asked", "room", "is_kept", "expected"),
    [(5, 3, False, 3), (5, 100, False, 5), (0, 7, False, 0), (5, 3, True, 5), (1000, 3, True, 16), (40, 20, True, 32)],
)
def test_useful_drafts(asked, room, is_kept, expected):
    assert useful_drafts(asked, room, is_kept) == expected


@pytest.mark.core
def test_sharded_by_fully_shard(drafter):
    target = llama()
    drafter.bind(target)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(target)
        refused(
            target, drafter, r"LlamaForCausalLM is sharded by fully_shard\(\) .* expected a target that a process can"
        )
    finally:
        dist.destroy_process_group()


def test_pipeline_stages():
    target = llama()
    drafter = random_eagle3(target)
    target.config.distributed_config = SimpleNamespace(pp_size=4)
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM is split into 4 pipeline stages, .* expected a whole target"
    ):
        target.generate(**padded_prompts(PROMPTS[1]), max_new_tokens=4, assistant_model=drafter)


@pytest.mark.parametrize("what", ["embedding", "head"])
def test_weights_that_cannot_be_shared(drafter, what):
    other = llama()
    module = other.get_input_embeddings() if what == "embedding" else other.get_output_embeddings()
    unbound = Eagle3Drafter(Eagle3Config(**{**drafter.config.to_dict(), f"own_{what}": False}))
    for weight, words in (
        (torch.zeros(96 * 32, 1, dtype=torch.uint8), "expected a module with a floating-point `weight`"),
        (torch.zeros(0), r"that has shape \[0\]; expected \[vocabulary, width\]. It is sharded"),
    ):
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        with pytest.raises(ValueError, match=f"no {what} of its own and must share the target's, but .*{words}"):
            unbound.bind(other)
        assert not unbound.is_bound


@pytest.mark.core
def test_every_setting_of_assisted_generation_is_honoured_refused_or_warned_about(target, drafter, caplog):
    """None of transformers' settings for its own assistants is ignored without a word."""
    about_drafts = ("assistant", "lookbehind", "lookup", "matching", "mtp", "speculation")
    settings = {name for name in vars(GenerationConfig()) if any(part in name for part in about_drafts)}
    assert settings == {
        "num_assistant_tokens",  # honoured
        "is_assistant",  # marks a model as an assistant, which changes nothing
        "assistant_ensemble_weight",
        *_OTHER_DRAFTERS,
        *UNUSED_SETTINGS,
    }
    values = {
        "num_assistant_tokens_schedule": "heuristic",
        "assistant_confidence_threshold": 0.7,
        "assistant_lookbehind": 7,
        "target_lookbehind": 7,
        "max_matching_ngram_size": 7,
    }
    inputs, options = padded_prompts(PROMPTS[1]), {"do_sample": False, "max_new_tokens": 6}
    plain = target.generate(**inputs, **options)
    assert values.keys() == UNUSED_SETTINGS.keys()
    for name, value in values.items():
        caplog.clear()
        logging.Logger.warning_once.cache_clear()
        out = target.generate(**inputs, **options, assistant_model=drafter, **{name: value})
        assert torch.equal(out, plain)
        assert f"{name}={value!r} has no effect" in caplog.text
    caplog.clear()
    target.generate(**inputs, **options, assistant_model=drafter)
    neutral = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    target.generate(**inputs, **options, assistant_model=drafter, **neutral)
    assert "no effect" not in caplog.text


def test_block_verification_is_not_promised_by_the_stock_engine(target, drafter, caplog):
    logging.Logger.warning_once.cache_clear()
    drafter.configure(engine="stock", verification="block")
    target.generate(**padded_prompts(PROMPTS[1]), do_sample=True, max_new_tokens=4, assistant_model=drafter)
    assert "verification='block' has no effect on the stock engine" in caplog.text


@pytest.mark.core
def test_stateless_watermark_works(target, drafter):
    options = {"watermarking_config": WatermarkingConfig(bias=8.0), "do_sample": False, "max_new_tokens": 12}
    plain = target.generate(**padded_prompts(PROMPTS[3]), **options)
    out = target.generate(**padded_prompts(PROMPTS[3]), **options, assistant_model=drafter)
    assert torch.equal(out, plain)


def masked(rows):
    mask = torch.tensor(rows)
    return {"input_ids": torch.full(mask.shape, 5), "attention_mask": mask}


@pytest.mark.parametrize(
    ("rows", "row", "found"),
    [
        ([[1, 1, 1, 1], [1, 1, 1, 0]], 1, "padding in column 3, after tokens"),
        ([[1, 0, 1, 1], [1, 1, 1, 1]], 0, "padding in column 1, after tokens"),
        ([[0, 1, 1, 1], [0, 1, 0, 1]], 1, "padding in column 2, after tokens"),
        ([[1, 1, 1, 1], [0, 0, 0, 0]], 1, "padding only"),
        ([[1] * 40 + [0]], 0, "padding in column 40, after tokens"),
    ],
    ids=["right", "middle", "twice", "only", "long"],
)
def test_padding_that_is_not_on_the_left(target, drafter, rows, row, found):
    message = refused(target, drafter, f"Row {row} of the batch has an attention_mask", inputs=masked(rows))
    assert f" with {found}; expected" in message
    assert "padding_side = 'left'" in message and message.endswith("pass one.")


def test_a_mask_of_other_columns_than_the_prompt(target, drafter):
    inputs = masked([[1] * 4]) | {"attention_mask": torch.ones(1, 6, dtype=torch.int64)}
    refused(target, drafter, r"has 6 columns, but input_ids has 4 and the cache holds 0; expected 4\.$", inputs=inputs)


@pytest.mark.core
def test_embeddings_without_tokens(target, drafter):
    inputs = {"inputs_embeds": target.get_input_embeddings()(torch.tensor([[5, 6, 7]])).detach()}
    refused(target, drafter, "inputs_embeds without input_ids, but a drafter reads token ids", inputs=inputs)


@pytest.mark.core
def test_batches_that_the_stock_engine_cannot_take_apart():
    """A cache of several rows; fewer temperatures than rows."""
    target, inputs = tiny_target(STOCK_FAMILY), padded_prompts(PROMPTS[3])
    drafter = random_eagle3(target)
    out = target.generate(**inputs, max_new_tokens=4, return_dict_in_generate=True)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 4), value=1)
    longer = {"input_ids": out.sequences, "attention_mask": mask, OUTPUT_NAME: out[OUTPUT_NAME]}
    message = refused(target, drafter, f"{OUTPUT_NAME} holds 15 tokens of each of 3 rows", inputs=longer)
    assert "RoPE (longrope)" in message and "without assistant_model" in message
    assert out[OUTPUT_NAME].get_seq_length() == 15
    rows = LogitsProcessorList([RowTemperature([0.5, 1.0])])
    refused(target, drafter, "2 temperatures, but the call has 3", inputs=inputs, logits_processor=rows, do_sample=True)


@pytest.mark.core
def test_errors_keep_the_statistics_of_the_last_call(target, drafter):
    target.generate(**padded_prompts(PROMPTS[1]), max_new_tokens=6, assistant_model=drafter)
    stats = drafter.stats
    refused(target, drafter, "use_cache", use_cache=False)
    refused(target, drafter, "guidance_scale|Guidance", guidance_scale=1.5)
    assert drafter.stats is stats


def test_an_oracle_is_refused_like_any_drafter(target):
    drafter = OracleDrafter(target, torch.zeros(1, 4, dtype=torch.int64), [9])
    refused(llama(), drafter, "OracleDrafter is bound to another target")


@pytest.mark.core
@pytest.mark.parametrize("kind", ["draft-model", "mtp"])
def test_drafters_have_no_other_attention(target, kind):
    drafter, inputs = RANDOM_DRAFTERS[kind](target), padded_prompts(PROMPTS[1])
    for name in ("sdpa", "eager"):
        with pytest.raises(ValueError, match=r"no attention implementation of transformers reads; expected set_attn_"):
            drafter.set_attn_implementation(name)
    drafted = target.generate(**inputs, max_new_tokens=6, assistant_model=drafter)
    assert torch.equal(drafted, target.generate(**inputs, max_new_tokens=6))
