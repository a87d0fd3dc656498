"""PyTorch reference of weights that are stored as numbers of few bits.

    weight[o, k] = (values[o, k] - zeros[o / rows, k / group]) * scales[o / rows, k / group]

Numbers of 4 bits have no sign and a zero point each, 8 where `zeros` has none; others have none. Or they stand for one
of 16 numbers each, their `codes`, without zero points. With s = scales[...] a scale that is itself stored is

    s / outer, or for scale number i of the weight      scale_codes[s] * outer[i / 256] + shift
"""

from __future__ import annotations

import torch

from .types import SCALES_OF_OUTER, StoredWeight

# The number of 4 bits that stands for 0 where there are no zero points.
ZERO_POINT = 8
# e2m1 has two bits of exponent and one of fraction. nf4 are quantiles of a normal distribution (Dettmers et al., QLoRA,
# 2023, Appendix E), and the first of two numbers is in the high half of its byte, as bitsandbytes packs them.
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
    """The weight, computed in `dtype`, of each expert if there are any."""
    values = weight.values
    if values.dtype == torch.uint8:
        halves = values & 0xF, values >> 4
        values = torch.stack(halves[::-1] if weight.codes == "nf4" else halves, dim=-1).flatten(-2)
        if weight.codes is not None:
            values = torch.tensor(CODES[weight.codes], dtype=dtype, device=values.device)[values.long()]
        else:
            values = values.to(dtype)
            values = values - (ZERO_POINT if weight.zeros is None else _spread(weight.zeros.to(dtype), weight))
    return values.to(dtype) * _spread(_scales(weight, dtype), weight)


def _scales(weight: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
    scales = weight.scales
    if weight.scale_codes is not None:
        number = torch.arange(scales.numel(), device=scales.device).view_as(scales)
        outer = weight.outer.to(dtype)[number // SCALES_OF_OUTER]
        return weight.scale_codes.to(dtype)[scales.long()] * outer + weight.shift.to(dtype)
    return scales.to(dtype) if weight.outer is None else scales.to(dtype) * weight.outer.reciprocal().to(dtype)


def _spread(scales: torch.Tensor, weight: StoredWeight) -> torch.Tensor:
    """`scales` of blocks for every element."""
    for dim, size in ((-2, weight.rows), (-1, weight.group)):
        scales = scales.repeat_interleave(size, dim).narrow(dim, 0, weight.shape[dim])
    return scales
