"""Speculative decoding, in the order of the algorithm: prefill, then rounds.

`prefill_chunk` and `run_round` are what is run eagerly, compiled and captured; nothing in them reads the device on the
host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..device_policy import policy_of
from ..drafters.base import Drafter
from ..kernels.types import VerificationResult
from ..ops import verify_block, verify_greedy, verify_sampling
from ..sampling.processors import BlockProcessor
from ..state import DecodeState
from ..stats import Counters
from .target import Target
from .transcript import Transcript


def start_prefill(state: DecodeState, drafter: Drafter) -> None:
    """Begin the prefill of the prompts that `state` holds: `prefill_chunk` comes next."""
    state.cache.restart()
    drafter.start_prefill(state)
    state.num_prefilled.zero_()
    if state.last_hidden_states is not None:
        state.last_hidden_states.zero_()


def prefill_chunk(state: DecodeState, target: Target, drafter: Drafter, columns: int, is_last: bool) -> None:
    """Prefill target and drafter with the next positions of the prompts, except for the prompts' last tokens.

    After the last chunk, which also drafts, the state is as if a round had just committed the last token of each
    prompt: that token has not passed through the target, and the drafter has proposed what follows it. Prefilling again
    changes nothing.

    Args:
        state: holds the prompts; positions below `state.cached` are in the target's cache already and are left out.
        target, drafter: to run.
        columns: positions of each row; those beyond its prompt are padding.
        is_last: whether this ends the prompts.
    """
    rows = torch.arange(state.tokens.shape[0], device=state.tokens.device)
    steps = torch.arange(columns, device=state.tokens.device)
    prompt_end = state.lengths - 1
    positions = (state.cached + state.num_prefilled)[:, None] + steps
    slots = torch.where(positions < prompt_end[:, None], positions, state.dummy_slot)
    _, aux_hidden_states = target(state, state.tokens.gather(1, slots), slots, logits_to_keep=1)
    drafter.prefill(state, aux_hidden_states, slots)
    if aux_hidden_states is not None:
        last = prompt_end - 1 - positions[:, 0]
        here = aux_hidden_states[rows, last.clamp(0, columns - 1)]
        is_here = ((last >= 0) & (last < columns))[:, None]
        if state.last_hidden_states is None:
            state.last_hidden_states = torch.zeros_like(here)
        state.last_hidden_states.copy_(torch.where(is_here, here, state.last_hidden_states))
    state.num_prefilled += columns
    if is_last:
        _propose_first(state, drafter)


def _propose_first(state: DecodeState, drafter: Drafter) -> None:
    """Draft what follows the prompts."""
    batch = state.tokens.shape[0]
    blank = state.tokens.new_zeros(batch, state.num_draft_tokens + 1)
    result = VerificationResult(blank, state.lengths.new_zeros(batch), state.lengths.new_ones(batch))
    window, last = None, state.last_hidden_states
    if last is not None:
        window = last.new_zeros(batch, state.num_draft_tokens + 1, last.shape[-1])
        window[:, 0] = last
    state.set_proposal(drafter.propose(state, window, result))


def prefill_drafter(state: DecodeState, drafter: Drafter, width: int, chunk_size: int) -> None:
    """Prefill a drafter that reads tokens only with the positions below `width` that the target has in its cache."""
    for chunk in torch.arange(width, device=state.tokens.device).split(chunk_size):
        drafter.prefill(state, None, torch.where(chunk < state.cached[:, None], chunk, state.dummy_slot))


def run_round(
    state: DecodeState, target: Target, drafter: Drafter, process: BlockProcessor
) -> tuple[VerificationResult, torch.Tensor, torch.Tensor]:
    """One round: target forward over the block, verification, next drafts.

    Returns:
        what was accepted and committed, the processed scores and the logits, both `[B, K + 1, V]`.
    """
    block, logits, aux_hidden_states = target_forward(state, target)
    scores = process(logits, block, state)
    return verify_and_draft(state, drafter, scores, aux_hidden_states), scores, logits


def target_forward(state: DecodeState, target: Target) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """First half of a round: run the target over the block of the last committed token and the drafts.

    Returns:
        the block `[B, K + 1]` int64, its logits `[B, K + 1, V]`, its auxiliary hidden states `[B, K + 1, width]` or
        None.
    """
    block, slots = state.block()
    return block, *target(state, block, slots)


def verify_and_draft(
    state: DecodeState, drafter: Drafter, scores: torch.Tensor, aux_hidden_states: torch.Tensor | None
) -> VerificationResult:
    """Second half of a round: verify the drafts by `scores` `[B, K + 1, V]`, commit tokens, propose the next drafts."""
    result = state.commit(verify(scores, state))
    state.set_proposal(drafter.propose(state, aux_hidden_states, result))
    return result


def verify(scores: torch.Tensor, state: DecodeState) -> VerificationResult:
    """Verify the state's proposal by `scores` `[B, K + 1, V]`: greedily, or by rejection sampling."""
    if not state.is_sampling:
        return verify_greedy(scores, state.proposal.tokens)
    scores = scores.float()
    if state.verification == "block" and state.proposal.probs is not None:
        return verify_block(scores, *state.proposal, state.seeds, state.lengths, state.limits - state.lengths)
    return verify_sampling(scores, *state.proposal, state.seeds, state.lengths)


