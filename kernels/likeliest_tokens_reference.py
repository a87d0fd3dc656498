"""PyTorch reference of the top-k of log-probabilities; shapes and formula are in `likeliest_tokens`."""

from __future__ import annotations

import torch


def likeliest_tokens(
    logits: torch.Tensor, target_ids: torch.Tensor | None, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` likeliest tokens of each distribution, descending, and of equally likely ones the first.

    Args:
        logits: `[B, n, V]`; NaN counts as -inf.
        target_ids: `[V]` int64, what to call each token; None for its number.
        count: W, at most V.

    Returns:
        log-probabilities `[B, n, W]` float32, and tokens `[B, n, W]` int64.
    """
    logits = logits.float()
    logits = torch.where(logits > -torch.inf, logits, -torch.inf)
    # `topk` takes any of equal values, and a stable sort of all takes long: so of integers in the same order.
    bits = (logits + 0.0).view(torch.int32).long()
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 32
    index = (order - torch.arange(logits.shape[-1], device=logits.device)).topk(count).indices
    logprobs = logits.gather(-1, index) - logits.logsumexp(-1, keepdim=True)
    return logprobs, index if target_ids is None else target_ids[index]
