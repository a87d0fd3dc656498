"""Blocks of columns and rings of what a row's last tokens left, in PyTorch; the Triton counterpart is `ring`.

A ring `[B, R, ...]` has an entry for a position in slot position mod R. Nothing in it is ever rolled back: the block
that covers a position again overwrites its entry.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Block(NamedTuple):
    """The live columns of each row of `positions`; they are adjacent, and at consecutive positions.

    Attributes:
        is_live: `[B, n]` bool.
        begin: `[B]` int64, the first live column; 0 in a row that has none.
        first: `[B]` int64, its position; `dummy` in a row that has none.
        end: `[B]` int64, the position after that of the last live column; `dummy` in a row that has none.
    """

    is_live: torch.Tensor
    begin: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor


def find_block(positions: torch.Tensor, dummy: int) -> Block:
    """The block of `positions` `[B, n]` int64, in which `dummy` and what is beyond mark columns that are no tokens."""
    is_live = positions < dummy
    first = positions.masked_fill(~is_live, dummy).amin(dim=1)
    return Block(is_live, is_live.to(torch.int8).argmax(dim=1), first, first + is_live.sum(dim=1))


def keep(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` `[B, m, ...]` where `mask` `[B, m]`, else 0 whatever they hold."""
    return values.masked_fill(~mask.reshape(*mask.shape, *[1] * (values.dim() - 2)), 0)


def read_ring(ring: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`[B, m, ...]`: the entries of `ring` `[B, R, ...]` at `positions` `[B, m]` where `mask` `[B, m]`, else 0."""
    rows = torch.arange(ring.shape[0], device=ring.device)[:, None]
    return keep(ring[rows, positions % ring.shape[1]], mask)


def write_ring(ring: torch.Tensor, values: torch.Tensor, block: Block, earliest: torch.Tensor) -> None:
    """Write the live columns of `values` `[B, n, ...]` to `ring` `[B, R, ...]`, in place.

    Positions before `earliest` `[B]` are left out, and all but the last R.
    """
    size, last = ring.shape[1], block.end[:, None] - 1
    slots = torch.arange(size, device=ring.device)
    positions = last - (last - slots) % size  # the last one of the block, or of before it, that each slot has
    is_written = positions >= torch.maximum(block.first, earliest)[:, None]
    columns = (block.begin[:, None] + positions - block.first[:, None]).clamp(0, values.shape[1] - 1)
    rows = torch.arange(ring.shape[0], device=ring.device)[:, None]
    is_written = is_written.reshape(*is_written.shape, *[1] * (ring.dim() - 2))
    ring.copy_(torch.where(is_written, values[rows, columns].to(ring.dtype), ring))
