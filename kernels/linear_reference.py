"""PyTorch reference of a linear layer, `result = inputs @ weight.T + bias`, accumulated in float32, and of two of one
input, of which one gates the other.
"""

from __future__ import annotations

import torch

from .gated_activation_reference import gated_activation
from .rounded_inputs_reference import round_inputs
from .stored_weight_reference import dequantise
from .types import StoredWeight


def linear(inputs: torch.Tensor, weight: torch.Tensor | StoredWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A linear layer of `inputs` `[n, in]`, with sums in float32 at least; `[n, out]` in their dtype. The weight `[out,
    in]` is of the same dtype, or stored as numbers of few bits; the bias is `[out]` or None."""
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    if isinstance(weight, StoredWeight):
        inputs_of_products = round_inputs(inputs, weight) if weight.rounds_inputs else inputs
        out = inputs_of_products.to(dtype) @ dequantise(weight, dtype).T
    else:
        out = inputs.to(dtype) @ weight.to(dtype).T
    if bias is not None:
        out = out + bias.to(dtype)
    return out.to(inputs.dtype)


def gated_linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """`activation(gate) * up`, `[n, N]`, of a linear layer as above, of which gate and up, each rounded to the dtype,
    are the outputs: its weight is `[2 N, in]`, the gate first. See `gated_activation_reference.gated_activation`."""
    return gated_activation(*linear(inputs, weight, bias).chunk(2, dim=-1), activation)


def stored_linear(
    inputs: torch.Tensor, weight: StoredWeight, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """`linear` by a stored weight or, with an activation, `gated_linear`."""
    return linear(inputs, weight, bias) if activation is None else gated_linear(inputs, weight, bias, activation)
