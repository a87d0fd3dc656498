"""Rings of what a layer has computed of the last tokens of each row, slot == position mod their size; and positions of
recurrent states, see `recurrent_layers`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Block(NamedTuple):
    """The positions of the tokens of a pass, `[B, 1]` int64 each.

    Positions of adjacent tokens are consecutive; columns without a token may stand before them and after them.

    Attributes:
        first: the position that column 0 would have; the dummy slot in a row without a token.
        begin: of the first token; the dummy slot in a row without one.
        last: of the last token; -1 in a row without one.
    """

    first: torch.Tensor
    begin: torch.Tensor
    last: torch.Tensor

    @classmethod
    def of(cls, positions: torch.Tensor, dummy: int) -> Block:
        """Those of a pass over `positions` `[B, n]` int64, `dummy` for columns without a token."""
        columns = torch.arange(positions.shape[1], device=positions.device)
        is_token = positions < dummy
        return cls(
            torch.where(is_token, positions - columns, dummy).amin(dim=1, keepdim=True),
            positions.amin(dim=1, keepdim=True),
            torch.where(is_token, positions, -1).amax(dim=1, keepdim=True),
        )

    def at(self, positions: torch.Tensor, ring: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """What is known at `positions` `[B, m]` int64, `[B, m, ...]`: of `tokens` `[B, n, ...]` of the pass, or of
        earlier ones, in `ring` `[B, R, ...]`. Anything is returned for those after the last token, before the text, and
        too far back."""
        size = ring.shape[1]
        index = torch.where(positions < self.begin, positions % size, size + positions - self.first)
        return _gather(torch.cat([ring.to(tokens.dtype), tokens], dim=1), index.clamp(0, size + tokens.shape[1] - 1))

    def keep(self, ring: torch.Tensor, tokens: torch.Tensor) -> None:
        """Put the last of `tokens` `[B, n, ...]`, of the columns of the pass, into `ring` `[B, R, ...]`."""
        slots = torch.arange(ring.shape[1], device=ring.device)
        # The column of the latest position that a slot is for; before the first token it keeps what it has.
        columns = self.last - (self.last - slots) % ring.shape[1] - self.first
        latest = _gather(tokens, columns.clamp(min=0)).to(ring.dtype)
        ring.copy_(torch.where(like(columns >= self.begin - self.first, ring), latest, ring))


def like(values: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`values` `[B, n]` as `[B, n, 1, ...]`, with as many dimensions as `other`."""
    return values.view(*values.shape, *[1] * (other.dim() - 2))


def _gather(values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """`[B, m, ...]`: `columns` `[B, m]` int64 of `values` `[B, n, ...]`."""
    return values.gather(1, like(columns, values).expand(-1, -1, *values.shape[2:]))


class RecurrencePositions:
    """The positions of the recurrent states of a cache, one for each row; the same for all of its layers.

    Args:
        lengths: `[B]` int64, committed tokens of each row, as they are when a pass runs.
        num_again: how many of the last committed tokens may be run again.

    Attributes:
        certain: `[B]` int64, the position up to which tokens become part of the stored states.
        base: `[B]` int64, the position of the stored states during a pass.
        next_base: `[B]` int64, their position after it.
        prompt_lengths: `[B]` int64, lengths when the rows were started.
    """

    def __init__(self, lengths: torch.Tensor, num_again: int):
        self._lengths, self._num_again = lengths, num_again
        self.certain = torch.zeros_like(lengths)
        self.base, self.next_base = torch.zeros_like(lengths), torch.zeros_like(lengths)
        self.prompt_lengths = lengths.clone()

    def restart(self, starts: torch.Tensor | None) -> None:
        """Begin texts at the positions `starts` `[B]` int64; None for 0 in all rows."""
        if starts is None:
            self.next_base.zero_()
        else:
            self.next_base.copy_(starts)
        self.prompt_lengths.copy_(self._lengths)

    def resume(self, ends: torch.Tensor, is_step: bool) -> None:
        """Continue texts whose states are those of the positions `ends` `[n]` int64, of the first rows; with `is_step`
        their prompts have one more token only, which is then run as those after a prompt are."""
        self.next_base[: len(ends)] = ends
        if is_step:
            self.prompt_lengths[: len(ends)] = ends

    def advance(self, positions: torch.Tensor, dummy: int) -> None:
        """Begin a pass over `positions` `[B, n]` int64, `dummy` for columns without a token."""
        self.base.copy_(self.next_base)
        self.certain.copy_(self._lengths - self._num_again)
        last = torch.where(positions < dummy, positions, -1).amax(dim=1)
        # A row without a token has `last` -1, and keeps its base.
        self.next_base.copy_(torch.minimum(self.certain, last + 1).maximum(self.base))

    def copy_rows(self, rows: torch.Tensor, source: RecurrencePositions, taken: slice | torch.Tensor) -> None:
        for name in ("next_base", "prompt_lengths"):
            getattr(self, name)[rows] = getattr(source, name)[taken]
