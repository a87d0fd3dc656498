"""Triton reductions of rows with one order of summation; the references are in `row_reductions_reference`.

All are in float32. A program reduces a whole row, and only the row's size determines its blocks and warps, so the bits
of a result do not depend on the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Unspecialised, kernel, wait_for_inputs

# Most elements of a row that a program reads at a time, each with a partial sum of its own; and elements of a warp.
_MOST_AT_A_TIME, _OF_A_WARP = 4096, 512
# Columns of a program, for sums over another dimension than the last.
_COLUMNS = 128


@kernel
def _sum_kernel(values_ptr, out_ptr, size: Unspecialised, BLOCK: tl.constexpr):
    """Sum of a row. Grid: (rows,). Reads a row of `values` `[rows, size]`; writes an element of `out` `[rows]`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    wait_for_inputs()
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        at = first + column
        total += tl.load(values_ptr + row * size + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty))


@kernel
def _strided_sum_kernel(values_ptr, out_ptr, size: Unspecialised, inner: Unspecialised, BLOCK: tl.constexpr):
    """Sums over the middle dimension, one element after the other.

    Grid: (outer, blocks of columns). Reads BLOCK columns of `values` `[outer, size, inner]`; writes those of `out`
    `[outer, inner]`.
    """
    outer = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < inner
    wait_for_inputs()
    values_ptr += outer * size * inner + column
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(size):
        total += tl.load(values_ptr, mask=is_column, other=0.0).to(tl.float32)
        values_ptr += inner
    tl.store(out_ptr + outer * inner + column, total.to(out_ptr.dtype.element_ty), mask=is_column)


@kernel
def _softmax_kernel(values_ptr, out_ptr, size: Unspecialised, IS_LOG: tl.constexpr, BLOCK: tl.constexpr):
    """Softmax of a row, or its logarithm.

    Grid: (rows,). Reads a row of `values` `[rows, size]` three times; writes that row of `out`.
    """
    values_ptr += tl.program_id(0).to(tl.int64) * size
    out_ptr += tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    wait_for_inputs()
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for first in range(0, size, BLOCK):
        at = first + column
        value = tl.load(values_ptr + at, mask=at < size, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, value)
    base = tl.max(largest, axis=0)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        at = first + column
        total += tl.exp(tl.load(values_ptr + at, mask=at < size, other=float("-inf")).to(tl.float32) - base)
    normaliser = tl.sum(total, axis=0)
    for first in range(0, size, BLOCK):
        at = first + column
        value = tl.load(values_ptr + at, mask=at < size, other=0.0).to(tl.float32) - base
        value = value - tl.log(normaliser) if IS_LOG else tl.exp(value) / normaliser
        tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=at < size)


@kernel
def _running_sum_kernel(values_ptr, out_ptr, size: Unspecialised, BLOCK: tl.constexpr):
    """Running sums of a row. Grid: (rows,). Reads a row of `values` `[rows, size]`; writes that row of `out`."""
    values_ptr += tl.program_id(0).to(tl.int64) * size
    out_ptr += tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    wait_for_inputs()
    before = 0.0
    for first in range(0, size, BLOCK):
        at = first + column
        value = tl.load(values_ptr + at, mask=at < size, other=0.0).to(tl.float32)
        running = before + tl.cumsum(value, axis=0)
        tl.store(out_ptr + at, running.to(out_ptr.dtype.element_ty), mask=at < size)
        before += tl.sum(value, axis=0)


def _block(size: int) -> dict[str, int]:
    """Block and warps of a program for a row of `size` elements."""
    block = max(16, min(_MOST_AT_A_TIME, triton.next_power_of_2(size)))
    return {"BLOCK": block, "num_warps": max(1, block // _OF_A_WARP)}


def row_sum(values, dtype):
    """See `row_reductions_reference.row_sum`; accumulates in float32. One launch; safe in a CUDA graph."""
    outer, size, inner = values.shape
    values = values.contiguous()
    out = values.new_empty(outer, inner, dtype=dtype)
    if inner == 1:
        _sum_kernel[(outer,)](values, out, size, **_block(size))
    else:
        _strided_sum_kernel[(outer, triton.cdiv(inner, _COLUMNS))](
            values, out, size, inner, BLOCK=_COLUMNS, num_warps=1
        )
    return out


def row_softmax(values, dtype, is_log):
    """See `row_reductions_reference.row_softmax`; in float32. One launch; safe in a CUDA graph."""
    values = values.contiguous()
    out = torch.empty_like(values, dtype=dtype)
    rows, size = values.shape
    _softmax_kernel[(rows,)](values, out, size, IS_LOG=is_log, **_block(size))
    return out


def row_cumsum(values, dtype):
    """See `row_reductions_reference.row_cumsum`; accumulates in float32. One launch; safe in a CUDA graph."""
    values = values.contiguous()
    out = torch.empty_like(values, dtype=dtype)
    rows, size = values.shape
    _running_sum_kernel[(rows,)](values, out, size, **_block(size))
    return out
