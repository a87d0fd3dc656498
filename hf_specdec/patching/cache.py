"""The ragged static KV cache: every row has its own length, and slot == position."""

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
        """Allocate `batch` rows for states `[any, kv_heads, any, head_dim]` like those that are given."""
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
        """Store new states at the cache's `positions`; return keys and values to read, `[B, kv_heads, span, D]`."""
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
    """A preallocated cache in which row b's token at position t lives in slot t, whatever the other rows do.

    Nothing is ever rolled back: a rejected token's slot is overwritten by the next round, and a slot is visible only
    to queries at its position or later. The last slot, `scrap`, takes what belongs nowhere: padding, finished rows,
    positions past the length limit. No live query ever sees it.

    Attributes:
        positions: `[B, n]` int64 slots that the next forward pass writes; set by `advance`.
        starts: `[B]` int64, the first slot of each row that queries may see; None for the first of all.
        span: how many leading slots attention is given. Where kernels run, all of them: they read only what is live,
            and their launches depend on no length. Elsewhere as many as may be live and one more, as the last counts
            as scrap.
    """

    def __init__(self, num_layers: int, slots: int, starts: torch.Tensor | None = None):
        self.slots = slots
        self.span = slots
        self.starts = starts
        self.positions: torch.Tensor | None = None
        super().__init__(layers=[RaggedLayer(self) for _ in range(num_layers)])

    def attention_mask(self, slots: torch.Tensor) -> torch.Tensor:
        """What models are given as `attention_mask`: queries at `slots` `[B, n]`, and `starts`, `[B, 1 or 2, n, 1]`."""
        if self.starts is None:
            return slots[:, None, :, None]
        return torch.stack((slots, self.starts[:, None].expand_as(slots)), dim=1)[..., None]

    def advance(self, positions: torch.Tensor, live: int) -> None:
        """Say where the next forward pass writes, and how many leading slots its live queries may see.

        `live` is a bound that the host knows without asking the device.
        """
        self.positions = positions
        self.span = self.slots if ops.has_kernels(positions.device) else min(live + 1, self.slots)
