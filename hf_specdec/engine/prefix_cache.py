"""The prefix cache: a beginning that texts have in common is prefilled once.

Which row a request takes and whose keys and values it reuses is chosen by an index of the texts that rows hold, by
hashes of their leading blocks. Every row has slots of its own, so keys and values of a beginning are copied; those that
are in memory which rows share already (`Runner.share`) are overwritten by themselves. The target's at a slot depend on
the tokens up to it; what a drafter keeps there may depend on more, see `Drafter.prefix_margin`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from ..cache.layer_kinds import Use
from ..calls.call import Call
from ..calls.prompts import PromptSpan
from ..calls.request import Request
from ..drafters.base import Drafter
from ..patching.support import why_not_used
from ..row_buffers import upload
from ..state import DecodeState, Shape
from .hosted_target import HostedTarget

# Tokens of a block. Beginnings that are shorter are not found: copying one takes about as long as prefilling it.
BLOCK = 32
# Most texts with the same leading blocks that are compared token by token.
MOST_COMPARED = 4
_COMPARED_AT_ONCE = 256

# Where texts that begin alike are all to be prefilled, one is prefilled before the others if these need as many tokens
# less: another pass over the weights takes as long as some hundred tokens (8B on one H200: 4 ms, 150 tokens).
FEWEST_SAVED = 256

# Most tokens of all rows that are copied at once: a copy of one layer of them is made meanwhile.
MOST_COPIED = 32768


class Match(NamedTuple):
    """The text `name` of an index, of `size` tokens, of which the first `length` are those of another text."""

    name: int
    length: int
    size: int


def _key(before: int, block: Sequence[int]) -> int:
    return hash((before, *block))


class PrefixIndex:
    """Texts under the numbers of their rows, to be found by what they begin with.

    Blocks are looked up by their hashes, so that looking up a text of n tokens among any number takes time for n; what
    is found is compared token by token.
    """

    def __init__(self) -> None:
        # The tokens of each text, and the keys of its full blocks, of which each depends on all tokens up to its end.
        self._texts: dict[int, tuple[list[int], list[int]]] = {}
        # The names of the texts with a block, in the order in which it was added, by the block's key.
        self._names: dict[int, dict[int, None]] = {}

    def __contains__(self, name: int) -> bool:
        return name in self._texts

    def size(self, name: int) -> int:
        """Tokens of the text `name`."""
        return len(self._texts[name][0])

    def add(self, name: int, tokens: Sequence[int]) -> None:
        """Add a text in the place of what had its name."""
        self.discard(name)
        self._texts[name] = [], []
        self.extend(name, tokens)

    def extend(self, name: int, tokens: Sequence[int]) -> None:
        """Append `tokens` to the text `name`."""
        text, keys = self._texts[name]
        text += tokens
        for first in range(len(keys) * BLOCK, len(text) - BLOCK + 1, BLOCK):
            keys.append(_key(keys[-1] if keys else 0, text[first : first + BLOCK]))
            self._names.setdefault(keys[-1], {})[name] = None

    def discard(self, name: int) -> None:
        """Remove the text `name`, if there is one."""
        _, keys = self._texts.pop(name, ([], []))
        for key in keys:
            names = self._names[key]
            names.pop(name, None)
            if not names:
                del self._names[key]

    def rename(self, names: dict[int, int]) -> None:
        """Give texts other names, by their old ones; those that `names` lacks are removed."""
        before, self._texts, self._names = self._texts, {}, {}
        for old, new in names.items():
            if old in before:
                self.add(new, before[old][0])

    def longest(self, tokens: Sequence[int]) -> Match | None:
        """The text that has most leading tokens in common with `tokens`, at least a block; None if there is none.

        Of texts that differ in less than a block, the best one of the last `MOST_COMPARED` that were added is taken.
        """
        names: dict[int, None] = {}
        key = 0
        for first in range(0, len(tokens) - BLOCK + 1, BLOCK):
            key = _key(key, tokens[first : first + BLOCK])
            if key not in self._names:
                break
            names = self._names[key]
        best = None
        for name in list(names)[-MOST_COMPARED:]:
            text, _ = self._texts[name]
            length = common_length(tokens, text)
            if length >= BLOCK and (best is None or length > best.length):
                best = Match(name, length, len(text))
        return best


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens `one` and `other` have in common."""
    limit = min(len(one), len(other))
    for first in range(0, limit, _COMPARED_AT_ONCE):
        end = min(first + _COMPARED_AT_ONCE, limit)
        if one[first:end] != other[first:end]:
            return next(at for at in range(first, end) if one[at] != other[at])
    return limit


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


def margin_of(target: HostedTarget, shape: Shape) -> int | None:
    """`Drafter.prefix_margin` of the drafter of `target`, in sessions of `shape`; None also if the target's cache
    cannot be reused.

    Hidden states that the user gets are those of all positions, so then all are run.
    """
    if target.keeps_hidden_states or why_not_used(target.model, Use.PREFIX_REUSE) is not None:
        return None
    return target.drafter.prefix_margin(shape.num_draft_tokens, shape.num_nodes > 0)


