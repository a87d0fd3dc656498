"""Layouts of publishers' exporters and serving engines besides the dialects: the same weights make the same drafter."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from dialects import PLAIN, VARIANTS, make_weights, tiny_target, write, write_draft_model
from few_bits import FOUR_BITS, dequantised_state, quantise, stored_layers
from lossless import greedy
from mtp import publish
from refused_loading import refuse
from safetensors.torch import load_file, save_file
from targets import padded_prompts
from transformers import LlamaConfig

from hf_specdec import AutoDrafter
from hf_specdec.auto import read_checkpoint
from hf_specdec.checkpoints.checkpoint import open_checkpoint

DEEP = replace(PLAIN, num_layers=2)
E31 = VARIANTS["eagle-3.1"]
SECTIONS = {"type": "mrope", "mrope_section": [2, 1, 1]}
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def target():
    return tiny_target(PLAIN)


def equal(drafter, other):
    """Whether two drafters have the same weights, quantised or not, and settings, up to the dialect."""
    theirs, skipped = dequantised_state(other), {"dialect", "_name_or_path", "stored_layers"}
    settings = [{k: v for k, v in one.config.to_dict().items() if k not in skipped} for one in (drafter, other)]
    own = dequantised_state(drafter)
    return (
        own.keys() == theirs.keys() and all(torch.equal(own[k], theirs[k]) for k in own) and settings[0] == settings[1]
    )


RENAMED = {
    "ModelOpt from Megatron, deep": (DEEP, r"^layers\.(\d)\.", r"midlayer.\1.", {}),
    "SpecForge's trainer": (PLAIN, r"^", "draft_model.", {}),
    "SGLang's aux norms": (
        E31,
        r"^fc_norm\.(\d)\.",
        lambda m: f"aux_norm_{('low', 'mid', 'high')[int(m[1])]}.",
        {"fc_norm": ...},
    ),
    "Llama 4": (PLAIN, "^", "", {"model_type": "llama4_text", "intermediate_size": 7, "intermediate_size_mlp": 48}),
    "QwQ": (PLAIN, "^", "", {"model_type": "qwen2"}),
    "Phi-4": (PLAIN, "^", "", {"model_type": "phi3"}),
    "MiniMax-M2": (PLAIN, "^", "", {"model_type": "minimax_m2", "architectures": ["Eagle3MiniMaxM2ForCausalLM"]}),
    "Qwen3-VL": (PLAIN, "^", "", {"model_type": "qwen3_vl", "architectures": ["Eagle3Qwen3vlForCausalLM"]}),
    "Llama layers for Qwen3": (PLAIN, "^", "", {"model_type": "qwen3"}),
    "M-RoPE of Qwen2.5-VL": (PLAIN, "^", "", {"rope_scaling": SECTIONS}),
    "M-RoPE of Qwen3-VL": (PLAIN, "^", "", {"rope_scaling": SECTIONS | {"type": "default", "mrope_interleaved": True}}),
}


@pytest.mark.parametrize("case", RENAMED)
def test_eagle3(case, target, tmp_path):
    spec, pattern, replacement, changes = RENAMED[case]
    weights = make_weights(spec)
    expected = AutoDrafter.from_pretrained(write("specforge", tmp_path / "a", spec, weights), target)
    folder = write("specforge", tmp_path / "b", spec, weights, **changes)
    tensors = {
        name.replace("midlayer.", "layers.0."): one for name, one in load_file(folder / "model.safetensors").items()
    }
    tensors = {re.sub(pattern, replacement, name): one for name, one in tensors.items()}
    if spec is DEEP:
        tensors["midlayer.1.hidden_norm.weight"] = tensors.pop("midlayer.1.input_layernorm.weight")
    save_file(tensors, folder / "model.safetensors")
    assert equal(AutoDrafter.from_pretrained(folder, target), expected)


def test_sizes_that_no_llama_has(target, tmp_path):
    """SpecForge's drafter for Qwen2.5-VL-32B: hidden_size is no multiple of the number of heads."""
    spec = replace(PLAIN, num_heads=3, num_kv_heads=1)
    drafter = AutoDrafter.from_pretrained(write("specforge", tmp_path, spec, make_weights(spec)), target)
    assert (drafter.config.num_attention_heads, drafter.config.head_dim) == (3, 8)


