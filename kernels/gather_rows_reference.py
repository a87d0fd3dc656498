"""PyTorch reference of the gathering of rows by index."""

from __future__ import annotations

import torch


def gather_rows(table: torch.Tensor, index: torch.Tensor, fill: torch.Tensor | None) -> torch.Tensor:
    """Rows of `table` at `index`.

    Args:
        table: `[B or 1, n, H]`; the same rows for all of the batch if there is one.
        index: `[B, W]` int64, of rows of the table; negative where `fill` is to be taken.
        fill: `[H]` in the dtype of `table`; zeros if None.

    Returns:
        `[B, W, H]`.
    """
    batch = torch.arange(len(index), device=index.device)[:, None]
    rows = table[0 if len(table) == 1 else batch, index.clamp(min=0)]
    return torch.where(index[..., None] < 0, 0.0 if fill is None else fill, rows)
