"""PyTorch reference of a linear layer, `result = inputs @ weight.T + bias` with sums in float32, also for gate and up
of a gated MLP.
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
    """A linear layer of `inputs` `[n, in]` with sums in float32 or wider; returns `[n, out]` in their dtype. The weight
    `[out, in]` has the same dtype or is a `StoredWeight`; the bias is `[out]` or None.

    With an activation the outputs, rounded to the dtype, are gate, then up. The result is `activation(gate) * up`,
    `[n, out / 2]`. See `gated_activation_reference.gated_activation`.
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
