"""Plain torch references of every kernel, with the kernels' signatures and their full ragged contract.

They run wherever there is no Triton kernel for the device, and they are what the Triton kernels are tested against.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from .types import DraftInputs, RandomStream, VerificationResult

_WORD = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    scaling: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over a cache whose slot is the position: slot s is visible to the query at position t iff s <= t.

    The last slot is scrap: a query at `slots - 1` or beyond is inert and gets zeros, whatever is in the cache. Who
    passes a part of a cache therefore passes a slot more than the live ones. Beyond the last live query of a row
    nothing need be valid for a kernel, but here, where invisible slots have weight 0, it must be finite.

    Args:
        query: `[B, heads, n, D]`.
        key: `[B, kv_heads, slots, D]`; the row's own new keys are already in it.
        value: `[B, kv_heads, slots, Dv]`.
        positions: `[B, n]` int64, the slot of each query; rows are ragged, no order is assumed.
        scaling: factor on the scores.
        window: if given, slot s is visible only if t - s < window.
        sinks: `[heads]` logits that take part in the softmax and carry no value (gpt-oss).
        softcap: if given, scores become softcap * tanh(scores / softcap).
        starts: `[B]` int64; if given, slot s of row b is visible only if s >= starts[b]. A query before that is inert.

    Returns:
        `[B, n, heads, Dv]` in the query's dtype; accumulation in float32 where sinks or softcap are given, as the
        framework's fused attention does it otherwise.
    """
    batch, heads, num_queries, _ = query.shape
    kv_heads, num_slots = key.shape[1:3]
    groups = heads // kv_heads
    # The query heads of a group become further queries of their key head: no copy of the keys and values.
    query = query.reshape(batch, kv_heads, groups * num_queries, query.shape[-1])
    slots = torch.arange(num_slots, device=key.device)
    is_inert = positions >= num_slots - 1
    positions = positions.clamp(max=num_slots - 1)  # a query that saw no slot would get NaN
    visible = slots <= positions[:, None, :, None]
    if starts is not None:
        is_inert = is_inert | (positions < starts[:, None])
        visible &= (slots >= starts[:, None, None, None]) | is_inert[:, None, :, None]
    if window is not None:
        visible &= slots > positions[:, None, :, None] - window
    visible = visible.repeat(1, 1, groups, 1)
    if sinks is None and softcap is None:
        out = scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scaling)
    else:
        scores = (query @ key.transpose(-1, -2)).float() * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            sink = sinks.float().view(1, kv_heads, groups, 1, 1).expand(batch, -1, -1, num_queries, 1)
            scores = torch.cat([scores, sink.reshape(batch, kv_heads, -1, 1)], dim=-1)
        out = scores.softmax(-1)[..., :num_slots].to(value.dtype) @ value
    return out.reshape(batch, heads, num_queries, -1).transpose(1, 2).masked_fill(is_inert[:, :, None, None], 0.0)


