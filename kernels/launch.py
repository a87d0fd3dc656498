"""How Triton kernels are declared and launched.

A function that launches kernels in the place of a reference has the reference's parameters, whose types that states.

By programmatic dependent launch (PDL) of Hopper and later GPUs a kernel starts while the one before it still runs. It
may prepare, but not read what earlier kernels write, nor write what they read, before it calls `wait_for_inputs`. That
waits until the kernel before has completed, and then allows the next kernel to start. So when a kernel starts, all
kernels but the one before it have completed: every kernel that is launched so has to wait.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_HOPPER = (9, 0)

# Annotation of an integer or a pointer by which Triton compiles no variants of a kernel. Else it has one for the value
# 1 and one for values that are divisible by 16: for lengths, and small tensors with their strides, these are no faster.
# It has the type of what compiled functions may name.
Unspecialised = tl.constexpr(None)


def kernel(function: Callable) -> triton.JITFunction:
    """Decorator: `triton.jit` for kernels that have `Unspecialised` parameters."""
    parameters = inspect.signature(function).parameters.values()
    unspecialised = [one.name for one in parameters if one.annotation == "Unspecialised"]
    return triton.jit(function, do_not_specialize=unspecialised)


# Blocks of the drafts of a round are no smaller: chains of up to 7 drafts share one variant of a kernel.
_LEAST_STEPS = 8


def block_of_steps(count: int) -> int:
    """The size of the block with which a kernel takes the `count` tokens or nodes of a round."""
    return max(_LEAST_STEPS, triton.next_power_of_2(count))


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
