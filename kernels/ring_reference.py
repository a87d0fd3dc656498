"""Blocks of columns, and rings of values of a row's last tokens, in PyTorch; the Triton counterpart is `ring`.

The live columns of a row are adjacent, at consecutive positions. Columns at `dummy` or beyond are padding, before and
after the live ones. A ring `[B, R, ...]` has the entry of a position in slot position mod R. Nothing is ever rolled
back: a block that covers a position again, such as that of a rejected draft, overwrites its entry.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class PassPositions(NamedTuple):
    """The positions of the tokens of a pass, `[B, 1]` int64 each.

    Positions of adjacent tokens are consecutive; columns without a token may stand before them and after them.

    Attributes:
        first: the position that column 0 would have; the dummy slot in a row without a token.
        begin: position of the first token; the dummy slot or beyond in a row without a token.
        last: position of the last token; -1 in a row without a token.
    """

    first: torch.Tensor
    begin: torch.Tensor
    last: torch.Tensor

    @classmethod
    def of(cls, positions: torch.Tensor, dummy: int) -> PassPositions:
        """For a pass over `positions` `[B, n]` int64, which are `dummy` or beyond for columns without a token."""
        columns = torch.arange(positions.shape[1], device=positions.device)
        is_token = positions < dummy
        return cls(
            torch.where(is_token, positions - columns, dummy).amin(dim=1, keepdim=True),
            positions.amin(dim=1, keepdim=True),
            torch.where(is_token, positions, -1).amax(dim=1, keepdim=True),
        )

    def at(self, positions: torch.Tensor, ring: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Values `[B, m, ...]` at `positions` `[B, m]` int64: from `tokens` `[B, n, ...]` of the pass, or for earlier
        positions from `ring` `[B, R, ...]`. They are undefined after the last token, before the text, and too far
        back."""
        size = ring.shape[1]
        index = torch.where(positions < self.begin, positions % size, size + positions - self.first)
        return _gather(torch.cat([ring.to(tokens.dtype), tokens], dim=1), index.clamp(0, size + tokens.shape[1] - 1))

    def keep(self, ring: torch.Tensor, tokens: torch.Tensor, earliest: torch.Tensor | None = None) -> None:
        """Store the last `tokens` `[B, n, ...]` of the pass in `ring` `[B, R, ...]`; only those at positions from
        `earliest` `[B]` int64 on if it is given."""
        slots = torch.arange(ring.shape[1], device=ring.device)
        # The latest position of each slot. A slot whose position is before the first token keeps its entry.
        positions = self.last - (self.last - slots) % ring.shape[1]
        first_kept = self.begin if earliest is None else torch.maximum(self.begin, earliest[:, None])
        latest = _gather(tokens, (positions - self.first).clamp(min=0)).to(ring.dtype)
        ring.copy_(torch.where(with_dims_of(positions >= first_kept, ring), latest, ring))


def with_dims_of(values: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`values` `[B, n]` as `[B, n, 1, ...]`, with as many dimensions as `other`."""
    return values.view(*values.shape, *[1] * (other.dim() - 2))


def keep(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` `[B, n, ...]` where `mask` `[B, n]`, else 0, also for NaN."""
    return values.masked_fill(~with_dims_of(mask, values), 0)


def _gather(values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Columns `[B, m, ...]` of `values` `[B, n, ...]` by `columns` `[B, m]` int64."""
    return values.gather(1, with_dims_of(columns, values).expand(-1, -1, *values.shape[2:]))
