"""Cache layers of recurrent layers: linear attention, state-space models and short convolutions.

A layer keeps the state of position `base`, which includes all tokens below `base`, and the inputs of later tokens in a
ring, slot == position mod its size. A pass over a block of tokens first replays the ring from `base` to the start of
the block. Tokens that are certain (below the row's length) become part of the stored state on the way; draft tokens
only go into the ring. So nothing is rolled back or copied, and a pass reads and writes the state once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import torch

from .. import ops
from ..host.caches import OUTPUT_NAME, Cache, LinearAttentionCacheLayerMixin
from ..kernels.types import RecurrenceRing
from .key_layers import RaggedLayer
from .layer_kinds import LayerKind, LayerMemory

# Longer blocks, i.e. chunks of a prefill, run through the model's own chunked functions, since a recurrence takes one
# step a column.
MOST_STEPS = 256
# Bounds of the time steps of a state-space model without bounds.
UNBOUNDED = (0.0, float("inf"))


class StateForm(Enum):
    """How a layer of transformers' cache stores a state `[B, H, K, V]`."""

    KEYS_FIRST = auto()  # [B, H, K, V]: linear attention
    VALUES_FIRST = auto()  # [B, H, V, K]: Mamba-2
    CHANNELS = auto()  # [B, V, K], or [B, heads, V, K] if heads run one by one: Mamba-1

    def read(self, held: torch.Tensor) -> torch.Tensor:
        """The state `[B, H, K, V]` from what a layer stores."""
        if self is StateForm.KEYS_FIRST:
            return held
        return (held[:, None] if self is StateForm.CHANNELS else held).transpose(-1, -2)

    def write(self, state: torch.Tensor) -> torch.Tensor:
        """What a layer stores, from the state `[B, H, K, V]`; a copy."""
        if self is not StateForm.KEYS_FIRST:
            state = state.transpose(-1, -2)
        return (state[:, 0] if self is StateForm.CHANNELS else state).clone(memory_format=torch.contiguous_format)


def _held_states(layer: LinearAttentionCacheLayerMixin, name: str, index: int) -> torch.Tensor:
    """Entry `index` of the attribute `name` of a layer of transformers' cache; raises `ValueError` if missing."""
    held = getattr(layer, name, {}).get(index)
    if held is None:
        raise ValueError(
            f"A {type(layer).__name__} of {OUTPUT_NAME} has no {name}[{index}]; expected those of the cached text. "
            "Pass a cache that this target has filled."
        )
    return held


