"""The prefix cache: a prefix that several texts share is prefilled once.

An index of the texts in the rows, by hashes of their leading blocks, chooses the row that a request takes and the row
whose keys and values it reuses. Every row has its own slots, so these are copied; where rows share the memory already
(`Runner.share`), the copy overwrites it with itself. The target's keys and values at a slot depend on the tokens up to
it; a drafter's may depend on more, see `Drafter.prefix_margin`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from ..cache.layer_kinds import Use
from ..calls.prompts import PromptSpan
from ..calls.request import Request
from ..drafters.base import Drafter
from ..patching.support import why_not_used
from ..state import DecodeState, Shape, upload
from .hosted_target import HostedTarget

# Tokens of a block. Shorter prefixes are not found: copying one takes about as long as prefilling it.
BLOCK = 32
# Most texts with the same leading blocks that are compared token by token.
MOST_COMPARED = 4
_COMPARED_AT_ONCE = 256

# Of waiting texts with a common prefix one is prefilled first, if that saves the others this many tokens: another pass
# over the weights takes as long as some hundred tokens (8B on one H200: 4 ms, 150 tokens).
FEWEST_SAVED = 256

# Most tokens, of all rows, that are copied at once: each layer's copy is a temporary of that size.
MOST_COPIED = 32768


class Match(NamedTuple):
    """The text `name` of an index: its first `length` tokens are those of another text, and `rest` tokens follow."""

    name: int
    length: int
    rest: int


def _key(before: int, block: Sequence[int]) -> int:
    return hash((before, *block))


class PrefixIndex:
    """Texts by the numbers of their rows, to be found by their prefixes.

    Blocks are looked up by hash, so a lookup of n tokens takes time for n, whatever the number of texts. What is found
    is compared token by token.
    """

    def __init__(self) -> None:
        # The tokens of each text, and the keys of its full blocks; a key depends on all tokens up to the block's end.
        self._texts: dict[int, tuple[list[int], list[int]]] = {}
        # By the key of a block: the names of the texts that have it, in the order in which these were added.
        self._names: dict[int, dict[int, None]] = {}

    def __contains__(self, name: int) -> bool:
        return name in self._texts

    def size(self, name: int) -> int:
        """Tokens of the text `name`."""
        return len(self._texts[name][0])

    def add(self, name: int, tokens: Sequence[int]) -> None:
        """Add a text, in place of the text that had its name."""
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
        """Rename texts, old names to new ones; texts that `names` lacks are removed."""
        before, self._texts, self._names = self._texts, {}, {}
        for old, new in names.items():
            if old in before:
                self.add(new, before[old][0])

    def longest(self, tokens: Sequence[int]) -> Match | None:
        """The text with the longest common prefix with `tokens`, at least a block; None if there is none.

        Of texts with the same leading blocks, only the last `MOST_COMPARED` that were added are compared.
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
                best = Match(name, length, len(text) - length)
        return best

    def reusable(self, tokens: Sequence[int], margin: int) -> Match | None:
        """`longest` with the `length` that can be reused: without `margin` tokens, and never either text's last token;
        None if there is none."""
        match = self.longest(tokens)
        if match is None:
            return None
        length = min(match.length, len(tokens) - 1, match.length + match.rest - 1) - margin
        return match._replace(length=length) if length > 0 else None


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens `one` and `other` have in common."""
    limit = min(len(one), len(other))
    for first in range(0, limit, _COMPARED_AT_ONCE):
        end = min(first + _COMPARED_AT_ONCE, limit)
        if one[first:end] != other[first:end]:
            return next(at for at in range(first, end) if one[at] != other[at])
    return limit


class Prefix(NamedTuple):
    """The prefix of a row's text that is not prefilled.

    Attributes:
        row: of the text.
        source: the row that holds the prefix; `row` itself if it holds it already.
        length: positions that are not prefilled.
        is_whole: whether `source` gets an equal prompt in the same prefill, which is then copied as a whole.
    """

    row: int
    source: int
    length: int
    is_whole: bool = False


def margin_of(target: HostedTarget, shape: Shape) -> int | None:
    """`Drafter.prefix_margin` of the drafter of `target`, in sessions of `shape`; None also if the target's cache
    cannot be reused.

    It cannot if the user gets hidden states, since these are of all positions.
    """
    if target.keeps_hidden_states or why_not_used(target.model, Use.PREFIX_REUSE) is not None:
        return None
    return target.drafter.prefix_margin(shape.num_draft_tokens, shape.num_nodes > 0)


def can_copy_rows(drafter: Drafter) -> bool:
    """Whether the memory of `drafter` can be copied row by row."""
    kind = type(drafter)
    return kind.new_memory is Drafter.new_memory or kind.copy_rows is not Drafter.copy_rows


def find_followers(prompts: Sequence[Sequence[int]], margin: int, found: Sequence[int]) -> set[int]:
    """The numbers of the `prompts` to prefill after another one of them, in order to reuse its prefix.

    Empty, unless that saves `FEWEST_SAVED` tokens besides the `found` positions that can be reused in any case.
    """
    index, followers, saved = PrefixIndex(), set(), 0
    for number, (tokens, before) in enumerate(zip(prompts, found, strict=True)):
        match = index.reusable(tokens, margin)
        if match is not None and match.length > before:
            followers.add(number)
            saved += match.length - before
        else:
            index.add(number, tokens)
    return followers if saved >= FEWEST_SAVED else set()


def spans_after(prefixes: Sequence[Prefix], lengths: Sequence[int]) -> list[PromptSpan]:
    """The positions to prefill of prompts of `lengths` tokens, after their `prefixes`."""
    return [PromptSpan(one.row, one.length, length) for one, length in zip(prefixes, lengths, strict=True)]


def copy_prefixes(
    state: DecodeState,
    drafter: Drafter,
    prefixes: Sequence[Prefix],
    margin: int,
    source: DecodeState | None = None,
) -> None:
    """Copy prefixes from rows of `source`, or of `state` itself. No query sees what is copied to the slots after them.

    No row is both copied to and copied from.
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
    """Copy all that is kept of texts of up to `slots` tokens; `rows` are pairs of rows, of `state` and of `source`."""
    for to, sources, count in _parts(state, source, [(*pair, slots) for pair in rows]):
        state.copy_rows(to, source, count, sources)
        drafter.copy_rows(state, to, source, count, sources)


