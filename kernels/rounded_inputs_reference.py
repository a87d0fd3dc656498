"""PyTorch reference of inputs that a layer rounds to the format of its stored weight, in groups with a scale each."""

from __future__ import annotations

import torch

from .types import StoredWeight

# What the largest number of a row's inputs becomes, by the format that they are rounded to.
LARGEST = {torch.float8_e4m3fn: 448, torch.int8: 127.5}
# The least scale of inputs.
LEAST_SCALE = 1e-12


def round_inputs(inputs: torch.Tensor, weight: StoredWeight) -> torch.Tensor:
    """`inputs` `[..., in]` as groups of numbers in the format of `weight` with a scale each are, computed in float32 at
    least."""
    values, kind = inputs.to(torch.promote_types(inputs.dtype, torch.float32)), weight.values.dtype
    size, group = values.shape[-1], weight.group
    groups = torch.nn.functional.pad(values, (0, -size % group)).unflatten(-1, (-1, group))
    largest = groups.abs().amax(-1, keepdim=True)
    # Not by a Python number: on a GPU torch multiplies by the reciprocal of that.
    scale = (largest / torch.full_like(largest, LARGEST[kind])).clamp(min=LEAST_SCALE)
    rounded = groups / scale
    rounded = rounded.round().clamp(-128, 127) if kind == torch.int8 else rounded.to(kind).to(values.dtype)
    return (rounded * scale).flatten(-2)[..., :size]


def rounded_inputs(inputs: torch.Tensor, weight: StoredWeight) -> torch.Tensor:
    """`round_inputs` in the dtype of `inputs`."""
    return round_inputs(inputs, weight).to(inputs.dtype)
