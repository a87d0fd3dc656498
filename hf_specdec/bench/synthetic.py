"""Scripted acceptance, to time random weights: acceptance depends on the weights, the time of a round hardly does."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..engine import rounds
from ..kernels.types import Proposal, VerificationResult
from ..modules.patch import replaced
from ..ops import draw_draft
from ..state import DecodeState

# Index of a draft in its round for the random numbers, beyond any draft's, so that these are independent of drafts'.
_INDEX = 1 << 16
_MOST_ROWS = 1 << 16


def acceptance_rates(requested: Sequence[float], num_draft_tokens: int) -> list[float]:
    """For each of K positions, the share of rounds that accept the draft there, and so all drafts before it.

    `requested` is either one number of at least 1, the mean acceptance length, for which a draft has the same
    acceptance probability at every position if the drafts before it are accepted; or the shares, of which the first K
    are taken. Raises `ValueError` if it is neither, above K + 1, or has fewer than K shares.
    """
    check_acceptance(requested)
    if _is_length(requested):
        return _constant_rates(requested[0], num_draft_tokens)
    if len(requested) < num_draft_tokens:
        raise ValueError(
            f"The synthetic acceptance has shares for {len(requested)} positions, but K is {num_draft_tokens}; "
            "expected at least as many."
        )
    return list(requested[:num_draft_tokens])


def check_acceptance(requested: Sequence[float]) -> None:
    """Raise `ValueError` if `requested` is neither a mean acceptance length nor shares by position."""
    is_falling = all(before >= after for before, after in zip([1.0, *requested], [*requested, 0.0], strict=True))
    if not requested or not (_is_length(requested) or is_falling):
        raise ValueError(
            f"The synthetic acceptance is {list(requested)}; expected one mean acceptance length of at least 1, or the "
            "shares of drafts accepted at each position, which never grow."
        )


def _is_length(requested: Sequence[float]) -> bool:
    return len(requested) == 1 and requested[0] >= 1.0


def _constant_rates(length: float, num_draft_tokens: int) -> list[float]:
    if length > num_draft_tokens + 1:
        raise ValueError(
            f"The synthetic acceptance length is {length}, but with K = {num_draft_tokens} a round commits at most "
            f"{num_draft_tokens + 1} tokens."
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        total = sum(middle**step for step in range(num_draft_tokens + 1))
        low, high = (middle, high) if total < length else (low, middle)
    return [high**step for step in range(1, num_draft_tokens + 1)]


@contextmanager
def scripted_acceptance(rates: Sequence[float], device: torch.device) -> Iterator[None]:
    """Context in which the static engine accepts drafts by `rates` (see `acceptance_rates`), whatever their tokens.

    Verification runs as usual, and then its result is replaced: a number of first drafts count as accepted, and the
    token after them is verification's token at that position. Random numbers that are functions of row, position and
    first draft determine the number of accepted drafts. Nothing synchronizes with the device.

    A tree accepts as many drafts as a chain, whatever its shape (a tree from random logits is hardly deep): nodes at
    even distances, whose keys and values then move like those of a path.
    """
    true_verify = rounds.verify

    @functools.cache
    def law(batch: int, depth: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Row numbers, temperatures, and logits of the number of accepted drafts, 0 to `depth`, for each row."""
        shares = torch.tensor([1.0, *rates[:depth], 0.0], device="cpu")
        logits = (shares[:-1] - shares[1:]).log().to(device)
        return torch.arange(batch, device=device), torch.ones(batch, device=device), logits.expand(batch, 1, -1)

    def verify(
        scores: torch.Tensor, state: DecodeState, proposal: Proposal
    ) -> tuple[VerificationResult, torch.Tensor | None]:
        (result, path), drafts = true_verify(scores, state, proposal), proposal.tokens
        depth = min(result.tokens.shape[1] - 1, drafts.shape[1])
        if not depth:
            return result, path
        rows, temperatures, logits = law(len(drafts), depth)
        seeds = torch.add(rows, drafts[:, 0], alpha=_MOST_ROWS)
        accepted = draw_draft(logits, temperatures, seeds, state.lengths, _INDEX)[0][:, 0]
        steps = torch.arange(result.tokens.shape[1], device=drafts.device)
        nodes = (steps * drafts.shape[1] // depth).clamp(max=drafts.shape[1])
        following = drafts[:, (nodes[1:] - 1)]
        padded = torch.cat([following, drafts[:, :1]], dim=1)
        tokens = torch.where(steps < accepted[:, None], padded, result.tokens)
        path = None if path is None else nodes.repeat(len(drafts), 1)
        return VerificationResult(tokens, accepted, accepted + 1), path

    with replaced("verify", [(rounds, verify)]):
        yield
