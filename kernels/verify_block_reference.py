"""PyTorch reference of block verification (arXiv 2403.10444, algorithm 2)."""

from __future__ import annotations

import torch

from . import random_reference
from .draft_vocabulary import over_vocabulary
from .recovered_token_reference import append_recovered_or_bonus
from .types import RandomStream, VerificationResult


def verify_block(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor,
    draft_ids: torch.Tensor | None,
    seeds: torch.Tensor,
    lengths: torch.Tensor,
    remaining: torch.Tensor,
) -> VerificationResult:
    """Lossless block verification (arXiv 2403.10444, algorithm 2): the drafts of a row are verified jointly.

    With w(0) = 1 and w(i) = min(w(i - 1) p(d_i) / q(d_i), 1), and e(i) the sum of max(w(i) p - q, 0) over the tokens
    after d_1 ... d_i, the prefix of i drafts passes with probability e(i) / (e(i) + 1 - w(i)), that of all drafts with
    probability w(K). The longest prefix that passes is accepted. The next token is sampled from max(w(i) p - q, 0);
    after all drafts from p. No lossless rule that sees only these drafts accepts more of them in expectation.
    `verify_sampling` accepts as many if the drafts are point masses or K is 1.

    The number of accepted drafts depends on all drafts, so two rounds must not share random numbers: these are a
    function of the first position of the round and the index of the draft. Zero probabilities are treated as in
    `verify_sampling`. The first row of scores or of `draft_probs` without a softmax ends the drafts, which a shorter
    block is lossless for, too; the token drawn from such scores is `NO_TOKEN`.

    Args:
        scores: `[B, K + 1, V]` float32 processed logits of the target; p is their softmax.
        drafts: `[B, K]` int64; K may be 0.
        draft_probs: `[B, K, V_d]` float32 distributions that the drafts were sampled from.
        draft_ids: `[V]` int64 or None, as in `verify_sampling`.
        seeds: `[B]` int64 row seeds.
        lengths: `[B]` int64, the position that the first draft would have.
        remaining: `[B]` int64, tokens that the row may still commit; drafts beyond are ignored.
    """
    batch, num_drafts = drafts.shape
    rows = torch.arange(batch, device=drafts.device)
    steps = torch.arange(num_drafts, device=drafts.device)
    probs, draft_probs = scores.softmax(dim=-1), over_vocabulary(draft_probs, draft_ids, scores.shape[-1])
    p_draft = probs[:, :-1].gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
    q_draft = draft_probs.gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
    weight = torch.ones_like(seeds, dtype=probs.dtype)
    weights = [weight]
    for step in range(num_drafts):
        p, q = p_draft[:, step], q_draft[:, step]
        weight = torch.where((weight > 0) & (p > 0), (weight * p / q).clamp(max=1.0), 0.0)
        weights.append(weight)
    weights = torch.stack(weights, dim=1)
    residuals = (weights[:, :-1, None] * probs[:, :-1] - draft_probs).clamp_(min=0.0)

    excess = torch.cat([residuals.sum(dim=2), weights[:, -1:]], dim=1)[:, 1:]
    weights_after = weights[:, 1:]
    numbers = random_reference.uniform(
        seeds[:, None], lengths[:, None], torch.zeros_like(drafts), RandomStream.ACCEPT, steps
    )
    are_known = (q_draft < torch.inf) & ~p_draft.isnan()
    count = torch.minimum(remaining.clamp(0, num_drafts), are_known.cumprod(dim=1).sum(dim=1))
    is_last = steps + 1 == count[:, None]
    passes = torch.where(is_last, numbers < weights_after, numbers * (excess + 1.0 - weights_after) < excess)
    passes &= steps < count[:, None]
    accepted = torch.where(passes, steps + 1, 0).amax(dim=1) if num_drafts else torch.zeros_like(lengths)

    p_next = probs[rows, accepted]
    residual = residuals[rows, accepted.clamp(max=num_drafts - 1)] if num_drafts else None
    return append_recovered_or_bonus(p_next, residual, accepted == count, drafts, accepted, seeds, lengths)
