"""Which row a request takes, and whose keys and values of its prompt's beginning it reuses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from . import prefix_index
from .prefix_index import Match, PrefixIndex
from .prefix_reuse import Prefix, find_followers, reusable
from .row_request import RowRequest

# What is found for a prompt that begins as no text does.
_NOTHING: tuple[Match | None, int] = (None, 0)


class Plan(NamedTuple):
    """Where the requests of a group go.

    Attributes:
        prefixes: the row of each request that is prefilled now, and what it reuses, of length 0 for nothing.
        now: numbers of these requests in the group.
        later: numbers of the others: they reuse what is prefilled now.
    """

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

    def plan(self, group: Sequence[RowRequest], free: Sequence[int], is_lockstep: bool = False) -> Plan:
        """Choose rows for a group of requests, of which the first is prefilled now.

        A request whose text so far a free row holds, up to less than a block, takes that row. Other rows are taken in
        the order of `free`, but a row that others copy from is not copied to.

        Args:
            group: requests, no more than there are free rows.
            free: rows that no request occupies, the least recently used first.
            is_lockstep: whether each request takes the row of its `index`.
        """
        if self._margin is None and not self._merges_equal:
            rows = [one.index for one in group] if is_lockstep else free
            return Plan([Prefix(row, row, 0) for row, _ in zip(rows, group, strict=False)], list(range(len(group))), [])
        twins = self._find_twins(group)
        own = [number for number in range(len(group)) if number not in twins]
        found = {number: self._find(group[number].prompt_ids) for number in own}
        later: set[int] = set()
        if self._margin is not None:
            prompts, lengths = [group[number].prompt_ids for number in own], [length for _, length in found.values()]
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
            prompt = group[number].prompt_ids
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

    def _find_twins(self, group: Sequence[RowRequest]) -> dict[int, int]:
        """Requests of `group` with the same prompt as an earlier one, and the first such one, by their numbers."""
        if not self._merges_equal:
            return {}
        first = {}
        keys = [() if one.tokens else tuple(one.prompt_ids) for one in group]
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
            if match is not None and match.name in left and match.size - match.length < prefix_index.BLOCK:
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

    def advance(self, row: int, request: RowRequest) -> None:
        """Take what `request`, which occupies `row` or did last, has said since."""
        if row in self._index:
            known = self._index.size(row) - len(request.prompt_ids)
            self._index.extend(row, request.tokens[known : request.num_settled])

    def kept(self, free: Sequence[int]) -> list[int]:
        """Those of the rows `free` that hold a text, in reverse order."""
        return [row for row in reversed(free) if row in self._index]

    def size(self, row: int) -> int:
        """Tokens of the text that `row` holds."""
        return self._index.size(row)

    def move(self, rows: Sequence[int]) -> None:
        """Of `rows` the first one is row 0 from now on, the next one row 1; others are gone."""
        self._index.rename({row: number for number, row in enumerate(rows)})

    def forget(self) -> None:
        """Reuse nothing of what the rows hold now, or get by prefills that have begun."""
        self._index.clear()
        self._entering.clear()


def _prefix_of(row: int, match: Match | None, length: int) -> Prefix:
    """What `row` reuses of the text of `match`: `length` tokens."""
    return Prefix(row, match.name if length else row, length)
