"""PyTorch reference of heads as float8: elements in e4m3, and a scale for each head of each token.

For a head x of D elements with the largest magnitude a:

    scale = the smallest power of two, at least `LEAST_SCALE`, with a / scale <= 448; NaN if a is not finite
    stored = x / scale, rounded to e4m3

A scale depends only on its own head and token: the contents of a slot are a function of the text, and nothing is
calibrated. Powers of two divide exactly, and every e4m3 number times a power of two is a 16-bit number. So heads that
are read and stored again do not change, and only the rounding to e4m3 loses bits.
"""

from __future__ import annotations

import torch

FLOAT8 = torch.float8_e4m3fn
# The smallest positive float16 number: scales may be stored as float16.
LEAST_SCALE = 2.0**-24
# Bits of float32: a mantissa above 1.75 (448 is 1.75 * 2^8) carries into the exponent. The kernel does the same.
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
    """Heads `[..., D]` in the dtype of `scales` `[...]`, from the result of `quantise`: float8 `[..., D]`, or its
    `as_bytes`."""
    return stored.view(FLOAT8).to(scales.dtype) * scales[..., None]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, viewed as uint8 if it is float8: some versions of torch do not index float8 on every device."""
    return tensor.view(torch.uint8) if tensor.dtype == FLOAT8 else tensor
