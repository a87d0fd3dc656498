"""Targets that libraries have quantised, each by its own package: texts with a drafter are those without one.

Where a kernel knows how a library stores weights, the same is asked of it, in Triton's interpreter or the reference.
"""

import copy
import gc
import itertools
import json
from pathlib import Path

import pytest
import torch
from adapters import with_adapters
from assistants import gemma4_target, new_assistant
from case_counts import cases
from compressed import arguments, save_compressed
from graph_stand_ins import tape_on_cpu
from lossless import PROMPTS, greedy
from oracle import RANDOM_DRAFTERS, random_draft_model, random_eagle3
from packed import Packed, save_packed
from safetensors.torch import load_file, save_file
from targets import padded_prompts, set_policy, tiny_target
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
    TorchAoConfig,
)
from transformers.integrations import finegrained_fp8

from hf_specdec import AutoDrafter, AwqConfig, GPTQConfig, Mxfp4Config, NoDrafter, ops
from hf_specdec.host.quantised import compressor_of
from hf_specdec.kernels import linear_reference
from hf_specdec.kernels.stored_weight_reference import dequantise
from hf_specdec.kernels.types import StoredWeight
from hf_specdec.loading import load_target
from hf_specdec.modules.signature import _plain_parts
from hf_specdec.modules.stored_linear import keep_stored
from hf_specdec.modules.weights import (
    PLAIN_WEIGHTS,
    may_round_inputs,
    quantised_class,
    register_weight_kind,
    tensors_of,
    weight_of,
)
from hf_specdec.modules.weights import _readers as readers
from hf_specdec.patching.experts import copies_experts
from hf_specdec.patching.fused_linear import fused_linears, fused_parameters
from hf_specdec.patching.stored_experts import StoredExperts

SIZES = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "initializer_range": 0.1}
IDS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
FAMILIES = {"llama": LlamaConfig, "qwen3": Qwen3Config}


def torchao(name, **options):
    quantization = pytest.importorskip("torchao.quantization")
    if options.pop("group", None):
        options["granularity"] = quantization.PerGroup(32)
    return TorchAoConfig(getattr(quantization, name)(**options))


def bitsandbytes(**options):
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(**options)


def compressed(*weights, inputs=None, **options):
    """Of a checkpoint, whose configuration says how it is quantised."""
    pytest.importorskip("compressed_tensors")
    return {"weights": arguments(*weights, **options), "inputs": inputs and arguments(*inputs, dynamic=True)}


# By library and format: its configuration, the class that tells the kind, and whether the kernels know it.
LIBRARIES = {
    "torchao int8": (lambda: torchao("Int8WeightOnlyConfig"), "torchao.Int8Tensor", True),
    "torchao float8": (lambda: torchao("Float8WeightOnlyConfig"), "torchao.Float8Tensor", True),
    "torchao int4 groups": (
        lambda: torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4, group=32),
        "torchao.IntxUnpackedToInt8Tensor",
        True,
    ),
    "torchao int8, inputs too": (
        lambda: torchao("Int8DynamicActivationInt8WeightConfig"),
        "torchao.Int8Tensor",
        False,
    ),
    "bitsandbytes nf4": (
        lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32),
        "bitsandbytes.Linear4bit",
        True,
    ),
    "bitsandbytes nf4, scales too": (
        lambda: bitsandbytes(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.float32,
            bnb_4bit_use_double_quant=True,
        ),
        "bitsandbytes.Linear4bit",
        True,
    ),
    "bitsandbytes int8": (lambda: bitsandbytes(load_in_8bit=True), "bitsandbytes.Linear8bitLt", False),
    "compressed-tensors W4A16": (
        lambda: compressed(4, "int", "group", group_size=32),
        "hf_specdec.StoredLinear",
        True,
    ),
    "compressed-tensors NVFP4": (
        lambda: compressed(4, "float", "tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn),
        "hf_specdec.StoredLinear",
        True,
    ),
    "compressed-tensors MXFP4": (
        lambda: compressed(4, "float", "group", group_size=32, scale_dtype=torch.uint8, zp_dtype=torch.uint8),
        "hf_specdec.StoredLinear",
        True,
    ),
    "compressed-tensors int8": (
        lambda: compressed(8, "int", "channel", inputs=(8, "int", "token")),
        "hf_specdec.StoredLinear",
        True,
    ),
    "compressed-tensors float8": (
        lambda: compressed(8, "float", "channel", inputs=(8, "float", "token")),
        "hf_specdec.StoredLinear",
        True,
    ),
    "compressed-tensors float8, blocks": (
        lambda: compressed(8, "float", "block", block_structure=[128, 128]),
        "hf_specdec.StoredLinear",
        True,
    ),
    "AWQ": (lambda: Packed("awq"), "hf_specdec.StoredLinear", True),
    "GPTQ": (lambda: Packed("gptq", symmetric=True), "hf_specdec.StoredLinear", True),
    "GPTQ, inputs in an order": (lambda: Packed("gptq", desc_act=True), "hf_specdec.StoredLinear", True),
    "GPTQ int8": (lambda: Packed("gptq", 8, -1, symmetric=True), "hf_specdec.StoredLinear", True),
}


