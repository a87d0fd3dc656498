"""PyTorch references of stored (quantised) weights, and of the rounding of inputs to their formats.

    weight[o, k] = (values[o, k] - zeros[o / rows, k / group]) * scales[o / rows, k / group]

4-bit numbers are unsigned with zero points, 8 if `zeros` is None, or they index 16 `codes`, without zero points. Other
numbers have no zero points. With s = scales[...], scale number i of the weight may also be

    s / outer                                   or      scale_codes[s] * outer[i / 256] + shift
"""

from __future__ import annotations

import torch

from .types import SCALES_OF_OUTER, StoredWeight

# The magnitude that the largest of a group of inputs is scaled to, by the format to which inputs are rounded.
LARGEST = {torch.float8_e4m3fn: 448, torch.int8: 127.5}
# The least scale of inputs.
LEAST_SCALE = 1e-12
# The zero point of 4-bit integers without `zeros`.
ZERO_POINT = 8
# e2m1 has two bits of exponent and one of fraction. nf4 are quantiles of a normal distribution (Dettmers et al., QLoRA,
# 2023, Appendix E); bitsandbytes packs the first of two numbers in the high half of a byte.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CODES = {
    "e2m1": (*_E2M1, *(-code for code in _E2M1)),
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
}


def dequantise(weight: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight `[out, in]`, or `[experts, out, in]`, computed in `dtype`."""
    values = weight.values
    if values.dtype == torch.uint8:
        halves = values & 0xF, values >> 4
        values = torch.stack(halves[::-1] if weight.codes == "nf4" else halves, dim=-1).flatten(-2)
        if weight.codes is not None:
            values = torch.tensor(CODES[weight.codes], dtype=dtype, device=values.device)[values.long()]
        else:
            values = values.to(dtype)
            values = values - (ZERO_POINT if weight.zeros is None else _spread(weight.zeros.to(dtype), weight))
    values = values.to(dtype) * _spread(_scales(weight, dtype), weight)
    return values if weight.order is None else torch.empty_like(values).index_copy_(-1, weight.order, values)


def _scales(weight: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
    scales = weight.scales
    if weight.scale_codes is not None:
        number = torch.arange(scales.numel(), device=scales.device).view_as(scales)
        outer = weight.outer.to(dtype)[number // SCALES_OF_OUTER]
        return weight.scale_codes.to(dtype)[scales.long()] * outer + weight.shift.to(dtype)
    return scales.to(dtype) if weight.outer is None else scales.to(dtype) * weight.outer.reciprocal().to(dtype)


def _spread(scales: torch.Tensor, weight: StoredWeight) -> torch.Tensor:
    """`scales` of blocks, repeated for every element; of dimensions with one block they broadcast."""
    for dim, size in ((-2, weight.rows), (-1, weight.group)):
        if scales.shape[dim] > 1:
            scales = scales.repeat_interleave(size, dim).narrow(dim, 0, weight.shape[dim])
    return scales


def rounded_inputs(inputs: torch.Tensor, weight: StoredWeight) -> torch.Tensor:
    """`inputs` `[..., in]` rounded to the format of `weight`, with a scale for each group, and then to their dtype."""
    values, kind = inputs.to(torch.promote_types(inputs.dtype, torch.float32)), weight.values.dtype
    size, group = values.shape[-1], weight.group
    groups = torch.nn.functional.pad(values, (0, -size % group)).unflatten(-1, (-1, group))
    largest = groups.abs().amax(-1, keepdim=True)
    # A tensor: on a GPU torch divides by a Python number by multiplying with its reciprocal.
    scale = (largest / torch.full_like(largest, LARGEST[kind])).clamp(min=LEAST_SCALE)
    rounded = groups / scale
    rounded = rounded.round().clamp(-128, 127) if kind == torch.int8 else rounded.to(kind).to(values.dtype)
    return (rounded * scale).flatten(-2)[..., :size].to(inputs.dtype)
