"""Triton passes over the vocabulary: greedy and sampling verification, and the drawing of drafts.

A row of scores is cut into blocks, one program each, in grids that depend on shapes alone; what the programs find, a
last kernel merges. The host reads nothing, so a CUDA graph can hold every function here. Of a block a program reports
a key: its largest value, made an integer of the same order, above the complement of that value's index. The largest key
of a row is then that of its largest value, and among equals of the lowest index.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .random import uniform
from .reference import Stream, Verdict

_ACCEPT = tl.constexpr(int(Stream.ACCEPT))
_TARGET = tl.constexpr(int(Stream.TARGET))
_DRAFT = tl.constexpr(int(Stream.DRAFT))
_LEAST_KEY = tl.constexpr(-(2**63))
_WORD = tl.constexpr(0xFFFFFFFF)

# Tokens that a program takes: where it only reads, and where it draws a random number for each.
SCAN_BLOCK = 4096
RACE_BLOCK = 1024
_SCAN_WARPS = 8
_RACE_WARPS = 4


@triton.jit
def _largest_key(value, index, is_valid):
    """Key of the first largest of float32 values; as in torch NaN counts as the largest, and zeros are equal."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(value != value, 0x7FFFFFFF, order)
    key = (order.to(tl.int64) << 32) | (_WORD - index.to(tl.int64))
    return tl.max(tl.where(is_valid, key, _LEAST_KEY), axis=0)


@triton.jit
def _index_of(key):
    return _WORD - (key & _WORD)


@triton.jit
def _merge_scans(maxima, totals):
    """Base and normaliser of rows from their blocks' `[rows, blocks]`: softmax is exp(score - base) / normaliser."""
    base = tl.max(maxima, axis=1)
    # A block or a row of -inf alone keeps it; exp(-inf - -inf) must not become NaN.
    base = tl.where(base == float("-inf"), 0.0, base)
    return base, tl.sum(totals * tl.exp(maxima - base[:, None]), axis=1)


