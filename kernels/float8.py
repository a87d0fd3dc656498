"""Heads as float8 inside of Triton kernels; the formula is that of `float8_reference`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def magnitudes(values):
    """Bits of the magnitudes of float32 `values`: as int32 they are in the order of the numbers, NaN last."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scales_of(largest):
    """The scales of heads of which `largest` are the largest `magnitudes`, and what to multiply by; float32."""
    exponent = tl.maximum(((largest + 0x1FFFFF) >> 23) - 8, 103)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(largest < 0x7F800000, scale, float("nan")), inverse
