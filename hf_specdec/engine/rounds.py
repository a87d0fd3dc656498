"""Rounds, which draft and verify, and the loop over them.

`run_round` and `catch_up` are what is run eagerly, compiled and captured; nothing in them reads the device on the host.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..device_policy import policy_of
from ..drafters.base import Drafter
from ..drafters.none import no_drafts
from ..kernels.types import NO_TOKEN, Proposal, VerificationResult
from ..ops import verify_block, verify_greedy, verify_sampling
from ..row_buffers import set_rows
from ..sampling.processors import BlockProcessor
from ..state import DecodeState
from ..stats import Counters
from .auto_drafts import RoundTimes, no_memory
from .cuda_graphs import RoundClock
from .target import Target
from .transcript import Transcript


def run_round(
    state: DecodeState, target: Target, drafter: Drafter, process: BlockProcessor
) -> tuple[VerificationResult, torch.Tensor, torch.Tensor]:
    """One round of K = `state.num_draft_tokens`: drafts, target forward over the block, verification.

    The last round had at most as many drafts; after one of more `catch_up` comes first.

    Returns:
        what was accepted and committed, the processed scores and the logits, both `[B, K + 1, V]`.
    """
    proposal, block, logits, aux_hidden_states = draft_and_forward(state, target, drafter)
    scores = process(logits, block, state)
    return verify_and_commit(state, scores, proposal, aux_hidden_states), scores, logits


def commit_first_token(
    state: DecodeState, process: BlockProcessor, rows: torch.Tensor | slice, known: torch.Tensor | None = None
) -> tuple[VerificationResult, torch.Tensor, torch.Tensor]:
    """Commit the token after the prompts of `rows`, whose logits a prefill has left.

    Afterwards the state is as if a round had just committed the prompt's last token, as a draft, and this one.

    Args:
        state: prefilled.
        process: of the rounds.
        rows: `[n]` int64, or all.
        known: `[n]` int64, the tokens of `rows` that are not to be drawn; else `NO_TOKEN`.

    Returns:
        what was committed, the processed scores and the logits, as `run_round`, with one column.
    """
    proposal, logits, block = no_drafts(state), state.prompt_logits[:, None], state.last_tokens()
    scores = process(logits, block, state)
    result = verify(scores, state, proposal)
    if known is not None:
        result.tokens[rows, 0] = torch.where(known == NO_TOKEN, result.tokens[rows, 0], known)
    if isinstance(rows, torch.Tensor):
        committed = torch.zeros_like(result.committed)
        committed[rows] = result.committed[rows]
        result = result._replace(committed=committed)
    result, kept = state.commit(result), state.result
    width = state.first_block_width
    kept.tokens[rows, :width] = torch.cat([block, result.tokens.clamp(min=0)], dim=1)[rows, -width:]
    set_rows(kept.accepted, rows, width - 1)
    kept.committed[rows] = result.committed[rows] * width
    state.block_width = max(state.block_width, width)
    return result, scores, logits


def draft_and_forward(
    state: DecodeState, target: Target, drafter: Drafter
) -> tuple[Proposal, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """First half of a round: draft, and run the target over the block of the last committed token and the drafts.

    Returns:
        the drafts, the block `[B, K + 1]` int64, its logits `[B, K + 1, V]`, its auxiliary hidden states
        `[B, K + 1, width]` or None.
    """
    proposal = propose(state, drafter, *state.last_block(state.num_draft_tokens + 1))
    block, slots = state.block(proposal.tokens)
    return proposal, block, *target(state, block, slots)


def propose(state: DecodeState, drafter: Drafter, *last_block: Any) -> Proposal:
    """`Drafter.propose`, attending to as much of the text as the drafter is to."""
    drafter.limit_attention(state, drafter.draft_window_size)
    proposal = drafter.propose(state, *last_block)
    drafter.limit_attention(state, None)
    return proposal


def verify_and_commit(
    state: DecodeState, scores: torch.Tensor, proposal: Proposal, aux_hidden_states: torch.Tensor | None
) -> VerificationResult:
    """Second half of a round: verify the drafts by `scores` `[B, K + 1, V]`, and commit tokens."""
    result = state.commit(verify(scores, state, proposal), keeps=True)
    if aux_hidden_states is not None:
        state.aux_hidden_states[:, : result.tokens.shape[1]].copy_(aux_hidden_states)
    return result


def verify(scores: torch.Tensor, state: DecodeState, proposal: Proposal) -> VerificationResult:
    """Verify `proposal` by `scores` `[B, K + 1, V]`: greedily, or by rejection sampling."""
    if not state.is_sampling:
        return verify_greedy(scores, proposal.tokens)
    scores = scores.float()
    if state.verification == "block" and proposal.probs is not None:
        return verify_block(scores, *proposal, state.seeds, state.lengths, state.limits - state.lengths)
    return verify_sampling(scores, *proposal, state.seeds, state.lengths)


def catch_up(state: DecodeState, drafter: Drafter, width: int) -> None:
    """Let the drafter read the last block, of up to `width` tokens, so that a round with fewer drafts may follow.

    Afterwards the state is as if the last round had committed one token; the drafter reads that one again.
    """
    before, state.num_draft_tokens = state.num_draft_tokens, 0
    try:
        propose(state, drafter, *state.last_block(width))
    finally:
        state.num_draft_tokens = before
    state.narrow_block()


class RoundReport:
    """The result of a round on its way to the host, copied asynchronously from a GPU.

    Args:
        result: of the round; its tensors may be overwritten by the next one.
        rows: `[n]` int64, which ones to report; all if None.
    """

    def __init__(self, result: VerificationResult, rows: torch.Tensor | None = None):
        parts = (result.tokens, result.accepted[:, None], result.committed[:, None])
        packed = torch.cat(parts, dim=1)
        packed = packed if rows is None else packed[rows]
        self._packed, self._arrived = packed, None
        if packed.is_cuda:
            self._packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._packed.copy_(packed, non_blocking=True)
            self._arrived = torch.cuda.current_stream(packed.device).record_event()

    def read(self) -> tuple[list[list[int]], list[int], list[int]]:
        """Tokens of each row, numbers of accepted drafts and of committed tokens; waits for the copy."""
        if self._arrived is not None:
            self._arrived.synchronize()
        rows = self._packed.tolist()
        return [row[:-2] for row in rows], [row[-2] for row in rows], [row[-1] for row in rows]


class Rows(Protocol):
    """What occupies the rows of a state: one call, or requests that come and go."""

    @property
    def is_complete(self) -> bool:
        """Whether no row needs another round."""

    def admit(self) -> bool:
        """Called before every round: put waiting requests into free rows. Returns whether that took time.

        It may wait for requests where no row needs another round; `is_complete` is read afterwards.
        """

    def first_tokens(self) -> Sequence[tuple[Any, RoundReport]]:
        """What `admit` has put into rows, and their first tokens; passed on to `take_first` in order with rounds."""

    @property
    def is_to_move(self) -> bool:
        """Whether rounds should run on a state with another number of rows, or of slots."""

    def move(self) -> Stage | None:
        """Move to such a state; the results of all rounds have been taken. None if there is no memory for it."""

    def reserve(self, ahead: int) -> bool:
        """Let rows have memory for `ahead` tokens more than are read; returns whether there is enough."""

    def make_room(self) -> None:
        """Called if there is not enough, and the results of all rounds have been taken: let a row be free."""

    def longest(self) -> int:
        """Committed tokens of the longest row, prompt included, as far as results are read."""

    def occupants(self) -> Any:
        """What occupies the rows now; passed on to `take` with the results of the next round."""

    def take(
        self, occupants: Any, tokens: list[list[int]], accepted: list[int], committed: list[int], **records: Any
    ) -> None:
        """Take the results of a round: K + 1 tokens, accepted drafts and committed tokens of each row of the state."""

    def take_first(
        self, occupants: Any, tokens: list[list[int]], accepted: list[int], committed: list[int], **records: Any
    ) -> None:
        """Take first tokens, which are of no round: one of each of the occupants."""


class NumDrafts(Protocol):
    """Decides how many drafts (K) each round has."""

    @property
    def current(self) -> int:
        """K of most rounds at the moment."""

    def next(self) -> int:
        """K of the next round."""

    def refuse(self, num_drafts: int) -> None:
        """Called where there is no memory for rounds with so many drafts."""

    def ran(self, num_drafts: int, milliseconds: float, is_typical: bool) -> None:
        """Take the time of a round of K = `num_drafts`, which `is_typical` if it followed one of the same K at once."""


@dataclass(frozen=True)
class FixedDrafts:
    """The same number of drafts in every round.

    Attributes:
        num_drafts: K.
        times: of the rounds.
    """

    num_drafts: int
    times: RoundTimes

    @property
    def current(self) -> int:
        return self.num_drafts

    def next(self) -> int:
        return self.num_drafts

    def refuse(self, num_drafts: int) -> None:
        raise torch.OutOfMemoryError(no_memory(num_drafts))

    def ran(self, num_drafts: int, milliseconds: float, is_typical: bool) -> None:
        self.times.add(num_drafts, milliseconds, is_typical)


@dataclass(frozen=True)
class Stage:
    """Where rounds run, and how.

    Attributes:
        state: prefilled, or without unfinished rows.
        prepare: gets ready for a round of the number of drafts that it is given; returns whether that is possible.
        run: runs `run_round` with that number of drafts, eagerly or captured.
        drafts: decides how many drafts a round has.
    """

    state: DecodeState
    prepare: Callable[[int], bool]
    run: Callable[[int], tuple[VerificationResult, torch.Tensor | None, torch.Tensor | None]]
    drafts: NumDrafts


@dataclass
class _Launched:
    """A round whose results have not been read, or first tokens, which have no `start` and no `end`."""

    num_drafts: int
    is_typical: bool
    start: Any
    end: Any
    occupants: Any
    report: RoundReport
    records: dict[str, torch.Tensor | None]


class RoundLoop:
    """The loop over rounds on the host. It reads results one round late on a GPU, which therefore never waits for it.

    Args:
        stage: where rounds run at first.
        rows: what occupies the rows.
    """

    def __init__(self, stage: Stage, rows: Rows):
        device = stage.state.tokens.device
        self._stage, self._rows = stage, rows
        self._clock = RoundClock(device)
        self._rounds_ahead = policy_of(device).rounds_ahead
        self._launched: deque[_Launched] = deque()
        # K of the last round, and when it ended; None if something else came after it.
        self._last: tuple[int, Any] | None = None

    def run(self) -> None:
        """Run rounds until the rows are complete. Rounds that the device began after that are ignored."""
        while True:
            if self._rows.admit():
                self._last = None
            self._note_first_tokens()
            if self._rows.is_complete:
                return
            if self._rows.is_to_move:
                self._read_results(0)
                if self._rows.is_to_move:
                    self._stage, self._last = self._rows.move() or self._stage, None
            elif self._reserve():
                self._launch()
                self._read_results(self._rounds_ahead)

    def _reserve(self) -> bool:
        """Let rows have memory for the next round; else fewer rows are left."""
        if self._rows.reserve(self._tokens_ahead()):
            return True
        self._read_results(0)
        if not self._rows.reserve(self._tokens_ahead()):
            self._rows.make_room()
        return False

    def _tokens_ahead(self) -> int:
        """Most tokens that a row writes after those whose results are read, with the next round."""
        most = self._stage.state.most_draft_tokens + 1
        return sum(one.num_drafts + 1 for one in self._launched) + 2 * most

    def _note_first_tokens(self) -> None:
        for occupants, report in self._rows.first_tokens():
            self._launched.append(_Launched(0, False, None, None, occupants, report, {}))

    def _launch(self) -> None:
        stage, last = self._stage, self._last
        num_drafts = stage.drafts.next()
        # Slots up to the tokens of rounds whose results are not read yet, and up to the drafts of this one.
        before = self._rows.longest() + sum(one.num_drafts + 1 for one in self._launched)
        stage.state.live = before + num_drafts
        while not stage.prepare(num_drafts):
            stage.drafts.refuse(num_drafts)
            num_drafts = stage.drafts.next()
            stage.state.live = before + num_drafts
        is_typical = last is not None and last[0] == num_drafts
        start = last[1] if is_typical else self._clock.mark()
        result, scores, logits = stage.run(num_drafts)
        end = self._clock.mark()
        records = {"scores": scores, "logits": logits}
        report = RoundReport(result)
        occupants = self._rows.occupants()
        self._launched.append(_Launched(num_drafts, is_typical, start, end, occupants, report, records))
        self._last = num_drafts, end

    def _read_results(self, rounds_ahead: int) -> None:
        """Read the results of all rounds but the last `rounds_ahead`."""
        while len(self._launched) > rounds_ahead:
            one = self._launched.popleft()
            if one.start is None:
                self._rows.take_first(one.occupants, *one.report.read())
                continue
            self._rows.take(one.occupants, *one.report.read(), **one.records)
            milliseconds = self._clock.milliseconds(one.start, one.end)
            self._stage.drafts.ran(one.num_drafts, milliseconds, one.is_typical)


class CallRows:
    """The rows of one `generate()` call, all there from the start.

    Args:
        transcript: collects the generated text.
        counters: of the rows of the call; the batch of the state may be larger.
        longest: length of the longest prompt.
        remaining: new tokens that the target has positions for, for each row. A row that has as many and has not ended
            is an error.
        finished: `[B]` bool of the state.
    """

    def __init__(
        self, transcript: Transcript, counters: Counters, longest: int, remaining: list[int], finished: torch.Tensor
    ):
        self.transcript = transcript
        self.counters = counters
        self.rounds_by_k: Counter[int] = Counter()
        self._longest = longest
        self._remaining = remaining
        self._finished = finished

    @property
    def is_complete(self) -> bool:
        return self.transcript.is_complete

    is_to_move = False

    def admit(self) -> bool:
        return False

    def move(self) -> None:
        return None

    def first_tokens(self) -> Sequence[tuple[None, RoundReport]]:
        return ()

    def reserve(self, ahead: int) -> bool:
        return True

    def make_room(self) -> None:
        pass

    def tokens_left(self) -> float:
        """How many tokens a row that has not ended may still add, on average."""
        rows = [row for row, stopped in enumerate(self.transcript.stopped) if not stopped]
        return sum(self._remaining[row] - self.transcript.length(row) for row in rows) / max(len(rows), 1)

    def longest(self) -> int:
        return self._longest + self.transcript.longest_row()

    def occupants(self) -> None:
        return None

    def take(
        self,
        occupants: None,
        tokens: list[list[int]],
        accepted: list[int],
        committed: list[int],
        **records: torch.Tensor | None,
    ) -> None:
        batch = len(self.counters.rows)
        self.rounds_by_k[len(tokens[0]) - 1] += 1
        for row, (num_accepted, num_committed) in enumerate(zip(accepted[:batch], committed[:batch], strict=True)):
            if num_committed > 0 and not self.transcript.is_done(row):
                remaining = self._remaining[row] - self.transcript.length(row)
                self.counters.count(row, num_accepted, num_committed, min(remaining, len(tokens[row]) - 1))
        self.take_first(None, tokens, accepted, committed, **records)

    def take_first(
        self,
        occupants: None,
        tokens: list[list[int]],
        accepted: list[int],
        committed: list[int],
        **records: torch.Tensor | None,
    ) -> None:
        batch, before = len(self.counters.rows), self.transcript.stopped
        self.transcript.add(tokens[:batch], committed[:batch], **records)
        for row, remaining in enumerate(self._remaining):
            if not self.transcript.stopped[row] and self.transcript.steps >= remaining:
                raise ValueError(
                    f"Row {row} of the batch has {remaining} new tokens and has not ended, but the target has no "
                    "positions for more; expected a limit (max_new_tokens, max_length) that fits "
                    "max_position_embeddings."
                )
        if self.transcript.pads_finished_rows and self.transcript.stopped != before:
            stopped = torch.tensor(self.transcript.stopped, device=self._finished.device)
            self._finished[:batch] |= stopped
