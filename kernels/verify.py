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

from .random import exponential, uniform
from .types import RandomStream, VerificationResult

_ACCEPT = tl.constexpr(int(RandomStream.ACCEPT))
_TARGET = tl.constexpr(int(RandomStream.TARGET))
_DRAFT = tl.constexpr(int(RandomStream.DRAFT))
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


@triton.jit
def _draft_prob(draft_probs_ptr, draft_ids_ptr, token, mask, draft_vocabulary, HAS_IDS: tl.constexpr):
    """q of `token`, int64 in the target's vocabulary, from a row of the draft vocabulary; 0 where `mask` is not."""
    index = token
    if HAS_IDS:
        index = tl.load(draft_ids_ptr + token, mask=mask, other=-1)
    return tl.load(draft_probs_ptr + index, mask=mask & (index >= 0) & (index < draft_vocabulary), other=0.0)


@triton.jit
def _store_race(keys_ptr, residual, p_next, seed, position, token, is_token):
    """Report the first arrivals of a race by `residual` and of one by `p_next`.

    Whether the residual is empty shows when all programs are through, so each races both.
    """
    row = tl.program_id(0).to(tl.int64)
    cell = row * tl.num_programs(1) + tl.program_id(1)
    num_cells = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    time = exponential(seed, position, token, token * 0, _TARGET)
    tl.store(keys_ptr + cell, _largest_key(residual / time, token, is_token))
    tl.store(keys_ptr + num_cells + cell, _largest_key(p_next / time, token, is_token))


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


