"""How Triton kernels are declared.

A function that launches kernels in the place of a reference has the reference's parameters, whose types that states.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import triton
import triton.language as tl

# Annotation of an integer by which Triton compiles no variants of a kernel. Else it has one for the value 1 and one for
# values that are divisible by 16: for lengths, and strides of small tensors, these are no faster. It has the type of
# what compiled functions may name.
Unspecialised = tl.constexpr(None)


def kernel(function: Callable) -> triton.JITFunction:
    """Decorator: `triton.jit` for kernels that have `Unspecialised` parameters."""
    parameters = inspect.signature(function).parameters.values()
    unspecialised = [one.name for one in parameters if one.annotation == "Unspecialised"]
    return triton.jit(function, do_not_specialize=unspecialised)
