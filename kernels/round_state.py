"""Triton kernels of a round's slots, commits and draft inputs in a `DecodeState`; see `round_state_reference`.

A program computes a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Unspecialised, block_of_steps, kernel, wait_for_inputs
from .types import NO_TOKEN, DraftInputs

_NO_TOKEN = tl.constexpr(NO_TOKEN)


@kernel
def _slots_kernel(
    tokens_ptr,
    numbers,
    drafts_ptr,
    block_ptr,
    slots_ptr,
    tree,
    positions_ptr,
    tokens_stride,
    drafts_stride_b: Unspecialised,
    drafts_stride_n: Unspecialised,
    first: Unspecialised,
    count: Unspecialised,
    dummy: Unspecialised,
    WIDTH: tl.constexpr,
):
    """Slots of a row, and with `block` the tokens at its positions.

    Grid: (B,). Reads the row's `numbers`: length, limit and whether it is finished; writes a row of `slots`
    `[B, count]`. With `block` it reads the last committed token of `tokens` and a row of `drafts`, and writes a row of
    `block`. With a tree it reads a row of its parents and depths, and writes a row of `positions`.
    """
    lengths_ptr, limits_ptr, finished_ptr = numbers
    parents_ptr, depths_ptr = tree
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH).to(tl.int64)
    is_column = column < count
    wait_for_inputs()
    length = tl.load(lengths_ptr + row)
    is_finished = tl.load(finished_ptr + row)
    position = length + first + column
    last_position = tl.load(limits_ptr + row) - 2
    if depths_ptr is not None:
        depth = tl.load(depths_ptr + row * count + column, mask=is_column, other=0)
        parent = tl.load(parents_ptr + row * count + column, mask=is_column, other=-1)
        is_run = (length - 1 + depth <= last_position) & ((parent >= 0) | (column == 0))
        node_position = tl.where(is_run & (is_finished == 0), length - 1 + depth, dummy)
        tl.store(positions_ptr + row * count + column, node_position, mask=is_column)
        is_dummy = is_finished | (length - 1 > last_position)
    else:
        is_dummy = is_finished | (position > last_position)
    slot = tl.where(is_dummy, dummy, position)
    tl.store(slots_ptr + row * count + column, slot, mask=is_column)
    if block_ptr is not None:
        last = tl.load(tokens_ptr + row * tokens_stride + length - 1)
        draft = drafts_ptr + row * drafts_stride_b + (column - 1) * drafts_stride_n
        token = tl.load(draft, mask=is_column & (column > 0), other=0)
        tl.store(block_ptr + row * count + column, tl.where(column == 0, last, token), mask=is_column)


def next_slots(lengths, limits, finished, first, count, dummy):
    """See `round_state_reference.next_slots`; equal. One launch."""
    return _slots(None, lengths, limits, finished, None, None, None, first, count, dummy)[1]


def block(tokens, lengths, limits, finished, drafts, dummy):
    """See `round_state_reference.block`; equal. One launch."""
    count = drafts.shape[1] + 1
    return _slots(tokens, lengths, limits, finished, drafts, None, None, -1, count, dummy)[:2]


def tree_block(tokens, lengths, limits, finished, drafts, parents, depths, dummy):
    """See `round_state_reference.tree_block`; equal. One launch."""
    assert parents.is_contiguous() and depths.is_contiguous()
    return _slots(tokens, lengths, limits, finished, drafts, parents, depths, -1, drafts.shape[1] + 1, dummy)


def _slots(
    tokens: torch.Tensor | None,
    lengths: torch.Tensor,
    limits: torch.Tensor,
    finished: torch.Tensor,
    drafts: torch.Tensor | None,
    parents: torch.Tensor | None,
    depths: torch.Tensor | None,
    first: int,
    count: int,
    dummy: int,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """Tokens, slots and positions of nodes, `[B, count]` each; tokens are None without `tokens`, positions without
    `depths`."""
    assert lengths.is_contiguous() and limits.is_contiguous() and finished.is_contiguous()
    assert tokens is None or tokens.stride(1) == 1
    out, slots, positions = (
        torch.empty(len(lengths), count, dtype=torch.int64, device=lengths.device) if is_needed else None
        for is_needed in (tokens is not None, True, depths is not None)
    )
    _slots_kernel[(len(lengths),)](
        tokens,
        (lengths, limits, finished),
        drafts,
        out,
        slots,
        (parents, depths),
        positions,
        0 if tokens is None else tokens.stride(0),
        *((0, 0) if drafts is None else drafts.stride()),
        first,
        count,
        dummy,
        WIDTH=block_of_steps(count),
        num_warps=1,
    )
    return out, slots, positions


@kernel
def _position_ids_kernel(
    slots_ptr,
    offsets_ptr,
    out_ptr,
    slots_stride_b: Unspecialised,
    slots_stride_n: Unspecialised,
    width: Unspecialised,
    dummy: Unspecialised,
    BLOCK: tl.constexpr,
):
    """BLOCK position ids of a row.

    Grid: (B, blocks). Reads the program's elements of `slots` `[B, n]` and one of `offsets`; writes those of `out`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    is_column = column < width
    wait_for_inputs()
    slot = tl.load(slots_ptr + row * slots_stride_b + column * slots_stride_n, mask=is_column, other=0)
    position = slot + tl.load(offsets_ptr + row) if offsets_ptr is not None else slot
    tl.store(out_ptr + row * width + column, tl.where(slot < dummy, position, 0), mask=is_column)