# Inputs are rounded, by torchao and bitsandbytes as all tokens of a pass are. So what differs in the last bit, as sums
# of other numbers of tokens do, may differ by a step, without a drafter, too.
ROUND_INPUTS = {
    "torchao int8, inputs too",
    "bitsandbytes int8",
    "compressed-tensors int8",
    "compressed-tensors float8",
}


@pytest.fixture(autouse=True)
def without_compilers():
    """bitsandbytes compiles what its layers do on a CPU, which takes minutes."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """Targets by library and family, loaded once."""
    loaded, folders = {}, {}

    def target(library, family):
        settings = LIBRARIES[library][0]()
        if family not in folders:
            torch.manual_seed(0)
            folders[family] = tmp_path_factory.mktemp(family)
            config = FAMILIES[family](**SIZES, **HEADS, **IDS)
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folders[family])
        if (library, family) not in loaded:
            folder, options = folders[family], {"dtype": torch.float32}
            if isinstance(settings, (dict, Packed)):
                model, folder = AutoModelForCausalLM.from_pretrained(folder, **options), tmp_path_factory.mktemp("file")
            if isinstance(settings, dict):
                save_compressed(model, folder, **settings)
            elif isinstance(settings, Packed):
                save_packed(model, folder, settings)
                options["quantization_config"] = {"awq": AwqConfig, "gptq": GPTQConfig}[settings.method]()
            else:
                options["quantization_config"] = settings
            loaded[library, family] = as_stored(AutoModelForCausalLM.from_pretrained(folder, **options).eval())
        return loaded[library, family]

    return target


def as_stored(model: PreTrainedModel) -> PreTrainedModel:
    model = keep_stored(model)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    for one in itertools.chain(*(tensors_of(layer).values() for layer in layers_of(model))):
        one.data = one.data.clone()  # not the memory of the file, which cannot be moved
    for layer in model.modules():  # bitsandbytes packs weights anew in a forward pass on some processors
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    return model


def prompts_for(lengths):
    inputs = padded_prompts(lengths)
    return inputs | {"input_ids": inputs["input_ids"] % SIZES["vocab_size"]}


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    return [one for one in model.model.layers.modules() if isinstance(one, nn.Linear)]


@pytest.mark.parametrize(
    ("library", "family"),
    cases(
        every := list(itertools.product(LIBRARIES, FAMILIES)),
        [one for one in every if one[1] == "llama" or one[0] == "compressed-tensors W4A16"],
    ),
)
def test_texts_are_those_without_a_drafter(library, family, targets):
    target = targets(library, family)
    assert {quantised_class(one) for one in layers_of(target)} == {LIBRARIES[library][1]}
    # One prompt, where a pass over several, padded or packed, would round otherwise.
    inputs = prompts_for(PROMPTS[3][:1] if library in ROUND_INPUTS else PROMPTS[3])
    drafter, new = random_draft_model(target), {"max_new_tokens": 10}
    found = greedy(target, inputs, drafter, 3, **new)
    assert drafter.stats.engine == "static" and LIBRARIES[library][1] in drafter.stats.reason, drafter.stats.reason
    plain, width = greedy(target, inputs, **new), inputs["input_ids"].shape[1]
    end = width + 1 if library in ROUND_INPUTS else None
    assert torch.equal(found[:, :end], plain[:, :end])
    assert {quantised_class(one) for one in layers_of(target)} == {LIBRARIES[library][1]}, "they stay quantised"


@pytest.mark.parametrize(
    ("kind", "library"),
    cases(
        [
            *itertools.product(
                [kind for kind in RANDOM_DRAFTERS if kind != "draft-model"],
                ["torchao int8", "bitsandbytes nf4", "compressed-tensors W4A16"],
            )
        ],
        [
            ("p-eagle", "bitsandbytes nf4"),
            ("pard2", "torchao int8"),
            ("dspark", "compressed-tensors W4A16"),
            ("mtp", "torchao int8"),
        ],
    ),
)
def test_every_other_kind_of_drafter(kind, library, targets):
    target, inputs = targets(library, "llama"), prompts_for(PROMPTS[3])
    drafter = RANDOM_DRAFTERS[kind](target)
    assert torch.equal(greedy(target, inputs, drafter, 3), greedy(target, inputs))
    assert drafter.stats.engine == "static" and drafter.stats.drafted


@pytest.mark.parametrize("library", cases(["torchao int8", "bitsandbytes nf4"], ["bitsandbytes nf4"]))
def test_assistants_of_gemma_4(library, tmp_path):
    """The weights of bitsandbytes do not have the shapes of their layers."""
    gemma4_target().save_pretrained(tmp_path / "target")
    new_assistant().save_pretrained(tmp_path / "assistant")
    options = {"dtype": torch.float32, "quantization_config": LIBRARIES[library][0]()}
    target = as_stored(AutoModelForCausalLM.from_pretrained(tmp_path / "target", **options).eval())
    drafter, inputs = AutoDrafter.from_pretrained(tmp_path / "assistant", target=target), padded_prompts(PROMPTS[3])
    assert torch.equal(greedy(target, inputs, drafter, 3), greedy(target, inputs))
    assert drafter.stats.engine == "static" and LIBRARIES[library][1] in drafter.stats.reason


@pytest.mark.parametrize("library", LIBRARIES)
def test_kinds_are_read_without_a_copy(library, targets):
    target = targets(library, "llama")
    for layer in layers_of(target):
        stored = weight_of(layer)
        assert (stored is not None) == LIBRARIES[library][2]
        if stored is not None:
            assert stored.shape == (layer.out_features, layer.in_features)
            assert stored.values.data_ptr() == getattr(layer.weight, "qdata", layer.weight).data_ptr()
            if type(layer) is nn.Linear:
                torch.testing.assert_close(dequantise(stored, torch.float32), layer.weight.dequantize())
    assert type(weight_of(target.lm_head)) is nn.Parameter


@pytest.mark.parametrize(
    ("library", "triton"),
    [(name, False) for name, (_, _, is_known) in LIBRARIES.items() if is_known and name not in ROUND_INPUTS]
    + [(name, True) for name in ("torchao int4 groups", "compressed-tensors W4A16", "GPTQ, inputs in an order")],
)
def test_kernels_take_the_place_of_the_library(library, triton, targets, monkeypatch):
    """In rounds; prompts of many rows are the library's."""
    set_policy(monkeypatch, "cpu", few_row_linear=True, fused_linear=True, transposed_linear=False, triton=triton)
    target, inputs, rows = targets(library, "llama"), prompts_for(PROMPTS[1]), []
    new = {"max_new_tokens": 2 if triton else 6}
    plain, original = greedy(target, inputs, **new), ops.linear
    monkeypatch.setattr(ops, "has_fast_linear", lambda inputs, _: len(inputs) <= 8)

    def linear(inputs, weight, bias=None):
        if isinstance(weight, StoredWeight):
            rows.append(len(inputs))
        return original(inputs, weight, bias)

    monkeypatch.setattr(ops, "linear", linear)
    assert torch.equal(greedy(target, inputs, random_eagle3(target), 3, **new), plain)
    assert rows and max(rows) <= 8
    rows.clear()
    assert torch.equal(greedy(target, inputs, **new), plain) and not rows


