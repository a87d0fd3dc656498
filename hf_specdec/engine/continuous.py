"""Continuous batching: more requests than rows, where a request takes a row as soon as another has ended.

Waiting requests are prefilled in groups, in sessions of their own, and copied into free rows of the session that rounds
run on. A round does not know which of its rows are occupied: rows that no request occupies are finished ones.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..device_policy import policy_of
from ..drafters.base import Drafter
from ..parallel.tensor_parallel import tensor_parallel_group
from ..patching.patch import caller
from ..sampling.processors import BlockProcessor
from ..state import DecodeState, upload
from ..stats import Counters, SpeculationStats
from .buckets import next_power_of_two
from .lease import LazyTarget, SessionLease, shape_of
from .request import Request
from .rounds import FixedDrafts, RoundLoop
from .sessions import sessions_of, settled_on_error
from .transcript import DECIDED_BY_TOKENS

# Sizes of groups that are prefilled by graphs: a group has the next larger size. Few sizes share buffers.
GROUP_SIZES = (1, 8, 32)

# Most tokens of a group, padding included; a longer prompt is a group by itself.
MOST_GROUP_TOKENS = 16384

# Waiting requests are admitted when this share of the rows is free: prefilling few rows takes about as long as many.
SHARE_TO_ADMIT = 1 / 8


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
    ):
        self._occupants: list[RowRequest | None] = [None] * num_rows
        self._free = list(range(num_rows))
        self._waiting = deque(requests)
        self._ends = ends
        self._max_new_tokens = max_new_tokens
        self._counters = counters
        self._prefill = prefill
        self._size_of = size_of
        self._settings = settings
        self._enough_to_admit = max(1, round(num_rows * SHARE_TO_ADMIT))
        self.num_rounds = 0

    @property
    def is_complete(self) -> bool:
        return not self._waiting and len(self._free) == len(self._occupants)

    def admit(self) -> None:
        """Put waiting requests into free rows: all that fit at first, then whenever enough rows are free."""
        num_admitted = min(len(self._free), len(self._waiting))
        is_idle = len(self._free) == len(self._occupants)
        if not is_idle and num_admitted < min(self._enough_to_admit, len(self._waiting)):
            return
        while self._free and self._waiting:
            group = self._next_group()
            rows = [self._free.pop() for _ in group]
            self._prefill(rows, group)
            now = time.perf_counter()
            for row, request in zip(rows, group, strict=True):
                request.lifespan = (now, -1.0)
                self._occupants[row] = request

    def _next_group(self) -> list[RowRequest]:
        """The next waiting requests: at most the free rows, the largest group, and `MOST_GROUP_TOKENS`."""
        group: list[RowRequest] = []
        longest = 0
        while self._waiting and len(group) < min(len(self._free), GROUP_SIZES[-1]):
            longest = max(longest, len(self._waiting[0].prompt))
            if group and longest * self._size_of(len(group) + 1) > MOST_GROUP_TOKENS:
                break
            group.append(self._waiting.popleft())
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
        self.num_rounds += 1
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

    def run(self) -> ContinuousOutput:
        """Generate for all requests."""
        request = self._request
        self._refuse_too_long()
        if self._target.is_captured:  # before the rows, which may take all memory that is left
            self._group_lease(min(request.batch, GROUP_SIZES[-1]))
        lease = self._open_most()
        state = lease.session.state
        ends = request.eos_token_ids
        counters = Counters(request.batch, request.num_draft_tokens)
        rows = RequestRows(
            lease.shape.batch,
            # The longest first: prompts of a group have similar lengths.
            sorted((one for one in self.requests if one.error is None), key=lambda one: -len(one.prompt)),
            set() if ends is None else set(ends.tolist()),
            request.max_new_tokens,
            counters,
            functools.partial(self._prefill, state),
            self._group_size,
            self._settings,
        )
        with settled_on_error(lease.session):
            start = time.perf_counter()
            drafts = FixedDrafts(state.most_draft_tokens)
            RoundLoop(state, lease.rounds(self._process), rows, drafts).run()
            seconds = time.perf_counter() - start
        for one in (*self._groups.values(), lease):
            one.keep()
        request.drafter._last_stats = counters.summary(
            num_assistant_tokens=request.num_draft_tokens,
            engine="static",
            reason=request.reason,
            execution=lease.execution(self._process, state.most_draft_tokens),
            draft_probs=lease.shape.draft_probs,
            num_rounds=rows.num_rounds,
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
        lease = SessionLease(self._target, shape_of(request, num_rows, longest, self._target.is_captured))
        session = lease.take()
        with settled_on_error(session):
            state = session.state
            state.clear()
            state.set_sampling(request.eos_token_ids, request.temperature)
            lacks_round = lease.lacks_round(self._process, state.most_draft_tokens)
            if lacks_round:
                lease.start_compiler()
            lease.allocate()
            if lacks_round:
                lease.capture_round(self._process, state.most_draft_tokens)
        return lease

    def _prefill(self, state: DecodeState, rows: list[int], group: list[RowRequest]) -> None:
        """Prefill `group` and copy it into `rows` of `state`."""
        request = self._request
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
