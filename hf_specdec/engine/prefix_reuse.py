"""Prefilling a beginning that texts have in common once: which rows have it from which, and how they get it.

Every row has slots of its own, so keys and values of a beginning are copied; those that are in memory which rows share
already (`Runner.share`) are overwritten by themselves. The target's at a slot depend on the tokens up to it; what
a drafter keeps there may depend on more, see `Drafter.prefix_margin`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..drafters.base import Drafter
from ..patching.layer_kinds import Use
from ..patching.support import why_not_used
from ..row_buffers import upload
from ..state import DecodeState
from .hosted_target import HostedTarget
from .packed_prompts import PromptSpan
from .prefix_index import Match, PrefixIndex
from .request import Request

# Where texts that begin alike are all to be prefilled, one is prefilled before the others if these need as many tokens
# less: another pass over the weights takes as long as some hundred tokens (8B on one H200: 4 ms, 150 tokens).
FEWEST_SAVED = 256

# Most tokens of all rows that are copied at once: a copy of one layer of them is made meanwhile.
MOST_COPIED = 32768


class Prefix(NamedTuple):
    """The beginning of a row's text that is not prefilled.

    Attributes:
        row: whose text begins so.
        source: row that holds it; `row` itself if it is there already.
        length: positions that are not prefilled.
        is_whole: whether `source` gets the same prompt, and is prefilled together with it.
    """

    row: int
    source: int
    length: int
    is_whole: bool = False


def margin_of(target: HostedTarget, num_draft_tokens: int) -> int | None:
    """`Drafter.prefix_margin` of the drafter of `target`; None also if the target's cache cannot be reused.

    Hidden states that the caller gets are those of all positions, so then all are run.
    """
    if target.keeps_hidden_states or why_not_used(target.model, Use.PREFIX_REUSE) is not None:
        return None
    return target.drafter.prefix_margin(num_draft_tokens)


def can_copy_rows(drafter: Drafter) -> bool:
    """Whether what `drafter` keeps of a generation can be copied row by row."""
    kind = type(drafter)
    return kind.new_memory is Drafter.new_memory or kind.copy_rows is not Drafter.copy_rows


def reusable(match: Match | None, num_tokens: int, margin: int) -> int:
    """How many leading positions of a prompt of `num_tokens` are there in the row of `match`; 0 for None.

    The last token of neither text has been processed.
    """
    return 0 if match is None else max(min(match.length, num_tokens - 1, match.size - 1) - margin, 0)


def find_followers(prompts: Sequence[Sequence[int]], margin: int, found: Sequence[int]) -> set[int]:
    """The numbers of those of `prompts` that should be prefilled after another one of them, to reuse its beginning.

    Args:
        found: positions of each that can be reused in any case.

    Returns:
        none if they would not save `FEWEST_SAVED` tokens together.
    """
    index, followers, saved = PrefixIndex(), set(), 0
    for number, (tokens, before) in enumerate(zip(prompts, found, strict=True)):
        length = reusable(index.longest(tokens), len(tokens), margin)
        if length > before:
            followers.add(number)
            saved += length - before
        else:
            index.add(number, tokens)
    return followers if saved >= FEWEST_SAVED else set()


def spans_after(prefixes: Sequence[Prefix], lengths: Sequence[int]) -> list[PromptSpan]:
    """What a prefill runs of prompts of `lengths` tokens: from where `prefixes`, which are there by then, end."""
    return [PromptSpan(one.row, one.length, length) for one, length in zip(prefixes, lengths, strict=True)]


def depends_on_tokens_only(request: Request) -> bool:
    """Whether what is kept of a prompt of `request` is known by its tokens.

    It is not with inputs besides them, or if a cache of the user holds a part of the prompt.
    """
    return not (request.prompts.cached or request.inputs is not None or any(request.position_offsets or ()))


def copy_prefixes(
    state: DecodeState,
    drafter: Drafter,
    prefixes: Sequence[Prefix],
    margin: int,
    source: DecodeState | None = None,
) -> None:
    """Copy beginnings between rows; slots after them get what no query sees before it is written.

    Args:
        state: whose rows get them.
        prefixes: none of whose rows is the source of another one, unless it keeps what it has.
        source: whose rows hold them; `state` itself if None, where rows that are their own source keep what they have.
    """
    if source is None:
        source, prefixes = state, [one for one in prefixes if one.row != one.source]
    prefixes = sorted((one for one in prefixes if one.length > 0), key=lambda one: -one.length)
    most = most_copied(state, source, [(one.row, one.source) for one in prefixes])
    for part in parts_of(prefixes, [one.length + margin for one in prefixes], most):
        rows = upload([one.row for one in part], state.lengths)
        sources = upload([one.source for one in part], state.lengths)
        slots = part[0].length + margin
        state.cache.copy_rows(rows, source.cache, slots, sources)
        drafter.copy_rows(state, rows, source, slots, sources)


def copy_texts(
    state: DecodeState, drafter: Drafter, rows: Sequence[tuple[int, int]], source: DecodeState, slots: int
) -> None:
    """Copy all that is kept of whole texts from one state to another one.

    Args:
        state: whose rows get them.
        rows: of `state`, each once, and which row of `source` each gets.
        source: whose rows hold them.
        slots: of each row, as many as the longest text has.
    """
    most = dict(zip(rows, most_copied(state, source, rows), strict=True))
    rows = sorted(rows, key=lambda one: -most[one])
    counts = [min(slots, most[one]) for one in rows]
    for part in parts_of(rows, counts, counts):
        to, taken = (upload(list(numbers), state.lengths) for numbers in zip(*part, strict=True))
        count = min(slots, most[part[0]])
        state.copy_rows(to, source, count, taken)
        drafter.copy_rows(state, to, source, count, taken)


def most_copied(state: DecodeState, source: DecodeState, rows: Sequence[tuple[int, int]]) -> list[int]:
    """How many leading slots have memory in both of each pair of a row of `state` and one of `source`."""
    memories = [(one.cache.row_memory, one.slots - 1) for one in (state, source)]
    return [
        min(
            slots if memory is None else memory.committed_slots(row)
            for (memory, slots), row in zip(memories, pair, strict=True)
        )
        for pair in rows
    ]


def parts_of(rows: Sequence, slots: Sequence[int], most: Sequence[int]) -> Iterator[Sequence]:
    """Cut `rows` into parts that are copied at once, as many slots of each as of the first.

    Args:
        rows: those of which most is copied first.
        slots: to copy of each; at most `MOST_COPIED` of a part, unless it is one row.
        most: slots that may be copied of each.
    """
    first = 0
    while first < len(rows):
        end, last = first + 1, min(first + max(MOST_COPIED // slots[first], 1), len(rows))
        while end < last and most[end] >= slots[first]:
            end += 1
        yield rows[first:end]
        first = end