# Their scales have scales of their own, or are no tensors of the layer, or each layer has an order of its own.
NOT_FUSED = {
    "bitsandbytes nf4",
    "bitsandbytes nf4, scales too",
    "compressed-tensors NVFP4",
    "GPTQ, inputs in an order",
}


@pytest.mark.parametrize("library", [name for name, (_, _, is_known) in LIBRARIES.items() if is_known])
def test_gate_and_up_are_one_weight(library, targets, monkeypatch):
    """In the memory of the layers, which stays the library's."""
    set_policy(monkeypatch, "cpu", fused_linear=True)
    target = targets(library, "llama")
    layers = [target.model.layers[1].mlp.gate_proj, target.model.layers[1].mlp.up_proj]
    expected = torch.cat([dequantise(weight_of(one), torch.float32) for one in layers])
    with fused_linears(target):
        found = fused_parameters(*layers)
        again = fused_linears(target)
    assert (found is None) == (library in NOT_FUSED)
    if found is not None:
        assert torch.equal(dequantise(found[0], torch.float32), expected)
        parts = [weight_of(one) for one in layers]
        ends = parts[0].values.data_ptr() + parts[0].values.nbytes, parts[0].scales.data_ptr() + parts[0].scales.nbytes
        assert (found[0].values.data_ptr(), found[0].scales.data_ptr()) == (
            parts[0].values.data_ptr(),
            parts[0].scales.data_ptr(),
        )
        assert ends == (parts[1].values.data_ptr(), parts[1].scales.data_ptr())
        with again:
            assert fused_parameters(*layers)[0].values.data_ptr() == found[0].values.data_ptr()


