"""PyTorch reference of the choice of experts by a router of a mixture of experts."""

from __future__ import annotations

import torch

from .types import RouterKind


def choose_experts(
    logits: torch.Tensor, correction: torch.Tensor | None, top_k: int, dtype: torch.dtype, kind: RouterKind
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts with the largest scores plus `correction`, and their weights. Of equal ones the first is chosen.

    Args:
        logits: `[n, E]`.
        correction: `[E]` or None.
        top_k: k, experts of a token, at most E.
        dtype: of the weights.
        kind: how scores and weights are computed, in float32.

    Returns:
        Weights `[n, k]`, and experts `[n, k]` int64, the largest first.
    """
    values = logits.float()
    if kind.scores == "softmax":
        values = values.softmax(-1)
    elif kind.scores == "sigmoid":
        values = values.sigmoid()
    choice = values if correction is None else values + correction
    experts = choice.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    weights = values.gather(1, experts)
    if kind.scores == "chosen":
        weights = weights.softmax(-1)
    if kind.normalises:
        weights = weights / (weights.sum(-1, keepdim=True) + kind.eps)
    return (weights * kind.scaling).to(dtype), experts
