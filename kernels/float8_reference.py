"""PyTorch reference of heads as float8: elements in e4m3, and a scale for each head of each token.

For a head x of D elements, with the largest magnitude a:

    scale = the smallest power of two, at least `LEAST_SCALE`, by which a / scale <= 448; NaN if a is not finite
    stored = x / scale, rounded to e4m3

A scale depends on its own head and token only: what a slot holds is a function of the text, nothing is calibrated, and
stored heads are stored as they are when they are read and stored again. Powers of two divide exactly, and every e4m3
number times one is a number of 16-bit types: what is read is what was rounded once.
"""

from __future__ import annotations

import torch

FLOAT8 = torch.float8_e4m3fn
# The smallest number of float16, in which scales may be stored.
LEAST_SCALE = 2.0**-24
# Bits of float32: of a number beyond 1.75 (448 is 1.75 * 2^8) a carry into the exponent, which the kernel uses, too.
_CARRY, _MANTISSA, _BIAS = 0x1FFFFF, 23, 127
_LEAST_EXPONENT = _BIAS - 24


def quantise(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads `[..., D]` as float8 of the same shape, and their scales `[...]` in the dtype of `states`."""
    single = states.float()
    if not states.shape[-1]:
        return states.to(FLOAT8), states.new_full(states.shape[:-1], LEAST_SCALE)
    largest = (single.view(torch.int32) & 0x7FFFFFFF).amax(dim=-1)
    exponent = (((largest + _CARRY) >> _MANTISSA) - 8).clamp(min=_LEAST_EXPONENT)
    scale, inverse = ((one << _MANTISSA).view(torch.float32) for one in (exponent, 2 * _BIAS - exponent))
    scale = scale.masked_fill(largest >= 0x7F800000, float("nan"))
    return (single * inverse[..., None]).to(FLOAT8), scale.to(states.dtype)


def dequantise(stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What `quantise` has made float8 `[..., D]`, or its `as_bytes`, and `scales` `[...]` of, rounded: in the dtype of
    the scales."""
    return stored.view(FLOAT8).to(scales.dtype) * scales[..., None]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, if it is float8 as uint8: some versions of torch do not index float8 on every device."""
    return tensor.view(torch.uint8) if tensor.dtype == FLOAT8 else tensor
