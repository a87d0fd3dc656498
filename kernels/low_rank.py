"""Triton low-rank updates of linear layers (LoRA); the reference is `low_rank_reference.add_low_rank`.

Shapes: inputs `[n, in]`, adapters `[n]`, for layer l and adapter a down `[r, in]` and up `[N_l, r]`, outputs of L
layers side by side `[n, sum of N_l]`:

    out[i, o of l] += sum_{a: row i has a} scale[l, a] sum_r up[l, a][o, r] sum_k down[l, a][r, k] inputs[i, k]

There are two launches. The first computes the products with `down`. It cuts the sum over k into parts, so that few rows
have many programs; the bounds of the parts depend only on the input features. The second adds the parts in order and
multiplies by `up`. A program has one adapter and does nothing if none of its rows has it, so weights that no row needs
are not read. The bits of a row's result do not depend on the other rows, nor on their adapters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Unspecialised, dependent_launch, kernel, wait_for_inputs

# Rows of a program, and input features that it multiplies at a time.
ROWS, DEPTH = tl.constexpr(16), tl.constexpr(128)
# Output features of a program, by the least output features of a layer: few programs, as each has one adapter.
_FEATURES = ((8192, 256), (2048, 128), (0, 64))
# Input features of a part of the sum over k, and the most parts.
_PART, _MOST_PARTS = 512, 16
# Rows above which a program adds all parts itself.
_MOST_ROWS_OF_PARTS = 64


@triton.jit
def _of_rows(adapters_ptr, row, is_row, adapter):
    """Whether each row has the adapter, as 0 or 1, and the bits of all its adapters."""
    adapters = tl.load(adapters_ptr + row, mask=is_row, other=0)
    return (adapters >> adapter) & 1, adapters


@kernel
def _down_kernel(
    inputs_ptr,
    adapters_ptr,
    places_ptr,
    narrow_ptr,
    num_rows: Unspecialised,
    size_in,
    inputs_stride,
    part_size,
    ADAPTERS: tl.constexpr,
    DTYPE: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    PDL: tl.constexpr,
):
    """`down` times ROWS rows, summed over PARTS parts of the input features.

    Grid: (blocks of rows, L A, parts / PARTS). Reads the program's rows of `inputs` and `adapters` and its parts of a
    `down`; writes its block of `narrow` `[parts / PARTS, L A, n, RANK]`, unless no row has the adapter.
    """
    index = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    wait_for_inputs(PDL)
    has_it, _ = _of_rows(adapters_ptr, row, is_row, index % ADAPTERS)
    if tl.max(has_it, 0) > 0:
        rank = tl.load(places_ptr + index * 5 + 2)
        down_ptr = tl.load(places_ptr + index * 5).to(tl.pointer_type(DTYPE))
        r = tl.arange(0, RANK)
        k = tl.arange(0, DEPTH)
        total = tl.zeros([RANK, ROWS], tl.float32)
        for number in range(PARTS):
            first = (tl.program_id(2) * PARTS + number) * part_size
            last = tl.minimum(first + part_size, size_in)
            part = tl.zeros([RANK, ROWS], tl.float32)
            for start in range(first, last, DEPTH):
                at = start + k
                is_at = at < last
                down = tl.load(
                    down_ptr + r.to(tl.int64)[:, None] * size_in + at[None, :],
                    mask=(r < rank)[:, None] & is_at[None, :],
                    other=0.0,
                )
                x = tl.load(
                    inputs_ptr + row[:, None] * inputs_stride + at[None, :],
                    mask=is_row[:, None] & is_at[None, :],
                    other=0.0,
                )
                if down.dtype != x.dtype:
                    down = down.to(tl.float32)
                    x = x.to(tl.float32)
                part = tl.dot(down, tl.trans(x), part, input_precision="ieee")
            total += part
        out = (tl.program_id(2) * tl.num_programs(1) + index).to(tl.int64) * num_rows + row
        tl.store(narrow_ptr + out[None, :] * RANK + r[:, None], total, mask=is_row[None, :])


@triton.jit
def _update(pointers, row, is_row, feature, index, count, num_rows, DTYPE, PARTS, RANK):
    """The update `[features, rows]` of the layer and adapter with number `index`."""
    narrow_ptr, places_ptr, scales_ptr = pointers
    rank = tl.load(places_ptr + index * 5 + 2)
    up_ptr = tl.load(places_ptr + index * 5 + 1).to(tl.pointer_type(DTYPE))
    size = tl.load(places_ptr + index * 5 + 3)
    r = tl.arange(0, RANK)
    narrow = tl.zeros([RANK, row.shape[0]], tl.float32)
    for part in tl.static_range(PARTS):
        at = (part * count + index).to(tl.int64) * num_rows + row
        narrow += tl.load(narrow_ptr + at[None, :] * RANK + r[:, None], mask=is_row[None, :], other=0.0)
    up = tl.load(
        up_ptr + feature.to(tl.int64)[:, None] * rank + r[None, :],
        mask=(feature < size)[:, None] & (r < rank)[None, :],
        other=0.0,
    )
    return tl.dot(up.to(tl.float32), narrow, input_precision="ieee") * tl.load(scales_ptr + index)


@kernel
def _up_kernel(
    out_ptr,
    adapters_ptr,
    places_ptr,
    scales_ptr,
    narrow_ptr,
    num_rows: Unspecialised,
    out_stride,
    ADAPTERS: tl.constexpr,
    DTYPE: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    FEATURES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Updates of FEATURES outputs of a layer, for those of ROWS rows whose first adapter is the program's.

    Grid: (blocks of rows, L A, blocks of the widest layer's features). Reads the program's rows of `adapters` and
    `narrow`, and its features of each `up` that its rows need; adds to their `out`.
    """
    index = tl.program_id(1)
    count = tl.num_programs(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    adapter = index % ADAPTERS
    feature = tl.program_id(2) * FEATURES + tl.arange(0, FEATURES)
    wait_for_inputs(PDL)
    has_it, adapters = _of_rows(adapters_ptr, row, is_row, adapter)
    # One program writes a row; it adds the updates of all the row's adapters, in order.
    is_own = (has_it != 0) & ((adapters & ((adapters * 0 + 1 << adapter) - 1)) == 0)
    size = tl.load(places_ptr + index * 5 + 3)
    if (tl.max(is_own.to(tl.int32), 0) > 0) & (tl.program_id(2) * FEATURES < size):
        pointers = narrow_ptr, places_ptr, scales_ptr
        total = _update(pointers, row, is_row, feature, index, count, num_rows, DTYPE, PARTS, RANK)
        later = tl.where(is_own, adapters >> adapter >> 1, 0)
        if tl.max(later, 0) > 0:
            for other in range(adapter + 1, ADAPTERS):
                has_other = is_own & (((adapters >> other) & 1) != 0)
                if tl.max(has_other.to(tl.int32), 0) > 0:
                    at = index + other - adapter
                    more = _update(pointers, row, is_row, feature, at, count, num_rows, DTYPE, PARTS, RANK)
                    total = tl.where(has_other[None, :], total + more, total)
        out = out_ptr + row[None, :] * out_stride + (tl.load(places_ptr + index * 5 + 4) + feature)[:, None]
        is_written = is_own[None, :] & (feature < size)[:, None]
        before = tl.load(out, mask=is_written, other=0.0).to(tl.float32)
        tl.store(out, (before + total).to(out_ptr.dtype.element_ty), mask=is_written)


_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def add_low_rank(out, inputs, adapters, down, up, places, scales, sizes):
    """See `low_rank_reference.add_low_rank`. Launches depend only on shapes and strides."""
    num_rows, size_in = inputs.shape
    assert inputs.stride(1) == out.stride(1) == 1, "rows must have unit stride"
    assert adapters.is_contiguous() and len(adapters) == num_rows
    if num_rows == 0:
        return
    count, rank = len(down), max(16, triton.next_power_of_2(max(map(len, down))))
    num_parts = min(max(triton.cdiv(size_in, _PART), 1), _MOST_PARTS)
    part_size = triton.cdiv(triton.cdiv(size_in, num_parts), DEPTH.value) * DEPTH.value
    own_parts = num_parts if num_rows > _MOST_ROWS_OF_PARTS else 1
    parts, blocks = num_parts // own_parts, triton.cdiv(num_rows, ROWS.value)
    narrow = torch.empty(parts, count, num_rows, rank, dtype=torch.float32, device=out.device)
    common = {
        "ADAPTERS": count // len(sizes),
        "DTYPE": _DTYPES[down[0].dtype],
        "RANK": rank,
        **dependent_launch(out.device),
    }
    _down_kernel[(blocks, count, parts)](
        inputs,
        adapters,
        places,
        narrow,
        num_rows,
        size_in,
        inputs.stride(0),
        part_size,
        PARTS=own_parts,
        num_warps=4,
        **common,
    )
    features = next(number for least, number in _FEATURES if max(sizes) >= least)
    _up_kernel[(blocks, count, triton.cdiv(max(sizes), features))](
        out,
        adapters,
        places,
        scales,
        narrow,
        num_rows,
        out.stride(0),
        PARTS=parts,
        FEATURES=features,
        num_warps=4,
        **common,
    )
