"""Settings of a process that runs models of a few thousand weights, where overhead around operations takes the time."""

import gc

import torch


def prepare() -> None:
    """Make calls of small operations cheaper; to be called before most imports."""
    # Calls make many objects without cycles; Python would search them for cycles after every few hundred.
    gc.set_threshold(50_000, 20, 20)
    # A matmul of a few rows and columns takes oneDNN about twice as long as the library that torch uses without it.
    torch.backends.mkldnn.enabled = False
