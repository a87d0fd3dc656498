"""Triton log-probabilities of given tokens; the reference is `token_logprobs_reference.token_logprobs`.

Shapes: scores `[B, n, V]`, tokens and result `[B, n]`:

    result[b, i] = scores[b, i, t] - log(sum over v of exp(scores[b, i, v])),  t = tokens[b, i]

NaN where t is no token of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .reduction import merge_softmax_stats, softmax_stats


# do_not_specialize: else Triton compiles variants for values that are 1 or divisible by 16, which are no faster.
@triton.jit(do_not_specialize=["tokens_stride_b", "tokens_stride_n", "width", "num_stats"])
def _token_logprobs_kernel(
    scores_ptr,
    tokens_ptr,
    maxima_ptr,
    totals_ptr,
    out_ptr,
    scores_stride_b,
    scores_stride_n,
    tokens_stride_b,
    tokens_stride_n,
    width,
    num_stats,
    vocabulary,
    STATS: tl.constexpr,
):
    """The log-probability of one token.

    Grid: (B * n,). Reads the row's softmax statistics `maxima` and `totals` `[B * n, stat blocks]`, its token and the
    score of that; writes one element of `out` `[B, n]`.
    """
    row = tl.program_id(0).to(tl.int64)
    stat = tl.arange(0, STATS)[None, :]
    is_stat = stat < num_stats
    maxima = tl.load(maxima_ptr + row * num_stats + stat, mask=is_stat, other=float("-inf"))
    totals = tl.load(totals_ptr + row * num_stats + stat, mask=is_stat, other=0.0)
    base, total = merge_softmax_stats(maxima, totals)
    token = tl.load(tokens_ptr + row // width * tokens_stride_b + row % width * tokens_stride_n)
    is_token = (token >= 0) & (token < vocabulary)
    scores_ptr += row // width * scores_stride_b + row % width * scores_stride_n
    score = tl.load(scores_ptr + token, mask=is_token, other=0.0).to(tl.float32)
    found = tl.sum(score - base - tl.log(total), axis=0)
    tl.store(out_ptr + row, tl.where(is_token, found, float("nan")))


def token_logprobs(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """See `token_logprobs_reference.token_logprobs`; equal up to rounding. Two launches."""
    assert tokens.shape == scores.shape[:2], "shapes must agree"
    stats = softmax_stats(scores)
    out = torch.empty(tokens.shape, dtype=torch.float32, device=scores.device)
    _token_logprobs_kernel[(tokens.numel(),)](
        scores,
        tokens,
        *stats,
        out,
        *scores.stride()[:2],
        *tokens.stride(),
        tokens.shape[1],
        stats.shape[2],
        scores.shape[2],
        STATS=triton.next_power_of_2(stats.shape[2]),
    )
    return out
