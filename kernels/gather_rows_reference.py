"""PyTorch references of the gather of rows by index, and of rows of several tensors side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def gather_rows(table: torch.Tensor, index: torch.Tensor, fill: torch.Tensor | None) -> torch.Tensor:
    """`[B, W, H]`: rows of `table` `[B, n, H]`, or `[1, n, H]` for the whole batch, at `index` `[B, W]` int64; where it
    is negative, `fill` `[H]` in the dtype of `table`, or zeros."""
    batch = torch.arange(len(index), device=index.device)[:, None]
    rows = table[0 if len(table) == 1 else batch, index.clamp(min=0)]
    return torch.where(index[..., None] < 0, 0.0 if fill is None else fill, rows)


def join_rows(out: torch.Tensor, parts: Sequence[torch.Tensor], index: torch.Tensor | None) -> None:
    """Write the first m columns of `out` `[B, n, sum of H]`: rows of all `parts` `[B, n', H]` side by side, those at
    `index` `[B, m]` int64, or all of them, m = n', if `index` is None. Parts have one dtype and width."""
    joined = torch.cat([*parts], dim=-1)
    if index is not None:
        joined = joined[torch.arange(len(index), device=index.device)[:, None], index]
    out[:, : joined.shape[1]].copy_(joined)
