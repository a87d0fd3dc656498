"""Triton attention over a ragged cache, for the few queries a row of decoding; defined by `reference.attention`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    positions_ptr,
    sinks_ptr,
    out_ptr,
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
    num_slots,
    window,
    scaling,
    softcap,
    NUM_QUERIES: tl.constexpr,
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
):
    batch = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    # The heads of a group stand together, so that a block holds few queries and ends early.
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    is_row = row < GROUPS * NUM_QUERIES
    head = kv_head * GROUPS + row % GROUPS
    step = row // GROUPS
    dim = tl.arange(0, DIM_BLOCK)
    value_dim = tl.arange(0, VALUE_BLOCK)

    position = tl.load(positions_ptr + batch * positions_stride_b + step, mask=is_row, other=-1)
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
    if HAS_SINKS:
        best = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32)
        total = tl.full([ROWS], 1.0, tl.float32)
    acc = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)

    first = 0
    if HAS_WINDOW:
        lowest = tl.min(tl.where(is_row, position, num_slots), axis=0)
        first = tl.maximum(lowest - window + 1, 0) // SLOT_BLOCK * SLOT_BLOCK
    end = tl.minimum(tl.max(position, axis=0) + 1, num_slots)
    for start in range(first, end, SLOT_BLOCK):
        slot = start + tl.arange(0, SLOT_BLOCK)
        is_slot = slot < end
        key = tl.load(
            key_ptr + batch * key_stride_b + kv_head * key_stride_h + slot[:, None].to(tl.int64) * key_stride_s + dim,
            mask=is_slot[:, None] & (dim < DIM)[None, :],
            other=0.0,
        )
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scaling
        if HAS_SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        visible = (slot[None, :] <= position[:, None]) & is_slot[None, :]
        if HAS_WINDOW:
            visible = visible & (slot[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        # A row that has seen nothing yet keeps -inf; exp(-inf - -inf) must not become NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - base[:, None])
        decay = tl.exp(best - base)
        value = tl.load(
            value_ptr
            + batch * value_stride_b
            + kv_head * value_stride_h
            + slot[:, None].to(tl.int64) * value_stride_s
            + value_dim,
            mask=is_slot[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        best = higher
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    num_heads = tl.num_programs(1) * GROUPS
    target = ((batch * NUM_QUERIES + step) * num_heads + head) * VALUE_DIM
    tl.store(
        out_ptr + target[:, None] + value_dim[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & (value_dim < VALUE_DIM)[None, :],
    )


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    scaling: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """See `reference.attention`; accumulates in float32. Of the slots of a row none beyond its last query is read.

    A program takes some query heads of one key head, and reads the slots up to the last of its own queries.
    """
    batch, heads, num_queries, dim = query.shape
    kv_heads, num_slots, value_dim = key.shape[1], key.shape[2], value.shape[3]
    assert query.stride(3) == key.stride(3) == value.stride(3) == positions.stride(1) == 1
    groups = heads // kv_heads
    dim_block, value_block = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    # At most 16 KiB of queries, keys or values at a time, and in float32 half the rows: registers suffice for either.
    block = max(16, min(128, 16384 // max(dim_block, value_block)) // query.element_size())
    rows = min(block, max(16, triton.next_power_of_2(groups * num_queries)))
    out = query.new_empty(batch, num_queries, heads, value_dim)
    _attention_kernel[(batch, kv_heads, triton.cdiv(groups * num_queries, rows))](
        query,
        key,
        value,
        positions,
        sinks,
        out,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        positions.stride(0),
        num_slots,
        window or 0,
        scaling,
        softcap or 1.0,
        NUM_QUERIES=num_queries,
        GROUPS=groups,
        DIM=dim,
        VALUE_DIM=value_dim,
        ROWS=rows,
        DIM_BLOCK=dim_block,
        VALUE_BLOCK=value_block,
        SLOT_BLOCK=block,
        HAS_WINDOW=window is not None,
        HAS_SINKS=sinks is not None,
        HAS_SOFTCAP=softcap is not None,
    )
    return out
