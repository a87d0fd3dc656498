"""Detecting texts that degenerate into repetition: small models loop, and loops are easy to draft."""

from __future__ import annotations

import numpy as np

TAIL = 64


def loop_at_end(tokens: np.ndarray, max_period: int, min_repeats: int) -> tuple[int, int] | None:
    """The shortest loop that `tokens` end in, as (first index, period), or None. A loop is an n-gram of at most
    `max_period` tokens that occurs at least `min_repeats` times in a row at the end."""
    for period in range(1, min(max_period, len(tokens) // min_repeats) + 1):
        differs = np.flatnonzero(tokens[period:] != tokens[:-period])
        start = int(differs[-1]) + 1 if len(differs) else 0
        if len(tokens) - start >= min_repeats * period:
            return start, period
    return None


def distinct_share(tokens: np.ndarray, order: int = 4) -> float:
    """Share of different n-grams of length `order` among all of `tokens`; 1.0 if there are none."""
    if len(tokens) < order:
        return 1.0
    grams = np.lib.stride_tricks.sliding_window_view(tokens, order)
    return len(np.unique(grams, axis=0)) / len(grams)


def is_degenerate(tokens: np.ndarray) -> bool:
    """Whether a text degenerates into repetition.

    It does if it ends in an n-gram of at most 16 tokens that occurs at least 4 times in a row, or if fewer than
    half of the 4-grams of its last 64 tokens are different, as in longer loops and in loops whose numbers change.
    """
    tokens = np.asarray(tokens)
    if loop_at_end(tokens, max_period=16, min_repeats=4) is not None:
        return True
    return len(tokens) >= TAIL and distinct_share(tokens[-TAIL:]) < 0.5


def trimmed_length(tokens: np.ndarray) -> int:
    """Number of tokens to train on: up to the second period of a loop at the end; 0 for other degenerate texts."""
    loop = loop_at_end(tokens, max_period=TAIL, min_repeats=3)
    if loop is not None:
        start, period = loop
        return start + 2 * period
    return 0 if is_degenerate(tokens) else len(tokens)
