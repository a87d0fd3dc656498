"""PyTorch reference of temperature, top-k and top-p of each row."""

from __future__ import annotations

import torch


def divide(values: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """`values` of any shape divided by `by`, which is `[]` or broadcasts, of the same dtype.

    The result equals torch's `values / float(by)` bit for bit, which on a GPU multiplies by the reciprocal of a Python
    number (`div_true_kernel_cuda`).
    """
    return values * by.reciprocal() if values.is_cuda else values / by


def certain(scores: torch.Tensor) -> torch.Tensor:
    """Scores `[..., V]` with which only the token of greedy decoding by `scores` can be drawn, also with NaN."""
    is_best = torch.arange(scores.shape[-1], device=scores.device) == scores.argmax(-1, keepdim=True)
    return torch.zeros_like(scores).masked_fill(~is_best, float("-inf"))


def apply_top_k_top_p(
    logits: torch.Tensor, temperatures: torch.Tensor, top_k: torch.Tensor, tail: torch.Tensor
) -> torch.Tensor:
    """Scores that transformers' `TemperatureLogitsWarper`, `TopKLogitsWarper` and `TopPLogitsWarper` give.

    Args:
        logits: `[B, n, V]`.
        temperatures: `[B]` float32.
        top_k: `[B]` int64; from V on no token is left out, and 0 is for greedy decoding.
        tail: `[B]` float32, 1 - `top_p`; 0 if no token is left out.

    Returns:
        `[B, n, V]` float32, with -inf for tokens that are left out, and NaN where `logits` are NaN. Of greedy rows 0
        for the first largest logit, where NaN is the largest, and -inf for all others. Of equal logits top-k leaves
        all, and top-p any.
    """
    temperatures, top_k, tail = (one[:, None, None] for one in (temperatures, top_k, tail))
    logits, vocabulary = logits.float(), logits.shape[-1]
    scores = divide(logits, temperatures)
    if (top_k < vocabulary).any():
        place = top_k.clamp(1, vocabulary)
        most = int(place.where(place < vocabulary, 1).max())
        lowest = scores.topk(most, dim=-1).values.gather(-1, (place.clamp(max=most) - 1).expand(*scores.shape[:-1], 1))
        scores = scores.masked_fill((scores < lowest) & (place < vocabulary), float("-inf"))
    if (tail > 0).any():
        ordered, order = scores.sort(dim=-1)
        is_out = (ordered.softmax(-1).cumsum(-1) <= tail) & (tail > 0)
        is_out[..., -1] = False
        scores = scores.masked_fill(torch.zeros_like(is_out).scatter(-1, order, is_out), float("-inf"))
    if (top_k == 0).any():
        scores = torch.where(top_k == 0, certain(logits), scores)
    return scores
