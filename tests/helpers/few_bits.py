"""Checkpoints of drafters in 8 or 4 bits, with scales that are powers of two, so that nothing is rounded.

Numbers of 4 bits are packed by compressed-tensors.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_specdec import Drafter, ops
from hf_specdec.modules.stored_linear import StoredLinear
from hf_specdec.modules.weights import weight_of

EIGHT_BITS = ("tensor", "rows", "int8", "blocks")
# Their kinds of numbers in `DrafterConfig.stored_layers`, and the inputs of a scale; None for all.
FOUR_BITS = {"int4": ("int4", 32), "int4-rows": ("int4", None), "nvfp4": ("nvfp4", 16), "mxfp4": ("mxfp4", 32)}
FORMS = (*EIGHT_BITS, *FOUR_BITS)


def quantise(
    weights: dict[str, torch.Tensor],
    form: str,
    block: tuple[int, int] = (128, 128),
    chosen: Callable[[str], bool] = lambda name: name.endswith("proj.weight"),
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """`weights` as an exporter quantises them, and the same weights plain.

    Forms: `"tensor"`, `"rows"`, `"blocks"` in FP8, `"int8"` by rows, and those of `FOUR_BITS`.
    """
    plain, stored = {}, {}
    for name, weight in weights.items():
        if weight.dim() != 2 or not chosen(name) or (form in FOUR_BITS and weight.shape[1] % 8):
            plain[name] = stored[name] = weight
            continue
        if form in FOUR_BITS:
            parts, plain[name] = _in_four_bits(weight, *FOUR_BITS[form])
            stored |= {f"{name}_{part}": one for part, one in parts.items()}
            continue
        rows, columns = weight.shape
        is_int8 = form == "int8"
        values = (weight * 40).round() if is_int8 else weight
        values = values.clamp(-100, 100).to(torch.int8 if is_int8 else torch.float8_e4m3fn)
        shape = {
            "tensor": (),
            "rows": (rows, 1),
            "int8": (rows, 1),
            "blocks": (-(-rows // block[0]), -(-columns // block[1])),
        }
        scale = 2.0 ** (torch.arange(max(1, torch.Size(shape[form]).numel())) % 3 - 1).reshape(shape[form])
        full = scale
        if form == "blocks":
            full = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]
        plain[name] = values.float() * full
        suffix = "_scale_inv" if form == "blocks" else "_scale"
        stored |= {name: values, name + suffix: scale, name.replace("weight", "input_scale"): torch.ones(())}
    return stored, plain


def _in_four_bits(weight: torch.Tensor, kind: str, group: int | None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The parts of `weight`, and the weight that they stand for."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    rows, columns = weight.shape
    group = group or columns
    exponents = (torch.arange(rows * -(-columns // group)) % 3 - 1).reshape(rows, -1)
    scales = (2.0**exponents).repeat_interleave(group, 1)[:, :columns]
    if kind == "int4":
        values = (weight * 10).round().clamp(-8, 7)
        parts = {"packed": pack_to_int32(values.to(torch.int8), 4), "shape": torch.tensor(weight.shape)}
        return parts | {"scale": (2.0**exponents).bfloat16()}, values * scales
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = codes[(weight.abs()[..., None] * 10 - codes).abs().argmin(-1)] * weight.sign()
    packed = pack_fp4_to_uint8(values)
    if kind == "mxfp4":
        return {"packed": packed, "scale": (exponents + 127).to(torch.uint8)}, values * scales
    parts = {
        "packed": packed,
        "scale": (4 * 2.0**exponents).to(torch.float8_e4m3fn),
        "global_scale": torch.tensor([4.0]),
    }
    return parts, values * scales


def save_quantised(drafter: Drafter, folder: Path, form: str, chosen: Callable[[str], bool] | None = None) -> None:
    """Save `drafter` in the normal form; its linear layers, or those whose weights are `chosen`, in 8 or 4 bits."""
    layers = {f"{name}.weight" for name, one in drafter.named_modules() if isinstance(one, nn.Linear)}
    drafter.save_pretrained(folder)
    file = folder / "model.safetensors"
    before = load_file(file)
    stored, _ = quantise(before, form, chosen=chosen or layers.__contains__)
    save_file(stored, file, metadata={"format": "pt"})
    if form in FOUR_BITS:
        config, (kind, group) = json.loads((folder / "config.json").read_text()), FOUR_BITS[form]
        quantised = {name.removesuffix(".weight"): one for name, one in before.items() if f"{name}_packed" in stored}
        config["stored_layers"] = {name: [kind, 1, group or one.shape[1]] for name, one in quantised.items()}
        (folder / "config.json").write_text(json.dumps(config))


def stored_layers(drafter: nn.Module) -> dict[str, StoredLinear]:
    return {name: one for name, one in drafter.named_modules() if isinstance(one, StoredLinear)}


def dequantised_state(drafter: Drafter) -> dict[str, torch.Tensor]:
    """The state of `drafter`, if its quantised layers were plain."""
    state = drafter.state_dict()
    for name, layer in stored_layers(drafter).items():
        state = {key: one for key, one in state.items() if not key.startswith(f"{name}.weight")}
        state[f"{name}.weight"] = ops.dequantise_weight(weight_of(layer), torch.float32).to(drafter.dtype)
    return state
