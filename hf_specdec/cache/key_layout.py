"""`KeyLayout`: keys and values of a token in all layers of target and drafter, one after the other, so that a row grows
at one end. The buffers of a layer are views of all rows with large strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..memory.virtual_memory import RowMemory
from .ragged_cache import RaggedCache


class _Part(NamedTuple):
    """An entry of a layer's `slot_buffers`, such as its keys: its offset in the bytes of a token, shape and dtype."""

    offset: int
    heads: int
    dim: int
    dtype: torch.dtype


class KeyLayout(NamedTuple):
    """The layout of a token's keys and values.

    Attributes:
        token_bytes: bytes of a token in all layers.
        layers: the buffers of each layer of each cache.
    """

    token_bytes: int
    layers: Sequence[Sequence[Sequence[_Part]]]

    @classmethod
    def of(cls, caches: Sequence[RaggedCache]) -> KeyLayout:
        """The layout of what `caches` have allocated, after a pass of target and drafter."""
        size = 0

        def part(buffer: torch.Tensor) -> _Part:
            nonlocal size
            heads, dim = buffer.shape[2:]
            placed = _Part(size, heads, dim, buffer.dtype)
            size += 16 * -(-heads * dim * buffer.dtype.itemsize // 16)  # kernels load 16 bytes at once
            return placed

        layers = [[[part(buffer) for buffer in layer.slot_buffers] for layer in cache.layers] for cache in caches]
        return cls(size, layers)

    def place(self, caches: Sequence[RaggedCache], memory: RowMemory) -> None:
        for cache, layers in zip(caches, self.layers, strict=True):
            cache.row_memory = memory
            for layer, parts in zip(cache.layers, layers, strict=True):
                if parts:
                    layer.place(*(memory.view(one.offset, one.dtype, one.heads, one.dim) for one in parts))
