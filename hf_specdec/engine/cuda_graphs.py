"""Work compiled and captured once, then replayed: CUDA graphs."""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..device_policy import policy_of
from ..errors import first_line
from .piecewise import piecewise_backend

logger = logging.getLogger(__name__)

WARM_UPS = 2

# Options of torch's compiler. The few rows of a round are not worth padding, and kernels that do not depend on each
# other, such as those of queries and keys, are worth launching together (one H200, EAGLE-3 on an 8B target, K = 3: 5.50
# ms a round without either, 5.45 without padding, 5.39 with both).
_OPTIONS = {"inductor": {"shape_padding": False, "combo_kernels": True, "benchmark_combo_kernel": False}}

# Settings of the compiler, and filters of warnings, belong to all threads.
_COMPILING = threading.RLock()

# Every shape is compiled for itself; torch gives up after so many of one function.
_MOST_COMPILATIONS = 4096


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which `device` is the current one, on which Triton launches, and torch makes streams and events."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class Fence:
    """A point in the work of a device that work on other streams of it can wait for; on a CPU there is nothing to do.

    Args:
        device: that works.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._event: torch.cuda.Event | None = None

    def set(self) -> None:
        """Put it behind all that the current stream was given."""
        if self._device.type == "cuda":
            self._event = torch.cuda.current_stream(self._device).record_event()

    def wait(self) -> None:
        """Let the current stream go on after it."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        """Wait for it on the host."""
        if self._event is not None:
            self._event.synchronize()


class _Streams:
    """The streams on which functions run before they are captured, and are captured.

    One of each for a device: torch's libraries keep a workspace for every stream that they ever ran on, and torch has
    32 streams. The one that torch captures on by itself belongs to the device that was first captured on.

    Args:
        device: index of a GPU.

    Attributes:
        warm_up, capture: the streams.
        lock: of the capture, during which no other thread may use its stream.
    """

    def __init__(self, device: int):
        self.warm_up, self.capture = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.lock = threading.Lock()


_streams = functools.cache(_Streams)


@dataclass
class GraphPool:
    """Memory that several graphs use, one after the other: what one of them needs in passing the next may have, too.

    They must not run at the same time, and what a replay returns must have been read when another graph is replayed.
    What is to last longer is written to tensors that were there before the capture.

    Attributes:
        owner: the last graph that was captured in it, and keeps it; None before the first.
    """

    owner: torch.cuda.CUDAGraph | None = None


class CudaGraph:
    """A function of no arguments as a CUDA graph of the current device, which launches on the stream that is current.

    It must read and write tensors that stay where they are.

    The function is run a few times before it is captured, so that kernels are built and libraries have their
    workspaces; the caller sees to it that this does no harm.

    Args:
        function: reads nothing on the host.
        memory: that it shares with others; its own if None.

    Attributes:
        result: what the function returned when it was captured; every replay overwrites its tensors.
    """

    def __init__(self, function: Callable[[], Any], memory: GraphPool | None = None):
        memory = memory or GraphPool()
        streams, current = _streams(torch.cuda.current_device()), torch.cuda.current_stream()
        streams.warm_up.wait_stream(current)
        with torch.cuda.stream(streams.warm_up):
            for _ in range(WARM_UPS):
                function()
        current.wait_stream(streams.warm_up)
        self._graph = torch.cuda.CUDAGraph()
        # torch takes the memory of a capture that failed to be in use for good: the next one begins with its own.
        owner, memory.owner = memory.owner, None
        pool = None if owner is None else owner.pool()
        # Other threads may go on allocating and synchronising while this one captures. torch stays on the stream of a
        # capture that failed.
        with (
            streams.lock,
            torch.cuda.stream(current),
            torch.cuda.graph(self._graph, pool=pool, stream=streams.capture, capture_error_mode="thread_local"),
        ):
            self.result = function()
        memory.owner = self._graph

    def __call__(self) -> Any:
        self._graph.replay()
        return self.result


def start_compiler(device: torch.device) -> None:
    """Start the processes in which torch builds kernels on `device`, so that they are there when it compiles.

    They take some seconds to start. torch starts them when it has traced a function, and builds in this process until
    they are there.
    """
    if policy_of(device).compiler == "inductor":
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


def compiled(function: Callable[[], Any], backend: str, same_everywhere: bool = False) -> Callable[[], Any]:
    """`function` as one graph of `torch.compile`; it is compiled when it first runs.

    Args:
        function: to compile.
        backend: of `torch.compile`.
        same_everywhere: whether other processes must come to the same kernels.
    """
    options = dict(_OPTIONS.get(backend, {}))
    if same_everywhere and backend == "inductor" and "deterministic" in torch._inductor.list_options():  # not in 2.9
        # Sums are not tuned by measuring: another order of summation could draft another token. Combined kernels have
        # not been tried under this option.
        options |= {"deterministic": True, "combo_kernels": False}
    compiler = torch._dynamo.lookup_backend(backend)
    if options:
        compiler = functools.partial(compiler, config_patches=options)
    optimized = torch.compile(function, backend=piecewise_backend(compiler), fullgraph=True, dynamic=False)

    def run() -> Any:
        limits = {"recompile_limit": _MOST_COMPILATIONS, "accumulated_recompile_limit": _MOST_COMPILATIONS}
        with _COMPILING, torch._dynamo.config.patch(limits), warnings.catch_warnings():
            # Of products in float32 a round has those that make rotary embeddings, which should stay exact.
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            # What the compiler makes of a softmax is for its developers to know.
            warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
            return optimized()

    return run


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Context in which autocast keeps no casts of weights, which would outlive neither it nor a change of the weights.

    Those that it has kept are not used either.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class Capture:
    """How functions become graphs on a device: compiled first, if that is wanted and can be done, then captured.

    Args:
        device: that they run on.
        memory: of the graphs.
        is_compiled: whether to compile the functions.
        same_everywhere: whether other processes must come to the same kernels.

    Attributes:
        has_compiled: whether everything so far was compiled.
    """

    def __init__(self, device: torch.device, memory: GraphPool, is_compiled: bool, same_everywhere: bool = False):
        self._device, self._memory = device, memory
        self._same_everywhere = same_everywhere
        self._backend = policy_of(device).compiler if is_compiled else None
        self.has_compiled = self._backend is not None

    def __call__(self, function: Callable[[], Any]) -> Any:
        """`function` as a graph: called, it is replayed; `result` is what every replay overwrites."""
        with on_device(self._device), _without_autocast_cache():
            return self._graph_of(function)

    def _graph_of(self, function: Callable[[], Any]) -> Any:
        if self._backend is not None:
            try:
                return CudaGraph(compiled(function, self._backend, self._same_everywhere), self._memory)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a compiler may raise; what is wrong with the function shows below
                self._backend, self.has_compiled = None, False
                logger.warning(
                    f"torch.compile cannot compile a round ({type(error).__name__}: {first_line(error)}); it is "
                    "captured without being compiled. compile=False avoids the attempt."
                )
        return CudaGraph(function, self._memory)
