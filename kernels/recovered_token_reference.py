"""PyTorch reference of the token after the accepted drafts, the recovered or bonus token."""

from __future__ import annotations

import torch

from . import random_reference
from .types import NO_TOKEN, RandomStream, VerificationResult


def append_recovered_or_bonus(
    probs: torch.Tensor,
    residual: torch.Tensor | None,
    is_bonus: torch.Tensor,
    drafts: torch.Tensor,
    accepted: torch.Tensor,
    seeds: torch.Tensor,
    lengths: torch.Tensor,
) -> VerificationResult:
    """Sample the token after the accepted drafts, `NO_TOKEN` where `probs` are NaN, and return the result of the round.

    Args:
        probs: `[B, V]` float32, the target's distribution of that token; NaN if there is none.
        residual: `[B, V]` float32, the weights of the recovered token; None where K is 0.
        is_bonus: `[B]` bool, where it is the bonus token, sampled from `probs`. Where the residual sums to 0 it is as
            well.
        drafts: `[B, K]` int64.
        accepted: `[B]` int64, number of accepted drafts.
        seeds: `[B]` int64 row seeds.
        lengths: `[B]` int64, the position that the first draft would have.
    """
    weights = probs
    if residual is not None:
        weights = torch.where(is_bonus[:, None] | (residual.sum(dim=1, keepdim=True) <= 0.0), probs, residual)
    next_token = random_reference.exponential_sample(weights, seeds, lengths + accepted, RandomStream.TARGET)
    next_token = next_token.masked_fill(probs[:, 0].isnan(), NO_TOKEN)
    tokens = torch.cat([drafts, drafts.new_zeros(len(drafts), 1)], dim=1)
    return VerificationResult(tokens.scatter(1, accepted.unsqueeze(1), next_token.unsqueeze(1)), accepted, accepted + 1)
