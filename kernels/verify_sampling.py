"""Triton verification by rejection sampling, see `verify_sampling_reference`."""

from __future__ import annotations

import triton
import triton.language as tl

from . import reduction
from .jit import Unspecialised, kernel
from .random import uniform
from .recovered_token import Laws, draft_prob, has_probs, merge_recovered, score_of, store_next
from .reduction import empty_result, merge_softmax_stats, softmax_stats
from .types import RandomStream

_ACCEPT = tl.constexpr(int(RandomStream.ACCEPT))


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
    """Count the accepted drafts of a row, and write the keys of one block of the distribution of the token after them.

    Grid: (B, blocks). Reads the softmax statistics `stats` `[B * (K + 1), stat blocks]`, the drafts of
    the row and their probabilities, and BLOCK elements of `scores[b, a]` and `draft_probs[b, a]` of `laws`, where a is
    the number of accepted drafts, which every program computes. Writes what `store_next` does.
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
    p_draft = tl.exp(score_of(laws, row, wide_step, draft, is_known) - bases) / totals
    q_draft = tl.full([STEPS], 1.0, tl.float32)
    count = num_drafts
    if laws.draft_probs is not None:
        q_draft = draft_prob(laws, row, wide_step, draft, is_known)
        count = tl.min(tl.where(is_draft & (has_probs(q_draft) == 0), step, num_drafts), axis=0)
    number = uniform(seed, length, step * 0, step, _ACCEPT)
    is_accepted = is_draft & (number * q_draft < p_draft)
    accepted = tl.min(tl.where(is_accepted, num_drafts, tl.minimum(step, num_drafts)), axis=0)
    is_bonus = accepted == count

    is_next = step == accepted
    base = tl.sum(tl.where(is_next, bases, 0.0), axis=0)
    total = tl.sum(tl.where(is_next, totals, 0.0), axis=0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < laws.vocabulary
    p_next = tl.exp(score_of(laws, row, accepted.to(tl.int64), token, is_token) - base) / total
    if laws.draft_probs is not None:
        is_read = token < tl.where(is_bonus, 0, laws.vocabulary)
        residual = tl.maximum(p_next - draft_prob(laws, row, accepted.to(tl.int64), token, is_read), 0.0)
    else:
        rejected = tl.sum(tl.where(is_next & is_draft, draft, 0), axis=0)
        residual = tl.where(token == rejected, 0.0, p_next)
    residual = tl.where(is_bonus, p_next, residual)
    store_next(keys_ptr, out, residual, p_next, seed, length, accepted, token, is_token, BLOCK)


def verify_sampling(scores, drafts, draft_probs, draft_ids, seeds, lengths):
    """See `verify_sampling_reference.verify_sampling`; equal up to rounding. Three launches.

    `scores` are read once for the softmax statistics of all rows, and once more in the row of the recovered or bonus
    token.
    """
    num_drafts = drafts.shape[1]
    laws = Laws.of(scores, drafts, draft_probs, draft_ids)
    assert seeds.is_contiguous() and lengths.is_contiguous()
    keys, stats, out = laws.empty_keys(), softmax_stats(scores), empty_result(*drafts.shape, drafts.device)
    steps, num_stats = triton.next_power_of_2(num_drafts + 1), triton.next_power_of_2(stats[0].shape[1])
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
    merge_recovered(keys, drafts, out)
    return out
