"""PyTorch reference of a gated activation, `activation(gate) * up`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn import functional as F

from .types import ClampedGate

# The activations, by name.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def gated_activation(
    gate: torch.Tensor, up: torch.Tensor, activation: str, clamped: ClampedGate | None = None
) -> torch.Tensor:
    """`activation(gate) * up`, `[..., N]` each, of one dtype, to which the activation and the product are rounded;
    `activation` is a name in `ACTIVATIONS`. `clamped` describes gates that clamp."""
    if clamped is None:
        return ACTIVATIONS[activation](gate) * up
    limit, alpha, offset = clamped
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    activated = ACTIVATIONS[activation](gate) if alpha is None else gate * torch.sigmoid(gate * alpha)
    return (up + offset) * activated
