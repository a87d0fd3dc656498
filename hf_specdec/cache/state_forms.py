"""Forms in which layers of transformers' caches hold recurrent states."""

from __future__ import annotations

from enum import Enum, auto

import torch

from ..host.caches import OUTPUT_NAME, LinearAttentionCacheLayerMixin


class StateForm(Enum):
    """How a layer of transformers' cache holds a state `[B, H, K, V]`."""

    KEYS_FIRST = auto()  # [B, H, K, V]: linear attention
    VALUES_FIRST = auto()  # [B, H, V, K]: Mamba-2
    CHANNELS = auto()  # [B, V, K], and [B, heads, V, K] of heads that run one by one: Mamba-1

    def read(self, held: torch.Tensor) -> torch.Tensor:
        """`[B, H, K, V]`, from what a layer holds."""
        if self is StateForm.KEYS_FIRST:
            return held
        return (held[:, None] if self is StateForm.CHANNELS else held).transpose(-1, -2)

    def write(self, state: torch.Tensor) -> torch.Tensor:
        """What a layer holds, from `[B, H, K, V]`; a copy."""
        if self is not StateForm.KEYS_FIRST:
            state = state.transpose(-1, -2)
        return (state[:, 0] if self is StateForm.CHANNELS else state).clone(memory_format=torch.contiguous_format)


def held_states(layer: LinearAttentionCacheLayerMixin, name: str, index: int) -> torch.Tensor:
    """The entry `index` of `name`, `"recurrent_states"` or `"conv_states"`, of a layer of transformers' cache.

    Raises:
        ValueError: it has none.
    """
    held = getattr(layer, name, {}).get(index)
    if held is None:
        raise ValueError(
            f"A {type(layer).__name__} of {OUTPUT_NAME} has no {name}[{index}]; expected those of the cached text. "
            "Pass a cache that this target has filled."
        )
    return held


def check_shape(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that states found in a cache have the shape of those of the target, rows aside.

    Raises:
        ValueError: they have another one.
    """
    if found.shape[1:] != expected.shape[1:]:
        raise ValueError(
            f"{OUTPUT_NAME} holds {what} of shape {list(found.shape[1:])} a row; expected "
            f"{list(expected.shape[1:])}. Pass a cache that this target has filled."
        )
