"""Buffers of a prefill; prompts of several rows packed in one, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..drafters.base import Drafter
from ..row_buffers import set_rows, upload
from ..state import DecodeState

# Of rows without positions to prefill.
_NOWHERE = -(2**31)


class PromptSpan(NamedTuple):
    """Positions of a row that a prefill computes.

    Attributes:
        begin, end: the first position, and the one after the last.
    """

    row: int
    begin: int
    end: int


@dataclass
class PackedPrompts:
    """Positions to prefill, of several rows one behind the other.

    Attributes:
        state: the state whose rows they are, as one row; its drafter's memory, too.
        slots: `[tokens]` int64 slots of it, of the positions to prefill; the dummy slot after them, and last.
    """

    state: DecodeState
    slots: torch.Tensor

    @classmethod
    def of(cls, state: DecodeState, drafter: Drafter) -> PackedPrompts:
        """Buffers for prompts of `state`, whose memory is that of `drafter`."""
        batch = len(state.tokens)
        slots = torch.empty(batch * state.slots + 1, dtype=torch.int64, device=state.tokens.device)
        return cls(state.as_one_row(drafter.as_one_row(state.memory, batch)), slots)

    def fill(self, spans: Sequence[PromptSpan]) -> None:
        """Set the positions to prefill; at most those of all rows."""
        width, host = self.state.row_slots, torch.device("cpu")
        self.slots.fill_(self.state.dummy_slot)
        parts = [torch.arange(one.begin, one.end, device=host) + one.row * width for one in spans]
        if parts:
            slots = torch.cat(parts)
            self.slots[: len(slots)] = upload(slots, self.slots)


@dataclass
class PromptBuffers:
    """What a prefill runs, and what it leaves of the last tokens of the prompts.

    Attributes:
        num_done: `[]` int64, steps that are done: columns of padded rows, or tokens of packed ones.
        starts: `[B]` int64, the position of each row that step 0 runs, or would run if there were as many before the
            row's first; a large negative number for rows without positions to prefill.
        packed: the positions, packed in one row; None if each row has its own. Then rows end at the same step.
        hidden_states: `[B, state.first_block_width, width]`, auxiliary hidden states of the target at the last tokens
            of the prompts, as far as the prefill has run them, else 0; None before the first prefill, and for a drafter
            that reads none.
    """

    num_done: torch.Tensor
    starts: torch.Tensor
    packed: PackedPrompts | None = None
    hidden_states: torch.Tensor | None = None

    @classmethod
    def of(cls, state: DecodeState) -> PromptBuffers:
        return cls(torch.zeros((), dtype=torch.int64, device=state.tokens.device), torch.empty_like(state.lengths))

    def fill(self, spans: Sequence[PromptSpan], steps: int, goes_on: bool = False) -> None:
        """Set the positions to prefill.

        Args:
            spans: of the rows, each once.
            steps: of the whole prefill, if the rows are padded.
            goes_on: whether earlier positions of the same prompts have been run, whose hidden states stay.
        """
        starts, first = [_NOWHERE] * len(self.starts), 0
        for span in spans:
            starts[span.row] = span.end - steps if self.packed is None else span.begin - first
            first += span.end - span.begin
        self.starts.copy_(upload(starts, self.starts))
        self.num_done.zero_()
        if self.hidden_states is not None and spans and not goes_on:
            set_rows(self.hidden_states, upload([span.row for span in spans], self.starts), 0)
        if self.packed is not None:
            self.packed.fill(spans)
