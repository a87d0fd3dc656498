"""Triton attention over the static KV cache; the reference is `attention_reference.attention`.

The kernel is made for the few queries per row of a decoding round. Prefill runs it too: it reads only visible slots and
needs no mask tensor. With starts for each query, as in packed prompts, a block of queries goes through the slots of one
prompt after the other. Float8 keys and values are widened in registers, which is exact; their scales multiply scores
and softmax weights.

Split-KV ("flash decoding"): the slots of a row are divided among the programs of a grid that depends only on shapes,
and a second kernel merges their results, see `attention_splits`. Usually splits have equal sizes, one for each program.
For batch-invariant results they are at fixed places: SPLIT slots each from the row's first slot on, merged in ascending
order, in the program itself if it has all of them. Then splits and blocks do not depend on the number of rows, queries
or live slots, nor on a query's window; a split or block in which a query sees nothing adds 0 and multiplies by 1. So
the bits of a result are the same in a prefill, packed or not, chunked or not, and in a round of any number of rows and
drafts. The ancestors of a tree's node are then read in the order of their positions, node by node.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from . import attention_splits
from .attention_splits import (
    LOG2E,
    choose_splits,
    first_visible,
    merge_fixed_splits,
    merge_next,
    merge_splits,
    num_multiprocessors,
    split_range,
    visible_range,
)
from .float8 import first_of_pair, pairs_of, second_of_pair
from .launch import Unspecialised, kernel, wait_for_inputs
from .types import MOST_WORDS, WORD_BITS

# Bytes of the keys, or the values, of one block of slots; several blocks are in flight in a program.
_TILE_BYTES = 16384
# With fixed splits, from so many queries of a key head on, a program takes twice as many queries, because reading keys
# and values bounds it.
MANY_QUERIES = 1024


@triton.jit
def _attend_to_slots(
    query, cache, position, last, begin, stop, scoring, running, FORM, root=None, ancestors=None, line=None
):
    """Continue the online softmax of a block of queries over the slots `begin` to `stop - 1`.

    With `ancestors`, words for each query, the slots are nodes; that of node 0 is `root`. With `line`, the words of one
    node, the node's ancestors are read as if they were in the slots of their positions, as in a text.

    Args:
        cache: pointers to keys, values and scales of the row and head, and their strides between slots.
        scoring: window, scaling and softcap.
        running: maxima, sums of weights, and weighted sums of values, which are returned updated.
        FORM: DIM, VALUE_DIM, SLOT_BLOCK, IS_CHUNKED and NUM_WORDS of `_attention_kernel`.
    """
    key_ptr, value_ptr, scale_ptr, key_stride_s, value_stride_s, scale_stride_s = cache
    window, scaling, softcap = scoring
    running_max, running_sum, acc = running
    DIM: tl.constexpr = FORM[0]
    VALUE_DIM: tl.constexpr = FORM[1]
    SLOT_BLOCK: tl.constexpr = FORM[2]
    IS_CHUNKED: tl.constexpr = FORM[3]
    NUM_WORDS: tl.constexpr = FORM[4]
    dim = tl.arange(0, query.shape[1])
    value_dim = tl.arange(0, acc.shape[1])
    key_ptr += begin.to(tl.int64) * key_stride_s
    value_ptr += begin.to(tl.int64) * value_stride_s
    block = tl.arange(0, SLOT_BLOCK)
    if scale_ptr is not None:
        scale_ptr += begin.to(tl.int64) * scale_stride_s + block * scale_stride_s
    key_offset = block[:, None] * key_stride_s + dim[None, :]
    value_offset = block[:, None] * value_stride_s + value_dim[None, :]
    if line is not None:
        number = tl.arange(0, 64)
        is_ancestor = ((line[0] >> number) & 1).to(tl.int32)
        rank = tl.where(is_ancestor != 0, tl.cumsum(is_ancestor, axis=0) - 1, -1)
        if NUM_WORDS > 1:
            before = tl.sum(is_ancestor, axis=0)
            is_ancestor = ((line[1] >> number) & 1).to(tl.int32)
            more_rank = tl.where(is_ancestor != 0, before + tl.cumsum(is_ancestor, axis=0) - 1, -1)
    for first in range(begin, stop, SLOT_BLOCK):
        slot = first + block
        is_slot = slot < stop
        at = (first - begin).to(tl.int64)
        keys_ptr = key_ptr + at * key_stride_s + key_offset
        if line is not None:
            steps = (slot - root)[:, None]
            node = tl.sum(tl.where(rank[None, :] == steps, number[None, :], 0), axis=1)
            if NUM_WORDS > 1:
                node += tl.sum(tl.where(more_rank[None, :] == steps, 64 + number[None, :], 0), axis=1)
            moved = tl.where(slot < root, 0, root + node - slot).to(tl.int64)
            keys_ptr += moved[:, None] * key_stride_s
        key = tl.load(keys_ptr, mask=is_slot[:, None] & (dim < DIM)[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee")
        if scale_ptr is not None:
            scales_ptr = scale_ptr + at * scale_stride_s
            if line is not None:
                scales_ptr += moved * scale_stride_s
            scales = tl.load(scales_ptr, mask=is_slot, other=0)
            scores *= first_of_pair(scales, query.dtype)[None, :]
        # Scaled by log2(e), because exp2 is cheaper than exp; tanh is computed by the sigmoid.
        if softcap is not None:
            scores = (softcap * LOG2E) * (2.0 * tl.sigmoid(scores * (2.0 * scaling / softcap)) - 1.0)
        else:
            scores = scores * (scaling * LOG2E)
        visible = (slot[None, :] <= last[:, None]) & is_slot[None, :]
        if window is not None:
            visible = visible & (slot[None, :] >= first_visible(position, window, IS_CHUNKED)[:, None])
        if ancestors is not None:
            node = (slot - root)[None, :]
            word = ancestors[0][:, None]
            if NUM_WORDS > 1:
                word = tl.where(node < 64, word, ancestors[1][:, None])
            visible = visible & (((word >> (node & 63).to(tl.int64)) & 1) != 0)
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))
        # A query that has seen no slot yet has maximum -inf; 2^(-inf - -inf) would be NaN.
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(running_max - base)
        values_ptr = value_ptr + at * value_stride_s + value_offset
        if line is not None:
            values_ptr += moved[:, None] * value_stride_s
        value = tl.load(values_ptr, mask=is_slot[:, None] & (value_dim < VALUE_DIM)[None, :], other=0.0)
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        if scale_ptr is not None:
            if query.dtype == tl.float16:  # weights times scales may be subnormal in float16
                value = value.to(tl.float32) * second_of_pair(scales, query.dtype)[:, None]
            else:
                weights *= second_of_pair(scales, query.dtype)[None, :]
            value = value.to(query.dtype)
        acc = acc * rescale[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        running_max = new_max
    return running_max, running_sum, acc


@triton.jit
def _store(
    running,
    is_row,
    out_row,
    outputs,
    split,
    num_parts,
    VALUE_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Store the results of the queries `is_row`, or with IS_SPLIT their results of split `split`.

    `outputs` are pointers to results, to results of splits, and to statistics of splits.
    """
    running_max, running_sum, acc = running
    out_ptr, partial_ptr, stats_ptr = outputs
    value_dim = tl.arange(0, acc.shape[1])
    running_sum = tl.where(running_sum == 0.0, 1.0, running_sum)  # a query that sees no slot; its lse stays -inf
    out = acc * (1.0 / running_sum)[:, None] if SPLIT > 0 else acc / running_sum[:, None]
    to_ptr = partial_ptr if IS_SPLIT else out_ptr
    if IS_SPLIT:
        out_row = out_row * num_parts + split
        tl.store(stats_ptr + out_row, running_max + tl.log2(running_sum), mask=is_row)
    is_value = is_row[:, None] & (value_dim < VALUE_DIM)[None, :]
    tl.store(to_ptr + out_row[:, None] * VALUE_DIM + value_dim[None, :], out.to(to_ptr.dtype.element_ty), mask=is_value)


