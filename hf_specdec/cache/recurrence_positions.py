"""Positions of the recurrent states of a cache; see `recurrent_layers`."""

from __future__ import annotations

import torch


class RecurrencePositions:
    """Positions of the recurrent states of a cache, one for each row, shared by all layers.

    Args:
        lengths, num_again: see `RaggedCache`.

    Attributes:
        certain: `[B]` int64, the position up to which tokens become part of the stored states.
        base: `[B]` int64, position of the stored states during a pass.
        next_base: `[B]` int64, their position after the pass.
        prompt_lengths: `[B]` int64, lengths of the rows when they started.
    """

    def __init__(self, lengths: torch.Tensor, num_again: int):
        self._lengths, self._num_again = lengths, num_again
        self.certain = torch.zeros_like(lengths)
        self.base, self.next_base = torch.zeros_like(lengths), torch.zeros_like(lengths)
        self.prompt_lengths = lengths.clone()

    def restart(self, starts: torch.Tensor | None) -> None:
        """Begin texts at positions `starts` `[B]` int64; None for 0 in all rows."""
        if starts is None:
            self.next_base.zero_()
        else:
            self.next_base.copy_(starts)
        self.prompt_lengths.copy_(self._lengths)

    def resume(self, ends: torch.Tensor, is_step: bool) -> None:
        """Continue texts in the first rows, whose states are at positions `ends` `[n]` int64. With `is_step` their
        prompts have just one more token, which runs like a token after a prompt."""
        self.next_base[: len(ends)] = ends
        if is_step:
            self.prompt_lengths[: len(ends)] = ends

    def advance(self, positions: torch.Tensor, dummy: int) -> None:
        """Begin a pass over `positions` `[B, n]` int64; columns without a token have position `dummy`."""
        self.base.copy_(self.next_base)
        self.certain.copy_(self._lengths - self._num_again)
        last = torch.where(positions < dummy, positions, -1).amax(dim=1)
        # For a row without tokens `last` is -1, so its base stays.
        self.next_base.copy_(torch.minimum(self.certain, last + 1).maximum(self.base))

    def copy_rows(self, rows: torch.Tensor, source: RecurrencePositions, taken: slice | torch.Tensor) -> None:
        for name in ("next_base", "prompt_lengths"):
            getattr(self, name)[rows] = getattr(source, name)[taken]
