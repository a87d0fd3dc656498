"""Layers with an indexer: its keys, by slot, besides those of attention, and the position ids that it reads."""

from __future__ import annotations

from typing import Any

import torch

from ..host.caches import Cache
from .key_layers import RaggedLayer
from .layer_kinds import LayerKind


class IndexedLayer(RaggedLayer):
    """A layer with keys `[B, slots, D]` of an indexer, which uses them to choose slots."""

    def __init__(self, cache: Cache, kind: LayerKind):
        super().__init__(cache, kind)
        self.indexer_keys: torch.Tensor | None = None
        self._position_ids: torch.Tensor | None = None

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Store keys `[B, n, D]` at the cache's `positions`; returns the keys of the cache's `span`."""
        self._allocate_keys(indexer_key_states, len(indexer_key_states), indexer_key_states.device)
        rows = torch.arange(len(self.indexer_keys), device=self.indexer_keys.device)[:, None]
        self.indexer_keys[rows, self._cache.positions] = indexer_key_states
        return self.indexer_keys[:, : self._cache.span]

    def _allocate_keys(self, like: torch.Tensor, batch: int, device: torch.device) -> None:
        if self.indexer_keys is None:
            self.indexer_keys = like.new_zeros(batch, self._cache.slots, like.shape[2], device=device)

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """Position ids `[sections, B, span]` int64 by slot, from before the pass; None before the first one.

        A model reads them, concatenates those of the pass's columns, and assigns the result.
        """
        return None if self._position_ids is None else self._position_ids[..., : self._cache.span]

    @indexer_position_ids.setter
    def indexer_position_ids(self, position_ids: torch.Tensor) -> None:
        positions, sections = self._cache.positions, len(position_ids)
        if self._position_ids is None:
            self._position_ids = position_ids.new_zeros(sections, len(positions), self._cache.slots)
        columns = position_ids[..., -positions.shape[1] :]
        self._position_ids.scatter_(2, positions.expand(sections, -1, -1), columns)

    def copy_rows(self, rows: torch.Tensor, source: IndexedLayer, taken: slice | torch.Tensor, slots: int) -> None:
        super().copy_rows(rows, source, taken, slots)
        if slots and source.indexer_keys is not None:
            self.indexer_keys[rows, :slots] = source.indexer_keys[taken, :slots]
        theirs = source._position_ids
        if theirs is not None:
            if self._position_ids is None:
                self._position_ids = theirs.new_zeros(len(theirs), self._cache.batch, self._cache.slots)
            count = min(self._position_ids.shape[2], theirs.shape[2]) - 1
            self._position_ids[:, rows, :count] = theirs[:, taken, :count]

    def _read(self, layer: Any, rows: list[int], held: slice, slots: slice) -> None:
        super()._read(layer, rows, held, slots)
        keys = getattr(layer, "indexer_keys", None)
        if keys is not None:
            self._allocate_keys(keys, len(self.keys), self.device)
            self.indexer_keys[rows, slots] = keys[rows, held].to(self.indexer_keys)
