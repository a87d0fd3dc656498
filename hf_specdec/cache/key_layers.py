"""Layers with keys and values by slot, for attention to all tokens, to windows and to chunks, and layers without any.

Which slots attention sees is a rule of attention, see `mask_rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import ops
from ..host.caches import KEYED_LAYERS, Cache, CacheLayerMixin
from ..host.modeling import LAYER_TYPES
from ..modules.deferred import Stored, store_kv
from .layer_kinds import LayerKind, LayerKinds, LayerMemory, register


class RaggedLayer(LayerMemory, CacheLayerMixin):
    """Keys and values of one layer, `[B, slots, kv_heads, head_dim]`, allocated at the first write.

    Attributes:
        scales: `[B, slots, kv_heads, 2]`, of keys and values that are stored as float8; else None.
    """

    is_sliding = False
    scales: torch.Tensor | None = None

    def __init__(self, cache: Cache, kind: LayerKind):
        CacheLayerMixin.__init__(self)
        LayerMemory.__init__(self, cache, kind)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate as many rows as the states `[B, kv_heads, any, head_dim]` have."""
        self.allocate(key_states, value_states, len(key_states), key_states.device)

    def allocate(self, key_states: torch.Tensor, value_states: torch.Tensor, batch: int, device: torch.device) -> None:
        """Allocate `batch` rows on `device`; other sizes are those of the states `[any, kv_heads, any, head_dim]`."""
        dtype = self._cache.kinds.key_dtype

        def zeros(states: torch.Tensor, width: int, dtype: torch.dtype | None) -> torch.Tensor:
            return states.new_zeros(batch, self._cache.slots, states.shape[1], width, dtype=dtype, device=device)

        # Zeros, not empty: the attention weight of an invisible slot is 0, and 0 * NaN would be NaN.
        buffers = [zeros(states, states.shape[3], dtype) for states in (key_states, value_states)]
        self.place(*buffers, *([] if dtype is None else [zeros(key_states, 2, None)]))

    def place(self, keys: torch.Tensor, values: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        self.dtype, self.device = keys.dtype, keys.device
        self.keys, self.values, self.scales, self.is_initialized = keys, values, scales, True

    @property
    def slot_buffers(self) -> Sequence[torch.Tensor]:
        if not self.is_initialized:
            return ()
        return (self.keys, self.values) if self.scales is None else (self.keys, self.values, self.scales)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new states, `[B, kv_heads, n, head_dim]`, at the cache's `positions`.

        Returns:
            keys and values to attend to, `[B, kv_heads, span, head_dim]`. They are views of the cache; copies where
            attention takes a mask, since attention of modeling files may require contiguous tensors. Float8 ones are
            dequantised when others than attention read them.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        store_kv(self.keys, self.values, key_states, value_states, self._cache.positions, self.scales)
        shown = self.shown()
        if not self._cache.keeps_keys:
            self.keys, self.values, self.scales, self.is_initialized = None, None, None, False
        return (shown[0].contiguous(), shown[1].contiguous()) if self._cache.takes_mask else shown

    def shown(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the cache's `span`, `[B, kv_heads, span, head_dim]`: views, see `update`."""
        span = self._cache.span
        keys, values = self.keys[:, :span].transpose(1, 2), self.values[:, :span].transpose(1, 2)
        if self.scales is None:
            return keys, values
        return Stored(keys, values, self.scales[:, :span].transpose(1, 2)).shown()

    def copy_rows(self, rows: torch.Tensor, source: RaggedLayer, taken: slice | torch.Tensor, slots: int) -> None:
        if slots and source.is_initialized:  # not if no attention uses the layer
            for ours, theirs in zip(self.slot_buffers, source.slot_buffers, strict=True):
                ops.as_bytes(ours)[rows, :slots] = ops.as_bytes(theirs)[taken, :slots]

    def packed(self, cache: Cache, batch: int) -> PackedLayer:
        return PackedLayer(cache, self, batch)

    def read_slots(self, layer: Any, padding: Sequence[int], columns: int, batch: int, device: torch.device) -> None:
        if getattr(layer, "keys", None) is None:  # it has no keys, or no attention uses it
            return
        length = int(layer.get_seq_length())
        count = min(length, layer.keys.shape[2])  # a window holds the last columns only
        if not self.is_initialized:
            self.allocate(layer.keys, layer.values, batch, device)
        for pad in dict.fromkeys(padding):
            rows = [row for row, other in enumerate(padding) if other == pad]
            begin = max(length - count, pad)
            if begin < columns:
                held = slice(begin - length + count, columns - length + count)
                self._read(layer, rows, held, slice(begin - pad, columns - pad))

    def _read(self, layer: Any, rows: list[int], held: slice, slots: slice) -> None:
        """Copy the columns `held` of the keys and values of `layer`, in `rows`, to `slots`."""
        for index, (theirs, buffer) in enumerate(((layer.keys, self.keys), (layer.values, self.values))):
            states = theirs[rows, :, held].transpose(1, 2)
            if self.scales is not None:
                states, self.scales[..., index][rows, slots] = ops.quantise(states.to(self.scales))
            ops.as_bytes(buffer)[rows, slots] = ops.as_bytes(states.to(buffer))

    def write_slots(self, cache: Any, index: int, slots: torch.Tensor) -> None:
        if self.is_initialized:  # not if no attention uses the layer
            rows = torch.arange(len(slots), device=slots.device)[:, None]
            held = [ops.as_bytes(buffer)[rows, slots].transpose(1, 2) for buffer in self.slot_buffers]
            if self.scales is not None:
                held = [ops.dequantise(one, held[2][..., place]) for place, one in enumerate(held[:2])]
            cache.update(*held, index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.span, 0

    def get_seq_length(self) -> int:
        return 0


class PackedLayer(RaggedLayer):
    """Keys and values of `layer`, of a cache with `batch` rows, as one row: `[1, B * slots, kv_heads, head_dim]`."""

    def __init__(self, cache: Cache, layer: RaggedLayer, batch: int):
        super().__init__(cache, Keys())
        self._layer, self._batch = layer, batch

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if not self._layer.is_initialized:
            self._layer.allocate(key_states, value_states, self._batch, key_states.device)
        self.place(*[one.flatten(0, 1)[None] for one in self._layer.slot_buffers])


@register
class Empty(LayerKind):
    """Layers that compute without memory, or read the keys and values of another layer."""

    layer_types = frozenset(LAYER_TYPES["empty"])
    obstacles = {}
    is_empty = True
    layer_class = RaggedLayer  # nothing is written to it

    @classmethod
    def detect(cls, layer: Any) -> Empty:
        return cls()


@register
class Keys(LayerKind):
    """Keys and values by slot."""

    layer_types = frozenset(LAYER_TYPES["keys"])
    sources = KEYED_LAYERS
    obstacles = {}
    stores_keys = True
    layer_class = RaggedLayer

    @classmethod
    def detect(cls, layer: Any) -> Keys | None:
        return cls() if isinstance(layer, CacheLayerMixin) else None


def attention_layers(count: int) -> LayerKinds:
    """The kinds of `count` layers that store keys and values only."""
    return LayerKinds((Keys(),) * count)
