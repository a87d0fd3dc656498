"""Rings of what a layer has computed of the last tokens of each row, slot == position mod their size."""

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
        """What is known at `positions` `[B, m]` int64, `[B, m, ...]`: of tokens of the pass or of earlier ones.

        Args:
            positions: anything is returned for those after the last token, before the text, and too far back.
            ring: `[B, R, ...]`, of earlier tokens.
            tokens: `[B, n, ...]`, of the columns of the pass.
        """
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
