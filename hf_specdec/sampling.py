"""From logits to committed tokens: greedy verification and rejection sampling."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import torch

from . import ops


class Stream(IntEnum):
    """Purposes of random numbers; numbers of different streams are independent (see `ops.uniform`)."""

    ACCEPT = 0
    TARGET = 1
    DRAFT = 2


class Verdict(NamedTuple):
    """Outcome of one round.

    Attributes:
        tokens: `[B, K + 1]` int64: the accepted draft tokens, then the recovered or bonus token; the rest is undefined.
        accepted: `[B]` int64, number of accepted draft tokens, 0 to K.
        committed: `[B]` int64, number of leading `tokens` that the row commits: `accepted + 1`, less what lies after
            an end-of-sequence token or the length limit, and 0 for finished rows.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor
    committed: torch.Tensor


def verify_greedy(scores: torch.Tensor, drafts: torch.Tensor) -> Verdict:
    """Accept the longest prefix of the drafts that greedy decoding would have produced.

    Args:
        scores: `[B, K + 1, V]` processed logits of the target.
        drafts: `[B, K]` int64.
    """
    tokens = scores.argmax(dim=-1)
    accepted = (drafts == tokens[:, :-1]).cumprod(dim=1).sum(dim=1)
    return Verdict(tokens, accepted, accepted + 1)


def verify_sampling(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    seeds: torch.Tensor,
    lengths: torch.Tensor,
) -> Verdict:
    """Lossless rejection sampling (arXiv 2211.17192, algorithm 1): committed tokens are distributed as the target's.

    Draft d is accepted if `u * q(d) < p(d)`; on rejection the recovered token is drawn from max(p - q, 0), normalised;
    after K acceptances the bonus token is drawn from p. Without `draft_probs` q is the point mass on d. The strict
    inequality never accepts a token of probability 0.

    Args:
        scores: `[B, K + 1, V]` float32 processed logits of the target; p is their softmax.
        drafts: `[B, K]` int64.
        draft_probs: `[B, K, V]` float32 distributions that the drafts were drawn from, or None.
        seeds: `[B]` int64 row seeds.
        lengths: `[B]` int64, the position that the first draft would take.
    """
    batch, num_drafts = drafts.shape
    rows = torch.arange(batch, device=drafts.device)
    steps = torch.arange(num_drafts, device=drafts.device)
    probs = scores.softmax(dim=-1)

    chosen = drafts.unsqueeze(-1)
    p_draft = probs[:, :-1].gather(-1, chosen).squeeze(-1)
    q_draft = torch.ones_like(p_draft) if draft_probs is None else draft_probs.gather(-1, chosen).squeeze(-1)
    numbers = ops.uniform(seeds[:, None], lengths[:, None] + steps, torch.zeros_like(drafts), Stream.ACCEPT)
    accepted = (numbers * q_draft < p_draft).cumprod(dim=1).sum(dim=1)

    p_next = probs[rows, accepted]
    at = accepted.clamp(max=num_drafts - 1)
    if draft_probs is None:
        residual = p_next.scatter(1, drafts[rows, at].unsqueeze(1), 0.0)
    else:
        residual = (p_next - draft_probs[rows, at]).clamp_(min=0.0)
    is_bonus = (accepted == num_drafts).unsqueeze(1)
    is_empty = residual.sum(dim=1, keepdim=True) <= 0.0
    following = ops.race(torch.where(is_bonus | is_empty, p_next, residual), seeds, lengths + accepted, Stream.TARGET)

    tokens = torch.cat([drafts, drafts.new_zeros(batch, 1)], dim=1)
    tokens = tokens.scatter(1, accepted.unsqueeze(1), following.unsqueeze(1))
    return Verdict(tokens, accepted, accepted + 1)


def draw_draft(
    logits: torch.Tensor, temperature: float, seeds: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one draft token a row from softmax(logits / temperature).

    Args:
        logits: `[B, V_d]` of the draft head.
        temperature: above 0.
        seeds: `[B]` int64 row seeds.
        positions: `[B]` int64, the position that the draft would take.

    Returns:
        indices `[B]` int64 into the draft vocabulary, and the distribution `[B, V_d]` float32.
    """
    probs = (logits.float() / temperature).softmax(dim=-1)
    return ops.race(probs, seeds, positions, Stream.DRAFT), probs
