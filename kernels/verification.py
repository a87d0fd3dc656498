"""Triton verification of drafts; the references are in `verification_reference`.

With e = `random.race_times` of the row's seed and the token's position, the recovered token is the argmax of
residual / e, or of p / e if the residual is 0 everywhere. That is known only when all blocks of a row are done. So
every program writes the keys (see `reduction`) of both maxima, and a merging kernel chooses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from . import reduction
from .draft_sampling import draw_keys
from .launch import Unspecialised, block_of_steps, kernel, wait_for_inputs
from .random import race_times, uniform
from .reduction import (
    LEAST_KEY,
    argmax_keys,
    empty_result,
    index_of_key,
    is_key_of_nan,
    largest_key,
    load_softmax,
    merge_softmax_stats,
    softmax_stats,
)
from .types import NO_TOKEN, RandomStream, VerificationResult

_ACCEPT, _TARGET = tl.constexpr(int(RandomStream.ACCEPT)), tl.constexpr(int(RandomStream.TARGET))
_NO_TOKEN = tl.constexpr(NO_TOKEN)


class _Laws(NamedTuple):
    """Kernel argument: the distributions of a round's tokens, with strides of rows and steps.

    Attributes:
        scores: `[B, K + 1, V]` float32; the target's tokens have their softmax as distribution.
        draft_probs: `[B, K, V_d]` float32, distributions of the drafts; None for point masses.
        draft_ids: `[V]` int64, index of each token in the draft vocabulary; None if that is the first V_d tokens.
        vocabulary, draft_vocabulary: V and V_d.
    """

    scores: torch.Tensor
    draft_probs: torch.Tensor | None
    draft_ids: torch.Tensor | None
    scores_strides: tuple[int, int]
    draft_probs_strides: tuple[int, int] | None
    vocabulary: int
    draft_vocabulary: int | None

    @classmethod
    def of(
        cls, scores: torch.Tensor, drafts: torch.Tensor, probs: torch.Tensor | None, ids: torch.Tensor | None
    ) -> _Laws:
        """From the arguments of `verify_sampling` and `verify_block`, whose shapes, dtypes and strides are checked."""
        batch, num_drafts = drafts.shape
        assert scores.shape[:2] == (batch, num_drafts + 1), "shapes must agree"
        assert scores.dtype == torch.float32, "scores must be float32"
        assert ids is None or (ids.shape == scores.shape[2:] and ids.is_contiguous()), "draft_ids must be contiguous"
        if probs is None:
            return cls(scores, None, ids, scores.stride()[:2], None, scores.shape[2], None)
        assert probs.shape[:2] == (batch, num_drafts), "shapes must agree"
        assert probs.shape[2] <= scores.shape[2], "the draft vocabulary must be a part of the target's"
        assert probs.dtype == torch.float32, "draft_probs must be float32"
        assert probs.stride(2) == 1 or probs.shape[2] == 1, "rows must have unit stride"
        return cls(scores, probs, ids, scores.stride()[:2], probs.stride()[:2], scores.shape[2], probs.shape[2])

    def empty_keys(self) -> torch.Tensor:
        """Uninitialised keys `[2, B, blocks]`."""
        blocks = triton.cdiv(self.vocabulary, reduction.SAMPLE_BLOCK)
        return torch.empty(2, len(self.scores), blocks, dtype=torch.int64, device=self.scores.device)


@triton.jit
def _score_of(laws, row, step, token, mask):
    """Score of `token`, int64, at steps of a row; -inf where `mask` is false."""
    at = laws.scores + row * laws.scores_strides[0] + step * laws.scores_strides[1]
    return tl.load(at + token, mask=mask, other=float("-inf"))


@triton.jit
def _draft_prob(laws, row, step, token, mask):
    """Draft probability q of `token`, int64 in the target's vocabulary, at steps of a row; 0 where `mask` is false."""
    index = token
    if laws.draft_ids is not None:
        index = tl.load(laws.draft_ids + token, mask=mask, other=-1)
    at = laws.draft_probs + row * laws.draft_probs_strides[0] + step * laws.draft_probs_strides[1]
    return tl.load(at + index, mask=mask & (index >= 0) & (index < laws.draft_vocabulary), other=0.0)


