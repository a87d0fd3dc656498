"""Triton normalisation over the last dimension, also of a sum; the references are in `rms_norm_reference`.

Shapes: inputs, addend, total and result `[rows, D]`, weight `[D]`:

    result[r] = x[r] / sqrt(mean(x[r]^2) + eps) * (offset + weight),  x[r] = inputs[r], minus its mean if CENTERED
    total[r] = inputs[r] + addend[r], rounded to the dtype, which is normed instead of inputs[r]

A program computes whole rows. The order of its sums depends only on D and the dtype: so do the sizes of blocks, and the
launch lets Triton's compiler assume the same alignment for every number of rows and every stride. So the bits of a
row's result do not depend on the other rows.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .launch import Unspecialised, dependent_launch, kernel, wait_for_inputs
from .types import NormKind

# Fewest elements of a program: narrower rows share one.
_FEWEST_ELEMENTS = 2048
_ELEMENTS_OF_WARP, _MOST_WARPS = 512, 32
# Triton loads 16 bytes at a time if addresses of rows are divisible by 16, in bytes and in elements.
_ALIGNMENT = 16


@kernel
def _rms_norm_kernel(
    inputs_ptr,
    addend_ptr,
    total_ptr,
    weight_ptr,
    out_ptr,
    num_rows: Unspecialised,
    inner: Unspecialised,
    stride_outer,
    stride_inner,
    eps,
    OFFSET: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    CENTERED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows. Row r of the inputs is at `r // inner * stride_outer + r % inner * stride_inner`.

    Grid: (blocks of rows,). Reads the program's rows of `inputs` and all of `weight`; writes its rows of `out`. With
    `addend` it also reads its rows of `addend` and writes those of `total`.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    is_column = column < WIDTH
    mask = (row < num_rows)[:, None] & is_column[None, :]
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=is_column, other=0.0).to(tl.float32)
        if OFFSET != 0.0:
            weight += OFFSET
    wait_for_inputs(PDL)

    first = (row // inner).to(tl.int64) * stride_outer + (row % inner).to(tl.int64) * stride_inner
    x = tl.load(inputs_ptr + first[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    own = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    if addend_ptr is not None:
        x += tl.load(addend_ptr + own, mask=mask, other=0.0).to(tl.float32)
        total = x.to(out_ptr.dtype.element_ty)
        tl.store(total_ptr + own, total, mask=mask)
        x = total.to(tl.float32)
    if CENTERED:
        x = tl.where(is_column[None, :], x - (tl.sum(x, axis=1) / WIDTH)[:, None], 0.0)
    x *= tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)[:, None]
    if CAST_FIRST:
        x = x.to(out_ptr.dtype.element_ty).to(tl.float32)
    if weight_ptr is not None:
        x *= weight[None, :]
    tl.store(out_ptr + own, x.to(out_ptr.dtype.element_ty), mask=mask)


@functools.cache
def _sizes(width: int) -> tuple[int, int, int]:
    """For rows of `width` elements: the next power of two, rows of a program, and its warps."""
    block = triton.next_power_of_2(width)
    rows = max(1, _FEWEST_ELEMENTS // block)
    return block, rows, min(_MOST_WARPS, rows * block // _ELEMENTS_OF_WARP)


def _rows_of(inputs: torch.Tensor) -> tuple[torch.Tensor, int, int, int] | None:
    """`inputs` `[..., D]` as rows at up to two strides: tensor, inner number of rows, outer, inner stride; or None."""
    sizes, strides = list(inputs.shape[:-1]), list(inputs.stride()[:-1])
    levels: list[tuple[int, int]] = []  # innermost first
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if levels and stride == levels[-1][0] * levels[-1][1]:
            levels[-1] = (levels[-1][0] * size, levels[-1][1])
        else:
            levels.append((size, stride))
    width = inputs.shape[-1]
    if len(levels) > 2 or (inputs.stride(-1) != 1 and width > 1):
        return None
    levels += [(1, width)] * (2 - len(levels))
    (inner, stride_inner), (_, stride_outer) = levels
    # Rows whose width is not divisible are only read from contiguous tensors.
    is_contiguous = width % _ALIGNMENT != 0 and stride_inner == stride_outer == width
    is_aligned = all(one % _ALIGNMENT == 0 for one in (width, stride_inner, stride_outer, inputs.data_ptr()))
    return (inputs, inner, stride_outer, stride_inner) if is_contiguous or is_aligned else None


def rms_norm(inputs, weight, eps, kind):
    """See `rms_norm_reference.rms_norm`; sums in float32. One launch, which depends only on shapes and strides.

    Rows may be at up to two strides, such as heads in a slice of a wider tensor; other inputs are copied first.
    """
    return _rms_norm(inputs, None, weight, eps, kind)[1]


def add_rms_norm(inputs, addend, weight, eps, kind):
    """See `rms_norm_reference.add_rms_norm`; the same bits as PyTorch's sum and then `rms_norm`. One launch.

    Rows of `inputs` may be at up to two strides.
    """
    assert inputs.shape == addend.shape and inputs.dtype == addend.dtype, "terms must have the same shape and dtype"
    return _rms_norm(inputs, addend, weight, eps, kind)


def _rms_norm(
    inputs: torch.Tensor, addend: torch.Tensor | None, weight: torch.Tensor | None, eps: float, kind: NormKind
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The sum, or None without `addend`, and its norm."""
    width = inputs.shape[-1]
    assert weight is None or (weight.shape == (width,) and weight.is_contiguous()), "the weight must be [D], contiguous"
    out = torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
    total = None if addend is None else torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
    num_rows = out.numel() // width
    if num_rows == 0:
        return total, out
    rows = _rows_of(inputs) or _rows_of(inputs.clone(memory_format=torch.contiguous_format))
    weight, addend = (
        one.clone() if one is not None and one.data_ptr() % _ALIGNMENT else one for one in (weight, addend)
    )
    block, rows_of_program, num_warps = _sizes(width)
    _rms_norm_kernel[(-(-num_rows // rows_of_program),)](
        rows[0],
        None if addend is None else addend.contiguous(),
        total,
        weight,
        out,
        num_rows,
        *rows[1:],
        eps,
        OFFSET=kind.offset,
        CAST_FIRST=kind.cast_first,
        CENTERED=kind.centered,
        WIDTH=width,
        BLOCK=block,
        ROWS=rows_of_program,
        num_warps=num_warps,
        **dependent_launch(inputs.device),
    )
    return total, out
