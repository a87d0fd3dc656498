"""Triton preparation of a drafter's first inputs of a round; the reference is `draft_inputs_reference.prepare_inputs`.

Shapes: tokens `[B, slots]`; lengths, committed, limits and finished `[B]`; the four results `[B, W]`. With
`kept = W - num_masks`, column c of row b has

    slot = lengths[b] - shift - kept + c
    source = c - kept + clamp(committed[b], 0, kept)    (kept columns, c < kept)
    token = tokens[b, slot + shift] if c < kept, else mask_token

and is padding (token 0, position 0, the dummy slot, source -1) where `source < 0` in a kept column, `slot < 0`,
`slot + 1 + shift >= limits[b]`, or the row is finished.
"""

from __future__ import annotations

import torch
import triton.language as tl

from .launch import Unspecialised, block_of_steps, dependent_launch, kernel, wait_for_inputs
from .types import DraftInputs


@kernel
def _prepare_inputs_kernel(
    tokens_ptr,
    lengths_ptr,
    committed_ptr,
    limits_ptr,
    finished_ptr,
    out,
    tokens_stride: Unspecialised,
    out_stride: Unspecialised,
    num_slots: Unspecialised,
    num_kept: Unspecialised,
    width: Unspecialised,
    mask_token: Unspecialised,
    shift: Unspecialised,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Prepare one row.

    Grid: (B,). Reads the row's length, number of committed tokens, limit and finished flag, and the tokens of its kept
    columns; writes the row of the four results of `out`, `DraftInputs`.
    """
    row = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    length = tl.load(lengths_ptr + row)
    committed = tl.load(committed_ptr + row)
    # With a limit of 0 every column is padding.
    limit = tl.where(tl.load(finished_ptr + row), 0, tl.load(limits_ptr + row))

    column = tl.arange(0, BLOCK).to(tl.int64)
    slot = length - shift - num_kept + column
    source = column - num_kept + tl.minimum(tl.maximum(committed, 0), num_kept)
    is_mask = column >= num_kept
    is_live = (is_mask | (source >= 0)) & (slot >= 0) & (slot + 1 + shift < limit)
    is_kept = is_live & (column < num_kept)
    kept = tl.load(tokens_ptr + row * tokens_stride + tl.minimum(slot + shift, num_slots - 1), mask=is_kept, other=0)

    is_column = column < width
    token = tl.where(is_live & is_mask, mask_token, kept)
    to = row * out_stride + column
    tl.store(out.tokens + to, token, mask=is_column)
    tl.store(out.slots + to, tl.where(is_live, slot, num_slots - 1), mask=is_column)
    tl.store(out.positions + to, tl.where(is_live, slot, 0), mask=is_column)
    tl.store(out.sources + to, tl.where(is_kept, source, -1), mask=is_column)


def prepare_inputs(tokens, lengths, committed, limits, finished, width, num_masks, mask_token, shift):
    """See `draft_inputs_reference.prepare_inputs`; equal bit for bit. One launch; safe in a CUDA graph.

    Reads one element per row of `lengths`, `committed`, `limits` and `finished`, and of `tokens` the kept ones, all
    inside the row. The launch depends on shapes and strides only.
    """
    batch = len(tokens)
    assert all(one.is_contiguous() for one in (lengths, committed, limits, finished)), "numbers must be contiguous"
    assert tokens.stride(1) == 1, "rows must have unit stride"
    out = DraftInputs(
        *(torch.empty(batch, width, dtype=torch.int64, device=tokens.device) for _ in DraftInputs._fields)
    )
    _prepare_inputs_kernel[(batch,)](
        tokens,
        lengths,
        committed,
        limits,
        finished,
        out,
        tokens.stride(0),
        out.tokens.stride(0),
        num_slots=tokens.shape[1],
        num_kept=width - num_masks,
        width=width,
        mask_token=mask_token,
        shift=shift,
        BLOCK=block_of_steps(width),
        num_warps=1,
        **dependent_launch(tokens.device),
    )
    return out
