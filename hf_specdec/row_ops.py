"""Reductions of rows with one order of summation: Triton kernels where the device runs them, else their references."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .kernels import row_reductions_reference
from .op_choice import is_for_triton


def _run(name: str, values: torch.Tensor, *args: torch.dtype | bool) -> torch.Tensor:
    """The kernel `name` of the arguments, or its reference."""
    if not is_for_triton(values):
        return getattr(row_reductions_reference, name)(values, *args)
    from .kernels import row_reductions

    kernel: Callable[..., torch.Tensor] = getattr(row_reductions, name)
    with torch.cuda.device_of(values):
        return kernel(values, *args)


# See `kernels.row_reductions_reference`.
row_sum, row_softmax, row_cumsum = (functools.partial(_run, name) for name in ("row_sum", "row_softmax", "row_cumsum"))
