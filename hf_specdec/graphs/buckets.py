"""Bucket sizes of buffers and captured prefills, so that calls of similar size share them."""

from __future__ import annotations

# The columns of a captured prefill are a power of two, and at least the first number; its tokens (rows times columns if
# prompts are padded) are at most the second. With so few tokens a GPU finishes before the host has launched the
# operations one by one (one H200, 8B target: 128 tokens after 15 of 52 ms, 2,048 after 44 of 52, or of 67 with an
# EAGLE-3 drafter); with more tokens it hardly waits for the host.
FEWEST_COLUMNS, MOST_CAPTURED_TOKENS = 16, 2048
# Beyond the first number, columns are a multiple of the second: padding to a power of two costs more than launches.
FINE_COLUMNS, COLUMN_STEP = 1024, 256

# Columns of the chunks in which groups of requests are prefilled, padded: long chunks for most of a prompt, short ones
# for its end, which need less padding.
GROUP_COLUMNS = (128, 32)

# Tokens of the captured chunks in which packed prompts are prefilled.
PACKED_TOKENS = (2048, 1024, 512, 128, 32)
# Where a text is longer than the first number, chunks have at most the second: running rows wait for a chunk, in which
# attention over so many keys takes longer than all matrix products (one H200, 8B target, 2,048 tokens: 44 ms after
# none, 94 after 14,336).
LONG_TEXT, MOST_LONG_TOKENS = 8192, 1024
# A chunk is padded to the next size if that makes it at most this factor longer; else a smaller chunk comes first.
MOST_PADDING = 4 / 3

# Buffers kept for other calls have a power of two of slots between these two numbers, or a multiple of the second.
FEWEST_SLOTS, SLOT_STEP = 512, 4096

# Up to this K, buffers that are kept are not cut to the number of remaining tokens.
FEWEST_DRAFTS = 16


# At the end of continuous batching the number of rows falls by this factor. Each number of rows has its own graphs, and
# with few rows a round hardly gets faster with fewer.
ROWS_TO_FEWER, FEWEST_CAPTURED_ROWS = 4, 8

# Rounds on growing rows are captured for texts of up to the first number of tokens, times a power of the second.
# Attention over 300 of 1,024 slots or of 4,096 (shapes of Llama-3.1-8B, 4 queries, one H200): 12 or 21 us at batch 32.
FEWEST_SPAN, SPAN_STEP = 1024, 4


def next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def fewer_rows(rows: int, is_captured: bool) -> int | None:
    """The next smaller number of rows that continuous batching moves to; None if it stays with `rows`."""
    fewer = rows // ROWS_TO_FEWER
    return fewer if fewer >= (FEWEST_CAPTURED_ROWS if is_captured else 1) else None


def row_sizes(most: int, is_captured: bool) -> list[int]:
    """The numbers of rows of continuous batching, ascending up to `most`."""
    sizes = [most]
    while (fewer := fewer_rows(sizes[-1], is_captured)) is not None:
        sizes.append(fewer)
    return sizes[::-1]


def slots_for(tokens: int, is_kept: bool) -> int:
    """Slots for rows of up to `tokens` tokens and the dummy slot; rounded up to a bucket if kept for other calls."""
    slots = tokens + 1
    if not is_kept:
        return slots
    if slots <= SLOT_STEP:
        return max(FEWEST_SLOTS, next_power_of_two(slots))
    return SLOT_STEP * -(-slots // SLOT_STEP)


def useful_drafts(asked: int, remaining: int, is_kept: bool) -> int:
    """K of the buffers for a call with K = `asked` and `remaining` new tokens a row: no more drafts than these.

    Buffers that are kept for other calls have a few sizes only, so small K are not cut.
    """
    return min(asked, max(FEWEST_DRAFTS, next_power_of_two(remaining)) if is_kept else remaining)


def group_chunks(columns: int) -> list[int]:
    """Columns of the captured chunks in which a group of requests is prefilled, padded to `columns`."""
    many, rest = divmod(max(columns, 1), GROUP_COLUMNS[0])
    return [GROUP_COLUMNS[0]] * many + [GROUP_COLUMNS[1]] * -(-rest // GROUP_COLUMNS[1])


def packed_chunks(tokens: int, longest: int) -> list[int]:
    """Tokens of the captured chunks in which packed prompts are prefilled. `tokens` counts all prompts without cached
    ones; `longest` is the length of the longest prompt with cached ones."""
    most, chunks = MOST_LONG_TOKENS if longest > LONG_TEXT else PACKED_TOKENS[0], []
    sizes = sorted(size for size in PACKED_TOKENS if size <= most)
    while tokens > 0 or not chunks:
        larger = next((size for size in sizes if size >= tokens), None)
        smaller = max((size for size in sizes if size <= tokens), default=None)
        fits = larger is not None and (smaller is None or larger <= MOST_PADDING * tokens)
        chunks.append(larger if fits else smaller)
        tokens -= chunks[-1]
    return chunks


def captured_width(columns: int, rows: int, chunk_size: int) -> int | None:
    """Columns of the captured prefill of `rows` rows of up to `columns`; None if it should not be captured."""
    width = max(FEWEST_COLUMNS, next_power_of_two(max(columns, 1)))
    if columns > FINE_COLUMNS:
        width = COLUMN_STEP * -(-columns // COLUMN_STEP)
    return width if rows * width <= MOST_CAPTURED_TOKENS and width <= chunk_size else None


def span_for(live: int, slots: int) -> int:
    """The number of leading slots for which a round is captured if `live` slots are in use or will be written."""
    span = FEWEST_SPAN
    while span < live + 3:  # the slot after the last counts as the dummy slot; blocks may end one slot later
        span *= SPAN_STEP
    return min(span, slots)
