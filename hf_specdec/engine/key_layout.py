"""Where the keys and values of a token are, of all layers of target and drafter, one after the other.

So a row grows in one place. The keys, or the values, of a layer are a view of all rows, `[B, slots, kv_heads,
head_dim]`, with large strides; kernels know no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..patching.cache import RaggedCache
from ..state import DecodeState
from ..virtual_memory import RowMemory, aligned


class _Part(NamedTuple):
    """Keys or values of a layer: where they are in the bytes of a token, and what they are."""

    offset: int
    heads: int
    dim: int
    dtype: torch.dtype


class KeyLayout(NamedTuple):
    """What a token's keys and values are.

    Attributes:
        token_bytes: of all layers together.
        layers: keys and values of each layer of each cache; None for layers without.
    """

    token_bytes: int
    layers: Sequence[Sequence[tuple[_Part, _Part] | None]]

    @classmethod
    def of(cls, caches: Sequence[RaggedCache]) -> KeyLayout:
        """The layout of what `caches`, through which target and drafter have run, have allocated."""
        size, layers = 0, []

        def part(buffer: torch.Tensor) -> _Part:
            nonlocal size
            heads, dim = buffer.shape[2:]
            placed = _Part(size, heads, dim, buffer.dtype)
            size += aligned(heads * dim * buffer.dtype.itemsize)
            return placed

        for cache in caches:
            keyed = [getattr(layer, "keys", None) is not None for layer in cache.layers]
            pairs = zip(cache.layers, keyed, strict=True)
            layers.append([(part(layer.keys), part(layer.values)) if has_keys else None for layer, has_keys in pairs])
        return cls(size, layers)

    def place(self, caches: Sequence[RaggedCache], memory: RowMemory) -> None:
        """Let the layers of `caches` have their keys and values in `memory`."""
        for cache, layers in zip(caches, self.layers, strict=True):
            cache.row_memory = memory
            for layer, parts in zip(cache.layers, layers, strict=True):
                if parts is not None:
                    layer.place(*(memory.view(one.offset, one.dtype, one.heads, one.dim) for one in parts))


def caches_of(state: DecodeState) -> list[RaggedCache]:
    """The caches of target and drafter."""
    return [state.cache, *(() if state.memory is None else state.memory.caches)]
