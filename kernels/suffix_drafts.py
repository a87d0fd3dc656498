"""Triton kernels of suffix decoding; the reference is `suffix_drafts_reference.suffix_drafts`.

Place s < H is `history[s]`, and place H + s is `tokens[b, s]`. The first kernel finds

    matched[b, s] = the largest m <= LONGEST with place[s - j] = tokens[b, lengths[b] - 1 - j] for all j < m

for places with a token after them, and keeps the OCCURRENCES largest keys (matched << PLACE_BITS) + s of each block of
places. The largest keys of all blocks are sorted, and the second kernel counts the tokens that follow them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Unspecialised, kernel, wait_for_inputs
from .types import LONGEST_MATCH, MOST_OCCURRENCES, NO_TOKEN, PLACE_BITS

BLOCK, LONGEST = tl.constexpr(2048), tl.constexpr(LONGEST_MATCH)
OCCURRENCES = tl.constexpr(MOST_OCCURRENCES)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_PLACE_BITS, _PLACES = tl.constexpr(PLACE_BITS), tl.constexpr((1 << PLACE_BITS) - 1)


@kernel
def _occurrences_kernel(
    tokens_ptr,
    lengths_ptr,
    history_ptr,
    keys_ptr,
    tokens_stride: Unspecialised,
    history_size: Unspecialised,
    history_blocks: Unspecialised,
):
    """The occurrences in BLOCK places.

    Grid: (B, blocks of the history, then of a row). Reads the last LONGEST tokens of a row, and the program's places of
    the history or the row; writes `keys` `[B, blocks, OCCURRENCES]`, unordered, -1 where there are no more.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    text = tokens_ptr + row * tokens_stride
    wait_for_inputs()
    length = tl.load(lengths_ptr + row)
    if block < history_blocks:
        source = history_ptr
        size = length * 0 + history_size
        first = block.to(tl.int64) * BLOCK
        before = length * 0
    else:
        source = text
        size = length
        first = (block - history_blocks).to(tl.int64) * BLOCK
        before = length * 0 + history_size
    place = first + tl.arange(0, BLOCK)
    is_match = tl.load(source + place + 1, mask=place + 1 < size, other=_NO_TOKEN) != _NO_TOKEN
    matched = tl.zeros([BLOCK], tl.int32)
    most = tl.minimum(length, LONGEST)
    back = length * 0
    while back < most:
        last = tl.load(text + length - 1 - back)
        token = tl.load(source + place - back, mask=(place >= back) & (place - back < size), other=_NO_TOKEN)
        is_match = is_match & (token == last)
        matched += is_match.to(tl.int32)
        most = tl.where(tl.sum(is_match.to(tl.int32), axis=0) > 0, most, 0)
        back += 1
    # Keep all places with matches longer than `least`, which are fewer than OCCURRENCES, then the last equal ones.
    longest = tl.max(matched, axis=0)
    least = longest * 0 + 1
    level = longest * 0 + 2
    while level <= longest:
        least = tl.where(tl.sum((matched >= level).to(tl.int32), axis=0) >= OCCURRENCES, level, least)
        level += 1
    is_longer, is_least = (matched > least).to(tl.int32), (matched == least).to(tl.int32)
    num_longer = tl.sum(is_longer, axis=0)
    total = num_longer + tl.sum(is_least, axis=0)
    at = tl.where(is_longer > 0, num_longer - tl.cumsum(is_longer, axis=0), total - tl.cumsum(is_least, axis=0))
    keys = keys_ptr + (row * tl.num_programs(1) + block) * OCCURRENCES
    key = (matched.to(tl.int64) << _PLACE_BITS) + before + place
    tl.store(keys + at, key, mask=(matched >= least) & (at < OCCURRENCES))
    unused = tl.arange(0, OCCURRENCES)
    tl.store(keys + unused, tl.full([OCCURRENCES], -1, tl.int64), mask=unused >= total)


@triton.jit
def _following(text, history_ptr, place, length, history_size, is_occurrence):
    """Tokens at `place`; `NO_TOKEN` beyond the end of the place's text."""
    is_earlier = place < history_size
    earlier = tl.load(history_ptr + place, mask=is_occurrence & is_earlier, other=_NO_TOKEN)
    own = place - history_size
    token = tl.load(text + own, mask=is_occurrence & (own >= 0) & (own < length), other=_NO_TOKEN)
    return tl.where(is_earlier, earlier, token)


