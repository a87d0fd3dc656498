"""PyTorch reference of a linear layer, `result = inputs @ weight.T + bias`, accumulated in float32, and of that of a
gated MLP.
"""

from __future__ import annotations

import torch

from .gated_activation_reference import gated_activation
from .stored_weight_reference import dequantise, rounded_inputs
from .types import StoredWeight


def linear(
    inputs: torch.Tensor,
    weight: torch.Tensor | StoredWeight,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """A linear layer of `inputs` `[n, in]`, with sums in float32 at least; `[n, out]` in their dtype. The weight `[out,
    in]` is of the same dtype, or stored as numbers of few bits; the bias is `[out]` or None.

    With an activation the outputs, rounded to the dtype, are gate and up, the gate first, and the result is
    `activation(gate) * up`, `[n, out / 2]`. See `gated_activation_reference.gated_activation`.
    """
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    if isinstance(weight, StoredWeight):
        inputs = rounded_inputs(inputs, weight) if weight.rounds_inputs else inputs
        weight = dequantise(weight, dtype)
    out = inputs.to(dtype) @ weight.to(dtype).T
    if bias is not None:
        out = out + bias.to(dtype)
    out = out.to(inputs.dtype)
    return out if activation is None else gated_activation(*out.chunk(2, dim=-1), activation)
