"""The rows of a session in continuous batching: which request occupies which, and which requests wait."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..patching.patch import caller
from ..stats import Counters
from .rounds import Stage

# Sizes of groups that are prefilled by graphs, padded: a group has the next larger size. Few sizes share buffers.
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


class RequestRows:
    """The rows of a session, and the requests that occupy them or wait for one; the `Rows` of a round loop.

    Args:
        num_rows: of the session.
        requests: that wait, in the order in which they are admitted.
        ends: tokens that end a request.
        max_new_tokens: of every request; one that may add fewer and reaches that limit has failed.
        counters: of the requests, by their `index`.
        prefill: called with rows and with the requests that are to occupy them.
        size_of: rows of the buffers in which so many requests are prefilled, padded; None if they are packed.
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
        size_of: Callable[[int], int] | None,
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
        """The next waiting requests: as many as rows are free, or if padded as a group may have."""
        group: list[RowRequest] = []
        longest = 0
        most = len(self._free) if self._size_of is None else min(len(self._free), GROUP_SIZES[-1])
        while self._waiting and len(group) < most:
            longest = max(longest, len(self._waiting[0].prompt))
            if group and self._size_of is not None and longest * self._size_of(len(group) + 1) > MOST_GROUP_TOKENS:
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
