"""PyTorch references of the verification of drafts that were drawn: rejection sampling and block verification."""

from __future__ import annotations

import torch

from . import random_reference
from .draft_vocabulary import over_vocabulary
from .types import NO_TOKEN, RandomStream, VerificationResult


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
        return _append_recovered_or_bonus(probs[:, 0], None, accepted == count, drafts, accepted, seeds, lengths)
    p_next = probs[rows, accepted]
    if draft_probs is None:
        rejected = torch.cat([drafts, drafts.new_zeros(batch, 1)], dim=1)[rows, accepted]
        residual = p_next.scatter(1, rejected.unsqueeze(1), 0.0)
    else:
        q_next = draft_probs[rows, accepted.clamp(max=num_drafts - 1)]
        residual = (p_next - over_vocabulary(q_next, draft_ids, scores.shape[-1])).clamp_(min=0.0)
    return _append_recovered_or_bonus(p_next, residual, accepted == count, drafts, accepted, seeds, lengths)


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

    Arguments are those of `verify_sampling`, and `remaining` `[B]` int64, the tokens that the row may still commit;
    drafts beyond are ignored.
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
    return _append_recovered_or_bonus(p_next, residual, accepted == count, drafts, accepted, seeds, lengths)


def _draft_prob(draft_probs: torch.Tensor, draft_ids: torch.Tensor | None, drafts: torch.Tensor) -> torch.Tensor:
    """`[B, K]`: q of the drafts `[B, K]`."""
    index = drafts if draft_ids is None else draft_ids[drafts]
    size = draft_probs.shape[-1]
    probs = draft_probs.gather(-1, index.clamp(0, size - 1).unsqueeze(-1)).squeeze(-1)
    return torch.where((index >= 0) & (index < size), probs, 0.0)


def _append_recovered_or_bonus(
    probs: torch.Tensor,
    residual: torch.Tensor | None,
    is_bonus: torch.Tensor,
    drafts: torch.Tensor,
    accepted: torch.Tensor,
    seeds: torch.Tensor,
    lengths: torch.Tensor,
) -> VerificationResult:
    """Sample the token after the accepted drafts, `NO_TOKEN` where `probs` are NaN, and return the result of the round.

    Args:
        probs: `[B, V]` float32, the target's distribution of that token; NaN if there is none.
        residual: `[B, V]` float32, the weights of the recovered token; None where K is 0.
        is_bonus: `[B]` bool, where it is the bonus token, sampled from `probs`. Where the residual sums to 0 it is as
            well.
        accepted: `[B]` int64, number of accepted drafts.
    """
    weights = probs
    if residual is not None:
        weights = torch.where(is_bonus[:, None] | (residual.sum(dim=1, keepdim=True) <= 0.0), probs, residual)
    next_token = random_reference.exponential_sample(weights, seeds, lengths + accepted, RandomStream.TARGET)
    next_token = next_token.masked_fill(probs[:, 0].isnan(), NO_TOKEN)
    tokens = torch.cat([drafts, drafts.new_zeros(len(drafts), 1)], dim=1)
    return VerificationResult(tokens.scatter(1, accepted.unsqueeze(1), next_token.unsqueeze(1)), accepted, accepted + 1)
