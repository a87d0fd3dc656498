"""PyTorch reference of the gather of rows by index."""

from __future__ import annotations

import torch


def gather_rows(table: torch.Tensor, index: torch.Tensor, fill: torch.Tensor | None) -> torch.Tensor:
    """`[B, W, H]`: rows of `table` `[B, n, H]`, or `[1, n, H]` for the whole batch, at `index` `[B, W]` int64; where it
    is negative, `fill` `[H]` in the dtype of `table`, or zeros."""
    batch = torch.arange(len(index), device=index.device)[:, None]
    rows = table[0 if len(table) == 1 else batch, index.clamp(min=0)]
    return torch.where(index[..., None] < 0, 0.0 if fill is None else fill, rows)
