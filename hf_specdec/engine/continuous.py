"""Continuous batching: more requests than rows, where a request takes a row as soon as another has ended.

Waiting requests are prefilled in groups, in sessions of their own, and copied into free rows of the session that rounds
run on. A round does not know which of its rows are occupied: rows that no request occupies are finished ones.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..device_policy import policy_of
from ..drafters.base import Drafter
from ..parallel.tensor_parallel import from_first_rank, tensor_parallel_group
from ..patching.patch import caller
from ..sampling.processors import BlockProcessor
from ..state import upload
from ..stats import Counters, SpeculationStats
from .auto_drafts import Acceptance
from .buckets import fewer_rows, next_power_of_two
from .lease import LazyTarget, SessionLease, first_k, shape_of
from .request import Request
from .rounds import RoundLoop, Stage
from .sessions import sessions_of, settled_on_error
from .transcript import DECIDED_BY_TOKENS

# Sizes of groups that are prefilled by graphs: a group has the next larger size. Few sizes share buffers.
GROUP_SIZES = (1, 8, 32)

# Most tokens of a group, padding included; a longer prompt is a group by itself.
MOST_GROUP_TOKENS = 16384

# Waiting requests are admitted when this share of the rows is free: prefilling few rows takes about as long as many.
SHARE_TO_ADMIT = 1 / 8


# The share of all time that a smaller session at the end of a call is assumed to save.
SHARE_OF_THE_END = 1 / 4


@dataclass
class RowRequest:
    """A request of a call: one row of its prompts.

    Attributes:
        index: row of the prompts.
        prompt: `[length]` int64.
        remaining: tokens that it may add.
        tokens: generated so far.
        timestamps: `time.perf_counter()` when each of them reached the host; empty unless they are recorded.
        error: why it ended without an end-of-sequence token and before its limit; None if it did not.
        lifespan: when it was admitted and when it ended.
    """

    index: int
    prompt: torch.Tensor
    remaining: int
    tokens: list[int] = field(default_factory=list)
    timestamps: list[float] = field(default_factory=list)
    error: str | None = None
    lifespan: tuple[float, float] = (-1.0, -1.0)

    @property
    def is_over(self) -> bool:
        return self.lifespan[1] >= 0


@dataclass(frozen=True)
class ContinuousBatching:
    """How a call is run by continuous batching.

    Attributes:
        max_rows: most rows that rounds run on; None for the device's `DevicePolicy.max_rows`.
        record_timestamps: whether to record when each token reached the host.
        on_finished: called with every request that has ended, in the order in which they end.
    """

    max_rows: int | None = None
    record_timestamps: bool = False
    on_finished: Callable[[RowRequest], None] | None = None


@dataclass
class ContinuousOutput:
    """What a call by continuous batching returns.

    Attributes:
        requests: in the order of the prompts.
        speculation: statistics; also `drafter.stats`. Its `seconds` include prefill, which runs between rounds.
    """

    requests: list[RowRequest]
    speculation: SpeculationStats

    @property
    def sequences(self) -> torch.Tensor:
        """`[n]` int64: the generated tokens of all requests, one after the other."""
        return torch.tensor([token for request in self.requests for token in request.tokens], dtype=torch.int64)


def check_continuous(request: Request) -> None:
    """Raise `ValueError` if a call asks for what continuous batching does not have."""
    others = sorted({type(rule).__name__ for rule in request.criteria if type(rule) not in DECIDED_BY_TOKENS})
    if others:
        raise ValueError(
            f"Continuous batching ends a request at an end-of-sequence token or at max_new_tokens, but the call has "
            f"{', '.join(others)}; expected no other stopping criteria. Use generate() with a padded batch."
        )
    drafter = type(request.drafter)
    if drafter.new_memory is not Drafter.new_memory and drafter.copy_rows is Drafter.copy_rows:
        raise ValueError(
            f"{drafter.__name__} has memory of a generation (new_memory) that cannot be copied row by row; expected a "
            "family that implements copy_rows(). Use generate() with a padded batch."
        )
    if _processor_of(request).key is None:
        names = sorted({type(one).__name__ for one in request.processors})
        raise ValueError(
            f"Continuous batching runs logits processors that read the scores of one position only, but one of "
            f"{', '.join(names)} reads the text; expected temperature, top_k, top_p and the like. Use generate() with "
            "a padded batch."
        )
    asked = {
        "a streamer": request.streamer,
        "past_key_values": request.cache,
        "row temperatures": request.row_temperatures,
        **{f"output_{name}": request.keeps(name) or None for name in ("scores", "logits", "hidden_states")},
    }
    found = [name for name, value in asked.items() if value is not None]
    if found:
        raise ValueError(f"Continuous batching does not support {', '.join(found)}; expected a call without it.")


def _processor_of(request: Request) -> BlockProcessor:
    blank = torch.empty(0, 0, dtype=torch.int64, device=request.model.device)
    return BlockProcessor(request.processors, blank, [], request.temperature)


@torch.inference_mode(False)  # whatever the caller's: buffers and weights that are moved outlive the call
@torch.no_grad()
def decode_continuously(request: Request, settings: ContinuousBatching) -> ContinuousOutput:
    """Generate for every prompt of `request` on the static engine; requirements as of `static_engine.decode`.

    Raises:
        ValueError: see `check_continuous`.
    """
    check_continuous(request)
    with LazyTarget(request.model, request.drafter) as target:
        return ContinuousRun(request, settings, target).run()


class RequestRows:
    """The rows of a session, and the requests that occupy them or wait for one; the `Rows` of a round loop.

    Args:
        num_rows: of the session.
        requests: that wait, in the order in which they are admitted.
        ends: tokens that end a request.
        max_new_tokens: of every request; one that may add fewer and reaches that limit has failed.
        counters: of the requests, by their `index`.
        prefill: called with rows and with the requests that are to occupy them.
        size_of: rows of the buffers in which so many requests are prefilled.
        settings: of continuous batching.
        fits_fewer: called when no request waits, with the number of rows that are occupied: whether their requests
            should move to a smaller session.
        move: called with these rows: the first of the smaller session take their requests. Returns where rounds run
            from then on, and the number of its rows; None if they stay.
    """

    def __init__(
        self,
        num_rows: int,
        requests: Sequence[RowRequest],
        ends: set[int],
        max_new_tokens: int,
        counters: Counters,
        prefill: Callable[[list[int], list[RowRequest]], None],
        size_of: Callable[[int], int],
        settings: ContinuousBatching,
        fits_fewer: Callable[[int], bool] = lambda num_occupied: False,
        move: Callable[[list[int]], tuple[Stage, int] | None] = lambda rows: None,
    ):
        self._occupants: list[RowRequest | None] = [None] * num_rows
        self._free = list(range(num_rows))
        self._waiting = deque(requests)
        self._tokens_waiting = sum(one.remaining for one in requests)
        self._ends = ends
        self._max_new_tokens = max_new_tokens
        self._counters = counters
        self._prefill = prefill
        self._size_of = size_of
        self._settings = settings
        self._fits_fewer, self._move = fits_fewer, move
        self._enough_to_admit = max(1, round(num_rows * SHARE_TO_ADMIT))
        self.rounds_by_k: Counter[int] = Counter()

    @property
    def is_complete(self) -> bool:
        return not self._waiting and len(self._free) == len(self._occupants)

    @property
    def fits_fewer(self) -> bool:
        if self._waiting or self.is_complete:
            return False
        return self._fits_fewer(len(self._occupants) - len(self._free))

    def move(self) -> Stage | None:
        rows = [row for row, one in enumerate(self._occupants) if one is not None]
        moved = self._move(rows)
        if moved is None:
            return None
        stage, num_rows = moved
        self._occupants = [self._occupants[row] for row in rows] + [None] * (num_rows - len(rows))
        self._free = list(range(len(rows), num_rows))
        return stage

    def tokens_left(self) -> float:
        """How many tokens a row may still add, for all requests that occupy it from now on."""
        running = [one.remaining - len(one.tokens) for one in self._occupants if one is not None]
        return (sum(running) + self._tokens_waiting) / max(len(running), 1)

    def admit(self) -> bool:
        """Put waiting requests into free rows: all that fit at first, then whenever enough rows are free."""
        num_admitted = min(len(self._free), len(self._waiting))
        is_idle = len(self._free) == len(self._occupants)
        if not num_admitted or (not is_idle and num_admitted < min(self._enough_to_admit, len(self._waiting))):
            return False
        while self._free and self._waiting:
            group = self._next_group()
            rows = [self._free.pop() for _ in group]
            self._prefill(rows, group)
            now = time.perf_counter()
            for row, request in zip(rows, group, strict=True):
                request.lifespan = (now, -1.0)
                self._occupants[row] = request
        return True

    def _next_group(self) -> list[RowRequest]:
        """The next waiting requests: at most the free rows, the largest group, and `MOST_GROUP_TOKENS`."""
        group: list[RowRequest] = []
        longest = 0
        while self._waiting and len(group) < min(len(self._free), GROUP_SIZES[-1]):
            longest = max(longest, len(self._waiting[0].prompt))
            if group and longest * self._size_of(len(group) + 1) > MOST_GROUP_TOKENS:
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
        now = time.perf_counter()
        for row, request in enumerate(occupants):
            if request is None or request.is_over:
                continue
            count = committed[row]
            drafted = min(request.remaining - len(request.tokens), len(tokens[row]) - 1)
            self._counters.count(request.index, accepted[row], count, drafted)
            request.tokens += tokens[row][:count]
            if self._settings.record_timestamps:
                request.timestamps += [now] * count
            if request.tokens[-1] in self._ends:
                self._retire(row, request, now)
            elif len(request.tokens) >= request.remaining:
                if request.remaining < self._max_new_tokens:
                    request.error = (
                        f"The request has {len(request.prompt)} tokens and has not ended after {request.remaining} new "
                        "ones, but the target has no positions for more; expected a limit (max_new_tokens) that fits "
                        "max_position_embeddings."
                    )
                self._retire(row, request, now)

    def _retire(self, row: int, request: RowRequest, now: float) -> None:
        self._occupants[row] = None
        self._free.append(row)
        end(request, now, self._settings)


def end(request: RowRequest, now: float, settings: ContinuousBatching) -> None:
    """End `request` at time `now`."""
    request.lifespan = (request.lifespan[0], now)
    if settings.on_finished is not None:
        with caller():
            settings.on_finished(request)


class ContinuousRun:
    """A call by continuous batching.

    Args:
        request: whose prompts are the requests.
        settings: of continuous batching.
        target: of the call.
    """

    def __init__(self, request: Request, settings: ContinuousBatching, target: LazyTarget):
        self._request, self._settings, self._target = request, settings, target
        self._process = _processor_of(request)
        device = request.model.device
        self._seeds = request.seeds.to(device)
        self.requests = [
            RowRequest(index, prompt, request.remaining_after(len(prompt)), error=request.why_too_long(len(prompt)))
            for index, prompt in enumerate(request.prompts.rows(device))
        ]
        # By size: where groups of requests are prefilled.
        self._groups: dict[int, SessionLease] = {}
        self._acceptance = Acceptance(request.num_draft_tokens)
        # Whether rows stay where they are, since fewer are not worth their graphs, or there is no memory for them.
        self._stays = False

    def run(self) -> ContinuousOutput:
        """Generate for all requests."""
        request = self._request
        self._refuse_too_long()
        if self._target.is_captured:  # before the rows, which may take all memory that is left
            self._group_lease(min(request.batch, GROUP_SIZES[-1]))
        self._lease = lease = self._open_most()
        ends = request.eos_token_ids
        counters = Counters(
            request.batch, request.num_draft_tokens, self._acceptance.observe if request.is_auto else None
        )
        self._rows = rows = RequestRows(
            lease.shape.batch,
            # The longest first: prompts of a group have similar lengths.
            sorted((one for one in self.requests if one.error is None), key=lambda one: -len(one.prompt)),
            set() if ends is None else set(ends.tolist()),
            request.max_new_tokens,
            counters,
            self._prefill,
            self._group_size,
            self._settings,
            self._fits_fewer,
            self._move,
        )
        execution = lease.execution(self._process, first_k(request, lease.shape))
        start = time.perf_counter()
        self._stage = lease.stage(self._process, request, self._acceptance, rows.tokens_left)
        try:
            RoundLoop(self._stage, rows).run()
        except BaseException:
            with settled_on_error(self._lease.session):
                raise
        seconds = time.perf_counter() - start
        for one in (*self._groups.values(), self._lease):
            one.keep()
        request.drafter._last_stats = counters.summary(
            num_assistant_tokens=request.num_draft_tokens,
            engine="static",
            reason=request.reason,
            execution=execution,
            draft_probs=lease.shape.draft_probs,
            num_rounds=rows.rounds_by_k.total(),
            rounds_by_k=dict(rows.rounds_by_k),
            seconds=seconds,
        )
        return ContinuousOutput(self.requests, request.drafter.stats)

    def _refuse_too_long(self) -> None:
        now = time.perf_counter()
        for one in self.requests:
            if one.error is not None:
                end(one, now, self._settings)

    def _open_most(self) -> SessionLease:
        """A session with as many rows as were asked for, or as fit into memory; all of them are free."""
        request = self._request
        most = self._settings.max_rows or policy_of(request.model.device).max_rows
        num_rows = min(next_power_of_two(request.batch), most)
        while True:
            try:
                return self._open(num_rows)
            except torch.OutOfMemoryError:
                # Processes that run one model together need the same rows.
                if num_rows == 1 or tensor_parallel_group(request.model) is not None:
                    raise
            # The error, which held what was allocated, is gone.
            sessions_of(request.drafter).clear()
            torch.cuda.empty_cache()
            num_rows //= 2

    def _open(self, num_rows: int) -> SessionLease:
        request = self._request
        longest = max((len(one.prompt) + one.remaining for one in self.requests if one.error is None), default=1)
        shape = shape_of(request, num_rows, longest, self._target.is_captured)
        num_drafts = first_k(request, shape)
        lease = SessionLease(self._target, shape)
        with settled_on_error(lease.take()):
            if lease.lacks_round(self._process, num_drafts):
                lease.start_compiler()
            self._clear(lease)
            if lease.lacks_round(self._process, num_drafts):
                lease.capture_round(self._process, num_drafts)
        return lease

    def _clear(self, lease: SessionLease) -> None:
        """Let all rows of the session of `lease` be free."""
        session = lease.session or lease.take()
        with settled_on_error(session):
            session.state.clear()
            session.state.set_sampling(self._request.eos_token_ids, self._request.temperature)
            lease.allocate()

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
        rows, fewer = shape.batch, fewer_rows(shape.batch, self._target.is_captured)
        while fewer is not None and num_occupied <= fewer:
            rows, fewer = fewer, fewer_rows(fewer, self._target.is_captured)
        return None if rows == shape.batch else SessionLease(self._target, shape._replace(batch=rows))

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

    def _move(self, rows: list[int]) -> tuple[Stage, int] | None:
        """Let the requests of `rows` go on in the first rows of a smaller session, if there is memory for it."""
        request, before, num_drafts = self._request, self._lease, self._stage.drafts.current
        lease = self._smaller_lease(len(rows))
        try:
            self._clear(lease)
        except torch.OutOfMemoryError:
            # Processes that run one model together need the same rows.
            if tensor_parallel_group(request.model) is not None:
                raise
            self._stays = True
            return None
        state, source = lease.session.state, before.session.state
        to, taken = upload(list(range(len(rows))), self._seeds), upload(rows, self._seeds)
        state.copy_rows(to, source, self._rows.longest(), taken)
        request.drafter.copy_rows(state, to, source, self._rows.longest(), taken)
        # Its graphs are expected to take as long as those of the session before.
        lease.session.capture_seconds = lease.session.capture_seconds or before.session.capture_seconds
        before.keep()
        self._lease = lease
        self._stage = lease.stage(self._process, request, self._acceptance, self._rows.tokens_left, num_drafts)
        return self._stage, lease.shape.batch

    def _prefill(self, rows: list[int], group: list[RowRequest]) -> None:
        """Prefill `group` and copy it into `rows` of the session of the rounds."""
        request, state = self._request, self._lease.session.state
        longest = max(len(one.prompt) for one in group)
        lease = self._group_lease(len(group))
        session = lease.session
        with settled_on_error(session):
            session.state.begin(
                [one.prompt for one in group],
                [one.remaining for one in group],
                request.eos_token_ids,
                self._seeds[upload([one.index for one in group], self._seeds)],
                request.temperature,
            )
            if lease.lacks_prefill(longest):
                lease.capture_prefill(longest)
            lease.prefill(longest)
            to = upload(rows, self._seeds)
            state.copy_rows(to, session.state, longest)
            request.drafter.copy_rows(state, to, session.state, longest)

    def _group_size(self, count: int) -> int:
        """Rows of the buffers in which `count` requests are prefilled: a few sizes, where they are kept."""
        return next(size for size in GROUP_SIZES if size >= count) if self._target.is_captured else count

    def _group_lease(self, count: int) -> SessionLease:
        """Where `count` requests are prefilled."""
        size, is_captured = self._group_size(count), self._target.is_captured
        lease = self._groups.get(size)
        if lease is None:
            longest = max((len(one.prompt) for one in self.requests if one.error is None), default=1)
            shape = shape_of(self._request, size, longest, is_captured)
            lease = SessionLease(self._target, shape, self._request.config.prefill_chunk_size, is_for_groups=True)
            with settled_on_error(lease.take()):
                lease.allocate()
            if not is_captured:
                self._groups.clear()
            self._groups[size] = lease
        return lease
