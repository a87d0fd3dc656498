"""The rows of a `RaggedCache` as one, for packed prompts."""

from __future__ import annotations

import torch

from .layer_kinds import LayerKinds
from .ragged_cache import RaggedCache


class PackedCache(RaggedCache):
    """All rows of a `RaggedCache` as one, in which that of row b begins at slot b * slots: for packed prompts.

    It has the buffers of the other cache, see `Use.PACKING`.
    Its dummy slot is that of the last row. A query attends to slots of its own row only.

    Args:
        cache: the other one.
        batch: rows of it.
    """

    def __init__(self, cache: RaggedCache, batch: int):
        super().__init__(LayerKinds(), batch * cache.slots)
        self.kinds, self.layers = cache.kinds, [layer.packed(self, batch) for layer in cache.layers]
        self.hidden_states = cache.hidden_states
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
        self.positions, self.span, self._block = positions, self.slots, None
