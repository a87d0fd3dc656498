"""The static KV cache of ragged batches: every row has its own length, and slot == position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from .. import ops
from ..host.caches import Cache
from ..kernels.types import Nodes
from ..memory.virtual_memory import RowMemory
from .hidden_states import HiddenStates
from .layer_kinds import LayerKind, LayerKinds, LayerMemory
from .recurrence_positions import RecurrencePositions


class RaggedCache(Cache):
    """A preallocated cache in which row b's token at position t is in slot t, whatever the lengths of other rows.

    Nothing is ever rolled back: the next round overwrites a rejected token's slot, and a slot is visible only to
    queries at its position or later. The last slot is the dummy slot, for keys and values of padding, of finished rows
    and of positions past the length limit. No query of an unfinished row attends to it. For recurrent states see
    `recurrent_layers`.

    Args:
        kinds: kinds of the layers.
        slots: slots of each layer, the dummy slot included.
        lengths: `[B]` int64, committed tokens of each row at the time of a pass; on the device of the cache.
        starts: see below.
        num_draft_tokens: most draft tokens of a round. Layers with keys only do not need this, nor the next.
        num_again: how many of the last committed tokens may be run again.

    Attributes:
        positions: `[B, n]` int64 slots that the next forward pass writes; set by `advance`.
        num_before: the number of slots before those of the next forward pass, if all rows run the same consecutive
            slots without padding; None if that is not known. Set by `advance`.
        kinds, lengths: see above.
        recurrence: positions of recurrent states; None if there are none.
        starts: `[B]` int64, the first slot of each row that queries attend to; None for slot 0 in all rows.
        late_starts: replaces `starts` for a while; None if it does not.
        takes_mask: see `LayerKinds`.
        span: number of leading slots that attention gets. With Triton kernels it is all slots: kernels read live slots
            only, and a launch that is the same for all lengths can be captured. With the PyTorch references it is the
            slots that may be live and one more, since they take the last slot for the dummy slot. Attention that takes
            a mask gets one less, without the dummy slot: no more slots than there are positions.
        kernel_span: `span` with Triton kernels, if not all slots: a launch over fewer slots has fewer splits.
        hidden_states: hidden states of the target, by slot; None unless they are kept.
        row_memory: memory of the layers' `slot_buffers`; None if these are buffers of their own.
        nodes: of the tree that the next forward pass runs, at slots that are not its tokens' positions; None if it runs
            the tokens of texts.
        keeps_keys: whether keys and values outlive the pass that stores them.
        is_by_slot: whether keys are stored by slot.
    """

    is_by_slot = True

    def __init__(
        self,
        kinds: LayerKinds,
        slots: int,
        lengths: torch.Tensor,
        starts: torch.Tensor | None = None,
        num_draft_tokens: int = 0,
        num_again: int = 0,
    ):
        self.kinds = kinds
        self.slots = slots
        self.takes_mask = kinds.takes_mask
        # Kernels get all slots, references only those in use.
        self._shows_all = ops.has_kernels(lengths.device)
        self._takes_num_before = kinds.is_by_slot and not kinds.takes_mask and starts is None
        self.span = slots - self.takes_mask
        self.kernel_span = slots
        self.hidden_states: HiddenStates | None = None
        self.row_memory: RowMemory | None = None
        self.keeps_keys = True
        self.starts = starts
        self.late_starts: torch.Tensor | None = None
        self.positions: torch.Tensor | None = None
        self.num_before: int | None = None
        self.nodes: Nodes | None = None
        self._moves = ops.SlotMoves()
        self._block: ops.PassPositions | None = None
        self.lengths = lengths
        # Most tokens of a row whose inputs are in rings only.
        self._most_uncertain = num_draft_tokens + num_again
        self.recurrence = RecurrencePositions(lengths, num_again) if kinds.keeps_states else None
        super().__init__(layers=[self._new_layer(kind) for kind in kinds])

    def _new_layer(self, kind: LayerKind) -> LayerMemory:
        return kind.layer_class(self, kind)

    @property
    def batch(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    @property
    def dummy_slot(self) -> int:
        return self.slots - 1

    @property
    def block(self) -> ops.PassPositions:
        if self._block is None:
            self._block = ops.PassPositions.of(self.positions, self.dummy_slot)
        return self._block

    @property
    def position_ids(self) -> torch.Tensor:
        """`indexer_position_ids` of the first layer that has them, for models of transformers 5.17, which read them
        from the cache; raises `AttributeError` if none have been stored."""
        found = next((layer.indexer_position_ids for layer in self._with_position_ids()), None)
        if found is None:
            raise AttributeError("no pass has stored position ids")
        return found

    @position_ids.setter
    def position_ids(self, position_ids: torch.Tensor) -> None:
        next(self._with_position_ids()).indexer_position_ids = position_ids

    def _with_position_ids(self) -> Iterator[LayerMemory]:
        return (layer for layer in self.layers if hasattr(layer, "indexer_position_ids"))

    @property
    def bounds_steps(self) -> bool:
        return any([layer.bounds_steps for layer in self.layers])

    def ring_slots(self, kernel_size: int = 0) -> int:
        """Slots of a ring for the inputs of tokens that are not in the states yet, and of `kernel_size` tokens before.

        A pass reads as many slots as it writes. With one more than both, no program writes a slot that another reads.
        """
        return 1 << (kernel_size + 2 * self._most_uncertain).bit_length()

    def restart(self) -> None:
        """Begin with no text in any row: zero states; `lengths` are those of the prompts."""
        if self.recurrence is not None:
            self.recurrence.restart(self.starts)
        for layer in self.layers:
            layer.restart()

    def attention_mask(self, slots: torch.Tensor) -> torch.Tensor | None:
        """The `attention_mask` of a forward pass whose queries are at `slots` `[B, n]` int64.

        Returns:
            `[B, 1, n, 1]` int64: the slots. With `starts` `[B, 1, n, 2]`: the slots and the first slot of each row.
            With `num_before` `[B, 1, n, 0]`: the queries are at the n slots before the last that attention gets. For a
            tree `[B, 1, n, 2 + W]`: positions, the first slot of each row, and words of ancestors. For attention that
            takes a mask `[B, span]` int64: 1 from the first slot of each row on (`slot_mask` hides the slots after a
            query). None if no layer stores keys.
        """
        if not self.kinds.stores_keys:
            return None
        starts = self.starts_of(slots)
        if self.takes_mask:
            if starts is None:
                return slots.new_ones(len(slots), self.span)
            return (torch.arange(self.span, device=slots.device) >= starts[:, None]).long()
        if self.num_before is not None:
            return slots.new_empty(*slots.shape, 0)[:, None]
        if self.nodes is not None:
            first = torch.zeros_like(slots) if starts is None else starts[:, None].expand_as(slots)
            columns = [self.nodes.positions, first, *self.nodes.ancestors.unbind(2)]
        elif starts is None:
            return slots[:, None, :, None]
        else:
            columns = [slots, starts[:, None].expand_as(slots)]
        # Stacked along dim 1, since kernels take slots that are adjacent in memory.
        return torch.stack(columns, dim=1).transpose(1, 2)[:, None]

    def starts_of(self, slots: torch.Tensor) -> torch.Tensor | None:
        """The first slot that queries at `slots` `[B, n]` attend to: `[B]` int64 or None; `[B, n]` if packed."""
        return self.starts if self.late_starts is None else self.late_starts

    def get_query_offset(self, layer_idx: int = 0) -> int | torch.Tensor:
        """The query offset for transformers' mask interface; `slot_mask` gets the queries' slots, `[B, n]` int64."""
        return self.positions if self.takes_mask else super().get_query_offset(layer_idx)

    def copy_rows(
        self, rows: torch.Tensor, source: RaggedCache, slots: int, source_rows: torch.Tensor | None = None
    ) -> None:
        """Copy rows of `source`, a cache of the same layers and the same K. Both caches must have run a pass.

        Args:
            rows: `[n]` int64, the rows to copy to.
            slots: number of leading slots to copy; 0 for only the states and whatever else is not by slot.
            source_rows: `[n]` int64, rows of `source`; None for the first n.
        """
        taken = slice(len(rows)) if source_rows is None else source_rows
        for layer, other in zip(self.layers, source.layers, strict=True):
            layer.copy_rows(rows, other, taken, slots)
        if slots and self.hidden_states is not None:
            self.hidden_states.copy_rows(rows, source.hidden_states, taken, slots)
        if self.recurrence is not None:
            self.recurrence.copy_rows(rows, source.recurrence, taken)

    def move(self, path: torch.Tensor, lengths: torch.Tensor, committed: torch.Tensor) -> None:
        """Move what a tree's pass has stored of its accepted path to the slots of the path's positions; arguments as in
        `kernels.kv_cache_reference.move_slots`."""
        buffers = [one for layer in self.layers for one in layer.slot_buffers]
        if self.hidden_states is not None:
            buffers += self.hidden_states.buffers
        self._moves(buffers, path, lengths, committed)

    def state_positions(self, count: int) -> list[int]:
        """Positions of the recurrent states of the first `count` rows; waits for the device."""
        return self.recurrence.next_base[:count].tolist()

    def replay(self, ends: Sequence[int]) -> bool:
        """Advance the states of the first rows to the positions `ends`, up to which the target has run all tokens.
        Returns False, and changes nothing, if states include tokens that the text lacks, or rings do not suffice."""
        recurrence, bases = self.recurrence, self.state_positions(len(ends))
        if any(base > end for base, end in zip(bases, ends, strict=True)):
            return False
        if bases == list(ends):
            return True
        if not all(layer.can_replay for layer in self.layers):
            return False
        positions = torch.full_like(recurrence.base, self.dummy_slot)[:, None]
        positions[: len(ends), 0] = torch.tensor(ends, device=positions.device)
        recurrence.base.copy_(recurrence.next_base)
        for layer in self.layers:
            layer.replay(positions)
        recurrence.next_base[: len(ends)] = positions[: len(ends), 0]
        return True

    @contextmanager
    def running(self, nodes: Nodes | None) -> Iterator[None]:
        """Context in which forward passes run the tree `nodes`."""
        self.nodes = nodes
        try:
            yield
        finally:
            self.nodes = None

    def advance(self, positions: torch.Tensor, live: int, num_before: int | None = None) -> None:
        """Set where the next forward pass writes, and how many leading slots its queries may attend to.

        Args:
            positions: `[B, n]` int64 slots.
            live: upper bound of the slots in use, known without synchronizing with the device.
            num_before: see the attribute.
        """
        self.positions, self._block = positions, None
        self.num_before = num_before = num_before if self._takes_num_before else None
        if num_before is not None:
            self.span = num_before + positions.shape[1] + 1
            return
        if self.recurrence is not None:
            self.recurrence.advance(positions, self.dummy_slot)
        self.show(live)

    def show(self, live: int) -> None:
        """Set how many leading slots queries may attend to; see `advance`."""
        self.span = (self.kernel_span if self._shows_all else min(live + 1, self.slots)) - self.takes_mask


class PackedCache(RaggedCache):
    """All `batch` rows of `cache` as one row, in which row b begins at slot b * slots: for packed prompts.

    It uses the buffers of `cache`, see `Use.PACKING`; its dummy slot is that of the last row. Queries attend to slots
    of their own row only.
    """

    def __init__(self, cache: RaggedCache, batch: int):
        super().__init__(LayerKinds(), batch * cache.slots, cache.lengths)
        self.kinds, self.layers = cache.kinds, [layer.packed(self, batch) for layer in cache.layers]
        self.hidden_states = cache.hidden_states
        self._row_slots, self._row_starts = cache.slots, cache.starts

    def attention_mask(self, slots: torch.Tensor) -> torch.Tensor:
        """`[1, 2, n, 1]` int64: the slots, and the first slot that each query attends to."""
        return torch.stack((slots, self.starts_of(slots)), dim=1)[..., None]

    def starts_of(self, slots: torch.Tensor) -> torch.Tensor:
        """The first slot that queries at `slots` `[1, n]` int64 attend to, `[1, n]` int64."""
        rows = slots // self._row_slots
        starts = rows * self._row_slots
        return starts if self._row_starts is None else starts + self._row_starts[rows]

    def advance(self, positions: torch.Tensor, live: int, num_before: int | None = None) -> None:
        self.positions, self.span, self._block = positions, self.slots, None