def write_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Store new states in the cache, in place.

    Where a row names a slot twice, which of the two is kept, or a mixture, is not defined; only the scrap slot is named
    twice.

    Args:
        keys: `[B, slots, kv_heads, D]`.
        values: `[B, slots, kv_heads, Dv]`.
        key_states: `[B, kv_heads, n, D]`, stored in the dtype of `keys`.
        value_states: `[B, kv_heads, n, Dv]`, stored in the dtype of `values`.
        positions: `[B, n]` int64, the slot of each, less than `slots`.
    """
    rows = torch.arange(keys.shape[0], device=keys.device)[:, None]
    keys[rows, positions] = key_states.transpose(1, 2).to(keys.dtype)
    values[rows, positions] = value_states.transpose(1, 2).to(values.dtype)


def prepare_inputs(
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    committed: torch.Tensor,
    limits: torch.Tensor,
    finished: torch.Tensor,
    out: DraftInputs,
    num_masks: int,
    mask_token: int,
    shift: int,
) -> None:
    """Lay out the rows of a drafter's first pass after a round: `[inert | kept | masks]`.

    Every row ends with `num_masks` mask columns; before them stand the tokens that the round kept, as many as the row
    committed, the newest last; what is left in front is inert. So the newest kept token of every row is in the same
    column, and the `1 + num_masks` draft tokens of a row are read off its last `1 + num_masks` columns.

    Slots run up to the newest kept token's, `length - 1 - shift`, and on through the masks. A kept column holds the
    token `shift` places after its slot. A column predicts the token `1 + shift` places after its slot; where that
    would lie at the length limit or beyond, the column is inert. So in a row that has reached its limit the newest
    kept token is too, for nothing can follow it. So is a column whose slot would be negative, and every column of a
    finished row. An inert column goes to the scrap slot, the last one, so that nothing of it reaches a live slot; it
    reads token 0 at position 0.

    Masks do not outlive the round: the next one writes its kept tokens where this one's masks began, its own masks
    after them, and what is beyond those no query sees.

    Args:
        tokens: `[B, slots]` int64, committed tokens; the last column is the scrap slot's.
        lengths: `[B]` int64, committed tokens of each row.
        committed: `[B]` int64, how many of them the last round added; counts accepted tokens, not drafted ones. Less
            than 0 counts as 0, more than the `W - num_masks` that a round can keep as that many.
        limits: `[B]` int64, length at which a row ends, less than `slots`.
        finished: `[B]` bool.
        out: `[B, W]` each, unit stride along a row; every element is written, and nothing else.
        num_masks: 0 for sequential drafting, K - 1 for parallel.
        mask_token: the id that mask columns embed.
        shift: 1 where slot p holds token p + 1 beside the hidden state at p (EAGLE), 0 where it holds token p.
    """
    num_kept = out.tokens.shape[1] - num_masks
    column = torch.arange(out.tokens.shape[1], device=tokens.device)
    slot = (lengths - shift - num_kept)[:, None] + column
    source = column - (num_kept - committed.clamp(0, num_kept))[:, None]
    is_mask = column >= num_kept
    is_kept = (source >= 0) & ~is_mask
    is_live = (is_kept | is_mask) & (slot >= 0) & (slot + 1 + shift < limits[:, None]) & ~finished[:, None]
    kept = tokens.gather(1, (slot + shift).clamp(0, tokens.shape[1] - 1))
    out.tokens.copy_(torch.where(is_live, torch.where(is_mask, mask_token, kept), 0))
    out.slots.copy_(torch.where(is_live, slot, tokens.shape[1] - 1))
    out.positions.copy_(torch.where(is_live, slot, 0))
    out.sources.copy_(torch.where(is_live & is_kept, source, -1))


def _philox(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    stream: int,
    steps: torch.Tensor | int,
) -> list[torch.Tensor]:
    """Four random words, int64 below 2**32, of Philox4x32-10 (Salmon et al., SC 2011); see `uniform`."""
    key = [seeds & _WORD, (seeds >> 32) & _WORD]
    counter = [tokens & _WORD, positions & _WORD, torch.full_like(positions, stream), torch.zeros_like(positions)]
    counter[3] = counter[3] + steps
    for _ in range(10):
        even, odd = counter[0] * _PHILOX_MULTIPLIERS[0], counter[2] * _PHILOX_MULTIPLIERS[1]
        counter = [
            ((odd >> 32) & _WORD) ^ counter[1] ^ key[0],
            odd & _WORD,
            ((even >> 32) & _WORD) ^ counter[3] ^ key[1],
            even & _WORD,
        ]
        key = [(word + step) & _WORD for word, step in zip(key, _PHILOX_KEY_STEPS, strict=True)]
    return counter


def uniform(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    stream: int,
    steps: torch.Tensor | int = 0,
) -> torch.Tensor:
    """Uniform float32 numbers in (0, 1), a pure function of their arguments: Philox4x32-10 (Salmon et al., SC 2011).

    Args:
        seeds: int64, the key: low word and high word.
        positions: int64, second word of the counter.
        tokens: int64, first word of the counter.
        stream: third word of the counter; keeps numbers for different purposes apart.
        steps: int64, last word of the counter: the draft within its round.

    The tensors broadcast against each other. Never 0 and never 1: (word + 0.5) / 2**32, with what rounds to 1 lowered
    to the largest float32 below it. So numbers near 0 are fine-grained, those near 1 have steps of 2**-24.
    """
    numbers = (_philox(seeds, positions, tokens, stream, steps)[0].to(torch.float32) + 0.5) * 2.0**-32
    return numbers.clamp(max=1.0 - 2.0**-24)


def exponential(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    stream: int,
    steps: torch.Tensor | int = 0,
) -> torch.Tensor:
    """Exponential float32 times of rate 1: -log(1 - u) of the numbers u of `uniform`, whose arguments it takes.

    Early times decide a race. They come from u near 0, which is fine-grained, and by a series of
    -log(1 - u) = 2 atanh(u / (2 - u)), for 1 - u is not. With -log(u) about 1 in 128 races among 2**17 equal weights
    would be a tie, which the lowest token wins.
    """
    number = uniform(seeds, positions, tokens, stream, steps)
    ratio = number / (2.0 - number)
    square = ratio * ratio
    series = 1.0 + square * (1.0 / 3.0 + square * (1.0 / 5.0 + square * (1.0 / 7.0 + square * (1.0 / 9.0))))
    return torch.where(number < 0.25, 2.0 * ratio * series, -torch.log(1.0 - number))


def row_seeds(seed: torch.Tensor, batch: int) -> torch.Tensor:
    """`[batch]` int64 seeds of rows, at least 0, from one `seed` `[1]` int64; row r's does not depend on `batch`."""
    rows = torch.arange(batch, device=seed.device)
    words = _philox(seed, torch.zeros_like(rows), rows, RandomStream.SEED, 0)
    return words[0] | ((words[1] >> 1) << 32)


