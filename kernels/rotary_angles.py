"""Triton cosines and sines of a rotary embedding, see `rotary_angles_reference`.

In float32, with the functions that PyTorch's kernels use, so that results are the same bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from .launch import Unspecialised, dependent_launch, kernel, wait_for_inputs


@kernel
def _rotary_angles_kernel(
    frequencies_ptr,
    positions_ptr,
    cos_ptr,
    sin_ptr,
    num_tokens: Unspecialised,
    positions_stride_b: Unspecialised,
    positions_stride_n: Unspecialised,
    scaling,
    ANGLES: tl.constexpr,
    REPEATS: tl.constexpr,
    LIBDEVICE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The angles of one token.

    Grid: (B * n,). Reads a position and all `frequencies`; writes a row of `cos` and of `sin`. Without LIBDEVICE, which
    the interpreter lacks, the last bits may differ.
    """
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    is_pair = pair < ANGLES
    frequency = tl.load(frequencies_ptr + pair, mask=is_pair, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    row, column = token // num_tokens, token % num_tokens
    position = tl.load(positions_ptr + row * positions_stride_b + column * positions_stride_n)
    angle = position.to(tl.float32) * frequency
    cos = (libdevice.cos(angle) if LIBDEVICE else tl.cos(angle)) * scaling
    sin = (libdevice.sin(angle) if LIBDEVICE else tl.sin(angle)) * scaling
    cos = cos.to(cos_ptr.dtype.element_ty)
    sin = sin.to(sin_ptr.dtype.element_ty)
    size: tl.constexpr = ANGLES if REPEATS == "once" else 2 * ANGLES
    first = 2 * pair if REPEATS == "pairs" else pair
    tl.store(cos_ptr + token * size + first, cos, mask=is_pair)
    tl.store(sin_ptr + token * size + first, sin, mask=is_pair)
    if REPEATS != "once":
        second = first + (1 if REPEATS == "pairs" else ANGLES)
        tl.store(cos_ptr + token * size + second, cos, mask=is_pair)
        tl.store(sin_ptr + token * size + second, sin, mask=is_pair)


def rotary_angles(frequencies, positions, dtype, kind):
    """See `rotary_angles_reference.rotary_angles`. One launch that depends on shapes and strides only."""
    assert frequencies.is_contiguous(), "frequencies must be contiguous"
    batch, num_tokens = positions.shape
    count = len(frequencies)
    size = count if kind.repeats == "once" else 2 * count
    cos, sin = (torch.empty(batch, num_tokens, size, dtype=dtype, device=positions.device) for _ in range(2))
    if cos.numel() == 0:
        return cos, sin
    block = triton.next_power_of_2(count)
    _rotary_angles_kernel[(batch * num_tokens,)](
        frequencies,
        positions,
        cos,
        sin,
        num_tokens,
        *positions.stride(),
        float(kind.scaling),
        ANGLES=count,
        REPEATS=kind.repeats,
        LIBDEVICE=positions.is_cuda,
        BLOCK=block,
        num_warps=max(1, min(4, block // 32)),
        # The product is rounded before the functions reduce it.
        enable_fp_fusion=False,
        **dependent_launch(positions.device),
    )
    return cos, sin
