"""Triton attention over a ragged cache, defined by `reference.attention`.

It is built for the few queries a row of decoding; the many of a prompt run through it too, so that they read live slots
only and no mask is made.

The slots that a row needs are divided among the programs of a grid that depends on shapes alone (split-KV, "flash
decoding"). Each leaves the average of its values and the logarithm of its weight in a workspace; a second kernel merges
them, o = sum_s 2^(l_s) o_s / sum_s 2^(l_s).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
# The granule in which slots are divided: splits differ by no more.
_UNIT = tl.constexpr(16)
# Bytes of the keys or values that a program holds of one block of slots; several blocks are in flight at a time.
_TILE_BYTES = 16384
# Programs that a multiprocessor gets, of which two or three run at a time: rows of unequal length still fill the GPU.
_PROGRAMS_PER_MULTIPROCESSOR = 4
# Below this a split costs more to start and to merge than it saves.
_SLOTS_PER_SPLIT = 128
_MAX_SPLITS = 128
_MERGE_ELEMENTS = 4096


@triton.jit
def _share(position, start, num_slots, window, split, num_splits, SLOT_BLOCK: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The slots, from and up to, that split `split` of a block of queries reads; inert ones have position -1."""
    end = tl.max(position, axis=0) + 1
    first = start
    if HAS_WINDOW:
        lowest = tl.min(tl.where(position >= 0, position, num_slots), axis=0)
        first = tl.maximum(lowest - window + 1, first)
    live = tl.maximum(end - first, 0)
    used = tl.maximum(tl.minimum(num_splits, tl.cdiv(live, SLOT_BLOCK)), 1)
    units = tl.cdiv(live, _UNIT)
    begin = first + units * split // used * _UNIT
    stop = first + units * (split + 1) // used * _UNIT
    return begin, tl.minimum(stop, end)


