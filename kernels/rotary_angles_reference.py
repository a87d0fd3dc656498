"""PyTorch reference of the cosines and sines of a rotary embedding."""

from __future__ import annotations

import torch

from .types import AnglesKind


def rotary_angles(
    frequencies: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype, kind: AnglesKind
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of `positions` `[B, n]` int64 times `frequencies` `[R / 2]`, float32 or narrower; in float32,
    and cast to `dtype` at the end. Each is `[B, n, R]`, or `[B, n, R / 2]` if `kind.repeats` is `"once"`."""
    angles = positions[..., None].float() * frequencies.float()
    if kind.repeats == "halves":
        angles = torch.cat([angles, angles], dim=-1)
    elif kind.repeats == "pairs":
        angles = angles.repeat_interleave(2, dim=-1)
    return (angles.cos() * kind.scaling).to(dtype), (angles.sin() * kind.scaling).to(dtype)