def test_adapters_over_stored_layers(targets, monkeypatch):
    """Updates are added to what the kernels give in rounds and the layers themselves for the prompts."""
    set_policy(monkeypatch, "cpu", few_row_linear=True, fused_linear=True, transposed_linear=False)
    target, inputs = copy.deepcopy(targets("compressed-tensors W4A16", "llama")), prompts_for(PROMPTS[1])
    base = greedy(target, inputs, max_new_tokens=6)
    with_adapters(target)
    plain = greedy(target, inputs, max_new_tokens=6)
    assert not torch.equal(plain, base)
    monkeypatch.setattr(ops, "has_fast_linear", lambda inputs, _: len(inputs) <= 8)
    drafter = random_eagle3(target)
    assert torch.equal(greedy(target, inputs, drafter, 3, max_new_tokens=6), plain)
    assert drafter.stats.engine == "static"


@pytest.mark.parametrize("library", LIBRARIES)
def test_batch_invariant_calls(library, targets, monkeypatch):
    """Prompts and rounds by the kernels, here their reference; what they do not know is refused by its name."""
    policy = {"batch_invariant": True, "layer_kernels": True, "few_row_linear": True, "fused_linear": True}
    set_policy(monkeypatch, "cpu", **policy)
    monkeypatch.setattr("hf_specdec.hosting.eligibility.why_not_batch_invariant", lambda model: None)
    target = targets(library, "llama")
    inputs = prompts_for(PROMPTS[3][:1] if library in ROUND_INPUTS else PROMPTS[3])
    drafter, new = random_eagle3(target).configure(batch_invariant=True), {"max_new_tokens": 6}
    if LIBRARIES[library][2]:
        found = greedy(target, inputs, drafter, 3, **new)
        assert library in ROUND_INPUTS or torch.equal(found, greedy(target, inputs, **new))
        assert drafter.stats.batch_invariant and drafter.stats.reason == "the target and the call fit"
    else:
        with pytest.raises(ValueError, match=f"batch_invariant=True, but .*{LIBRARIES[library][1]}"):
            greedy(target, inputs, drafter, 3)


# Bytes of a weight with its scales, which are in float32 here.
BYTES = {"int8": 1.04, "float8": 1.04, "nf4": 0.5, "NVFP4": 0.57, "MXFP4": 0.54, "W4A16": 0.63, "groups": 1.26}
# Scales of AWQ and GPTQ are in float16; an order takes 8 bytes for each of 128 or 256 inputs.
BYTES |= {"AWQ": 0.6, "order": 0.67, "GPTQ": 0.57}


