"""Triton temperature, top-k and top-p of each row; the reference is `top_k_top_p_reference.apply_top_k_top_p`.

Among tokens with equal logits the last one of the vocabulary comes first for top-p.

Nothing is sorted: a threshold is searched. A row is cut into groups of tokens, of which the first launch finds the
largest elements (see `reduction`). The second has a program for each row. It bounds the threshold from below, since of
the k-th largest group maximum and greater there are k tokens at least, and likewise for sums of probabilities. Then it
reads only groups with a larger element, and narrows the interval of the threshold by three pivots at a time, until one
value is left in it. Sums are added in an order that depends on the row only. The third launch writes the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Unspecialised, kernel, wait_for_inputs
from .reduction import (
    LEAST_KEY,
    REDUCE_BLOCK,
    REDUCE_WARPS,
    group_keys,
    index_of_key,
    is_key_of_nan,
    load_softmax,
    scale_of,
    value_of_key,
)

# The most groups of a row, if they have _LEAST_GROUP tokens or more; tokens that a program reads at a time.
_MOST_GROUPS, _LEAST_GROUP = 2048, 32
_CHUNK = tl.constexpr(4096)
# Bisections of the first bound, and below what a bound is.
_BISECTIONS, _LEAST = tl.constexpr(4), tl.constexpr(-3.0e38)


@triton.jit
def _weights(value, top, IS_MASS: tl.constexpr):
    """What a token adds: exp(score - top), or 1."""
    if IS_MASS:
        return tl.exp(value - top)
    else:
        return tl.full(value.shape, 1.0, tl.float32)


@triton.jit
def _lower_bound(maxima, top, target, IS_MASS: tl.constexpr):
    """A bound so that the largest elements of groups that are not below it have the weight `target`, or _LEAST."""
    weight = _weights(maxima, top, IS_MASS)
    gap = tl.full([], 1.0, tl.float32)
    found = tl.sum(tl.where(maxima >= top - gap, weight, 0.0), axis=0)
    while (gap < 1e4) & (found < target):
        gap *= 2.0
        found = tl.sum(tl.where(maxima >= top - gap, weight, 0.0), axis=0)
    low, high = top - gap, top - gap * 0.5
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        suffices = tl.sum(tl.where(maxima >= middle, weight, 0.0), axis=0) >= target
        low, high = tl.where(suffices, middle, low), tl.where(suffices, high, middle)
    return tl.where(found < target, _LEAST, low)


@triton.jit
def _chunk(row, number, GROUP: tl.constexpr):
    """The scores of a chunk of the listed groups, -inf where there is none, and their tokens; `[_CHUNK]`."""
    GROUPS: tl.constexpr = _CHUNK // GROUP
    logits_ptr, groups_ptr, count, vocabulary, scale = row[0], row[1], row[2], row[3], row[4]
    place = number * GROUPS + tl.arange(0, GROUPS)
    group = tl.load(groups_ptr + place, mask=place < count, other=vocabulary)
    token = tl.reshape(group[:, None] * GROUP + tl.arange(0, GROUP)[None, :], [_CHUNK])
    value = tl.load(logits_ptr + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32) * scale
    return value, token


@triton.jit
def _weight_from(least, row, GROUP: tl.constexpr, IS_MASS: tl.constexpr):
    """The weight of the tokens of the listed groups whose score is at least `least`."""
    top = row[5]
    total = tl.zeros([_CHUNK], tl.float32)
    for number in range(tl.cdiv(row[2], _CHUNK // GROUP)):
        value = _chunk(row, number, GROUP)[0]
        total += tl.where(value >= least, _weights(value, top, IS_MASS), 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def _threshold(low, target, row, GROUP: tl.constexpr, IS_MASS: tl.constexpr):
    """The largest score t so that the tokens with at least t have the weight `target`; and the weight above t.

    The tokens with at least `low` have the weight `target`.
    """
    top = row[5]
    high, above = tl.full([], float("inf"), tl.float32), tl.full([], 0.0, tl.float32)
    # The least and the largest score in the interval from `low` to `high`.
    first, last = low, top
    while first != last:
        span = tl.minimum(last, high) - low
        a, b, c = low + 0.25 * span, low + 0.5 * span, low + 0.75 * span
        from_a = tl.zeros([_CHUNK], tl.float32)
        from_b = tl.zeros([_CHUNK], tl.float32)
        from_c = tl.zeros([_CHUNK], tl.float32)
        least = tl.full([_CHUNK], float("inf"), tl.float32)
        most = tl.full([_CHUNK], float("-inf"), tl.float32)
        for number in range(tl.cdiv(row[2], _CHUNK // GROUP)):
            value = _chunk(row, number, GROUP)[0]
            weight = _weights(value, top, IS_MASS)
            from_a += tl.where(value >= a, weight, 0.0)
            from_b += tl.where(value >= b, weight, 0.0)
            from_c += tl.where(value >= c, weight, 0.0)
            is_inside = (value >= low) & (value < high)
            least = tl.where(is_inside, tl.minimum(least, value), least)
            most = tl.where(is_inside, tl.maximum(most, value), most)
        first, last = tl.min(least, axis=0), tl.max(most, axis=0)
        if first != last:
            weight_a, weight_b, weight_c = tl.sum(from_a, axis=0), tl.sum(from_b, axis=0), tl.sum(from_c, axis=0)
            low = tl.maximum(low, first)
            if weight_c >= target:
                low = tl.maximum(low, c)
            elif weight_b >= target:
                low, high, above = tl.maximum(low, b), c, weight_c
            elif weight_a >= target:
                low, high, above = tl.maximum(low, a), b, weight_b
            else:
                high, above = a, weight_a
    return first, above


@triton.jit
def _last_left_out(score, left, row, GROUP: tl.constexpr):
    """The last token with this score that is left out if the last `left` of them are left; -1 if there is none."""
    count = tl.full([], 0, tl.int32)
    for number in range(tl.cdiv(row[2], _CHUNK // GROUP)):
        value = _chunk(row, number, GROUP)[0]
        count += tl.sum((value == score).to(tl.int32), axis=0)
    found, before = tl.full([], -1, tl.int32), tl.full([], 0, tl.int32)
    if count > left:
        for number in range(tl.cdiv(row[2], _CHUNK // GROUP)):
            value, token = _chunk(row, number, GROUP)
            is_tie = value == score
            place = before + tl.cumsum(is_tie.to(tl.int32), axis=0)
            found = tl.maximum(found, tl.max(tl.where(is_tie & (place == count - left), token, -1), axis=0))
            before += tl.sum(is_tie.to(tl.int32), axis=0)
    return found


@kernel
def _thresholds_kernel(
    logits_ptr,
    keys_ptr,
    stats,
    settings,
    groups_ptr,
    thresholds_ptr,
    ends_ptr,
    strides,
    width: Unspecialised,
    vocabulary,
    num_blocks: Unspecialised,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    STATS: tl.constexpr,
):
    """Which tokens of a row are left.

    Grid: (B * n,). Reads a row of `keys` `[B * n, blocks * GROUPS]` and of both `stats` `[B * n, blocks]`, an element
    of temperatures, top_k and tail in `settings`, and groups of `logits` `[B, n, V]`; uses a row of `groups`
    `[B * n, blocks * GROUPS]` int32. Writes an element of `thresholds` and of `ends` `[B * n]`: tokens above the
    threshold are left, and those equal to it after the token `ends`; of a greedy row only that token.
    """
    number = tl.program_id(0).to(tl.int64)
    batch_row = number // width
    place = tl.arange(0, KEYS)
    num_keys = num_blocks * GROUPS
    wait_for_inputs()
    top_k = tl.load(settings[2] + batch_row)
    tail = tl.load(settings[3] + batch_row)
    keys = tl.load(keys_ptr + number * num_keys + place, mask=place < num_keys, other=LEAST_KEY)
    best = tl.max(keys, axis=0)
    top = value_of_key(best)
    threshold, end = tl.full([], float("-inf"), tl.float32), tl.full([], -1, tl.int32)
    if top_k == 0:
        end = index_of_key(best).to(tl.int32)
    elif (is_key_of_nan(best) == 0) & (tl.abs(top) < float("inf")) & ((top_k < vocabulary) | (tail > 0.0)):
        maxima = tl.where(keys == LEAST_KEY, float("-inf"), value_of_key(keys))
        base, total = load_softmax(stats, number, num_blocks, STATS)
        normaliser = tl.sum(total * tl.exp(base - top), axis=0)
        has_top_k = top_k < vocabulary
        most = top_k.to(tl.float32)
        if has_top_k:
            low = _lower_bound(maxima, top, most, IS_MASS=False)
        else:
            low = _lower_bound(maxima, top, (1.0 - tail) * normaliser, IS_MASS=True)
        is_listed = maxima >= low
        groups_ptr += number * num_keys
        tl.store(groups_ptr + tl.cumsum(is_listed.to(tl.int32), axis=0) - 1, place, mask=is_listed)
        tl.debug_barrier()
        logits_ptr += number // width * strides[0] + number % width * strides[1]
        count = tl.sum(is_listed.to(tl.int32), axis=0)
        row = logits_ptr, groups_ptr, count, vocabulary, scale_of(settings, batch_row), top
        if has_top_k:
            # A row with fewer finite scores than that keeps them all.
            most = tl.minimum(most, _weight_from(low, row, GROUP, IS_MASS=False))
            threshold, _ = _threshold(low, most, row, GROUP, IS_MASS=False)
            low = threshold
        if tail > 0.0:
            found = _weight_from(low, row, GROUP, IS_MASS=True)
            target = (1.0 - tail) * tl.where(has_top_k, found, normaliser)
            # At least the likeliest token is left.
            target = tl.maximum(tl.minimum(target, found), 1e-30)
            threshold, above = _threshold(low, target, row, GROUP, IS_MASS=True)
            left = tl.maximum(tl.ceil((target - above) / tl.exp(threshold - top)), 1.0)
            end = _last_left_out(threshold, tl.minimum(left, 1e9).to(tl.int32), row, GROUP)
    tl.store(thresholds_ptr + number, threshold)
    tl.store(ends_ptr + number, end)


@kernel
def _apply_kernel(
    logits_ptr,
    settings,
    thresholds_ptr,
    ends_ptr,
    out_ptr,
    strides,
    width: Unspecialised,
    vocabulary,
    BLOCK: tl.constexpr,
):
    """The scores of a block of a row.

    Grid: (B * n, blocks). Reads BLOCK elements of `logits` `[B, n, V]`, and of its row an element of `thresholds` and
    of `ends` `[B * n]`, of temperatures and of top_k in `settings`; writes BLOCK elements of `out` `[B, n, V]`.
    """
    number = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocabulary
    logits_ptr += number // width * strides[0] + number % width * strides[1]
    wait_for_inputs()
    threshold, end = tl.load(thresholds_ptr + number), tl.load(ends_ptr + number)
    value = tl.load(logits_ptr + token, mask=is_token, other=0.0).to(tl.float32)
    value *= scale_of(settings, number // width)
    # NaN is left, so that the row has no distribution.
    is_out = (value < threshold) | ((value == threshold) & (token <= end))
    is_greedy = tl.load(settings[2] + number // width) == 0
    value = tl.where(is_greedy, 0.0, value)
    is_out = tl.where(is_greedy, token != end, is_out)
    tl.store(out_ptr + number * vocabulary + token, tl.where(is_out, float("-inf"), value), mask=is_token)


def apply_top_k_top_p(logits, temperatures, top_k, tail):
    """See `top_k_top_p_reference.apply_top_k_top_p`; equal, except where the rounding of sums decides. Three launches,
    which depend only on shapes.

    The elements of `temperatures` may have any stride.
    """
    batch, width, vocabulary = logits.shape
    assert logits.stride(2) == 1 or vocabulary == 1, "rows must have unit stride"
    assert top_k.is_contiguous() and tail.is_contiguous()
    rows, device = batch * width, logits.device
    group = max(triton.next_power_of_2(triton.cdiv(vocabulary, _MOST_GROUPS)), _LEAST_GROUP)
    settings = temperatures, temperatures.stride(0), top_k, tail
    keys, stats = group_keys(logits, group, settings[:2])
    groups = torch.empty(keys.shape, dtype=torch.int32, device=device)
    thresholds = torch.empty(rows, dtype=torch.float32, device=device)
    ends = torch.empty(rows, dtype=torch.int32, device=device)
    _thresholds_kernel[(rows,)](
        logits,
        keys,
        stats,
        settings,
        groups,
        thresholds,
        ends,
        logits.stride()[:2],
        width,
        vocabulary,
        stats[0].shape[1],
        GROUPS=keys.shape[1] // stats[0].shape[1],
        GROUP=group,
        KEYS=triton.next_power_of_2(keys.shape[1]),
        STATS=triton.next_power_of_2(stats[0].shape[1]),
        num_warps=8,
    )
    out = torch.empty(logits.shape, dtype=torch.float32, device=device)
    _apply_kernel[(rows, triton.cdiv(vocabulary, REDUCE_BLOCK))](
        logits,
        settings,
        thresholds,
        ends,
        out,
        logits.stride()[:2],
        width,
        vocabulary,
        BLOCK=REDUCE_BLOCK,
        num_warps=REDUCE_WARPS,
    )
    return out
