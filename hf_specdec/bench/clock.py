"""Clocks for `generate()` calls: the time to the first token (TTFT), and the GPU's own time."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import DeviceType

from ..host.generation import BaseStreamer


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on `device` is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Clock(BaseStreamer):
    """A streamer that records the `times` at which the prompt of a call, and then tokens, reach the host, by
    `time.perf_counter()`."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) == 2:
            self.on_first()

    def on_first(self) -> None:
        """Called when the first tokens have arrived, before the second round."""

    def end(self) -> None:
        pass


# Microseconds. Gaps between kernels of a CUDA graph, or of a stream with queued work, are no longer; gaps in which the
# GPU waits for the host are longer.
SHORT_GAP = 4.0


class GpuClock(Clock):
    """A clock that also measures, by the profiler, how long the GPU `device` computes after the first tokens, eagerly
    or in CUDA graphs.

    Profiling slows a call down, so it needs a call of its own beside those that are timed.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True)

    def on_first(self) -> None:
        synchronize(self._device)  # the first round's drafting may still be running
        self._profiler.start()

    def busy_seconds(self) -> float:
        """Seconds of kernels and copies since the first tokens, with gaps of up to `SHORT_GAP` between them. To be
        called once, after `generate()`."""
        if len(self.times) < 2:
            return 0.0
        self._profiler.stop()
        # Launches are excluded: they are host events that also report the time of their kernel.
        on_device = (event for event in self._profiler.events() if event.device_type == DeviceType.CUDA)
        return busy_time([(event.time_range.start, event.time_range.end) for event in on_device]) / 1e6


def busy_time(intervals: Iterable[tuple[float, float]], short_gap: float = SHORT_GAP) -> float:
    """Length of the union of `intervals`, with gaps of up to `short_gap` between them filled."""
    total, until = 0.0, -math.inf
    for start, end in sorted(intervals):
        if start - until > short_gap:
            until = start
        total += max(end - until, 0.0)
        until = max(until, end)
    return total
