"""PyTorch reference of greedy verification; shapes and formula are in `verify_greedy`."""

from __future__ import annotations

import torch

from .types import VerificationResult


def verify_greedy(scores: torch.Tensor, drafts: torch.Tensor) -> VerificationResult:
    """Accept the longest prefix of the drafts `[B, K]` int64, where K may be 0, that greedy decoding of the target
    would have produced, by its processed logits `scores` `[B, K + 1, V]` of any floating dtype.

    Of equal scores the lowest token is the argmax. NaN is larger than every number: the token of a row with NaN is that
    of its first NaN. The token of a row of -inf alone is 0.
    """
    tokens = scores.argmax(dim=-1)
    accepted = (drafts == tokens[:, :-1]).cumprod(dim=1).sum(dim=1)
    return VerificationResult(tokens, accepted, accepted + 1)
