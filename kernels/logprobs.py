"""Triton log-probabilities of given and of the likeliest tokens; the references are in `logprobs_reference`.

A row is cut into groups of tokens (see `reduction.group_keys`). The W largest logits of the row are in the W groups
whose largest logits are the largest, and only these are read again.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .launch import Unspecialised, kernel, wait_for_inputs
from .reduction import (
    LEAST_KEY,
    LEAST_ORDER,
    MOST_OF_GROUP,
    group_keys,
    index_of_key,
    load_softmax,
    order_of,
    order_of_key,
    softmax_stats,
    take_largest,
    value_of,
    without_nan,
)

# Fewest tokens of a group, and elements of a warp, whose reductions need no barrier.
_LEAST_GROUP, _OF_A_WARP = 32, 1024


@kernel
def _token_logprobs_kernel(
    scores_ptr,
    tokens_ptr,
    stats,
    out_ptr,
    scores_strides,
    tokens_stride_b: Unspecialised,
    tokens_stride_n: Unspecialised,
    width: Unspecialised,
    num_stats: Unspecialised,
    vocabulary,
    STATS: tl.constexpr,
):
    """The log-probability of one token.

    Grid: (B * n,). Reads the row's softmax statistics `stats` `[B * n, stat blocks]`, its token and that token's score;
    writes one element of `out` `[B, n]`.
    """
    row = tl.program_id(0).to(tl.int64)
    wait_for_inputs()
    base, total = load_softmax(stats, row, num_stats, STATS)
    token = tl.load(tokens_ptr + row // width * tokens_stride_b + row % width * tokens_stride_n)
    is_token = (token >= 0) & (token < vocabulary)
    scores_ptr += row // width * scores_strides[0] + row % width * scores_strides[1]
    score = tl.load(scores_ptr + token, mask=is_token, other=0.0).to(tl.float32)
    found = tl.sum(score - base - tl.log(total), axis=0)
    tl.store(out_ptr + row, tl.where(is_token, found, float("nan")))


def token_logprobs(scores, tokens):
    """See `logprobs_reference.token_logprobs`; equal up to rounding. Two launches."""
    assert tokens.shape == scores.shape[:2], "shapes must agree"
    stats = softmax_stats(scores)
    out = torch.empty(tokens.shape, dtype=torch.float32, device=scores.device)
    _token_logprobs_kernel[(tokens.numel(),)](
        scores,
        tokens,
        stats,
        out,
        scores.stride()[:2],
        *tokens.stride(),
        tokens.shape[1],
        stats[0].shape[1],
        scores.shape[2],
        STATS=triton.next_power_of_2(stats[0].shape[1]),
    )
    return out


@kernel
def _likeliest_kernel(
    logits_ptr,
    keys_ptr,
    stats,
    target_ids_ptr,
    logprobs_ptr,
    tokens_ptr,
    strides,
    out_stride: Unspecialised,
    width: Unspecialised,
    vocabulary,
    num_blocks: Unspecialised,
    COUNT: tl.constexpr,
    CHOSEN: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    STATS: tl.constexpr,
):
    """The COUNT likeliest tokens of a row.

    Grid: (B * n,). Reads a row of `keys` `[B * n, KEYS at most]` and of both `stats` `[B * n, blocks]`, COUNT groups of
    `logits` `[B, n, V]`, and COUNT elements of `target_ids` if given; writes a row of `logprobs` and `tokens`
    `[B, n, COUNT]`. CHOSEN: COUNT or the next power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    to = row // width * out_stride + row % width * COUNT
    logits_ptr += row // width * strides[0] + row % width * strides[1]
    place, index = tl.arange(0, KEYS), tl.arange(0, CHOSEN)
    wait_for_inputs()
    base, total = load_softmax(stats, row, num_blocks, STATS)
    normaliser = tl.sum(base + tl.log(total), axis=0)
    num_keys = num_blocks * GROUPS
    keys = tl.load(keys_ptr + row * num_keys + place, mask=place < num_keys, other=LEAST_KEY)
    order, token = order_of_key(keys), index_of_key(keys).to(tl.int32)
    # The first token of each chosen group; `vocabulary` or more if there are fewer groups.
    first = tl.full([CHOSEN], vocabulary, tl.int32)
    for rank in range(COUNT):
        largest, at, order = take_largest(order, token)
        is_group = (index == rank) & (largest != LEAST_ORDER)
        first = tl.where(is_group, at // GROUP * GROUP, first)
    token = tl.reshape(first[:, None] + tl.arange(0, GROUP)[None, :], [CHOSEN * GROUP])
    is_token = token < vocabulary
    value = without_nan(tl.load(logits_ptr + token, mask=is_token, other=float("-inf")).to(tl.float32))
    order = order_of(value, is_token)
    for rank in range(COUNT):
        largest, found, order = take_largest(order, token)
        if target_ids_ptr is not None:
            found = tl.load(target_ids_ptr + found)
        tl.store(tokens_ptr + to + rank, found.to(tl.int64))
        tl.store(logprobs_ptr + to + rank, value_of(largest) - normaliser)


def likeliest_tokens(logits, target_ids, logprobs, tokens):
    """See `logprobs_reference.likeliest_tokens`; tokens are equal, log-probabilities equal up to rounding.

    Two launches, which depend only on shapes and strides.
    """
    (batch, width, vocabulary), count = logits.shape, tokens.shape[2]
    assert count <= vocabulary and logprobs.dtype == torch.float32, "there must be as many tokens"
    assert logprobs.shape == tokens.shape == (batch, width, count), "shapes must agree"
    assert logprobs.stride() == tokens.stride() and tokens[0].is_contiguous(), "a row of the batch must be contiguous"
    # About as many groups as tokens are read again.
    group = max(triton.next_power_of_2(math.isqrt(vocabulary // count)), _LEAST_GROUP)
    group = min(group, MOST_OF_GROUP)
    keys, stats = group_keys(logits, group, None, NAN_IS_LEAST=True)
    num_blocks, chosen = stats[0].shape[1], triton.next_power_of_2(count)
    num_keys = triton.next_power_of_2(keys.shape[1])
    _likeliest_kernel[(batch * width,)](
        logits,
        keys,
        stats,
        target_ids,
        logprobs,
        tokens,
        logits.stride()[:2],
        tokens.stride(0),
        width,
        vocabulary,
        num_blocks,
        COUNT=count,
        CHOSEN=chosen,
        GROUPS=keys.shape[1] // num_blocks,
        GROUP=group,
        KEYS=num_keys,
        STATS=triton.next_power_of_2(num_blocks),
        num_warps=min(max(max(num_keys, chosen * group) // _OF_A_WARP, 1), 8),
    )
