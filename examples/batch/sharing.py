"""Cutting prompts into shares, and distributing shares over processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

# Cost of a batch by its rows and its longest prompt.
Cost = Callable[[int, int], int]


def cut(lengths: Sequence[int], limit: int, cost: Cost) -> list[range]:
    """Cut prompts, by their descending `lengths`, into batches of neighbours that cost at most `limit` each, or have
    one row. Returns the indices of each batch."""
    batches, start = [], 0
    while start < len(lengths):
        end = start + 1
        while end < len(lengths) and cost(end + 1 - start, lengths[start]) <= limit:
            end += 1
        batches.append(range(start, end))
        start = end
    return batches


def cut_evenly(lengths: Sequence[int], limit: int, cost: Cost, processes: int) -> list[range]:
    """`cut` into a multiple of `processes` batches, if there are enough prompts, at the lowest limit that allows it."""
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
    """A queue of batches: each process claims the next one when it is free, so that no process waits for another.

    All processes construct it together. The counters are in a store of torch.distributed in the main process. So the
    main process has to end last: it waits until `done` is the number of all prompts.
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
        """Number of the next batch, from 0; every number is given to one process only."""
        return self._store.add("claimed", 1) - 1

    def report(self, prompts: int, seconds: float) -> None:
        """Add `prompts` to those done, and `seconds` to the time of this process."""
        self._store.add(f"microseconds of {self._process}", round(1e6 * seconds))
        self._store.add("done", prompts)

    @property
    def done(self) -> int:
        """Number of prompts that all processes have reported."""
        return self._store.add("done", 0)

    def seconds(self) -> list[float]:
        """Seconds that each process has reported."""
        return [1e-6 * self._store.add(f"microseconds of {process}", 0) for process in range(self._processes)]
