"""The two registries: kinds of memory of layers, and other parts of models that need code of their own on an engine.
Engines know only the interfaces here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from ..host.caches import Cache
from ..modules.patch import Patch


class Use(Enum):
    """A use of the memory of layers that the kinds of all layers must allow."""

    PACKING = auto()  # prompts of several rows are prefilled as one row
    PREFIX_REUSE = auto()  # a prefix is copied from another row
    ROW_MEMORY = auto()  # only the leading slots of a row have memory
    BATCH_INVARIANCE = auto()  # outputs of a row do not depend on other rows and on drafts
    REPEATED_POSITIONS = auto()  # positions are run more than once, without masks
    UNROLLED_STEPS = auto()  # training drafts several tokens from every slot at once
    OTHER_INPUTS = auto()  # prompts are more than tokens, or their positions do not count from 0
    OTHER_INPUTS_CONTINUED = auto()  # such prompts continue a cache
    TREES = auto()  # drafts of a round are a tree: they are stored at slots that are not their positions


# Maps position ids `[B, n]` int64 to the position ids that a patched model takes. The other arguments are `[B]` int64:
# the lengths of the prompts, and how many more tokens the longest prompt of the batch has.
PositionMarker = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class PlugIn:
    """A part of some models that needs code of its own on an engine. A plug-in is a class without instances.

    Attributes:
        patches: given models, a context in which their part runs on a `RaggedCache`; elsewhere it runs unpatched.
    """

    patches: ClassVar[Callable[..., Patch] | None] = None

    @classmethod
    def why_not_hosted(cls, model: PreTrainedModel) -> str | None:
        """The reason why `model` cannot run on a `RaggedCache`, if known beforehand; it follows "its"."""
        return None

    @classmethod
    def why_not_same(cls, model: PreTrainedModel, limit: float) -> str | None:
        """The reason why the logits of `model` differ by more than `limit`, relative to their spread, once it is
        patched; compares an unpatched and a patched pass over a few tokens."""
        return None

    @classmethod
    def why_not_used(cls, model: PreTrainedModel, use: Use) -> str | None:
        return None

    @classmethod
    def why_not_texts(
        cls, model: PreTrainedModel, width: int, longest: int, cached: int, is_chunked: bool
    ) -> str | None:
        """The reason why texts with up to `longest` columns cannot run on the static engine. Their prompts have `width`
        columns; the call's cache holds the first `cached` of them, and the others run in chunks if `is_chunked`."""
        return None

    @classmethod
    def why_not_alone(cls, model: PreTrainedModel, longest: int) -> str | None:
        """The reason why a row depends on the length of other rows, for texts of up to `longest` tokens."""
        return None

    @classmethod
    def forgets_states(cls, model: PreTrainedModel) -> bool:
        """Whether layers of the unpatched `model` begin without a state in passes over several tokens."""
        return False

    @classmethod
    def longest_with_drafts(cls, model: PreTrainedModel, length: int) -> int | None:
        """The longest text up to which drafts after `length` tokens can be run together; None for any length."""
        return None

    @classmethod
    def position_marker(cls, model: PreTrainedModel) -> PositionMarker | None:
        """What maps position ids to those that `model` takes inside `patches`; None if it takes them as they are."""
        return None


class LayerMemory:
    """A layer of `cache`, a `RaggedCache`: the methods for engines. Models call it like a layer of transformers' cache.

    `rows` are `[n]` int64. What is read from or written to transformers' caches belongs to the first rows.
    """

    is_compileable = True
    # Whether a pass has given bounds of time steps, which apply to tokens of prompts only.
    bounds_steps = False
    # Whether the rings suffice to advance a state without a pass of the model.
    can_replay = True

    def __init__(self, cache: Cache, kind: LayerKind):
        self._cache = cache

    def get_max_length(self) -> int:
        return self._cache.slots

    @property
    def slot_buffers(self) -> Sequence[torch.Tensor]:
        """Buffers `[B, slots, heads, width]` that store a token at its slot; empty before the first pass."""
        return ()

    def place(self, *buffers: torch.Tensor) -> None:
        """Use `buffers`, with the shapes of `slot_buffers`, instead of allocating."""

    def restart(self) -> None:
        """Begin with no text in any row. Slots need no clearing, since later texts do not see what they hold."""

    def copy_rows(self, rows: torch.Tensor, source: Any, taken: slice | torch.Tensor, slots: int) -> None:
        """Copy the rows `taken` of `source`, of another cache, to `rows`: `slots` leading slots, and all that is not
        by slot."""

    def packed(self, cache: Cache, batch: int) -> LayerMemory:
        """This layer with its `batch` rows as one row, for the `PackedCache` `cache`; see `Use.PACKING`."""
        raise NotImplementedError(f"{type(self).__name__} does not implement packed(), but its kind allows packing.")

    def read_slots(self, layer: Any, padding: Sequence[int], columns: int, batch: int, device: torch.device) -> None:
        """Copy the first `columns` of `layer` of transformers' cache to slots.

        Args:
            padding: columns before the first token, for each row.
            batch, device: of buffers that are not allocated yet.
        """

    def write_slots(self, cache: Any, index: int, slots: torch.Tensor) -> None:
        """Append `slots` `[n, columns]` int64 of the first n rows to layer `index` of transformers' `cache`."""

    def read_states(self, layer: Any, ends: torch.Tensor) -> None:
        """Read states from `layer` of transformers' cache, which include `ends` `[n]` int64 tokens of each row. Raises
        `ValueError` if states are missing, or have other shapes than a pass has allocated."""

    def write_states(self, layer: Any, ends: torch.Tensor) -> Callable[[], None]:
        """Make room for the states, at positions `ends` `[n]` int64, in `layer` of transformers' cache; returns a
        function that writes them."""
        return lambda: None

    def replay(self, positions: torch.Tensor) -> None:
        """Advance states from the rings to `positions` `[B, 1]` int64, up to which all tokens are certain."""


