"""The rows of a `RaggedCache` as one, for packed prompts."""

from __future__ import annotations

import torch

from .cache import RaggedCache, RaggedLayer


class PackedLayer(RaggedLayer):
    """Keys and values of a layer of another cache as those of one row, `[1, B * slots, kv_heads, head_dim]`.

    Args:
        cache: of this layer.
        layer: of the other cache.
        batch: rows of the other cache.
    """

    def __init__(self, cache: PackedCache, layer: RaggedLayer, batch: int):
        super().__init__(cache)
        self._layer, self._batch = layer, batch

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if not self._layer.is_initialized:
            self._layer.allocate(key_states, value_states, self._batch)
        self.keys, self.values = (one.flatten(0, 1)[None] for one in (self._layer.keys, self._layer.values))
        self.is_initialized = True


class PackedCache(RaggedCache):
    """All rows of a `RaggedCache` as one, in which that of row b begins at slot b * slots: for packed prompts.

    It has the buffers of the other cache, whose layers store keys and values only, and whose attention takes no mask.
    Its dummy slot is that of the last row. A query attends to slots of its own row only.

    Args:
        cache: the other one.
        batch: rows of it.
    """

    def __init__(self, cache: RaggedCache, batch: int):
        super().__init__((), batch * cache.slots)
        self.layers = [PackedLayer(self, layer, batch) for layer in cache.layers]
        self._row_slots, self._row_starts = cache.slots, cache.starts

    def attention_mask(self, slots: torch.Tensor) -> torch.Tensor:
        """`[1, 2, n, 1]` int64: the slots, and the first slot that each query attends to."""
        return torch.stack((slots, self.starts_of(slots)), dim=1)[..., None]

    def starts_of(self, slots: torch.Tensor) -> torch.Tensor:
        """The first slot that queries at `slots` `[1, n]` int64 attend to, likewise."""
        rows = slots // self._row_slots
        starts = rows * self._row_slots
        return starts if self._row_starts is None else starts + self._row_starts[rows]

    def advance(self, positions: torch.Tensor, live: int, num_before: int | None = None) -> None:
        self.positions, self.span = positions, self.slots
