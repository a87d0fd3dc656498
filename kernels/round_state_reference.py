"""PyTorch references of what a round does with the rows of a `DecodeState`: slots and tokens to run, and commits."""

from __future__ import annotations

import torch

from .types import NO_TOKEN, VerificationResult


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