def position_ids(slots, offsets, dummy):
    """See `round_state_reference.position_ids`; equal. One launch."""
    batch, width = slots.shape
    assert offsets is None or offsets.is_contiguous()
    out = torch.empty(batch, width, dtype=torch.int64, device=slots.device)
    size = min(block_of_steps(width), 1024)
    _position_ids_kernel[(batch, triton.cdiv(width, size))](
        slots,
        offsets,
        out,
        *slots.stride(),
        width,
        dummy,
        BLOCK=size,
        num_warps=1,
    )
    return out


@kernel
def _commit_kernel(
    tokens_ptr,
    numbers,
    ends_ptr,
    result,
    out_ptr,
    kept,
    tokens_stride: Unspecialised,
    ends_stride: Unspecialised,
    result_stride_b: Unspecialised,
    result_stride_n: Unspecialised,
    kept_stride: Unspecialised,
    width: Unspecialised,
    num_ends: Unspecialised,
    WIDTH: tl.constexpr,
    ENDS: tl.constexpr,
):
    """Commit one row.

    Grid: (B,). `numbers` are lengths, whether rows are finished, and limits. Reads a row of the result and of `ends`,
    and the row's limit; updates its length and whether it is finished; writes the committed tokens to `tokens`, an
    element of `out`, and a row of `kept` if given.
    """
    lengths_ptr, finished_ptr, limits_ptr = numbers
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, WIDTH)
    end_index = tl.arange(0, ENDS)
    is_step = step < width
    wait_for_inputs()
    length = tl.load(lengths_ptr + row)
    limit = tl.load(limits_ptr + row)
    was_finished = tl.load(finished_ptr + row)
    token = tl.load(result.tokens + row * result_stride_b + step * result_stride_n, mask=is_step, other=0)
    end = tl.load(ends_ptr + row * ends_stride + end_index, mask=end_index < num_ends, other=0)
    committed = tl.minimum(tl.load(result.committed + row), tl.where(was_finished, 0, limit - length))
    is_same = (token[:, None] == end[None, :]) & (end_index < num_ends)[None, :]
    is_last = (tl.max(is_same.to(tl.int32), axis=1) != 0) | (token == _NO_TOKEN)
    is_end = is_last & (step < committed) & is_step
    token = tl.maximum(token, 0)
    first_end = tl.min(tl.where(is_end, step, WIDTH), axis=0)
    has_ended = first_end < WIDTH
    committed = tl.where(has_ended, first_end + 1, committed).to(tl.int64)

    tl.store(tokens_ptr + row * tokens_stride + length + step, token, mask=is_step & (step < committed))
    tl.store(lengths_ptr + row, length + committed)
    is_finished = was_finished | has_ended | (length + committed >= limit)
    tl.store(finished_ptr + row, is_finished)
    tl.store(out_ptr + row, committed)
    if kept is not None:
        tl.store(kept.tokens + row * kept_stride + step, token, mask=is_step)
        tl.store(kept.accepted + row, tl.load(result.accepted + row))
        tl.store(kept.committed + row, committed)


