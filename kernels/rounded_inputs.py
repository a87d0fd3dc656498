"""Triton rounding of the inputs of a layer; the reference is `rounded_inputs_reference.rounded_inputs`.

Shapes: inputs and result `[n, in]`. Numbers are rounded in float32, by integers and additions that every GPU has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import dependent_launch, kernel, wait_for_inputs
from .rounded_inputs_reference import LARGEST, LEAST_SCALE

# Inputs of a program whose groups are smaller.
_INPUTS = 2048
_LEAST = tl.constexpr(LEAST_SCALE)


@triton.jit
def _to_int8(values):
    """float32 rounded to integers, half to even, from -128 to 127."""
    rounded = (values + 12582912.0) - 12582912.0  # 1.5 * 2^23, where the distance of numbers is 1
    return tl.where(rounded > 127.0, 127.0, rounded)


@triton.jit
def _to_e4m3(values):
    """float32 of up to 448 rounded to numbers of e4m3, half to even."""
    bits = values.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (values + 24576.0) - 24576.0  # 1.5 * 2^14, where the distance of numbers is 2^-9
    return tl.where(tl.abs(values) < 0.015625, small, normal)


@kernel
def _round_kernel(
    inputs_ptr,
    out_ptr,
    size_in,
    inputs_stride,
    group,
    LARGEST: tl.constexpr,
    IS_INT8: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """GROUPS groups of one row.

    Grid: (rows, blocks of groups). Reads the program's elements of `inputs`; writes those of `out`.
    """
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    index = tl.arange(0, BLOCK)
    column = number[:, None] * group + index[None, :]
    is_column = (index < group)[None, :] & (column < size_in)
    wait_for_inputs(PDL)
    inputs = tl.load(inputs_ptr + row * inputs_stride + column, mask=is_column, other=0.0)
    values = inputs.to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(values), axis=1), LARGEST), _LEAST)[:, None]
    values = tl.div_rn(values, tl.broadcast_to(scale, values.shape))
    rounded = _to_int8(values) if IS_INT8 else _to_e4m3(values)
    tl.store(out_ptr + row * size_in + column, (rounded * scale).to(inputs.dtype), mask=is_column)


def rounded_inputs(inputs, weight):
    """See `rounded_inputs_reference.rounded_inputs`. One launch that depends on shapes and strides only."""
    size_in = inputs.shape[-1]
    rows = inputs.reshape(-1, size_in)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty(rows.shape, dtype=inputs.dtype, device=inputs.device)
    if out.numel() == 0:
        return out.view(inputs.shape)
    group = min(weight.group, size_in)
    block = triton.next_power_of_2(group)
    groups = max(_INPUTS // block, 1)
    _round_kernel[(len(rows), triton.cdiv(triton.cdiv(size_in, group), groups))](
        rows,
        out,
        size_in,
        rows.stride(0),
        group,
        LARGEST=float(LARGEST[weight.values.dtype]),
        IS_INT8=weight.values.dtype == torch.int8,
        GROUPS=groups,
        BLOCK=block,
        num_warps=4 if block <= 4096 else 8 if block <= 16384 else 16,
        enable_fp_fusion=False,
        **dependent_launch(inputs.device),
    )
    return out.view(inputs.shape)
