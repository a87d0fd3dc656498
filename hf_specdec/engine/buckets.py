"""Sizes of buffers that are kept for other calls: a few, so that calls share them."""

from __future__ import annotations

# Captured prefills have a power of two of columns, at least the first; rows times columns are at most the second. Of so
# few tokens a GPU is done before the host has launched them one operation after the other (one H200, 128 tokens of an
# 8B target: 15 of 52 ms); with more it is the columns beyond the prompts that cost time.
FEWEST_COLUMNS, MOST_CAPTURED_TOKENS = 16, 1024


# Buffers that are kept for other calls have a power of two of slots between these two, or a multiple of the second.
FEWEST_SLOTS, SLOT_STEP = 512, 4096


# Draft tokens a round up to which such buffers are as asked for, however few tokens there is room for.
FEWEST_DRAFTS = 16


def next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def slots_for(tokens: int, is_kept: bool) -> int:
    """Slots for rows of up to `tokens` tokens and scrap; a few sizes only if the buffers are kept for other calls."""
    slots = tokens + 1
    if not is_kept:
        return slots
    if slots <= SLOT_STEP:
        return max(FEWEST_SLOTS, next_power_of_two(slots))
    return SLOT_STEP * -(-slots // SLOT_STEP)


def useful_drafts(asked: int, remaining: int, is_kept: bool) -> int:
    """Draft tokens a round where `asked` are asked for and rows have `room` for new tokens: none beyond that.

    Buffers that are kept for other calls are of a few sizes only, so of them small numbers are not cut down.
    """
    return min(asked, max(FEWEST_DRAFTS, next_power_of_two(remaining)) if is_kept else remaining)


def captured_width(longest: int, batch: int, chunk_size: int) -> int | None:
    """Columns of the captured prefill of `batch` rows, up to `longest` tokens long; None if it is not captured."""
    width = max(FEWEST_COLUMNS, next_power_of_two(max(longest - 1, 1)))
    return width if batch * width <= MOST_CAPTURED_TOKENS and width <= chunk_size else None
