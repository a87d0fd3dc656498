"""Reductions of rows with one order of summation: Triton kernels where the device runs them, else their references."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .kernels import row_reductions_reference
from .op_choice import is_for_triton

__all__ = ["row_cumsum", "row_softmax", "row_sum"]


def _run(name: str, values: torch.Tensor, *args: torch.dtype | bool) -> torch.Tensor:
    """The kernel `name` of the arguments, or its reference."""
    if not is_for_triton(values):
        return getattr(row_reductions_reference, name)(values, *args)
    from .kernels import row_reductions

    kernel: Callable[..., torch.Tensor] = getattr(row_reductions, name)
    with torch.cuda.device_of(values):
        return kernel(values, *args)


def row_sum(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `kernels.row_reductions_reference.row_sum`; a Triton kernel on GPUs."""
    return _run("row_sum", values, dtype)


def row_softmax(values: torch.Tensor, dtype: torch.dtype, is_log: bool) -> torch.Tensor:
    """See `kernels.row_reductions_reference.row_softmax`; a Triton kernel on GPUs."""
    return _run("row_softmax", values, dtype, is_log)


def row_cumsum(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `kernels.row_reductions_reference.row_cumsum`; a Triton kernel on GPUs."""
    return _run("row_cumsum", values, dtype)