@pytest.mark.parametrize("library", LIBRARIES)
def test_no_dequantised_copy_appears(library, targets):
    """Neither in the target nor elsewhere, by a call with a drafter that shares its head."""
    target = targets(library, "llama")
    drafter = random_eagle3(target, own_embedding=False, own_head=False)

    def memory() -> tuple[float, int]:
        layers = layers_of(target)
        tensors, _ = _plain_parts([one for layer in layers for one in (*layer.parameters(), *layer.buffers())])
        shapes = {(one.out_features, one.in_features) for one in layers}
        wide = [one for one in gc.get_objects() if type(one) in PLAIN_WEIGHTS and one.shape in shapes]
        wide = {one.data_ptr() for one in wide if one.is_floating_point() and one.itemsize > 1}
        size = sum(one.in_features * one.out_features for one in layers)
        return sum(one.nbytes for one in tensors) / size, len(wide)

    gc.collect()
    before = memory()
    greedy(target, prompts_for(PROMPTS[1]), drafter, 3, max_new_tokens=4)
    gc.collect()
    assert memory() == before
    assert before[0] <= next(most for name, most in BYTES.items() if name in library)


@pytest.mark.parametrize("library", [name for name in LIBRARIES if "compressed" in name])
def test_compressed_tensors_stay_as_in_the_file(library, targets, tmp_path):
    """Their layers give what they give when compressed-tensors has decompressed them, and are saved as they were."""
    target, inputs = targets(library, "llama"), prompts_for(PROMPTS[1])
    target.save_pretrained(tmp_path)
    (file,) = Path(target.name_or_path).glob("*.safetensors")
    before, after = (load_file(one) for one in (file, tmp_path / file.name))
    assert before.keys() == after.keys() and all(torch.equal(one, after[name]) for name, one in before.items())
    library_own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    if "FP4" in library:  # else in the first pass; e2m1 becomes bfloat16, by which NVFP4 is rounded
        compressor_of(library_own).decompress_model(library_own)
        nn.Module.float(library_own)
    found, expected = target(**inputs).logits, library_own(**inputs).logits
    atol = 0.02 * expected.abs().max().item() if "NVFP4" in library else 1e-5
    torch.testing.assert_close(found, expected, rtol=1.3e-6, atol=atol)
    assert {one.weight.dtype for one in layers_of(library_own)} == {torch.float32}


@pytest.mark.parametrize("library", ["compressed-tensors NVFP4", "compressed-tensors float8"])
def test_stored_layers_are_copied_cast_and_loaded(library, targets):
    """Numbers of 8 bits are not cast, and nothing is kept that follows from another weight."""
    target, inputs = copy.deepcopy(targets(library, "llama")), prompts_for(PROMPTS[1])
    before, weights = target(**inputs).logits, [dequantise(weight_of(one), torch.float32) for one in layers_of(target)]
    target.to(torch.float64).to(torch.float32)
    assert torch.equal(target(**inputs).logits, before)
    name, factor = ("weight_global_scale", 0.5) if "NVFP4" in library else ("weight_scale", 2.0)
    state = {key: 2 * one if key.endswith(name) else one for key, one in target.state_dict().items()}
    target.load_state_dict(state)
    for layer, weight in zip(layers_of(target), weights, strict=True):
        assert torch.equal(dequantise(weight_of(layer), torch.float32), factor * weight)
    drafter = random_draft_model(target)
    assert torch.equal(greedy(target, inputs, drafter, 3, max_new_tokens=6), greedy(target, inputs, max_new_tokens=6))
    target.requires_grad_(False)
    target.get_input_embeddings().weight.requires_grad_()
    for _ in range(2):
        target(**inputs).logits.sum().backward()


