"""The rows of a session in continuous batching: which request occupies which, and which requests wait."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from transformers import StoppingCriteriaList

from ..kernels.types import SamplingSettings
from ..patching.patch import caller
from ..stats import Counters
from .prefix_reuse import Prefix
from .rounds import RoundReport, Stage
from .row_prefixes import RowPrefixes

# Sizes of groups that are prefilled by graphs, padded: a group has the next larger size. Few sizes share buffers.
GROUP_SIZES = (1, 8, 32)

# Most tokens of a group, padding included; a longer prompt is a group by itself.
MOST_GROUP_TOKENS = 16384

# Waiting requests are admitted when this share of the rows is free: prefilling few rows takes about as long as many.
SHARE_TO_ADMIT = 1 / 8


@dataclass(eq=False)
class RowRequest:
    """A request: one row of the prompts of a call, or one that has arrived since.

    Attributes:
        index: row of the prompts; 0 for one that has arrived.
        prompt: `[length]` int64.
        prompt_ids: its tokens on the host; empty if rows do not reuse what others hold of it.
        remaining: tokens that it may add.
        is_cut: whether these are fewer than were asked for, since the target has no positions for more.
        ends: tokens that end it.
        seed: key of its random numbers.
        sampling: how it is sampled, where requests have settings of their own.
        criteria: end it, too; called with its text, `[1, n]` int64 on the host, after each of its tokens.
        records_timestamps: whether `timestamps` are recorded.
        tokens: generated so far.
        num_settled: how many of these there were before the last round, which the drafter has read.
        timestamps: `time.perf_counter()` when each of them reached the host.
        error: why it ended without an end-of-sequence token and before its limit; None if it did not.
        lifespan: when it was admitted and when it ended.
    """

    index: int
    prompt: torch.Tensor
    remaining: int
    is_cut: bool = False
    ends: frozenset[int] = frozenset()
    seed: int = 0
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    criteria: StoppingCriteriaList | None = None
    records_timestamps: bool = False
    prompt_ids: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    num_settled: int = 0
    timestamps: list[float] = field(default_factory=list)
    error: str | None = None
    lifespan: tuple[float, float] = (-1.0, -1.0)

    @property
    def is_over(self) -> bool:
        return self.lifespan[1] >= 0

    @property
    def longest(self) -> int:
        """Most tokens of its text, prompt included."""
        return len(self.prompt) + self.remaining

    def add(self, tokens: Sequence[int], now: float) -> bool:
        """Add what a round has committed, up to a token of `ends`; `criteria` may end it before that.

        Returns:
            whether it ends by either.
        """
        if self.criteria is None:
            self.tokens += tokens
            if self.records_timestamps:
                self.timestamps += [now] * len(tokens)
            return self.tokens[-1] in self.ends
        for token in tokens:
            self.tokens.append(token)
            if self.records_timestamps:
                self.timestamps.append(now)
            if token in self.ends or self._meets_criteria():
                return True
        return False

    def _meets_criteria(self) -> bool:
        text = torch.cat([self.prompt.cpu(), torch.tensor(self.tokens)])[None]
        with caller():
            return bool(self.criteria(text, None).all())


Entered = list[tuple[int, RowRequest]]


class Arrived(NamedTuple):
    """What has happened to requests since the last round.

    Attributes:
        requests: that have arrived, in the order in which they are admitted.
        withdrawn: requests that end at once, with an error for each.
        is_open: whether more may arrive.
        is_changed: whether the target may compute otherwise than before.
        has_waited: whether time was spent on waiting.
    """

    requests: Sequence[RowRequest] = ()
    withdrawn: Sequence[tuple[RowRequest, str]] = ()
    is_open: bool = True
    is_changed: bool = False
    has_waited: bool = False


class Arrivals(Protocol):
    """Requests that arrive while rounds run."""

    def next(self, is_idle: bool) -> Arrived:
        """What has arrived; called before every round. It may wait, for long only if `is_idle`: no round is due."""


@dataclass(frozen=True)
class ContinuousBatching:
    """How a call is run by continuous batching.

    Attributes:
        max_rows: most rows that rounds run on; None for the device's `DevicePolicy.max_rows`.
        record_timestamps: whether to record when each token of the call's requests reached the host.
        on_finished: called with every request that has ended, in the order in which they end.
        on_tokens: called after a round with the requests that it has given tokens and not ended.
        arrivals: requests that arrive while rounds run; the call's prompts, of which only the settings are taken, are
            no requests then. None if the call's prompts are the requests.
        longest: tokens of the texts that the first buffers are made for, if requests arrive.
        reuses_prefixes: whether keys and values of beginnings that texts have in common are computed once.
        drops_processors: whether logits processors that continuous batching does not run are left out, with a warning;
            they are an error otherwise.
    """

    max_rows: int | None = None
    record_timestamps: bool = False
    on_finished: Callable[[RowRequest], None] | None = None
    on_tokens: Callable[[list[RowRequest]], None] | None = None
    arrivals: Arrivals | None = None
    longest: int = 1
    reuses_prefixes: bool = True
    drops_processors: bool = False


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

    def prefill(self, prefixes: list[Prefix], requests: list[RowRequest]) -> RoundReport | None:
        """Begin to let each of `requests` occupy a row, with what is reused of its beginning; returns their first
        tokens if they do, else `prefill_next` goes on."""

    def prefill_next(self) -> RoundReport | None:
        """Go on with the prefill that was begun, for a limited time; returns the first tokens if it has ended."""

    def group_size(self, count: int) -> int | None:
        """Rows of the buffers in which so many requests are prefilled, padded; None if prompts are packed."""

    def finish(self, rows: list[int]) -> None:
        """Let `rows` be finished ones, which no later round gives tokens."""

    def is_to_move(self, num_occupied: int, waiting: Sequence[RowRequest]) -> bool:
        """Whether the requests of the occupied rows should go on in another session."""

    def move(self, rows: list[int], kept: list[int], slots: int, waiting: Sequence[RowRequest]) -> Stage | None:
        """Let the requests of `rows` go on in the first rows of another session; None if they stay.

        What the rows `kept` hold goes to the rows after those, as far as there are as many. No text of any of them is
        longer than `slots`.
        """

    def why_refused(self, request: RowRequest) -> str | None:
        """Why there is no room for `request`; None if there may be."""


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
        rows = [row for row, one in enumerate(self._occupants) if one is not None]
        kept = self._prefixes.kept(self._free) if self._is_open else []
        slots = max([self.longest(), *map(self._prefixes.size, kept)])
        stage = self._place.move(rows, kept, slots, self._waiting)
        if stage is not None:
            num_rows = self._place.num_rows
            held = [*rows, *kept][:num_rows]
            self._prefixes.move(held)
            self._occupants = [self._occupants[row] for row in rows] + [None] * (num_rows - len(rows))
            self._free = [*range(len(held), num_rows), *reversed(range(len(rows), len(held)))]
        return stage

    def tokens_left(self) -> float:
        """How many tokens a row may still add, for all requests that occupy it from now on."""
        running = [one.remaining - len(one.tokens) for one in self._occupants if one is not None]
        return (sum(running) + self._tokens_waiting) / max(len(running), 1)

    def admit(self) -> bool:
        """Put waiting requests into free rows: all that fit at first, then whenever enough rows are free.

        Returns whether it has taken time.
        """
        has_waited = self._settings.arrivals is not None and self._receive(self._settings.arrivals)
        if self._entering:
            self._enter(self._place.prefill_next())
            return True
        num_admitted = min(len(self._free), len(self._waiting))
        enough = max(1, round(len(self._occupants) * SHARE_TO_ADMIT))
        if not num_admitted or (not self._is_empty and num_admitted < min(enough, len(self._waiting))):
            return has_waited
        while self._free and self._waiting:
            group = self._next_group()
            if not group:
                break
            prefixes, group = self._place_group(group)
            self._enter(self._place.prefill(prefixes, group))
            has_waited = True
            if self._entering:
                break
        return has_waited

    def _place_group(self, group: list[RowRequest]) -> tuple[list[Prefix], list[RowRequest]]:
        """Choose rows for the requests of `group` that are prefilled now; the others wait on.

        Returns:
            the row of each, with what it reuses; and these requests.
        """
        for row, request in enumerate(self._occupants):
            if request is not None:
                self._prefixes.advance(row, request)
        plan = self._prefixes.plan(group, self._free)
        now, later = ([group[number] for number in numbers] for numbers in (plan.now, plan.later))
        self._waiting.extendleft(reversed(later))
        self._tokens_waiting += sum(one.remaining for one in later)
        for prefix, request in zip(plan.prefixes, now, strict=True):
            self._free.remove(prefix.row)
            self._counters.count_cached(request.index, prefix.length)
        self._entering = [(prefix.row, request) for prefix, request in zip(plan.prefixes, now, strict=True)]
        return plan.prefixes, now

    def _enter(self, first: RoundReport | None) -> None:
        """Let requests occupy the rows that are being prefilled, when they are; at once if no other row is occupied.

        Requests that arrive while rounds run are prefilled chunk by chunk, one before each round, so that a long prompt
        does not hold up the others. Where all are there from the start, no one waits for a single text.
        """
        is_alone = all(one is None for one in self._occupants)
        while first is None and (is_alone or self._settings.arrivals is None):
            first = self._place.prefill_next()
        if first is None:
            return
        now = time.perf_counter()
        for row, request in self._entering:
            self._prefixes.enter(row)
            if request.is_over:  # withdrawn
                self._place.finish([row])
                self._free.append(row)
            else:
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
            arrived = arrivals.next(is_idle=self._is_empty and not self._waiting)
            self._is_open, has_waited = arrived.is_open, has_waited or arrived.has_waited
            if arrived.is_changed:
                self._prefixes.forget()
            self._waiting.extend(arrived.requests)
            self._tokens_waiting += sum(one.remaining for one in arrived.requests)
            for request, error in arrived.withdrawn:
                self._withdraw(request, error)
            self._refuse()
            if self._waiting or not self._is_empty or not self._is_open:
                return has_waited

    def _withdraw(self, request: RowRequest, error: str) -> None:
        """End `request`, wherever it is."""
        if request.is_over:
            return
        request.error = error
        now = time.perf_counter()
        if request in self._waiting:
            self._waiting.remove(request)
            self._tokens_waiting -= request.remaining
            end(request, now, self._settings)
        elif any(one is request for _, one in self._entering):
            end(request, now, self._settings)
        elif request in self._occupants:
            row = self._occupants.index(request)
            self._place.finish([row])
            self._retire(row, request, now)

    def _refuse(self) -> None:
        """End the next waiting requests if there is no room for them."""
        while self._waiting and (error := self._place.why_refused(self._waiting[0])) is not None:
            self._withdraw(self._waiting[0], error)

    def _next_group(self) -> list[RowRequest]:
        """The next waiting requests: as many as rows are free, or if padded as a group may have."""
        group: list[RowRequest] = []
        longest, is_padded = 0, self._place.group_size(1) is not None
        most = min(len(self._free), GROUP_SIZES[-1]) if is_padded else len(self._free)
        while self._waiting and len(group) < most:
            if self._waiting[0].longest > self._place.capacity:
                break
            longest = max(longest, len(self._waiting[0].prompt))
            if group and is_padded and longest * self._place.group_size(len(group) + 1) > MOST_GROUP_TOKENS:
                break
            group.append(self._waiting.popleft())
            self._tokens_waiting -= group[-1].remaining
        return group

    def longest(self) -> int:
        return max((len(one.prompt) + len(one.tokens) for one in self._occupants if one is not None), default=1)

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
        self._add([(row, one, tokens[row][: committed[row]]) for row, one in running])

    def take_first(
        self, occupants: Entered, tokens: list[list[int]], accepted: list[int], committed: list[int]
    ) -> None:
        entered = zip(occupants, tokens, committed, strict=True)
        self._add([(row, one, new[:count]) for (row, one), new, count in entered if not one.is_over])

    def _add(self, found: list[tuple[int, RowRequest, list[int]]]) -> None:
        """Add new tokens to the requests of rows; those that end by them leave their rows."""
        now, going_on, stopped = time.perf_counter(), [], []
        for row, request, new in found:
            if request.add(new, now):
                if request.criteria is not None:  # the device knows of tokens only
                    stopped.append(row)
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


def end(request: RowRequest, now: float, settings: ContinuousBatching) -> None:
    """End `request` at time `now`."""
    request.lifespan = (request.lifespan[0], now)
    if settings.on_finished is not None:
        with caller():
            settings.on_finished(request)
