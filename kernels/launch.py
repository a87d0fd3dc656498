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
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq
from triton.runtime import driver

# Annotation of an integer or a pointer for which Triton must not compile variants. By default it compiles one for the
# value 1 and one for multiples of 16; for lengths, and for small tensors and their strides, these are no faster.
# It is a `constexpr` because compiled functions may use no other globals.
Unspecialised = tl.constexpr(None)


class _Mode(threading.local):
    """Whether launches of this thread compile only, and which variants of kernels they have compiled so far."""

    compile_only = False
    compiled: set[tuple[Kernel, Any]] = set()


_mode = _Mode()


class Kernel(triton.JITFunction):
    """A compiled kernel, which can be compiled without a launch, see `compile_only`. It has PDL if it waits."""

    def __init__(self, function: Callable, **options: Any):
        super().__init__(function, **options)
        self._waits = "wait_for_inputs" in function.__code__.co_names

    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if self._waits and _device_has_pdl(driver.active.get_current_device()):
            options["launch_pdl"] = True
        return super().run(*args, grid=grid, warmup=warmup or _mode.compile_only, **options)

    def _do_compile(self, key: Any, *args: Any) -> Any:
        # Triton finds out at the end of the context only that a variant is being compiled, by a key that takes long.
        if _mode.compile_only:
            if (self, key) in _mode.compiled:
                return None
            _mode.compiled.add((self, key))
        return super()._do_compile(key, *args)


def kernel(function: Callable) -> triton.JITFunction:
    """Decorator: `triton.jit` for kernels that are launched; they may have `Unspecialised` parameters."""
    parameters = inspect.signature(function).parameters.values()
    unspecialised = [one.name for one in parameters if one.annotation == "Unspecialised"]
    declare = triton.jit if is_interpreted() else Kernel
    return declare(function, do_not_specialize=unspecialised)


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, which compiles none."""
    return triton.knobs.runtime.interpret


class _Loading:
    """An executor that loads what it compiles, on GPU number `index`: Triton calls the C compiler for that, too.

    A kernel that cannot be compiled or loaded counts as not compiled.
    """

    def __init__(self, pool: ThreadPoolExecutor, index: int):
        self._pool, self._index = pool, index
        self._loaded: list[Any] = []

    def submit(self, compile_kernel: Callable[[], Any]) -> Future:
        def load() -> Any:
            try:
                with torch.cuda.device(self._index):
                    compiled = compile_kernel()
                    _ = compiled.run  # loads it
            except Exception:  # its launch compiles it again, and raises the error
                return None
            self._loaded.append(compiled)
            return compiled

        return self._pool.submit(load)

    def __enter__(self) -> _Loading:
        return self

    def __exit__(self, *error: object) -> None:
        # The launchers of Triton 3.6 and earlier are modules of one name. Where one is loaded twice, Python puts its
        # functions into the module of that name that was loaded last, perhaps before another thread has read its own.
        # So all kernels get their launchers again, one after the other.
        for one in self._loaded:
            one._run = driver.active.launcher_cls(one.src, one.metadata)


@contextmanager
def compile_only(device: torch.device) -> Iterator[None]:
    """Context in which launches of this thread compile kernels for `device`, in parallel, and launch nothing.

    At its end they are compiled and loaded. Triton's compiler leaves the interpreter's lock to other threads for nine
    tenths of its time.
    """
    if _mode.compile_only:
        yield
        return
    index = -1 if device.type != "cuda" else torch.cuda.current_device() if device.index is None else device.index
    _mode.compile_only, _mode.compiled = True, set()
    try:
        with (
            ThreadPoolExecutor(os.cpu_count(), "compile") as pool,
            _Loading(pool, index) as loading,
            triton.AsyncCompileMode(loading),
        ):
            yield
    finally:
        _mode.compile_only = False


@kernel
def _empty_kernel():
    pass


def start_compiler(device: torch.device) -> None:
    """Compile a kernel for `device` that does nothing, so that later ones find Triton's compiler and driver ready."""
    with compile_only(device):
        _empty_kernel[(1,)]()


# The smallest block of a round's tokens: chains of up to 7 drafts share one variant of a kernel.
_LEAST_STEPS = 8


def block_of_steps(count: int) -> int:
    """Block size of a kernel for the `count` tokens or nodes of a round."""
    return max(_LEAST_STEPS, triton.next_power_of_2(count))


# A `constexpr`, because compiled functions may use no other globals.
_IS_INTERPRETED = tl.constexpr(is_interpreted())


@triton.constexpr_function
def has_pdl() -> bool:
    """Whether the current device has PDL."""
    return not _IS_INTERPRETED.value and cuda_capability_geq(9)


@functools.cache
def _device_has_pdl(index: int) -> bool:
    return has_pdl()


@triton.jit
def start_next():
    """Let the next kernel start, once all programs have called this. Does nothing without PDL."""
    if has_pdl():
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(starts_next=True):
    """Wait for the kernel before this one, then perhaps let the next one start. Does nothing without PDL."""
    if has_pdl():
        gdc_wait()
        if starts_next:
            gdc_launch_dependents()
