"""What a call uses of the engine: a session, with the graphs that it lacks captured."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable

import torch
from transformers import PreTrainedModel

from ..parallel.tensor_parallel import from_first_rank, tensor_parallel_group
from ..patching.support import cache_layers, stated_positions, uses_attention_interface
from ..sampling.processors import BlockProcessor
from ..state import Shape
from .auto_drafts import Acceptance, AutoDrafts, first_drafts
from .buckets import next_power_of_two, slots_for, useful_drafts
from .capture import CapturedRound, capture_catch_up, capture_round
from .cuda_graphs import start_compiler
from .hosted_target import HostedTarget
from .prefix_reuse import PrefillWave
from .request import Request
from .rounds import FixedDrafts, NumDrafts, Stage, catch_up, run_round
from .row_memory import place_in_memory, span_for, spanning
from .session_prefill import SessionPrefill
from .sessions import Session, SessionKey, sessions_of

# Rounds after which the processes that run one model together agree on times, by a broadcast that waits for the GPU.
ROUNDS_TO_AGREE = 8


def shape_of(request: Request, batch: int, longest: int, is_captured: bool) -> Shape:
    """The shape of buffers for `request`.

    Args:
        request: to run.
        batch: rows.
        longest: most tokens of a row.
        is_captured: whether the buffers are kept for other calls, and therefore of a few sizes only.
    """
    ends = request.eos_token_ids
    slots, positions = slots_for(longest, is_captured), stated_positions(request.model)
    if positions is not None and not uses_attention_interface(request.model):
        # Attention of its own may have tables of as many keys; it is given all slots but the dummy slot.
        slots = min(slots, max(longest, positions) + 1)
    return Shape(
        batch=batch,
        slots=slots,
        num_draft_tokens=useful_drafts(request.num_draft_tokens, request.max_new_tokens, is_captured),
        is_sampling=request.temperature is not None,
        draft_probs=request.draft_probs,
        num_ends=next_power_of_two(max(0 if ends is None else ends.numel(), 8)),
        verification=request.drafter.verification,
    )


def first_k(request: Request, shape: Shape) -> int:
    """K of the first rounds of `request`."""
    if not request.is_auto:
        return shape.num_draft_tokens
    return first_drafts(min(request.drafter.num_own_draft_tokens, shape.num_draft_tokens), shape.batch)


class SharedClock:
    """Choices of K by processes that run one model together: those that the first one's times give.

    Args:
        drafts: chooses, on every process.
        model: the target.
    """

    def __init__(self, drafts: NumDrafts, model: PreTrainedModel):
        self._drafts, self._model = drafts, model
        self._rounds: list[tuple[int, float, bool]] = []

    @property
    def current(self) -> int:
        return self._drafts.current

    def next(self) -> int:
        return self._drafts.next()

    def refuse(self, num_drafts: int) -> None:
        self._drafts.refuse(num_drafts)

    def ran(self, num_drafts: int, milliseconds: float, is_typical: bool) -> None:
        self._rounds.append((num_drafts, milliseconds, is_typical))
        if len(self._rounds) == ROUNDS_TO_AGREE:
            times = torch.tensor([one[1:] for one in self._rounds], dtype=torch.float32)
            for (count, *_), (shared, typical) in zip(
                self._rounds, from_first_rank(times, self._model).tolist(), strict=True
            ):
                self._drafts.ran(count, shared, bool(typical))
            self._rounds.clear()


class SessionLease:
    """A session that a call uses: one that earlier calls have left, or a new one.

    Args:
        target: of the call.
        shape: of the session's buffers.
        chunk_size: see `SessionPrefill`.
        is_continuous: see `SessionPrefill`.
        grows: whether the session has its keys and values in a `RowMemory`.

    Attributes:
        session: once it is taken.
        prefill: of the session.
    """

    def __init__(
        self,
        target: HostedTarget,
        shape: Shape,
        chunk_size: int | None = None,
        is_continuous: bool = False,
        grows: bool = False,
    ):
        self._target = target
        self.shape, self._grows = shape, grows
        self._chunk_size, self._is_continuous = chunk_size, is_continuous
        self._pool = sessions_of(target.drafter)
        self.session: Session | None = None
        self.prefill: SessionPrefill | None = None

    @property
    def is_kept(self) -> bool:
        """Whether a session for the shape is there already."""
        return self._target.is_captured and self._key() in self._pool

    def take(self) -> Session:
        """A session for the shape, ready to be used; it is also `session`."""
        target = self._target
        session = None
        if target.is_captured:
            session = self._pool.take(self._key())
            if session is None:
                target()  # patching may move weights, which the key names
        if session is None:
            state = target.drafter.new_state(self.shape, cache_layers(target.model), target.model.device)
            if self._grows:
                place_in_memory(state, target, self.shape)
            session = Session(state)
        session.acquire()
        self.session = session
        self.prefill = SessionPrefill(session, target, self._chunk_size, self._is_continuous)
        return session

    def drop(self) -> None:
        """Forget the session, so that its memory is freed."""
        self.session = self.prefill = None

    def _key(self) -> SessionKey:
        return SessionKey(self.shape, self._grows, self._target.drafter.compiles_rounds, self._target.hosting)

    def _round_key(self, process: BlockProcessor, num_drafts: int) -> tuple[Hashable, int, int]:
        """What the next round of `num_drafts` drafts with `process` is captured under, see `Session.rounds`.

        Where rounds for longer texts are captured, and none for those that there are, those do.
        """
        state, rounds = self.session.state, self.session.rounds
        if not self._grows:
            return process.key, num_drafts, state.slots
        span = least = span_for(state.live, state.slots)
        while (process.key, num_drafts, span) not in rounds and span < state.slots:
            span = span_for(span, state.slots)
        is_captured = (process.key, num_drafts, span) in rounds
        return process.key, num_drafts, span if is_captured else least

    def lacks_round(self, process: BlockProcessor, num_drafts: int) -> bool:
        """Whether rounds of `num_drafts` drafts with `process` are to be captured and have not been."""
        return self._target.is_captured and self._round_key(process, num_drafts) not in self.session.rounds

    def start_compiler(self) -> None:
        """Start what compiles rounds, where they are compiled, beside the prefill that comes first."""
        if self._target.drafter.compiles_rounds:
            start_compiler(self._target.model.device)

    def capture_round(self, process: BlockProcessor, num_drafts: int) -> None:
        session, start = self.session, time.perf_counter()
        session.state.num_draft_tokens = num_drafts
        key = self._round_key(process, num_drafts)
        with spanning(session.state, key[-1]):
            captured = capture_round(session, self._target(), self._target.drafter, process)
        session.rounds.add(key, captured)
        session.capture_seconds = time.perf_counter() - start

    def captured_round(self, process: BlockProcessor, num_drafts: int) -> CapturedRound | None:
        """The captured round; None if rounds run eagerly."""
        return self.session.rounds.get(self._round_key(process, num_drafts))

    def stage(
        self,
        process: BlockProcessor,
        request: Request,
        acceptance: Acceptance,
        tokens_left: Callable[[], float],
        first: int | None = None,
    ) -> Stage:
        """Where and how the rounds of `request` run.

        Args:
            process: of the rounds.
            request: to run.
            acceptance: of its drafts.
            tokens_left: see `AutoDrafts`.
            first: K of the first rounds; None for what the drafter is made for.
        """
        most = self.shape.num_draft_tokens
        drafts: NumDrafts = FixedDrafts(most, self.session.round_times)
        if request.is_auto:
            first = first_k(request, self.shape) if first is None else first
            price = functools.partial(self._price, process)
            drafts = AutoDrafts(most, first, acceptance, self.session.round_times, tokens_left, price)
            if tensor_parallel_group(request.model) is not None:
                drafts = SharedClock(drafts, request.model)
        prepare, run = functools.partial(self._prepare, process), functools.partial(self._run, process)
        return Stage(self.session.state, prepare, run, drafts)

    def _price(self, process: BlockProcessor, num_drafts: int) -> float:
        """Milliseconds that it takes to capture such rounds, the same on all processes; 0 where they are."""
        if not self.lacks_round(process, num_drafts):
            return 0.0
        return 1e3 * float(from_first_rank(torch.tensor(self.session.capture_seconds), self._target.model))

    def _prepare(self, process: BlockProcessor, num_drafts: int) -> bool:
        """Get ready for a round of `num_drafts`; returns whether there is memory for it."""
        # First, as a capture runs such a round, which reads a block of its own width.
        if num_drafts + 1 < self.session.state.block_width:
            self._catch_up()
        if self.lacks_round(process, num_drafts):
            try:
                self.capture_round(process, num_drafts)
            except torch.OutOfMemoryError:
                # Processes that run one model together need the same rounds.
                if not len(self.session.rounds) or tensor_parallel_group(self._target.model) is not None:
                    raise
                return False
        return True

    def _run(self, process: BlockProcessor, num_drafts: int) -> tuple:
        """A round of `num_drafts`, captured or eagerly, see `run_round`."""
        state, captured = self.session.state, self.captured_round(process, num_drafts)
        state.num_draft_tokens = num_drafts
        if captured is not None:
            results = captured(process)
        else:
            results = run_round(state, self._target(), self._target.drafter, process)
        state.block_width = num_drafts + 1
        return results

    def _catch_up(self) -> None:
        """Let the drafter read the last block; captured where rounds are, not compiled."""
        session, drafter, width = self.session, self._target.drafter, self.session.state.block_width
        span = span_for(session.state.live, session.state.slots) if self._grows else session.state.slots
        if self._target.is_captured and (width, span) not in session.catch_ups:
            with spanning(session.state, span):
                session.catch_ups.add((width, span), capture_catch_up(session, self._target(), drafter, width))
        replay = session.catch_ups.get((width, span))
        if replay is not None:
            replay()
        else:
            self._target()  # which patches the drafter, too
            catch_up(session.state, drafter, width)
        session.state.block_width = 1

    def execution(self, process: BlockProcessor, num_drafts: int) -> str:
        """How such rounds are run, for `SpeculationStats.execution`."""
        captured = self.captured_round(process, num_drafts)
        mode = ", batch-invariant" if self._target.drafter.batch_invariant else ""
        if captured is not None:
            return captured.execution + mode
        return f"eager{mode}: {self._target.eager_reason or 'a round cannot be captured'}"

    def allocate(self) -> None:
        """Allocate what a new session lacks: the first forward pass does that, here one over no prompt."""
        if not self.session.is_allocated:
            self.prefill.run([PrefillWave(())])

    def keep(self) -> None:
        """Leave the session for other calls, where sessions are kept; else it is not used again."""
        if self._target.is_captured:
            self._pool.keep(self._key(), self.session)
        else:
            self.session.free_rows()
