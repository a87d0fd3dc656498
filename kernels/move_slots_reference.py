"""PyTorch reference of the move of the nodes of an accepted path; shapes and formula are in `move_slots`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .float8_reference import as_bytes


def move_slots(
    buffers: Sequence[torch.Tensor], path: torch.Tensor, lengths: torch.Tensor, committed: torch.Tensor
) -> None:
    """Move what a tree's pass has stored of an accepted path from the slots of its nodes to those of its positions.

    Of the tokens that a row has committed the last one has not been run, so one fewer are moved; none of finished rows.

    Args:
        buffers: `[B, slots, heads, width]` each, of any dtypes; written.
        path: `[B, D + 1]` int64, nodes, the root first; ascending as far as it is accepted.
        lengths: `[B]` int64, committed tokens of each row, these included.
        committed: `[B]` int64, how many these are.
    """
    steps = torch.arange(path.shape[1], device=path.device)
    roots = (lengths - committed - 1)[:, None]
    is_moved = steps < committed[:, None]
    # What is not moved is copied to where it is.
    sources = torch.where(is_moved, roots + path, roots)
    targets = torch.where(is_moved, roots + steps, roots)
    rows = torch.arange(len(path), device=path.device)[:, None]
    for buffer in map(as_bytes, buffers):
        buffer[rows, targets] = buffer[rows, sources]
