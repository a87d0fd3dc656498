"""PyTorch references of normalisation over the last dimension: RMSNorm, and LayerNorm without bias; also of a sum."""

from __future__ import annotations

import torch

from .types import NormKind


def rms_norm(inputs: torch.Tensor, weight: torch.Tensor | None, eps: float, kind: NormKind) -> torch.Tensor:
    """The rows of `inputs` `[..., D]` normalised, in their dtype but computed in float32 at least; the formula is in
    `rms_norm`. The weight `[D]`, None for none, is of the inputs' dtype if `kind.cast_first`."""
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    states = inputs.to(dtype)
    if kind.centered:
        states = states - states.mean(-1, keepdim=True)
    states = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps)
    if kind.cast_first:
        states = states.to(inputs.dtype)
    if weight is not None:
        states = states * (weight if kind.cast_first else weight.to(dtype) + kind.offset)
    return states.to(inputs.dtype)


def add_rms_norm(
    inputs: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor | None, eps: float, kind: NormKind
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of `inputs` and `addend`, `[..., D]` of one dtype, in that dtype; and `rms_norm` of it."""
    total = inputs + addend
    return total, rms_norm(total, weight, eps, kind)
