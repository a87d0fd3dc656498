"""PyTorch reference of writing new keys and values to the static KV cache.

keys[b, positions[b, i], h] = key_states[b, h, i],    values[b, positions[b, i], h] = value_states[b, h, i]
"""

from __future__ import annotations

import torch


def write_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Write new keys and values to the KV cache, in place.

    If a row names a slot twice, the slot holds either of the two, or a mixture; only the dummy slot is named twice.

    Args:
        keys: `[B, slots, kv_heads, D]`.
        values: `[B, slots, kv_heads, Dv]`.
        key_states: `[B, kv_heads, n, D]`, stored in the dtype of `keys`.
        value_states: `[B, kv_heads, n, Dv]`, stored in the dtype of `values`.
        positions: `[B, n]` int64, the slot of each, less than `slots`.
    """
    rows = torch.arange(keys.shape[0], device=keys.device)[:, None]
    keys[rows, positions] = key_states.transpose(1, 2).to(keys.dtype)
    values[rows, positions] = value_states.transpose(1, 2).to(values.dtype)
