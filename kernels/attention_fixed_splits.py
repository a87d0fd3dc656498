"""Triton attention whose results depend on nothing but the query and what it sees; see `attention_reference.attention`.

Shapes, and which slots a query sees, are those of `attention`. The slots of a row are cut, from its first one on, into
splits of SPLIT slots, and a split into blocks; neither depends on the number of rows, queries or live slots, nor on a
query's window. Each split has an online softmax of its own, with maximum m_i, sum s_i and sum of values a_i. They are
merged in ascending order:

    M_i = max(M_(i-1), m_i)
    S_i = S_(i-1) 2^(M_(i-1) - M_i) + s_i 2^(m_i - M_i)
    A_i = A_(i-1) 2^(M_(i-1) - M_i) + a_i 2^(m_i - M_i)        result = A / S

with M, S, A of a sink before the first one: its logit, 1, 0; without a sink -inf, 0, 0. A split, or a block, of which
a query sees nothing adds 0 and multiplies by 1. So the bits of a result are the same in a prefill, packed or not, in
chunks or not, and in a round of any number of rows and drafts.

Either a program merges all splits of its queries as it goes, or splits are divided among programs, which write m, s
and a to a workspace, and a second kernel merges them. Both add by the same instructions, which are named (`tl.fma`), so
that no compiler chooses them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .attention import _LOG2E, _attend_to_slots, _default_starts, _first_visible, slots_of_block
from .attention_splits import choose_splits, num_multiprocessors
from .dependent_launch import dependent_launch, wait_for_inputs

# Slots of a split; a multiple of every block of slots.
SPLIT = 256
# From so many queries of a key head on a program takes twice as many, since it is bound by reading keys and values.
MANY_QUERIES = 1024


@triton.jit
def _merge(running_max, running_sum, acc, split_max, split_sum, split_acc):
    """Merge the results of the next split, `[rows]`, `[rows]` and `[rows, Dv]`, in those of the splits before it."""
    new_max = tl.maximum(running_max, split_max)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    before = tl.exp2(running_max - base)
    here = tl.exp2(split_max - base)
    running_sum = tl.fma(running_sum, before, split_sum * here)
    acc = tl.fma(acc, tl.broadcast_to(before[:, None], acc.shape), split_acc * here[:, None])
    return new_max, running_sum, acc


@triton.jit
def _visible_range(
    position,
    last,
    start,
    num_slots,
    window,
    SLOT_BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
):
    """The first slot of the first block that one of the queries sees, and the end of what they see.

    Blocks are counted from `start`. Padding queries have position and last slot -1.
    """
    end = tl.max(last, axis=0) + 1
    first = start
    if HAS_WINDOW:
        lowest = tl.min(tl.where(position >= 0, position, num_slots), axis=0)
        visible = tl.maximum(_first_visible(lowest, window, IS_CHUNKED), start)
        first = start + (visible - start) // SLOT_BLOCK * SLOT_BLOCK
    return first, end


# do_not_specialize: else Triton compiles variants for values that are 1 or divisible by 16, which are no faster.
@triton.jit(
    do_not_specialize=[
        "positions_stride_b",
        "starts_stride_b",
        "starts_stride_n",
        "ends_stride_b",
        "num_queries",
        "num_slots",
        "num_splits",
        "window",
    ]
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
    partial_ptr,
    stats_ptr,
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
    starts_stride_n,
    ends_stride_b,
    num_queries,
    num_slots,
    num_splits,
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
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The attention of a block of queries, or some splits of it.

    Grid: (kv_heads * blocks of queries, B, programs that share the splits); a program has up to ROWS of the G * n
    queries of one key head. Reads those queries, their positions, first and last slots, and the keys and values of the
    slots of its splits. Writes `out` `[B, n, heads, Dv]`; with IS_SHARED, of each of its splits of which one of its
    queries sees a slot, `partial` `[B * n * heads, splits, Dv]` and `stats` `[2, B * n * heads, splits]`, maxima and
    sums, float32.
    """
    kv_head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    # The heads of one query are adjacent: a block covers few queries, so its last visible slot comes early.
    row = tl.program_id(0) // KV_HEADS * ROWS + tl.arange(0, ROWS)
    is_row = row < GROUPS * num_queries
    head = kv_head * GROUPS + row % GROUPS
    query_index = row // GROUPS
    dim = tl.arange(0, DIM_BLOCK)
    value_dim = tl.arange(0, VALUE_BLOCK)
    is_value = is_row[:, None] & (value_dim < VALUE_DIM)[None, :]
    out_row = (batch * num_queries + query_index) * (KV_HEADS * GROUPS) + head

    wait_for_inputs(PDL)
    position = tl.load(positions_ptr + batch * positions_stride_b + query_index, mask=is_row, other=-1)
    position = tl.where(position < num_slots - 1, position, -1).to(tl.int32)  # padding
    at = batch * starts_stride_b + query_index * starts_stride_n
    start = tl.load(starts_ptr + at, mask=is_row, other=0).to(tl.int32)
    start = tl.where(position >= start, start, num_slots)  # no segment of its own for padding
    last = position
    if HAS_ENDS:
        last = tl.load(ends_ptr + batch * ends_stride_b + query_index, mask=is_row, other=-1).to(tl.int32)
    query = tl.load(
        query_ptr
        + batch * query_stride_b
        + head[:, None] * query_stride_h
        + query_index[:, None] * query_stride_n
        + dim[None, :],
        mask=is_row[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    none_max = tl.full([ROWS], float("-inf"), tl.float32)
    none_sum = tl.zeros([ROWS], tl.float32)
    none_acc = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    running_max, running_sum, acc = none_max, none_sum, none_acc
    if HAS_SINKS and not IS_SHARED:
        running_max = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * _LOG2E
        running_sum += 1.0

    key_ptr += batch * key_stride_b + kv_head * key_stride_h
    value_ptr += batch * value_stride_b + kv_head * value_stride_h
    # The queries of one prompt after those of the other; the rest of the block sees nothing meanwhile.
    segment = tl.min(start, axis=0)
    while segment < num_slots:
        own_position = tl.where(start == segment, position, -1)
        own_last = tl.where(start == segment, last, -1)
        first, end = _visible_range(
            own_position, own_last, segment, num_slots, window, SLOT_BLOCK, HAS_WINDOW, IS_CHUNKED
        )
        first_split = (first - segment) // SPLIT + tl.program_id(2)
        for split in range(first_split, tl.cdiv(end - segment, SPLIT), tl.num_programs(2)):
            begin = segment + split * SPLIT
            split_max, split_sum, split_acc = _attend_to_slots(
                query,
                key_ptr,
                value_ptr,
                key_stride_s,
                value_stride_s,
                own_position,
                own_last,
                tl.maximum(begin, first),
                tl.minimum(begin + SPLIT, end),
                window,
                scaling,
                softcap,
                none_max,
                none_sum,
                none_acc,
                DIM,
                VALUE_DIM,
                DIM_BLOCK,
                VALUE_BLOCK,
                SLOT_BLOCK,
                HAS_WINDOW,
                IS_CHUNKED,
                HAS_SOFTCAP,
            )
            if IS_SHARED:
                to = out_row * num_splits + split
                tl.store(stats_ptr + to, split_max, mask=is_row)
                sums_ptr = stats_ptr + tl.num_programs(1).to(tl.int64) * num_queries * (KV_HEADS * GROUPS) * num_splits
                tl.store(sums_ptr + to, split_sum, mask=is_row)
                tl.store(partial_ptr + to[:, None] * VALUE_DIM + value_dim[None, :], split_acc, mask=is_value)
            else:
                running_max, running_sum, acc = _merge(running_max, running_sum, acc, split_max, split_sum, split_acc)
        segment = tl.min(tl.where(start > segment, start, num_slots), axis=0)

    if not IS_SHARED:
        running_sum = tl.where(running_sum == 0.0, 1.0, running_sum)  # a query that saw no slot
        out = tl.where((start < num_slots)[:, None], acc * (1.0 / running_sum)[:, None], 0.0)
        tl.store(
            out_ptr + out_row[:, None] * VALUE_DIM + value_dim[None, :], out.to(out_ptr.dtype.element_ty), mask=is_value
        )


@triton.jit(
    do_not_specialize=[
        "positions_stride_b",
        "starts_stride_b",
        "ends_stride_b",
        "num_queries",
        "num_slots",
        "num_splits",
        "window",
    ]
)
def _merge_kernel(
    partial_ptr,
    stats_ptr,
    positions_ptr,
    starts_ptr,
    ends_ptr,
    sinks_ptr,
    out_ptr,
    positions_stride_b,
    starts_stride_b,
    ends_stride_b,
    num_queries,
    num_slots,
    num_splits,
    window,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the splits of one query.

    Grid: (B * n * heads,). Reads its position, first and last slot, and of the splits that it sees `partial`
    `[B * n * heads, splits, Dv]` and `stats` `[2, B * n * heads, splits]`; writes `out` `[B, n, heads, Dv]`.
    """
    row = tl.program_id(0).to(tl.int64)
    batch, query_index = row // HEADS // num_queries, row // HEADS % num_queries
    one = tl.arange(0, 1)
    value_dim = tl.arange(0, VALUE_BLOCK)
    is_value = value_dim < VALUE_DIM

    wait_for_inputs(PDL)
    position = tl.load(positions_ptr + batch * positions_stride_b + query_index + one)
    start = tl.load(starts_ptr + batch * starts_stride_b).to(tl.int32)
    is_live = (position < num_slots - 1) & (position >= start)
    position = tl.where(is_live, position, -1).to(tl.int32)
    last = position
    if HAS_ENDS:
        last = tl.load(ends_ptr + batch * ends_stride_b + query_index + one).to(tl.int32)
        last = tl.where(is_live, last, -1)
    first, end = _visible_range(position, last, start, num_slots, window, SLOT_BLOCK, HAS_WINDOW, IS_CHUNKED)
    running_max = tl.full([1], float("-inf"), tl.float32)
    running_sum = tl.zeros([1], tl.float32)
    if HAS_SINKS:
        running_max = tl.load(sinks_ptr + row % HEADS + one).to(tl.float32) * _LOG2E
        running_sum += 1.0
    acc = tl.zeros([1, VALUE_BLOCK], tl.float32)
    sums_ptr = stats_ptr + tl.num_programs(0).to(tl.int64) * num_splits
    for split in tl.range((first - start) // SPLIT, tl.cdiv(end - start, SPLIT), loop_unroll_factor=4):
        at = row * num_splits + split + one
        split_acc = tl.load(
            partial_ptr + at[:, None] * VALUE_DIM + value_dim[None, :], mask=is_value[None, :], other=0.0
        )
        running_max, running_sum, acc = _merge(
            running_max, running_sum, acc, tl.load(stats_ptr + at), tl.load(sums_ptr + at), split_acc
        )
    running_sum = tl.where(running_sum == 0.0, 1.0, running_sum)
    out = tl.where(is_live[:, None], acc * (1.0 / running_sum)[:, None], 0.0)
    out_ptr += row * VALUE_DIM + one[:, None] + value_dim[None, :]
    tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=is_value[None, :])


def _tile_of(num_queries: int, slot_block: int, itemsize: int) -> tuple[int, int]:
    """Queries of a program, of `num_queries` of a key head, and its warps.

    A warp has rows of its own, 16 of wgmma instructions: so the order in which the weights of a row are summed up is
    the same for 64 rows and for 128. Tiles of fewer rows would divide the slots among warps, so few queries are filled
    up to 64. Elsewhere the tile is always the same.
    """
    rows = min(slot_block, 128 // itemsize)
    return (2 * rows, 8) if rows == 64 and num_queries >= MANY_QUERIES else (rows, 4)


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
    num_programs: int | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """See `attention_reference.attention`. Accumulates in float32; padding queries get 0. Safe in a CUDA graph.

    The bits of a query's result depend on the query, and on the keys and values that it sees, only. The launch depends
    on shapes and strides only. `num_programs` share the splits of a block of queries; by default as many as fill the
    GPU. Packed queries, those with starts `[B, n]`, have one.
    """
    batch, heads, num_queries, dim = query.shape
    kv_heads, num_slots, value_dim = key.shape[1], key.shape[2], value.shape[3]
    assert key.stride(3) == value.stride(3) == positions.stride(1) == 1, "rows must have unit stride"
    is_packed = starts is not None and starts.dim() == 2
    assert ends is None or ends.stride(1) == 1, "rows must have unit stride"
    assert window is None or chunk is None, "a window, or chunks"
    assert chunk is None or not is_packed, "chunks are counted from slot 0"
    size = window if chunk is None else chunk
    if query.stride(3) != 1:
        query = query.contiguous()
    groups = heads // kv_heads
    dim_block, value_block = (max(16, triton.next_power_of_2(width)) for width in (dim, value_dim))
    slot_block = slots_of_block(dim_block, value_block, query.element_size())
    rows, num_warps = _tile_of(groups * num_queries, slot_block, query.element_size())
    blocks = kv_heads * triton.cdiv(groups * num_queries, rows)
    num_splits = triton.cdiv(num_slots, SPLIT)
    if is_packed:
        num_programs = 1
    elif num_programs is None:
        num_visible = num_slots if size is None else min(num_slots, size + num_queries)
        num_programs = choose_splits(batch * blocks, num_visible, num_multiprocessors(query.device))
        # No more than splits that a query sees.
        num_programs = min(num_programs, triton.cdiv(num_visible, SPLIT) + (size is not None))
    out = query.new_empty(batch, num_queries, heads, value_dim)
    num_rows, partial, stats = batch * num_queries * heads, None, None
    if num_programs > 1:
        partial = query.new_empty(num_rows, num_splits, value_dim, dtype=torch.float32)
        stats = query.new_empty(2, num_rows, num_splits, dtype=torch.float32)
    starts = _default_starts(query.device) if starts is None else starts
    starts_strides = (starts.stride(0) if len(starts) > 1 else 0, starts.stride(1) if is_packed else 0)
    ends_stride = 0 if ends is None else ends.stride(0)
    _attention_kernel[(blocks, batch, num_programs)](
        query,
        key,
        value,
        positions,
        starts,
        positions if ends is None else ends,
        sinks,
        out,
        partial,
        stats,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        positions.stride(0),
        *starts_strides,
        ends_stride,
        num_queries,
        num_slots,
        num_splits,
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
        SPLIT=SPLIT,
        HAS_WINDOW=size is not None,
        IS_CHUNKED=chunk is not None,
        HAS_ENDS=ends is not None,
        HAS_SINKS=sinks is not None,
        HAS_SOFTCAP=softcap is not None,
        IS_SHARED=num_programs > 1,
        num_warps=num_warps,
        num_stages=3,
        **dependent_launch(query.device),
    )
    if num_programs > 1:
        _merge_kernel[(num_rows,)](
            partial,
            stats,
            positions,
            starts,
            positions if ends is None else ends,
            sinks,
            out,
            positions.stride(0),
            starts_strides[0],
            ends_stride,
            num_queries,
            num_slots,
            num_splits,
            size or 0,
            HEADS=heads,
            VALUE_DIM=value_dim,
            VALUE_BLOCK=value_block,
            SLOT_BLOCK=slot_block,
            SPLIT=SPLIT,
            HAS_WINDOW=size is not None,
            IS_CHUNKED=chunk is not None,
            HAS_ENDS=ends is not None,
            HAS_SINKS=sinks is not None,
            num_warps=1,
            **dependent_launch(query.device),
        )
    return out