def _check_shape(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise `ValueError` unless states of a cache have the shape of the target's states, rows aside."""
    if found.shape[1:] != expected.shape[1:]:
        raise ValueError(
            f"{OUTPUT_NAME} holds {what} of shape {list(found.shape[1:])} a row; expected "
            f"{list(expected.shape[1:])}. Pass a cache that this target has filled."
        )


class RecurrentState:
    """One recurrent state of a layer. It replaces the tensor that a model's functions take as initial state.

    Attributes:
        state: `[B, H, K, V]` float32, of position `base`; None before the first pass.
        ring: inputs of the tokens from `base` on; None before the first pass.
        form: how transformers stores such a state.
        normalizes, has_rates: options of its calls of `ops.recurrence`.
        step_limits: bounds of the time step of a state-space model, once a pass has given them.
        heads: states of the heads after the first, if a model runs heads one by one; this state is then that of head 0.
    """

    def __init__(self, cache: Cache):
        self.cache = cache
        self.state: torch.Tensor | None = None
        self.ring: RecurrenceRing | None = None
        self.form = StateForm.KEYS_FIRST
        self.normalizes = self.has_rates = False
        self.step_limits = UNBOUNDED
        self.heads: dict[int, RecurrentState] = {}

    def __getitem__(self, index: tuple[slice, int]) -> RecurrentState:
        """The state of one head: models read it as `state[:, head]`."""
        _, head = index
        if head > 0 and head not in self.heads:
            self.heads[head] = RecurrentState(self.cache)
        return self.heads[head] if head > 0 else self

    def to(self, *args: Any, **kwargs: Any) -> RecurrentState:
        """Return itself, since it is float32 already."""
        return self

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor | None,
        chunked: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
        form: StateForm = StateForm.KEYS_FIRST,
        delta: bool = False,
        normalize: bool = False,
        scale: float = 1.0,
        rates: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Outputs `[B, n, H, V]` of a block at the cache's positions; updates the state and the ring.

        Args:
            query, key, value, decay, beta, delta, normalize, scale, rates: see `ops.recurrence`.
            chunked: the model's own function for blocks of more than `MOST_STEPS` columns, all of them certain, if it
                has one. It gets the columns that hold tokens, `[B, n]` bool, and the initial state, and returns outputs
                and the final state.
            form: see the attribute.
        """
        cache = self.cache
        if self.state is None:
            self._allocate(key, value, decay)
            self.form, self.normalizes, self.has_rates = form, normalize, rates is not None
        if chunked is not None and value.shape[1] > MOST_STEPS:
            out, final = chunked(cache.positions < cache.dummy_slot, self.state)
            self.state.copy_(final)
            return out
        bounds = cache.recurrence.base, cache.recurrence.certain, cache.positions, cache.dummy_slot
        memory, options = (self.state, self.ring), (delta, normalize, scale, rates)
        return ops.recurrence(query, key, value, decay, beta, *memory, *bounds, *options)

    def _allocate(self, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor) -> None:
        batch, _, heads, width = value.shape
        slots = self.cache.ring_slots()
        self.state = value.new_zeros(batch, heads, key.shape[-1], width, dtype=torch.float32)
        self.ring = RecurrenceRing(
            key.new_zeros(batch, slots, *key.shape[2:]),
            value.new_zeros(batch, slots, heads, width, dtype=torch.float32),
            decay.new_zeros(batch, slots, *decay.shape[2:], dtype=torch.float32),
        )

    def restart(self) -> None:
        """The ring needs no clearing: slots are read only after they have been written."""
        if self.state is not None:
            self.state.zero_()
        for head in self.heads.values():
            head.restart()

    def copy_rows(self, rows: torch.Tensor, source: RecurrentState, taken: slice | torch.Tensor) -> None:
        for head, state in source.heads.items():
            self[:, head].copy_rows(rows, state, taken)
        if source.state is None:
            return
        if self.state is None:
            parts = source.state, *source.ring
            self.state, *ring = (part.new_zeros(self.cache.batch, *part.shape[1:]) for part in parts)
            self.ring = RecurrenceRing(*ring)
        for name in ("step_limits", "form", "normalizes", "has_rates"):
            setattr(self, name, getattr(source, name))
        for ours, theirs in zip((self.state, *self.ring), (source.state, *source.ring), strict=True):
            ours[rows] = theirs[taken]

    @property
    def _by_head(self) -> list[RecurrentState]:
        return [self, *self.heads.values()]

    def replay(self, positions: torch.Tensor) -> None:
        """Pass the ring's tokens before `positions` `[B, 1]` int64, all of them certain. Not for states with rates."""
        for one in self._by_head:
            keys, updates, decays = (part.new_zeros(len(part), 1, *part.shape[2:]) for part in one.ring)
            bounds = self.cache.recurrence.base, positions[:, 0], positions, self.cache.dummy_slot
            options = False, one.normalizes, 1.0, None
            ops.recurrence(keys, keys, updates, decays, None, one.state, one.ring, *bounds, *options)

    def read(self, held: torch.Tensor, ends: torch.Tensor) -> None:
        """Read states of the first rows, at positions `ends` `[n]` int64, from what transformers stores; raises
        `ValueError` if they have another shape."""
        parts = held.unbind(1) if self.heads else [held]
        for one, part in zip(self._by_head, parts, strict=True):
            state = one.form.read(part)
            _check_shape("recurrent states", state, one.state)
            one.state[: len(ends)] = torch.where(ends[:, None, None, None] > 0, state.to(one.state), 0)

    def written(self, count: int) -> torch.Tensor:
        """The states of the first `count` rows as transformers stores them; a copy."""
        parts = [one.form.write(one.state[:count]) for one in self._by_head]
        return torch.stack(parts, dim=1) if self.heads else parts[0]


@dataclass
class ConvolutionInputs:
    """`inputs` `[B, C, n]` of a short convolution, and `ring` `[B, slots, C]` with those of earlier tokens. It replaces
    the tensor that a model's function takes."""

    cache: Cache
    ring: torch.Tensor
    inputs: torch.Tensor


@dataclass
class ConvolutionState:
    """The inputs before a block of convolution `index` of `layer`. It replaces the tensor that functions update."""

    layer: RecurrentLayer
    index: int


class _Inputs(NamedTuple):
    """Last inputs of each row, `[B, slots, ...]`; the value before a row's first token; how many transformers keeps."""

    ring: torch.Tensor
    fill: float
    width: int


class RecurrentLayer(LayerMemory, LinearAttentionCacheLayerMixin):
    """Recurrent states and convolution inputs of one layer, `kind.num_states` of each, allocated at the first pass."""

    def __init__(self, cache: Cache, kind: LayerKind):
        num_states = kind.num_states
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states=num_states)
        LayerMemory.__init__(self, cache, kind)
        # Makes most models run a single token through the functions for several tokens.
        self.record_past = True
        self.has_previous_state = dict.fromkeys(range(num_states), True)
        self.recurrent_states = {index: RecurrentState(cache) for index in range(num_states)}
        self.conv_states = {index: ConvolutionState(self, index) for index in range(num_states)}
        self._inputs: dict[int, _Inputs] = {}

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """States and rings are allocated when they are first needed."""

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> ConvolutionInputs | torch.Tensor:
        """What a model's convolution runs over, for inputs `[B, C, n]`. Up to `MOST_STEPS` columns it is meant for the
        function's replacement, which also stores them; beyond, `[B, C, conv_kernel_size - 1 + n]` with those before."""
        if conv_states.shape[-1] > MOST_STEPS:
            return self.extended(conv_states, state_idx, conv_kernel_size)
        ring = self._ring(state_idx, conv_states.transpose(1, 2), conv_kernel_size, conv_kernel_size)
        return ConvolutionInputs(self._cache, ring, conv_states)

    def _ring(
        self, state_idx: int, inputs: torch.Tensor, kernel_size: int, width: int, fill: float = 0
    ) -> torch.Tensor:
        """The ring `[B, slots, ...]` for inputs `[B, n, ...]`, allocated at the first pass."""
        if state_idx not in self._inputs:
            slots = self._cache.ring_slots(kernel_size)
            ring = inputs.new_full((len(inputs), slots, *inputs.shape[2:]), fill)
            self._inputs[state_idx] = _Inputs(ring, fill, width)
        return self._inputs[state_idx].ring

    def with_former(
        self, inputs: torch.Tensor, state_idx: int, count: int, fill: float = 0, width: int | None = None
    ) -> torch.Tensor:
        """Store inputs `[B, n, ...]` of a block, at the cache's positions, and return them after those of the `count`
        tokens before.

        Args:
            state_idx: the convolution of the inputs; no other method stores them.
            fill: the value before the first token of a row.
            width: number of tokens whose inputs transformers' layer stores; `count` if None.

        Returns:
            `[B, count + n, ...]`.
        """
        ring = self._ring(state_idx, inputs, count + 1, count if width is None else width, fill)
        block = self._cache.block
        positions = block.first + torch.arange(-count, inputs.shape[1], device=inputs.device)
        whole = block.at(positions, ring, inputs)
        block.keep(ring, inputs)
        return torch.where(ops.with_dims_of(positions >= 0, whole), whole, self._inputs[state_idx].fill)

    def extended(self, inputs: torch.Tensor, state_idx: int, kernel_size: int) -> torch.Tensor:
        """Store the inputs `[B, C, n]` of a convolution, and return them after those before,
        `[B, C, kernel_size - 1 + n]`."""
        former = self.with_former(inputs.transpose(1, 2), state_idx, kernel_size - 1, width=kernel_size)
        return former.transpose(1, 2)

    def update_recurrent_state(self, recurrent_states: Any, state_idx: int = 0, **kwargs: Any) -> Any:
        """Do nothing: the state was updated where it was used. An empty tensor stands for states of several heads.
        Raises `TypeError` if the model has computed a state by a function of its own."""
        is_empty = isinstance(recurrent_states, torch.Tensor) and recurrent_states.numel() == 0
        if not isinstance(recurrent_states, RecurrentState) and not is_empty:
            raise TypeError(
                f"A recurrent layer has computed a state by itself ({type(recurrent_states).__name__}); expected it to "
                "call one of the functions that recurrent_functions replaces. The model cannot run on this cache."
            )
        return recurrent_states

    def restart(self) -> None:
        for state in self.recurrent_states.values():
            state.restart()
        for inputs in self._inputs.values():
            inputs.ring.fill_(inputs.fill)

    def copy_rows(self, rows: torch.Tensor, source: RecurrentLayer, taken: slice | torch.Tensor, slots: int) -> None:
        super().copy_rows(rows, source, taken, slots)
        for index, state in source.recurrent_states.items():
            self.recurrent_states[index].copy_rows(rows, state, taken)
        for index, theirs in source._inputs.items():
            if index not in self._inputs:
                ring = theirs.ring.new_zeros(self._cache.batch, *theirs.ring.shape[1:])
                self._inputs[index] = theirs._replace(ring=ring)
            self._inputs[index].ring[rows] = theirs.ring[taken]

    @property
    def can_replay(self) -> bool:
        return not any(state.has_rates for state in self.recurrent_states.values())

    @property
    def bounds_steps(self) -> bool:
        return any(state.step_limits != UNBOUNDED for state in self.recurrent_states.values())

    def replay(self, positions: torch.Tensor) -> None:
        for state in self._used_states().values():
            state.replay(positions)

    def _used_states(self) -> dict[int, RecurrentState]:
        """The recurrent states that a pass has allocated, by index: a layer may have convolutions only, or neither."""
        return {index: state for index, state in self.recurrent_states.items() if state.state is not None}

    def read_states(self, layer: LinearAttentionCacheLayerMixin, ends: torch.Tensor) -> None:
        for index, state in self._used_states().items():
            state.read(_held_states(layer, "recurrent_states", index), ends)
        rows = torch.arange(len(ends), device=ends.device)[:, None]
        for index, (ring, _, width) in self._inputs.items():
            inputs = _held_states(layer, "conv_states", index)[..., -width:].movedim(-1, 1)
            _check_shape("inputs of a convolution", inputs[:, 0], ring[:, 0])
            positions = ends[:, None] + torch.arange(-inputs.shape[1], 0, device=ends.device)
            slots = positions % ring.shape[1]
            ring[rows, slots] = torch.where(ops.with_dims_of(positions >= 0, ring), inputs.to(ring), ring[rows, slots])

    def write_states(self, layer: LinearAttentionCacheLayerMixin, ends: torch.Tensor) -> Callable[[], None]:
        rows = torch.arange(len(ends), device=ends.device)[:, None]
        states, inputs = {index: state.written(len(ends)) for index, state in self._used_states().items()}, {}
        for index, (ring, fill, width) in self._inputs.items():
            positions = ends[:, None] + torch.arange(-width, 0, device=ends.device)
            held = ring[rows, positions % ring.shape[1]]
            held = torch.where(ops.with_dims_of(positions >= 0, held), held, fill)
            inputs[index] = held.movedim(1, -1).clone(memory_format=torch.contiguous_format)
        for index, held in states.items():
            if not layer.is_recurrent_states_initialized[index]:
                layer.lazy_initialization(recurrent_states=held, state_idx=index)
        for index, held in inputs.items():
            if not layer.is_conv_states_initialized[index]:
                layer.lazy_initialization(conv_states=held, state_idx=index, conv_kernel_size=held.shape[-1])

        def write() -> None:
            for index, held in states.items():
                layer.recurrent_states[index].copy_(held)
            for index, held in inputs.items():
                # In place, since graphs may read them; a layer that records its past stores more columns.
                is_same = layer.conv_states[index].shape == held.shape
                layer.conv_states[index] = layer.conv_states[index].copy_(held) if is_same else held
                layer.has_previous_state[index] = True

        return write


class KeyedRecurrentLayer(RecurrentLayer, RaggedLayer):
    """A layer with keys and values besides recurrent states."""

    lazy_initialization = RaggedLayer.lazy_initialization

    def __init__(self, cache: Cache, kind: LayerKind):
        RaggedLayer.__init__(self, cache, kind)
        RecurrentLayer.__init__(self, cache, kind)