def commit(tokens, lengths, finished, limits, ends, result, kept):
    """See `round_state_reference.commit`; equal, but the last slot of `tokens` is not written. One launch."""
    batch, width = result.tokens.shape
    assert all(one.is_contiguous() for one in (lengths, finished, limits, result.accepted, result.committed))
    assert tokens.stride(1) == ends.stride(1) == 1
    assert kept is None or (kept.tokens.stride(1) == 1 and kept.tokens.shape[1] >= width)
    out = torch.empty(batch, dtype=torch.int64, device=tokens.device)
    _commit_kernel[(batch,)](
        tokens,
        (lengths, finished, limits),
        ends,
        result,
        out,
        kept,
        tokens.stride(0),
        ends.stride(0),
        *result.tokens.stride(),
        0 if kept is None else kept.tokens.stride(0),
        width,
        ends.shape[1],
        WIDTH=block_of_steps(width),
        ENDS=triton.next_power_of_2(max(ends.shape[1], 1)),
        num_warps=1,
    )
    return out


@kernel
def _prepare_inputs_kernel(
    tokens_ptr,
    numbers,
    out,
    tokens_stride: Unspecialised,
    num_slots: Unspecialised,
    num_kept: Unspecialised,
    width: Unspecialised,
    mask_token: Unspecialised,
    shift: Unspecialised,
    num_steps: Unspecialised,
    BLOCK: tl.constexpr,
):
    """Prepare one row.

    Grid: (B,). Reads the row's `numbers`: length, number of committed tokens, limit, finished flag and offset; and the
    tokens of its kept columns. Writes the row of each result in `out`, a `DraftInputs`.
    """
    lengths_ptr, committed_ptr, limits_ptr, finished_ptr, offsets_ptr = numbers
    row = tl.program_id(0).to(tl.int64)
    wait_for_inputs()
    length = tl.load(lengths_ptr + row)
    committed = tl.load(committed_ptr + row)
    # With a limit of 0 every column is padding.
    limit = tl.where(tl.load(finished_ptr + row), 0, tl.load(limits_ptr + row))
    offset = tl.load(offsets_ptr + row) if offsets_ptr is not None else length * 0

    column = tl.arange(0, BLOCK).to(tl.int64)
    slot = length - shift - num_kept + column
    source = column - num_kept + tl.minimum(tl.maximum(committed, 0), num_kept)
    is_mask = column >= num_kept
    is_live = (is_mask | (source >= 0)) & (slot >= 0) & (slot + 1 + shift < limit)
    is_kept = is_live & (column < num_kept)
    kept = tl.load(tokens_ptr + row * tokens_stride + tl.minimum(slot + shift, num_slots - 1), mask=is_kept, other=0)

    is_column = column < width
    token = tl.where(is_live & is_mask, mask_token, kept)
    to = row * width + column
    tl.store(out.tokens + to, token, mask=is_column)
    tl.store(out.slots + to, tl.where(is_live, slot, num_slots - 1), mask=is_column)
    tl.store(out.positions + to, tl.where(is_live, slot + offset, 0), mask=is_column)
    tl.store(out.sources + to, tl.where(is_kept, source, -1), mask=is_column)

    slot = length - shift + width - num_kept + column
    is_run = slot <= limit - 2
    to = column * tl.num_programs(0) + row
    tl.store(out.step_slots + to, tl.where(is_run, slot, num_slots - 1), mask=column < num_steps)
    tl.store(out.step_positions + to, tl.where(is_run, slot + offset, 0), mask=column < num_steps)


def prepare_inputs(
    tokens, lengths, committed, limits, finished, width, num_masks, mask_token, shift, num_steps, offsets=None
):
    """See `round_state_reference.prepare_inputs`; equal bit for bit. One launch; safe in a CUDA graph.

    The launch depends only on shapes and strides. All reads of `tokens` are inside the row.
    """
    batch = len(tokens)
    numbers = lengths, committed, limits, finished, offsets
    assert all(one is None or one.is_contiguous() for one in numbers), "numbers must be contiguous"
    assert tokens.stride(1) == 1, "rows must have unit stride"
    shapes = [(batch, width)] * 4 + [(num_steps, batch, 1)] * 2
    out = DraftInputs(*(torch.empty(one, dtype=torch.int64, device=tokens.device) for one in shapes))
    _prepare_inputs_kernel[(batch,)](
        tokens,
        numbers,
        out,
        tokens.stride(0),
        num_slots=tokens.shape[1],
        num_kept=width - num_masks,
        width=width,
        mask_token=mask_token,
        shift=shift,
        num_steps=num_steps,
        BLOCK=block_of_steps(max(width, num_steps)),
        num_warps=1,
    )
    return out
