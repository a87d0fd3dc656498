"""Where layers run the ops of `layer_ops`."""

from __future__ import annotations

import torch

from ..device_policy import DEFAULT_POLICY, DEVICE_POLICIES
from .patch import this_thread

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def uses_layer_kernels(states: torch.Tensor) -> bool:
    """Whether the layers that compute with `states` run the ops of `layer_ops`.

    Not in code that is to be compiled: the compiler fuses small operations with their neighbours, residual sums, too.
    """
    if torch.compiler.is_compiling() or this_thread.engine is None:
        return False
    return DEVICE_POLICIES.get(states.device.type, DEFAULT_POLICY).layer_kernels
