"""PyTorch reference of writing new keys and values to the static KV cache; the formula is in `kv_cache`."""

from __future__ import annotations

import torch

from .float8_reference import as_bytes, quantise


def write_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    positions: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """Write new keys and values to the KV cache, in place.

    If a row names a slot twice, the slot holds either of the two, or a mixture; only the dummy slot is named twice.

    Args:
        keys: `[B, slots, kv_heads, D]`.
        values: `[B, slots, kv_heads, Dv]`.
        key_states: `[B, kv_heads, n, D]`, stored in the dtype of `keys`.
        value_states: `[B, kv_heads, n, Dv]`, stored in the dtype of `values`.
        positions: `[B, n]` int64, the slot of each, less than `slots`.
        scales: `[B, slots, kv_heads, 2]`, of keys and of values, which are float8 then, see `float8_reference`.
    """
    at = torch.arange(keys.shape[0], device=keys.device)[:, None], positions
    for index, (buffer, states) in enumerate(((keys, key_states), (values, value_states))):
        states = states.transpose(1, 2)
        if scales is not None:
            states, scale = quantise(states)
            scales[..., index][at] = scale.to(scales.dtype)
        as_bytes(buffer)[at] = as_bytes(states.to(buffer.dtype))
