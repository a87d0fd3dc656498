"""The rows of a session in continuous batching: which request occupies which, and which requests wait."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from ..kernels.types import NO_TOKEN
from ..patching.patch import caller
from ..stats import Counters
from .prefix_reuse import Prefix
from .rounds import RoundReport, Stage
from .row_prefixes import Plan, RowPrefixes
from .row_request import Arrivals, ContinuousBatching, Entered, RowRequest, end
from .transcript import no_distribution

# Sizes of groups that are prefilled by graphs, padded: a group has the next larger size. Few sizes share buffers.
GROUP_SIZES = (1, 8, 32)

# Most tokens of a group, padding included; a longer prompt is a group by itself.
MOST_GROUP_TOKENS = 16384

# Tokens that a request has memory for when it is admitted, besides those of its text.
TOKENS_AHEAD = 64

# Waiting requests are admitted when this share of the rows is free: prefilling few rows takes about as long as many.
SHARE_TO_ADMIT = 1 / 8


class Place(Protocol):
    """Where the requests of `RequestRows` are: a session, and what it can do."""

    @property
    def num_rows(self) -> int:
        """Rows of the session."""

    @property
    def capacity(self) -> int:
        """Most tokens of a text, prompt included."""

    @property
    def prefix_margin(self) -> int | None:
        """See `Drafter.prefix_margin`; None if rows reuse nothing of others."""

    @property
    def merges_equal(self) -> bool:
        """Whether requests with the same prompt that are prefilled together are prefilled as one."""

    def prefill(self, prefixes: list[Prefix], requests: list[RowRequest]) -> None:
        """Begin to let each of `requests` occupy a row, with what is reused of its beginning."""

    def prefill_next(self) -> RoundReport | None:
        """Go on with the prefill that was begun, for a limited time; returns the first tokens if it has ended.

        A prefill may be given up: the next one begins anew.
        """

    def group_size(self, count: int) -> int | None:
        """Rows of the buffers in which so many requests are prefilled, padded; None if prompts are packed."""

    def finish(self, rows: list[int]) -> None:
        """Let `rows` be finished ones, which no later round gives tokens."""

    def is_to_move(self, num_occupied: int, waiting: Sequence[RowRequest]) -> bool:
        """Whether the requests of the occupied rows should go on in another session."""

    def move(
        self, rows: dict[int, int], kept: dict[int, int], waiting: Sequence[RowRequest]
    ) -> tuple[Stage, int] | None:
        """Let the requests of `rows` go on in the first rows of another session; None if they stay.

        Args:
            rows: occupied ones, and the tokens of their texts.
            kept: others, likewise; what they hold goes to the rows after those, as far as there is room.
            waiting: requests for which the session is to have room.

        Returns:
            where rounds run, and how many rows hold what was moved.
        """

    def why_refused(self, request: RowRequest) -> str | None:
        """Why there is no room for `request`; None if there may be."""

    def room(self, rows: Sequence[int]) -> float:
        """Bytes that rows may get, those that `rows` hold included."""

    def bytes_for(self, slots: int) -> int:
        """Bytes that a row with so many tokens holds."""

    def shares(self, row: int, length: int) -> bool:
        """Whether `row` shares memory with others from so many tokens on."""

    def share(self, prefixes: Sequence[Prefix]) -> list[Prefix]:
        """Let rows share memory of the beginnings that they reuse, and no other memory; before `reserve`.

        Returns:
            `prefixes`; those of rows that keep what they hold may be shorter.
        """

    def reserve(self, lengths: Mapping[int, int]) -> bool:
        """Let rows have memory for so many tokens each; returns whether there is enough."""

    def give_back(self, lengths: Mapping[int, int]) -> None:
        """Let rows give back the memory that they hold beyond so many tokens each."""

    def free_others(self) -> None:
        """Free what is kept for other calls."""

    def leave_target(self) -> None:
        """Let the target be as it was, until it is used again."""


class RequestRows:
    """The rows of a session, and the requests that occupy them or wait for one; the `Rows` of a round loop.

    Args:
        place: where the requests are.
        requests: that wait, in the order in which they are admitted.
        counters: of the requests, by their `index`.
        settings: of continuous batching.
    """

    def __init__(self, place: Place, requests: Sequence[RowRequest], counters: Counters, settings: ContinuousBatching):
        self._place = place
        self._occupants: list[RowRequest | None] = [None] * place.num_rows
        # The least recently used first.
        self._free = list(range(place.num_rows))
        self._prefixes = RowPrefixes(place.prefix_margin, place.merges_equal)
        # Rows that are being prefilled, and the requests that are to occupy them.
        self._entering: list[tuple[int, RowRequest]] = []
        self._waiting = deque(requests)
        self._tokens_waiting = sum(one.remaining for one in requests)
        # Requests that have entered rows since the last round, and their first tokens.
        self._first: list[tuple[Entered, RoundReport]] = []
        self._counters = counters
        self._settings = settings
        self._is_open = settings.arrivals is not None
        self.rounds_by_k: Counter[int] = Counter()

    @property
    def is_complete(self) -> bool:
        return not self._is_open and not self._waiting and self._is_empty

    @property
    def _is_empty(self) -> bool:
        return len(self._free) == len(self._occupants)

    @property
    def is_to_move(self) -> bool:
        if self._entering or (self._is_empty and not self._waiting):
            return False
        return self._place.is_to_move(len(self._occupants) - len(self._free), self._waiting)

    def move(self) -> Stage | None:
        rows = {row: one.length for row, one in enumerate(self._occupants) if one is not None}
        kept = {row: self._prefixes.size(row) for row in self._prefixes.kept(self._free)} if self._is_open else {}
        moved = self._place.move(rows, kept, self._waiting)
        if moved is None:
            return None
        stage, count = moved
        num_rows = self._place.num_rows
        self._prefixes.move([*rows, *kept][:count])
        self._occupants = [self._occupants[row] for row in rows] + [None] * (num_rows - len(rows))
        self._free = [*range(count, num_rows), *reversed(range(len(rows), count))]
        return stage

    def tokens_left(self) -> float:
        """How many tokens a row may still add, for all requests that occupy it from now on."""
        running = [one.left for one in self._occupants if one is not None]
        return (sum(running) + self._tokens_waiting) / max(len(running), 1)

    def admit(self) -> bool:
        """Put waiting requests into free rows: all that fit at first, then whenever enough rows are free.

        Returns whether it has taken time.
        """
        has_waited = self._settings.arrivals is not None and self._receive(self._settings.arrivals)
        if self._entering:
            self._enter()
            return True
        num_admitted = min(len(self._free), len(self._waiting))
        enough = max(1, round(len(self._occupants) * SHARE_TO_ADMIT))
        if not num_admitted or (not self._is_empty and num_admitted < min(enough, len(self._waiting))):
            return has_waited
        while self._free and self._waiting and not self._entering:
            prefixes, group = self._place_group(self._next_group())
            if not group:
                if not self._is_empty or self._waiting[0].longest > self._place.capacity:
                    break
                self._withdraw(self._waiting[0], _no_memory(self._waiting[0]))
                self._waiting.popleft()
                continue
            self._place.prefill(prefixes, group)
            self._enter()
            has_waited = True
        return has_waited

    def _place_group(self, group: list[RowRequest]) -> tuple[list[Prefix], list[RowRequest]]:
        """Choose rows for the requests of `group` that are prefilled now; the others wait on.

        Returns:
            the row of each, with what it reuses; and these requests: none if there is no memory for them.
        """
        for row, request in enumerate(self._occupants):
            if request is not None:
                self._prefixes.advance(row, request)
        plan = self._without_conflicts(self._prefixes.plan(group, self._free))
        now, later = ([group[number] for number in numbers] for numbers in (plan.now, plan.later))
        prefixes = self._place.share(plan.prefixes)
        lengths = {prefix.row: _at_first(one) for prefix, one in zip(prefixes, now, strict=True)}
        if not self._reserve(lengths, {one.source for one in prefixes if one.source != one.row}):
            self._prefixes.leave(lengths)
            self._wait(group)
            if self._place.room(self._free) <= self._place.room(()):
                return [], []
            # What other rows, or longer texts, have left behind is too much.
            self._empty(list(self._free))
            return self._place_group(self._next_group())
        self._wait(later)
        for prefix, request in zip(prefixes, now, strict=True):
            self._free.remove(prefix.row)
            self._counters.count_cached(request.index, prefix.length)
        self._entering = [(prefix.row, request) for prefix, request in zip(prefixes, now, strict=True)]
        return prefixes, now

    def _without_conflicts(self, plan: Plan) -> Plan:
        """`plan` without requests that would write to shared memory in rows that others of the group copy from."""
        # Of a row that gets the same prompt they copy what is prefilled now, not what it holds.
        sources = {one.source for one in plan.prefixes if one.source != one.row and not one.is_whole}
        kept = {one.row: one.length if one.row == one.source else 0 for one in plan.prefixes if one.row in sources}
        held_up = {row for row, length in kept.items() if self._place.shares(row, length)}
        return self._prefixes.hold_up(plan, held_up) if held_up else plan

    def _enter(self) -> None:
        """Run a chunk of the prefill, or all if no other row is occupied; then let requests occupy the rows.

        Requests that arrive while rounds run are prefilled chunk by chunk, one before each round, so that a long prompt
        does not hold up the others. Where all are there from the start, no one waits for a single text. Between two
        chunks requests may be withdrawn; a prefill of such alone is given up.
        """
        is_alone = all(one is None for one in self._occupants)
        arrivals = self._settings.arrivals
        while (first := self._place.prefill_next()) is None and (is_alone or arrivals is None):
            if arrivals is not None:
                self._receive(arrivals)
                if not self._entering:
                    return
        if first is None:
            return
        now = time.perf_counter()
        for row, request in self._entering:
            self._prefixes.enter(row)
            if request.is_over:  # withdrawn
                self._place.finish([row])
                self._free.append(row)
            else:
                if request.lifespan[0] < 0:
                    request.lifespan = (now, -1.0)
                self._occupants[row] = request
        self._first.append((self._entering, first))
        self._entering = []

    def first_tokens(self) -> list[tuple[Entered, RoundReport]]:
        found, self._first = self._first, []
        return found

    def _receive(self, arrivals: Arrivals) -> bool:
        """Take what has arrived; wait for it if there is nothing to do. Returns whether it has waited."""
        has_waited = False
        while True:
            arrived = arrivals.next(self._is_empty and not self._waiting, self._place.leave_target)
            self._is_open, has_waited = arrived.is_open, has_waited or arrived.has_waited
            if arrived.is_elsewhere:
                self._leave_all()
                return has_waited
            if arrived.is_changed:
                self._prefixes.forget()
            self._waiting.extend(arrived.requests)
            self._tokens_waiting += sum(one.remaining for one in arrived.requests)
            for request, error in arrived.withdrawn:
                self._withdraw(request, error)
            if arrived.withdrawn:
                self._waiting = deque(one for one in self._waiting if not one.is_over)
                self._give_up()
            self._refuse()
            if self._waiting or not self._is_empty or not self._is_open:
                return has_waited

    def _give_up(self) -> None:
        """Give up the prefill of requests that are all withdrawn."""
        if self._entering and all(one.is_over for _, one in self._entering):
            rows = [row for row, _ in self._entering]
            self._place.finish(rows)
            self._free += rows
            self._empty(rows)
            self._entering = []

    def _leave_all(self) -> None:
        """Let the run be complete, as if it had never had its requests."""
        self._waiting.clear()
        self._is_open, self._entering, self._first = False, [], []
        self._occupants = [None] * len(self._occupants)
        self._free = list(range(len(self._occupants)))

    def _withdraw(self, request: RowRequest, error: str) -> None:
        """End `request`, wherever it is; if it waits, the caller takes it from those that do."""
        if request.is_over:
            return
        request.error = error
        now = time.perf_counter()
        if request in self._occupants:
            row = self._occupants.index(request)
            self._place.finish([row])
            self._retire(row, request, now)
        else:
            if not any(one is request for _, one in self._entering):
                self._tokens_waiting -= request.left
            end(request, now, self._settings)

    def _refuse(self) -> None:
        """End the next waiting requests if there is no room for them."""
        while self._waiting and (error := self._place.why_refused(self._waiting[0])) is not None:
            self._withdraw(self._waiting[0], error)
            self._waiting.popleft()

    def _next_group(self) -> list[RowRequest]:
        """The next waiting requests: as many as rows are free, or if padded as a group may have."""
        group: list[RowRequest] = []
        longest, is_padded, room = 0, self._place.group_size(1) is not None, self._room()
        if self._waiting and self._place.bytes_for(_at_first(self._waiting[0])) > room:
            self._place.free_others()
            room = self._room()
        most = min(len(self._free), GROUP_SIZES[-1]) if is_padded else len(self._free)
        while self._waiting and len(group) < most:
            needed = self._place.bytes_for(_at_first(self._waiting[0]))
            if self._waiting[0].longest > self._place.capacity or needed > room:
                break
            room -= needed
            longest = max(longest, self._waiting[0].num_prefilled)
            if group and is_padded and longest * self._place.group_size(len(group) + 1) > MOST_GROUP_TOKENS:
                break
            group.append(self._waiting.popleft())
            self._tokens_waiting -= group[-1].left
        return group

    def _room(self) -> float:
        """Bytes for requests that enter rows; the ones that are there may grow by a step each."""
        num_occupied = len(self._occupants) - len(self._free)
        return self._place.room(self._free) - num_occupied * self._place.bytes_for(1)

    def reserve(self, ahead: int) -> bool:
        occupied = [(row, one) for row, one in enumerate(self._occupants) if one is not None]
        lengths = {row: min(one.length + ahead, one.longest) for row, one in occupied}
        return self._reserve(lengths)

    def _reserve(self, lengths: Mapping[int, int], sources: Collection[int] = ()) -> bool:
        """Let rows have memory for texts of `lengths`; what else rows hold is given back if need be.

        Args:
            lengths: of texts, by row.
            sources: rows that others are to copy from, which keep what they hold.
        """
        if self._place.reserve(lengths):
            return True
        self._place.give_back({row: length for row, length in lengths.items() if row not in sources})
        for row in [row for row in self._free if row not in lengths and row not in sources]:
            self._empty([row])
            if self._place.reserve(lengths):
                return True
        self._place.free_others()
        return self._place.reserve(lengths)

    def _empty(self, rows: Sequence[int]) -> None:
        """Let free rows hold nothing."""
        self._prefixes.leave(rows)
        self._place.give_back(dict.fromkeys(rows, 0))

    def make_room(self) -> None:
        """Let the request that was admitted last wait, to be prefilled again later; end it if it is the only one."""
        occupied = [(one.lifespan[0], row) for row, one in enumerate(self._occupants) if one is not None]
        if not occupied:
            return
        row = max(occupied)[1]
        request = self._occupants[row]
        if len(occupied) == 1 and not self._entering:
            self._withdraw(request, _no_memory(request))
            return
        self._place.finish([row])
        self._occupants[row] = None
        self._free.append(row)
        self._empty([row])
        self._wait([request])

    def _wait(self, requests: Sequence[RowRequest]) -> None:
        """Let `requests` be the next ones that are admitted."""
        self._waiting.extendleft(reversed(requests))
        self._tokens_waiting += sum(one.left for one in requests)

    def longest(self) -> int:
        return max((one.length for one in self._occupants if one is not None), default=1)

    def occupants(self) -> list[RowRequest | None]:
        return list(self._occupants)

    def take(
        self,
        occupants: list[RowRequest | None],
        tokens: list[list[int]],
        accepted: list[int],
        committed: list[int],
        **records: None,
    ) -> None:
        self.rounds_by_k[len(tokens[0]) - 1] += 1
        running = [(row, one) for row, one in enumerate(occupants) if one is not None and not one.is_over]
        for row, request in running:
            drafted = min(request.remaining - len(request.tokens), len(tokens[row]) - 1)
            self._counters.count(request.index, accepted[row], committed[row], drafted)
            request.num_settled = len(request.tokens)
            request.num_drafted += drafted
            request.num_accepted += min(accepted[row], drafted)
        self._add([(row, one, tokens[row][: committed[row]]) for row, one in running])

    def take_first(
        self, occupants: Entered, tokens: list[list[int]], accepted: list[int], committed: list[int]
    ) -> None:
        # Requests that have lost their rows know it.
        entered = [one for one in zip(occupants, tokens, committed, strict=True) if not one[0][1].tokens]
        self._add([(row, one, new[:count]) for (row, one), new, count in entered if not one.is_over])

    def _add(self, found: list[tuple[int, RowRequest, list[int]]]) -> None:
        """Add new tokens to the requests of rows; those that end by them leave their rows."""
        now, going_on, stopped = time.perf_counter(), [], []
        for row, request, new in found:
            has_failed = new[-1:] == [NO_TOKEN]
            if not request.tokens:
                request.first_token = now
            if request.add(new[:-1] if has_failed else new, now):
                if request.criteria is not None:  # the device knows of tokens only
                    stopped.append(row)
                self._retire(row, request, now)
            elif has_failed:
                request.error = no_distribution("The request", len(request.tokens))
                self._retire(row, request, now)
            elif len(request.tokens) >= request.remaining:
                if request.is_cut:
                    request.error = (
                        f"The request has {len(request.prompt)} tokens and has not ended after {request.remaining} new "
                        "ones, but the target has no positions for more; expected a limit (max_new_tokens) that fits "
                        "max_position_embeddings."
                    )
                self._retire(row, request, now)
            else:
                going_on.append(request)
        if stopped:
            self._place.finish(stopped)
        if going_on and self._settings.on_tokens is not None:
            with caller():
                self._settings.on_tokens(going_on)

    def _retire(self, row: int, request: RowRequest, now: float) -> None:
        self._prefixes.advance(row, request)
        self._occupants[row] = None
        self._free.append(row)
        end(request, now, self._settings)


def _at_first(request: RowRequest) -> int:
    """Tokens that `request` has memory for when it is admitted."""
    return min(request.length + TOKENS_AHEAD, request.longest)


def _no_memory(request: RowRequest) -> str:
    return (
        f"There is no memory for a text of {request.length} tokens and more, even alone; expected a shorter prompt or "
        "fewer new tokens (max_new_tokens), or more memory."
    )
