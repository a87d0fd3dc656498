"""Continuous batching: more requests than rows, where a request takes a row as soon as another has ended.

Waiting requests are prefilled in free rows of the session that rounds run on, their prompts packed in one row. Where
prompts cannot be packed, such as those of recurrent layers, they are prefilled in groups, in sessions of their own, and
copied. A round does not know which of its rows are occupied: rows that no request occupies are finished ones.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ..device_policy import policy_of
from ..drafters.base import Drafter
from ..parallel.tensor_parallel import from_first_rank, tensor_parallel_group
from ..sampling.processors import BlockProcessor
from ..state import PromptSpan, Shape, upload
from ..stats import Counters, SpeculationStats
from . import request_rows
from .auto_drafts import Acceptance
from .buckets import fewer_rows, next_power_of_two
from .lazy_target import LazyTarget
from .lease import SessionLease, first_k, shape_of
from .request import Request
from .request_rows import ContinuousBatching, RequestRows, RowRequest, end
from .rounds import RoundLoop, Stage
from .session_prefill import can_pack
from .sessions import sessions_of, settled_on_error
from .transcript import DECIDED_BY_TOKENS

# The share of all time that a smaller session at the end of a call is assumed to save.
SHARE_OF_THE_END = 1 / 4


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
        self._is_packed = can_pack(target)
        # By size: where groups of requests are prefilled, unless they are packed.
        self._groups: dict[int, SessionLease] = {}
        self._acceptance = Acceptance(request.num_draft_tokens)
        # Whether rows stay where they are, since fewer are not worth their graphs, or there is no memory for them.
        self._stays = False

    def run(self) -> ContinuousOutput:
        """Generate for all requests."""
        request = self._request
        self._refuse_too_long()
        if self._target.is_captured and not self._is_packed:  # before the rows, which may take all memory that is left
            self._group_lease(min(request.batch, request_rows.GROUP_SIZES[-1]))
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
            self._prefill_packed if self._is_packed else self._prefill_group,
            None if self._is_packed else self._group_size,
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
        lease = self._lease_of(shape)
        with settled_on_error(lease.take()):
            if lease.lacks_round(self._process, num_drafts):
                lease.start_compiler()
            self._clear(lease)
            if lease.lacks_round(self._process, num_drafts):
                lease.capture_round(self._process, num_drafts)
        return lease

    def _lease_of(self, shape: Shape) -> SessionLease:
        """For a session that rounds run on."""
        return SessionLease(self._target, shape, self._request.config.prefill_chunk_size, is_continuous=True)

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

    def _prefill_packed(self, rows: list[int], group: list[RowRequest]) -> None:
        """Prefill `group` in `rows` of the session of the rounds."""
        lease = self._lease
        with settled_on_error(lease.session):
            lease.session.state.admit(
                rows,
                [one.prompt for one in group],
                [one.remaining for one in group],
                self._seeds[upload([one.index for one in group], self._seeds)],
            )
            spans = [PromptSpan(row, 0, len(one.prompt) - 1) for row, one in zip(rows, group, strict=True)]
            if lease.prefill.lacks(spans):
                lease.prefill.capture(spans)
            lease.prefill.run_rows(spans, upload(rows, self._seeds))

    def _prefill_group(self, rows: list[int], group: list[RowRequest]) -> None:
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
            spans = [PromptSpan(row, 0, len(one.prompt) - 1) for row, one in enumerate(group)]
            if lease.prefill.lacks(spans):
                lease.prefill.capture(spans)
            lease.prefill.run(spans)
            to = upload(rows, self._seeds)
            state.copy_rows(to, session.state, longest)
            request.drafter.copy_rows(state, to, session.state, longest)

    def _group_size(self, count: int) -> int:
        """Rows of the buffers in which `count` requests are prefilled: a few sizes, where they are kept."""
        return next(size for size in request_rows.GROUP_SIZES if size >= count) if self._target.is_captured else count

    def _group_lease(self, count: int) -> SessionLease:
        """Where `count` requests are prefilled."""
        size, is_captured = self._group_size(count), self._target.is_captured
        lease = self._groups.get(size)
        if lease is None:
            longest = max((len(one.prompt) for one in self.requests if one.error is None), default=1)
            shape = shape_of(self._request, size, longest, is_captured)
            lease = SessionLease(self._target, shape, self._request.config.prefill_chunk_size, is_continuous=True)
            with settled_on_error(lease.take()):
                lease.allocate()
            if not is_captured:
                self._groups.clear()
            self._groups[size] = lease
        return lease
