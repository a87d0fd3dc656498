"""Programmatic dependent launch (PDL) of Hopper and later GPUs: a kernel starts while the one before it still runs.

A kernel that is launched so may prepare, but not read what earlier kernels write, nor write what they read, before it
calls `wait_for_inputs`. That waits until the kernel before has completed, and then allows the next kernel to start. So
when a kernel starts, all kernels but the one before it have completed: every kernel that is launched so has to wait.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_HOPPER = (9, 0)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait for the kernel before this one; afterwards the next one may start. Nothing without PDL."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@functools.cache
def _has_pdl(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    return torch.cuda.get_device_capability(device) >= _HOPPER


def dependent_launch(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of the launch of a kernel that has a parameter `PDL` and calls `wait_for_inputs`."""
    return {"PDL": True, "launch_pdl": True} if _has_pdl(device) else {"PDL": False}