def _parts(
    state: DecodeState, source: DecodeState, wanted: Sequence[tuple[int, int, int]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Batches of a copy: rows of `state`, rows of `source`, and slots of each; at most `MOST_COPIED` slots in all."""
    memories = [(one.cache.row_memory, one.slots - 1) for one in (state, source)]
    rows = []
    for *pair, slots in wanted:
        places = zip(memories, pair, strict=True)
        held = min(most if memory is None else memory.committed_slots[row] for (memory, most), row in places)
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


class Plan(NamedTuple):
    """A plan for a group, by numbers of requests: `now` go to the rows of `prefixes`; those `later` reuse them."""

    prefixes: list[Prefix]
    now: list[int]
    later: list[int]


class RowPrefixes:
    """The texts whose keys and values the rows of a session hold: of running requests, and of retired ones whose rows
    have not been taken since.

    Args:
        margin: see `Drafter.prefix_margin`; None if nothing is reused.
        merges_equal: whether requests of a group with equal prompts are prefilled as one.
    """

    def __init__(self, margin: int | None, merges_equal: bool = False):
        self._margin, self._merges_equal = margin, merges_equal
        self._index = PrefixIndex()
        # Prompts in prefill, by row.
        self._entering: dict[int, Sequence[int]] = {}

    def plan(self, group: Sequence[Request], free: Sequence[int], is_lockstep: bool = False) -> Plan:
        """Choose rows for a group of requests; the first request is always prefilled now.

        A request takes the free row that holds its text so far, up to less than a block. Otherwise rows are taken in
        the order of `free`, which has at least as many rows as `group`, except rows that others copy from. In lockstep
        each request takes the row of its `index`.
        """
        if self._margin is None and not self._merges_equal:
            rows = [one.index for one in group] if is_lockstep else free
            return Plan([Prefix(row, row, 0) for row, _ in zip(rows, group, strict=False)], list(range(len(group))), [])
        twins = self._find_twins(group)
        own = [number for number in range(len(group)) if number not in twins]
        found = {number: self._index.reusable(group[number].prefix_ids, self._margin) for number in own}
        later: set[int] = set()
        if self._margin is not None:
            prompts = [group[number].prefix_ids for number in own]
            lengths = [0 if match is None else match.length for match in found.values()]
            later = {own[index] for index in find_followers(prompts, self._margin, lengths)}
        later |= {number for number, twin in twins.items() if twin in later}
        now = [number for number in range(len(group)) if number not in later]
        matches = [found.get(number) for number in now]
        if is_lockstep:
            rows = [group[number].index for number in now]
            prefixes = [_prefix_of(row, match) for row, match in zip(rows, matches, strict=True)]
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
        """`plan` without the requests of `rows` and those that are merged with them: these move to `later`."""
        rows = {*rows, *(one.row for one in plan.prefixes if one.is_whole and one.source in rows)}
        self.leave(rows)
        entering = list(zip(plan.prefixes, plan.now, strict=True))
        kept = [one for one in entering if one[0].row not in rows]
        later = sorted({*plan.later, *plan.now} - {number for _, number in kept})
        return Plan([prefix for prefix, _ in kept], [number for _, number in kept], later)

    def _find_twins(self, group: Sequence[Request]) -> dict[int, int]:
        """Requests of `group` with the prompt of an earlier request, each with the first such one, by their numbers."""
        if not self._merges_equal:
            return {}
        first = {}
        keys = [() if one.tokens else tuple(one.prefix_ids) for one in group]
        numbers = [first.setdefault(key or number, number) for number, key in enumerate(keys)]
        return {number: one for number, one in enumerate(numbers) if one != number}

    def _choose_rows(self, found: Sequence[Match | None], free: Sequence[int]) -> list[Prefix]:
        """Choose a row and a prefix for each request, from what was `found` for it."""
        left, chosen = list(free), {}
        sources = {match.name for match in found if match is not None}

        def choose(number: int, row: int, match: Match | None) -> None:
            chosen[number] = _prefix_of(row, match)
            left.remove(row)

        for number, match in enumerate(found):
            if match is not None and match.name in left and match.rest < BLOCK:
                choose(number, match.name, match)
        # Those that copy choose next: all copies are made before any prefill, so the rest may take one of the sources.
        for number, match in enumerate(found):
            row = next((row for row in left if row not in sources), None)
            if number not in chosen and match is not None and row is not None:
                choose(number, row, match)
        for number, match in enumerate(found):
            if number not in chosen:
                own = match if match is not None and match.name in left else None
                choose(number, left[0] if own is None else own.name, own)
        return [chosen[number] for number in range(len(found))]

    def leave(self, rows: Iterable[int]) -> None:
        """`rows` no longer hold a text, nor will after a prefill that has begun."""
        for row in rows:
            self._entering.pop(row, None)
            self._index.discard(row)

    def enter(self, row: int) -> None:
        """The prompt of `row` has been prefilled."""
        prompt = self._entering.pop(row, ())
        if self._margin is not None and prompt:
            self._index.add(row, prompt)

    def advance(self, row: int, request: Request) -> None:
        """Add what `request`, which occupies or last occupied `row`, has generated since."""
        if row in self._index:
            known = self._index.size(row) - len(request.prompt_ids)
            self._index.extend(row, request.tokens[known : request.num_settled])

    def kept(self, free: Sequence[int]) -> dict[int, int]:
        """The rows among `free` that hold a text, in reverse order, with its number of tokens."""
        return {row: self._index.size(row) for row in reversed(free) if row in self._index}

    def move(self, rows: Sequence[int]) -> None:
        """Renumber rows: the first one of `rows` becomes row 0, the next one row 1; other texts are removed."""
        self._index.rename({row: number for number, row in enumerate(rows)})

    def forget(self) -> None:
        """Reuse nothing of what the rows hold now, or will hold after prefills that have begun."""
        self._index = PrefixIndex()
        self._entering.clear()


def _prefix_of(row: int, match: Match | None) -> Prefix:
    return Prefix(row, row, 0) if match is None else Prefix(row, match.name, match.length)
