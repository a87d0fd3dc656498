"""Triton block verification, see `verify_block_reference`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import reduction
from .jit import Unspecialised, kernel
from .random import uniform
from .recovered_token import Laws, draft_prob, has_probs, merge_recovered, score_of, store_next
from .reduction import empty_result, load_softmax, softmax_stats
from .types import RandomStream

_ACCEPT = tl.constexpr(int(RandomStream.ACCEPT))


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
    """Softmax base and normaliser of every row of scores of a batch row, and the weights w_i.

    Grid: (B,). Reads `stats` `[B * (K + 1), stat blocks]`, and the target's and the draft probability of
    each draft; writes `row_stats` `[B, K + 1, 3]` float32: base, normaliser, w_i, which is NaN after the first row
    without a distribution.
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
        p_draft = tl.exp(score_of(laws, row, step, draft, is_known) - base) / total
        q_draft = draft_prob(laws, row, step, draft, is_known)
        are_known = (weight == weight) & has_probs(q_draft) & (total > 0.0)
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
    """Sum of max(w_i p_i - q_i, 0) over one block of the vocabulary.

    Grid: (B * K, blocks). Reads `row_stats[b, i]`, and BLOCK elements of `scores[b, i]` and `draft_probs[b, i]`; writes
    one element of `excesses` `[B * K, blocks]` float32.
    """
    cell = tl.program_id(0).to(tl.int64)
    row, step = cell // num_drafts, cell % num_drafts
    row_stat_ptr = row_stats_ptr + (row * (num_drafts + 1) + step) * 3
    base, total, weight = tl.load(row_stat_ptr), tl.load(row_stat_ptr + 1), tl.load(row_stat_ptr + 2)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < laws.vocabulary
    score = score_of(laws, row, step, token, is_token)
    q = draft_prob(laws, row, step, token, is_token)
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
    """Count the accepted drafts of a row, and write the keys of one block of the distribution of the token after them.

    Grid: (B, blocks). Reads `row_stats` and `excesses` of the row, and BLOCK elements of `scores[b, a]` and
    `draft_probs[b, a]` of `laws`, where a is the number of accepted drafts, which every program computes. Writes what
    `store_next` does.
    """
    row = tl.program_id(0).to(tl.int64)
    seed = tl.load(seeds_ptr + row)
    length = tl.load(lengths_ptr + row)
    remaining = tl.load(remaining_ptr + row)
    count = tl.maximum(tl.minimum(remaining, num_drafts), 0).to(tl.int32)

    # Element i is for the prefix of the first i drafts, 1 to K; its random number is that of its last draft.
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
    p_next = tl.exp(score_of(laws, row, accepted.to(tl.int64), token, is_token) - base) / total
    is_read = token < tl.where(is_bonus, 0, laws.vocabulary)
    q_next = draft_prob(laws, row, accepted.to(tl.int64), token, is_read)
    residual = tl.where(is_bonus, p_next, tl.maximum(weight_next * p_next - q_next, 0.0))
    store_next(keys_ptr, out, residual, p_next, seed, length, accepted, token, is_token, BLOCK)


def verify_block(scores, drafts, draft_probs, draft_ids, seeds, lengths, remaining):
    """See `verify_block_reference.verify_block`; equal up to rounding. Five launches.

    `scores` are read once for the softmax statistics of all rows, once with `draft_probs` in all rows but the last for
    e_i, and once more in the row of the recovered or bonus token.
    """
    batch, num_drafts = drafts.shape
    laws = Laws.of(scores, drafts, draft_probs, draft_ids)
    assert seeds.is_contiguous() and lengths.is_contiguous() and remaining.is_contiguous()
    keys, stats, out = laws.empty_keys(), softmax_stats(scores), empty_result(*drafts.shape, drafts.device)
    # Of each row of scores the base and the normaliser of its softmax, and w_i of the drafts before it.
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
        STEPS=triton.next_power_of_2(num_drafts + 1),
        STATS=triton.next_power_of_2(shape[1]),
        BLOCK=reduction.SAMPLE_BLOCK,
        num_warps=reduction.SAMPLE_WARPS,
    )
    merge_recovered(keys, drafts, out)
    return out
