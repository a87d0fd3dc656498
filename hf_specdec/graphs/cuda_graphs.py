"""CUDA graphs: functions compiled, captured once and replayed."""

from __future__ import annotations

import functools
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..device_policy import policy_of
from ..errors import first_line
from ..op_choice import capturing
from .piecewise import piecewise_backend

logger = logging.getLogger(__name__)

# Runs of a function before it is captured.
WARM_UPS = 2

# Settings of the compiler, and filters of warnings, are shared by all threads.
_COMPILING = threading.RLock()

# Every shape is compiled separately; torch stops compiling a function after so many.
_MOST_COMPILATIONS = 4096


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which `device` is the current one, where Triton launches and torch creates streams and events."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Fence:
    """A point in the work of `device` for which other streams can wait: a CUDA event; on a CPU nothing."""

    def __init__(self, device: torch.device):
        self._device = device
        self._event: torch.cuda.Event | None = None

    def set(self) -> None:
        """Record it after all work submitted to the current stream."""
        if self._device.type == "cuda":
            self._event = torch.cuda.current_stream(self._device).record_event()

    def wait(self) -> None:
        """Let the current stream wait for it."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        """Wait for it on the host."""
        if self._event is not None:
            self._event.synchronize()


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
    """The streams of a GPU for warm-up runs and for captures, and a lock to be held during a capture.

    One of each: cuBLAS keeps a workspace for every stream that it ever ran on, and torch has a pool of 32 streams. The
    default capture stream of `torch.cuda.graph` belongs to the device of the first capture.
    """
    return torch.cuda.Stream(device), torch.cuda.Stream(device), threading.Lock()


@dataclass
class GraphPool:
    """A CUDA-graph memory pool that several graphs share: temporary tensors of one are overwritten by the next.

    The graphs must not run at the same time, and what a replay returns must have been read when another graph is
    replayed. Results that live longer are written to tensors allocated before the capture.

    Attributes:
        owner: the graph captured last, which keeps the pool alive; None before the first.
    """

    owner: torch.cuda.CUDAGraph | None = None


class CudaGraph:
    """A function of no arguments as a CUDA graph of the current device; a replay is launched on the current stream.

    The function must read and write tensors at fixed addresses, and read nothing on the host. It is run `WARM_UPS`
    times before it is captured, so that kernels are built and libraries allocate their workspaces; the caller makes
    sure that these runs have no effect.

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

    def __call__(self) -> Any:
        self._graph.replay()
        return self.result


def start_compiler(device: torch.device) -> None:
    """Start the worker processes of torch's compiler for `device` before they are needed.

    They take some seconds to start. torch would start them after tracing a function, and compile in this process until
    they are ready.
    """
    if policy_of(device).compiler == "inductor":
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


def compiled(function: Callable[[], Any], backend: str, same_everywhere: bool = False) -> Callable[[], Any]:
    """`function` as one graph of `torch.compile` with a `backend`; it is compiled when it first runs.

    The ranks of a split target must compile to the same kernels: `same_everywhere`.
    """
    compiler = torch._dynamo.lookup_backend(backend)
    if backend == "inductor":
        from .inductor import options

        compiler = functools.partial(compiler, config_patches=options(same_everywhere))
    optimized = torch.compile(function, backend=piecewise_backend(compiler), fullgraph=True, dynamic=False)

    def run() -> Any:
        limits = {"recompile_limit": _MOST_COMPILATIONS, "accumulated_recompile_limit": _MOST_COMPILATIONS}
        with _COMPILING, torch._dynamo.config.patch(limits), warnings.catch_warnings():
            # The float32 matmuls of a round are those of rotary embeddings, which should stay exact.
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            # A note for the compiler's developers.
            warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
            return optimized()

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


class Capture:
    """Compiles functions, if wanted and possible, and captures them as CUDA graphs of one pool.

    Attributes:
        has_compiled: whether every function so far was compiled.
    """

    def __init__(self, device: torch.device, memory: GraphPool, is_compiled: bool, same_everywhere: bool = False):
        self._device, self._memory = device, memory
        self._same_everywhere = same_everywhere
        self._backend = policy_of(device).compiler if is_compiled else None
        self.has_compiled = self._backend is not None

    def __call__(self, function: Callable[[], Any]) -> Any:
        """`function` as a graph; calling it replays it, and every replay overwrites its `result`."""
        with on_device(self._device), without_autocast_cache():
            if self._backend is not None:
                try:
                    return CudaGraph(compiled(function, self._backend, self._same_everywhere), self._memory)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # compilers raise anything; an error of the function is raised again below
                    self._backend, self.has_compiled = None, False
                    logger.warning(
                        f"torch.compile cannot compile a round ({type(error).__name__}: {first_line(error)}); it is "
                        "captured without being compiled. compile=False avoids the attempt."
                    )
            return CudaGraph(function, self._memory)