@triton.jit
def _has_probs(draft_prob):
    """Whether q, the draft's probability, is a number; it is NaN if the drafter's logits have no softmax."""
    return draft_prob < float("inf")


@triton.jit
def _store_next(keys_ptr, out, residual, p_next, seed, length, accepted, token, is_token, BLOCK: tl.constexpr):
    """Write one block's keys of the maxima of residual / e and of p_next / e, and the counts.

    For grids (B, blocks). Writes one element each of `keys[0]` and `keys[1]`, `[B, blocks]`, and in the first block of
    a row one element of `accepted` and `committed` `[B]` of `out`, a `VerificationResult`.
    """
    position = length + accepted
    row = tl.program_id(0).to(tl.int64)
    cell = row * tl.num_programs(1) + tl.program_id(1)
    num_cells = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    noise = race_times(seed, position, tl.program_id(1) * BLOCK, position * 0, _TARGET, BLOCK)
    tl.store(keys_ptr + cell, largest_key(residual / noise, token, is_token))
    tl.store(keys_ptr + num_cells + cell, largest_key(p_next / noise, token, is_token))
    if tl.program_id(1) == 0:
        tl.store(out.accepted + row, accepted.to(tl.int64))
        tl.store(out.committed + row, accepted.to(tl.int64) + 1)


