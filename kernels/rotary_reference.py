"""PyTorch references of rotary position embeddings (RoPE, arXiv 2104.09864)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .kv_cache_reference import write_kv
from .types import AnglesKind, RotaryKind


def rotary_angles(
    frequencies: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype, kind: AnglesKind
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of `positions` `[B, n]` int64 times `frequencies` `[R / 2]`, float32 or narrower. They are
    computed in float32 and cast to `dtype`, `[B, n, R]` each, or `[B, n, R / 2]` if `kind.repeats` is `"once"`."""
    angles = positions[..., None].float() * frequencies.float()
    if kind.repeats == "halves":
        angles = torch.cat([angles, angles], dim=-1)
    elif kind.repeats == "pairs":
        angles = angles.repeat_interleave(2, dim=-1)
    return (angles.cos() * kind.scaling).to(dtype), (angles.sin() * kind.scaling).to(dtype)


def rotary(
    cos: torch.Tensor, sin: torch.Tensor, states: Sequence[torch.Tensor], kind: RotaryKind
) -> list[torch.Tensor]:
    """Rotate the first R elements of every head of `states` and copy the others; `states` are query, key or both,
    `[B, heads, n, D]`, where the number of heads may differ. A pair (x1, x2) with the cosines (c1, c2) and sines
    (s1, s2) becomes (x1 c1 - x2 s1, x2 c2 + x1 s2).

    `cos` and `sin` are `[B or 1, n, R]`, or `[B or 1, n, R / 2]` if `kind.half_angles`; `kind` determines the pairs.
    """
    return [_rotate(one, cos.unsqueeze(1), sin.unsqueeze(1), kind) for one in states]


def rotate_and_store(
    cos: torch.Tensor,
    sin: torch.Tensor,
    states: Sequence[torch.Tensor],
    kind: RotaryKind,
    keys: torch.Tensor,
    values: torch.Tensor,
    value_states: torch.Tensor,
    positions: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """`rotary` of a key, the last of `states`, and of a query before it if there is one. The key and its value are
    stored as in `kv_cache_reference.write_kv`; only the query is returned."""
    *query, key = rotary(cos, sin, states, kind)
    write_kv(keys, values, key, value_states, positions, scales)
    return query


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kind: RotaryKind) -> torch.Tensor:
    size = cos.shape[-1] * (2 if kind.half_angles else 1)
    dtype = states.dtype if kind.rounded else torch.promote_types(states.dtype, torch.float32)
    first, second = _pair(states[..., :size].to(dtype), kind.inputs_interleaved)
    if kind.shared_angles:
        cosines, sines = ([angle[..., : size // 2]] * 2 for angle in (cos, sin))
    else:
        cosines, sines = (_pair(angle, kind.inputs_interleaved) for angle in (cos, sin))
    rotated = first * cosines[0] - second * sines[0], second * cosines[1] + first * sines[1]
    out = torch.stack(rotated, dim=-1).flatten(-2) if kind.outputs_interleaved else torch.cat(rotated, dim=-1)
    return torch.cat([out.to(states.dtype), states[..., size:]], dim=-1)


def _pair(values: torch.Tensor, is_interleaved: bool) -> tuple[torch.Tensor, ...]:
    """The first and the second elements of all pairs in the last dimension."""
    return (values[..., ::2], values[..., 1::2]) if is_interleaved else values.chunk(2, dim=-1)
