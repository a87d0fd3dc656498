"""Triton low-rank updates of linear layers (LoRA); the reference is `low_rank_reference`.

Shapes: inputs `[n, in]`, adapters `[n]`, for layer l and adapter a down `[r, in]` and up `[N_l, r]`, outputs of L
layers side by side `[n, sum of N_l]`:

    out[i, o of l] += sum_{a: row i has a} scale[l, a] sum_r up[l, a][o, r] sum_k down[l, a][r, k] inputs[i, k]

A first launch computes the narrow products, those with `down`. It cuts the sum over k into parts, so that few rows have
several programs; the bounds of the parts depend only on the input features. Whoever multiplies by `up` adds the parts,
in order. With few rows that is the product of the layers themselves (`adapted_linear`): it runs while the narrow
products are computed, and adds the updates to its outputs before they are stored. With more rows it is a kernel that
runs after the layers (`add_low_rank`). Weights that no row needs are not read. The bits of a row's result do not depend
on the other rows, nor on their adapters, nor on which of the two it is.

Measured on one H200 in bfloat16 (torch 2.11, Triton 3.6) with a norm after each layer, microseconds with float32
adapters of rank 16 / without, for 6144 x 4096 (three layers), 4096 x 4096, 28672 x 4096 with its activation, 4096 x
14336: one row 17.6 / 15.2, 14.5 / 11.8, 62.7 / 58.4, 34.1 / 31.6, of which the update itself takes a tenth and the
additional launch the rest; 32 rows 19.1 / 16.4, 15.9 / 12.6, 64.0 / 60.2, 38.6 / 34.9; 32 rows that have 8 adapters
24.7 / 16.4, 21.8 / 12.6, 79.4 / 60.2, 45.0 / 34.9. Parts of 1024 and of 4096 input features take 1 to 3 us more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import Unspecialised, has_pdl, kernel, start_next, wait_for_inputs
from .linear import linear, request_line
from .low_rank_tile import PLACE, find_first_up, load_first_up, updated

# Ranks of a program of the narrow products, and input features that it multiplies at a time.
_RANKS, _DEPTH = tl.constexpr(16), tl.constexpr(128)
# Input features of a part of the sum over k.
_PART = 2048
# Most rows for which a program of the narrow products has one part, and its pipeline stages for weights of 32 bits.
# They give it more than 48 KB of shared memory: with less, its multiprocessor seems to be set up for a large L1 cache,
# so that programs of the next kernel, which need more, wait until it is free. At one row 4096 x 14336 then takes 2.5 us
# more.
_FEW_ROWS, _STAGES = 64, tl.constexpr(7)
# Most ranks of a group of adapters that are added together.
_GROUP = 64
# Output features and rows of a tile of the kernel that runs after the layers.
_FEATURES, _ROWS = tl.constexpr(64), tl.constexpr(16)
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _down_of(place_ptr, r, size_in, KIND: tl.constexpr):
    """The rows `r` of a `down`, and its rank."""
    DTYPE: tl.constexpr = KIND[4]
    ALIGNMENT: tl.constexpr = KIND[6]
    down = tl.multiple_of(tl.load(place_ptr).to(tl.pointer_type(DTYPE)), [ALIGNMENT])
    return down + r.to(tl.int64)[:, None] * size_in, tl.load(place_ptr + 2)


@triton.jit
def _request_down(place_ptr, r, size_in, any_ptr, PART: tl.constexpr, KIND: tl.constexpr):
    """Fetch a program's part of `down` into the L2 cache. `any_ptr` is an address that may be fetched."""
    DTYPE: tl.constexpr = KIND[4]
    LINE: tl.constexpr = 1024 // DTYPE.primitive_bitwidth
    down, rank = _down_of(place_ptr, r, size_in, KIND)
    line = tl.minimum(tl.program_id(0) * PART + tl.arange(0, PART // LINE) * LINE, size_in - 1)
    request_line(tl.where((r < rank)[:, None], down + line[None, :], any_ptr.to(tl.pointer_type(DTYPE))))


@kernel
def _narrow_kernel(
    inputs_ptr,
    adapters_ptr,
    places_ptr,
    narrow_ptr,
    num_rows: Unspecialised,
    size_in,
    inputs_stride,
    count,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
):
    """`down` times ROWS rows, for _RANKS ranks, summed over PARTS parts of PART input features.

    Grid: (parts / PARTS, L RANK / _RANKS, blocks of rows). Reads the program's rows of `inputs` and `adapters` and its
    parts of each `down` that they need; writes its blocks of `narrow` `[parts / PARTS, L A, n, RANK]` for the rows that
    have the adapter. The kernel before this one must write neither weights nor `places`.
    """
    ADAPTERS: tl.constexpr = KIND[0]
    RANK: tl.constexpr = KIND[1]
    layer = tl.program_id(1) // (RANK // _RANKS)
    r = tl.program_id(1) % (RANK // _RANKS) * _RANKS + tl.arange(0, _RANKS)
    row = tl.program_id(2).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if has_pdl() and ADAPTERS == 1 and PARTS == 1:
        _request_down(places_ptr + layer * PLACE, r, size_in, inputs_ptr, PART, KIND)
    wait_for_inputs(PARTS == 1)
    bits = tl.load(adapters_ptr + row, mask=row < num_rows, other=0)
    for adapter in range(ADAPTERS):
        has_it = ((bits >> adapter) & 1) > 0
        if tl.max(has_it.to(tl.int32), 0) > 0:
            entry = layer * ADAPTERS + adapter
            if has_pdl() and ADAPTERS > 1 and PARTS == 1:
                _request_down(places_ptr + entry * PLACE, r, size_in, inputs_ptr, PART, KIND)
            down, rank = _down_of(places_ptr + entry * PLACE, r, size_in, KIND)
            k = tl.arange(0, _DEPTH)
            STAGES: tl.constexpr = _STAGES * 32 // KIND[4].primitive_bitwidth
            total = tl.zeros([ROWS, _RANKS], tl.float32)
            inputs = inputs_ptr + row[:, None] * inputs_stride
            for part in range(tl.program_id(0) * PARTS, tl.program_id(0) * PARTS + PARTS):
                last = tl.minimum(part * PART + PART, size_in)
                sums = tl.zeros([ROWS, _RANKS, _DEPTH], tl.float32)
                for start in tl.range(part * PART, last, _DEPTH, num_stages=STAGES):
                    at = start + k[None, :]
                    d = tl.load(down + at, mask=(r < rank)[:, None] & (at < last), other=0.0)
                    x = tl.load(inputs + at, mask=has_it[:, None] & (at < last), other=0.0)
                    sums += d.to(tl.float32)[None, :, :] * x.to(tl.float32)[:, None, :]
                # Not times the scale: the compiler would round only once where a program has several parts.
                total += tl.sum(sums, 2)
            out = (tl.program_id(0) * count + entry).to(tl.int64) * num_rows + row
            tl.store(narrow_ptr + out[:, None] * RANK + r[None, :], total, mask=has_it[:, None])
    start_next()


@kernel
def _up_kernel(
    out_ptr,
    adapters_ptr,
    places_ptr,
    scales_ptr,
    narrow_ptr,
    num_rows: Unspecialised,
    size_out,
    out_stride,
    count,
    KIND: tl.constexpr,
):
    """Updates of _FEATURES outputs of _ROWS rows.

    Grid: (blocks of output features, blocks of rows). Reads the program's rows of `adapters` and `narrow`, and its
    features of each `up` that its rows need; adds to `out` of the rows that have adapters.
    """
    first = tl.program_id(0) * _FEATURES
    row = tl.program_id(1).to(tl.int64) * _ROWS + tl.arange(0, _ROWS)
    feature = first + tl.arange(0, _FEATURES)
    is_feature = feature < size_out
    last = tl.minimum(first + _FEATURES, size_out) - 1
    feature = tl.minimum(feature, last)
    # The kernel before this one has let it start after its inputs were complete.
    bits = tl.load(adapters_ptr + row, mask=row < num_rows, other=0)
    found = find_first_up(places_ptr, first, feature < 0, False, KIND)
    up = load_first_up(found, bits, first, feature, feature < 0, KIND)
    wait_for_inputs()
    out = out_ptr + row[None, :] * out_stride + feature[:, None]
    is_written = (bits != 0)[None, :] & is_feature[:, None]
    result = tl.load(out, mask=is_written, other=0.0)
    narrow = narrow_ptr, num_rows, count, scales_ptr
    result = updated(result, up, places_ptr, narrow, row, bits, first, last, feature, feature < 0, False, KIND)
    tl.store(out, result, mask=is_written)


class _Narrow(NamedTuple):
    """Narrow products and what `low_rank_tile` needs of their adapters."""

    values: torch.Tensor
    count: int
    kind: tuple


def _narrow_products(
    inputs: torch.Tensor,
    adapters: torch.Tensor,
    down: list[torch.Tensor],
    up: list[torch.Tensor],
    places: torch.Tensor,
    sizes: list[int],
    is_gated: bool = False,
) -> _Narrow:
    num_rows, size_in = inputs.shape
    assert inputs.stride(1) == 1, "rows must have unit stride"
    assert adapters.is_contiguous() and len(adapters) == num_rows
    count, rank = len(down), max(_RANKS.value, triton.next_power_of_2(max(map(len, down))))
    num_parts = max(triton.cdiv(size_in, _PART), 1)
    own_parts = 1 if num_rows <= _FEW_ROWS else num_parts
    starts = () if is_gated else tuple(sum(sizes[:number]) for number in range(1, len(sizes)))
    is_aligned = all(one.data_ptr() % 16 == 0 for one in (*down, *up)) and size_in * down[0].itemsize % 16 == 0
    kind = (
        count // len(sizes),
        rank,
        starts,
        num_parts // own_parts,
        _DTYPES[down[0].dtype],
        all(len(one) == rank for one in down),
        16 if is_aligned else 1,
        min(triton.next_power_of_2(count // len(sizes)), max(_GROUP // rank, 1)),
    )
    # As many warps in both cases: how they divide the features is the order of summation.
    rows = 4 if own_parts == 1 else 8
    narrow = torch.empty(num_parts // own_parts, count, num_rows, rank, dtype=torch.float32, device=inputs.device)
    _narrow_kernel[(num_parts // own_parts, len(sizes) * rank // _RANKS.value, triton.cdiv(num_rows, rows))](
        inputs,
        adapters,
        places,
        narrow,
        num_rows,
        size_in,
        inputs.stride(0),
        count,
        PART=_PART,
        PARTS=own_parts,
        ROWS=rows,
        KIND=kind,
        num_warps=4,
    )
    return _Narrow(narrow, count, kind)


def add_low_rank(out, inputs, adapters, down, up, places, scales, sizes):
    """See `low_rank_reference.add_low_rank`. Launches depend only on shapes, strides and the alignment of weights."""
    assert out.stride(1) == 1, "rows must have unit stride"
    if len(inputs) == 0:
        return
    narrow = _narrow_products(inputs, adapters, down, up, places, sizes)
    size_out = sum(sizes)
    _up_kernel[(triton.cdiv(size_out, _FEATURES.value), triton.cdiv(len(inputs), _ROWS.value))](
        out,
        adapters,
        places,
        scales,
        narrow.values,
        len(inputs),
        size_out,
        out.stride(0),
        narrow.count,
        KIND=narrow.kind,
        num_warps=4,
    )


def adapted_linear(inputs, weight, bias, activation, adapters, down, up, places, scales, sizes, tiles):
    """See `low_rank_reference.adapted_linear`; `tiles` are those of `linear`. Launches as `add_low_rank`."""
    narrow = _narrow_products(inputs, adapters, down, up, places, sizes, activation is not None)
    updates = adapters, places, narrow.values, narrow.count, scales
    return linear(inputs, weight, bias, tiles, activation, updates, narrow.kind)