@kernel
def _attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    scale_ptr,
    positions_ptr: Unspecialised,
    starts_ptr: Unspecialised,
    ends_ptr: Unspecialised,
    ancestors_ptr,
    sinks_ptr,
    outputs,
    query_strides,
    key_strides,
    value_strides,
    scale_strides,
    positions_stride_b: Unspecialised,
    starts_stride_b: Unspecialised,
    starts_stride_n: Unspecialised,
    ends_stride_b: Unspecialised,
    ancestors_stride_b: Unspecialised,
    ancestors_stride_n: Unspecialised,
    ancestors_stride_w: Unspecialised,
    num_queries: Unspecialised,
    num_slots: Unspecialised,
    num_splits: Unspecialised,
    window: Unspecialised,
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
    IS_PACKED: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    NUM_WORDS: tl.constexpr,
):
    """Attention of a block of queries over some or all splits, with an online softmax in float32.

    Grid: (kv_heads * blocks of queries, B, programs that share the slots); a program has up to ROWS of the G * n
    queries of one key head. Reads those queries, their positions and last slots, or NUM_WORDS words of ancestors, the
    start of the row, or of each query (IS_PACKED), and the keys and values of the slots of its splits. Writes `out`
    `[B, n, heads, Dv]`. With IS_SPLIT it writes float32 results of splits instead: `partial`
    `[B * n * heads, splits, Dv]`, normalised results, and `stats` `[B * n * heads, splits]`, base-2 logarithms of sums
    of exponentials; for a split without slots only the latter, -inf. With splits at fixed places (SPLIT > 0), `partial`
    has weighted sums of values, and `stats` `[2, B * n * heads, splits]` maxima and sums.
    """
    # The split is the slowest index of the grid, so first splits start first; short rows use only these.
    kv_head = (tl.program_id(0) % KV_HEADS).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    split, num_parts = tl.program_id(2), tl.num_programs(2)
    # The heads of one query are adjacent: a block covers few queries, so its last visible slot comes early.
    row = tl.program_id(0) // KV_HEADS * ROWS + tl.arange(0, ROWS)
    is_row = row < GROUPS * num_queries
    head = kv_head * GROUPS + row % GROUPS
    query_index = row // GROUPS
    dim = tl.arange(0, DIM_BLOCK)
    value_dim = tl.arange(0, VALUE_BLOCK)
    out_row = (batch * num_queries + query_index) * (KV_HEADS * GROUPS) + head
    HAS_SEGMENTS: tl.constexpr = IS_PACKED or SPLIT > 0
    _, partial_ptr, stats_ptr = outputs

    wait_for_inputs()
    position = tl.load(positions_ptr + batch * positions_stride_b + query_index, mask=is_row, other=-1)
    position = tl.where(position < num_slots - 1, position, -1).to(tl.int32)  # padding
    if HAS_SEGMENTS:
        at = batch * starts_stride_b + query_index * starts_stride_n
        start = tl.load(starts_ptr + at, mask=is_row, other=0).to(tl.int32)
        start = tl.where(position >= start, start, num_slots)  # padding has no segment
    else:
        start = tl.load(starts_ptr + batch * starts_stride_b).to(tl.int32)
    last = position
    if ends_ptr is not None:
        last = tl.load(ends_ptr + batch * ends_stride_b + query_index, mask=is_row, other=-1).to(tl.int32)
        last = tl.where(position >= start, last, -1)
    root, ancestors = None, None
    if NUM_WORDS > 0:
        root = tl.load(positions_ptr + batch * positions_stride_b).to(tl.int32)
        lines_ptr = ancestors_ptr + batch * ancestors_stride_b
        num_nodes = tl.minimum(tl.max(query_index, axis=0) + 1, num_queries)
        if SPLIT == 0:
            last = tl.where(position >= 0, root + query_index, -1)
            lines = lines_ptr + query_index * ancestors_stride_n
            ancestors = (tl.load(lines, mask=is_row, other=0),)
            if NUM_WORDS > 1:
                ancestors = ancestors[0], tl.load(lines + ancestors_stride_w, mask=is_row, other=0)
    if not HAS_SEGMENTS:
        begin, stop = split_range(position, last, start, num_slots, window, split, num_parts, SLOT_BLOCK, IS_CHUNKED)
        if IS_SPLIT:  # noqa: SIM102 (a constexpr branch)
            if begin >= stop:
                minus_inf = tl.full([ROWS], float("-inf"), tl.float32)
                tl.store(stats_ptr + out_row * num_parts + split, minus_inf, mask=is_row)
                return

    query = tl.load(
        query_ptr
        + batch * query_strides[0]
        + head[:, None] * query_strides[1]
        + query_index[:, None] * query_strides[2]
        + dim[None, :],
        mask=is_row[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    none_max = tl.full([ROWS], float("-inf"), tl.float32)
    none_sum = tl.zeros([ROWS], tl.float32)
    none_acc = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    first_max, first_sum = none_max, none_sum
    if sinks_ptr is not None and not (IS_SPLIT and SPLIT > 0):
        # The first split counts the sink; it has no slot only if no split has one.
        sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2E
        first_max = tl.where(split == 0, sink, first_max)
        first_sum = tl.where(split == 0, 1.0, first_sum)

    key_ptr += batch * key_strides[0] + kv_head * key_strides[1]
    value_ptr += batch * value_strides[0] + kv_head * value_strides[1]
    if scale_ptr is not None:
        scale_ptr += batch * scale_strides[0] + kv_head
    cache = key_ptr, value_ptr, scale_ptr, key_strides[2], value_strides[2], scale_strides[1]
    scoring = window, scaling, softcap
    FORM: tl.constexpr = (DIM, VALUE_DIM, SLOT_BLOCK, IS_CHUNKED, NUM_WORDS)
    none = none_max, none_sum, none_acc
    if HAS_SEGMENTS:
        # One prompt's queries after the other's. The other queries of the block see nothing then, and nothing of the
        # result is stored for them, because 0 times a value of NaN is NaN.
        segment = tl.min(start, axis=0)
        while segment < num_slots:
            is_own = start == segment
            own_position = tl.where(is_own, position, -1)
            own_last = tl.where(is_own, last, -1)
            running_max, running_sum, acc = first_max, first_sum, none_acc
            if SPLIT == 0:
                begin, stop = split_range(
                    own_position, own_last, segment, num_slots, window, split, num_parts, SLOT_BLOCK, IS_CHUNKED
                )
                running_max, running_sum, acc = _attend_to_slots(
                    query, cache, own_position, own_last, begin, stop, scoring, (running_max, running_sum, acc), FORM
                )
            else:
                first, end = visible_range(own_position, own_last, segment, num_slots, window, SLOT_BLOCK, IS_CHUNKED)
                for one in range((first - segment) // SPLIT + split, tl.cdiv(end - segment, SPLIT), num_parts):
                    begin = tl.maximum(segment + one * SPLIT, first)
                    stop = tl.minimum(segment + (one + 1) * SPLIT, end)
                    edge = stop
                    if NUM_WORDS > 0:  # the first block with nodes
                        edge = begin + tl.maximum(root - begin, 0) // SLOT_BLOCK * SLOT_BLOCK
                        edge = tl.minimum(edge, stop)
                    split_max, split_sum, split_acc = _attend_to_slots(
                        query, cache, own_position, own_last, begin, edge, scoring, none, FORM
                    )
                    if NUM_WORDS > 0:  # noqa: SIM102 (a constexpr branch)
                        if edge < stop:
                            for node in range(tl.min(query_index, axis=0), num_nodes):
                                line_ptr = lines_ptr + node * ancestors_stride_n
                                line = (tl.load(line_ptr),)
                                if NUM_WORDS > 1:
                                    line = line[0], tl.load(line_ptr + ancestors_stride_w)
                                split_max, split_sum, split_acc = _attend_to_slots(
                                    query,
                                    cache,
                                    own_position,
                                    tl.where(query_index == node, own_last, -1),
                                    edge,
                                    stop,
                                    scoring,
                                    (split_max, split_sum, split_acc),
                                    FORM,
                                    root,
                                    line=line,
                                )
                    if IS_SPLIT:
                        to = out_row * num_splits + one
                        tl.store(stats_ptr + to, split_max, mask=is_row)
                        num_rows = tl.num_programs(1).to(tl.int64) * num_queries * (KV_HEADS * GROUPS)
                        tl.store(stats_ptr + num_rows * num_splits + to, split_sum, mask=is_row)
                        is_value = is_row[:, None] & (value_dim < VALUE_DIM)[None, :]
                        tl.store(partial_ptr + to[:, None] * VALUE_DIM + value_dim[None, :], split_acc, mask=is_value)
                    else:
                        running_max, running_sum, acc = merge_next(
                            running_max, running_sum, acc, split_max, split_sum, split_acc
                        )
            if not (IS_SPLIT and SPLIT > 0):
                _store(
                    (running_max, running_sum, acc),
                    is_own,
                    out_row,
                    outputs,
                    split,
                    num_parts,
                    VALUE_DIM,
                    SPLIT,
                    IS_SPLIT,
                )
            segment = tl.min(tl.where(start > segment, start, num_slots), axis=0)
        running_max, running_sum, acc = none_max, none_sum, none_acc
        is_row = is_row & (start == num_slots)
    else:
        running_max, running_sum, acc = _attend_to_slots(
            query,
            cache,
            position,
            last,
            begin,
            tl.minimum(stop, root) if NUM_WORDS > 0 else stop,
            scoring,
            (first_max, first_sum, none_acc),
            FORM,
        )
        if NUM_WORDS > 0:  # first the text, read as without a tree, which is faster; then the nodes
            running_max, running_sum, acc = _attend_to_slots(
                query,
                cache,
                position,
                last,
                tl.maximum(begin, root),
                stop,
                scoring,
                (running_max, running_sum, acc),
                FORM,
                root,
                ancestors,
            )
    if not (IS_SPLIT and SPLIT > 0):
        _store((running_max, running_sum, acc), is_row, out_row, outputs, split, num_parts, VALUE_DIM, SPLIT, IS_SPLIT)


@functools.cache
def _default_starts(device: torch.device) -> torch.Tensor:
    """`[1]` int64: 0, the start of every row if `starts` is None."""
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.int64, device=device)


def _tile_of(num_queries: int, slot_block: int, itemsize: int, is_fixed: bool) -> tuple[int, int]:
    """Queries of a program, of `num_queries` of a key head, and its warps.

    As many queries as fit the registers; float32 takes twice the registers of 16-bit types. With fixed splits each warp
    has rows of its own, 16 in a wgmma instruction, so the order in which a row's weights are summed is the same for 64
    and for 128 rows. Tiles of fewer rows would divide the slots among warps, so few queries are padded to 64. Smaller
    tiles always have the same size.
    """
    rows = min(slot_block, 128 // itemsize)
    if not is_fixed:
        return min(rows, max(16, triton.next_power_of_2(num_queries))), 4
    return (2 * rows, 8) if rows == 64 and num_queries >= MANY_QUERIES else (rows, 4)


def attention(
    query,
    key,
    value,
    positions,
    scaling,
    window=None,
    sinks=None,
    softcap=None,
    starts=None,
    ends=None,
    chunk=None,
    scales=None,
    ancestors=None,
    num_programs: int | None = None,
    fixed_splits: bool = False,
):
    """See `attention_reference.attention`. Accumulates in float32; padding queries get 0. Safe in a CUDA graph.

    A program takes some query heads of one key head, and its splits of the slots from the first to the last that one of
    its live queries sees; it reads no other slot. The launch depends only on shapes and strides.

    Args:
        num_programs: number of programs that share the slots of a block of queries; None for as many as fill the GPU.
            Packed queries, with starts `[B, n]`, have one with fixed splits.
        fixed_splits: whether the bits of a query's result depend only on the query and on the keys and values that it
            sees.
    """
    batch, heads, num_queries, dim = query.shape
    kv_heads, num_slots, value_dim = key.shape[1], key.shape[2], value.shape[3]
    is_packed = starts is not None and starts.dim() == 2
    others = (one for one in (scales, ends, starts if is_packed else None) if one is not None)
    unit_strides = (key, value, positions, *others)
    assert all(one.stride(-1) == 1 for one in unit_strides), "rows must have unit stride"
    pairs = None if scales is None else pairs_of(scales)
    assert window is None or chunk is None, "a window, or chunks"
    assert chunk is None or not is_packed, "chunks are counted from slot 0"
    num_words = 0 if ancestors is None else ancestors.shape[2]
    assert not num_words or not (is_packed or ends is not None or chunk is not None), "trees of rounds"
    assert not num_words or (num_words <= MOST_WORDS and num_queries <= WORD_BITS * num_words), "a bit for each node"
    size = window if chunk is None else chunk
    if query.stride(3) != 1:
        query = query.contiguous()
    groups = heads // kv_heads
    dim_block, value_block = (max(16, triton.next_power_of_2(width)) for width in (dim, value_dim))
    slot_block = max(16, min(64, _TILE_BYTES // (max(dim_block, value_block) * query.element_size())))
    rows, num_warps = _tile_of(groups * num_queries, slot_block, query.element_size(), fixed_splits)
    blocks = kv_heads * triton.cdiv(groups * num_queries, rows)
    split = attention_splits.SPLIT if fixed_splits else 0
    if is_packed and fixed_splits:
        num_programs = 1
    elif num_programs is None:
        num_visible = num_slots if size is None else min(num_slots, size + num_queries)
        # Results of fixed splits are merged in any case.
        num_results = 1 if fixed_splits else batch * num_queries * heads
        num_programs = choose_splits(batch * blocks, num_results, num_visible, num_multiprocessors(query.device))
        if fixed_splits:  # no more programs than splits that a query sees
            num_programs = min(num_programs, triton.cdiv(num_visible, split) + (size is not None))
    out = query.new_empty(batch, num_queries, heads, value_dim)
    num_splits = triton.cdiv(num_slots, split) if fixed_splits else num_programs
    partial = stats = None
    if num_programs > 1:
        results = batch * num_queries * heads, num_splits
        partial = query.new_empty(*results, value_dim, dtype=torch.float32)
        stats = query.new_empty(1 + fixed_splits, *results, dtype=torch.float32)
    starts = _default_starts(query.device) if starts is None else starts
    starts_strides = (starts.stride(0) if len(starts) > 1 else 0, starts.stride(1) if is_packed else 0)
    ends_stride = 0 if ends is None else ends.stride(0)
    _attention_kernel[(blocks, batch, num_programs)](
        query,
        key,
        value,
        pairs,
        positions,
        starts,
        ends,
        ancestors,
        sinks,
        (out, partial, stats),
        query.stride()[:3],
        key.stride()[:3],
        value.stride()[:3],
        (0, 0) if pairs is None else pairs.stride()[::2],
        positions.stride(0),
        *starts_strides,
        ends_stride,
        *((0, 0, 0) if ancestors is None else ancestors.stride()),
        num_queries,
        num_slots,
        num_splits,
        size,
        scaling,
        softcap,
        KV_HEADS=kv_heads,
        GROUPS=groups,
        DIM=dim,
        VALUE_DIM=value_dim,
        ROWS=rows,
        DIM_BLOCK=dim_block,
        VALUE_BLOCK=value_block,
        SLOT_BLOCK=slot_block,
        SPLIT=split,
        IS_PACKED=is_packed,
        IS_CHUNKED=chunk is not None,
        IS_SPLIT=num_programs > 1,
        NUM_WORDS=num_words,
        num_warps=num_warps,
        num_stages=3,
    )
    if num_programs > 1 and fixed_splits:
        merge_fixed_splits(
            partial, stats, positions, starts, ends, sinks, out, num_slots, size, slot_block, chunk is not None
        )
    elif num_programs > 1:
        merge_splits(partial, stats[0], out)
    return out
