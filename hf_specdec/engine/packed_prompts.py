"""Prompts of several rows packed in one, without padding, for prefills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..drafters.base import Drafter
from ..state import DecodeState, upload


class PromptSpan(NamedTuple):
    """Positions of a row that a prefill computes.

    Attributes:
        row: of the state.
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
        last: `[B]` int64, where in `slots` the last position of each row is; -1 for rows without any.
        hidden_states: `[B, width]`, auxiliary hidden states of the target there; 0 for rows without any. None before
            the first prefill, and for a drafter that reads none.
    """

    state: DecodeState
    slots: torch.Tensor
    last: torch.Tensor
    hidden_states: torch.Tensor | None = None

    @classmethod
    def of(cls, state: DecodeState, drafter: Drafter) -> PackedPrompts:
        """Buffers for prompts of `state`, whose memory is that of `drafter`."""
        batch = len(state.tokens)
        slots = torch.empty(batch * state.slots + 1, dtype=torch.int64, device=state.tokens.device)
        return cls(state.as_one_row(drafter.as_one_row(state.memory, batch)), slots, torch.empty_like(state.lengths))

    def fill(self, spans: Sequence[PromptSpan]) -> None:
        """Set the positions to prefill; at most those of all rows."""
        width, host = self.state.row_slots, torch.device("cpu")
        self.slots.fill_(self.state.dummy_slot)
        self.last.fill_(-1)
        if self.hidden_states is not None:
            self.hidden_states.zero_()
        spans = [span for span in spans if span.end > span.begin]
        if not spans:
            return
        parts = [torch.arange(one.begin, one.end, device=host) + one.row * width for one in spans]
        slots, ends = torch.cat(parts), torch.tensor([len(part) for part in parts]).cumsum(0) - 1
        self.slots[: len(slots)] = upload(slots, self.slots)
        self.last[upload([one.row for one in spans], self.last)] = upload(ends, self.last)
