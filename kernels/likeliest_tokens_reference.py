"""PyTorch reference of the top-k of log-probabilities."""

from __future__ import annotations

import torch


def likeliest_tokens(
    logits: torch.Tensor, target_ids: torch.Tensor | None, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities, float32, and tokens of the `count` likeliest ones of `logits` `[B, n, V]`, `[B, n, count]`
    each: descending, and of equally likely ones the first. NaN counts as -inf; `target_ids` `[V]` int64 are what to
    call tokens, None for their numbers."""
    logits = logits.float()
    logits = torch.where(logits > -torch.inf, logits, -torch.inf)
    # `topk` takes any of equal values, and a stable sort of all takes long: so of integers in the same order.
    bits = (logits + 0.0).view(torch.int32).long()
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 32
    index = (order - torch.arange(logits.shape[-1], device=logits.device)).topk(count).indices
    logprobs = logits.gather(-1, index) - logits.logsumexp(-1, keepdim=True)
    return logprobs, index if target_ids is None else target_ids[index]
