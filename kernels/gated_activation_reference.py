"""PyTorch reference of a gated activation, `activation(gate) * up`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import functional as F

# The activations, by name.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """`activation(gate) * up`, `[..., N]` each, of one dtype, to which the activation and the product are rounded;
    `activation` is a name in `ACTIVATIONS`."""
    return ACTIVATIONS[activation](gate) * up
