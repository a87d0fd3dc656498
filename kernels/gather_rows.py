"""Triton gather of rows, such as embeddings, and of hidden states of several layers; see `gather_rows_reference`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Unspecialised, kernel, wait_for_inputs

BLOCK, _WARPS = tl.constexpr(2048), 4


@kernel
def _gather_rows_kernel(
    table_ptr,
    index_ptr,
    fill_ptr,
    out_ptr,
    count: Unspecialised,
    width,
    index_stride_b: Unspecialised,
    index_stride_n: Unspecialised,
    table_strides,
):
    """A block of elements of one row.

    Grid: (B * W, blocks of H). Reads an element of `index` and the program's elements of a row of `table`, or of `fill`
    if given; writes those of `out`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < width
    wait_for_inputs()
    batch = row // count
    index = tl.load(index_ptr + batch * index_stride_b + row % count * index_stride_n)
    source = table_ptr + batch * table_strides[0] + index * table_strides[1] + column
    is_row = column * 0 + index >= 0
    values = tl.load(source, mask=is_column & is_row, other=0.0)
    if fill_ptr is not None:
        values = tl.where(is_row, values, tl.load(fill_ptr + column, mask=is_column, other=0.0))
    tl.store(out_ptr + row * width + column, values, mask=is_column)


def gather_rows(table, index, fill):
    """See `gather_rows_reference.gather_rows`. One launch, which depends only on shapes and strides."""
    batch, count = index.shape
    width = table.shape[2]
    assert table.stride(2) == 1 and table.shape[0] in (1, batch), "rows must have unit stride"
    assert fill is None or (fill.shape == (width,) and fill.is_contiguous() and fill.dtype == table.dtype)
    out = torch.empty(batch, count, width, dtype=table.dtype, device=table.device)
    if out.numel() == 0:
        return out
    _gather_rows_kernel[(batch * count, triton.cdiv(width, BLOCK.value))](
        table,
        index,
        fill,
        out,
        count,
        width,
        *index.stride(),
        (0 if table.shape[0] == 1 else table.stride(0), table.stride(1)),
        num_warps=_WARPS,
    )
    return out


@kernel
def _join_rows_kernel(
    out_ptr,
    parts,
    index_ptr,
    count: Unspecialised,
    width,
    index_stride_b: Unspecialised,
    index_stride_n: Unspecialised,
    out_strides,
    parts_strides,
    PARTS: tl.constexpr,
):
    """A block of elements of one row of one part.

    Grid: (B * W, parts, blocks of H). Reads an element of `index` if given, and the program's elements of a row of a
    part; writes those of `out`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < width
    wait_for_inputs()
    batch, place = row // count, row % count
    out_ptr += batch * out_strides[0] + place * out_strides[1] + tl.program_id(1) * width + column
    if index_ptr is not None:
        place = tl.load(index_ptr + batch * index_stride_b + place * index_stride_n)
    for part in tl.static_range(PARTS):
        if tl.program_id(1) == part:
            source = parts[part] + batch * parts_strides[part][0] + place * parts_strides[part][1]
            tl.store(out_ptr, tl.load(source + column, mask=is_column, other=0.0), mask=is_column)


def join_rows(out, parts, index):
    """See `gather_rows_reference.join_rows`. One launch, which depends only on shapes and strides."""
    batch, count = parts[0].shape[:2] if index is None else index.shape
    width = parts[0].shape[2]
    assert out.stride(2) == 1 and out.shape[2] == len(parts) * width and out.shape[1] >= count, "shapes must agree"
    assert all(one.stride(2) == 1 and one.shape == parts[0].shape for one in parts), "parts must be alike"
    _join_rows_kernel[(batch * count, len(parts), triton.cdiv(width, BLOCK.value))](
        out,
        tuple(parts),
        index,
        count,
        width,
        *((0, 0) if index is None else index.stride()),
        out.stride()[:2],
        tuple(one.stride()[:2] for one in parts),
        PARTS=len(parts),
        num_warps=_WARPS,
    )
