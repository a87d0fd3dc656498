"""PyTorch references of verification: rejection sampling, block verification, and by the target's own tokens."""

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
    The inequality is strict, so a token of probability 0 is never accepted. If max(p - q, 0) is 0 everywhere, the
    recovered token is sampled from p.

    A row of `draft_probs` is NaN if the draft logits have no softmax. Its draft and the drafts after it are not
    verified, as if there were fewer drafts, so the distribution is the target's whatever the drafter does.

    A row of scores with NaN or +inf, or only -inf, has no softmax: its draft is rejected and its token is `NO_TOKEN`.

    Args:
        scores: `[B, K + 1, V]` float32 processed logits of the target; p is their softmax.
        drafts: `[B, K]` int64; K may be 0.
        draft_probs: `[B, K, V_d]` float32 distributions that the drafts were sampled from, or None.
        draft_ids: see `Proposal`.
        seeds: `[B]` int64 row seeds.
        lengths: `[B]` int64, the position of the first draft.
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

    w(0) = 1, w(i) = min(w(i - 1) p(d_i) / q(d_i), 1), and e(i) is the sum of max(w(i) p - q, 0) over the tokens after
    d_1 ... d_i. The prefix of i drafts passes with probability e(i) / (e(i) + 1 - w(i)), the prefix of all drafts with
    probability w(K). The longest prefix that passes is accepted. The next token is sampled from max(w(i) p - q, 0), or
    from p after all drafts. No lossless rule that sees only these drafts accepts more of them in expectation.
    `verify_sampling` accepts as many if the drafts are point masses or K is 1.

    The number of accepted drafts depends on all drafts, so two rounds must not share random numbers: these are a
    function of the round's first position and the index of the draft. Zero probabilities are treated as in
    `verify_sampling`. The first row of scores or of `draft_probs` without a softmax ends the drafts, because a shorter
    block is lossless, too; the token drawn from such scores is `NO_TOKEN`.

    The arguments are those of `verify_sampling`, and `remaining` `[B]` int64, the number of tokens that the row may
    still commit; drafts beyond are ignored.
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


def verify_tree(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor | None,
    depths: torch.Tensor | None,
    seeds: torch.Tensor | None,
    lengths: torch.Tensor,
    depth: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept the drafts that are the target's own tokens: from the root on, the child with the target's token.

    The target's token after a node is the most likely one or, with `seeds`, the one that is drawn at the node's
    position. The random numbers of a draw depend only on seed and position, and there are none for acceptance. So a
    text is the same as without drafts, whatever the drafts are.

    Args:
        scores: `[B, N + 1, V]`, processed logits of the target at the root and the drafts; float32 with `seeds`, else
            of any floating dtype. Among equal scores the lowest token is the most likely. NaN is larger than every
            number; with `seeds` the token of a row without a softmax is `NO_TOKEN`.
        drafts: `[B, N]` int64. Siblings are different. N may be 0 in a chain.
        parents, depths: see `Tree`; None for a chain.
        seeds: `[B]` int64 row seeds; None for greedy decoding.
        lengths: `[B]` int64, the position of the token after the root.
        depth: D, the most drafts of a path; N for a chain.

    Returns:
        tokens `[B, D + 1]`, accepted and committed `[B]` of a `VerificationResult`, and the path `[B, D + 1]` int64,
        the accepted nodes, root first. Tokens and path are undefined after these.
    """
    batch = len(drafts)
    steps = torch.arange(depth + 1, device=drafts.device).expand(batch, -1)
    if seeds is None:
        chosen = scores.argmax(dim=-1)
    else:
        probs = scores.softmax(dim=-1)
        positions = lengths[:, None] + (steps if parents is None else depths)
        chosen = random_reference.exponential_sample(probs, seeds[:, None], positions, RandomStream.TARGET)
        chosen = chosen.masked_fill(probs[..., 0].isnan(), NO_TOKEN)
    if parents is None:
        accepted = (drafts == chosen[:, :-1]).cumprod(dim=1).sum(dim=1)
        return chosen, accepted, accepted + 1, steps.contiguous()
    tokens = torch.cat([drafts.new_full((batch, 1), NO_TOKEN), drafts], dim=1)
    node = torch.zeros(batch, 1, dtype=torch.int64, device=drafts.device)
    is_accepted, path = torch.ones_like(node, dtype=torch.bool), [node]
    accepted = torch.zeros_like(lengths)
    for _ in range(depth):
        fits = (parents == node) & (tokens == chosen.gather(1, node)) & is_accepted
        is_accepted = fits.any(dim=1, keepdim=True)
        node = torch.where(is_accepted, fits.int().argmax(dim=1, keepdim=True), node)
        accepted = accepted + is_accepted[:, 0]
        path.append(node)
    path = torch.cat(path, dim=1)
    return chosen.gather(1, path), accepted, accepted + 1, path


def _draft_prob(draft_probs: torch.Tensor, draft_ids: torch.Tensor | None, drafts: torch.Tensor) -> torch.Tensor:
    """`[B, K]`, the draft probabilities q of the drafts `[B, K]`."""
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
        residual: `[B, V]` float32, the weights of the recovered token; None if K is 0.
        is_bonus: `[B]` bool, whether it is the bonus token, sampled from `probs`, as also if the residual sums to 0.
        accepted: `[B]` int64, number of accepted drafts.
    """
    weights = probs
    if residual is not None:
        weights = torch.where(is_bonus[:, None] | (residual.sum(dim=1, keepdim=True) <= 0.0), probs, residual)
    next_token = random_reference.exponential_sample(weights, seeds, lengths + accepted, RandomStream.TARGET)
    next_token = next_token.masked_fill(probs[:, 0].isnan(), NO_TOKEN)
    tokens = torch.cat([drafts, drafts.new_zeros(len(drafts), 1)], dim=1)
    return VerificationResult(tokens.scatter(1, accepted.unsqueeze(1), next_token.unsqueeze(1)), accepted, accepted + 1)
