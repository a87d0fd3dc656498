"""Where layers run the ops of `layer_ops`."""

from __future__ import annotations

import torch

from ..device_policy import policy_of
from .patch import runs_engine

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def uses_layer_kernels(states: torch.Tensor) -> bool:
    """Whether the layers that compute with `states` run the ops of `layer_ops`.

    Not in code that is to be compiled: the compiler fuses small operations with their neighbours, residual sums, too.
    """
    return not torch.compiler.is_compiling() and runs_engine() and has_layer_kernels(states.device)


def has_layer_kernels(device: torch.device) -> bool:
    """Whether layers on `device` may run the ops of `layer_ops`."""
    return policy_of(device).layer_kernels
