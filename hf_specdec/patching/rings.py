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
        """What is known at `positions` `[B, m]` int64, `[B, m, C]`: of tokens of the pass or of earlier ones.

        Args:
            positions: anything is returned for those after the last token, before the text, and too far back.
            ring: `[B, R, C]`, of earlier tokens.
            tokens: `[B, n, C]`, of the columns of the pass.
        """
        size = ring.shape[1]
        index = torch.where(positions < self.begin, positions % size, size + positions - self.first)
        index = index.clamp(0, size + tokens.shape[1] - 1)[..., None].expand(-1, -1, tokens.shape[-1])
        return torch.cat([ring.to(tokens.dtype), tokens], dim=1).gather(1, index)
