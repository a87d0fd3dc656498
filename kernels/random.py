"""Triton random numbers, for use inside kernels; the formulas are in `random_reference`.

The functions read and write no memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .types import RACE_GROUP

_MULTIPLIER_0 = tl.constexpr(0xD2511F53)
_MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
_KEY_STEP_0 = tl.constexpr(0x9E3779B9)
_KEY_STEP_1 = tl.constexpr(0xBB67AE85)
_LARGEST = tl.constexpr(1.0 - 2.0**-24)
_GROUP = tl.constexpr(RACE_GROUP)


@triton.jit
def _philox(seed, position, number, step, stream: tl.constexpr):
    """See `random_reference._philox`: four uint32 words for each `number`; `step` broadcasts to them."""
    key_0 = seed.to(tl.uint32)
    key_1 = (seed >> 32).to(tl.uint32)
    first = number.to(tl.uint32)
    second = first * 0 + position.to(tl.uint32)
    third = first * 0 + stream
    fourth = first * 0 + step.to(tl.uint32)
    for _ in tl.static_range(10):
        even_high = tl.umulhi(first, _MULTIPLIER_0)
        even_low = first * _MULTIPLIER_0
        odd_high = tl.umulhi(third, _MULTIPLIER_1)
        odd_low = third * _MULTIPLIER_1
        first = odd_high ^ second ^ key_0
        second = odd_low
        third = even_high ^ fourth ^ key_1
        fourth = even_low
        key_0 += _KEY_STEP_0
        key_1 += _KEY_STEP_1
    return first, second, third, fourth


@triton.jit
def _unit(word):
    return tl.minimum((word.to(tl.float32) + 0.5) * 2.0**-32, _LARGEST)


@triton.jit
def uniform(seed, position, token, step, stream: tl.constexpr):
    """See `random_reference.uniform`; equal bit for bit.

    `seed` and `position` are int64; `token` and `step` broadcast.
    """
    word, _, _, _ = _philox(seed, position, token, step, stream)
    return _unit(word)


@triton.jit
def _exponential(word):
    """See `random_reference._exponential`; equal bit for bit if u < 1/4, else up to rounding of the logarithm."""
    number = _unit(word)
    ratio = number / (2.0 - number)
    square = ratio * ratio
    series = 1.0 + square * (1.0 / 3.0 + square * (1.0 / 5.0 + square * (1.0 / 7.0 + square * (1.0 / 9.0))))
    return tl.where(number < 0.25, 2.0 * ratio * series, -tl.log(1.0 - number))


@triton.jit
def race_times(seed, position, first_token, step, stream: tl.constexpr, BLOCK: tl.constexpr):
    """See `random_reference.race_times`: `[BLOCK]` for tokens from `first_token` on; as equal as `_exponential`.

    `first_token` is a multiple of BLOCK, a power of two of at least 4; `seed`, `position` and `step` are scalars.
    """
    MEMBERS: tl.constexpr = BLOCK if BLOCK < _GROUP else _GROUP
    start = first_token + tl.arange(0, BLOCK // MEMBERS) * MEMBERS
    least_word, place_word, _, _ = _philox(seed, position, -1 - start // _GROUP, step, stream)
    least = _exponential(least_word) / _GROUP
    place = start // _GROUP * _GROUP + (place_word >> 26).to(tl.int32)
    quads = (start // 4)[:, None] + tl.arange(0, MEMBERS // 4)[None, :]
    word_0, word_1, word_2, word_3 = _philox(seed, position, quads, step, stream)
    words = tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3)).reshape(BLOCK // MEMBERS, MEMBERS)
    is_least = start[:, None] + tl.arange(0, MEMBERS)[None, :] == place[:, None]
    return tl.reshape(least[:, None] + tl.where(is_least, 0.0, _exponential(words)), BLOCK)


@triton.jit
def race_times_of(seed, position, token, stream: tl.constexpr):
    """See `random_reference.race_times_of`, for `token`, int32 of any shape; `seed` and `position` are scalars."""
    least_word, place_word, _, _ = _philox(seed, position, -1 - token // _GROUP, position * 0, stream)
    word_0, word_1, word_2, word_3 = _philox(seed, position, token // 4, position * 0, stream)
    member = token % 4
    word = tl.where(member == 0, word_0, tl.where(member == 1, word_1, tl.where(member == 2, word_2, word_3)))
    is_least = (place_word >> 26).to(tl.int32) == token % _GROUP
    return _exponential(least_word) / _GROUP + tl.where(is_least, 0.0, _exponential(word))
