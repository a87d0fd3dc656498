"""Triton normalisation over the last dimension, also of a sum; the references are in `rms_norm_reference`.

A program computes whole rows. The order of its sums depends only on D and the dtype: so do the sizes of blocks, and the
launch lets Triton's compiler assume the same alignment for every number of rows and every stride. So the bits of a
row's result do not depend on the other rows.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from .launch import Unspecialised, kernel, wait_for_inputs
from .types import NormKind

# Fewest elements of a program: narrower rows share one.
_FEWEST_ELEMENTS = 2048
_ELEMENTS_OF_WARP, _MOST_WARPS = 512, 32
# Triton loads 16 bytes at a time if addresses of rows are divisible by 16, in bytes and in elements.
_ALIGNMENT = 16


@triton.jit
def _load_weight(weight_ptr, column, is_column, OFFSET: tl.constexpr):
    """The factors of a norm's columns, float32."""
    weight = tl.load(weight_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    if OFFSET != 0.0:
        weight += OFFSET
    return weight


@triton.jit
def _place_of(row, inner, strides):
    """Offset of rows: row r is at `r // inner * strides[0] + r % inner * strides[1]`."""
    return (row // inner).to(tl.int64) * strides[0] + (row % inner).to(tl.int64) * strides[1]


@triton.jit
def _scaled(x, is_column, eps, dtype, CAST_FIRST: tl.constexpr, CENTERED: tl.constexpr, WIDTH: tl.constexpr):
    """Float32 rows `x` of root mean square 1, in float32, rounded to `dtype` with CAST_FIRST."""
    if CENTERED:
        x = tl.where(is_column[None, :], x - (tl.sum(x, axis=1) / WIDTH)[:, None], 0.0)
    x *= tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)[:, None]
    return x.to(dtype).to(tl.float32) if CAST_FIRST else x


@kernel
def _rms_norm_kernel(
    inputs_ptr,
    addend_ptr,
    total_ptr,
    weight_ptr,
    out_ptr,
    num_rows: Unspecialised,
    inner: Unspecialised,
    strides,
    eps,
    OFFSET: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    CENTERED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS rows, those of the inputs at the places of `_place_of`.

    Grid: (blocks of rows,). Reads the program's rows of `inputs` and all of `weight`; writes its rows of `out`. With
    `addend` it also reads its rows of `addend` and writes those of `total`.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    is_column = column < WIDTH
    mask = (row < num_rows)[:, None] & is_column[None, :]
    if weight_ptr is not None:
        weight = _load_weight(weight_ptr, column, is_column, OFFSET)
    wait_for_inputs()

    x = tl.load(inputs_ptr + _place_of(row, inner, strides)[:, None] + column[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
    own = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    if addend_ptr is not None:
        x += tl.load(addend_ptr + own, mask=mask, other=0.0).to(tl.float32)
        total = x.to(out_ptr.dtype.element_ty)
        tl.store(total_ptr + own, total, mask=mask)
        x = total.to(tl.float32)
    x = _scaled(x, is_column, eps, out_ptr.dtype.element_ty, CAST_FIRST, CENTERED, WIDTH)
    if weight_ptr is not None:
        x *= weight[None, :]
    tl.store(out_ptr + own, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_half(half, inner, row, is_row, column, is_column, OFFSET: tl.constexpr):
    """Rows and factors of one half of `_joined_norms_kernel`, float32."""
    inputs_ptr, index_ptr, weight_ptr, strides = half
    if index_ptr is not None:
        row = tl.load(index_ptr + row, mask=is_row, other=0)
    place = _place_of(row, inner, strides)[:, None] + column[None, :]
    x = tl.load(inputs_ptr + place, mask=is_row[:, None] & is_column[None, :], other=0.0).to(tl.float32)
    return x, _load_weight(weight_ptr, column, is_column, OFFSET)


@kernel
def _joined_norms_kernel(
    first,
    second,
    out_ptr,
    num_rows: Unspecialised,
    first_inner: Unspecialised,
    second_inner: Unspecialised,
    eps,
    OFFSET: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    CENTERED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS rows of one of two norms. Each has inputs, their index or None, a weight, and strides of rows.

    Grid: (blocks of rows, 2). Reads the program's elements of an index if given, its rows of the inputs and the weight;
    writes half of its rows of `out` `[rows, 2 D]`.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    is_column = column < WIDTH
    is_row = row < num_rows
    wait_for_inputs()
    if tl.program_id(1) == 0:
        x, weight = _load_half(first, first_inner, row, is_row, column, is_column, OFFSET)
    else:
        x, weight = _load_half(second, second_inner, row, is_row, column, is_column, OFFSET)
    x = _scaled(x, is_column, eps, out_ptr.dtype.element_ty, CAST_FIRST, CENTERED, WIDTH) * weight[None, :]
    own = row.to(tl.int64)[:, None] * (2 * WIDTH) + tl.program_id(1) * WIDTH + column[None, :]
    tl.store(out_ptr + own, x.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@functools.cache
def _options(width: int, kind: NormKind, device: torch.device) -> dict[str, Any]:
    """Launch options for rows of `width` elements; BLOCK is the next power of two, ROWS the rows of a program."""
    block = triton.next_power_of_2(width)
    rows = max(1, _FEWEST_ELEMENTS // block)
    return {
        "OFFSET": kind.offset,
        "CAST_FIRST": kind.cast_first,
        "CENTERED": kind.centered,
        "WIDTH": width,
        "BLOCK": block,
        "ROWS": rows,
        "num_warps": min(_MOST_WARPS, rows * block // _ELEMENTS_OF_WARP),
    }


def _rows_of(inputs: torch.Tensor) -> tuple[torch.Tensor, int, tuple[int, int]]:
    """`inputs` `[..., D]`, copied if need be, as rows at two strides: tensor, inner number of rows, both strides."""
    return _strided_rows(inputs) or _strided_rows(inputs.clone(memory_format=torch.contiguous_format))


def _strided_rows(inputs: torch.Tensor) -> tuple[torch.Tensor, int, tuple[int, int]] | None:
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
    return (inputs, inner, (stride_outer, stride_inner)) if is_contiguous or is_aligned else None


def _aligned(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """`tensor`, or a copy whose address is divisible."""
    return tensor.clone() if tensor is not None and tensor.data_ptr() % _ALIGNMENT else tensor


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
    rows, weight, addend = _rows_of(inputs), _aligned(weight), _aligned(addend)
    options = _options(width, kind, inputs.device)
    _rms_norm_kernel[(-(-num_rows // options["ROWS"]),)](
        rows[0],
        None if addend is None else addend.contiguous(),
        total,
        weight,
        out,
        num_rows,
        *rows[1:],
        eps,
        **options,
    )
    return total, out


def joined_norms(first, second, first_index, second_index, first_weight, second_weight, eps, kind):
    """See `rms_norm_reference.joined_norms`; the bits are those of `rms_norm`. One launch, which depends only on shapes
    and strides. Rows of inputs without an index may be at up to two strides."""
    shape, width = first.shape[:-1] if first_index is None else first_index.shape, first.shape[-1]
    assert second.shape[-1] == width and second.dtype == first.dtype, "both must have the same width and dtype"
    out = torch.empty(*shape, 2 * width, dtype=first.dtype, device=first.device)
    num_rows = out.numel() // (2 * width)
    if num_rows == 0:
        return out
    first_half, first_inner = _half(first, first_index, first_weight, shape)
    second_half, second_inner = _half(second, second_index, second_weight, shape)
    options = _options(width, kind, first.device)
    _joined_norms_kernel[(-(-num_rows // options["ROWS"]), 2)](
        first_half,
        second_half,
        out,
        num_rows,
        first_inner,
        second_inner,
        eps,
        **options,
    )
    return out


def _half(
    inputs: torch.Tensor, index: torch.Tensor | None, weight: torch.Tensor, shape: torch.Size
) -> tuple[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, tuple[int, int]], int]:
    """A half of `_joined_norms_kernel` for rows `shape`, and the inner number of its rows."""
    assert weight.shape == inputs.shape[-1:] and weight.is_contiguous(), "weights must be [D], contiguous"
    if index is None:
        assert inputs.shape[:-1] == shape, "shapes must agree"
        inputs, inner, strides = _rows_of(inputs)
        return (inputs, None, _aligned(weight), strides), inner
    assert inputs.is_contiguous() and inputs.dim() == 2 and index.shape == shape, "shapes must agree"
    return (inputs, index.contiguous(), _aligned(weight), (weight.shape[0], 0)), 1
