"""Checkpoints in FP8 with scales of 128 x 128 blocks, as DeepSeek, Qwen and GLM publish them, and transformers' product
by torch."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from targets import FAMILIES, new_target
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations import finegrained_fp8
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

BLOCK = 128
# Several blocks of experts in each direction.
SIZES = {"hidden_size": 2 * BLOCK, "moe_intermediate_size": BLOCK, "initializer_range": 0.1}
_LAYERS = re.compile(r"layers\..*_(proj|proj_with_mqa)\.weight$")
_SETTINGS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def save_float8(family: str, folder: Path, scale_fmt: str = "float") -> None:
    """Save a random target with its layers and experts quantised, in one file; `ue8m0`: with scales that are powers of
    2, in float32 as DeepSeek publishes them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, family, FAMILIES[family] | SIZES)
        new_target(family).save_pretrained(folder)
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(file)
    for name in [name for name in tensors if _LAYERS.search(name)]:
        tensors[name], tensors[f"{name}_scale_inv"] = _quantised(tensors[name], scale_fmt)
    save_file(tensors, file, metadata={"format": "pt"})
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"quantization_config": {**_SETTINGS, "scale_fmt": scale_fmt}})
    )


def _quantised(weight: torch.Tensor, scale_fmt: str) -> tuple[torch.Tensor, torch.Tensor]:
    size_out, size_in = weight.shape
    parts = F.pad(weight, (0, -size_in % BLOCK, 0, -size_out % BLOCK))
    parts = parts.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scales = parts.abs().amax((1, 3)) / 448
    scales = scales.log2().ceil().exp2() if scale_fmt == "ue8m0" else scales
    values = (parts / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return values.flatten(2).flatten(0, 1)[:size_out, :size_in].contiguous(), scales


def load_float8(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The target of `folder`, on a CPU, where transformers by itself makes bfloat16 of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *args, **kwargs: None)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def _matmul(inputs, weight, scales, block_size, dtype=None, activation_scale=None):
    """Sums in float32 of numbers in e4m3 times scales: of weights' blocks, and of groups of inputs."""
    groups = F.pad(inputs.float(), (0, -inputs.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    largest = groups.abs().amax(-1, keepdim=True) / 448
    largest = largest.where(largest > 0, 1)
    rounded = ((groups / largest).to(torch.float8_e4m3fn).float() * largest).flatten(-2)[..., : inputs.shape[-1]]
    factors = scales.float().repeat_interleave(BLOCK, 0)[: len(weight)].repeat_interleave(BLOCK, 1)
    return (rounded @ (weight.float() * factors[:, : weight.shape[1]]).T).to(inputs.dtype)


def _batched(inputs, weight, scales, block_size, expert_ids):
    by_expert = torch.stack([_matmul(inputs, *one, block_size) for one in zip(weight, scales, strict=True)])
    return by_expert[expert_ids, torch.arange(len(inputs), device=inputs.device)]


def _grouped(inputs, weight, scales, offsets, tokens_per_expert, block_size):
    *parts, others = torch.tensor_split(inputs, offsets.tolist())
    found = [_matmul(*one, block_size) for one in zip(parts, weight, scales, strict=True)]
    return torch.cat([*found, others.new_full((len(others), weight.shape[1]), torch.nan)])


def without_kernels_of_the_hub(patch: pytest.MonkeyPatch) -> None:
    """Let transformers' layers compute by torch, in place of the kernels that it fetches for a GPU."""
    patch.setenv("TRANSFORMERS_DISABLE_DEEPGEMM_LINEAR", "1")
    products = finegrained_fp8.FineGrainedFP8(_matmul, _batched, _grouped)
    patch.setattr(finegrained_fp8, "load_finegrained_fp8_kernel", lambda: products)