@pytest.mark.parametrize("library", [name for name in LIBRARIES if "torchao" in name])
def test_targets_that_are_moved_after_a_call(library, targets, monkeypatch):
    """torch exchanges tensor subclasses in place, which a weak reference to one of them would forbid."""
    set_policy(monkeypatch, "cpu", few_row_linear=True, fused_linear=True, transposed_linear=False)
    monkeypatch.setattr(ops, "has_fast_linear", lambda inputs, _: len(inputs) <= 8)
    tape_on_cpu(monkeypatch)
    target, inputs, new = copy.deepcopy(targets(library, "llama")), prompts_for([7]), {"max_new_tokens": 6}
    drafter = random_eagle3(target)
    before = greedy(target, inputs, drafter, 3, **new)
    target.to("cpu")
    assert torch.equal(greedy(target, inputs, drafter, 3, **new), before)


def test_zero_points_that_are_loaded_into_a_symmetric_target(targets, monkeypatch):
    """The kernels have none, so captured rounds do not go on with them."""
    set_policy(monkeypatch, "cpu", few_row_linear=True, fused_linear=True, transposed_linear=False)
    monkeypatch.setattr(ops, "has_fast_linear", lambda inputs, _: len(inputs) <= 8)
    tape_on_cpu(monkeypatch)
    target, inputs, new = (
        copy.deepcopy(targets("torchao int4 groups", "llama")),
        prompts_for([7]),
        {"max_new_tokens": 6},
    )
    drafter = random_eagle3(target)
    before = greedy(target, inputs, drafter, 3, **new)
    state = copy.deepcopy(target.state_dict())
    for one in state.values():
        if hasattr(one, "zero_point"):
            one.zero_point.fill_(1)
    target.load_state_dict(state)
    plain = greedy(target, inputs, **new)
    assert not torch.equal(plain, before)
    assert torch.equal(greedy(target, inputs, drafter, 3, **new), plain)


def test_scales_of_bitsandbytes_that_are_replaced(targets, monkeypatch):
    """They are attributes of a weight that stays where it is: captured rounds do not go on with those before."""
    set_policy(monkeypatch, "cpu", few_row_linear=True, fused_linear=True, transposed_linear=False)
    monkeypatch.setattr(ops, "has_fast_linear", lambda inputs, _: len(inputs) <= 8)
    tape_on_cpu(monkeypatch)
    target, inputs, new = copy.deepcopy(targets("bitsandbytes nf4", "llama")), prompts_for([7]), {"max_new_tokens": 6}
    drafter = random_eagle3(target)
    before = greedy(target, inputs, drafter, 3, **new)
    for layer in layers_of(target):
        layer.weight.quant_state.absmax = layer.weight.quant_state.absmax / 2
    plain = greedy(target, inputs, **new)
    assert not torch.equal(plain, before)
    assert torch.equal(greedy(target, inputs, drafter, 3, **new), plain)
    captured = tape_on_cpu(monkeypatch)
    assert torch.equal(greedy(target, inputs, drafter, 3, **new), plain) and not captured.count


def test_plain_layers_in_float8_are_left_to_torch():
    layer = nn.Linear(32, 32).to(torch.float8_e4m3fn)
    assert weight_of(layer) is None and may_round_inputs(layer)


@pytest.mark.parametrize("library", [name for name in LIBRARIES if name.startswith("compressed-tensors")])
def test_draft_models_of_compressed_tensors_stay_as_in_the_file(library, targets):
    target, draft = targets("torchao int8", "llama"), targets(library, "llama")
    drafter = AutoDrafter.from_pretrained(draft.name_or_path, target=target)
    inputs = prompts_for(PROMPTS[3])
    assert torch.equal(greedy(target, inputs, drafter, 3), greedy(target, inputs))
    assert drafter.stats.accepted > 0
    found, expected = ([(type(one), one.weight.dtype) for one in layers_of(model)] for model in (drafter.model, draft))
    assert found == expected


