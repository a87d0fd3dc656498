"""Settings of a process that runs models of a few thousand weights, where what is around operations takes the time."""

import gc

import torch


def prepare() -> None:
    """Make calls of small operations cheaper; call it before much is imported."""
    # Calls make many objects without cycles, for which Python would look again after every few hundred of them.
    gc.set_threshold(50_000, 20, 20)
    # A matmul of a few rows and columns takes oneDNN about twice as long as the library that torch uses without it.
    torch.backends.mkldnn.enabled = False
