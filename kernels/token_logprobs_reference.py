"""PyTorch reference of the log-probabilities of given tokens."""

from __future__ import annotations

import torch


def token_logprobs(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `[B, n]` float32 of `tokens` `[B, n]` int64 under the softmax of their `scores` `[B, n, V]`, as
    `log_softmax` in float32 computes them; NaN for what is no token of the vocabulary."""
    is_token = (tokens >= 0) & (tokens < scores.shape[-1])
    found = scores.float().log_softmax(dim=-1).gather(-1, tokens.where(is_token, 0)[..., None])[..., 0]
    return found.where(is_token, torch.nan)
