"""Reading the clock around `generate()` calls and inside them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from transformers.generation.streamers import BaseStreamer


def synchronize(device: torch.device) -> None:
    """Wait until `device` has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Clock(BaseStreamer):
    """A streamer that notes when the first and the last tokens of a call reach the host."""

    def __init__(self) -> None:
        self._prompt_is_past = False
        self.first: float | None = None
        self.last: float | None = None

    def put(self, value: Any) -> None:
        if not self._prompt_is_past:
            self._prompt_is_past = True
            return
        self.last = time.perf_counter()
        if self.first is None:
            self.first = self.last
            self.on_first()

    def on_first(self) -> None:
        """Called when the first tokens have come, before any round but the first."""

    def end(self) -> None:
        pass


# Microseconds between kernels of one graph, or of a queue that is full, at most. Whatever the host makes the GPU wait
# takes longer.
SHORT_GAP = 4.0


class GpuClock(Clock):
    """Also sums up how long the GPU computes after the first tokens, whatever launched it: eagerly or by a graph.

    Recording slows a call down, so this is for a call of its own, beside those that are timed.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        activities = [torch.profiler.ProfilerActivity.CUDA]
        self._profiler = torch.profiler.profile(activities=activities, acc_events=True)
        self._runs = False

    def on_first(self) -> None:
        synchronize(self._device)  # The first round's drafting may still be running.
        self._profiler.start()
        self._runs = True

    def busy_seconds(self) -> float:
        """Time of kernels and copies since the first tokens, and of the short gaps between them (`SHORT_GAP`).

        To be called once, after `generate()`.
        """
        if not self._runs:
            return 0.0
        self._profiler.stop()
        self._runs = False
        # A launch, which is an event of the host, has the time of its kernel too.
        on_device = (event for event in self._profiler.events() if event.device_type == DeviceType.CUDA)
        return busy_time([(event.time_range.start, event.time_range.end) for event in on_device]) / 1e6


def busy_time(intervals: Iterable[tuple[float, float]], short_gap: float = SHORT_GAP) -> float:
    """Length of the union of `intervals`, gaps of up to `short_gap` between them filled."""
    total, until = 0.0, -math.inf
    for start, end in sorted(intervals):
        if start - until > short_gap:
            until = start
        total += max(end - until, 0.0)
        until = max(until, end)
    return total
