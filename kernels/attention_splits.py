"""Splits of attention over the slots: their number and places, and the Triton kernels that merge their results.

A split at a fixed place has an online softmax of its own, with maximum, sum and weighted sum of values. Such splits are
merged in ascending order, from the sink's logit, 1 and 0 on; without a sink from -inf, 0 and 0 on.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from .launch import Unspecialised, kernel, wait_for_inputs

# Programs per multiprocessor: one for so many slots, and at most so many. Two or three run at a time; the others
# balance rows of unequal lengths.
_SLOTS_PER_PROGRAM, _MOST_PROGRAMS_PER_MULTIPROCESSOR = 640, 4
# Fewest slots of a split, and of each split beyond a few: with fewer, launch and merge cost more than a split saves.
_MIN_SLOTS_PER_SPLIT, _SLOTS_PER_FURTHER_SPLIT, _FEW_SPLITS = 48, 256, 8
_MAX_SPLITS = 128
# Results of all splits that are worth merging for up to some thousand slots.
_WORTHWHILE_RESULTS = 8192
_MERGE_ELEMENTS = 4096
# Unit in which slots are divided among splits of equal size: sizes differ by at most one unit.
_SPLIT_UNIT = tl.constexpr(16)
# Slots of a split at a fixed place, a multiple of every block of slots.
SPLIT = 256
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_visible(position, window, IS_CHUNKED: tl.constexpr):
    """The first slot that queries at `position` see in a window, or in chunks, of size `window`."""
    return position // window * window if IS_CHUNKED else position - window + 1


@triton.jit
def split_range(
    position, last, start, num_slots, window, split, num_splits, SLOT_BLOCK: tl.constexpr, IS_CHUNKED: tl.constexpr
):
    """First slot and end of split number `split` for a block of queries; padding has position and last slot -1."""
    end = tl.max(last, axis=0) + 1
    first = start
    if window is not None:
        lowest = tl.min(tl.where(position >= 0, position, num_slots), axis=0)
        first = tl.maximum(first_visible(lowest, window, IS_CHUNKED), first)
    live = tl.maximum(end - first, 0)
    num_used = tl.maximum(tl.minimum(num_splits, tl.cdiv(live, SLOT_BLOCK)), 1)
    units = tl.cdiv(live, _SPLIT_UNIT)
    begin = first + units * split // num_used * _SPLIT_UNIT
    stop = first + units * (split + 1) // num_used * _SPLIT_UNIT
    return begin, tl.minimum(stop, end)


@triton.jit
def visible_range(position, last, start, num_slots, window, SLOT_BLOCK: tl.constexpr, IS_CHUNKED: tl.constexpr):
    """The first slot of the first block that one of the queries sees, and the end of the visible slots.

    Blocks are counted from `start`. Padding queries have position and last slot -1.
    """
    end = tl.max(last, axis=0) + 1
    first = start
    if window is not None:
        lowest = tl.min(tl.where(position >= 0, position, num_slots), axis=0)
        visible = tl.maximum(first_visible(lowest, window, IS_CHUNKED), start)
        first = start + (visible - start) // SLOT_BLOCK * SLOT_BLOCK
    return first, end


@triton.jit
def merge_next(running_max, running_sum, acc, split_max, split_sum, split_acc):
    """Merge the next split, `[rows]`, `[rows]` and `[rows, Dv]`, into the results of the splits before it.

    `tl.fma` is explicit, so that both kernels that merge use the same instructions whatever the compiler chooses.
    """
    new_max = tl.maximum(running_max, split_max)
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    before = tl.exp2(running_max - base)
    here = tl.exp2(split_max - base)
    running_sum = tl.fma(running_sum, before, split_sum * here)
    acc = tl.fma(acc, tl.broadcast_to(before[:, None], acc.shape), split_acc * here[:, None])
    return new_max, running_sum, acc


@kernel
def _merge_kernel(
    partial_ptr,
    lse_ptr,
    out_ptr,
    num_splits: Unspecialised,
    VALUE_DIM: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """Merge the splits of a query: out = sum_i 2^(lse_i) partial_i / sum_i 2^(lse_i); 0 if every lse is -inf.

    Grid: (B * n * heads, blocks of Dv). Reads `lse` `[B * n * heads, splits]` and, where it is finite, `partial`
    `[B * n * heads, splits, Dv]`; writes `out` `[B * n * heads, Dv]`.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLIT_BLOCK)
    value_dim = tl.program_id(1) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    at = row * num_splits + split
    wait_for_inputs()
    weights = tl.load(lse_ptr + at, mask=split < num_splits, other=float("-inf"))
    # A split without slots has no partial result.
    is_written = weights > float("-inf")
    partial = tl.load(
        partial_ptr + at[:, None] * VALUE_DIM + value_dim[None, :],
        mask=is_written[:, None] & (value_dim < VALUE_DIM)[None, :],
        other=0.0,
    )
    largest = tl.max(weights, axis=0)
    weights = tl.exp2(weights - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weights, axis=0)
    out = tl.sum(partial * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * VALUE_DIM + value_dim, out.to(out_ptr.dtype.element_ty), mask=value_dim < VALUE_DIM)