@kernel
def _merge_recovered_kernel(
    keys_ptr,
    drafts_ptr,
    out,
    drafts_stride_b: Unspecialised,
    drafts_stride_n: Unspecialised,
    num_drafts: Unspecialised,
    num_blocks: Unspecialised,
    STEPS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Merge the keys of a row and write its tokens: the drafts, with the next token at index `accepted`.

    Grid: (B,). Reads `keys` `[2, B, blocks]`, `drafts` `[B, K]` and `accepted` of `out`; writes `tokens` of `out`.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    cell = row * num_blocks + block
    num_cells = tl.num_programs(0).to(tl.int64) * num_blocks
    from_residual = tl.max(tl.load(keys_ptr + cell, mask=block < num_blocks, other=LEAST_KEY), axis=0)
    from_probs = tl.max(tl.load(keys_ptr + num_cells + cell, mask=block < num_blocks, other=LEAST_KEY), axis=0)
    # The upper half of a key is 0 if no weight is positive.
    next_token = index_of_key(tl.where((from_residual >> 32) > 0, from_residual, from_probs))
    next_token = tl.where(is_key_of_nan(from_probs), _NO_TOKEN, next_token)
    step = tl.arange(0, STEPS)
    draft = tl.load(drafts_ptr + row * drafts_stride_b + step * drafts_stride_n, mask=step < num_drafts, other=0)
    token = tl.where(step == tl.load(out.accepted + row), next_token, draft)
    tl.store(out.tokens + row * (num_drafts + 1) + step, token, mask=step <= num_drafts)


def _merge_recovered(keys: torch.Tensor, drafts: torch.Tensor, out: VerificationResult) -> None:
    """Write `out.tokens` from `keys` `[2, B, blocks]` and `out.accepted`."""
    batch, num_drafts = drafts.shape
    _merge_recovered_kernel[(batch,)](
        keys,
        drafts,
        out,
        *drafts.stride(),
        num_drafts,
        keys.shape[2],
        STEPS=block_of_steps(num_drafts + 1),
        BLOCKS=triton.next_power_of_2(keys.shape[2]),
    )


@kernel
def _verify_sampling_kernel(
    laws,
    drafts_ptr,
    seeds_ptr,
    lengths_ptr,
    stats,
    keys_ptr,
    out,
    drafts_stride_b: Unspecialised,
    drafts_stride_n: Unspecialised,
    num_drafts: Unspecialised,
    num_stats: Unspecialised,
    STEPS: tl.constexpr,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the accepted drafts of a row, and write the keys of one block for the token after them.

    Grid: (B, blocks). Reads the softmax statistics `stats` `[B * (K + 1), stat blocks]`, the row's drafts and their
    probabilities, and BLOCK elements of `scores[b, a]` and `draft_probs[b, a]` of `laws`, where a is the number of
    accepted drafts, which every program computes. Writes as `_store_next`.
    """
    row = tl.program_id(0).to(tl.int64)
    seed = tl.load(seeds_ptr + row)
    length = tl.load(lengths_ptr + row)
    step = tl.arange(0, STEPS)
    stat = tl.arange(0, STATS)
    at = (row * (num_drafts + 1) + step)[:, None] * num_stats + stat[None, :]
    is_stat = (step <= num_drafts)[:, None] & (stat < num_stats)[None, :]
    maxima = tl.load(stats[0] + at, mask=is_stat, other=float("-inf"))
    bases, totals = merge_softmax_stats(maxima, tl.load(stats[1] + at, mask=is_stat, other=0.0))

    is_draft = step < num_drafts
    draft = tl.load(drafts_ptr + row * drafts_stride_b + step * drafts_stride_n, mask=is_draft, other=0)
    # A draft outside the vocabulary has probability 0; nothing is read for it.
    is_known = is_draft & (draft >= 0) & (draft < laws.vocabulary)
    wide_step = step.to(tl.int64)
    p_draft = tl.exp(_score_of(laws, row, wide_step, draft, is_known) - bases) / totals
    q_draft = tl.full([STEPS], 1.0, tl.float32)
    count = num_drafts
    if laws.draft_probs is not None:
        q_draft = _draft_prob(laws, row, wide_step, draft, is_known)
        count = tl.min(tl.where(is_draft & (_has_probs(q_draft) == 0), step, num_drafts), axis=0)
    number = uniform(seed, length, step * 0, step, _ACCEPT)
    is_accepted = is_draft & (number * q_draft < p_draft)
    accepted = tl.min(tl.where(is_accepted, num_drafts, tl.minimum(step, num_drafts)), axis=0)
    is_bonus = accepted == count

    is_next = step == accepted
    base = tl.sum(tl.where(is_next, bases, 0.0), axis=0)
    total = tl.sum(tl.where(is_next, totals, 0.0), axis=0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < laws.vocabulary
    p_next = tl.exp(_score_of(laws, row, accepted.to(tl.int64), token, is_token) - base) / total
    if laws.draft_probs is not None:
        is_read = token < tl.where(is_bonus, 0, laws.vocabulary)
        residual = tl.maximum(p_next - _draft_prob(laws, row, accepted.to(tl.int64), token, is_read), 0.0)
    else:
        rejected = tl.sum(tl.where(is_next & is_draft, draft, 0), axis=0)
        residual = tl.where(token == rejected, 0.0, p_next)
    residual = tl.where(is_bonus, p_next, residual)
    _store_next(keys_ptr, out, residual, p_next, seed, length, accepted, token, is_token, BLOCK)


def verify_sampling(scores, drafts, draft_probs, draft_ids, seeds, lengths):
    """See `verification_reference.verify_sampling`; equal up to rounding. Three launches.

    `scores` are read once for the softmax statistics, and again only at the step of the recovered or bonus token.
    """
    num_drafts = drafts.shape[1]
    laws = _Laws.of(scores, drafts, draft_probs, draft_ids)
    assert seeds.is_contiguous() and lengths.is_contiguous()
    keys, stats, out = laws.empty_keys(), softmax_stats(scores), empty_result(*drafts.shape, drafts.device)
    steps, num_stats = block_of_steps(num_drafts + 1), triton.next_power_of_2(stats[0].shape[1])
    _verify_sampling_kernel[keys.shape[1:]](
        laws,
        drafts,
        seeds,
        lengths,
        stats,
        keys,
        out,
        *drafts.stride(),
        num_drafts,
        stats[0].shape[1],
        STEPS=steps,
        STATS=num_stats,
        BLOCK=reduction.SAMPLE_BLOCK,
        # The softmax statistics of 64 drafts and 64 blocks do not fit the registers of 4 warps.
        num_warps=reduction.SAMPLE_WARPS if steps * num_stats <= 2048 else 2 * reduction.SAMPLE_WARPS,
    )
    _merge_recovered(keys, drafts, out)
    return out


@kernel
def _prefix_weights_kernel(
    laws,
    drafts_ptr,
    stats,
    row_stats_ptr,
    drafts_stride_b: Unspecialised,
    drafts_stride_n: Unspecialised,
    num_drafts: Unspecialised,
    num_stats: Unspecialised,
    STATS: tl.constexpr,
):
    """Softmax base and normaliser at every step of a row, and the w(i) of `verification_reference.verify_block`.

    Grid: (B,). Reads `stats` `[B * (K + 1), stat blocks]`, and the target's and the draft probability of each draft;
    writes `row_stats` `[B, K + 1, 3]` float32: base, normaliser, and w(i), which is NaN after the first step without a
    distribution.
    """
    row = tl.program_id(0).to(tl.int64)
    weight = tl.full([1], 1.0, tl.float32)
    for step in range(num_drafts + 1):
        base, total = load_softmax(stats, row * (num_drafts + 1) + step, num_stats, STATS)
        row_stat_ptr = row_stats_ptr + (row * (num_drafts + 1) + step) * 3 + tl.arange(0, 1)
        tl.store(row_stat_ptr, base)
        tl.store(row_stat_ptr + 1, total)
        tl.store(row_stat_ptr + 2, weight)

        is_draft = tl.arange(0, 1) + step < num_drafts
        at = row * drafts_stride_b + step * drafts_stride_n + tl.arange(0, 1)
        draft = tl.load(drafts_ptr + at, mask=is_draft, other=-1)
        is_known = is_draft & (draft >= 0) & (draft < laws.vocabulary)
        p_draft = tl.exp(_score_of(laws, row, step, draft, is_known) - base) / total
        q_draft = _draft_prob(laws, row, step, draft, is_known)
        are_known = (weight == weight) & _has_probs(q_draft) & (total > 0.0)
        is_possible = (weight > 0.0) & (p_draft > 0.0)
        weight = tl.where(is_possible, tl.minimum(weight * p_draft / q_draft, 1.0), 0.0)
        weight = tl.where(are_known, weight, float("nan"))


@kernel
def _excess_kernel(
    laws,
    row_stats_ptr,
    excesses_ptr,
    num_drafts: Unspecialised,
    BLOCK: tl.constexpr,
):
    """Sum of max(w(i) p - q, 0) over one block of the vocabulary.

    Grid: (B * K, blocks). Reads `row_stats[b, i]`, and BLOCK elements of `scores[b, i]` and `draft_probs[b, i]`; writes
    one element of `excesses` `[B * K, blocks]` float32.
    """
    cell = tl.program_id(0).to(tl.int64)
    row, step = cell // num_drafts, cell % num_drafts
    row_stat_ptr = row_stats_ptr + (row * (num_drafts + 1) + step) * 3
    base, total, weight = tl.load(row_stat_ptr), tl.load(row_stat_ptr + 1), tl.load(row_stat_ptr + 2)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < laws.vocabulary
    score = _score_of(laws, row, step, token, is_token)
    q = _draft_prob(laws, row, step, token, is_token)
    excess = tl.sum(tl.maximum(weight * (tl.exp(score - base) / total) - q, 0.0), axis=0)
    tl.store(excesses_ptr + cell * tl.num_programs(1) + tl.program_id(1), excess)


@kernel
def _verify_block_kernel(
    laws,
    seeds_ptr,
    lengths_ptr,
    remaining_ptr,
    row_stats_ptr,
    excesses_ptr,
    keys_ptr,
    out,
    num_drafts: Unspecialised,
    num_stats: Unspecialised,
    STEPS: tl.constexpr,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As `_verify_sampling_kernel`; reads `row_stats` and `excesses` of the row instead of statistics and drafts."""
    row = tl.program_id(0).to(tl.int64)
    seed = tl.load(seeds_ptr + row)
    length = tl.load(lengths_ptr + row)
    remaining = tl.load(remaining_ptr + row)
    count = tl.maximum(tl.minimum(remaining, num_drafts), 0).to(tl.int32)

    # Element i is for the prefix of the first i drafts, 1 to K, and has the random number of its last draft.
    prefix = tl.arange(0, STEPS)
    stat = tl.arange(0, STATS)
    at = (row * num_drafts + prefix)[:, None] * num_stats + stat[None, :]
    is_stat = (prefix < num_drafts)[:, None] & (stat < num_stats)[None, :]
    excess = tl.sum(tl.load(excesses_ptr + at, mask=is_stat, other=0.0), axis=1)
    row_stats_ptr += row * (num_drafts + 1) * 3
    weight = tl.load(row_stats_ptr + prefix * 3 + 2, mask=prefix <= num_drafts, other=0.0)
    count = tl.minimum(count, tl.min(tl.where(weight == weight, num_drafts, prefix - 1), axis=0))
    number = uniform(seed, length, prefix * 0, prefix - 1, _ACCEPT)
    passes = tl.where(prefix == count, number < weight, number * (excess + 1.0 - weight) < excess)
    accepted = tl.max(tl.where(passes & (prefix >= 1) & (prefix <= count), prefix, 0), axis=0)
    is_bonus = accepted == count

    row_stat_ptr = row_stats_ptr + accepted * 3
    base, total, weight_next = tl.load(row_stat_ptr), tl.load(row_stat_ptr + 1), tl.load(row_stat_ptr + 2)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < laws.vocabulary
    p_next = tl.exp(_score_of(laws, row, accepted.to(tl.int64), token, is_token) - base) / total
    is_read = token < tl.where(is_bonus, 0, laws.vocabulary)
    q_next = _draft_prob(laws, row, accepted.to(tl.int64), token, is_read)
    residual = tl.where(is_bonus, p_next, tl.maximum(weight_next * p_next - q_next, 0.0))
    _store_next(keys_ptr, out, residual, p_next, seed, length, accepted, token, is_token, BLOCK)


def verify_block(scores, drafts, draft_probs, draft_ids, seeds, lengths, remaining):
    """See `verification_reference.verify_block`; equal up to rounding. Five launches.

    `scores` are read once for the softmax statistics, once with `draft_probs` at all steps but the last for e(i), and
    again at the step of the recovered or bonus token.
    """
    batch, num_drafts = drafts.shape
    laws = _Laws.of(scores, drafts, draft_probs, draft_ids)
    assert seeds.is_contiguous() and lengths.is_contiguous() and remaining.is_contiguous()
    keys, stats, out = laws.empty_keys(), softmax_stats(scores), empty_result(*drafts.shape, drafts.device)
    # At each step the base and the normaliser of the softmax, and w(i) of the drafts before it.
    row_stats = torch.empty(batch, num_drafts + 1, 3, dtype=torch.float32, device=scores.device)
    _prefix_weights_kernel[(batch,)](
        laws,
        drafts,
        stats,
        row_stats,
        *drafts.stride(),
        num_drafts,
        stats[0].shape[1],
        STATS=triton.next_power_of_2(stats[0].shape[1]),
    )
    shape = (batch * num_drafts, triton.cdiv(laws.vocabulary, reduction.REDUCE_BLOCK))
    excesses = torch.empty(shape, dtype=torch.float32, device=scores.device)
    if num_drafts > 0:
        _excess_kernel[shape](
            laws,
            row_stats,
            excesses,
            num_drafts,
            BLOCK=reduction.REDUCE_BLOCK,
            num_warps=reduction.REDUCE_WARPS,
        )
    _verify_block_kernel[keys.shape[1:]](
        laws,
        seeds,
        lengths,
        remaining,
        row_stats,
        excesses,
        keys,
        out,
        num_drafts,
        shape[1],
        STEPS=block_of_steps(num_drafts + 1),
        STATS=triton.next_power_of_2(shape[1]),
        BLOCK=reduction.SAMPLE_BLOCK,
        num_warps=reduction.SAMPLE_WARPS,
    )
    _merge_recovered(keys, drafts, out)
    return out


@kernel
def _walk_kernel(
    keys_ptr,
    drafts_ptr,
    parents_ptr,
    out,
    path_ptr,
    drafts_stride_b: Unspecialised,
    drafts_stride_n: Unspecialised,
    parents_stride: Unspecialised,
    num_drafts: Unspecialised,
    num_blocks: Unspecialised,
    depth: Unspecialised,
    IS_DRAWN: tl.constexpr,
    NODES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Merge the keys of the blocks, and follow the chosen tokens of one row.

    Grid: (B,). Reads a row of `keys` `[B, N + 1, blocks]`, `drafts` and `parents`; writes a row of `tokens` of `out`, a
    `VerificationResult`, and of `path`, `[B, D + 1]` each, and an element of `accepted` and `committed`.
    """
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, NODES)
    block = tl.arange(0, BLOCKS)
    tokens_ptr = out.tokens + row * (depth + 1)
    path_ptr += row * (depth + 1)
    drafts_ptr += row * drafts_stride_b
    wait_for_inputs()
    keys = tl.load(
        keys_ptr + (row * (num_drafts + 1) + index)[:, None] * num_blocks + block[None, :],
        mask=(index <= num_drafts)[:, None] & (block < num_blocks)[None, :],
        other=LEAST_KEY,
    )
    key = tl.max(keys, axis=1)
    chosen = index_of_key(key)
    if IS_DRAWN:
        chosen = tl.where(is_key_of_nan(key), _NO_TOKEN, chosen)
    if parents_ptr is None:
        is_draft = index < num_drafts
        draft = tl.load(drafts_ptr + index * drafts_stride_n, mask=is_draft, other=_NO_TOKEN)
        accepted = tl.min(tl.where(is_draft & (draft == chosen), num_drafts, tl.minimum(index, num_drafts)), axis=0)
        accepted = accepted.to(tl.int64)
        tl.store(tokens_ptr + index, chosen, mask=index <= num_drafts)
        tl.store(path_ptr + index, index.to(tl.int64), mask=index <= num_drafts)
    else:
        is_draft = (index > 0) & (index <= num_drafts)
        draft = tl.load(drafts_ptr + (index - 1) * drafts_stride_n, mask=is_draft, other=_NO_TOKEN)
        parent = tl.load(parents_ptr + row * parents_stride + index, mask=is_draft, other=-1).to(tl.int32)
        node = tl.full([], 0, tl.int32)
        accepted = tl.full([], 0, tl.int64)
        for step in range(depth + 1):
            token = tl.sum(tl.where(index == node, chosen, 0), axis=0)
            tl.store(tokens_ptr + step, token)
            tl.store(path_ptr + step, node.to(tl.int64))
            # Up to the last accepted node `accepted` equals `step`; from then on it is less, and the path stays.
            fits = is_draft & (parent == node) & (draft == token) & (accepted == step) & (step < depth)
            child = tl.min(tl.where(fits, index, NODES), axis=0)
            accepted += tl.where(child < NODES, 1, 0)
            node = tl.where(child < NODES, child, node)
    tl.store(out.accepted + row, accepted)
    tl.store(out.committed + row, accepted + 1)


def verify_tree(scores, drafts, parents, depths, seeds, lengths, depth):
    """See `verification_reference.verify_tree`; equal, except for tokens that rounding decides. Two or three launches.

    The rows of `scores` may have any strides.
    """
    batch, num_drafts = drafts.shape
    width = num_drafts + 1
    assert scores.shape[:2] == (batch, width), "shapes must agree"
    assert depth == num_drafts if parents is None else parents.shape == (batch, width), "shapes must agree"
    assert parents is None or parents.stride(1) == depths.stride(1) == 1, "rows must have unit stride"
    if seeds is None:
        keys = argmax_keys(scores)
    else:
        assert scores.dtype == torch.float32, "scores must be float32"
        keys = draw_keys(scores, None, depths, seeds, lengths, None, None, RandomStream.TARGET)
    out, path = empty_result(batch, depth, scores.device), drafts.new_empty(batch, depth + 1)
    nodes, blocks = block_of_steps(width), triton.next_power_of_2(keys.shape[1])
    _walk_kernel[(batch,)](
        keys,
        drafts,
        parents,
        out,
        path,
        *drafts.stride(),
        0 if parents is None else parents.stride(0),
        num_drafts,
        keys.shape[1],
        depth,
        IS_DRAWN=seeds is not None,
        NODES=nodes,
        BLOCKS=blocks,
        num_warps=4 if nodes * blocks <= 4096 else 8,
    )
    return *out, path
