"""Batches of prompts, and which process does which of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

# Cost of a batch by its rows and its longest prompt.
Cost = Callable[[int, int], int]


def cut(lengths: Sequence[int], limit: int, cost: Cost) -> list[range]:
    """Neighbours in batches that cost at most `limit` each, or have one row; `lengths` never grow."""
    batches, start = [], 0
    while start < len(lengths):
        end = start + 1
        while end < len(lengths) and cost(end + 1 - start, lengths[start]) <= limit:
            end += 1
        batches.append(range(start, end))
        start = end
    return batches


def cut_evenly(lengths: Sequence[int], limit: int, cost: Cost, processes: int) -> list[range]:
    """As `cut`, in a multiple of `processes` batches if that many can be made, and none costlier than need be."""
    if not lengths:
        return []
    fewest = len(cut(lengths, limit, cost))
    number = min(processes * -(-fewest // processes), len(lengths))
    low, high = 1, limit
    while low < high:
        middle = (low + high) // 2
        if len(cut(lengths, middle, cost)) <= number:
            high = middle
        else:
            low = middle + 1
    return cut(lengths, low, cost)


class SharedWork:
    """Hands out pieces of work to whichever process asks next, so that no process waits for another.

    All processes make one at the same time. It counts in a store of torch.distributed that the main process keeps, so
    the main process must be the last to go: it waits until `done` says so.

    Args:
        state: of accelerate.
    """

    def __init__(self, state: PartialState):
        self._process, self._processes = state.process_index, state.num_processes
        if state.num_processes == 1:
            self._store: dist.Store = dist.HashStore()
            return
        host = os.environ["MASTER_ADDR"]
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if state.is_main_process else None
        (port,) = broadcast_object_list([store and store.port])
        self._store = store or dist.TCPStore(host, port, is_master=False)

    def claim(self) -> int:
        """Number of the next piece of work, from 0; every number is given to one process."""
        return self._store.add("claimed", 1) - 1

    def report(self, prompts: int, seconds: float) -> None:
        """Say that so many prompts more are done, for which this process took `seconds`."""
        self._store.add(f"microseconds of {self._process}", round(1e6 * seconds))
        self._store.add("done", prompts)

    @property
    def done(self) -> int:
        """Prompts that all processes have reported."""
        return self._store.add("done", 0)

    def seconds(self) -> list[float]:
        """What every process has reported."""
        return [1e-6 * self._store.add(f"microseconds of {process}", 0) for process in range(self._processes)]
