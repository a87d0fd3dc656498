"""Triton choice of draft tokens from the logits of a drafter; the reference is `draft_sampling_reference`.

Shapes: logits `[B, n, V_d]`, temperatures, seeds and lengths `[B]`, tokens or indices `[B, n]`, probs `[B, n, V_d]`.

    best_draft = target_ids[argmax over v of logits[b, i, v]]
    draw_draft: q_i = softmax(logits[b, i] / temperatures[b]), index = argmax over v of q_i(v) / e_i(v)

    add_target_noise = logits[b, i, v] / temperatures[b] - log(g_i(v))

with e_i(v) = race_times(seeds[b], lengths[b], v, DRAFT, first + i), and
g_i(v) = race_times(seeds[b], lengths[b] + first + i, target_ids[v], TARGET).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import reduction
from .dependent_launch import dependent_launch, wait_for_inputs
from .random import race_times, race_times_of
from .reduction import LEAST_KEY, argmax_keys, index_of_key, largest_key, merge_softmax_stats, softmax_stats
from .types import RandomStream

_DRAFT, _TARGET = tl.constexpr(int(RandomStream.DRAFT)), tl.constexpr(int(RandomStream.TARGET))


# do_not_specialize: else Triton compiles variants for values that are 1 or divisible by 16, which are no faster.
@triton.jit(
    do_not_specialize=[
        "temperatures_stride",
        "seeds_stride",
        "lengths_stride",
        "first",
        "width",
        "num_stats",
    ]
)
def _draw_kernel(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    lengths_ptr,
    maxima_ptr,
    totals_ptr,
    probs_ptr,
    keys_ptr,
    logits_stride_b,
    logits_stride_n,
    temperatures_stride,
    seeds_stride,
    lengths_stride,
    first,
    width,
    num_stats,
    vocabulary,
    STATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Probabilities of one block of a row, and the key of the maximum of q / e.

    Grid: (B * n, blocks). Reads `maxima` and `totals` `[B * n, stat blocks]`, the row's temperature, seed and length,
    and BLOCK elements of `logits`; writes these elements of `probs` and one element of `keys` `[B * n, blocks]`.
    """
    row = tl.program_id(0).to(tl.int64)
    batch, step = row // width, row % width
    temperature = tl.load(temperatures_ptr + batch * temperatures_stride)
    seed = tl.load(seeds_ptr + batch * seeds_stride)
    length = tl.load(lengths_ptr + batch * lengths_stride)
    stat = tl.arange(0, STATS)[None, :]
    maxima = tl.load(maxima_ptr + row * num_stats + stat, mask=stat < num_stats, other=float("-inf"))
    base, total = merge_softmax_stats(
        maxima, tl.load(totals_ptr + row * num_stats + stat, mask=stat < num_stats, other=0.0)
    )

    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocabulary
    logits_ptr += batch * logits_stride_b + step * logits_stride_n
    logit = tl.load(logits_ptr + token, mask=is_token, other=float("-inf")).to(tl.float32)
    prob = tl.exp(logit / temperature - base) / total
    tl.store(probs_ptr + row * vocabulary + token, prob, mask=is_token)
    noise = race_times(seed, length, tl.program_id(1) * BLOCK, first + step, _DRAFT, BLOCK)
    key = largest_key(prob / noise, token, is_token)
    tl.store(keys_ptr + row * tl.num_programs(1) + tl.program_id(1), key)


