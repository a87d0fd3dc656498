"""CUDA graphs, which capture a function once and replay it; and compilation of functions."""

from __future__ import annotations

import functools
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..ops import capturing, compile_only

_T = TypeVar("_T")

# All threads share the compiler's settings and the filters of warnings.
_COMPILING = threading.RLock()

# Each shape is compiled separately, and torch stops compiling a function after so many compilations.
_MOST_COMPILATIONS = 4096


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which `device` is the current device: Triton launches, and torch creates streams and events there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class RoundClock:
    """Points in time in the work of `device`: CUDA events, which are read later; elsewhere the host's clock."""

    def __init__(self, device: torch.device):
        self._device = device

    def mark(self) -> Any:
        """A mark after the work so far."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def milliseconds(self, start: Any, end: Any) -> float:
        """Time between two marks, both of which the device must have passed."""
        return 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


@functools.cache
def _streams(device: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream, threading.Lock]:
    """A GPU's stream for warm-ups, stream for captures, and lock; one each, as cuBLAS has a workspace a stream."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device), threading.Lock()


@dataclass
class GraphPool:
    """A memory pool that several CUDA graphs share: each graph overwrites the temporary tensors of the others.

    The graphs must not run at the same time, and the result of a replay must be read before the next replay.

    Attributes:
        owner: the graph captured last, which keeps the pool alive; None before the first capture.
    """

    owner: torch.cuda.CUDAGraph | None = None


class CudaGraph:
    """A function without arguments as a CUDA graph of the current device; a replay runs on the current stream.

    The function must read and write tensors at fixed addresses, and read nothing on the host. It runs twice before the
    capture, to compile its kernels and to launch them; the caller makes sure that these runs have no effect.

    Attributes:
        result: the result of the function at its capture; every replay overwrites its tensors.
    """

    def __init__(self, function: Callable[[], Any], memory: GraphPool):
        warm_up, capture, lock = _streams(torch.cuda.current_device())
        current = torch.cuda.current_stream()
        warm_up.wait_stream(current)
        with torch.cuda.stream(warm_up), capturing():
            with compile_only(torch.device("cuda", torch.cuda.current_device())):
                function()
            function()
        current.wait_stream(warm_up)
        self._graph = torch.cuda.CUDAGraph()
        # torch counts the pool of a failed capture as in use forever, so the next capture must start a new one.
        owner, memory.owner = memory.owner, None
        pool = None if owner is None else owner.pool()
        # Other threads may allocate and synchronise during the capture. `stream(current)` restores the current stream,
        # which torch does not after a failed capture.
        with (
            lock,
            torch.cuda.stream(current),
            torch.cuda.graph(self._graph, pool=pool, stream=capture, capture_error_mode="thread_local"),
            capturing(),
        ):
            self.result = function()
        memory.owner = self._graph

    def __call__(self) -> Any:
        self._graph.replay()
        return self.result


def compiled(function: Callable[..., _T], backend: str, same_everywhere: bool = False) -> Callable[..., _T]:
    """`function` as a single graph of `torch.compile` with a `backend`; it is compiled at its first run.

    It must write each buffer once: if a graph writes a buffer twice, torch's compiler may copy it (torch 2.13).

    Args:
        same_everywhere: whether ranks of a split target run it, which must all have the same kernels.
    """
    options = None
    if backend == "inductor":
        # Kernels are launched with the strides that tracing has seen, so inputs must not get padded strides.
        options = {"comprehensive_padding": False}
        # Autotuned reductions could add in another order on each rank, so that ranks could draft different tokens.
        if same_everywhere and "deterministic" in torch._inductor.list_options():
            options["deterministic"] = True
    optimized = torch.compile(function, backend=backend, fullgraph=True, dynamic=False, options=options)

    def run(*args: Any, **options: Any) -> _T:
        limits = {"recompile_limit": _MOST_COMPILATIONS, "accumulated_recompile_limit": _MOST_COMPILATIONS}
        with _COMPILING, torch._dynamo.config.patch(limits), warnings.catch_warnings():
            # The float32 matmuls of a round belong to rotary embeddings, which should stay exact.
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            # A message for the compiler's developers.
            warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
            return optimized(*args, **options)

    return run


def without_autocast_cache(kind: str) -> AbstractContextManager[Any]:
    """Context in which autocast, on a device of type `kind`, does not cache casts of weights, which a graph would go on
    reading when outdated."""
    return torch.autocast(kind, enabled=torch.is_autocast_enabled(kind), cache_enabled=False)


def capture(function: Callable[[], Any], device: torch.device, memory: GraphPool) -> CudaGraph:
    """`function` as a graph; a call replays it, and every replay overwrites its `result`."""
    with on_device(device), without_autocast_cache(device.type):
        return CudaGraph(function, memory)
