"""The static cache of ragged batches: every row has its own length, and slot == position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .. import ops
from ..host.caches import Cache, CacheLayerMixin
from ..virtual_memory import RowMemory
from .compressed_layers import CompressedWindows
from .deferred import store_kv
from .recurrent_layers import RecurrentLayer
from .recurrent_positions import RecurrencePositions
from .rings import Block


class LayerKind(NamedTuple):
    """What a layer of a cache stores.

    Attributes:
        has_keys: whether it stores keys and values.
        num_states: how many recurrent states it stores, and as many inputs of short convolutions.
        takes_mask: whether its attention is that of the modeling file, which adds a mask to its scores, and not
            `ragged_attention_forward`.
        compress_rate: tokens of the windows of which it stores keys, too, see `compressed_layers`; 0 without windows.
    """

    has_keys: bool = True
    num_states: int = 0
    takes_mask: bool = False
    compress_rate: int = 0


def attention_layers(count: int) -> tuple[LayerKind, ...]:
    """The kinds of `count` layers that store keys and values only."""
    return (LayerKind(),) * count


def only_keys(kinds: Sequence[LayerKind]) -> bool:
    """Whether layers of `kinds` store keys and values only, and attention takes no mask."""
    return not any([kind.num_states or kind.takes_mask or kind.compress_rate for kind in kinds])


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer, `[B, slots, kv_heads, head_dim]`, allocated at the first write."""

    is_compileable = True
    is_sliding = False

    def __init__(self, cache: RaggedCache):
        super().__init__()
        self._cache = cache
        # `[B, slots, D]`, what an indexer chooses slots by; None before the first pass, and without an indexer.
        self.indexer_keys: torch.Tensor | None = None

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

    def place(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take `keys` and `values`, `[B, slots, kv_heads, head_dim]`, instead of buffers of its own."""
        self.dtype, self.device = keys.dtype, keys.device
        self.keys, self.values, self.is_initialized = keys, values, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new states, `[B, kv_heads, n, head_dim]`, at the cache's `positions`.

        Returns:
            the keys and values to attend to, `[B, kv_heads, span, head_dim]`: views of the cache, or copies where
            attention takes a mask. That of modeling files copies others to multiply them, or requires contiguous ones.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        store_kv(self.keys, self.values, key_states, value_states, self._cache.positions)
        keys, values = self.shown()
        return (keys.contiguous(), values.contiguous()) if self._cache.takes_mask else (keys, values)

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Store keys of an indexer, `[B, n, D]`, at the cache's `positions`; returns those of the cache's `span`."""
        if self.indexer_keys is None:
            batch, _, width = indexer_key_states.shape
            self.indexer_keys = indexer_key_states.new_zeros(batch, self._cache.slots, width)
        rows = torch.arange(len(self.indexer_keys), device=self.indexer_keys.device)[:, None]
        self.indexer_keys[rows, self._cache.positions] = indexer_key_states
        return self.indexer_keys[:, : self._cache.span]

    def read_indexer(self, layer: CacheLayerMixin, rows: list[int], columns: slice, slots: slice) -> None:
        """Copy the keys of an indexer that a layer of another cache has in `columns` of `rows`, if any, to `slots`."""
        keys = getattr(layer, "indexer_keys", None)
        if keys is not None:
            if self.indexer_keys is None:
                self.indexer_keys = keys.new_zeros(len(self.keys), self._cache.slots, keys.shape[2], device=self.device)
            self.indexer_keys[rows, slots] = keys[rows, columns].to(self.indexer_keys)

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """`RaggedCache.position_ids`, which models look for in a layer; None before the first pass."""
        return getattr(self._cache, "position_ids", None)

    @indexer_position_ids.setter
    def indexer_position_ids(self, position_ids: torch.Tensor) -> None:
        self._cache.position_ids = position_ids

    def shown(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of the cache's `span`, `[B, kv_heads, span, head_dim]`: views."""
        span = self._cache.span
        return self.keys[:, :span].transpose(1, 2), self.values[:, :span].transpose(1, 2)

    @property
    def is_allocated(self) -> bool:
        return self.is_initialized

    def restart(self) -> None:
        """Begin with no text in any row. What earlier texts have left is not visible to queries of later ones."""

    def copy_rows(self, rows: torch.Tensor, source: RaggedLayer, taken: slice | torch.Tensor, slots: int) -> None:
        if source.is_initialized:  # not where no attention uses the layer
            self.keys[rows, :slots] = source.keys[taken, :slots]
            self.values[rows, :slots] = source.values[taken, :slots]
        if source.indexer_keys is not None:
            self.indexer_keys[rows, :slots] = source.indexer_keys[taken, :slots]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the rows `indices` `[n]` int64."""
        self.keys, self.values = self.keys[indices], self.values[indices]
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[indices]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.span, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._cache.slots


class CompressedLayer(RaggedLayer):
    """A layer with keys of windows of tokens, too."""

    def __init__(self, cache: RaggedCache):
        super().__init__(cache)
        self._windows: dict[str, CompressedWindows] = {}

    def windows(self, name: str, rate: int, overlaps: bool) -> CompressedWindows:
        """What is kept for the compressor called `name`; the others as of `CompressedWindows`."""
        if name not in self._windows:
            self._windows[name] = CompressedWindows(self._cache, rate, overlaps)
        return self._windows[name]

    def copy_rows(self, rows: torch.Tensor, source: CompressedLayer, taken: slice | torch.Tensor, slots: int) -> None:
        super().copy_rows(rows, source, taken, slots)
        for name, windows in source._windows.items():
            ours = self.windows(name, windows.rate, windows.overlaps)
            ours.copy_rows(rows, windows, taken, slots, len(self.keys))


class RaggedRecurrentLayer(RecurrentLayer, RaggedLayer):
    """A layer with keys and values as well as recurrent states."""

    def __init__(self, cache: RaggedCache, num_states: int):
        RaggedLayer.__init__(self, cache)
        RecurrentLayer.__init__(self, cache, num_states)

    lazy_initialization = RaggedLayer.lazy_initialization
    get_max_length = RaggedLayer.get_max_length

    def copy_rows(
        self, rows: torch.Tensor, source: RaggedRecurrentLayer, taken: slice | torch.Tensor, slots: int
    ) -> None:
        RaggedLayer.copy_rows(self, rows, source, taken, slots)
        RecurrentLayer.copy_rows(self, rows, source, taken, slots)


class RaggedCache(Cache):
    """A preallocated cache in which row b's token at position t is in slot t, whatever the lengths of other rows.

    Nothing is ever rolled back: a rejected token's slot is overwritten by the next round, and a slot is visible only
    to queries at its position or later. The last slot is the dummy slot: keys and values of padding, of finished rows
    and of positions past the length limit are written there. No query of an unfinished row attends to it. For recurrent
    states see `recurrent_layers`.

    Args:
        kinds: of the layers.
        slots: slots of each layer, the dummy slot included.
        starts: see below.
        lengths: `[B]` int64, committed tokens of each row, as they are when a pass runs; needed for recurrent states.
        num_draft_tokens: most draft tokens of a round; needed for recurrent states and compressed windows.
        num_again: how many of the last committed tokens may be run again; needed for the same.

    Attributes:
        positions: `[B, n]` int64 slots that the next forward pass writes; set by `advance`.
        num_before: how many slots are before those of the next forward pass, where these follow each other without
            padding, in all rows from the same one on; None where that is not known. Set by `advance`.
        recurrence: positions of the recurrent states; None if there are none.
        block: positions of the next forward pass, set by `advance` if layers compress; otherwise None.
        starts: `[B]` int64, the first slot of each row that queries attend to; None for slot 0 in all rows.
        late_starts: takes the place of `starts` for a while; None if it does not.
        takes_mask: whether attention is that of the modeling file, see `LayerKind`.
        span: how many leading slots attention is given. With Triton kernels all of them: kernels read live slots only,
            and a launch that is the same for all lengths can be captured. With the PyTorch references as many as may be
            live and one more, because the last slot given is taken for the dummy slot. Attention that takes a mask is
            given one less, without the dummy slot: no more than there are positions.
        kernel_span: `span` with Triton kernels, if not all slots: a launch for fewer slots has fewer splits.
        row_memory: what `keys` and `values` of the layers are in; None if they have buffers of their own.
        is_by_slot: whether keys are stored by slot.
    """

    is_by_slot = True

    def __init__(
        self,
        kinds: Sequence[LayerKind],
        slots: int,
        starts: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        num_draft_tokens: int = 0,
        num_again: int = 0,
    ):
        self.slots = slots
        self.takes_mask = any([kind.takes_mask for kind in kinds])
        self.span = slots - self.takes_mask
        self.kernel_span = slots
        self.row_memory: RowMemory | None = None
        self.starts = starts
        self.late_starts: torch.Tensor | None = None
        self.positions: torch.Tensor | None = None
        self.num_before: int | None = None
        self._position_ids: torch.Tensor | None = None
        # Of tokens whose inputs are in rings.
        self._most_uncertain = num_draft_tokens + num_again
        has_states = any([kind.num_states for kind in kinds])
        self.recurrence = RecurrencePositions(lengths, num_again) if has_states else None
        self._compresses = any([kind.compress_rate for kind in kinds])
        self.block: Block | None = None
        super().__init__(layers=[self._new_layer(kind) for kind in kinds])

    def _new_layer(self, kind: LayerKind) -> RaggedLayer | RecurrentLayer:
        if not kind.num_states:
            return CompressedLayer(self) if kind.compress_rate else RaggedLayer(self)
        return (RaggedRecurrentLayer if kind.has_keys else RecurrentLayer)(self, kind.num_states)

    @property
    def dummy_slot(self) -> int:
        return self.slots - 1

    @property
    def is_allocated(self) -> bool:
        """Whether a forward pass has allocated the layers' buffers."""
        return any([layer.is_allocated for layer in self.layers])

    @property
    def has_keys(self) -> bool:
        """Whether layers store keys and values."""
        return any([isinstance(layer, RaggedLayer) for layer in self.layers])

    @property
    def position_ids(self) -> torch.Tensor:
        """Position ids `[sections, B, span]` int64 by slot, as of before the pass, where models keep them for indexers.

        A model reads them, concatenates those of the pass's columns, and stores all of it.

        Raises:
            AttributeError: none have been stored.
        """
        if self._position_ids is None:
            raise AttributeError("no pass has stored position ids")
        return self._position_ids[..., : self.span]

    @position_ids.setter
    def position_ids(self, position_ids: torch.Tensor) -> None:
        sections, (batch, columns) = len(position_ids), self.positions.shape
        if self._position_ids is None:
            self._position_ids = position_ids.new_zeros(sections, batch, self.slots)
        self._position_ids.scatter_(2, self.positions.expand(sections, -1, -1), position_ids[..., -columns:])

    @property
    def can_be_copied(self) -> bool:
        """Whether transformers' caches can be given what layers hold: not compressed windows, nor keys of indexers."""
        has_indexers = any([getattr(layer, "indexer_keys", None) is not None for layer in self.layers])
        return not self._compresses and not has_indexers

    @property
    def recurrent_layers(self) -> list[RecurrentLayer]:
        return [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]

    @property
    def bounds_steps(self) -> bool:
        """Whether a pass has named bounds of time steps, which are those of tokens of prompts only."""
        return any([layer.bounds_steps for layer in self.recurrent_layers])

    @property
    def ring_slots(self) -> int:
        """Slots for the inputs of tokens that are not in the recurrent states.

        As many are read as are written; with one more than both no slot is written that another program still reads.
        """
        return 1 << (2 * self._most_uncertain).bit_length()

    def convolution_slots(self, kernel_size: int) -> int:
        """Slots for the inputs of a short convolution: the ones before a block, and a block of drafts after it."""
        return 1 << (kernel_size + 2 * self._most_uncertain).bit_length()

    def restart(self) -> None:
        """Begin with no text in any row: recurrent states are zeroed; rows of `lengths` are those of the prompts."""
        if self.recurrence is not None:
            self.recurrence.restart(self.starts)
            for layer in self.layers:
                layer.restart()

    def attention_mask(self, slots: torch.Tensor) -> torch.Tensor | None:
        """The `attention_mask` of a forward pass whose queries are at `slots` `[B, n]` int64.

        Returns:
            `[B, 1, n, 1]` int64, the slots; with `starts` `[B, 1, n, 2]`, the slots and the first slot of each row;
            with `num_before` `[B, 1, n, 0]`: the queries are at the last n slots but one of those that attention is
            given. For attention that takes a mask `[B, span]` int64, 1 from the first slot of each row on; `slot_mask`
            hides the slots after a query. None if no layer stores keys.
        """
        if not self.has_keys:
            return None
        starts = self.starts_of(slots)
        if self.takes_mask:
            if starts is None:
                return slots.new_ones(len(slots), self.span)
            return (torch.arange(self.span, device=slots.device) >= starts[:, None]).long()
        if self.num_before is not None:
            return slots.new_empty(*slots.shape, 0)[:, None]
        if starts is None:
            return slots[:, None, :, None]
        # Stacked in front: kernels take slots that are adjacent in memory.
        return torch.stack((slots, starts[:, None].expand_as(slots)), dim=1).transpose(1, 2)[:, None]

    def starts_of(self, slots: torch.Tensor) -> torch.Tensor | None:
        """The first slot that queries at `slots` `[B, n]` attend to: `[B]` int64 or None; or `[B, n]` if packed."""
        return self.starts if self.late_starts is None else self.late_starts

    def get_query_offset(self, layer_idx: int = 0) -> int | torch.Tensor:
        """What transformers passes to its mask interface: for `slot_mask` the queries' slots, `[B, n]` int64."""
        return self.positions if self.takes_mask else super().get_query_offset(layer_idx)

    def copy_rows(
        self, rows: torch.Tensor, source: RaggedCache, slots: int, source_rows: torch.Tensor | None = None
    ) -> None:
        """Copy rows of another cache of the same layers, and of the same K, whose layers hold some; so do this one's
        with keys and values.

        Args:
            rows: `[n]` int64, where to.
            source: whose rows are copied.
            slots: how many leading slots of them.
            source_rows: `[n]` int64, which rows; the first n if None.
        """
        taken = slice(len(rows)) if source_rows is None else source_rows
        for layer, other in zip(self.layers, source.layers, strict=True):
            layer.copy_rows(rows, other, taken, slots)
        if self.recurrence is not None:
            self.recurrence.copy_rows(rows, source.recurrence, taken)
        self._copy_position_ids(rows, source, taken)

    def _copy_position_ids(self, rows: torch.Tensor, source: RaggedCache, taken: slice | torch.Tensor) -> None:
        theirs = source._position_ids
        if theirs is None:
            return
        if self._position_ids is None:
            self._position_ids = theirs.new_zeros(len(theirs), len(self.recurrence.base), self.slots)
        slots = min(self.slots, source.slots) - 1
        self._position_ids[:, rows, :slots] = theirs[:, taken, :slots]

    def copy_states(self, rows: torch.Tensor, source: RaggedCache) -> None:
        """Copy the recurrent states and position ids of all rows of another cache of the same layers and K, no keys and
        values.

        Args:
            rows: `[n]` int64, where to.
            source: whose rows are copied.
        """
        for layer, other in zip(self.layers, source.layers, strict=True):
            if isinstance(layer, RecurrentLayer):
                RecurrentLayer.copy_rows(layer, rows, other, slice(len(rows)), 0)
        self.recurrence.copy_rows(rows, source.recurrence, slice(len(rows)))
        self._copy_position_ids(rows, source, slice(len(rows)))

    def replay(self, ends: torch.Tensor) -> None:
        """Bring the recurrent states of the first rows to positions up to which the target has run all tokens.

        Args:
            ends: `[n]` int64, none before a state's position, and no further from it than accepted drafts of a round.
        """
        recurrence = self.recurrence
        positions = torch.full_like(recurrence.base, self.dummy_slot)[:, None]
        positions[: len(ends), 0] = ends
        recurrence.base.copy_(recurrence.next_base)
        for layer in self.recurrent_layers:
            layer.replay(positions)
        recurrence.next_base[: len(ends)] = ends

    def advance(self, positions: torch.Tensor, live: int, num_before: int | None = None) -> None:
        """Set where the next forward pass writes, and how many leading slots its queries may attend to.

        Args:
            positions: `[B, n]` int64 slots.
            live: upper bound of the slots in use, known without synchronizing with the device.
            num_before: see the attribute; used where no layer has a recurrent state, a mask or starts.
        """
        self.positions = positions
        if self.recurrence is not None or self.takes_mask or self.starts is not None:
            num_before = None
        self.num_before = num_before
        if num_before is not None:
            self.span = num_before + positions.shape[1] + 1
            return
        if self.recurrence is not None:
            self.recurrence.advance(positions, self.dummy_slot)
        if self._compresses:
            self.block = Block.of(positions, self.dummy_slot)
        self.show(live, positions.device)

    def show(self, live: int, device: torch.device) -> None:
        """Set how many leading slots queries may attend to; see `advance`."""
        span = self.kernel_span if ops.has_kernels(device) else min(live + 1, self.slots)
        self.span = span - self.takes_mask