@triton.jit(do_not_specialize=["num_blocks"])
def _merge_draft_kernel(
    keys_ptr,
    target_ids_ptr,
    out_ptr,
    num_blocks,
    BLOCKS: tl.constexpr,
    HAS_IDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the keys of a row, and map the index to the target's vocabulary if HAS_IDS.

    Grid: (B * n,). Reads `keys` `[B * n, blocks]` and one element of `target_ids` `[V_d]`; writes one of `out`
    `[B * n]`.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    wait_for_inputs(PDL)
    keys = tl.load(keys_ptr + row * num_blocks + block, mask=block < num_blocks, other=LEAST_KEY)
    index = index_of_key(tl.max(keys, axis=0))
    if HAS_IDS:
        index = tl.load(target_ids_ptr + index)
    tl.store(out_ptr + row, index)


def _merge_draft(keys: torch.Tensor, target_ids: torch.Tensor | None, shape: torch.Size) -> torch.Tensor:
    """Tokens in the given shape from `keys` `[B * n, blocks]`."""
    out = torch.empty(shape, dtype=torch.int64, device=keys.device)
    _merge_draft_kernel[(keys.shape[0],)](
        keys,
        target_ids,
        out,
        keys.shape[1],
        BLOCKS=triton.next_power_of_2(keys.shape[1]),
        HAS_IDS=target_ids is not None,
        **dependent_launch(keys.device),
    )
    return out


def _with_batch(values: torch.Tensor, dims: int) -> torch.Tensor:
    return values if values.dim() == dims else values[None]


def best_draft(logits: torch.Tensor, target_ids: torch.Tensor | None = None) -> torch.Tensor:
    """See `draft_sampling_reference.best_draft`; equal in every element. Two launches."""
    assert target_ids is None or target_ids.is_contiguous(), "target_ids must be contiguous"
    return _merge_draft(argmax_keys(_with_batch(logits, 3)), target_ids, logits.shape[:-1])


def draw_draft(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, lengths: torch.Tensor, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `draft_sampling_reference.draw_draft`; equal up to rounding. Three launches, which read the logits twice."""
    batch, width, vocabulary = logits.shape
    stats = softmax_stats(logits, temperatures)
    probs = torch.empty(batch, width, vocabulary, dtype=torch.float32, device=logits.device)
    keys = torch.empty(
        batch * width, triton.cdiv(vocabulary, reduction.SAMPLE_BLOCK), dtype=torch.int64, device=logits.device
    )
    _draw_kernel[keys.shape](
        logits,
        temperatures,
        seeds,
        lengths,
        *stats,
        probs,
        keys,
        *logits.stride()[:2],
        temperatures.stride(0),
        seeds.stride(0),
        lengths.stride(0),
        first,
        width,
        stats.shape[2],
        vocabulary,
        STATS=triton.next_power_of_2(stats.shape[2]),
        BLOCK=reduction.SAMPLE_BLOCK,
        num_warps=reduction.SAMPLE_WARPS,
    )
    return _merge_draft(keys, None, logits.shape[:2]), probs


@triton.jit(do_not_specialize=["temperatures_stride", "seeds_stride", "lengths_stride", "first", "width"])
def _target_noise_kernel(
    logits_ptr,
    target_ids_ptr,
    temperatures_ptr,
    seeds_ptr,
    lengths_ptr,
    out_ptr,
    logits_stride_b,
    logits_stride_n,
    temperatures_stride,
    seeds_stride,
    lengths_stride,
    first,
    width,
    vocabulary,
    BLOCK: tl.constexpr,
):
    """One block of a row. Grid: (B * n, blocks). Reads BLOCK elements of `logits` and `target_ids`, and the row's
    temperature, seed and length; writes these elements of `out` `[B * n, V_d]`.
    """
    row = tl.program_id(0).to(tl.int64)
    batch, step = row // width, row % width
    seed = tl.load(seeds_ptr + batch * seeds_stride)
    position = tl.load(lengths_ptr + batch * lengths_stride) + first + step
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = index < vocabulary
    token = index
    if target_ids_ptr is not None:
        token = tl.load(target_ids_ptr + index, mask=is_token, other=0).to(tl.int32)
    logits_ptr += batch * logits_stride_b + step * logits_stride_n
    logit = tl.load(logits_ptr + index, mask=is_token, other=0.0).to(tl.float32)
    logit = logit / tl.load(temperatures_ptr + batch * temperatures_stride)
    noise = race_times_of(seed, position, token, _TARGET)
    tl.store(out_ptr + row * vocabulary + index, logit - tl.log(noise), mask=is_token)


def add_target_noise(
    logits: torch.Tensor,
    target_ids: torch.Tensor | None,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    lengths: torch.Tensor,
    first: int,
) -> torch.Tensor:
    """See `draft_sampling_reference.add_target_noise`; equal up to rounding. One launch."""
    batch, width, vocabulary = logits.shape
    assert logits.stride(2) == 1 and (target_ids is None or target_ids.is_contiguous()), "rows must have unit stride"
    out = torch.empty(batch, width, vocabulary, dtype=torch.float32, device=logits.device)
    _target_noise_kernel[(batch * width, triton.cdiv(vocabulary, reduction.SAMPLE_BLOCK))](
        logits,
        target_ids,
        temperatures,
        seeds,
        lengths,
        out,
        *logits.stride()[:2],
        temperatures.stride(0),
        seeds.stride(0),
        lengths.stride(0),
        first,
        width,
        vocabulary,
        BLOCK=reduction.SAMPLE_BLOCK,
        num_warps=reduction.SAMPLE_WARPS,
    )
    return out
