"""PyTorch references of a round's operations on a `DecodeState`: the slots and tokens to run, the commit, and the
inputs of the drafter's first pass."""

from __future__ import annotations

import torch

from .types import NO_TOKEN, DraftInputs, VerificationResult


def next_slots(
    lengths: torch.Tensor, limits: torch.Tensor, finished: torch.Tensor, first: int, count: int, dummy: int
) -> torch.Tensor:
    """`[B, count]` int64: the slots of each row's positions `lengths + first` to `lengths + first + count - 1`; `dummy`
    for `finished` rows, and for positions after which `limits` allow no token."""
    positions = lengths[:, None] + torch.arange(first, first + count, device=lengths.device)
    return torch.where(finished[:, None] | (positions > limits[:, None] - 2), dummy, positions)


def block(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    limits: torch.Tensor,
    finished: torch.Tensor,
    drafts: torch.Tensor,
    dummy: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last committed token of each row, from `tokens` `[B, slots]`, with its `drafts` `[B, K]`; and their slots.
    Both are `[B, K + 1]` int64. Other arguments are those of `next_slots`."""
    last = tokens.gather(1, (lengths - 1)[:, None])
    return torch.cat([last, drafts], dim=1), next_slots(lengths, limits, finished, -1, drafts.shape[1] + 1, dummy)


def tree_block(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    limits: torch.Tensor,
    finished: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    dummy: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`block` for drafts `[B, N]` that are the nodes of a tree, and their positions, `[B, N + 1]` int64 each.

    Nodes have consecutive slots from the last committed token's on. Their positions follow from their depths, and are
    `dummy` for finished rows, for positions after which the limit allows no token, and for unused nodes. Slots are
    `dummy` only for finished rows and rows at their limit: attention reads all slots up to a node's own, so each must
    have been written.

    Args:
        parents, depths: see `Tree`.
    """
    columns = torch.arange(depths.shape[1], device=lengths.device)
    positions = (lengths - 1)[:, None] + depths
    is_over = (finished | (lengths - 1 > limits - 2))[:, None]
    is_run = (positions <= limits[:, None] - 2) & ((parents >= 0) | (columns == 0)) & ~is_over
    slots = torch.where(is_over, dummy, (lengths - 1)[:, None] + columns)
    last = tokens.gather(1, (lengths - 1)[:, None])
    return torch.cat([last, drafts], dim=1), slots, torch.where(is_run, positions, dummy)


def position_ids(slots: torch.Tensor, offsets: torch.Tensor | None, dummy: int) -> torch.Tensor:
    """Position ids `[B, n]` int64 of `slots` `[B, n]`: the slots, plus `offsets` `[B]` if given; 0 for `dummy`."""
    return torch.where(slots < dummy, slots if offsets is None else slots + offsets[:, None], 0)


def commit(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    finished: torch.Tensor,
    limits: torch.Tensor,
    ends: torch.Tensor,
    result: VerificationResult,
    kept: VerificationResult | None,
) -> torch.Tensor:
    """Append the tokens of `result` to their rows, up to an end-of-sequence token or the length limit.

    Args:
        tokens: `[B, slots]` int64; written. The last slot is undefined afterwards.
        lengths: `[B]` int64; updated.
        finished: `[B]` bool; updated.
        limits: `[B]` int64.
        ends: `[B, E]` int64, end-of-sequence tokens of each row.
        result: a verification's result, with tokens `[B, n]`; `NO_TOKEN` also ends a row and is committed as token 0.
        kept: a copy of the result with the final `committed` is written here; tokens `[B, n]` or wider. May be None.

    Returns:
        `[B]` int64, the number of tokens that each row has committed.
    """
    steps = torch.arange(result.tokens.shape[1], device=tokens.device)
    remaining = torch.where(finished, 0, limits - lengths)
    committed = torch.minimum(result.committed, remaining)
    is_end = (result.tokens[..., None] == ends[:, None]).any(dim=-1) | (result.tokens == NO_TOKEN)
    is_end &= steps < committed[:, None]
    has_ended = is_end.any(dim=1)
    if len(steps) > 1:  # else a row that ends here commits its only token
        committed = torch.where(has_ended, is_end.int().argmax(dim=1) + 1, committed)

    slots = torch.where(steps < committed[:, None], lengths[:, None] + steps, tokens.shape[1] - 1)
    tokens.scatter_(1, slots, result.tokens.clamp(min=0))
    lengths += committed
    finished |= has_ended | (lengths >= limits)
    if kept is not None:
        kept.tokens[:, : len(steps)].copy_(result.tokens.clamp(min=0))
        kept.accepted.copy_(result.accepted)
        kept.committed.copy_(committed)
    return committed


def prepare_inputs(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    committed: torch.Tensor,
    limits: torch.Tensor,
    finished: torch.Tensor,
    width: int,
    num_masks: int,
    mask_token: int,
    shift: int,
    num_steps: int,
    offsets: torch.Tensor | None = None,
) -> DraftInputs:
    """Lay out the rows of a drafter's first pass after a round: `[padding | kept tokens | masks]`.

    Every row ends with `num_masks` mask columns. Before them are the tokens that the row has committed in the round,
    the newest last, and before these is padding. So the newest token of every row is in the same column, and the last
    `1 + num_masks` columns give the logits of the `1 + num_masks` draft tokens.

    Slots are consecutive: the newest token has slot `length - 1 - shift`, and the masks have the slots after it. A kept
    column holds the token `shift` places after its slot and predicts the token `1 + shift` places after its slot. If
    that is at the length limit or beyond, the column is padding; so the newest token of a row at its limit is padding,
    too. Columns with a negative slot, and all columns of a finished row, are padding. A padding column holds token 0 at
    position 0 and writes the dummy slot, the last one, so that it changes no live slot.

    Masks are valid for one round: the next round writes its kept tokens from the first mask's slot on and then its own
    masks. No query sees older slots beyond these.

    Each step after the pass runs one token, in the slot after the last column's or the last step's.

    Args:
        tokens: `[B, slots]` int64, committed tokens; the last column belongs to the dummy slot.
        lengths: `[B]` int64, number of committed tokens of each row.
        committed: `[B]` int64, number of tokens that the last round committed, clamped to 0 to `W - num_masks`.
        limits: `[B]` int64, the length at which a row ends, less than `slots`.
        finished: `[B]` bool.
        width: W, number of columns: of kept tokens and of masks.
        num_masks: 0 for sequential drafting, K - 1 for parallel drafting.
        mask_token: token id of mask columns.
        shift: 1 if slot p holds token p + 1 with the hidden state at p (EAGLE), 0 if it holds token p.
        num_steps: S, number of steps after the pass.
        offsets: `[B]` int64, position ids minus slots; None for 0.
    """
    num_kept, dummy = width - num_masks, tokens.shape[1] - 1
    column = torch.arange(width, device=tokens.device)
    slot = (lengths - shift - num_kept)[:, None] + column
    source = column - (num_kept - committed.clamp(0, num_kept))[:, None]
    is_mask = column >= num_kept
    is_kept = (source >= 0) & ~is_mask
    is_live = (is_kept | is_mask) & (slot >= 0) & (slot + 1 + shift < limits[:, None]) & ~finished[:, None]
    kept = tokens.gather(1, (slot + shift).clamp(0, dummy))
    slots = torch.where(is_live, slot, dummy)
    steps = next_slots(lengths, limits, finished, num_masks - shift, num_steps, dummy)
    return DraftInputs(
        torch.where(is_live, torch.where(is_mask, mask_token, kept), 0),
        slots,
        position_ids(slots, offsets, dummy),
        torch.where(is_live & is_kept, source, -1),
        *(one.t()[..., None].contiguous() for one in (steps, position_ids(steps, offsets, dummy))),
    )
