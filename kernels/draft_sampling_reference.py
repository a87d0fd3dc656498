"""PyTorch references of the choice of draft tokens."""

from __future__ import annotations

import torch

from . import random_reference
from .types import RandomStream


def best_draft(logits: torch.Tensor, target_ids: torch.Tensor | None = None) -> torch.Tensor:
    """The most probable draft tokens, `[B, n]` or `[n]` int64 in the target's vocabulary, by `logits` `[B, n, V_d]` or
    `[n, V_d]` of any floating dtype; ties and NaN as in `verify_tree`. `target_ids` `[V_d]` int64 has the target's
    token of each draft token; None if they are the same."""
    index = logits.argmax(dim=-1)
    return index if target_ids is None else target_ids[index]


def draw_draft(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, lengths: torch.Tensor, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample draft tokens from softmax(logits / temperature).

    Args:
        logits: `[B, n, V_d]` of any floating dtype.
        temperatures: `[B]` float32, above 0.
        seeds, lengths: see `verify_sampling`.
        first: index in the round, from 0, of the first of these drafts.

    Returns:
        indices `[B, n]` int64 into the draft vocabulary, and the distributions, float32 in the shape of the logits. For
        logits with NaN or +inf, or with only -inf, the distribution is NaN and the index 0.
    """
    probs = (logits.float() / temperatures[:, None, None]).softmax(dim=-1)
    steps = torch.arange(first, first + logits.shape[1], device=logits.device)
    index = random_reference.exponential_sample(probs, seeds[:, None], lengths[:, None], RandomStream.DRAFT, steps)
    return index, probs


def add_target_noise(
    logits: torch.Tensor,
    target_ids: torch.Tensor | None,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    lengths: torch.Tensor,
    first: int,
    is_one_draft: bool,
) -> torch.Tensor:
    """Logits with the noise of the target's draw: the largest belongs to the token that the target will draw, if the
    target has the drafter's distribution. The noise is Gumbel noise from the race times of `verify_tree`.

    Args:
        target_ids: `[V_d]` int64, the target's token of each draft token; None if they are the same.
        logits, temperatures, seeds, lengths, first: see `draw_draft`.
        is_one_draft: whether all n logits are for the first draft, after different tokens before it.

    Returns:
        `[B, n, V_d]` float32.
    """
    (_, width, size), device = logits.shape, logits.device
    tokens = torch.arange(size, device=device) if target_ids is None else target_ids
    positions = lengths[:, None] + first + torch.arange(width, device=device) * (not is_one_draft)
    noise = random_reference.race_times_of(seeds[:, None, None], positions[..., None], tokens, RandomStream.TARGET)
    return logits.float() / temperatures[:, None, None] - noise.log()
