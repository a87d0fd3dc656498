"""PyTorch references of what a round does with the rows of a `DecodeState`: slots and tokens to run, commits, and
what a drafter reads first."""

from __future__ import annotations

import torch

from .types import NO_TOKEN, DraftInputs, VerificationResult


def next_slots(
    lengths: torch.Tensor, limits: torch.Tensor, finished: torch.Tensor, first: int, count: int, dummy: int
) -> torch.Tensor:
    """`[B, count]` int64: the slots of the positions `lengths + first` to `lengths + first + count - 1` of each row.
    The dummy slot for `finished` rows, and for positions that `limits` leave without a next token."""
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
    """The last committed token of each row and its `drafts` `[B, K]`, of `tokens` `[B, slots]`, and their slots; both
    `[B, K + 1]` int64. Other arguments are those of `next_slots`."""
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
    """`block` of drafts `[B, N]` that are the nodes of a tree, and their positions, `[B, N + 1]` int64 each.

    Nodes are at slots from the last committed token's on, in order; positions are those of their depths, `dummy` for
    finished rows, positions that the limit leaves without a next token, and nodes that are not used. Slots are `dummy`
    for finished rows only: attention reads all slots up to a node's own, so none may hold what was never written.

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
    """Append the tokens of `result` to the rows, up to an end-of-sequence token or the length limit.

    Args:
        tokens: `[B, slots]` int64; written. What the last slot holds afterwards is undefined.
        lengths: `[B]` int64; updated.
        finished: `[B]` bool; updated.
        limits: `[B]` int64.
        ends: `[B, E]` int64, end-of-sequence tokens of each row.
        result: of a verification, tokens `[B, n]`; `NO_TOKEN` ends a row, too, which gets token 0 for it.
        kept: where the result is copied to, with what was committed; tokens `[B, n]` or wider. None for nowhere.

    Returns:
        `[B]` int64, how many tokens each row has committed.
    """
    steps = torch.arange(result.tokens.shape[1], device=tokens.device)
    remaining = torch.where(finished, 0, limits - lengths)
    committed = torch.minimum(result.committed, remaining)
    is_end = (result.tokens[..., None] == ends[:, None]).any(dim=-1) | (result.tokens == NO_TOKEN)
    is_end &= steps < committed[:, None]
    has_ended = is_end.any(dim=1)
    if len(steps) > 1:  # else a row that has ended commits its one token
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
) -> DraftInputs:
    """Lay out the rows of a drafter's first forward pass after a round: `[padding | kept tokens | masks]`.

    Every row ends with `num_masks` mask columns. Before them are the tokens that the round kept, as many as the row
    committed, the newest last; the columns in front of these are padding. So the newest kept token of every row is in
    the same column, and the logits of the `1 + num_masks` draft tokens come from the last `1 + num_masks` columns.

    Slots are consecutive: the newest kept token has slot `length - 1 - shift`, and the masks have the slots after it. A
    kept column holds the token `shift` places after its slot. A column predicts the token `1 + shift` places after its
    slot; if that is at the length limit or beyond, the column is padding. So the newest kept token of a row that has
    reached its limit is padding as well. So are columns with a negative slot, and all columns of a finished row. A
    padding column holds token 0 at position 0 and writes the dummy slot, the last one, so that it changes no live slot.

    Masks are valid for one round: the next round writes its kept tokens from the slot where the masks of this one
    began, and its own masks after them; no query sees what is left beyond those.

    Args:
        tokens: `[B, slots]` int64, committed tokens; the last column belongs to the dummy slot.
        lengths: `[B]` int64, committed tokens of each row.
        committed: `[B]` int64, how many of them the last round added; counts accepted tokens, not drafted ones. Clamped
            to 0 to `W - num_masks`, the most that a round keeps.
        limits: `[B]` int64, the length at which a row ends, less than `slots`.
        finished: `[B]` bool.
        width: W, columns of each row: of tokens that the round kept, and of masks.
        num_masks: 0 for sequential drafting, K - 1 for parallel drafting.
        mask_token: token id of mask columns.
        shift: 1 if slot p holds token p + 1 beside the hidden state at p (EAGLE), 0 if it holds token p.
    """
    num_kept = width - num_masks
    column = torch.arange(width, device=tokens.device)
    slot = (lengths - shift - num_kept)[:, None] + column
    source = column - (num_kept - committed.clamp(0, num_kept))[:, None]
    is_mask = column >= num_kept
    is_kept = (source >= 0) & ~is_mask
    is_live = (is_kept | is_mask) & (slot >= 0) & (slot + 1 + shift < limits[:, None]) & ~finished[:, None]
    kept = tokens.gather(1, (slot + shift).clamp(0, tokens.shape[1] - 1))
    return DraftInputs(
        torch.where(is_live, torch.where(is_mask, mask_token, kept), 0),
        torch.where(is_live, slot, tokens.shape[1] - 1),
        torch.where(is_live, slot, 0),
        torch.where(is_live & is_kept, source, -1),
    )
