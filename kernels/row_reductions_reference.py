"""PyTorch references of reductions of rows, in float32, or in float64 for float64 values."""

from __future__ import annotations

import torch


def _at_least_float32(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def row_sum(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[outer, inner]` in `dtype`: sums of `values` `[outer, size, inner]` over the middle dimension."""
    return _at_least_float32(values).sum(1).to(dtype)


def row_softmax(values: torch.Tensor, dtype: torch.dtype, is_log: bool) -> torch.Tensor:
    """`[rows, size]` in `dtype`: softmax over the last dimension of `values` `[rows, size]`, or its logarithm.

    A row of only -inf, or with NaN, gives NaN.
    """
    values = _at_least_float32(values)
    return (values.log_softmax(-1) if is_log else values.softmax(-1)).to(dtype)


def row_cumsum(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[rows, size]` in `dtype`: running sums over the last dimension of `values` `[rows, size]`."""
    return _at_least_float32(values).cumsum(-1).to(dtype)