def can_copy_rows(drafter: Drafter) -> bool:
    """Whether what `drafter` keeps of a generation can be copied row by row."""
    kind = type(drafter)
    return kind.new_memory is Drafter.new_memory or kind.copy_rows is not Drafter.copy_rows


def reusable(match: Match | None, num_tokens: int, margin: int) -> int:
    """How many positions of a prompt of `num_tokens` are in the row of `match`, where the last token of neither is."""
    return 0 if match is None else max(min(match.length, num_tokens - 1, match.size - 1) - margin, 0)


def find_followers(prompts: Sequence[Sequence[int]], margin: int, found: Sequence[int]) -> set[int]:
    """The numbers of those of `prompts` that should be prefilled after another one of them, to reuse its beginning.

    None of them, unless they save `FEWEST_SAVED` tokens besides the `found` positions that can be reused in any case.
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
    """What a prefill runs of prompts of `lengths` tokens, after their `prefixes`."""
    return [PromptSpan(one.row, one.length, length) for one, length in zip(prefixes, lengths, strict=True)]


def depends_on_tokens_only(call: Call) -> bool:
    """Whether a prompt of `call` is its tokens: no other inputs, nothing of it in a cache of the user."""
    return not (call.prompts.cached or call.inputs is not None or any(call.position_offsets or ()))


def copy_prefixes(
    state: DecodeState,
    drafter: Drafter,
    prefixes: Sequence[Prefix],
    margin: int,
    source: DecodeState | None = None,
) -> None:
    """Copy beginnings from rows of `source`, or `state` itself; slots after them get what no query sees.

    None of the rows is the source of another one, unless it keeps what it has.
    """
    if source is None:
        source, prefixes = state, [one for one in prefixes if one.row != one.source]
    wanted = [(one.row, one.source, one.length + margin) for one in prefixes if one.length > 0]
    for rows, sources, slots in _parts(state, source, wanted):
        state.cache.copy_rows(rows, source.cache, slots, sources)
        drafter.copy_rows(state, rows, source, slots, sources)


def copy_texts(
    state: DecodeState, drafter: Drafter, rows: Sequence[tuple[int, int]], source: DecodeState, slots: int
) -> None:
    """Copy all that is kept of texts of up to `slots` tokens to rows of `state`, each with its row of `source`."""
    for to, sources, count in _parts(state, source, [(*pair, slots) for pair in rows]):
        state.copy_rows(to, source, count, sources)
        drafter.copy_rows(state, to, source, count, sources)


def _parts(
    state: DecodeState, source: DecodeState, wanted: Sequence[tuple[int, int, int]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Rows of `state` that are copied at once, those of `source`, and slots of each; of all at most `MOST_COPIED`."""
    memories = [(one.cache.row_memory, one.slots - 1) for one in (state, source)]
    rows = []
    for *pair, slots in wanted:
        places = zip(memories, pair, strict=True)
        held = min(most if memory is None else memory.committed_slots(row) for (memory, most), row in places)
        rows.append((min(slots, held), held, *pair))
    rows.sort(reverse=True)
    first = 0
    while first < len(rows):
        slots = rows[first][0]
        end, last = first + 1, min(first + max(MOST_COPIED // slots, 1), len(rows))
        while end < last and rows[end][1] >= slots:
            end += 1
        _, _, to, taken = zip(*rows[first:end], strict=True)
        yield upload(to, state.lengths), upload(taken, state.lengths), slots
        first = end


# What is found for a prompt that begins as no text does.
_NOTHING: tuple[Match | None, int] = (None, 0)


class Plan(NamedTuple):
    """Where requests of a group go, by their numbers: `now` to the rows of `prefixes`; others reuse these `later`."""

    prefixes: list[Prefix]
    now: list[int]
    later: list[int]


class RowPrefixes:
    """The texts whose keys and values the rows of a session hold: those of requests that run, and of those that ended
    and whose rows have not been taken since.

    Args:
        margin: see `Drafter.prefix_margin`; None if nothing is reused.
        merges_equal: whether requests of a group that have the same prompt are prefilled as one.
    """

    def __init__(self, margin: int | None, merges_equal: bool = False):
        self._margin, self._merges_equal = margin, merges_equal
        self._index = PrefixIndex()
        # Prompts that are being prefilled, by row.
        self._entering: dict[int, Sequence[int]] = {}

    def plan(self, group: Sequence[Request], free: Sequence[int], is_lockstep: bool = False) -> Plan:
        """Choose rows for a group of requests, of which the first is prefilled now.

        A request whose text so far a free row holds, up to less than a block, takes that row. Other rows are taken in
        the order of `free`, at least as many rows as `group`, but a row that others copy from is not copied to. In
        lockstep each request takes the row of its `index`.
        """
        if self._margin is None and not self._merges_equal:
            rows = [one.index for one in group] if is_lockstep else free
            return Plan([Prefix(row, row, 0) for row, _ in zip(rows, group, strict=False)], list(range(len(group))), [])
        twins = self._find_twins(group)
        own = [number for number in range(len(group)) if number not in twins]
        found = {number: self._find(group[number].prefix_ids) for number in own}
        later: set[int] = set()
        if self._margin is not None:
            prompts, lengths = [group[number].prefix_ids for number in own], [length for _, length in found.values()]
            later = {own[index] for index in find_followers(prompts, self._margin, lengths)}
        later |= {number for number, twin in twins.items() if twin in later}
        now = [number for number in range(len(group)) if number not in later]
        matches = [found.get(number, _NOTHING) for number in now]
        if is_lockstep:
            rows = [group[number].index for number in now]
            prefixes = [_prefix_of(row, *match) for row, match in zip(rows, matches, strict=True)]
        else:
            prefixes = self._choose_rows(matches, free)
        rows = {number: one.row for number, one in zip(now, prefixes, strict=True)}
        for place, number in enumerate(now):
            prompt = group[number].prefix_ids
            if number in twins:
                prefixes[place] = Prefix(rows[number], rows[twins[number]], len(prompt) - 1, is_whole=True)
            self._index.discard(rows[number])
            self._entering[rows[number]] = prompt
        return Plan(prefixes, now, sorted(later))

    def hold_up(self, plan: Plan, rows: Collection[int]) -> Plan:
        """`plan` without the requests of `rows`, and those to be prefilled as one with them: they are later."""
        rows = {*rows, *(one.row for one in plan.prefixes if one.is_whole and one.source in rows)}
        self.leave(rows)
        entering = list(zip(plan.prefixes, plan.now, strict=True))
        kept = [one for one in entering if one[0].row not in rows]
        later = sorted({*plan.later, *plan.now} - {number for _, number in kept})
        return Plan([prefix for prefix, _ in kept], [number for _, number in kept], later)

    def _find_twins(self, group: Sequence[Request]) -> dict[int, int]:
        """Requests of `group` with the same prompt as an earlier one, and the first such one, by their numbers."""
        if not self._merges_equal:
            return {}
        first = {}
        keys = [() if one.tokens else tuple(one.prefix_ids) for one in group]
        numbers = [first.setdefault(key or number, number) for number, key in enumerate(keys)]
        return {number: one for number, one in enumerate(numbers) if one != number}

    def _find(self, prompt: Sequence[int]) -> tuple[Match | None, int]:
        match = self._index.longest(prompt)
        length = 0 if match is None else reusable(match, len(prompt), self._margin)
        return (match, length) if length else _NOTHING

    def _choose_rows(self, found: Sequence[tuple[Match | None, int]], free: Sequence[int]) -> list[Prefix]:
        """Rows for requests, and what they reuse of what was found for them."""
        left, chosen = list(free), {}
        sources = {match.name for match, _ in found if match is not None}

        def choose(number: int, row: int, length: int) -> None:
            chosen[number] = _prefix_of(row, found[number][0], length)
            left.remove(row)

        for number, (match, length) in enumerate(found):
            if match is not None and match.name in left and match.size - match.length < BLOCK:
                choose(number, match.name, length)
        # Those that copy choose next: rows are copied before any is prefilled, so others may take one of the sources.
        for number, (match, length) in enumerate(found):
            row = next((row for row in left if row not in sources), None)
            if number not in chosen and match is not None and row is not None:
                choose(number, row, length)
        for number, (match, length) in enumerate(found):
            if number not in chosen:
                is_there = match is not None and match.name in left
                choose(number, match.name if is_there else left[0], length if is_there else 0)
        return [chosen[number] for number in range(len(found))]

    def leave(self, rows: Iterable[int]) -> None:
        """What `rows` held, or were to hold after a prefill, is gone."""
        for row in rows:
            self._entering.pop(row, None)
            self._index.discard(row)

    def enter(self, row: int) -> None:
        """The prompt of `row` has been prefilled."""
        prompt = self._entering.pop(row, ())
        if self._margin is not None and prompt:
            self._index.add(row, prompt)

    def advance(self, row: int, request: Request) -> None:
        """Take what `request`, which occupies `row` or did last, has generated since."""
        if row in self._index:
            known = self._index.size(row) - len(request.prompt_ids)
            self._index.extend(row, request.tokens[known : request.num_settled])

    def kept(self, free: Sequence[int]) -> dict[int, int]:
        """Those of the rows `free` that hold a text, in reverse order, and how many tokens that has."""
        return {row: self._index.size(row) for row in reversed(free) if row in self._index}

    def move(self, rows: Sequence[int]) -> None:
        """Of `rows` the first one is row 0 from now on, the next one row 1; others are gone."""
        self._index.rename({row: number for number, row in enumerate(rows)})

    def forget(self) -> None:
        """Reuse nothing of what the rows hold now, or get by prefills that have begun."""
        self._index = PrefixIndex()
        self._entering.clear()


def _prefix_of(row: int, match: Match | None, length: int) -> Prefix:
    return Prefix(row, match.name if length else row, length)
