"""PyTorch references of the log-probabilities of given and of the likeliest tokens."""

from __future__ import annotations

import torch


def token_logprobs(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `[B, n]` float32 of `tokens` `[B, n]` int64 under the softmax of `scores` `[B, n, V]`, by
    `log_softmax` in float32; NaN for tokens that are not in the vocabulary."""
    is_token = (tokens >= 0) & (tokens < scores.shape[-1])
    found = scores.float().log_softmax(dim=-1).gather(-1, tokens.where(is_token, 0)[..., None])[..., 0]
    return found.where(is_token, torch.nan)


def likeliest_tokens(
    logits: torch.Tensor, target_ids: torch.Tensor | None, logprobs: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Write the W likeliest tokens of `logits` `[B, n, V]`: descending `logprobs` float32, and `tokens` int64,
    `[B, n, W]` each; among equals the lowest first. NaN counts as -inf. `target_ids` `[V]` int64 maps tokens; None for
    none."""
    logits = logits.float()
    logits = torch.where(logits > -torch.inf, logits, -torch.inf)
    # `topk` takes any of equal values, and a stable sort is slow: so `topk` of distinct integers in the same order.
    bits = (logits + 0.0).view(torch.int32).long()
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 32
    index = (order - torch.arange(logits.shape[-1], device=logits.device)).topk(tokens.shape[2]).indices
    torch.sub(logits.gather(-1, index), logits.logsumexp(-1, keepdim=True), out=logprobs)
    tokens.copy_(index if target_ids is None else target_ids[index])
