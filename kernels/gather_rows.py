"""Triton gather of rows, such as embeddings; the reference is `gather_rows_reference.gather_rows`.

Shapes: table `[B or 1, n, H]`, index `[B, W]`, fill `[H]`, result `[B, W, H]`:

    result[b, w] = table[b, index[b, w]] if index[b, w] >= 0, else fill, or 0 if fill is None
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Unspecialised, dependent_launch, kernel, wait_for_inputs

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
    PDL: tl.constexpr,
):
    """A block of elements of one row.

    Grid: (B * W, blocks of H). Reads an element of `index` and the program's elements of a row of `table`, or of `fill`
    if given; writes those of `out`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < width
    wait_for_inputs(PDL)
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
        **dependent_launch(table.device),
    )
    return out
