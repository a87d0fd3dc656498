"""Triton log-probabilities of given tokens, see `token_logprobs_reference`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Unspecialised, kernel
from .reduction import load_softmax, softmax_stats


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

    Grid: (B * n,). Reads the row's softmax statistics `stats` `[B * n, stat blocks]`, its token and the score of that;
    writes one element of `out` `[B, n]`.
    """
    row = tl.program_id(0).to(tl.int64)
    base, total = load_softmax(stats, row, num_stats, STATS)
    token = tl.load(tokens_ptr + row // width * tokens_stride_b + row % width * tokens_stride_n)
    is_token = (token >= 0) & (token < vocabulary)
    scores_ptr += row // width * scores_strides[0] + row % width * scores_strides[1]
    score = tl.load(scores_ptr + token, mask=is_token, other=0.0).to(tl.float32)
    found = tl.sum(score - base - tl.log(total), axis=0)
    tl.store(out_ptr + row, tl.where(is_token, found, float("nan")))


def token_logprobs(scores, tokens):
    """See `token_logprobs_reference.token_logprobs`; equal up to rounding. Two launches."""
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
