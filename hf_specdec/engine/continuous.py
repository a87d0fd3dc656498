"""Continuous batching: more requests than rows, where a request takes a row as soon as another has ended.

Waiting requests are prefilled in free rows of the session that rounds run on, their prompts packed in one row. Where
prompts cannot be packed, such as those of recurrent layers, they are prefilled in groups, in sessions of their own, and
copied. A round does not know which of its rows are occupied: rows that no request occupies are finished ones.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence

import torch
from transformers import LogitsProcessorList

from ..device_policy import policy_of
from ..kernels.types import NO_TOKEN
from ..parallel.tensor_parallel import from_first_rank, tensor_parallel_group
from ..patching.patch import caller
from ..patching.support import stated_positions
from ..row_buffers import set_rows, upload, upload_all
from ..sampling.logits import RowSampling
from ..state import DecodeState, Shape
from ..stats import Counters
from .auto_drafts import Acceptance
from .buckets import fewer_rows, next_power_of_two, row_sizes
from .continuous_support import check_continuous, ends_of, processor_of, requests_of
from .groups import PaddedGroups
from .hosted_target import HostedTarget
from .lease import SessionLease, first_k, shape_of
from .output import ContinuousOutput
from .prefix_reuse import Prefix, copy_prefixes, copy_texts, margin_of, wave_after
from .request import Request
from .request_rows import RequestRows
from .rounds import RoundLoop, RoundReport, Stage, commit_first_token
from .row_memory import MOST_RESERVED, MemoryOfRows, allocating, can_grow, layout_of, slots_in_memory
from .row_request import ContinuousBatching, RowRequest, end
from .session_prefill import can_pack
from .sessions import Session, sessions_of, settled_on_error

# The share of all time that a smaller session at the end of a call is assumed to save.
SHARE_OF_THE_END = 1 / 4


@torch.inference_mode(False)  # whatever the caller's: buffers and weights that are moved outlive the call
@torch.no_grad()
def decode_continuously(request: Request, settings: ContinuousBatching) -> ContinuousOutput:
    """Generate for every prompt of `request` on the static engine; requirements as of `static_engine.decode`.

    Raises:
        ValueError: see `check_continuous`.
    """
    check_continuous(request)
    with HostedTarget(request.model, request.drafter) as target:
        return ContinuousRun(request, settings, target).run()


class ContinuousRun(MemoryOfRows):
    """A call by continuous batching; also where its requests are, the `Place` of `RequestRows`.

    Args:
        request: whose prompts are the requests, unless requests arrive.
        settings: of continuous batching.
        target: of the call.
    """

    def __init__(self, request: Request, settings: ContinuousBatching, target: HostedTarget):
        self._request, self._settings, self._target = request, settings, target
        self._process = processor_of(request)
        self._process.own = self._own_processors
        self._row_sampling = next((one for one in request.processors if type(one) is RowSampling), None)
        self._most = settings.max_rows or policy_of(request.model.device).max_rows
        self.requests = requests_of(request, settings) if settings.arrivals is None else []
        self._rows: RequestRows | None = None
        # Processors of requests whose first tokens are drawn, by row; None while others are.
        self._first_processors: dict[int, LogitsProcessorList] | None = None
        # Where requests are prefilled; None if their prompts are packed.
        self._groups = None if can_pack(target) else PaddedGroups(request, target)
        if can_grow(target):
            target.key_layout = layout_of(target, shape_of(request, 1, 1, target.is_captured))
        self._grows = target.key_layout is not None
        self._acceptance = Acceptance(request.num_draft_tokens)
        # Tokens of the texts that there are slots for, and of those that are expected first.
        self._longest = self._expected = 1
        # Whether nothing is kept for other calls any more.
        self._has_freed = False
        # Whether rows stay where they are, since fewer are not worth their graphs, or there is no memory for them.
        self._stays = False
        # Tokens of a text for which there was no memory.
        self._too_long: int | None = None

    def run(self) -> ContinuousOutput:
        """Generate for all requests."""
        request, arrivals = self._request, self._settings.arrivals
        self._refuse_too_long()
        # The longest first: prompts of a group have similar lengths.
        first = sorted((one for one in self.requests if one.error is None), key=lambda one: -len(one.prompt))
        if arrivals is not None:
            arrived = arrivals.next(False, self.leave_target)
            first = list(arrived.requests)
            if not first and not arrived.is_open:
                return ContinuousOutput([], request.drafter.stats)
        if self._row_sampling is not None:
            self._row_sampling.filters = any(one.sampling.filters for one in first)
        self._first_processors = self._processors_of(enumerate(first))  # what the first rounds are captured for
        if self._target.is_captured and self._groups is not None:
            self._groups.open(first)  # before the rows, which may take all memory that is left
        self._lease = lease = self._open_most(first)
        counters = Counters(
            max(len(self.requests), 1),
            request.num_draft_tokens,
            self._acceptance.observe if request.is_auto else None,
        )
        execution = lease.execution(self._process, first_k(request, lease.shape))
        self._rows, self._first_processors = RequestRows(self, first, counters, self._settings), None
        rows = self._rows
        start = time.perf_counter()
        self._stage = lease.stage(self._process, request, self._acceptance, rows.tokens_left)
        try:
            RoundLoop(self._stage, rows).run()
        except BaseException:
            with settled_on_error(self._lease.session):
                raise
        finally:
            # They refer to this run: a cycle, which would hold its buffers until the garbage collector comes.
            self._rows = self._stage = None
            self._process.own = dict  # what is captured holds the processor
        seconds = time.perf_counter() - start
        if self._groups is not None:
            self._groups.keep()
        self._lease.keep()
        request.drafter._last_stats = counters.summary(
            num_assistant_tokens=request.num_draft_tokens,
            engine="static",
            reason=request.reason,
            execution=execution,
            batch_invariant=request.drafter.batch_invariant,
            draft_probs=lease.shape.draft_probs,
            num_rounds=rows.rounds_by_k.total(),
            rounds_by_k=dict(rows.rounds_by_k),
            seconds=seconds,
        )
        return ContinuousOutput(self.requests, request.drafter.stats)

    def _processors_of(self, requests: Iterable[tuple[int, RowRequest]]) -> dict[int, LogitsProcessorList]:
        """Processors of requests that have some of their own, by row; made when they are first asked for."""
        make, found = self._settings.processors_of, {}
        for row, one in requests:
            if one.processors is None and make is not None:
                with caller():
                    one.processors = make(one, self._request)
            if one.processors is not None:
                found[row] = one.processors
        return found

    def _own_processors(self) -> dict[int, LogitsProcessorList]:
        """Processors of the rows that have some of their own."""
        if self._first_processors is not None or self._rows is None:
            return self._first_processors or {}
        return {
            row: one.processors
            for row, one in enumerate(self._rows.occupants())
            if one is not None and one.processors is not None
        }

    def _refuse_too_long(self) -> None:
        now = time.perf_counter()
        for one in self.requests:
            if one.error is not None:
                end(one, now, self._settings)

    @property
    def session(self) -> Session:
        return self._lease.session

    @property
    def num_rows(self) -> int:
        return self._lease.shape.batch

    @property
    def capacity(self) -> int:
        memory = self._lease.session.row_memory
        return self._lease.shape.slots - 1 if memory is None else memory.capacity

    @property
    def prefix_margin(self) -> int | None:
        is_on, most_drafts = self._settings.reuses_prefixes, self._lease.shape.num_draft_tokens
        return margin_of(self._target, most_drafts) if is_on else None

    @property
    def merges_equal(self) -> bool:
        return self._settings.reuses_prefixes and self._groups is not None

    def _open_most(self, first: Sequence[RowRequest]) -> SessionLease:
        """A session for the requests `first`, with as many rows as fit into memory; all of them are free."""
        request = self._request
        longest = max([one.longest for one in first], default=1)
        if self._settings.arrivals is not None:
            num_rows, longest = self._rows_for(len(first)), max(longest, self._settings.longest)
        else:
            num_rows = min(next_power_of_two(len(self.requests)), self._most)
        self._expected = longest
        if self._grows and self._settings.arrivals is not None:
            longest = max(longest, min(stated_positions(request.model) or MOST_RESERVED, MOST_RESERVED))
        while True:
            try:
                return self._open(num_rows, longest)
            except torch.OutOfMemoryError:
                # Processes that run one model together need the same rows.
                if tensor_parallel_group(request.model) is not None:
                    raise
                # Requests that arrive are refused one by one, where there is no memory for them.
                is_last = self._settings.arrivals is None or longest == self._settings.longest
                if num_rows == 1 and is_last:
                    raise
            # The error, which held what was allocated, is gone.
            self._free_kept()
            if num_rows > 1:
                num_rows //= 2
            else:
                num_rows, longest = self._rows_for(len(first)), self._settings.longest

    def leave_target(self) -> None:
        self._target.unpatch()

    def free_others(self) -> None:
        if len(sessions_of(self._request.drafter)) or not self._has_freed:
            self._free_kept()

    def _free_kept(self) -> None:
        """Free what is kept for other calls."""
        self._has_freed = True
        sessions_of(self._request.drafter).clear()
        torch.cuda.empty_cache()

    def _open(self, num_rows: int, longest: int) -> SessionLease:
        request = self._request
        shape = shape_of(request, num_rows, longest, self._target.is_captured)
        if self._grows:
            shape = shape._replace(slots=slots_in_memory(shape.slots - 1, request.model.device))
        num_drafts = first_k(request, shape)
        lease = self._lease_of(shape)
        with allocating(shape, request.model.device), settled_on_error(lease.take()):
            lease.session.state.live = min(self._expected, shape.slots)
            if lease.lacks_round(self._process, num_drafts):
                lease.start_compiler()
            self._clear(lease)
            if lease.lacks_round(self._process, num_drafts):
                lease.capture_round(self._process, num_drafts)
        self._longest = longest
        return lease

    def _lease_of(self, shape: Shape) -> SessionLease:
        """For a session that rounds run on."""
        chunk_size = self._request.config.prefill_chunk_size
        return SessionLease(self._target, shape, chunk_size, is_continuous=True, grows=self._grows)

    def _clear(self, lease: SessionLease) -> None:
        """Let all rows of the session of `lease` be free."""
        session = lease.session or lease.take()
        with settled_on_error(session):
            session.state.clear()
            session.state.set_temperature(self._request.temperature)
            lease.allocate()

    def is_to_move(self, num_occupied: int, waiting: Sequence[RowRequest]) -> bool:
        if waiting:
            return bool(self._larger_sizes(num_occupied, waiting))
        return self._fits_fewer(num_occupied)

    def move(
        self, rows: dict[int, int], kept: dict[int, int], waiting: Sequence[RowRequest]
    ) -> tuple[Stage, int] | None:
        lease = self._larger_lease(rows, waiting) if waiting else self._fewer_lease(rows)
        return None if lease is None else self._switch(lease, rows, kept)

    def _rows_for(self, count: int) -> int:
        """The fewest rows, of a few numbers, that `count` requests fit into, or else the most."""
        return next((size for size in row_sizes(self._most, self._target.is_captured) if size >= count), self._most)

    def _larger_sizes(self, num_occupied: int, waiting: Sequence[RowRequest]) -> list[tuple[int, int]]:
        """Rows, and tokens of a text, of sessions that have room for more of `waiting`, the best first; none if not.

        Only where requests arrive; else there is room for all texts from the start.
        """
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
        sizes = {*row_sizes(self._most, self._target.is_captured), self.num_rows}
        return [(size, longest) for size in sorted(sizes, reverse=True) if min(fewest, most) <= size <= most]

    def _larger_lease(self, rows: dict[int, int], waiting: Sequence[RowRequest]) -> SessionLease | None:
        """A session where more requests than those of `rows`, or longer ones, fit, if there is memory for it."""
        sizes, before = self._larger_sizes(len(rows), waiting), self._longest
        for num_rows, longest in sizes:
            try:
                lease = self._open(num_rows, longest)
                self._commit_texts(lease, rows)
            except torch.OutOfMemoryError:
                # Processes that run one model together need the same rows.
                if tensor_parallel_group(self._request.model) is not None:
                    raise
                lease = None
            if lease is not None:
                self._stays = False
                if num_rows < sizes[0][0]:
                    self._most = num_rows
                return lease
            # The error, which held what was allocated, is gone.
            self._longest = before
            self._free_kept()
        if longest > max(before, self.capacity):
            self._too_long = longest
        else:
            self._most = self.num_rows
        return None

    def why_refused(self, request: RowRequest) -> str | None:
        if self._too_long is None or request.longest < self._too_long:
            return None
        return (
            f"There is no memory for a text of {len(request.prompt)} tokens and {request.remaining} new ones; expected "
            f"fewer than {self._too_long} together. Shorten the prompt, or lower max_new_tokens."
        )

    def _fits_fewer(self, num_occupied: int) -> bool:
        """Whether `num_occupied` rows should go on in a smaller session; asked when no request waits."""
        if self._stays:
            return False
        lease = self._smaller_lease(num_occupied)
        if lease is None:
            return False
        self._stays = not self._is_worth_moving(lease)
        return not self._stays

    def _smaller_lease(self, num_occupied: int) -> SessionLease | None:
        """For a session with the fewest rows to which so many move; None if they stay."""
        shape = self._lease.shape
        # Where requests arrive, half of the rows stay free for them, so that they do not move at every arrival.
        count = num_occupied if self._settings.arrivals is None or num_occupied == 1 else 2 * num_occupied
        rows, fewer = shape.batch, fewer_rows(shape.batch, self._target.is_captured)
        while fewer is not None and count <= fewer:
            rows, fewer = fewer, fewer_rows(fewer, self._target.is_captured)
        return None if rows == shape.batch else self._lease_of(shape._replace(batch=rows))

    def _is_worth_moving(self, lease: SessionLease) -> bool:
        """Whether moving saves more time than capturing the graphs of the smaller session of `lease` takes.

        It is assumed to save half of the time that this call may still take; and, since as much as there was so far may
        follow in other calls, a share of that.
        """
        if not self._target.is_captured or lease.is_kept:
            return True
        session, num_drafts = self._lease.session, self._stage.drafts.current
        times = session.round_times
        rounds = self._rows.tokens_left() / (num_drafts + 1)
        left = rounds * times.milliseconds(num_drafts) if num_drafts in times else 0.0
        is_worth = max(left / 2, SHARE_OF_THE_END * times.total) > 1e3 * session.capture_seconds
        return bool(from_first_rank(torch.tensor(is_worth), self._request.model))

    def _fewer_lease(self, rows: dict[int, int]) -> SessionLease | None:
        """A smaller session for the requests of `rows`, if there is memory for it."""
        before = self._lease
        lease = self._smaller_lease(len(rows))
        try:
            with allocating(lease.shape, before.session.state.tokens.device):
                self._clear(lease)
            self._commit_texts(lease, rows)
        except torch.OutOfMemoryError:
            # Processes that run one model together need the same rows.
            if tensor_parallel_group(self._request.model) is not None:
                raise
            self._stays = True
            return None
        # Its graphs are expected to take as long as those of the session before.
        lease.session.capture_seconds = lease.session.capture_seconds or before.session.capture_seconds
        return lease

    def _commit_texts(self, lease: SessionLease, rows: dict[int, int]) -> None:
        """Let the first rows of the session of `lease` have memory for what `rows` hold, by their numbers of tokens."""
        memory = lease.session.row_memory
        try:
            for row, length in enumerate(() if memory is None else rows.values()):
                memory.commit(row, length)
        except torch.OutOfMemoryError:
            memory.free()
            raise

    def _switch(self, lease: SessionLease, rows: dict[int, int], kept: dict[int, int]) -> tuple[Stage, int]:
        """Let the first rows of the session of `lease` hold what `rows` hold, and `kept` as far as there is room."""
        request, before, num_drafts = self._request, self._lease, self._stage.drafts.current
        memory, held = lease.session.row_memory, dict(rows)
        for row, length in list(kept.items())[: lease.shape.batch - len(rows)]:
            try:
                if memory is not None:
                    memory.commit(len(held), length)
            except torch.OutOfMemoryError:
                break
            held[row] = length
        if held:
            pairs, longest = list(enumerate(held)), max(held.values())
            copy_texts(lease.session.state, request.drafter, pairs, before.session.state, longest)
        self.give_back(dict.fromkeys(range(before.shape.batch), 0))
        before.keep()
        self._has_freed = False
        self._lease = lease
        self._stage = lease.stage(self._process, request, self._acceptance, self._rows.tokens_left, num_drafts)
        return self._stage, len(held)

    def finish(self, rows: list[int]) -> None:
        state = self._lease.session.state
        set_rows(state.finished, upload(rows, state.lengths), True)

    def prefill(self, prefixes: list[Prefix], requests: list[RowRequest]) -> None:
        rows, margin = [one.row for one in prefixes], self.prefix_margin or 0
        lease, state = self._lease, self._lease.session.state
        if self._row_sampling is not None:
            running = [one for one in self._rows.occupants() if one is not None]
            self._row_sampling.filters = any(one.sampling.filters for one in (*running, *requests))
        self._entering = upload(rows, state.lengths)
        self._entering_processors = self._processors_of(zip(rows, requests, strict=True))
        # What comes after it is known of texts that have lost their rows.
        known = [one.tokens[-1] if one.tokens else NO_TOKEN for one in requests]
        self._known = upload(known, state.tokens) if any(one.tokens for one in requests) else None
        if self._groups is not None:
            self._groups.prefill(state, prefixes, margin, requests, self._fill)
            return
        with settled_on_error(lease.session):
            self._fill(requests, state, rows)
            wave = wave_after(prefixes, [one.num_prefilled for one in requests])
            if lease.prefill.lacks([wave]):
                lease.prefill.capture([wave])
            self.finish(rows)  # until they are prefilled
            copy_prefixes(state, self._request.drafter, prefixes, margin)
            lease.prefill.start_rows(wave.spans, self._entering)

    def prefill_next(self) -> RoundReport | None:
        lease = self._lease
        if self._groups is not None:
            return self._commit_first_tokens() if self._groups.prefill_next() else None
        with settled_on_error(lease.session):
            if not lease.prefill.run_next():
                return None
            set_rows(lease.session.state.finished, self._entering, False)
        return self._commit_first_tokens()

    def _commit_first_tokens(self) -> RoundReport:
        with settled_on_error(self._lease.session):
            self._first_processors = self._entering_processors
            result, *_ = commit_first_token(self._lease.session.state, self._process, self._entering, self._known)
            self._first_processors = None
            return RoundReport(result, self._entering)

    def _fill(self, requests: Sequence[RowRequest], state: DecodeState, rows: Sequence[int]) -> None:
        """Put `requests` into `rows` of `state`, not prefilled."""
        state.admit(
            rows,
            upload_all([one.text[: one.num_prefilled] for one in requests], state.tokens),
            [one.longest - one.num_prefilled for one in requests],
            upload([one.seed for one in requests], state.seeds),
            ends_of(requests, state.eos),
        )
        state.prompt_lengths[upload(rows, state.lengths)] = upload([len(one.prompt) for one in requests], state.lengths)
        if self._row_sampling is not None:
            state.set_row_sampling(rows, [one.sampling for one in requests])

    def group_size(self, count: int) -> int | None:
        return None if self._groups is None else self._groups.size(count)
