"""Work captured once and replayed: CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WARM_UPS = 2


class CudaGraph:
    """A function of no arguments as a CUDA graph. It must read and write tensors that stay where they are.

    The function is run a few times before it is captured, so that kernels are built and libraries have their
    workspaces; the caller sees to it that this does no harm.

    Args:
        function: reads nothing on the host.
        pool: memory pool to share with other graphs that never run at the same time; see
            `torch.cuda.graph_pool_handle`.

    Attributes:
        result: what the function returned when it was captured; every replay overwrites its tensors.
    """

    def __init__(self, function: Callable[[], Any], pool: Any = None):
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                function()
        current.wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may go on allocating and synchronising while this one captures.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.result = function()

    def __call__(self) -> Any:
        self._graph.replay()
        return self.result


# What captures on which kind of device; elsewhere work runs as it is.
CAPTURE: dict[str, Callable[..., Any]] = {"cuda": CudaGraph}
