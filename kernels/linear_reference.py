"""PyTorch reference of a linear layer, `result = inputs @ weight.T + bias`, accumulated in float32."""

from __future__ import annotations

import torch


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A linear layer with sums in float32 at least.

    Args:
        inputs: `[n, in]`.
        weight: `[out, in]`, of the same dtype.
        bias: `[out]`, or None.

    Returns:
        `[n, out]` in the inputs' dtype.
    """
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    out = inputs.to(dtype) @ weight.to(dtype).T
    if bias is not None:
        out = out + bias.to(dtype)
    return out.to(inputs.dtype)
