"""Triton attention over the static KV cache; the reference is `attention_reference.attention`.

Shapes: query `[B, heads, n, D]`, key `[B, kv_heads, slots, D]`, value `[B, kv_heads, slots, Dv]`, positions `[B, n]`,
result `[B, n, heads, Dv]`. With G = heads // kv_heads:

    result[b, n, h] = sum_s p[s] value[b, h // G, s]
    p = softmax over the visible s of f(scaling * <query[b, h, n], key[b, h // G, s]>)

Slot s is visible iff starts[b, n] <= s <= ends[b, n], where ends is positions if not given, and, with a window,
s > positions[b, n] - window, or, with chunks, s >= floor(positions[b, n] / chunk) chunk. Starts are `[B]` or `[B, n]`;
chunks are for starts `[B]`.

It is written for the few queries per row of a decoding round. Prefill runs it too: it reads only visible slots and
needs no mask tensor. With starts for each query, those of packed prompts, a block of queries goes through the slots of
one prompt after the other.

Split-KV ("flash decoding"): the slots that a row needs are divided among the programs of a grid that depends on shapes
alone. Each split writes its normalised result o_i and the base-2 logarithm l_i of its sum of exponentials to a
workspace; a second kernel merges them: o = sum_i 2^(l_i) o_i / sum_i 2^(l_i).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .attention_splits import choose_splits, merge_splits, num_multiprocessors
from .dependent_launch import dependent_launch, wait_for_inputs

_LOG2E = tl.constexpr(1.4426950408889634)
# Slots are divided among splits in units of this many, so that the sizes of two splits differ by at most one unit.
_SPLIT_UNIT = tl.constexpr(16)
# Bytes of the keys, or of the values, of one block of slots; several blocks are in flight per program.
_TILE_BYTES = 16384


@triton.jit
def _first_visible(position, window, IS_CHUNKED: tl.constexpr):
    """The first slot that queries at `position` see of a window, or of chunks, of size `window`."""
    return position // window * window if IS_CHUNKED else position - window + 1


@triton.jit
def _split_range(
    position,
    last,
    start,
    num_slots,
    window,
    split,
    num_splits,
    SLOT_BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
):
    """First slot and end of split `split` for a block of queries; padding queries have position and last slot -1."""
    end = tl.max(last, axis=0) + 1
    first = start
    if HAS_WINDOW:
        lowest = tl.min(tl.where(position >= 0, position, num_slots), axis=0)
        first = tl.maximum(_first_visible(lowest, window, IS_CHUNKED), first)
    live = tl.maximum(end - first, 0)
    num_used = tl.maximum(tl.minimum(num_splits, tl.cdiv(live, SLOT_BLOCK)), 1)
    units = tl.cdiv(live, _SPLIT_UNIT)
    begin = first + units * split // num_used * _SPLIT_UNIT
    stop = first + units * (split + 1) // num_used * _SPLIT_UNIT
    return begin, tl.minimum(stop, end)


@triton.jit
def _attend_to_slots(
    query,
    key_ptr,
    value_ptr,
    key_stride_s,
    value_stride_s,
    position,
    last,
    begin,
    stop,
    window,
    scaling,
    softcap,
    running_max,
    running_sum,
    acc,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Continue the online softmax of a block of queries with the slots from `begin` to `stop - 1`.

    The pointers are those of the row and of the head. Returns the maxima, the sums and the sums of values.
    """
    dim = tl.arange(0, DIM_BLOCK)
    value_dim = tl.arange(0, VALUE_BLOCK)
    key_ptr += begin.to(tl.int64) * key_stride_s
    value_ptr += begin.to(tl.int64) * value_stride_s
    block = tl.arange(0, SLOT_BLOCK)
    key_offset = block[:, None] * key_stride_s + dim[None, :]
    value_offset = block[:, None] * value_stride_s + value_dim[None, :]
    for first in range(begin, stop, SLOT_BLOCK):
        slot = first + block
        is_slot = slot < stop
        at = (first - begin).to(tl.int64)
        key = tl.load(key_ptr + at * key_stride_s + key_offset, mask=is_slot[:, None] & (dim < DIM)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        # Scaled by log2(e), since exp2 is cheaper than exp; softcap * tanh(x / softcap) through the sigmoid.
        if HAS_SOFTCAP:
            scores = (softcap * _LOG2E) * (2.0 * tl.sigmoid(scores * (2.0 * scaling / softcap)) - 1.0)
        else:
            scores = scores * (scaling * _LOG2E)
        visible = (slot[None, :] <= last[:, None]) & is_slot[None, :]
        if HAS_WINDOW:
            visible = visible & (slot[None, :] >= _first_visible(position, window, IS_CHUNKED)[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        # A query that has seen no slot yet has maximum -inf; 2^(-inf - -inf) would be NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(running_max - base)
        value = tl.load(
            value_ptr + at * value_stride_s + value_offset,
            mask=is_slot[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        acc = acc * rescale[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        running_max = new_max
    return running_max, running_sum, acc


# do_not_specialize: else Triton compiles variants for values that are 1 or divisible by 16, which are no faster.
@triton.jit(
    do_not_specialize=["positions_stride_b", "starts_stride_b", "ends_stride_b", "num_queries", "num_slots", "window"]
)
def _attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    positions_ptr,
    starts_ptr,
    ends_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    query_stride_b,
    query_stride_h,
    query_stride_n,
    key_stride_b,
    key_stride_h,
    key_stride_s,
    value_stride_b,
    value_stride_h,
    value_stride_s,
    positions_stride_b,
    starts_stride_b,
    ends_stride_b,
    num_queries,
    num_slots,
    window,
    scaling,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    IS_PACKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One split of the attention of a block of queries, with an online softmax in float32.

    Grid: (kv_heads * blocks of queries, B, splits); a program has up to ROWS of the G * n queries of one key head.
    Reads those queries, their positions and last slots, the start of the row, or of each query (IS_PACKED), and the
    keys and values of the slots of its split. With one split it writes `out` `[B, n, heads, Dv]`; with several, `out`
    `[B, n, heads, splits, Dv]` float32 and `lse` `[B, n, heads, splits]` float32, or only lse = -inf where the split
    has no slot.
    """
    # Short rows use only the first splits; the split is the slowest index of the grid, so these start first.
    kv_head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    # The heads of one query are adjacent: a block covers few queries, so its last visible slot comes early.
    row = tl.program_id(0) // KV_HEADS * ROWS + tl.arange(0, ROWS)
    is_row = row < GROUPS * num_queries
    head = kv_head * GROUPS + row % GROUPS
    query_index = row // GROUPS
    dim = tl.arange(0, DIM_BLOCK)
    value_dim = tl.arange(0, VALUE_BLOCK)
    out_row = (batch * num_queries + query_index) * (KV_HEADS * GROUPS) + head

    wait_for_inputs(PDL)
    position = tl.load(positions_ptr + batch * positions_stride_b + query_index, mask=is_row, other=-1)
    position = tl.where(position < num_slots - 1, position, -1).to(tl.int32)  # padding
    if IS_PACKED:
        start = tl.load(starts_ptr + batch * starts_stride_b + query_index, mask=is_row, other=0).to(tl.int32)
        start = tl.where(position >= 0, start, num_slots)  # no segment of its own for padding
    else:
        start = tl.load(starts_ptr + batch * starts_stride_b).to(tl.int32)
    last = position
    if HAS_ENDS:
        last = tl.load(ends_ptr + batch * ends_stride_b + query_index, mask=is_row, other=-1).to(tl.int32)
        last = tl.where(position >= start, last, -1)
    if not IS_PACKED:
        begin, stop = _split_range(
            position, last, start, num_slots, window, split, tl.num_programs(2), SLOT_BLOCK, HAS_WINDOW, IS_CHUNKED
        )
        if IS_SPLIT:  # noqa: SIM102 (a constexpr branch)
            if begin >= stop:
                minus_inf = tl.full([ROWS], float("-inf"), tl.float32)
                tl.store(lse_ptr + out_row * tl.num_programs(2) + split, minus_inf, mask=is_row)
                return

    query = tl.load(
        query_ptr
        + batch * query_stride_b
        + head[:, None] * query_stride_h
        + query_index[:, None] * query_stride_n
        + dim[None, :],
        mask=is_row[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:  # counted by the first split, which has no slot only if none has
        sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * _LOG2E
        running_max = tl.where(split == 0, sink, running_max)
        running_sum = tl.where(split == 0, 1.0, running_sum)
    acc = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)

    key_ptr += batch * key_stride_b + kv_head * key_stride_h
    value_ptr += batch * value_stride_b + kv_head * value_stride_h
    if IS_PACKED:
        # The queries of one prompt after those of the other; the rest of the block sees nothing meanwhile.
        segment = tl.min(start, axis=0)
        while segment < num_slots:
            own_position = tl.where(start == segment, position, -1)
            own_last = tl.where(start == segment, last, -1)
            begin, stop = _split_range(
                own_position,
                own_last,
                segment,
                num_slots,
                window,
                split,
                tl.num_programs(2),
                SLOT_BLOCK,
                HAS_WINDOW,
                IS_CHUNKED,
            )
            running_max, running_sum, acc = _attend_to_slots(
                query,
                key_ptr,
                value_ptr,
                key_stride_s,
                value_stride_s,
                own_position,
                own_last,
                begin,
                stop,
                window,
                scaling,
                softcap,
                running_max,
                running_sum,
                acc,
                DIM,
                VALUE_DIM,
                DIM_BLOCK,
                VALUE_BLOCK,
                SLOT_BLOCK,
                HAS_WINDOW,
                IS_CHUNKED,
                HAS_SOFTCAP,
            )
            segment = tl.min(tl.where(start > segment, start, num_slots), axis=0)
    else:
        running_max, running_sum, acc = _attend_to_slots(
            query,
            key_ptr,
            value_ptr,
            key_stride_s,
            value_stride_s,
            position,
            last,
            begin,
            stop,
            window,
            scaling,
            softcap,
            running_max,
            running_sum,
            acc,
            DIM,
            VALUE_DIM,
            DIM_BLOCK,
            VALUE_BLOCK,
            SLOT_BLOCK,
            HAS_WINDOW,
            IS_CHUNKED,
            HAS_SOFTCAP,
        )

    running_sum = tl.where(running_sum == 0.0, 1.0, running_sum)  # a query that saw no slot; its lse stays -inf
    out = acc / running_sum[:, None]
    if IS_SPLIT:
        out_row = out_row * tl.num_programs(2) + split
        tl.store(lse_ptr + out_row, running_max + tl.log2(running_sum), mask=is_row)
    tl.store(
        out_ptr + out_row[:, None] * VALUE_DIM + value_dim[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (value_dim < VALUE_DIM)[None, :],
    )


def slots_of_block(dim_block: int, value_block: int, itemsize: int) -> int:
    """Slots that a program attends to at a time, for head dimensions that are padded to powers of two."""
    return max(16, min(64, _TILE_BYTES // (max(dim_block, value_block) * itemsize)))


@functools.cache
def _default_starts(device: torch.device) -> torch.Tensor:
    """`[1]` int64: 0, the start of every row where `starts` is not given."""
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.int64, device=device)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    scaling: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    starts: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    num_splits: int | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """See `attention_reference.attention`. Accumulates in float32; padding queries get 0. Safe in a CUDA graph.

    A program takes some query heads of one key head, and its split of the slots from the first that one of its live
    queries sees to the last; no other slot is read. The launch depends on shapes and strides only. `num_splits` is the
    largest number of splits; by default as many as fill the GPU.
    """
    batch, heads, num_queries, dim = query.shape
    kv_heads, num_slots, value_dim = key.shape[1], key.shape[2], value.shape[3]
    assert key.stride(3) == value.stride(3) == positions.stride(1) == 1, "rows must have unit stride"
    is_packed = starts is not None and starts.dim() == 2
    assert all(one is None or one.stride(-1) == 1 for one in (ends, starts if is_packed else None)), (
        "rows must have unit stride"
    )
    assert window is None or chunk is None, "a window, or chunks"
    assert chunk is None or not is_packed, "chunks are counted from slot 0"
    size = window if chunk is None else chunk
    if query.stride(3) != 1:
        query = query.contiguous()
    groups = heads // kv_heads
    dim_block, value_block = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    slot_block = slots_of_block(dim_block, value_block, query.element_size())
    # As many queries as fit the registers; float32 takes twice the registers of 16-bit types.
    rows = min(slot_block, 128 // query.element_size(), max(16, triton.next_power_of_2(groups * num_queries)))
    blocks = kv_heads * triton.cdiv(groups * num_queries, rows)
    if num_splits is None:
        num_visible = num_slots if size is None else min(num_slots, size + num_queries)
        num_splits = choose_splits(batch * blocks, num_visible, num_multiprocessors(query.device))
    out = query.new_empty(batch, num_queries, heads, value_dim)
    num_rows = batch * num_queries * heads
    partial, lse = out, None
    if num_splits > 1:
        partial = query.new_empty(num_rows, num_splits, value_dim, dtype=torch.float32)
        lse = query.new_empty(num_rows, num_splits, dtype=torch.float32)
    _attention_kernel[(blocks, batch, num_splits)](
        query,
        key,
        value,
        positions,
        _default_starts(query.device) if starts is None else starts,
        positions if ends is None else ends,
        sinks,
        partial,
        lse,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        positions.stride(0),
        0 if starts is None else starts.stride(0),
        0 if ends is None else ends.stride(0),
        num_queries,
        num_slots,
        size or 0,
        scaling,
        softcap or 1.0,
        KV_HEADS=kv_heads,
        GROUPS=groups,
        DIM=dim,
        VALUE_DIM=value_dim,
        ROWS=rows,
        DIM_BLOCK=dim_block,
        VALUE_BLOCK=value_block,
        SLOT_BLOCK=slot_block,
        IS_PACKED=is_packed,
        HAS_WINDOW=size is not None,
        IS_CHUNKED=chunk is not None,
        HAS_ENDS=ends is not None,
        HAS_SINKS=sinks is not None,
        HAS_SOFTCAP=softcap is not None,
        IS_SPLIT=num_splits > 1,
        num_warps=4,
        num_stages=3,
        **dependent_launch(query.device),
    )
    if num_splits > 1:
        merge_splits(partial, lse, out)
    return out
