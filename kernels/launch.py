"""Declaration and launch of Triton kernels.

A function that launches the kernels of a reference has the reference's parameters; the reference states their types.

With programmatic dependent launch (PDL) of Hopper and later GPUs, a kernel starts while the kernel before it still
runs. Before it calls `wait_for_inputs` it may prepare, but it must neither read what earlier kernels write nor write
what they read. `wait_for_inputs` waits until the kernel before has completed, and then lets the next kernel start. So
when a kernel starts, all kernels except the one before it have completed. This needs every kernel with PDL to wait.

Programs that wait are placed where there is room, not evenly. So a kernel with more programs than run at once lets the
next one start at its own end: else the product after gate and up of an 8B target with FP8 weights takes 31 us instead
of 17 at batch 1. Letting the next kernel start before the wait is no faster either: rounds of 8B shapes take 4.20
instead of 4.09 ms at batch 1 without a drafter, and 5.22 instead of 5.28 at batch 8 with EAGLE-3. Nor is fetching the
next product's weight into the L2 cache at a product's end: 3.28 instead of 3.26 ms with FP8 weights, and 4.24 to 4.40
instead of 4.02 in bfloat16 (one H200, Triton 3.6).
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

# Annotation of an integer or a pointer for which Triton must not compile variants. By default it compiles one for the
# value 1 and one for multiples of 16; for lengths, and for small tensors and their strides, these are no faster.
# It is a `constexpr` because compiled functions may use no other globals.
Unspecialised = tl.constexpr(None)


def kernel(function: Callable) -> triton.JITFunction:
    """Decorator: `triton.jit` for kernels that have `Unspecialised` parameters."""
    parameters = inspect.signature(function).parameters.values()
    unspecialised = [one.name for one in parameters if one.annotation == "Unspecialised"]
    return triton.jit(function, do_not_specialize=unspecialised)


# The smallest block of a round's tokens: chains of up to 7 drafts share one variant of a kernel.
_LEAST_STEPS = 8


def block_of_steps(count: int) -> int:
    """Block size of a kernel for the `count` tokens or nodes of a round."""
    return max(_LEAST_STEPS, triton.next_power_of_2(count))


@triton.jit
def start_next(PDL: tl.constexpr):
    """Let the next kernel start, once all programs have called this. Does nothing without PDL."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr, starts_next=True):
    """Wait for the kernel before this one, then perhaps let the next one start. Does nothing without PDL."""
    if PDL:
        gdc_wait()
        if starts_next:
            gdc_launch_dependents()


@functools.cache
def _has_pdl(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    return torch.cuda.get_device_capability(device) >= _HOPPER


def dependent_launch(device: torch.device) -> dict[str, Any]:
    """Launch arguments for a kernel that has a parameter `PDL` and calls `wait_for_inputs`."""
    return {"PDL": True, "launch_pdl": True} if _has_pdl(device) else {"PDL": False}
