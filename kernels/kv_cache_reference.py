"""PyTorch references of writes to the static KV cache."""

from __future__ import annotations

from collections.abc import Sequence

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

    If a row names a slot twice, the slot holds either of the two, or a mixture; callers name only the dummy slot twice.

    Args:
        keys: `[B, slots, kv_heads, D]`.
        values: `[B, slots, kv_heads, Dv]`.
        key_states: `[B, kv_heads, n, D]`, stored in the dtype of `keys`.
        value_states: `[B, kv_heads, n, Dv]`, stored in the dtype of `values`.
        positions: `[B, n]` int64, the slot of each state, less than `slots`.
        scales: `[B, slots, kv_heads, 2]`, scales of float8 keys and values, see `float8_reference`; None for others.
    """
    at = torch.arange(keys.shape[0], device=keys.device)[:, None], positions
    for index, (buffer, states) in enumerate(((keys, key_states), (values, value_states))):
        states = states.transpose(1, 2)
        if scales is not None:
            states, scale = quantise(states)
            scales[..., index][at] = scale.to(scales.dtype)
        as_bytes(buffer)[at] = as_bytes(states.to(buffer.dtype))


def move_slots(
    buffers: Sequence[torch.Tensor], path: torch.Tensor, lengths: torch.Tensor, committed: torch.Tensor
) -> None:
    """Move the states of an accepted path of a tree from the slots of its nodes to the slots of their positions.

    The last token that a row has committed has not been run, so one slot fewer is moved; finished rows move none.

    Args:
        buffers: `[B, slots, heads, width]` each, of any dtypes; written.
        path: `[B, D + 1]` int64, nodes, the root first; its accepted part is ascending.
        lengths: `[B]` int64, number of committed tokens of each row, the round's included.
        committed: `[B]` int64, number of tokens that the round has committed.
    """
    steps = torch.arange(path.shape[1], device=path.device)
    roots = (lengths - committed - 1)[:, None]
    is_moved = steps < committed[:, None]
    # A slot that does not move is copied to itself.
    sources = torch.where(is_moved, roots + path, roots)
    targets = torch.where(is_moved, roots + steps, roots)
    rows = torch.arange(len(path), device=path.device)[:, None]
    for buffer in map(as_bytes, buffers):
        buffer[rows, targets] = buffer[rows, sources]
