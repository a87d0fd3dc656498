"""PyTorch references of norms over the last dimension: RMSNorm and LayerNorm without bias, also of a sum, and of two
tensors."""

from __future__ import annotations

import torch

from .types import NormKind


def rms_norm(inputs: torch.Tensor, weight: torch.Tensor | None, eps: float, kind: NormKind) -> torch.Tensor:
    """The norm of the rows of `inputs` `[..., D]` in their dtype, computed in float32 or wider. The weight is `[D]`, or
    None; with `kind.cast_first` it has the inputs' dtype."""
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


def joined_norms(
    first: torch.Tensor,
    second: torch.Tensor,
    first_index: torch.Tensor | None,
    second_index: torch.Tensor | None,
    first_weight: torch.Tensor,
    second_weight: torch.Tensor,
    eps: float,
    kind: NormKind,
) -> torch.Tensor:
    """`[B, n, 2 D]`: the norms of `first` and of `second` side by side, see `rms_norm`, with weights `[D]`.

    Both are `[B, n, D]`, or with an index `[B, n]` int64 the rows at it of a table `[V, D]`, such as embeddings. All
    tensors but the indices have one dtype.
    """
    halves = (first, first_index, first_weight), (second, second_index, second_weight)
    return torch.cat([rms_norm(one if at is None else one[at], weight, eps, kind) for one, at, weight in halves], -1)
