"""Scripted acceptance: how long a round takes hardly depends on weights, but how many rounds there are does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from .. import ops
from ..engine import rounds
from ..kernels.types import RandomStream, VerificationResult
from ..state import DecodeState

# A purpose of random numbers of its own.
_STREAM = max(RandomStream) + 1


def acceptance_rates(asked: Sequence[float], num_draft_tokens: int) -> list[float]:
    """The share of rounds that accept the draft at each of K positions, which needs all before it to be accepted.

    Args:
        asked: one number of at least 1, the mean acceptance length, which every draft contributes to alike: given
            those before it, each is accepted as often. Or the shares themselves, of which the first K are taken.
        num_draft_tokens: K.

    Raises:
        ValueError: no such acceptance is possible with K drafts.
    """
    check_acceptance(asked)
    if _is_length(asked):
        return _constant_rates(asked[0], num_draft_tokens)
    if len(asked) < num_draft_tokens:
        raise ValueError(
            f"The synthetic acceptance has shares for {len(asked)} positions, but K is {num_draft_tokens}; expected "
            "at least as many."
        )
    return list(asked[:num_draft_tokens])


def check_acceptance(asked: Sequence[float]) -> None:
    """Raise `ValueError` if `asked` is neither a mean acceptance length nor shares by position."""
    is_falling = all(before >= after for before, after in zip([1.0, *asked], [*asked, 0.0], strict=True))
    if not asked or not (_is_length(asked) or is_falling):
        raise ValueError(
            f"The synthetic acceptance is {list(asked)}; expected one mean acceptance length of at least 1, or the "
            "shares of drafts accepted at each position, which never grow."
        )


def _is_length(asked: Sequence[float]) -> bool:
    return len(asked) == 1 and asked[0] >= 1.0


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
    """Context in which the static engine accepts drafts by `rates` (see `acceptance_rates`), whatever they are.

    Verification runs as it always does, and its outcome is then replaced: the first drafts stand as if they had been
    right, and the token after them is one of its own. The numbers that decide are functions of row, position and first
    draft. Nothing reads the device.
    """
    judge = rounds.verify
    shares = torch.tensor(rates, dtype=torch.float32, device=device)

    def verify(scores: torch.Tensor, state: DecodeState) -> VerificationResult:
        result, drafts = judge(scores, state), state.proposal.tokens
        rows = torch.arange(len(drafts), device=drafts.device)
        number = ops.uniform(rows, state.lengths, drafts[:, 0], _STREAM)
        accepted = (number[:, None] < shares).sum(dim=1)
        steps = torch.arange(drafts.shape[1] + 1, device=drafts.device)
        standing = torch.cat([drafts, drafts[:, :1]], dim=1)
        tokens = torch.where(steps < accepted[:, None], standing, result.tokens)
        return VerificationResult(tokens, accepted, accepted + 1)

    rounds.verify = verify
    try:
        yield
    finally:
        rounds.verify = judge