def exponential_sample(
    weights: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    stream: int,
    steps: torch.Tensor | int = 0,
) -> torch.Tensor:
    """Draw one token a row with probability proportional to `weights`, by an exponential race.

    Token v arrives after an exponential time with rate weights[v]; the first to arrive is drawn. A token of weight 0
    never wins unless all weights are 0, when token 0 is returned.

    Args:
        weights: `[..., V]` float32, at least 0.
        seeds: int64, broadcast to `[...]`.
        positions: int64, broadcast to `[...]`, the position that the drawn token will take, or its round's first.
        stream, steps: see `uniform`; `steps` an int64 tensor is broadcast to `[..., 1]`.

    Returns:
        `[...]` int64.
    """
    tokens = torch.arange(weights.shape[-1], device=weights.device)
    return (weights / exponential(seeds[..., None], positions[..., None], tokens, stream, steps)).argmax(dim=-1)


def verify_greedy(scores: torch.Tensor, drafts: torch.Tensor) -> VerificationResult:
    """Accept the longest prefix of the drafts that greedy decoding would have produced.

    Of equal scores the lowest token is the largest. NaN is larger than every number, so a row with NaN yields its first
    NaN; a row of -inf alone yields token 0.

    Args:
        scores: `[B, K + 1, V]` processed logits of the target, of any floating dtype.
        drafts: `[B, K]` int64; K may be 0.
    """
    tokens = scores.argmax(dim=-1)
    accepted = (drafts == tokens[:, :-1]).cumprod(dim=1).sum(dim=1)
    return VerificationResult(tokens, accepted, accepted + 1)