@kernel
def _drafts_kernel(
    tokens_ptr,
    lengths_ptr,
    history_ptr,
    keys_ptr,
    drafts_ptr,
    tokens_stride: Unspecialised,
    history_size: Unspecialised,
    num_drafts: Unspecialised,
):
    """Drafts of a row: first for all match lengths to score them, then for the best match length.

    Grid: (B,). Reads a row of `keys` `[B, OCCURRENCES]`, descending, and the tokens after these places; writes a row of
    `drafts`. Products of zeros and ones count the occurrences with the same next token, at most OCCURRENCES.
    """
    row = tl.program_id(0).to(tl.int64)
    text = tokens_ptr + row * tokens_stride
    occurrence = tl.arange(0, OCCURRENCES)
    rank = OCCURRENCES - 1 - occurrence
    match_length = 1 + tl.arange(0, LONGEST)
    wait_for_inputs()
    length = tl.load(lengths_ptr + row)
    key = tl.load(keys_ptr + row * OCCURRENCES + occurrence)
    is_occurrence = key >= 0
    matched = (key >> _PLACE_BITS).to(tl.int32)
    place = (key & _PLACES) + 1

    follows = matched[None, :] >= match_length[:, None]
    share = tl.full([LONGEST], 1.0, tl.float32)
    score = tl.zeros([LONGEST], tl.float32)
    for number in range(num_drafts):
        token = _following(text, history_ptr, place + number, length, history_size, is_occurrence)
        total = tl.sum(follows.to(tl.int32), axis=1)
        follows = follows & (token != _NO_TOKEN)[None, :]
        is_same = (token[:, None] == token[None, :]).to(tl.float16)
        count = tl.dot(follows.to(tl.float16), is_same).to(tl.int32)
        weight = tl.where(follows, count * OCCURRENCES + rank[None, :], -1)
        best = tl.max(weight, axis=1)
        draft = tl.max(tl.where(follows & (weight == best[:, None]), token[None, :], _NO_TOKEN), axis=1)
        frequency = tl.maximum(best, 0) // OCCURRENCES
        share *= tl.div_rn(frequency.to(tl.float32), tl.maximum(total, 1).to(tl.float32))
        score += tl.where(number < match_length, share, 0.0)
        follows = follows & (token[None, :] == draft[:, None])

    chosen = tl.max(tl.where(score == tl.max(score, axis=0), match_length, 0), axis=0)
    last = tl.load(text + length - 1)
    goes_on = matched >= chosen
    for number in range(num_drafts):
        token = _following(text, history_ptr, place + number, length, history_size, is_occurrence)
        goes_on = goes_on & (token != _NO_TOKEN)
        is_alike = goes_on[None, :] & (token[:, None] == token[None, :])
        weight = tl.where(goes_on, tl.sum(is_alike.to(tl.int32), axis=1) * OCCURRENCES + rank, -1)
        best = tl.max(weight, axis=0)
        draft = tl.max(tl.where(goes_on & (weight == best), token, _NO_TOKEN), axis=0)
        tl.store(drafts_ptr + row * num_drafts + number, tl.where(best < 0, last, draft))
        goes_on = goes_on & (token == draft)


def suffix_drafts(tokens, lengths, history, num_drafts):
    """See `suffix_drafts_reference.suffix_drafts`; equal. Two launches and a `topk`."""
    assert tokens.stride(1) == 1 and lengths.is_contiguous() and history.is_contiguous()
    batch, history_blocks = len(tokens), triton.cdiv(len(history), BLOCK.value)
    num_blocks = history_blocks + triton.cdiv(tokens.shape[1], BLOCK.value)
    keys = torch.empty(batch, num_blocks * MOST_OCCURRENCES, dtype=torch.int64, device=tokens.device)
    _occurrences_kernel[(batch, num_blocks)](
        tokens,
        lengths,
        history,
        keys,
        tokens.stride(0),
        len(history),
        history_blocks,
        num_warps=8,
    )
    keys = keys.topk(MOST_OCCURRENCES, dim=1).values
    drafts = torch.empty(batch, num_drafts, dtype=torch.int64, device=tokens.device)
    _drafts_kernel[(batch,)](
        tokens,
        lengths,
        history,
        keys,
        drafts,
        tokens.stride(0),
        len(history),
        num_drafts,
        num_warps=4,
    )
    return drafts