# Triton would build anew for those of the arguments so named that are 1 or divisible by 16, to no gain.
@triton.jit(do_not_specialize=["width"])
def _argmax_kernel(scores_ptr, keys_ptr, scores_stride_b, scores_stride_n, width, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocabulary
    scores_ptr += row // width * scores_stride_b + row % width * scores_stride_n
    score = tl.load(scores_ptr + token, mask=is_token, other=0.0).to(tl.float32)
    key = _largest_key(score, token, is_token)
    tl.store(keys_ptr + row * tl.num_programs(1) + tl.program_id(1), key)


@triton.jit(do_not_specialize=["drafts_stride_b", "drafts_stride_n", "num_drafts", "num_blocks"])
def _merge_greedy_kernel(
    keys_ptr,
    drafts_ptr,
    tokens_ptr,
    accepted_ptr,
    committed_ptr,
    drafts_stride_b,
    drafts_stride_n,
    num_drafts,
    num_blocks,
    STEPS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, STEPS)
    block = tl.arange(0, BLOCKS)
    keys = tl.load(
        keys_ptr + (row * (num_drafts + 1) + step)[:, None] * num_blocks + block[None, :],
        mask=(step <= num_drafts)[:, None] & (block < num_blocks)[None, :],
        other=_LEAST_KEY,
    )
    token = _index_of(tl.max(keys, axis=1))
    is_draft = step < num_drafts
    draft = tl.load(drafts_ptr + row * drafts_stride_b + step * drafts_stride_n, mask=is_draft, other=-1)
    accepted = tl.min(tl.where(is_draft & (draft == token), num_drafts, tl.minimum(step, num_drafts)), axis=0)
    tl.store(tokens_ptr + row * (num_drafts + 1) + step, token, mask=step <= num_drafts)
    tl.store(accepted_ptr + row, accepted.to(tl.int64))
    tl.store(committed_ptr + row, accepted.to(tl.int64) + 1)


@triton.jit(do_not_specialize=["width"])
def _scan_kernel(
    scores_ptr,
    maxima_ptr,
    totals_ptr,
    scores_stride_b,
    scores_stride_n,
    width,
    vocabulary,
    temperature,
    BLOCK: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scores_ptr += row // width * scores_stride_b + row % width * scores_stride_n
    score = tl.load(scores_ptr + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    if HAS_TEMPERATURE:
        score = score / temperature
    maximum = tl.max(score, axis=0)
    base = tl.where(maximum == float("-inf"), 0.0, maximum)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(maxima_ptr + at, maximum)
    tl.store(totals_ptr + at, tl.sum(tl.exp(score - base), axis=0))


@triton.jit(
    do_not_specialize=[
        "drafts_stride_b",
        "drafts_stride_n",
        "seeds_stride",
        "lengths_stride",
        "num_drafts",
        "num_scans",
    ]
)
def _verify_kernel(
    scores_ptr,
    drafts_ptr,
    draft_probs_ptr,
    seeds_ptr,
    lengths_ptr,
    maxima_ptr,
    totals_ptr,
    keys_ptr,
    accepted_ptr,
    committed_ptr,
    scores_stride_b,
    scores_stride_n,
    drafts_stride_b,
    drafts_stride_n,
    draft_probs_stride_b,
    draft_probs_stride_n,
    seeds_stride,
    lengths_stride,
    num_drafts,
    num_scans,
    vocabulary,
    STEPS: tl.constexpr,
    SCANS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_PROBS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    seed = tl.load(seeds_ptr + row * seeds_stride)
    length = tl.load(lengths_ptr + row * lengths_stride)
    scores_ptr += row * scores_stride_b
    draft_probs_ptr += row * draft_probs_stride_b

    step = tl.arange(0, STEPS)
    scan = tl.arange(0, SCANS)
    at = (row * (num_drafts + 1) + step)[:, None] * num_scans + scan[None, :]
    is_scan = (step <= num_drafts)[:, None] & (scan < num_scans)[None, :]
    maxima = tl.load(maxima_ptr + at, mask=is_scan, other=float("-inf"))
    bases, totals = _merge_scans(maxima, tl.load(totals_ptr + at, mask=is_scan, other=0.0))

    is_draft = step < num_drafts
    draft = tl.load(drafts_ptr + row * drafts_stride_b + step * drafts_stride_n, mask=is_draft, other=0)
    # A draft that is no token has probability 0, and nothing outside the row is read for it.
    is_known = is_draft & (draft >= 0) & (draft < vocabulary)
    wide_step = step.to(tl.int64)
    score = tl.load(scores_ptr + wide_step * scores_stride_n + draft, mask=is_known, other=float("-inf"))
    p_draft = tl.exp(score - bases) / totals
    q_draft = tl.full([STEPS], 1.0, tl.float32)
    if HAS_PROBS:
        q_draft = tl.load(draft_probs_ptr + wide_step * draft_probs_stride_n + draft, mask=is_known, other=1.0)
    number = uniform(seed, length + step, step * 0, _ACCEPT)
    is_accepted = is_draft & (number * q_draft < p_draft)
    accepted = tl.min(tl.where(is_accepted, num_drafts, tl.minimum(step, num_drafts)), axis=0)
    is_bonus = accepted == num_drafts

    is_next = step == accepted
    base = tl.sum(tl.where(is_next, bases, 0.0), axis=0)
    total = tl.sum(tl.where(is_next, totals, 0.0), axis=0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocabulary
    score = tl.load(scores_ptr + accepted.to(tl.int64) * scores_stride_n + token, mask=is_token, other=float("-inf"))
    p_next = tl.exp(score - base) / total
    if HAS_PROBS:
        q_next = tl.load(
            draft_probs_ptr + accepted.to(tl.int64) * draft_probs_stride_n + token,
            mask=token < tl.where(is_bonus, 0, vocabulary),
            other=0.0,
        )
        residual = tl.maximum(p_next - q_next, 0.0)
    else:
        rejected = tl.sum(tl.where(is_next & is_draft, draft, 0), axis=0)
        residual = tl.where(token == rejected, 0.0, p_next)
    residual = tl.where(is_bonus, p_next, residual)

    # Whether the residual is empty shows when all programs are through, so each races both.
    cell = row * tl.num_programs(1) + tl.program_id(1)
    num_cells = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    time = -tl.log(uniform(seed, length + accepted, token, _TARGET))
    tl.store(keys_ptr + cell, _largest_key(residual / time, token, is_token))
    tl.store(keys_ptr + num_cells + cell, _largest_key(p_next / time, token, is_token))
    if tl.program_id(1) == 0:
        tl.store(accepted_ptr + row, accepted.to(tl.int64))
        tl.store(committed_ptr + row, accepted.to(tl.int64) + 1)


@triton.jit(do_not_specialize=["drafts_stride_b", "drafts_stride_n", "num_drafts", "num_blocks"])
def _merge_verify_kernel(
    keys_ptr,
    drafts_ptr,
    accepted_ptr,
    tokens_ptr,
    drafts_stride_b,
    drafts_stride_n,
    num_drafts,
    num_blocks,
    STEPS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    cell = row * num_blocks + block
    num_cells = tl.num_programs(0).to(tl.int64) * num_blocks
    recovered = tl.max(tl.load(keys_ptr + cell, mask=block < num_blocks, other=_LEAST_KEY), axis=0)
    drawn = tl.max(tl.load(keys_ptr + num_cells + cell, mask=block < num_blocks, other=_LEAST_KEY), axis=0)
    # The upper half of a key is 0 where no weight is positive.
    following = _index_of(tl.where((recovered >> 32) > 0, recovered, drawn))
    step = tl.arange(0, STEPS)
    draft = tl.load(drafts_ptr + row * drafts_stride_b + step * drafts_stride_n, mask=step < num_drafts, other=0)
    token = tl.where(step == tl.load(accepted_ptr + row), following, draft)
    tl.store(tokens_ptr + row * (num_drafts + 1) + step, token, mask=step <= num_drafts)


@triton.jit(
    do_not_specialize=[
        "seeds_stride_b",
        "seeds_stride_n",
        "positions_stride_b",
        "positions_stride_n",
        "width",
        "num_scans",
    ]
)
def _draw_kernel(
    logits_ptr,
    seeds_ptr,
    positions_ptr,
    maxima_ptr,
    totals_ptr,
    probs_ptr,
    keys_ptr,
    logits_stride_b,
    logits_stride_n,
    seeds_stride_b,
    seeds_stride_n,
    positions_stride_b,
    positions_stride_n,
    width,
    num_scans,
    vocabulary,
    temperature,
    SCANS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    batch, step = row // width, row % width
    seed = tl.load(seeds_ptr + batch * seeds_stride_b + step * seeds_stride_n)
    position = tl.load(positions_ptr + batch * positions_stride_b + step * positions_stride_n)
    scan = tl.arange(0, SCANS)[None, :]
    maxima = tl.load(maxima_ptr + row * num_scans + scan, mask=scan < num_scans, other=float("-inf"))
    base, total = _merge_scans(maxima, tl.load(totals_ptr + row * num_scans + scan, mask=scan < num_scans, other=0.0))

    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocabulary
    logits_ptr += batch * logits_stride_b + step * logits_stride_n
    logit = tl.load(logits_ptr + token, mask=is_token, other=float("-inf")).to(tl.float32)
    prob = tl.exp(logit / temperature - base) / total
    tl.store(probs_ptr + row * vocabulary + token, prob, mask=is_token)
    time = -tl.log(uniform(seed, position, token, _DRAFT))
    key = _largest_key(prob / time, token, is_token)
    tl.store(keys_ptr + row * tl.num_programs(1) + tl.program_id(1), key)


@triton.jit(do_not_specialize=["num_blocks"])
def _merge_draft_kernel(keys_ptr, target_ids_ptr, out_ptr, num_blocks, BLOCKS: tl.constexpr, HAS_IDS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    keys = tl.load(keys_ptr + row * num_blocks + block, mask=block < num_blocks, other=_LEAST_KEY)
    index = _index_of(tl.max(keys, axis=0))
    if HAS_IDS:
        index = tl.load(target_ids_ptr + index)
    tl.store(out_ptr + row, index)


def _argmax_keys(scores: torch.Tensor) -> torch.Tensor:
    """Keys `[B * n, blocks]` of `scores` `[B, n, V]`."""
    batch, width, vocabulary = scores.shape
    assert scores.dtype in (torch.float32, torch.bfloat16, torch.float16), "scores must fit float32"
    assert scores.stride(2) == 1 or vocabulary == 1, "rows must have unit stride"
    keys = torch.empty(batch * width, triton.cdiv(vocabulary, SCAN_BLOCK), dtype=torch.int64, device=scores.device)
    _argmax_kernel[keys.shape](
        scores, keys, *scores.stride()[:2], width, vocabulary, BLOCK=SCAN_BLOCK, num_warps=_SCAN_WARPS
    )
    return keys


def _scan(scores: torch.Tensor, temperature: float | None = None) -> torch.Tensor:
    """Maximum and normaliser of each block of `scores` `[B, n, V]`: `[2, B * n, blocks]` float32."""
    batch, width, vocabulary = scores.shape
    assert scores.stride(2) == 1 or vocabulary == 1, "rows must have unit stride"
    scans = torch.empty(
        2, batch * width, triton.cdiv(vocabulary, SCAN_BLOCK), dtype=torch.float32, device=scores.device
    )
    _scan_kernel[scans.shape[1:]](
        scores,
        *scans,
        *scores.stride()[:2],
        width,
        vocabulary,
        float(temperature or 1.0),
        BLOCK=SCAN_BLOCK,
        HAS_TEMPERATURE=temperature is not None,
        num_warps=_SCAN_WARPS,
    )
    return scans


def _empty_verdict(drafts: torch.Tensor) -> Verdict:
    batch, num_drafts = drafts.shape
    return Verdict(
        torch.empty(batch, num_drafts + 1, dtype=torch.int64, device=drafts.device),
        torch.empty(batch, dtype=torch.int64, device=drafts.device),
        torch.empty(batch, dtype=torch.int64, device=drafts.device),
    )


def verify_greedy(scores: torch.Tensor, drafts: torch.Tensor) -> Verdict:
    """See `reference.verify_greedy`, equal in every element. Two launches; rows of `scores` may lie anywhere."""
    batch, num_drafts = drafts.shape
    assert scores.shape[:2] == (batch, num_drafts + 1), "shapes must agree"
    keys, out = _argmax_keys(scores), _empty_verdict(drafts)
    _merge_greedy_kernel[(batch,)](
        keys,
        drafts,
        *out,
        *drafts.stride(),
        num_drafts,
        keys.shape[1],
        STEPS=triton.next_power_of_2(num_drafts + 1),
        BLOCKS=triton.next_power_of_2(keys.shape[1]),
    )
    return out


def verify_sampling(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    seeds: torch.Tensor,
    lengths: torch.Tensor,
) -> Verdict:
    """See `reference.verify_sampling`: the same up to rounding. Three launches.

    One pass over all rows of `scores` for their normalisers, and one over the row whose token is drawn. Every program
    of the second works out for itself how many drafts are accepted.
    """
    batch, num_drafts = drafts.shape
    vocabulary = scores.shape[2]
    assert scores.shape[:2] == (batch, num_drafts + 1), "shapes must agree"
    assert scores.dtype == torch.float32, "scores must be float32"
    if draft_probs is not None:
        assert draft_probs.shape == (batch, num_drafts, vocabulary), "shapes must agree"
        assert draft_probs.dtype == torch.float32, "draft_probs must be float32"
        assert draft_probs.stride(2) == 1 or vocabulary == 1, "rows must have unit stride"
    scans, out = _scan(scores), _empty_verdict(drafts)
    keys = torch.empty(2, batch, triton.cdiv(vocabulary, RACE_BLOCK), dtype=torch.int64, device=scores.device)
    steps, num_scans = triton.next_power_of_2(num_drafts + 1), triton.next_power_of_2(scans.shape[2])
    _verify_kernel[keys.shape[1:]](
        scores,
        drafts,
        scores if draft_probs is None else draft_probs,
        seeds,
        lengths,
        *scans,
        keys,
        out.accepted,
        out.committed,
        *scores.stride()[:2],
        *drafts.stride(),
        *((0, 0) if draft_probs is None else draft_probs.stride()[:2]),
        seeds.stride(0),
        lengths.stride(0),
        num_drafts,
        scans.shape[2],
        vocabulary,
        STEPS=steps,
        SCANS=num_scans,
        BLOCK=RACE_BLOCK,
        HAS_PROBS=draft_probs is not None,
        # The normalisers of 64 steps and 64 blocks would not fit the registers of 4 warps.
        num_warps=_RACE_WARPS if steps * num_scans <= 2048 else 2 * _RACE_WARPS,
    )
    _merge_verify_kernel[(batch,)](
        keys,
        drafts,
        out.accepted,
        out.tokens,
        *drafts.stride(),
        num_drafts,
        keys.shape[2],
        STEPS=steps,
        BLOCKS=triton.next_power_of_2(keys.shape[2]),
    )
    return out


def _merge_draft(keys: torch.Tensor, target_ids: torch.Tensor | None, shape: torch.Size) -> torch.Tensor:
    out = torch.empty(shape, dtype=torch.int64, device=keys.device)
    _merge_draft_kernel[(keys.shape[0],)](
        keys,
        target_ids,
        out,
        keys.shape[1],
        BLOCKS=triton.next_power_of_2(keys.shape[1]),
        HAS_IDS=target_ids is not None,
    )
    return out


def _with_batch(values: torch.Tensor, dims: int) -> torch.Tensor:
    return values if values.dim() == dims else values[None]


def best_draft(logits: torch.Tensor, target_ids: torch.Tensor | None = None) -> torch.Tensor:
    """See `reference.best_draft`, equal in every element. Two launches."""
    assert target_ids is None or target_ids.is_contiguous(), "target_ids must be contiguous"
    return _merge_draft(_argmax_keys(_with_batch(logits, 3)), target_ids, logits.shape[:-1])


def draw_draft(
    logits: torch.Tensor, temperature: float, seeds: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.draw_draft`: the same up to rounding. Three launches, two reads of the logits."""
    shape = logits.shape[:-1]
    seeds, positions = (_with_batch(values.expand(shape), 2) for values in (seeds, positions))
    logits = _with_batch(logits, 3)
    batch, width, vocabulary = logits.shape
    scans = _scan(logits, temperature)
    probs = torch.empty(batch, width, vocabulary, dtype=torch.float32, device=logits.device)
    keys = torch.empty(batch * width, triton.cdiv(vocabulary, RACE_BLOCK), dtype=torch.int64, device=logits.device)
    _draw_kernel[keys.shape](
        logits,
        seeds,
        positions,
        *scans,
        probs,
        keys,
        *logits.stride()[:2],
        *seeds.stride(),
        *positions.stride(),
        width,
        scans.shape[2],
        vocabulary,
        float(temperature),
        SCANS=triton.next_power_of_2(scans.shape[2]),
        BLOCK=RACE_BLOCK,
        num_warps=_RACE_WARPS,
    )
    return _merge_draft(keys, None, shape), probs.view(*shape, vocabulary)
