"""Triton choice of draft tokens from the logits of a drafter; the references are in `draft_sampling_reference`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import reduction
from .launch import Unspecialised, kernel
from .random import race_times, race_times_of
from .reduction import argmax_keys, largest_key, load_softmax, merge_keys, softmax_stats
from .types import RandomStream

_DRAFT, _TARGET = tl.constexpr(int(RandomStream.DRAFT)), tl.constexpr(int(RandomStream.TARGET))


@kernel
def _draw_kernel(
    scores_ptr,
    temperatures_ptr,
    depths_ptr,
    seeds_ptr,
    lengths_ptr,
    stats,
    probs_ptr,
    keys_ptr,
    scores_strides,
    depths_stride: Unspecialised,
    first: Unspecialised,
    width: Unspecialised,
    num_stats: Unspecialised,
    vocabulary,
    STREAM: tl.constexpr,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The key of the maximum of p / e in one block of a row; also the probabilities p if `probs` is given.

    Grid: (B * n, blocks). Reads the `stats` `[B * n, stat blocks]`, the row's temperature, seed, length and depth, and
    BLOCK elements of `scores`; writes these elements of `probs` and one element of `keys` `[B * n, blocks]`.
    """
    row = tl.program_id(0).to(tl.int64)
    batch, index = row // width, row % width
    if temperatures_ptr is not None:
        temperature = tl.load(temperatures_ptr + batch)
    seed = tl.load(seeds_ptr + batch)
    position = tl.load(lengths_ptr + batch)
    if STREAM == _DRAFT:
        step = first + index
    else:
        position += tl.load(depths_ptr + batch * depths_stride + index) if depths_ptr is not None else index
        step = position * 0
    base, total = load_softmax(stats, row, num_stats, STATS)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocabulary
    scores_ptr += batch * scores_strides[0] + index * scores_strides[1]
    score = tl.load(scores_ptr + token, mask=is_token, other=float("-inf")).to(tl.float32)
    if temperatures_ptr is not None:
        score = score / temperature
    prob = tl.exp(score - base) / total
    if probs_ptr is not None:
        tl.store(probs_ptr + row * vocabulary + token, prob, mask=is_token)
    noise = race_times(seed, position, tl.program_id(1) * BLOCK, step, STREAM, BLOCK)
    tl.store(keys_ptr + row * tl.num_programs(1) + tl.program_id(1), largest_key(prob / noise, token, is_token))


def draw_keys(
    scores: torch.Tensor,
    temperatures: torch.Tensor | None,
    depths: torch.Tensor | None,
    seeds: torch.Tensor,
    lengths: torch.Tensor,
    first: int | None,
    probs: torch.Tensor | None,
    stream: RandomStream,
) -> torch.Tensor:
    """Keys `[B * n, blocks]` of tokens that are drawn from `scores` `[B, n, V]`. Two launches.

    Args:
        temperatures: `[B]`, divisors of the scores; None for 1.
        depths: for the stream `TARGET`, `[B, n]`, added to `lengths`; None for 0 to n - 1.
        first: for the stream `DRAFT`, index of the first draft in the round.
        probs: `[B, n, V]`, contiguous, written with the distributions; or None.
    """
    batch, width, vocabulary = scores.shape
    assert seeds.is_contiguous() and lengths.is_contiguous()
    stats = softmax_stats(scores, temperatures)
    shape = batch * width, triton.cdiv(vocabulary, reduction.SAMPLE_BLOCK)
    keys = torch.empty(shape, dtype=torch.int64, device=scores.device)
    _draw_kernel[shape](
        scores,
        temperatures,
        depths,
        seeds,
        lengths,
        stats,
        probs,
        keys,
        scores.stride()[:2],
        None if depths is None else depths.stride(0),
        first,
        width,
        stats[0].shape[1],
        vocabulary,
        STREAM=int(stream),
        STATS=triton.next_power_of_2(stats[0].shape[1]),
        BLOCK=reduction.SAMPLE_BLOCK,
        num_warps=reduction.SAMPLE_WARPS,
    )
    return keys


def best_draft(logits, target_ids=None):
    """See `draft_sampling_reference.best_draft`; equal in every element. Two launches."""
    assert target_ids is None or target_ids.is_contiguous(), "target_ids must be contiguous"
    return merge_keys(argmax_keys(logits if logits.dim() == 3 else logits[None]), logits.shape[:-1], target_ids)


def draw_draft(logits, temperatures, seeds, lengths, first):
    """See `draft_sampling_reference.draw_draft`; equal up to rounding. Three launches, which read the logits twice."""
    probs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    keys = draw_keys(logits, temperatures, None, seeds, lengths, first, probs, RandomStream.DRAFT)
    return merge_keys(keys, logits.shape[:2]), probs


@kernel
def _target_noise_kernel(
    logits_ptr,
    target_ids_ptr,
    temperatures_ptr,
    seeds_ptr,
    lengths_ptr,
    out_ptr,
    logits_strides,
    first: Unspecialised,
    pace: Unspecialised,
    width: Unspecialised,
    vocabulary,
    BLOCK: tl.constexpr,
):
    """One block of a row. Grid: (B * n, blocks). Reads BLOCK elements of `logits` and `target_ids`, and the row's
    temperature, seed and length; writes these elements of `out` `[B * n, V_d]`."""
    row = tl.program_id(0).to(tl.int64)
    batch, step = row // width, row % width
    seed = tl.load(seeds_ptr + batch)
    position = tl.load(lengths_ptr + batch) + first + pace * step
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = index < vocabulary
    token = index
    if target_ids_ptr is not None:
        token = tl.load(target_ids_ptr + index, mask=is_token, other=0).to(tl.int32)
    logits_ptr += batch * logits_strides[0] + step * logits_strides[1]
    logit = tl.load(logits_ptr + index, mask=is_token, other=0.0).to(tl.float32)
    logit = logit / tl.load(temperatures_ptr + batch)
    noise = race_times_of(seed, position, token, _TARGET)
    tl.store(out_ptr + row * vocabulary + index, logit - tl.log(noise), mask=is_token)


def add_target_noise(logits, target_ids, temperatures, seeds, lengths, first, is_one_draft):
    """See `draft_sampling_reference.add_target_noise`; equal up to rounding. One launch."""
    batch, width, vocabulary = logits.shape
    assert logits.stride(2) == 1 and (target_ids is None or target_ids.is_contiguous()), "rows must have unit stride"
    assert temperatures.is_contiguous() and seeds.is_contiguous() and lengths.is_contiguous()
    out = torch.empty(batch, width, vocabulary, dtype=torch.float32, device=logits.device)
    _target_noise_kernel[(batch * width, triton.cdiv(vocabulary, reduction.SAMPLE_BLOCK))](
        logits,
        target_ids,
        temperatures,
        seeds,
        lengths,
        out,
        logits.stride()[:2],
        first,
        0 if is_one_draft else 1,
        width,
        vocabulary,
        BLOCK=reduction.SAMPLE_BLOCK,
        num_warps=reduction.SAMPLE_WARPS,
    )
    return out