@dataclass(frozen=True)
class LayerKind(PlugIn):
    """A kind of memory; its fields are what distinguishes layers of the kind.

    Attributes:
        layer_class: the class of its layers of a `RaggedCache`.
        layer_types: entries of `layer_types` in configurations for layers of the kind.
        sources: classes of transformers' cache layers (not subclasses) that can be read when a call continues a cache.
        is_written: whether its contents can be written to transformers' cache layers; else the model has to fill them.
        obstacles: reasons why a `Use` is not allowed; each follows "it has".
        is_empty, stores_keys, is_by_slot: whether it stores nothing; keys and values; everything by slot.
        keeps_states: whether it keeps states of one position of each row, from which no token can be removed.
        reads_mask: whether its reader takes a mask over slots, and cannot be called by the attention interface.
        window: tokens of the windows that it summarises; 0 without windows.
    """

    layer_class: ClassVar[type[LayerMemory]]
    layer_types: ClassVar[frozenset[str]] = frozenset()
    sources: ClassVar[tuple[type, ...]] = ()
    is_written: ClassVar[bool] = True
    obstacles: ClassVar[Mapping[Use, str]] = dict.fromkeys(Use, "layers whose kind does not allow it")
    is_empty: ClassVar[bool] = False
    stores_keys: ClassVar[bool] = False
    keeps_states: ClassVar[bool] = False
    is_by_slot: ClassVar[bool] = True
    reads_mask: ClassVar[bool] = False
    window: ClassVar[int] = 0

    @classmethod
    def detect(cls, layer: Any) -> LayerKind | None:
        """The kind of a layer of transformers' cache, if it is this kind; else None."""
        raise NotImplementedError(f"{cls.__name__} does not implement detect().")


# Why a use is not allowed for attention of a modeling file that adds a mask to its scores.
_MASK_OBSTACLES = dict.fromkeys(
    (Use.PACKING, Use.ROW_MEMORY, Use.BATCH_INVARIANCE, Use.TREES),
    "attention of its own; expected layers that use transformers' attention interface",
)


@dataclass(frozen=True)
class LayerKinds:
    """The kinds of the `layers` of a model's cache.

    Attributes:
        takes_mask: whether attention is that of the modeling file, which adds a mask to its scores.
        key_dtype: dtype of stored keys and values: None for that of the model, else float8, with scales.
    """

    layers: tuple[LayerKind, ...] = ()
    takes_mask: bool = False
    key_dtype: torch.dtype | None = None

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerKind]:
        return iter(self.layers)

    def storing(self, key_dtype: torch.dtype | None) -> LayerKinds:
        return self if key_dtype == self.key_dtype else replace(self, key_dtype=key_dtype)

    @cached_property
    def stores_keys(self) -> bool:
        return any([kind.stores_keys for kind in self.layers])

    @cached_property
    def keeps_states(self) -> bool:
        return any([kind.keeps_states for kind in self.layers])

    @property
    def knows_length(self) -> bool:
        """Whether a cache of transformers knows the length of its texts; it does not if it holds states only."""
        return self.stores_keys or not self.keeps_states

    @cached_property
    def is_by_slot(self) -> bool:
        return all([kind.is_by_slot for kind in self.layers])

    @cached_property
    def reads_mask(self) -> bool:
        return any([kind.reads_mask for kind in self.layers])

    @property
    def longest_window(self) -> int:
        return max([kind.window for kind in self.layers], default=0)

    def why_not(self, use: Use) -> str | None:
        """The reason why `use` is not allowed: what the model has, and what was expected. None if it is allowed."""
        of_mask = _MASK_OBSTACLES.get(use) if self.takes_mask else None
        return first_reason([*(kind.obstacles.get(use) for kind in dict.fromkeys(self.layers)), of_mask])


_P = TypeVar("_P", bound=type[PlugIn])
_registered: list[type[PlugIn]] = []


def register(plug_in: _P) -> _P:
    """Class decorator that registers a `PlugIn` or `LayerKind`; `detect` asks kinds that are registered later first."""
    _registered.append(plug_in)
    return plug_in


def plug_ins() -> list[type[PlugIn]]:
    """All registered plug-ins, kinds of memory included."""
    return list(_registered)


def patches_of(parts: Iterable[type[PlugIn]], *models: nn.Module) -> Iterator[Patch]:
    """The patches of `models`; each must be entered before the next is looked up, which depends on it."""
    for part in parts:
        if part.patches is not None:
            yield part.patches(*models)


def parts_of(kinds: LayerKinds) -> list[type[PlugIn]]:
    """The kinds of the layers, and all plug-ins that are not kinds."""
    return [*dict.fromkeys(map(type, kinds)), *(one for one in _registered if not issubclass(one, LayerKind))]


def layer_kinds() -> list[type[LayerKind]]:
    """The registered kinds of memory, in the order in which they are asked to `detect`."""
    return [one for one in reversed(_registered) if issubclass(one, LayerKind)]


def detect(layers: Sequence[Any]) -> tuple[LayerKind, ...]:
    """The kinds of `layers` of transformers' cache for a model."""
    kinds = layer_kinds()
    return tuple(next(kind for kind in (one.detect(layer) for one in kinds) if kind is not None) for layer in layers)


def known_layer_types() -> frozenset[str]:
    """All entries of `layer_types` in configurations that have a registered kind."""
    return frozenset().union(*(kind.layer_types for kind in layer_kinds()))


def first_reason(reasons: Iterable[str | None]) -> str | None:
    """The first of `reasons` that is not None, if any."""
    return next((reason for reason in reasons if reason is not None), None)