class RoundReport:
    """The result of a round on its way to the host, copied asynchronously from a GPU.

    Args:
        result: of the round; its tensors may be overwritten by the next one.
    """

    def __init__(self, result: VerificationResult):
        parts = (result.tokens, result.accepted[:, None], result.committed[:, None])
        packed = torch.cat(parts, dim=1)
        self._arrived = None
        if packed.is_cuda:
            self._packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._packed.copy_(packed, non_blocking=True)
            self._arrived = torch.cuda.current_stream(packed.device).record_event()
        else:
            self._packed = packed

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

    def admit(self) -> None:
        """Called before every round: put waiting requests into free rows."""

    def longest(self) -> int:
        """Committed tokens of the longest row, prompt included, as far as results are read."""

    def occupants(self) -> Any:
        """What occupies the rows now; passed on to `take` with the results of the next round."""

    def take(
        self, occupants: Any, tokens: list[list[int]], accepted: list[int], committed: list[int], **records: Any
    ) -> None:
        """Take the results of a round: K + 1 tokens, accepted drafts and committed tokens of each row of the state."""


class RoundLoop:
    """The loop over rounds on the host. It reads results one round late on a GPU, which therefore never waits for it.

    Args:
        state: prefilled.
        next_round: runs `run_round` on it, eagerly or captured.
        rows: what occupies the rows.
    """

    def __init__(
        self,
        state: DecodeState,
        next_round: Callable[[], tuple[VerificationResult, torch.Tensor | None, torch.Tensor | None]],
        rows: Rows,
    ):
        self._state = state
        self._next_round = next_round
        self._rows = rows
        self._rounds_ahead = policy_of(state.tokens.device).rounds_ahead
        self._reports: deque[tuple[Any, RoundReport, dict[str, torch.Tensor | None]]] = deque()

    def run(self) -> None:
        """Run rounds until the rows are complete. Rounds that the device began after that are ignored."""
        while not self._rows.is_complete:
            self._rows.admit()
            # Tokens of rounds whose results are not read yet.
            unseen = len(self._reports) * (self._state.num_draft_tokens + 1)
            # The drafts verified in this round, and those proposed after all of them were accepted.
            self._state.live = self._rows.longest() + unseen + 2 * self._state.num_draft_tokens
            result, scores, logits = self._next_round()
            report = RoundReport(result)
            self._reports.append((self._rows.occupants(), report, {"scores": scores, "logits": logits}))
            if len(self._reports) > self._rounds_ahead:
                occupants, report, records = self._reports.popleft()
                self._rows.take(occupants, *report.read(), **records)


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
        self.num_rounds = 0
        self._longest = longest
        self._remaining = remaining
        self._finished = finished

    @property
    def is_complete(self) -> bool:
        return self.transcript.is_complete

    def admit(self) -> None:
        pass

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
        self.num_rounds += 1
        for row, (num_accepted, num_committed) in enumerate(zip(accepted[:batch], committed[:batch], strict=True)):
            if num_committed > 0 and not self.transcript.is_done(row):
                remaining = self._remaining[row] - self.transcript.length(row)
                self.counters.count(row, num_accepted, num_committed, remaining)
        before = self.transcript.stopped
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
