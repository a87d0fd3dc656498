"""PyTorch reference of rejection sampling (arXiv 2211.17192, algorithm 1)."""

from __future__ import annotations

import torch

from . import random_reference
from .draft_vocabulary import over_vocabulary
from .recovered_token_reference import append_recovered_or_bonus
from .types import RandomStream, VerificationResult


def _draft_prob(draft_probs: torch.Tensor, draft_ids: torch.Tensor | None, drafts: torch.Tensor) -> torch.Tensor:
    """`[B, K]`: q of the drafts `[B, K]`."""
    index = drafts if draft_ids is None else draft_ids[drafts]
    size = draft_probs.shape[-1]
    probs = draft_probs.gather(-1, index.clamp(0, size - 1).unsqueeze(-1)).squeeze(-1)
    return torch.where((index >= 0) & (index < size), probs, 0.0)


def verify_sampling(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    draft_ids: torch.Tensor | None,
    seeds: torch.Tensor,
    lengths: torch.Tensor,
) -> VerificationResult:
    """Lossless rejection sampling (arXiv 2211.17192, algorithm 1): committed tokens have the target's distribution.

    Draft d is accepted if `u * q(d) < p(d)`. After a rejection the recovered token is sampled from max(p - q, 0),
    normalised; after K acceptances the bonus token is sampled from p. Without `draft_probs` q is the point mass on d.
    The inequality is strict, so a token of probability 0 is never accepted. Where max(p - q, 0) is 0 everywhere the
    recovered token is sampled from p.

    A row of `draft_probs` that is NaN, of draft logits without a softmax, is no distribution: its draft and those after
    it are not verified, as if the row had fewer drafts: the law is the target's whatever the drafter says.
    A row of scores with NaN or +inf, or of -inf alone, has no softmax: its draft is rejected, and the token there is
    `NO_TOKEN`.

    Args:
        scores: `[B, K + 1, V]` float32 processed logits of the target; p is their softmax.
        drafts: `[B, K]` int64; K may be 0.
        draft_probs: `[B, K, V_d]` float32 distributions that the drafts were sampled from, or None.
        draft_ids: `[V]` int64, index of each token in the draft vocabulary, -1 if it has none; None if the draft
            vocabulary is the first V_d tokens.
        seeds: `[B]` int64 row seeds.
        lengths: `[B]` int64, the position that the first draft would have.
    """
    batch, num_drafts = drafts.shape
    rows = torch.arange(batch, device=drafts.device)
    steps = torch.arange(num_drafts, device=drafts.device)
    probs = scores.softmax(dim=-1)

    p_draft = probs[:, :-1].gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
    q_draft = torch.ones_like(p_draft) if draft_probs is None else _draft_prob(draft_probs, draft_ids, drafts)
    numbers = random_reference.uniform(
        seeds[:, None], lengths[:, None], torch.zeros_like(drafts), RandomStream.ACCEPT, steps
    )
    accepted = (numbers * q_draft < p_draft).cumprod(dim=1).sum(dim=1)
    count = (q_draft < torch.inf).cumprod(dim=1).sum(dim=1)

    if num_drafts == 0:
        return append_recovered_or_bonus(probs[:, 0], None, accepted == count, drafts, accepted, seeds, lengths)
    p_next = probs[rows, accepted]
    if draft_probs is None:
        rejected = torch.cat([drafts, drafts.new_zeros(batch, 1)], dim=1)[rows, accepted]
        residual = p_next.scatter(1, rejected.unsqueeze(1), 0.0)
    else:
        q_next = draft_probs[rows, accepted.clamp(max=num_drafts - 1)]
        residual = (p_next - over_vocabulary(q_next, draft_ids, scores.shape[-1])).clamp_(min=0.0)
    return append_recovered_or_bonus(p_next, residual, accepted == count, drafts, accepted, seeds, lengths)
