"""Heads as float8 inside Triton kernels; the formula is in `float8_reference`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def magnitudes(values):
    """Bits of the magnitudes of float32 `values`; as int32 they have the order of the magnitudes, NaN last."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scales_of(largest):
    """Scales of heads whose largest `magnitudes` are `largest`, and the scales' reciprocals; float32."""
    exponent = tl.maximum(((largest + 0x1FFFFF) >> 23) - 8, 103)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(largest < 0x7F800000, scale, float("nan")), inverse


def pairs_of(scales: torch.Tensor) -> torch.Tensor:
    """`[...]` integers of twice the size, each with both of `scales` `[..., 2]`, so that one load reads both."""
    assert scales.stride(2) % 2 == 0 and scales.stride(1) == 2, "scales of heads must be adjacent"
    return scales.view(torch.int32 if scales.itemsize == 2 else torch.int64)[..., 0]


@triton.jit
def first_of_pair(pairs, DTYPE: tl.constexpr):
    """The first scale of each of `pairs_of`, in float32; DTYPE is the dtype of the scales."""
    half: tl.constexpr = tl.int16 if DTYPE.primitive_bitwidth == 16 else tl.int32
    return pairs.to(half).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def second_of_pair(pairs, DTYPE: tl.constexpr):
    """The second scale of each of `pairs_of`, in float32."""
    return first_of_pair(pairs >> DTYPE.primitive_bitwidth, DTYPE)
