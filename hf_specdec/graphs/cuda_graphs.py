"""CUDA graphs: functions captured once and replayed; and functions compiled before."""

from __future__ import annotations

import functools
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..op_choice import capturing

_T = TypeVar("_T")

# Runs of a function before it is captured.
WARM_UPS = 2

# Settings of the compiler, and filters of warnings, are shared by all threads.
_COMPILING = threading.RLock()

# Every shape is compiled separately; torch stops compiling a function after so many.
_MOST_COMPILATIONS = 4096


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which `device` is the current one, where Triton launches and torch creates streams and events."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class RoundClock:
    """Points in time of the work of `device`: CUDA events, which are read later; elsewhere the host's clock."""

    def __init__(self, device: torch.device):
        self._device = device

    def mark(self) -> Any:
        """The time at which the work so far is done."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def milliseconds(self, start: Any, end: Any) -> float:
        """Time between two marks, which the device has passed."""
        return 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


@functools.cache
def _streams(device: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream, threading.Lock]:
    """A GPU's streams for warm-ups and for captures, one each as cuBLAS keeps a workspace for every one, and a lock."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device), threading.Lock()


@dataclass
class GraphPool:
    """A CUDA-graph memory pool that several graphs share: temporary tensors of one are overwritten by the next.

    The graphs must not run at the same time, and what a replay returns must have been read before the next one.

    Attributes:
        owner: the graph captured last, which keeps the pool alive; None before the first.
        seconds: what the graphs took, if each of their runs was as the last one: the first may build kernels, which
            graphs of other shapes share.
    """

    owner: torch.cuda.CUDAGraph | None = None
    seconds: float = 0.0


class CudaGraph:
    """A function of no arguments as a CUDA graph of the current device; a replay is launched on the current stream.

    The function must read and write tensors at fixed addresses, and read nothing on the host. It is run `WARM_UPS`
    times before it is captured; the caller makes sure that these runs have no effect.

    Attributes:
        result: what the function returned when it was captured; every replay overwrites its tensors.
    """

    def __init__(self, function: Callable[[], Any], memory: GraphPool):
        warm_up, capture, lock = _streams(torch.cuda.current_device())
        current = torch.cuda.current_stream()
        warm_up.wait_stream(current)
        with torch.cuda.stream(warm_up), capturing():
            for _ in range(WARM_UPS):
                function()
        current.wait_stream(warm_up)
        start = time.perf_counter()
        self._graph = torch.cuda.CUDAGraph()
        # torch counts the pool of a failed capture as in use for good: the next capture starts a new one.
        owner, memory.owner = memory.owner, None
        pool = None if owner is None else owner.pool()
        # Other threads may allocate and synchronise during the capture. After a failed capture torch would leave its
        # stream current.
        with (
            lock,
            torch.cuda.stream(current),
            torch.cuda.graph(self._graph, pool=pool, stream=capture, capture_error_mode="thread_local"),
            capturing(),
        ):
            self.result = function()
        memory.owner = self._graph
        memory.seconds += (WARM_UPS + 1) * (time.perf_counter() - start)

    def __call__(self) -> Any:
        self._graph.replay()
        return self.result


def compiled(function: Callable[..., _T], backend: str, same_everywhere: bool = False) -> Callable[..., _T]:
    """`function` as one graph of `torch.compile` with a `backend`; it is compiled when it first runs.

    It must write each buffer once: where a graph writes one twice, torch's compiler may copy it (torch 2.13).

    Args:
        same_everywhere: whether the ranks of a split target run it, which must have the same kernels.
    """
    options = None
    if backend == "inductor":
        # Padded strides would be those of kernels' inputs, too, which are launched with the ones that tracing has seen.
        options = {"comprehensive_padding": False}
        # Autotuned reductions could add in another order on each rank, which could draft another token.
        if same_everywhere and "deterministic" in torch._inductor.list_options():
            options["deterministic"] = True
    optimized = torch.compile(function, backend=backend, fullgraph=True, dynamic=False, options=options)

    def run(*args: Any, **options: Any) -> _T:
        limits = {"recompile_limit": _MOST_COMPILATIONS, "accumulated_recompile_limit": _MOST_COMPILATIONS}
        with _COMPILING, torch._dynamo.config.patch(limits), warnings.catch_warnings():
            # The float32 matmuls of a round are those of rotary embeddings, which should stay exact.
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            # A note for the compiler's developers.
            warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
            return optimized(*args, **options)

    return run


@contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Context in which autocast caches no casts of weights, which a graph would go on reading when outdated."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def capture(function: Callable[[], Any], device: torch.device, memory: GraphPool) -> CudaGraph:
    """`function` as a graph; calling it replays it, and every replay overwrites its `result`."""
    with on_device(device), without_autocast_cache():
        return CudaGraph(function, memory)
