"""Checkpoints of AWQ and GPTQ in the published layouts, with scales by the least and the largest weights."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

# The outputs of a word of AWQ, from its lowest bits on.
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)


class Packed(NamedTuple):
    """How `save_packed` stores linear layers, but those with a part of `excluded` in their names; `desc_act` puts
    inputs into groups at random."""

    method: str
    bits: int = 4
    group: int = 32
    symmetric: bool = False
    desc_act: bool = False
    format: str = "gptq"
    excluded: tuple[str, ...] = ()
    stated: tuple[str, ...] = ()

    @property
    def settings(self) -> dict:
        """`quantization_config`, with the entries that published files have."""
        both = {"quant_method": self.method, "bits": self.bits, "group_size": self.group}
        if self.method == "awq":
            return both | {"modules_to_not_convert": list(self.stated) or None, "version": "gemm", "zero_point": True}
        return both | {
            "checkpoint_format": self.format,
            "damp_percent": 0.01,
            "desc_act": self.desc_act,
            "static_groups": False,
            "sym": self.symmetric,
            "true_sequential": True,
        }


def words(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Adjacent numbers of the last dimension in words of 32 bits, from the lowest bits on."""
    count = 32 // bits
    found = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // count), np.uint32)
    for place, source in enumerate(order or range(count)):
        found |= numbers[..., source::count].astype(np.uint32) << np.uint32(bits * place)
    return found


def pack(
    weight: np.ndarray, packed: Packed, generator: np.random.Generator
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors of a weight `[out, in]`, and what they stand for."""
    size_in, largest = weight.shape[1], 2**packed.bits - 1
    group = size_in if packed.group == -1 else packed.group
    groups = np.arange(size_in) // group
    if packed.desc_act:
        groups = groups[generator.permutation(size_in)]
    scales = np.zeros((weight.shape[0], groups.max() + 1), np.float16)
    zeros = np.zeros(scales.shape, np.int64)
    numbers, dense = np.zeros(weight.shape, np.int64), np.zeros(weight.shape, np.float32)
    for index in range(groups.max() + 1):
        part, inputs = weight[:, groups == index], groups == index
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if packed.symmetric:
            high = np.maximum(-low, high)
            low = -high
        scales[:, index] = (high - low) / largest
        scale = scales[:, index].astype(np.float32)[:, None]
        zeros[:, index] = (largest + 1) // 2 if packed.symmetric else (-low / scale[:, 0]).round().clip(0, largest)
        numbers[:, inputs] = ((part / scale).round() + zeros[:, index, None]).clip(0, largest)
        dense[:, inputs] = (numbers[:, inputs] - zeros[:, index, None]) * scale
    found = {"scales": scales.T}
    if packed.method == "awq":
        found["qweight"] = words(numbers.T, 4, AWQ_OUTPUTS)
        found["qzeros"] = words(zeros.T, 4, AWQ_OUTPUTS)
    else:
        ones = words(np.full_like(zeros.T, packed.format == "gptq"), packed.bits)
        found["qweight"] = words(numbers, packed.bits).T
        found["qzeros"] = words(zeros.T, packed.bits) - ones
        found["g_idx"] = groups.astype(np.uint32)
    return found, dense


def save_packed(model: PreTrainedModel, folder: Path, packed: Packed) -> None:
    """Save `model` with its linear layers, but the head, quantised; they get the weights that the file stands for."""
    generator = np.random.default_rng(0)
    head, tensors = model.get_output_embeddings(), {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer is not head and not set(packed.excluded) & set(name.split(".")):
            parts, dense = pack(layer.weight.detach().numpy(), packed, generator)
            layer.weight.data = torch.from_numpy(dense)
            for part, one in parts.items():
                one = np.ascontiguousarray(one)
                tensors[f"{name}.{part}"] = torch.from_numpy(one.view(np.int32) if one.dtype == np.uint32 else one)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    replaced = {name.rpartition(".")[0] for name in tensors}
    kept = {name: one for name, one in load_file(file).items() if name.removesuffix(".weight") not in replaced}
    save_file(kept | tensors, file, metadata={"format": "pt"})
    change_config(folder, quantization_config=packed.settings)


def change_config(folder: Path, **entries) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))
