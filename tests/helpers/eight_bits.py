"""Checkpoints of drafters in 8 bits, with scales that are powers of two, so that nothing is rounded."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hf_specdec import Drafter, ops
from hf_specdec.modules.stored_linear import StoredLinear
from hf_specdec.modules.weights import weight_of

FORMS = ("tensor", "rows", "int8", "blocks")


def quantise(
    weights: dict[str, torch.Tensor],
    form: str,
    block: tuple[int, int] = (128, 128),
    chosen: Callable[[str], bool] = lambda name: name.endswith("proj.weight"),
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """`weights` as an exporter quantises them, and the same weights plain.

    Forms: `"tensor"`, `"rows"`, `"blocks"` in FP8, `"int8"` by rows.
    """
    plain, stored = {}, {}
    for name, weight in weights.items():
        if weight.dim() != 2 or not chosen(name):
            plain[name] = stored[name] = weight
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


def save_quantised(drafter: Drafter, folder: Path, form: str, chosen: Callable[[str], bool] | None = None) -> None:
    """Save `drafter` in the normal form; its linear layers, or those whose weights are `chosen`, in 8 bits."""
    layers = {f"{name}.weight" for name, one in drafter.named_modules() if isinstance(one, nn.Linear)}
    drafter.save_pretrained(folder)
    file = folder / "model.safetensors"
    stored, _ = quantise(load_file(file), form, chosen=chosen or layers.__contains__)
    save_file(stored, file, metadata={"format": "pt"})


def stored_layers(drafter: nn.Module) -> dict[str, StoredLinear]:
    return {name: one for name, one in drafter.named_modules() if isinstance(one, StoredLinear)}


def dequantised_state(drafter: Drafter) -> dict[str, torch.Tensor]:
    """The state of `drafter`, if its quantised layers were plain."""
    state = drafter.state_dict()
    for name, layer in stored_layers(drafter).items():
        del state[f"{name}.weight_scale"]
        state[f"{name}.weight"] = ops.dequantise_weight(weight_of(layer), torch.float32).to(drafter.dtype)
    return state