@triton.jit(do_not_specialize=["width", "temperatures_stride"])
def _scan_kernel(
    scores_ptr,
    maxima_ptr,
    totals_ptr,
    scores_stride_b,
    scores_stride_n,
    width,
    vocabulary,
    temperatures_ptr,
    temperatures_stride,
    BLOCK: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scores_ptr += row // width * scores_stride_b + row % width * scores_stride_n
    score = tl.load(scores_ptr + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    if HAS_TEMPERATURE:
        score = score / tl.load(temperatures_ptr + row // width * temperatures_stride)
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
    draft_ids_ptr,
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
    draft_vocabulary,
    STEPS: tl.constexpr,
    SCANS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    HAS_IDS: tl.constexpr,
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
        row_ptr = draft_probs_ptr + wide_step * draft_probs_stride_n
        q_draft = _draft_prob(row_ptr, draft_ids_ptr, draft, is_known, draft_vocabulary, HAS_IDS)
    number = uniform(seed, length, step * 0, step, _ACCEPT)
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
        row_ptr = draft_probs_ptr + accepted.to(tl.int64) * draft_probs_stride_n
        is_read = token < tl.where(is_bonus, 0, vocabulary)
        q_next = _draft_prob(row_ptr, draft_ids_ptr, token, is_read, draft_vocabulary, HAS_IDS)
        residual = tl.maximum(p_next - q_next, 0.0)
    else:
        rejected = tl.sum(tl.where(is_next & is_draft, draft, 0), axis=0)
        residual = tl.where(token == rejected, 0.0, p_next)
    residual = tl.where(is_bonus, p_next, residual)
    _store_race(keys_ptr, residual, p_next, seed, length + accepted, token, is_token)
    if tl.program_id(1) == 0:
        tl.store(accepted_ptr + row, accepted.to(tl.int64))
        tl.store(committed_ptr + row, accepted.to(tl.int64) + 1)


@triton.jit(do_not_specialize=["drafts_stride_b", "drafts_stride_n", "num_drafts", "num_scans"])
def _weights_kernel(
    scores_ptr,
    drafts_ptr,
    draft_probs_ptr,
    draft_ids_ptr,
    maxima_ptr,
    totals_ptr,
    laws_ptr,
    scores_stride_b,
    scores_stride_n,
    drafts_stride_b,
    drafts_stride_n,
    draft_probs_stride_b,
    draft_probs_stride_n,
    num_drafts,
    num_scans,
    vocabulary,
    draft_vocabulary,
    SCANS: tl.constexpr,
    HAS_IDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scan = tl.arange(0, SCANS)[None, :]
    is_scan = scan < num_scans
    weight = tl.full([1], 1.0, tl.float32)
    for step in range(num_drafts + 1):
        at = (row * (num_drafts + 1) + step) * num_scans + scan
        maxima = tl.load(maxima_ptr + at, mask=is_scan, other=float("-inf"))
        base, total = _merge_scans(maxima, tl.load(totals_ptr + at, mask=is_scan, other=0.0))
        law_ptr = laws_ptr + (row * (num_drafts + 1) + step) * 3 + tl.arange(0, 1)
        tl.store(law_ptr, base)
        tl.store(law_ptr + 1, total)
        tl.store(law_ptr + 2, weight)

        is_draft = tl.arange(0, 1) + step < num_drafts
        at = row * drafts_stride_b + step * drafts_stride_n + tl.arange(0, 1)
        draft = tl.load(drafts_ptr + at, mask=is_draft, other=-1)
        is_known = is_draft & (draft >= 0) & (draft < vocabulary)
        score_ptr = scores_ptr + row * scores_stride_b + step * scores_stride_n
        p_draft = tl.exp(tl.load(score_ptr + draft, mask=is_known, other=float("-inf")) - base) / total
        row_ptr = draft_probs_ptr + row * draft_probs_stride_b + step * draft_probs_stride_n
        q_draft = _draft_prob(row_ptr, draft_ids_ptr, draft, is_known, draft_vocabulary, HAS_IDS)
        is_possible = (weight > 0.0) & (p_draft > 0.0)
        weight = tl.where(is_possible, tl.minimum(weight * p_draft / q_draft, 1.0), 0.0)


@triton.jit(do_not_specialize=["num_drafts"])
def _excess_kernel(
    scores_ptr,
    draft_probs_ptr,
    draft_ids_ptr,
    laws_ptr,
    excesses_ptr,
    scores_stride_b,
    scores_stride_n,
    draft_probs_stride_b,
    draft_probs_stride_n,
    num_drafts,
    vocabulary,
    draft_vocabulary,
    BLOCK: tl.constexpr,
    HAS_IDS: tl.constexpr,
):
    cell = tl.program_id(0).to(tl.int64)
    row, step = cell // num_drafts, cell % num_drafts
    law_ptr = laws_ptr + (row * (num_drafts + 1) + step) * 3
    base, total, weight = tl.load(law_ptr), tl.load(law_ptr + 1), tl.load(law_ptr + 2)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocabulary
    score_ptr = scores_ptr + row * scores_stride_b + step * scores_stride_n
    score = tl.load(score_ptr + token, mask=is_token, other=float("-inf"))
    row_ptr = draft_probs_ptr + row * draft_probs_stride_b + step * draft_probs_stride_n
    q = _draft_prob(row_ptr, draft_ids_ptr, token, is_token, draft_vocabulary, HAS_IDS)
    excess = tl.sum(tl.maximum(weight * (tl.exp(score - base) / total) - q, 0.0), axis=0)
    tl.store(excesses_ptr + cell * tl.num_programs(1) + tl.program_id(1), excess)


@triton.jit(do_not_specialize=["seeds_stride", "lengths_stride", "remaining_stride", "num_drafts", "num_scans"])
def _verify_block_kernel(
    scores_ptr,
    draft_probs_ptr,
    draft_ids_ptr,
    seeds_ptr,
    lengths_ptr,
    remaining_ptr,
    laws_ptr,
    excesses_ptr,
    keys_ptr,
    accepted_ptr,
    committed_ptr,
    scores_stride_b,
    scores_stride_n,
    draft_probs_stride_b,
    draft_probs_stride_n,
    seeds_stride,
    lengths_stride,
    remaining_stride,
    num_drafts,
    num_scans,
    vocabulary,
    draft_vocabulary,
    STEPS: tl.constexpr,
    SCANS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_IDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    seed = tl.load(seeds_ptr + row * seeds_stride)
    length = tl.load(lengths_ptr + row * lengths_stride)
    remaining = tl.load(remaining_ptr + row * remaining_stride)
    count = tl.maximum(tl.minimum(remaining, num_drafts), 0).to(tl.int32)

    # Number `held` of the first drafts holds, 1 to K; its random number is that of the last of them.
    held = tl.arange(0, STEPS)
    scan = tl.arange(0, SCANS)
    at = (row * num_drafts + held)[:, None] * num_scans + scan[None, :]
    is_scan = (held < num_drafts)[:, None] & (scan < num_scans)[None, :]
    excess = tl.sum(tl.load(excesses_ptr + at, mask=is_scan, other=0.0), axis=1)
    laws_ptr += row * (num_drafts + 1) * 3
    weight = tl.load(laws_ptr + held * 3 + 2, mask=held <= num_drafts, other=0.0)
    number = uniform(seed, length, held * 0, held - 1, _ACCEPT)
    holds = tl.where(held == count, number < weight, number * (excess + 1.0 - weight) < excess)
    accepted = tl.max(tl.where(holds & (held >= 1) & (held <= count), held, 0), axis=0)
    is_bonus = accepted == count

    law_ptr = laws_ptr + accepted * 3
    base, total, weight_next = tl.load(law_ptr), tl.load(law_ptr + 1), tl.load(law_ptr + 2)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocabulary
    score_ptr = scores_ptr + row * scores_stride_b + accepted.to(tl.int64) * scores_stride_n
    p_next = tl.exp(tl.load(score_ptr + token, mask=is_token, other=float("-inf")) - base) / total
    row_ptr = draft_probs_ptr + row * draft_probs_stride_b + accepted.to(tl.int64) * draft_probs_stride_n
    is_read = token < tl.where(is_bonus, 0, vocabulary)
    q_next = _draft_prob(row_ptr, draft_ids_ptr, token, is_read, draft_vocabulary, HAS_IDS)
    residual = tl.where(is_bonus, p_next, tl.maximum(weight_next * p_next - q_next, 0.0))
    _store_race(keys_ptr, residual, p_next, seed, length + accepted, token, is_token)
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
        "temperatures_stride",
        "seeds_stride",
        "lengths_stride",
        "first",
        "width",
        "num_scans",
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
    num_scans,
    vocabulary,
    SCANS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    batch, step = row // width, row % width
    temperature = tl.load(temperatures_ptr + batch * temperatures_stride)
    seed = tl.load(seeds_ptr + batch * seeds_stride)
    length = tl.load(lengths_ptr + batch * lengths_stride)
    scan = tl.arange(0, SCANS)[None, :]
    maxima = tl.load(maxima_ptr + row * num_scans + scan, mask=scan < num_scans, other=float("-inf"))
    base, total = _merge_scans(maxima, tl.load(totals_ptr + row * num_scans + scan, mask=scan < num_scans, other=0.0))

    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocabulary
    logits_ptr += batch * logits_stride_b + step * logits_stride_n
    logit = tl.load(logits_ptr + token, mask=is_token, other=float("-inf")).to(tl.float32)
    prob = tl.exp(logit / temperature - base) / total
    tl.store(probs_ptr + row * vocabulary + token, prob, mask=is_token)
    time = exponential(seed, length, token, token * 0 + (first + step).to(tl.int32), _DRAFT)
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


def _scan(scores: torch.Tensor, temperatures: torch.Tensor | None = None) -> torch.Tensor:
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
        scores if temperatures is None else temperatures,
        0 if temperatures is None else temperatures.stride(0),
        BLOCK=SCAN_BLOCK,
        HAS_TEMPERATURE=temperatures is not None,
        num_warps=_SCAN_WARPS,
    )
    return scans


def _empty_verdict(drafts: torch.Tensor) -> VerificationResult:
    batch, num_drafts = drafts.shape
    return VerificationResult(
        torch.empty(batch, num_drafts + 1, dtype=torch.int64, device=drafts.device),
        torch.empty(batch, dtype=torch.int64, device=drafts.device),
        torch.empty(batch, dtype=torch.int64, device=drafts.device),
    )


def verify_greedy(scores: torch.Tensor, drafts: torch.Tensor) -> VerificationResult:
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


def _check_sampling(
    scores: torch.Tensor, drafts: torch.Tensor, draft_probs: torch.Tensor | None, draft_ids: torch.Tensor | None
) -> None:
    batch, num_drafts = drafts.shape
    assert scores.shape[:2] == (batch, num_drafts + 1), "shapes must agree"
    assert scores.dtype == torch.float32, "scores must be float32"
    if draft_probs is not None:
        assert draft_probs.shape[:2] == (batch, num_drafts), "shapes must agree"
        assert draft_probs.shape[2] <= scores.shape[2], "the draft vocabulary must be a part of the target's"
        assert draft_probs.dtype == torch.float32, "draft_probs must be float32"
        assert draft_probs.stride(2) == 1 or draft_probs.shape[2] == 1, "rows must have unit stride"
    if draft_ids is not None:
        assert draft_ids.shape == scores.shape[2:] and draft_ids.is_contiguous(), "draft_ids must be contiguous"


def verify_sampling(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    draft_ids: torch.Tensor | None,
    seeds: torch.Tensor,
    lengths: torch.Tensor,
) -> VerificationResult:
    """See `reference.verify_sampling`: the same up to rounding. Three launches.

    One pass over all rows of `scores` for their normalisers, and one over the row whose token is drawn. Every program
    of the second works out for itself how many drafts are accepted.
    """
    batch, num_drafts = drafts.shape
    vocabulary = scores.shape[2]
    _check_sampling(scores, drafts, draft_probs, draft_ids)
    scans, out = _scan(scores), _empty_verdict(drafts)
    keys = torch.empty(2, batch, triton.cdiv(vocabulary, RACE_BLOCK), dtype=torch.int64, device=scores.device)
    steps, num_scans = triton.next_power_of_2(num_drafts + 1), triton.next_power_of_2(scans.shape[2])
    _verify_kernel[keys.shape[1:]](
        scores,
        drafts,
        scores if draft_probs is None else draft_probs,
        draft_ids,
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
        0 if draft_probs is None else draft_probs.shape[2],
        STEPS=steps,
        SCANS=num_scans,
        BLOCK=RACE_BLOCK,
        HAS_PROBS=draft_probs is not None,
        HAS_IDS=draft_ids is not None,
        # The normalisers of 64 steps and 64 blocks would not fit the registers of 4 warps.
        num_warps=_RACE_WARPS if steps * num_scans <= 2048 else 2 * _RACE_WARPS,
    )
    _merge_verify(keys, drafts, out)
    return out


def verify_block(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor,
    draft_ids: torch.Tensor | None,
    seeds: torch.Tensor,
    lengths: torch.Tensor,
    remaining: torch.Tensor,
) -> VerificationResult:
    """See `reference.verify_block`: the same up to rounding. Five launches.

    One pass over all rows of `scores` for their normalisers, one over all rows but the last, and over those of
    `draft_probs`, for what a row's weight leaves of the target's law, and one over the row whose token is drawn.
    """
    batch, num_drafts = drafts.shape
    vocabulary, draft_vocabulary = scores.shape[2], draft_probs.shape[2]
    _check_sampling(scores, drafts, draft_probs, draft_ids)
    scans, out = _scan(scores), _empty_verdict(drafts)
    # Of each row of scores the base and the normaliser of its softmax, and the weight that its drafts leave it.
    laws = torch.empty(batch, num_drafts + 1, 3, dtype=torch.float32, device=scores.device)
    _weights_kernel[(batch,)](
        scores,
        drafts,
        draft_probs,
        draft_ids,
        *scans,
        laws,
        *scores.stride()[:2],
        *drafts.stride(),
        *draft_probs.stride()[:2],
        num_drafts,
        scans.shape[2],
        vocabulary,
        draft_vocabulary,
        SCANS=triton.next_power_of_2(scans.shape[2]),
        HAS_IDS=draft_ids is not None,
    )
    shape = (batch * num_drafts, triton.cdiv(vocabulary, SCAN_BLOCK))
    excesses = torch.empty(shape, dtype=torch.float32, device=scores.device)
    if num_drafts > 0:
        _excess_kernel[shape](
            scores,
            draft_probs,
            draft_ids,
            laws,
            excesses,
            *scores.stride()[:2],
            *draft_probs.stride()[:2],
            num_drafts,
            vocabulary,
            draft_vocabulary,
            BLOCK=SCAN_BLOCK,
            HAS_IDS=draft_ids is not None,
            num_warps=_SCAN_WARPS,
        )
    keys = torch.empty(2, batch, triton.cdiv(vocabulary, RACE_BLOCK), dtype=torch.int64, device=scores.device)
    _verify_block_kernel[keys.shape[1:]](
        scores,
        draft_probs,
        draft_ids,
        seeds,
        lengths,
        remaining,
        laws,
        excesses,
        keys,
        out.accepted,
        out.committed,
        *scores.stride()[:2],
        *draft_probs.stride()[:2],
        seeds.stride(0),
        lengths.stride(0),
        remaining.stride(0),
        num_drafts,
        shape[1],
        vocabulary,
        draft_vocabulary,
        STEPS=triton.next_power_of_2(num_drafts + 1),
        SCANS=triton.next_power_of_2(shape[1]),
        BLOCK=RACE_BLOCK,
        HAS_IDS=draft_ids is not None,
        num_warps=_RACE_WARPS,
    )
    _merge_verify(keys, drafts, out)
    return out


def _merge_verify(keys: torch.Tensor, drafts: torch.Tensor, out: VerificationResult) -> None:
    """Finish `out`, whose `accepted` is known, by the races' `keys` `[2, B, blocks]`."""
    batch, num_drafts = drafts.shape
    _merge_verify_kernel[(batch,)](
        keys,
        drafts,
        out.accepted,
        out.tokens,
        *drafts.stride(),
        num_drafts,
        keys.shape[2],
        STEPS=triton.next_power_of_2(num_drafts + 1),
        BLOCKS=triton.next_power_of_2(keys.shape[2]),
    )


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
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, lengths: torch.Tensor, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.draw_draft`: the same up to rounding. Three launches, two reads of the logits."""
    batch, width, vocabulary = logits.shape
    scans = _scan(logits, temperatures)
    probs = torch.empty(batch, width, vocabulary, dtype=torch.float32, device=logits.device)
    keys = torch.empty(batch * width, triton.cdiv(vocabulary, RACE_BLOCK), dtype=torch.int64, device=logits.device)
    _draw_kernel[keys.shape](
        logits,
        temperatures,
        seeds,
        lengths,
        *scans,
        probs,
        keys,
        *logits.stride()[:2],
        temperatures.stride(0),
        seeds.stride(0),
        lengths.stride(0),
        first,
        width,
        scans.shape[2],
        vocabulary,
        SCANS=triton.next_power_of_2(scans.shape[2]),
        BLOCK=RACE_BLOCK,
        num_warps=_RACE_WARPS,
    )
    return _merge_draft(keys, None, logits.shape[:2]), probs