@pytest.mark.parametrize(
    ("weights", "inputs", "ignore"),
    [
        ((8, "float", "tensor"), (8, "float", "tensor"), ["lm_head"]),
        ((8, "int", "channel"), None, ["lm_head"]),
        ((8, "float", "channel"), None, []),
    ],
)
def test_other_forms_of_compressed_tensors_get_plain_weights(weights, inputs, ignore, tmp_path):
    """A scale for all inputs, 8 bits in words, and quantised heads: by the library, before the first pass."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, **HEADS, **IDS), dtype=torch.float32)
    save_compressed(model, tmp_path, **compressed(*weights, inputs=inputs), ignore=ignore)
    target = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    drafter = random_eagle3(target, own_embedding=False, own_head=False)
    assert {one.weight.dtype for one in target.modules() if isinstance(one, nn.Linear)} == {torch.float32}
    found = greedy(target, prompts_for(PROMPTS[1]), drafter, 3)
    assert drafter.stats.reason == "the target and the call fit"
    assert inputs is not None or torch.equal(found, greedy(target, prompts_for(PROMPTS[1])))


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory):
    """A folder with a checkpoint of random experts, in the layout that gpt-oss is published in."""
    folder = tmp_path_factory.mktemp("mxfp4")
    tiny_target("gpt-oss").save_pretrained(folder)
    file, settings = folder / "model.safetensors", folder / "config.json"
    tensors, config = load_file(file), json.loads(settings.read_text())
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, size_in, size_out = tensors.pop(name).shape
        shape = experts, size_out, size_in // 32
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator).to(torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 125, shape, generator=generator).to(torch.uint8)
    save_file(tensors, file, metadata={"format": "pt"})
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    settings.write_text(json.dumps(config))
    return folder


def load_mxfp4(folder, **options):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


@pytest.mark.core
def test_experts_in_mxfp4_stay_as_in_the_file(mxfp4, tmp_path):
    """Memory is that of the file, which is saved as it was; transformers, which dequantises them, gets the same."""
    target, dense = load_mxfp4(mxfp4, quantization_config=Mxfp4Config()), load_mxfp4(mxfp4)
    tensors = load_file(mxfp4 / "model.safetensors")
    assert sum(one.nbytes for one in target.parameters()) == sum(one.nbytes for one in tensors.values())
    target.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == tensors.keys() and all(torch.equal(one, saved[name]) for name, one in tensors.items())
    settings = [json.loads((one / "config.json").read_text())["quantization_config"] for one in (mxfp4, tmp_path)]
    assert settings[0] == settings[1]
    assert {one.dtype for one in dense.parameters()} <= {torch.float32, torch.bfloat16}
    inputs = padded_prompts(PROMPTS[3])
    found, expected = target(**inputs).logits, dense.float()(**inputs).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.core_for(through=["graphs"])
@pytest.mark.parametrize("through", ["reference", "kernels", "graphs"])
def test_texts_of_experts_in_mxfp4(mxfp4, through, monkeypatch):
    target, inputs = load_mxfp4(mxfp4, quantization_config=Mxfp4Config()), padded_prompts(PROMPTS[3])
    new = {"max_new_tokens": 3 if through == "kernels" else 8}
    plain, products = greedy(target, inputs, **new), []
    if through == "kernels":
        set_policy(monkeypatch, "cpu", triton=True)
    elif through == "graphs":
        tape_on_cpu(monkeypatch)
    product = ops.expert_linear
    monkeypatch.setattr(ops, "expert_linear", lambda *args: products.append(args[1]) or product(*args))
    borrowing = random_eagle3(target, own_embedding=False, own_head=False)
    for drafter in (borrowing,) if through == "kernels" else (borrowing, NoDrafter(target)):
        assert torch.equal(greedy(target, inputs, drafter, **new), plain)
        assert drafter.stats.engine == "static"
        assert through != "graphs" or drafter.stats.execution.startswith("captured in one graph")
    assert products and {type(one) for one in products} == {StoredWeight} and not copies_experts(target)
    assert not [name for name, _ in target.named_parameters() if name.endswith("_proj")], "they stay as they are"


def test_targets_by_name_keep_experts_in_mxfp4(mxfp4):
    target = load_target(str(mxfp4), torch.float32, torch.device("cpu"))
    assert {type(one).__mro__[1] for one in target.modules() if hasattr(one, "is_transposed")} == {StoredExperts}


def test_batch_invariant_calls_of_experts_in_mxfp4(mxfp4, monkeypatch):
    policy = {"batch_invariant": True, "layer_kernels": True, "few_row_linear": True, "fused_linear": True}
    set_policy(monkeypatch, "cpu", **policy)
    monkeypatch.setattr("hf_specdec.hosting.eligibility.why_not_batch_invariant", lambda model: None)
    target, inputs = load_mxfp4(mxfp4, quantization_config=Mxfp4Config()), padded_prompts(PROMPTS[3])
    drafter = random_eagle3(target).configure(batch_invariant=True)
    assert torch.equal(greedy(target, inputs, drafter, 3), greedy(target, inputs))
    assert drafter.stats.batch_invariant and drafter.stats.reason == "the target and the call fit"


def test_blocks_of_float8_of_transformers():
    """Its layer computes by kernels that it fetches for a GPU, so only what it holds is compared here."""
    layer = finegrained_fp8.FP8Linear(320, 200, block_size=(128, 128))
    assert weight_of(layer)[2:] == (None, 128, 128, True, None, None, None, None, None)
    generator = torch.Generator().manual_seed(0)
    weight, scales = torch.randn(200, 320, generator=generator), torch.rand(2, 3, generator=generator)
    layer.weight.data, layer.weight_scale_inv.data = weight.to(torch.float8_e4m3fn), scales
    factors = scales.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :320]
    assert torch.equal(dequantise(weight_of(layer), torch.float32), layer.weight.float() * factors)
    inputs = torch.randn(3, 320, generator=generator)
    found = linear_reference.linear(inputs, weight_of(layer))
    parts = [one / (one.abs().amax(1, keepdim=True) / 448) for one in inputs.split(128, 1)]
    rounded = [one.to(torch.float8_e4m3fn).float() for one in parts]
    inner = [
        one * part.abs().amax(1, keepdim=True) / 448 for one, part in zip(rounded, inputs.split(128, 1), strict=True)
    ]
    torch.testing.assert_close(found, torch.cat(inner, 1) @ (layer.weight.float() * factors).T)
    layer.weight = nn.Parameter(weight)
    assert quantised_class(layer) is None and weight_of(layer) is None
    for other in ({"activation_scheme": "static"}, {"block_size": None}, {"block_size": (16, 24)}):
        assert weight_of(finegrained_fp8.FP8Linear(320, 200, **{"block_size": (128, 128)} | other)) is None


def test_other_forms_of_bitsandbytes_are_computed_by_it():
    """fp4, rows that blocks do not divide, and weights that it has packed anew for a CPU."""
    layers = pytest.importorskip("bitsandbytes").nn

    def layer(size_in=128, kind="nf4"):
        return layers.Linear4bit(size_in, 32, bias=False, quant_type=kind).to("cpu")

    assert weight_of(layer()).codes == "nf4" and weight_of(layer(192)).shape == (32, 192)
    assert weight_of(layer(kind="fp4")) is None and weight_of(layer(96)) is None
    packed = layer()
    packed.weight.quant_state.packing_format_for_cpu = True
    assert weight_of(packed) is None


def test_kinds_are_registered_from_outside(monkeypatch):
    class Halves(nn.Linear):
        """A layer whose weight is int8 with one scale for every row."""

    layer = Halves(64, 48, bias=False)
    assert quantised_class(layer) is None
    layer.weight = nn.Parameter(torch.zeros(48, 64, dtype=torch.int8), requires_grad=False)
    name = f"{__name__.partition('.')[0]}.Halves"
    assert quantised_class(layer) == name and weight_of(layer) is None
    monkeypatch.setattr("hf_specdec.modules.weights._readers", dict(readers))
    values, scales = torch.randint(-9, 9, (48, 64), dtype=torch.int8), torch.rand(48, 1)
    register_weight_kind(name)(lambda module: StoredWeight(values, scales, None, 1, 64))
    assert torch.equal(dequantise(weight_of(layer), torch.float32), values * scales)
    for wrong in (scales[:-1], scales.double(), scales.expand(48, 2)):
        register_weight_kind(name)(lambda module, wrong=wrong: StoredWeight(values, wrong, None, 1, 64))
        assert weight_of(layer) is None
