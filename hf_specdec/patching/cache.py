"""The static KV cache of ragged batches: every row has its own length, and slot == position."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .. import ops


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer, `[B, slots, kv_heads, head_dim]`, allocated at the first write."""

    is_compileable = True
    is_sliding = False

    def __init__(self, cache: RaggedCache):
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.allocate(key_states, value_states, len(key_states))

    def allocate(self, key_states: torch.Tensor, value_states: torch.Tensor, batch: int) -> None:
        """Allocate `batch` rows.

        Args:
            key_states, value_states: `[any, kv_heads, any, head_dim]`; only number of heads, width, dtype and device
                are read.
            batch: rows.
        """
        self.dtype, self.device = key_states.dtype, key_states.device
        # Zeros, not empty: attention weights of invisible slots are 0, and 0 * NaN would be NaN.
        self.keys, self.values = (
            states.new_zeros(batch, self._cache.slots, states.shape[1], states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new states, `[B, kv_heads, n, head_dim]`, at the cache's `positions`.

        Returns:
            the keys and values to attend to, `[B, kv_heads, span, head_dim]` views of the cache.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        ops.write_kv(self.keys, self.values, key_states, value_states, self._cache.positions)
        span = self._cache.span
        return self.keys[:, :span].transpose(1, 2), self.values[:, :span].transpose(1, 2)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the rows `indices` `[n]` int64."""
        self.keys, self.values = self.keys[indices], self.values[indices]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.span, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._cache.slots


class RaggedCache(Cache):
    """A preallocated cache in which row b's token at position t is in slot t, whatever the lengths of other rows.

    Nothing is ever rolled back: a rejected token's slot is overwritten by the next round, and a slot is visible only
    to queries at its position or later. The last slot is the dummy slot: keys and values of padding, of finished rows
    and of positions past the length limit are written there. No query of an unfinished row attends to it.

    Args:
        num_layers: layers that have keys and values.
        slots: slots of each layer, the dummy slot included.
        starts: see below.

    Attributes:
        positions: `[B, n]` int64 slots that the next forward pass writes; set by `advance`.
        starts: `[B]` int64, the first slot of each row that queries attend to; None for slot 0 in all rows.
        span: how many leading slots attention is given. With Triton kernels all of them: kernels read live slots only,
            and a launch that is the same for all lengths can be captured. With the PyTorch references as many as may be
            live and one more, because the last slot given is taken for the dummy slot.
    """

    def __init__(self, num_layers: int, slots: int, starts: torch.Tensor | None = None):
        self.slots = slots
        self.span = slots
        self.starts = starts
        self.positions: torch.Tensor | None = None
        super().__init__(layers=[RaggedLayer(self) for _ in range(num_layers)])

    def attention_mask(self, slots: torch.Tensor) -> torch.Tensor:
        """The `attention_mask` of a forward pass whose queries are at `slots` `[B, n]` int64.

        Returns:
            `[B, 1, n, 1]` int64, the slots; with `starts` `[B, 2, n, 1]`, the slots and the first slot of each row.
        """
        if self.starts is None:
            return slots[:, None, :, None]
        return torch.stack((slots, self.starts[:, None].expand_as(slots)), dim=1)[..., None]

    def copy_rows(
        self, rows: torch.Tensor, source: RaggedCache, slots: int, source_rows: torch.Tensor | None = None
    ) -> None:
        """Copy keys and values of another cache of the same layers, whose layers hold some; so do this one's.

        Args:
            rows: `[n]` int64, where to.
            source: whose rows are copied.
            slots: how many leading slots of them.
            source_rows: `[n]` int64, which rows; the first n if None.
        """
        taken = slice(len(rows)) if source_rows is None else source_rows
        for layer, other in zip(self.layers, source.layers, strict=True):
            if other.is_initialized:  # not those that no attention uses
                layer.keys[rows, :slots] = other.keys[taken, :slots]
                layer.values[rows, :slots] = other.values[taken, :slots]

    def advance(self, positions: torch.Tensor, live: int) -> None:
        """Set where the next forward pass writes, and how many leading slots its queries may attend to.

        Args:
            positions: `[B, n]` int64 slots.
            live: upper bound of the slots in use, known without synchronizing with the device.
        """
        self.positions = positions
        self.span = self.slots if ops.has_kernels(positions.device) else min(live + 1, self.slots)
