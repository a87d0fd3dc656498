"""Points in the work of a device that other streams and the host can wait for."""

from __future__ import annotations

import torch


class Fence:
    """A point in the work of `device` that other streams can wait for: a CUDA event; a no-op on a CPU."""

    def __init__(self, device: torch.device):
        self._device = device
        self._event: torch.cuda.Event | None = None

    def set(self) -> None:
        """Set the point after all work submitted to the current stream."""
        if self._device.type == "cuda":
            self._event = torch.cuda.current_stream(self._device).record_event()

    def wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        if self._event is not None:
            self._event.synchronize()
