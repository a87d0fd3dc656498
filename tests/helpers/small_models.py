"""Settings of a process that runs models of a few thousand weights, where what is around operations takes the time."""

import gc

import torch


def prepare() -> None:
    """Make calls of small operations cheaper; call it before much is imported."""
    # Calls make and drop many objects without cycles: Python's 700 of them would have it look for cycles all the time.
    gc.set_threshold(50_000, 20, 20)
    # oneDNN takes twice as long for a matmul of a few rows as torch's other library.
    torch.backends.mkldnn.enabled = False
