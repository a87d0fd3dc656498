"""Continuous batching: more requests than rows, where a request takes a row as soon as another one has ended.

Waiting requests are prefilled in free rows of the session that rounds run on, their prompts packed in one row. Where
prompts cannot be packed (recurrent layers), they are prefilled in groups, in sessions of their own, and copied. A round
does not know which rows are occupied: rows without a request are finished rows.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from transformers import EosTokenCriteria, LogitsProcessorList

from ..auto_k.auto_drafts import Workload
from ..calls.call import Call
from ..calls.request import Arrived, ContinuousBatching, Request, end
from ..device_policy import policy_of
from ..graphs.buckets import fewer_rows, next_power_of_two, row_sizes
from ..host.caches import OUTPUT_NAME
from ..kernels.types import NO_TOKEN, RowRules
from ..memory.virtual_memory import allocating, slots_in_memory
from ..modules.patch import user_code
from ..parallel.tensor_parallel import from_first_rank
from ..patching.support import stated_positions
from ..sampling.processors import BlockProcessor
from ..sampling.row_processors import RowsProcessor
from ..sampling.text_rules import TEXT_RULES, with_all_rules
from ..state import RoundShape, set_rows, upload
from .alone import choose, without_drafter
from .groups import Groups
from .hosted_target import HostedTarget
from .lease import SessionLease, can_grow, layout_of, shape_of
from .prefix_cache import Prefix, can_copy_rows, copy_prefixes, copy_texts, margin_of, spans_after
from .rounds import RoundReport
from .run import Run
from .runner import Runner
from .session_prefill import can_pack
from .sessions import sessions_of, settled_on_error

# Share of the time spent so far that a smaller session at the end of a call is assumed to save.
SHARE_OF_THE_END = 1 / 4
# Tokens of a text for which addresses are reserved where requests arrive, if the target has so many positions; a longer
# text moves all rows to a larger session.
MOST_RESERVED = 65536


@torch.inference_mode(False)  # whatever the user's mode: buffers and moved weights outlive the call
@torch.no_grad()
def decode_continuously(call: Call, requests: Sequence[Request], settings: ContinuousBatching) -> None:
    """Run `requests` on the static engine, with the settings of `call`. Requirements are those of
    `static_engine.decode` and `check_continuous`."""
    now = time.perf_counter()
    for one in requests:
        if one.error is not None:
            end(one, now, settings)
    # Longest first: prompts of a group have similar lengths.
    first = sorted((one for one in requests if one.error is None), key=lambda one: -len(one.prompt))
    with HostedTarget(call.model, call.drafter) as target:
        choice = None
        if first and settings.arrivals is None:
            num_rows = min(next_power_of_two(len(first)), _most_rows(call, settings))
            tokens, prompts = sum(one.remaining for one in first), sum(len(one.prompt) for one in first)
            work = Workload(tokens / num_rows, tokens / len(first), prompts / len(first))
            choice = choose(call, target, num_rows, work)
        if choice is None or not choice.is_alone:
            _run(call, first, len(requests), settings, target)
            if choice is not None:
                choice.note(call.drafter.stats)
            return
    with without_drafter(call, choice) as alone, HostedTarget(alone.model, alone.drafter) as target:
        _run(alone, first, len(requests), settings, target)


def _run(
    call: Call, first: Sequence[Request], num_requests: int, settings: ContinuousBatching, target: HostedTarget
) -> None:
    """Run the requests `first`, and those that arrive; `num_requests` is the number of requests with counters."""
    runner, arrivals = ContinuousRunner(call, settings, target), settings.arrivals
    arrived = Arrived(first, is_open=False) if arrivals is None else arrivals(False, target.unpatch)
    if arrivals is not None and not arrived.requests and not arrived.is_open:
        return
    runner.open(arrived.requests)
    run = Run(runner, arrived, runner.counters(max(num_requests, 1)), settings)
    try:
        run.run()
    except BaseException:
        with settled_on_error(runner.session):
            raise
    runner.keep()
    run.stats(call)


def _most_rows(call: Call, settings: ContinuousBatching) -> int:
    return settings.max_rows or policy_of(call.model.device).max_rows


def check_continuous(call: Call) -> None:
    """Raise `ValueError` if `call` asks for what continuous batching does not support."""
    others = sorted({type(rule).__name__ for rule in call.criteria if type(rule) is not EosTokenCriteria})
    if others:
        raise ValueError(
            f"Continuous batching ends a request at an end-of-sequence token or at max_new_tokens, but the call has "
            f"{', '.join(others)}; expected no other stopping criteria. Use generate() with a padded batch."
        )
    if not can_copy_rows(call.drafter):
        raise ValueError(
            f"{type(call.drafter).__name__} has memory of a generation (new_memory) that cannot be copied row by "
            "row; expected a family that implements copy_rows(). Use generate() with a padded batch."
        )
    asked = {
        "streamer": call.streamer,
        OUTPUT_NAME: call.cache,
        "RowTemperature processors": call.row_temperatures,
        **{f"output_{name}": True for name in call.kept},
    }
    found = [name for name, value in asked.items() if value is not None]
    if found:
        raise ValueError(
            f"Continuous batching does not support {', '.join(found)}. Drop that option, or use generate()."
        )


class ContinuousRunner(Runner):
    """Rows that requests take and leave; they move to a session of another size where that pays."""

    def __init__(self, call: Call, settings: ContinuousBatching, target: HostedTarget):
        processors = call.processors if settings.arrivals is None else with_all_rules(call.processors)
        others = LogitsProcessorList(one for one in processors if type(one) not in TEXT_RULES)
        blocks = [BlockProcessor(some, temperature=call.temperature) for some in (others, processors)]
        process = RowsProcessor(*blocks, fails_alone=settings.arrivals is not None)
        super().__init__(call, target, process)
        self._settings = settings
        self._most = _most_rows(call, settings)
        # The sessions in which requests are prefilled; None if their prompts are packed.
        self._groups = None if can_pack(target) else Groups(call, target, is_continuous=True)
        self.merges_equal = settings.reuses_prefixes and self._groups is not None
        shape = shape_of(call, 1, 1, target.is_captured)
        self._is_in_memory = can_grow(target) and layout_of(target, shape) is not None
        # Tokens of a text: the most that there are slots for, and the most that is expected at first.
        self._longest = self._expected = 1
        # Whether nothing is kept for other calls any more.
        self._has_freed = False
        # Whether rows stay in this session, since fewer rows are not worth their graphs, or do not fit in memory.
        self._stays = False
        # Tokens of the shortest text for which there was no memory.
        self._too_long: int | None = None

    def open(self, first: Sequence[Request]) -> None:
        """Open a session for the requests `first`, with as many rows as fit in memory; all rows are free."""
        call, has_arrivals = self._call, self._settings.arrivals is not None
        self._suit(first)
        self._process.own = self._processors_of(enumerate(first))  # decides what the first rounds are captured for
        if self.target.is_captured and self._groups is not None:
            self._groups.open(first)  # before the rows, which may take all of the free memory
        longest = max([one.longest for one in first], default=1)
        num_rows = min(next_power_of_two(max(len(first), 1)), self._most)
        if has_arrivals:
            num_rows, longest = self._rows_for(len(first)), max(longest, self._settings.longest)
        self._expected = longest
        if self._is_in_memory and has_arrivals:
            longest = max(longest, min(stated_positions(call.model) or MOST_RESERVED, MOST_RESERVED))
        wanted = [(num_rows, longest)]
        # Without memory for the reserved length: later, requests that are too long are refused one by one.
        if has_arrivals and longest > self._settings.longest:
            wanted.append((self._rows_for(len(first)), self._settings.longest))
        # As many rows as wanted, else half of them, and so on down to one.
        sizes = [(rows >> halvings, tokens) for rows, tokens in wanted for halvings in range(rows.bit_length())]
        self._use(self._largest(sizes, {}))
        self.execution = self.lease.execution(self.lease.allowed(self.drafts.current))
        if self._settings.reuses_prefixes:
            self.prefix_margin = margin_of(self.target, self.lease.shape)
        self._process.own = {}

    def _suit(self, requests: Sequence[Request]) -> None:
        """Let rounds compute what `requests`, the occupants of rows, need: each case has its own captured round."""
        self._logprobs = tuple(sorted({one.return_logprobs for one in requests} - {None}))

    def keep(self) -> None:
        """Return the sessions to the pool."""
        if self._groups is not None:
            self._groups.keep()
        self.lease.keep()

    def _processors_of(self, requests: Iterable[tuple[int, Request]]) -> dict[int, LogitsProcessorList | RowRules]:
        """The logits processors or rules of requests that have their own, by row; made when first asked for."""
        make, found = self._settings.processors_of, {}
        for row, one in requests:
            if make is not None and not isinstance(one.processors, (LogitsProcessorList, RowRules)):
                with user_code():
                    one.processors = make(one)
            if one.processors not in (None, RowRules()):
                found[row] = one.processors
        return found

    def free_others(self) -> bool:
        """Free what is kept for other calls: the memory of rows; where there is none, graphs, too. Returns whether
        anything was kept."""
        pool = sessions_of(self._call.drafter)
        if pool.free_rows():
            return True
        if not len(pool) and self._has_freed:
            return False
        self._free_kept()
        return True

    def _free_kept(self) -> None:
        self._has_freed = True
        super()._free_kept()

    # Sessions.

    def _largest(self, sizes: Sequence[tuple[int, int]], rows: Mapping[int, int]) -> SessionLease:
        """A session of the first of `sizes` (rows, tokens of a text) that fits in memory; `rows` will move to it."""
        return self._first_that_fits([functools.partial(self._open, *size, rows) for size in sizes])

    def _open(self, num_rows: int, longest: int, rows: Mapping[int, int]) -> SessionLease:
        lease, device = self._lease_of(num_rows, longest), self._call.model.device
        slots = lease.shape.slots
        with allocating(num_rows, slots, device), settled_on_error(lease.take()):
            drafted = lease.allowed(lease.drafts().current)
            lease.session.state.live = live = min(self._expected, slots)
            lease.session.state.logprobs = self._logprobs
            self._clear(lease, drafted)
            lease.session.state.live = live
            if lease.lacks_round(drafted):
                lease.capture_round(drafted)
        self._commit_texts(lease, rows)
        self._longest = longest
        return lease

    def _lease_of(self, num_rows: int, longest: int) -> SessionLease:
        shape = shape_of(self._call, num_rows, longest, self.target.is_captured)
        if self._is_in_memory:
            shape = shape._replace(slots=slots_in_memory(shape.slots - 1, self._call.model.device))
        return SessionLease(self._call, self.target, shape, self._process, True, self._is_in_memory)

    def _clear(self, lease: SessionLease, drafted: RoundShape | None = None) -> None:
        """Clear all rows of the session of `lease`, whose first rounds have `drafted`, if that is known."""
        session = lease.session or lease.take()
        with settled_on_error(session):
            session.state.clear()
            session.state.set_temperature(self._call.temperature)
            lease.allocate(drafted)

    def is_to_move(self, num_occupied: int, waiting: Sequence[Request], tokens_left: Callable[[], float]) -> bool:
        if waiting:
            return bool(self._larger_sizes(num_occupied, waiting))
        lease = None if self._stays else self._smaller_lease(num_occupied)
        if lease is None:
            return False
        self._stays = not self._is_worth_moving(lease, tokens_left)
        return not self._stays

    def move(self, rows: Mapping[int, int], kept: Mapping[int, int], waiting: Sequence[Request]) -> int | None:
        larger = self._larger_sizes(len(rows), waiting) if waiting else []
        try:
            lease = self._largest(larger, rows) if larger else self._fewer_lease(rows)
        except torch.OutOfMemoryError:
            # Ranks of one model need the same rows.
            if self.target.is_split:
                raise
            lease = None
        if lease is not None:
            if larger:
                self._stays = False
                if lease.shape.batch < larger[0][0]:
                    self._most = lease.shape.batch
            return self._switch(lease, rows, kept)
        if not larger:
            self._stays = True
            return None
        self.free_others()
        longest = larger[0][1]
        if longest > max(self._longest, self.capacity):
            self._too_long = longest
        else:
            self._most = self.num_rows
        return None

    def _rows_for(self, count: int) -> int:
        """The smallest of the row sizes that holds `count` requests, or else the largest."""
        return next((size for size in row_sizes(self._most, self.target.is_captured) if size >= count), self._most)

    def _larger_sizes(self, num_occupied: int, waiting: Sequence[Request]) -> list[tuple[int, int]]:
        """Rows and tokens of a text of the sessions with room for more of `waiting`, best first."""
        if self._settings.arrivals is None:
            return []
        next_ones = itertools.islice(waiting, self._most)
        texts = [one.longest for one in next_ones if self._too_long is None or one.longest < self._too_long]
        longest = max([*texts, self._longest])
        most = max(self._rows_for(num_occupied + len(texts)), self.num_rows)
        is_longer = longest > max(self._longest, self.capacity)
        if not is_longer and most == self.num_rows:
            return []
        fewest = num_occupied + 1 if is_longer else self.num_rows + 1
        sizes = {*row_sizes(self._most, self.target.is_captured), self.num_rows}
        return [(size, longest) for size in sorted(sizes, reverse=True) if min(fewest, most) <= size <= most]

    def why_refused(self, request: Request) -> str | None:
        if self._too_long is None or request.longest < self._too_long:
            return None
        return (
            f"There is no memory for a prompt of {len(request.prompt)} tokens and {request.remaining} new ones; "
            f"expected fewer than {self._too_long} together. Shorten the prompt, or lower max_new_tokens."
        )

    def _smaller_lease(self, num_occupied: int) -> SessionLease | None:
        """The lease of the smallest session for `num_occupied` requests; None if rows stay where they are."""
        most = self.num_rows
        # Where requests arrive, half of the rows stay free for them, so that rows do not move at every arrival.
        count = num_occupied if self._settings.arrivals is None or num_occupied == 1 else 2 * num_occupied
        rows, fewer = most, fewer_rows(most, self.target.is_captured)
        while fewer is not None and count <= fewer:
            rows, fewer = fewer, fewer_rows(fewer, self.target.is_captured)
        return None if rows == most else self._lease_of(rows, self._longest)

    def _is_worth_moving(self, lease: SessionLease, tokens_left: Callable[[], float]) -> bool:
        """Whether moving saves more than captures take: half of the time left, or a share of the time so far."""
        if not self.target.is_captured or lease.is_kept:
            return True
        drafted, times = self.drafts.current, self.drafts.times
        rounds = tokens_left() / (drafted.num_drafts + 1)
        left = rounds * times.milliseconds(drafted) if drafted in times else 0.0
        is_worth = max(left / 2, SHARE_OF_THE_END * times.total) > 1e3 * self.session.seconds_a_capture
        return bool(from_first_rank(torch.tensor(is_worth), self._call.model))

    def _fewer_lease(self, rows: Mapping[int, int]) -> SessionLease:
        """A smaller session for the requests of `rows`."""
        lease = self._smaller_lease(len(rows))
        with allocating(lease.shape.batch, lease.shape.slots, self.state.tokens.device):
            self._clear(lease)
        self._commit_texts(lease, rows)
        # Its graphs are assumed to take as long as those of the session before.
        lease.session.capture_seconds = lease.session.capture_seconds or self.session.seconds_a_capture
        return lease

    def _commit_texts(self, lease: SessionLease, rows: Mapping[int, int]) -> None:
        """Commit memory in the first rows of the session of `lease` for what `rows` hold: row to number of tokens."""
        memory = lease.session.state.cache.row_memory
        try:
            for row, length in enumerate(() if memory is None else rows.values()):
                memory.commit(row, length)
        except torch.OutOfMemoryError:
            memory.free()
            raise

    def _switch(self, lease: SessionLease, rows: Mapping[int, int], kept: Mapping[int, int]) -> int:
        """Go on in the session of `lease`: its first rows get what `rows` hold, the next ones that of `kept` rows."""
        before, memory, held = self.lease, lease.session.state.cache.row_memory, dict(rows)
        for row, length in list(kept.items())[: lease.shape.batch - len(rows)]:
            try:
                if memory is not None:
                    memory.commit(len(held), length)
            except torch.OutOfMemoryError:
                break
            held[row] = length
        if held:
            pairs = list(enumerate(held))
            copy_texts(lease.session.state, self._call.drafter, pairs, self.state, max(held.values()))
        before.keep()  # with the memory of its rows: to map it again takes longer than a round
        self._has_freed = False
        own = self._process.own
        self._process.own = {to: own[row] for to, row in enumerate(rows) if row in own}
        self._use(lease, self.drafts.current)
        return len(held)

    # Requests.

    def fits_group(self, count: int, longest: int) -> bool:
        return self._groups is None or self._groups.fits(count, longest)

    def prefill(self, prefixes: Sequence[Prefix], requests: Sequence[Request], running: Sequence[Request]) -> None:
        rows, margin, lease, state = [one.row for one in prefixes], self.prefix_margin or 0, self.lease, self.state
        self._rows = rows
        self._suit((*running, *requests))
        state.logprobs = self._logprobs
        self._entering = upload(rows, state.lengths)
        self._entering_processors = self._processors_of(zip(rows, requests, strict=True))
        # Preempted requests know the token that follows what is prefilled.
        known = [one.tokens[-1] if one.tokens else NO_TOKEN for one in requests]
        self._known = upload(known, state.tokens) if any(one.tokens for one in requests) else None
        if self._groups is not None:
            self._groups.prefill(state, prefixes, margin, requests, self._fill)
            return
        with settled_on_error(lease.session):
            self._fill(requests, state, rows)
            spans = spans_after(prefixes, [one.num_prefilled for one in requests])
            lease.prefill.capture(spans)
            self.finish(rows)  # until they are prefilled
            copy_prefixes(state, self._call.drafter, prefixes, margin)
            lease.prefill.start(spans, self._entering)

    def prefill_next(self) -> tuple[int, RoundReport] | None:
        with settled_on_error(self.session):
            if self._groups is not None:
                if not self._groups.prefill_next():
                    return None
                done = slice(0, len(self._rows))
            else:
                prefill = self.lease.prefill
                # Without arrivals nobody waits for a single text.
                done = prefill.run_rest() if self._settings.arrivals is None else prefill.run_next()
                if done.start == done.stop:
                    return None
                set_rows(self.state.finished, self._entering[done], False)
            entering, running = self._entering_processors, self._process.own
            self._process.own = own = {row: entering[row] for row in self._rows[done] if row in entering}
            try:
                known = None if self._known is None else self._known[done]
                return done.stop - done.start, self._commit_first_tokens(self._entering[done], known)
            finally:
                self._process.own = {**running, **own}

    def take_failed(self) -> dict[int, str]:
        failed, self._process.failed = self._process.failed, {}
        return failed

    def retire(self, row: int) -> None:
        self._process.own.pop(row, None)