def invert_draft_vocabulary(target_ids: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """`[V]` int64: where each of the target's tokens is in the draft vocabulary, -1 where it is not.

    Args:
        target_ids: `[V_d]` int64, the target's token for each of the draft vocabulary.
        vocabulary: V.
    """
    draft_ids = torch.full((vocabulary,), -1, dtype=torch.int64, device=target_ids.device)
    return draft_ids.index_copy_(0, target_ids, torch.arange(len(target_ids), device=target_ids.device))


def over_vocabulary(
    values: torch.Tensor, draft_ids: torch.Tensor | None, vocabulary: int, fill: float = 0.0
) -> torch.Tensor:
    """`[..., V]`: `values` `[..., V_d]` of the draft vocabulary, and `fill` for the target's other tokens.

    Args:
        draft_ids: `[V]` int64, of `invert_draft_vocabulary`; None where the first V_d tokens are the draft vocabulary.
        vocabulary: V, at least V_d.
    """
    if draft_ids is None:
        return pad(values, (0, vocabulary - values.shape[-1]), value=fill)
    return torch.where(draft_ids >= 0, values[..., draft_ids.clamp(min=0)], fill)


def _draft_prob(draft_probs: torch.Tensor, draft_ids: torch.Tensor | None, drafts: torch.Tensor) -> torch.Tensor:
    """`[B, K]`: q of the drafts `[B, K]`."""
    index = drafts if draft_ids is None else draft_ids[drafts]
    size = draft_probs.shape[-1]
    probs = draft_probs.gather(-1, index.clamp(0, size - 1).unsqueeze(-1)).squeeze(-1)
    return torch.where((index >= 0) & (index < size), probs, 0.0)


def _follow(
    probs: torch.Tensor,
    residual: torch.Tensor,
    is_bonus: torch.Tensor,
    drafts: torch.Tensor,
    accepted: torch.Tensor,
    seeds: torch.Tensor,
    lengths: torch.Tensor,
) -> VerificationResult:
    """The verdict that accepts `accepted` `[B]` drafts and draws the token after them.

    It is drawn from `residual` `[B, V]`; from `probs` `[B, V]` where `is_bonus` `[B]` or where the residual is 0.
    """
    is_whole = is_bonus[:, None] | (residual.sum(dim=1, keepdim=True) <= 0.0)
    following = exponential_sample(
        torch.where(is_whole, probs, residual), seeds, lengths + accepted, RandomStream.TARGET
    )
    tokens = torch.cat([drafts, drafts.new_zeros(len(drafts), 1)], dim=1)
    return VerificationResult(tokens.scatter(1, accepted.unsqueeze(1), following.unsqueeze(1)), accepted, accepted + 1)


def verify_sampling(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    draft_ids: torch.Tensor | None,
    seeds: torch.Tensor,
    lengths: torch.Tensor,
) -> VerificationResult:
    """Lossless rejection sampling (arXiv 2211.17192, algorithm 1): committed tokens are distributed as the target's.

    Draft d is accepted if `u * q(d) < p(d)`; on rejection the recovered token is drawn from max(p - q, 0), normalised;
    after K acceptances the bonus token is drawn from p. Without `draft_probs` q is the point mass on d. The strict
    inequality never accepts a token of probability 0. Where max(p - q, 0) is 0 everywhere the token is drawn from p.

    A row of scores with NaN or +inf, or of -inf alone, has no softmax: its draft is rejected, and the token that
    follows is some token of the vocabulary.

    Args:
        scores: `[B, K + 1, V]` float32 processed logits of the target; p is their softmax.
        drafts: `[B, K]` int64; K may be 0.
        draft_probs: `[B, K, V_d]` float32 distributions that the drafts were drawn from, or None.
        draft_ids: `[V]` int64, where each token is in the draft vocabulary, -1 where it is not; None where it is the
            first V_d tokens.
        seeds: `[B]` int64 row seeds.
        lengths: `[B]` int64, the position that the first draft would take.
    """
    batch, num_drafts = drafts.shape
    rows = torch.arange(batch, device=drafts.device)
    steps = torch.arange(num_drafts, device=drafts.device)
    probs = scores.softmax(dim=-1)

    p_draft = probs[:, :-1].gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
    q_draft = torch.ones_like(p_draft) if draft_probs is None else _draft_prob(draft_probs, draft_ids, drafts)
    numbers = uniform(seeds[:, None], lengths[:, None], torch.zeros_like(drafts), RandomStream.ACCEPT, steps)
    accepted = (numbers * q_draft < p_draft).cumprod(dim=1).sum(dim=1)

    p_next = probs[rows, accepted]
    if draft_probs is None or num_drafts == 0:
        rejected = torch.cat([drafts, drafts.new_zeros(batch, 1)], dim=1)[rows, accepted]
        residual = p_next.scatter(1, rejected.unsqueeze(1), 0.0)
    else:
        q_next = draft_probs[rows, accepted.clamp(max=num_drafts - 1)]
        residual = (p_next - over_vocabulary(q_next, draft_ids, scores.shape[-1])).clamp_(min=0.0)
    return _follow(p_next, residual, accepted == num_drafts, drafts, accepted, seeds, lengths)


def verify_block(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor,
    draft_ids: torch.Tensor | None,
    seeds: torch.Tensor,
    lengths: torch.Tensor,
    remaining: torch.Tensor,
) -> VerificationResult:
    """Lossless block verification (arXiv 2403.10444, algorithm 2): the drafts of a row are judged together.

    With w(0) = 1 and w(i) = min(w(i - 1) p(d_i) / q(d_i), 1), and e(i) = sum of max(w(i) p - q, 0) over the tokens
    that may follow d_1..d_i, the first i drafts hold with probability e(i) / (e(i) + 1 - w(i)), all of them with
    probability w(K); as many are accepted as hold. The next token is drawn from max(w(i) p - q, 0), after all drafts
    from p. No lossless rule that sees these drafts accepts more of them in expectation; `verify_sampling` accepts as
    many where the drafts are point masses or K is 1.

    How many are accepted depends on all drafts, so the random numbers of a round must not be those of another: they
    are keyed by its first position and the draft's number. Zero probabilities and rows without a softmax as in
    `verify_sampling`.

    Args:
        scores, drafts, draft_probs, draft_ids, seeds, lengths: as in `verify_sampling`.
        rooms: `[B]` int64, tokens that the row still takes; drafts beyond are not judged, whatever they are.
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
    numbers = uniform(seeds[:, None], lengths[:, None], torch.zeros_like(drafts), RandomStream.ACCEPT, steps)
    count = remaining.clamp(0, num_drafts)
    is_last = steps + 1 == count[:, None]
    holds = torch.where(is_last, numbers < weights_after, numbers * (excess + 1.0 - weights_after) < excess)
    holds &= steps < count[:, None]
    accepted = torch.where(holds, steps + 1, 0).amax(dim=1) if num_drafts else torch.zeros_like(lengths)

    p_next = probs[rows, accepted]
    residual = residuals[rows, accepted.clamp(max=num_drafts - 1)] if num_drafts else p_next
    return _follow(p_next, residual, accepted == count, drafts, accepted, seeds, lengths)


def best_draft(logits: torch.Tensor, target_ids: torch.Tensor | None = None) -> torch.Tensor:
    """The most probable draft tokens; ties and NaN as in `verify_greedy`.

    Args:
        logits: `[B, n, V_d]` or `[n, V_d]` of the draft head, of any floating dtype.
        target_ids: `[V_d]` int64, the target's token for each of the draft vocabulary; None where they are the same.

    Returns:
        `[B, n]` or `[n]` int64 target tokens.
    """
    index = logits.argmax(dim=-1)
    return index if target_ids is None else target_ids[index]


def draw_draft(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, lengths: torch.Tensor, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw draft tokens from softmax(logits / temperature).

    Args:
        logits: `[B, n, V_d]` of the draft head, of any floating dtype.
        temperatures: `[B]` float32, above 0.
        seeds: `[B]` int64 row seeds.
        lengths: `[B]` int64, the position that the first draft of the round would take.
        first: the first of these drafts is number `first` of the round, from 0.

    Returns:
        indices `[B, n]` int64 into the draft vocabulary, and the distributions, float32 in the logits' shape.
    """
    probs = (logits.float() / temperatures[:, None, None]).softmax(dim=-1)
    steps = torch.arange(first, first + logits.shape[1], device=logits.device)[:, None]
    return exponential_sample(probs, seeds[:, None], lengths[:, None], RandomStream.DRAFT, steps), probs


def plan_experts(expert_ids: torch.Tensor, num_experts: int, rows: int) -> torch.Tensor:
    """Blocks of tokens that have an expert in common, for `expert_linear`.

    A token and one of its experts are a pair. Sorted by expert, and stably, pairs have places; a block is up to `rows`
    places of one expert.

    Args:
        expert_ids: `[n, k]` int64. Those of `num_experts` and beyond count as one more expert, which is nobody.
        num_experts: how many there are.
        rows: places of a block at most.

    Returns:
        `[4, n * k]` int32: the pair of every place; then the expert of every block, its first place, and the place
        after its last; -1, n * k and n * k where there is no further block.
    """
    ids = expert_ids.reshape(-1).clamp(max=num_experts)
    num_pairs = len(ids)
    numbers = torch.arange(num_pairs, device=ids.device)
    order = ids.argsort(stable=True)
    counts = (ids[:, None] == torch.arange(num_experts + 1, device=ids.device)).sum(0)
    blocks = -(counts // -rows)
    ends = blocks.cumsum(0)
    owners = (ends <= numbers[:, None]).sum(1)
    is_block = owners <= num_experts
    owners = owners.clamp(max=num_experts)
    lasts = counts.cumsum(0)[owners]
    firsts = lasts - counts[owners] + (numbers - ends[owners] + blocks[owners]) * rows
    firsts, lasts = firsts.where(is_block, num_pairs), lasts.minimum(firsts + rows).where(is_block, num_pairs)
    return torch.stack([order, owners.where(is_block, -1), firsts, lasts]).int()


def expert_linear(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plan: torch.Tensor,
    rows: int,
    is_transposed: bool,
) -> torch.Tensor:
    """Products of tokens with weights of their experts.

    Args:
        inputs: `[n, in]`, of every token, or `[n * k, in]`, of every pair.
        weight: `[experts, out, in]`; if `is_transposed` `[experts, in, out]`.
        bias: `[experts, out]`, if there is one.
        plan: of `plan_experts`, for as many `experts` and `rows`.

    Returns:
        `[n * k, out]` in the dtype of `inputs`, by pair; zeros for pairs of nobody.
    """
    out = inputs.new_zeros(plan.shape[1], weight.shape[2 if is_transposed else 1])
    tokens = plan[0].long() // (plan.shape[1] // len(inputs))
    for expert, first, last in plan[1:].t().tolist():
        if 0 <= expert < len(weight):
            answers = inputs[tokens[first:last]] @ (weight[expert] if is_transposed else weight[expert].t())
            out[plan[0, first:last].long()] = answers if bias is None else answers + bias[expert]
    return out