# Triton would build anew for those of the arguments so named that are 1 or divisible by 16, to no gain.
@triton.jit(do_not_specialize=["positions_stride_b", "starts_stride_b", "num_queries", "num_slots", "window"])
def _attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    positions_ptr,
    starts_ptr,
    sinks_ptr,
    out_ptr,
    weights_ptr,
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
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    # The first splits are the ones that short rows use, so they start first.
    kv_head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    # The heads of a group stand together, so that a block holds few queries and ends early.
    row = tl.program_id(0) // KV_HEADS * ROWS + tl.arange(0, ROWS)
    is_row = row < GROUPS * num_queries
    head = kv_head * GROUPS + row % GROUPS
    step = row // GROUPS
    dim = tl.arange(0, DIM_BLOCK)
    value_dim = tl.arange(0, VALUE_BLOCK)
    target = (batch * num_queries + step) * (KV_HEADS * GROUPS) + head

    position = tl.load(positions_ptr + batch * positions_stride_b + step, mask=is_row, other=-1)
    position = tl.where(position < num_slots - 1, position, -1).to(tl.int32)  # inert at the last slot
    start = tl.load(starts_ptr + batch * starts_stride_b).to(tl.int32)
    begin, stop = _share(position, start, num_slots, window, split, tl.num_programs(2), SLOT_BLOCK, HAS_WINDOW)
    if IS_SPLIT:  # noqa: SIM102 (decided when the kernel is built)
        if begin >= stop:
            empty = tl.full([ROWS], float("-inf"), tl.float32)
            tl.store(weights_ptr + target * tl.num_programs(2) + split, empty, mask=is_row)
            return

    query = tl.load(
        query_ptr
        + batch * query_stride_b
        + head[:, None] * query_stride_h
        + step[:, None] * query_stride_n
        + dim[None, :],
        mask=is_row[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:  # brought in by the first split, which is empty only if all are
        sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * _LOG2E
        best = tl.where(split == 0, sink, best)
        total = tl.where(split == 0, 1.0, total)
    acc = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)

    key_ptr += batch * key_stride_b + kv_head * key_stride_h + begin.to(tl.int64) * key_stride_s
    value_ptr += batch * value_stride_b + kv_head * value_stride_h + begin.to(tl.int64) * value_stride_s
    block = tl.arange(0, SLOT_BLOCK)
    key_offset = block[:, None] * key_stride_s + dim[None, :]
    value_offset = block[:, None] * value_stride_s + value_dim[None, :]
    for first in range(begin, stop, SLOT_BLOCK):
        slot = first + block
        is_slot = slot < stop
        at = (first - begin).to(tl.int64)
        key = tl.load(key_ptr + at * key_stride_s + key_offset, mask=is_slot[:, None] & (dim < DIM)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        # In units of log 2: 2^x costs less than e^x.
        if HAS_SOFTCAP:
            scores = (softcap * _LOG2E) * (2.0 * tl.sigmoid(scores * (2.0 * scaling / softcap)) - 1.0)
        else:
            scores = scores * (scaling * _LOG2E)
        visible = (slot[None, :] <= position[:, None]) & is_slot[None, :]
        if HAS_WINDOW:
            visible = visible & (slot[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        # A row that has seen nothing yet keeps -inf; 2^(-inf - -inf) must not become NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(best - base)
        value = tl.load(
            value_ptr + at * value_stride_s + value_offset,
            mask=is_slot[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        best = higher

    total = tl.where(total == 0.0, 1.0, total)  # of a row that has seen nothing, whose weight is 2^-inf
    out = acc / total[:, None]
    if IS_SPLIT:
        target = target * tl.num_programs(2) + split
        tl.store(weights_ptr + target, best + tl.log2(total), mask=is_row)
    tl.store(
        out_ptr + target[:, None] * VALUE_DIM + value_dim[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (value_dim < VALUE_DIM)[None, :],
    )


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    parts_ptr,
    weights_ptr,
    out_ptr,
    num_splits,
    VALUE_DIM: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLIT_BLOCK)
    value_dim = tl.program_id(1) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    at = row * num_splits + split
    weights = tl.load(weights_ptr + at, mask=split < num_splits, other=float("-inf"))
    # Splits without weight left nothing in the workspace.
    is_part = weights > float("-inf")
    part = tl.load(
        parts_ptr + at[:, None] * VALUE_DIM + value_dim[None, :],
        mask=is_part[:, None] & (value_dim < VALUE_DIM)[None, :],
        other=0.0,
    )
    best = tl.max(weights, axis=0)
    weights = tl.exp2(weights - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(weights, axis=0)
    out = tl.sum(part * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * VALUE_DIM + value_dim, out.to(out_ptr.dtype.element_ty), mask=value_dim < VALUE_DIM)


@functools.cache
def _zero(device: torch.device) -> torch.Tensor:
    """`[1]` int64, the first visible slot of all rows where nothing else is said."""
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.int64, device=device)


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def choose_splits(num_programs: int, reach: int, num_multiprocessors: int) -> int:
    """Into how many parts to divide the `reach` slots that a query may see, where one part makes `num_programs`."""
    wanted = triton.cdiv(_PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors, num_programs)
    return max(1, min(wanted, reach // _SLOTS_PER_SPLIT, _MAX_SPLITS))


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
    num_splits: int | None = None,
) -> torch.Tensor:
    """See `reference.attention`; accumulates in float32, and inert queries get zeros. A CUDA graph can hold it.

    A program takes some query heads of one key head, and its share of the slots from the first that one of its live
    queries sees up to the last; no other slot is read. The host looks at shapes and strides only. `num_splits` says
    into how many shares at most the slots are divided; left out, into as many as fill the GPU.
    """
    batch, heads, num_queries, dim = query.shape
    kv_heads, num_slots, value_dim = key.shape[1], key.shape[2], value.shape[3]
    assert key.stride(3) == value.stride(3) == positions.stride(1) == 1, "rows must have unit stride"
    if query.stride(3) != 1:
        query = query.contiguous()
    groups = heads // kv_heads
    dim_block, value_block = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    slot_block = max(16, min(64, _TILE_BYTES // (max(dim_block, value_block) * query.element_size())))
    # No more than registers suffice for; float32 takes twice as many.
    rows = min(slot_block, 128 // query.element_size(), max(16, triton.next_power_of_2(groups * num_queries)))
    blocks = kv_heads * triton.cdiv(groups * num_queries, rows)
    if num_splits is None:
        reach = num_slots if window is None else min(num_slots, window + num_queries)
        num_splits = choose_splits(batch * blocks, reach, _num_multiprocessors(query.device))
    out = query.new_empty(batch, num_queries, heads, value_dim)
    num_rows = batch * num_queries * heads
    parts, weights = out, None
    if num_splits > 1:
        parts = query.new_empty(num_rows, num_splits, value_dim, dtype=torch.float32)
        weights = query.new_empty(num_rows, num_splits, dtype=torch.float32)
    _attention_kernel[(blocks, batch, num_splits)](
        query,
        key,
        value,
        positions,
        _zero(query.device) if starts is None else starts,
        sinks,
        parts,
        weights,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        positions.stride(0),
        0 if starts is None else starts.stride(0),
        num_queries,
        num_slots,
        window or 0,
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
        HAS_WINDOW=window is not None,
        HAS_SINKS=sinks is not None,
        HAS_SOFTCAP=softcap is not None,
        IS_SPLIT=num_splits > 1,
        num_warps=4,
        num_stages=3,
    )
    if num_splits > 1:
        split_block = triton.next_power_of_2(num_splits)
        merge_block = min(value_block, max(16, _MERGE_ELEMENTS // split_block))
        _merge_kernel[(num_rows, triton.cdiv(value_dim, merge_block))](
            parts,
            weights,
            out,
            num_splits,
            VALUE_DIM=value_dim,
            SPLIT_BLOCK=split_block,
            VALUE_BLOCK=merge_block,
            num_warps=max(1, min(4, split_block * merge_block // 512)),
        )
    return out