def test_tensor_of_two_names(target, tmp_path):
    weights = make_weights(DEEP)
    weights["layers.1.hidden_norm.weight"] = weights["layers.1.input_layernorm.weight"].clone()
    refuse(write("modelopt", tmp_path, DEEP, weights), target, "several tensors", "layers.1.input_layernorm.weight")


def groups_of(size, **others):
    """`quantization_config` of compressed-tensors, as far as it is read."""
    weights = {"num_bits": 4, "strategy": "group", "group_size": size, **others}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("form", "block", "dialect", "settings"),
    [
        ("tensor", 128, "modelopt", {"quant_method": "modelopt", "quant_algo": "FP8"}),
        ("rows", 128, "speculators", {"quant_method": "compressed-tensors"}),
        ("int8", 128, "safeailab-bin", {"quant_method": "compressed-tensors"}),
        ("blocks", 128, "specforge", {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        ("blocks", (16, 24), "specforge", {"quant_method": "fp8", "weight_block_size": [16, 24]}),
        ("blocks", (16, 24), "specforge", {"config_groups": {"group_0": {"weights": {"block_structure": [16, 24]}}}}),
        ("blocks", (1, 32), "specforge", groups_of(32, num_bits=8)),
        ("int4", 128, "speculators", groups_of(32)),
        ("int4-rows", 128, "safeailab-bin", groups_of(None, strategy="channel")),
        ("nvfp4", 128, "modelopt", groups_of(16, strategy="tensor_group")),
        ("mxfp4", 128, "safeailab-bin", groups_of(32, scale_dtype="torch.uint8")),
    ],
)
def test_quantised_eagle3(form, block, dialect, settings, target, tmp_path):
    """Layers stay quantised in the forms that the kernels know, and become plain in others or with a dtype."""
    stays, blocks = block != (16, 24), (block, block) if block == 128 else block
    stored, plain = quantise(make_weights(PLAIN), form, blocks)
    expected = AutoDrafter.from_pretrained(write(dialect, tmp_path / "plain", PLAIN, plain), target)
    folder = write(dialect, tmp_path / "quantised", PLAIN, stored, quantization_config=settings)
    drafter, cast = (AutoDrafter.from_pretrained(folder, target, dtype=dtype) for dtype in (None, target.dtype))
    assert equal(drafter, expected) and equal(cast, expected) and not stored_layers(cast)
    names = {name.removesuffix(".weight") for name in plain if name.endswith("proj.weight")}
    assert stored_layers(drafter).keys() == (names if stays else set()) and len(names) == 7


@pytest.mark.parametrize(
    ("changed", "settings", "parts"),
    [
        ({"weight_scale": None}, groups_of(32), ["weight_packed I32 [32, 8]"]),
        ({"weight_scale": torch.ones(32, 4)}, groups_of(32), ["weight_packed I32 [32, 8]", "weight_scale F32 [32, 4]"]),
        ({"weight_zero_point": torch.zeros(4, 2)}, groups_of(32), ["weight_zero_point F32 [4, 2]"]),
        ({}, groups_of(64), ["weight_scale BF16 [32, 2]"]),
        ({}, {}, ["weight_scale BF16 [32, 2]"]),
    ],
    ids=["no scale", "more scales", "zero points", "other groups", "unknown groups"],
)
def test_packed_weights_that_are_damaged(changed, settings, parts, target, tmp_path):
    """The layer that cannot be read is named, with what it has."""
    stored, _ = quantise(make_weights(PLAIN), "int4", chosen=lambda name: name.endswith("0.self_attn.q_proj.weight"))
    stored |= {f"layers.0.self_attn.q_proj.{name}": tensor for name, tensor in changed.items()}
    stored = {name: tensor for name, tensor in stored.items() if tensor is not None}
    folder = write("specforge", tmp_path, PLAIN, stored, quantization_config=settings)
    refuse(folder, target, "quantised in a form that is not read here", *(f"self_attn.q_proj.{one}" for one in parts))


@pytest.mark.parametrize("scale", [None, torch.ones(2), torch.ones(1)])
def test_nvfp4_needs_the_scale_of_scales(scale, target, tmp_path):
    stored, _ = quantise(make_weights(PLAIN), "nvfp4")
    name = "layers.0.mlp.up_proj.weight_global_scale"
    stored = {key: scale if key == name else one for key, one in stored.items() if key != name or scale is not None}
    folder = write("specforge", tmp_path, PLAIN, stored, quantization_config=groups_of(16))
    if scale is not None and len(scale) == 1:
        assert len(stored_layers(AutoDrafter.from_pretrained(folder, target))) == 7
    else:
        refuse(folder, target, "form that is not read here", "up_proj.weight_packed U8 [48, 16]")


def test_packed_weights_of_another_size(target, tmp_path):
    """As those of 8 bits in words are."""
    stored, _ = quantise(make_weights(PLAIN), "int4-rows")
    name = "layers.0.mlp.up_proj.weight"
    stored[f"{name}_packed"] = torch.cat([stored[f"{name}_packed"]] * 2, 1)
    refuse(write("specforge", tmp_path, PLAIN, stored), target, f"wrong shapes: {name} is [48, 64], expected [48, 32]")


@pytest.mark.parametrize(
    "parts",
    [
        {"q_proj.weight_packed": "int32", "q_proj.weight_scale": "float32", "q_proj.weight_shape": "int64"},
        {"q_proj.qweight": "int32", "q_proj.qzeros": "int32", "q_proj.scales": "float16"},
        {"q_proj.weight": "uint8", "q_proj.weight_scale": "float8_e4m3fn", "q_proj.weight_scale_2": "float32"},
        {"q_proj.weight": "int8", "q_proj.weight_scale": "float32", "q_proj.weight_zero_point": "int8"},
        {"q_proj.weight": "float8_e4m3fn", "q_proj.weight_scale": "float32"},
    ],
    ids=["compressed-tensors", "awq", "nvfp4", "asymmetric", "odd-blocks"],
)
def test_quantised_in_another_form(parts, target, tmp_path):
    weights = make_weights(PLAIN)
    del weights["layers.0.self_attn.q_proj.weight"]
    weights |= {
        f"layers.0.self_attn.{name}": torch.zeros(5, 7).to(getattr(torch, kind)) for name, kind in parts.items()
    }
    if len(parts) == 2:
        weights["layers.0.self_attn.q_proj.weight"] = torch.zeros(32, 64).to(FP8)
    refuse(write("specforge", tmp_path, PLAIN, weights), target, "quantised in a form that is not read here", "q_proj")


@pytest.mark.parametrize(("form", "block"), [("blocks", 128), ("blocks", 16), *((form, 128) for form in FOUR_BITS)])
def test_quantised_modules(form, block, tmp_path):
    """As DeepSeek-V3 is published: FP8 with a scale for each block, also of experts, which become plain."""
    at = publish("deepseek-v3", tmp_path / "target")
    file, tensors = at.folder / "model.safetensors", load_file(at.folder / "model.safetensors")
    module = {k: v for k, v in tensors.items() if k.startswith("model.layers.3.")}
    stored, plain = quantise(module, form, (block, block))
    save_file(tensors | plain, file, metadata={"format": "pt"})
    expected = AutoDrafter.from_pretrained(at.folder, at.target)
    config = json.loads((at.folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [block, block]}
    if form in FOUR_BITS:
        config["quantization_config"] = groups_of(FOUR_BITS[form][1])
    (at.folder / "config.json").write_text(json.dumps(config))
    others = {name: one for name, one in tensors.items() if name not in module}
    save_file(others | stored, file, metadata={"format": "pt"})
    drafter = AutoDrafter.from_pretrained(at.folder, at.target)
    assert any(".experts.1.down_proj.weight_scale" in name for name in stored)
    assert {one.in_features for one in stored_layers(drafter).values()} == ({16, 32, 64} if block == 128 else {16})
    own, theirs = dequantised_state(drafter), expected.state_dict()
    assert own.keys() == theirs.keys() and all(torch.equal(one, theirs[name]) for name, one in own.items())
    assert "quantization_config" not in drafter.config.block
    inputs = padded_prompts([9, 4])
    texts = [greedy(at.target, inputs, one, 3) for one in (drafter, expected)]
    assert torch.equal(texts[0], greedy(at.target, inputs)) and torch.equal(*texts)
    assert drafter.stats.accepted_per_position == expected.stats.accepted_per_position


@pytest.mark.parametrize("layer", [0, 3])
def test_nextn_export(layer, tmp_path):
    """SGLang's export of the module alone: in its first form as layer 0, now beside the index of the whole model."""
    at = publish("deepseek-v3", tmp_path / "target", max_shard_size="8KB")
    expected = AutoDrafter.from_pretrained(at.folder, at.target)
    tensors = {k: v for file in at.folder.glob("*.safetensors") for k, v in load_file(file).items()}
    for file in at.folder.glob("*.safetensors"):
        file.unlink()
    config = json.loads((at.folder / "config.json").read_text()) | {"architectures": ["DeepseekV3ForCausalLMNextN"]}
    if layer == 0:
        config["num_hidden_layers"] = 1
        (at.folder / "model.safetensors.index.json").unlink()
    (at.folder / "config.json").write_text(json.dumps(config))
    module = {k.replace(".3.", f".{layer}.", 1): v for k, v in tensors.items() if k.startswith("model.layers.3.")}
    save_file(module, at.folder / "nextn_layer_parameters.safetensors")
    drafter = AutoDrafter.from_pretrained(at.folder, at.target)
    assert type(drafter) is type(expected)
    own, theirs = drafter.state_dict(), expected.state_dict()
    assert own.keys() == theirs.keys() and all(torch.equal(one, theirs[name]) for name, one in own.items())


REFUSED = {
    "Medusa's own files": ({"medusa_num_heads": 5, "medusa_num_layers": 1}, "Medusa heads"),
    "Hydra's own files": ({"hydra_num_heads": 4, "hydra_head_arch": "mlp"}, "Hydra heads"),
    "Arctic": ({"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"], "n_predict": 3}, "an LSTM speculator"),
    "DFlare": ({"architectures": ["QwenDFlareDraftModel"], "block_size": 16, "dflash_config": {}}, "DFlare"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_without_weight_files_of_usual_names(case, target, tmp_path):
    config, family = REFUSED[case]
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save({"0.0.linear.weight": torch.zeros(2)}, tmp_path / "medusa_lm_head.pt")
    refuse(tmp_path, target, "a drafter of another family", family)


def test_refused_formats(target, tmp_path):
    (tmp_path / "params.json").write_text(json.dumps({"dim": 32}))
    refuse(tmp_path, target, "Mistral's own format", "Use an EAGLE-3 drafter")
    folder = write_draft_model(tmp_path / "b", dflash_config={"mask_token_id": 5})
    torch.save({"mask_token_id": 5, "embedding": torch.zeros(32)}, folder / "mask_embedding.pt")
    refuse(folder, target, "an embedding of its mask token", "mask_embedding.pt")


UNLISTED = {
    "deepseek_v32": "model.layers.2.eh_proj.weight",
    "glm4_moe_lite": "model.layers.2.eh_proj.weight",
    "ernie4_5_moe": "model.mtp_block.0.self_attn.q_proj.weight",
    "longcat_flash": "model.mtp.layers.0.eh_proj.weight",
    "nemotron_h": "mtp.layers.0.eh_proj.weight",
    "exaone_moe": "mtp.fc.weight",
    "minimax_m3": "model.mtp_modules.0.eh_proj.weight",
    "mimo_v2_flash": "model.mtp.layers.0.eh_proj.weight",
}


@pytest.mark.parametrize("model_type", UNLISTED)
def test_modules_of_other_models(model_type, target, tmp_path):
    """MTP modules of models that are not in the table are refused by their name, for the model that they are of."""
    config = {"model_type": model_type, "architectures": ["XForCausalLM"], "num_hidden_layers": 2, "hidden_size": 32}
    key = "num_mtp_modules" if model_type == "minimax_m3" else "num_nextn_predict_layers"
    (tmp_path / "config.json").write_text(json.dumps(config | {key: 1}))
    save_file({UNLISTED[model_type]: torch.zeros(1)}, tmp_path / "model.safetensors")
    same = LlamaConfig(hidden_size=32, num_hidden_layers=2)
    same.model_type = model_type
    with pytest.raises(ValueError, match=r"MTP modules .*of a model type that is not supported; expected one of"):
        read_checkpoint(open_checkpoint(tmp_path), same)
