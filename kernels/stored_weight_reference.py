"""PyTorch reference of weights that are stored as numbers of few bits.

    weight[o, k] = (values[o, k] - zeros[o / rows, k / group]) * scales[o / rows, k / group]

Numbers of 4 bits have no sign and a zero point each, 8 where `zeros` has none; others have none.
"""

from __future__ import annotations

import torch

from .types import StoredWeight

# The number of 4 bits that stands for 0 where there are no zero points.
ZERO_POINT = 8
# What the largest number of a row's inputs becomes, by the format that they are rounded to.
LARGEST = {torch.float8_e4m3fn: 448, torch.int8: 127.5}
_LEAST_SCALE = 1e-12


def dequantise(weight: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight `[out, in]`, computed in `dtype`."""
    values = weight.values
    if values.dtype == torch.uint8:
        values = torch.stack((values & 0xF, values >> 4), dim=-1).flatten(1).to(dtype)
        values = values - (ZERO_POINT if weight.zeros is None else _spread(weight.zeros.to(dtype), weight))
    return values.to(dtype) * _spread(weight.scales.to(dtype), weight)


def _spread(scales: torch.Tensor, weight: StoredWeight) -> torch.Tensor:
    """`scales` of blocks for every element."""
    for dim, size in enumerate((weight.rows, weight.group)):
        scales = scales.repeat_interleave(size, dim).narrow(dim, 0, weight.shape[dim])
    return scales


def round_inputs(inputs: torch.Tensor, weight: StoredWeight) -> torch.Tensor:
    """`inputs` `[..., in]` as groups of numbers in the format of `weight` with a scale each are, computed in float32 at
    least.
    """
    values, kind = inputs.to(torch.promote_types(inputs.dtype, torch.float32)), weight.values.dtype
    size, group = values.shape[-1], weight.group
    groups = torch.nn.functional.pad(values, (0, -size % group)).unflatten(-1, (-1, group))
    scale = (groups.abs().amax(-1, keepdim=True) / LARGEST[kind]).clamp(min=_LEAST_SCALE)
    rounded = groups / scale
    rounded = rounded.round().clamp(-128, 127) if kind == torch.int8 else rounded.to(kind).to(values.dtype)
    return (rounded * scale).flatten(-2)[..., :size]