@kernel
def _fixed_merge_kernel(
    partial_ptr,
    stats_ptr,
    positions_ptr,
    starts_ptr,
    ends_ptr,
    sinks_ptr,
    out_ptr,
    positions_stride_b: Unspecialised,
    starts_stride_b: Unspecialised,
    ends_stride_b: Unspecialised,
    num_queries: Unspecialised,
    num_slots: Unspecialised,
    num_splits: Unspecialised,
    window: Unspecialised,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
):
    """Merge the fixed splits of one query.

    Grid: (B * n * heads,). Reads its position, first and last slot, and `partial` `[B * n * heads, splits, Dv]` and
    `stats` `[2, B * n * heads, splits]` of the splits that it sees; writes `out` `[B, n, heads, Dv]`.
    """
    row = tl.program_id(0).to(tl.int64)
    batch, query_index = row // HEADS // num_queries, row // HEADS % num_queries
    one = tl.arange(0, 1)
    value_dim = tl.arange(0, VALUE_BLOCK)
    is_value = value_dim < VALUE_DIM

    wait_for_inputs()
    position = tl.load(positions_ptr + batch * positions_stride_b + query_index + one)
    start = tl.load(starts_ptr + batch * starts_stride_b).to(tl.int32)
    is_live = (position < num_slots - 1) & (position >= start)
    position = tl.where(is_live, position, -1).to(tl.int32)
    last = position
    if ends_ptr is not None:
        last = tl.load(ends_ptr + batch * ends_stride_b + query_index + one).to(tl.int32)
        last = tl.where(is_live, last, -1)
    first, end = visible_range(position, last, start, num_slots, window, SLOT_BLOCK, IS_CHUNKED)
    running_max = tl.full([1], float("-inf"), tl.float32)
    running_sum = tl.zeros([1], tl.float32)
    if sinks_ptr is not None:
        running_max = tl.load(sinks_ptr + row % HEADS + one).to(tl.float32) * LOG2E
        running_sum += 1.0
    acc = tl.zeros([1, VALUE_BLOCK], tl.float32)
    sums_ptr = stats_ptr + tl.num_programs(0).to(tl.int64) * num_splits
    for split in tl.range((first - start) // SPLIT, tl.cdiv(end - start, SPLIT), loop_unroll_factor=4):
        at = row * num_splits + split + one
        split_acc = tl.load(
            partial_ptr + at[:, None] * VALUE_DIM + value_dim[None, :], mask=is_value[None, :], other=0.0
        )
        running_max, running_sum, acc = merge_next(
            running_max, running_sum, acc, tl.load(stats_ptr + at), tl.load(sums_ptr + at), split_acc
        )
    running_sum = tl.where(running_sum == 0.0, 1.0, running_sum)
    out = tl.where(is_live[:, None], acc * (1.0 / running_sum)[:, None], 0.0)
    out_ptr += row * VALUE_DIM + one[:, None] + value_dim[None, :]
    tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=is_value[None, :])


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; 1 for other devices."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def choose_splits(num_programs: int, num_results: int, num_visible: int, num_multiprocessors: int) -> int:
    """Number of splits, a power of two. A split takes `num_programs` programs and has `num_results` results to merge,
    one for each head of a query; each query sees at most `num_visible` slots.

    Microseconds with 1 / 2 / 4 / 8 splits, shapes of Llama-3.1-8B, one query, one H200: 400 of 512 slots at batch 1
    8.6 / 6.8 / 5.3 / 4.4, at 8 9.3 / 8.1 / 8.8 / 11.9, at 32 20.9 / 21.0 / 24.3 / 29.2; 2,000 of 2,048 slots 31.4 /
    16.8 / 10.4 / 7.5 (16 splits: 8.6), 32.6 / 20.6 / 20.8 / 25.3, 83.6 / 67.5 / 70.2 / 73.8. Trees of 16 and 32 tokens,
    one H100: 250 of 384 slots at batch 1 9.0 / 8.6 / 7.9 / 8.3 and 9.3 / 9.3 / 8.4 / 10.5 (5 splits: 11.2), at 8 9.2 /
    13.4 / 14.0 / 17.7 and 9.9 / 20.9 / 25.9 / 31.4; 4,000 of 4,200 63.7 / 35.7 / 21.1 / 14.6 and 63.5 / 36.0 / 21.7 /
    17.1, at 8 65.6 / 58.2 / 60.4 / 68.8 and 65.6 / 68.4 / 79.0 / 90.2.
    """
    per_multiprocessor = min(max(num_visible // _SLOTS_PER_PROGRAM, 1), _MOST_PROGRAMS_PER_MULTIPROCESSOR)
    wanted = round(per_multiprocessor * num_multiprocessors / num_programs)
    most = min(num_visible // _MIN_SLOTS_PER_SPLIT, max(num_visible // _SLOTS_PER_FURTHER_SPLIT, _FEW_SPLITS))
    # The cost of merging grows with the results, its gain with the slots.
    worthwhile = min(8 * num_visible, max(_WORTHWHILE_RESULTS, 2 * num_visible)) // num_results
    return 1 << max(min(wanted, most, worthwhile, _MAX_SPLITS), 1).bit_length() - 1


def merge_splits(partial: torch.Tensor, lse: torch.Tensor, out: torch.Tensor) -> None:
    """Merge the results `partial` of splits into `out`, of B * n * heads * Dv elements; `partial` is not read where
    `lse` is -inf. One launch, which depends only on shapes.
    """
    num_rows, num_splits, value_dim = partial.shape
    split_block = triton.next_power_of_2(num_splits)
    merge_block = min(max(16, triton.next_power_of_2(value_dim)), max(16, _MERGE_ELEMENTS // split_block))
    _merge_kernel[(num_rows, triton.cdiv(value_dim, merge_block))](
        partial,
        lse,
        out,
        num_splits,
        VALUE_DIM=value_dim,
        SPLIT_BLOCK=split_block,
        VALUE_BLOCK=merge_block,
        num_warps=max(1, min(4, split_block * merge_block // 512)),
    )


def merge_fixed_splits(
    partial: torch.Tensor,
    stats: torch.Tensor,
    positions: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    num_slots: int,
    window: int | None,
    slot_block: int,
    is_chunked: bool,
) -> None:
    """Merge `partial` and `stats` of the splits at fixed places that each query sees into `out`."""
    _, num_queries, heads, value_dim = out.shape
    _fixed_merge_kernel[(len(partial),)](
        partial,
        stats,
        positions,
        starts,
        ends,
        sinks,
        out,
        positions.stride(0),
        starts.stride(0) if len(starts) > 1 else 0,
        0 if ends is None else ends.stride(0),
        num_queries,
        num_slots,
        partial.shape[1],
        window,
        HEADS=heads,
        VALUE_DIM=value_dim,
        VALUE_BLOCK=max(16, triton.next_power_of_2(value_dim)),
        SLOT_BLOCK=slot_block,
        SPLIT=SPLIT,
        IS_CHUNKED=is_chunked,
        num_warps=1,
    )
