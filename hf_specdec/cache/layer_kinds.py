"""Kinds of memory of layers, and other parts of models that run by code of their own on an engine: the two registries.
Engines know these interfaces only.
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
    """What is done with the memory of layers only if the kinds of all of them allow it."""

    PACKING = auto()  # prompts of several rows are prefilled as one row
    PREFIX_REUSE = auto()  # the beginning of a text is copied from another row
    ROW_MEMORY = auto()  # only the leading slots of a row have memory
    BATCH_INVARIANCE = auto()  # outputs of a row do not depend on other rows and on drafts
    REPEATED_POSITIONS = auto()  # positions are run more than once, without masks
    UNROLLED_STEPS = auto()  # training drafts several tokens from every slot at once
    OTHER_INPUTS = auto()  # prompts are more than tokens, or their positions do not count from 0
    OTHER_INPUTS_CONTINUED = auto()  # such prompts continue a cache
    TREES = auto()  # drafts of a round are a tree: they are stored at slots that are not their positions


# Given position ids `[B, n]` int64, and of the rows `[B]` int64 the lengths of the prompts and how many more tokens the
# longest prompt of the batch has: the position ids that a patched model takes.
PositionMarker = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class PlugIn:
    """A part of some models that runs by code of its own. A plug-in is a class without instances.

    Attributes:
        patches: given models, a context in which the part of them runs on a `RaggedCache`; elsewhere it runs as it is.
    """

    patches: ClassVar[Callable[..., Patch] | None] = None

    @classmethod
    def why_not_hosted(cls, model: PreTrainedModel) -> str | None:
        """The reason why `model` cannot run on a `RaggedCache`, as far as it is known beforehand: follows "its"."""
        return None

    @classmethod
    def why_not_same(cls, model: PreTrainedModel, limit: float) -> str | None:
        """The reason why `model`, not patched yet and run on a few tokens, has logits that differ by more than `limit`,
        relative to their spread, where it is patched."""
        return None

    @classmethod
    def why_not_used(cls, model: PreTrainedModel, use: Use) -> str | None:
        return None

    @classmethod
    def why_not_texts(
        cls, model: PreTrainedModel, width: int, longest: int, cached: int, is_chunked: bool
    ) -> str | None:
        """The reason why texts of which up to `longest` columns are run cannot run on the static engine; of prompts of
        `width` columns `cached` are in the call's cache, the others are run in chunks or not."""
        return None

    @classmethod
    def why_not_alone(cls, model: PreTrainedModel, longest: int) -> str | None:
        """The reason why a row depends on the length of others, where texts of up to `longest` tokens are run."""
        return None

    @classmethod
    def forgets_states(cls, model: PreTrainedModel) -> bool:
        """Whether layers of `model`, which is not patched, begin without a state in passes over several tokens."""
        return False

    @classmethod
    def longest_with_drafts(cls, model: PreTrainedModel, length: int) -> int | None:
        """Up to which length drafts after `length` tokens are run together as each would be alone; None for any."""
        return None

    @classmethod
    def position_marker(cls, model: PreTrainedModel) -> PositionMarker | None:
        """What turns position ids into those that `model` takes inside of `patches`; None where it takes them."""
        return None


class LayerMemory:
    """A layer of `cache`, a `RaggedCache`. Models call it as a layer of transformers' cache; this is what engines call.

    `rows` are `[n]` int64; what is read from transformers' caches, and written to them, is of the first rows.
    """

    is_compileable = True
    # Whether a pass has named bounds of time steps, which are those of tokens of prompts only.
    bounds_steps = False
    # Whether a state can be brought further by what rings hold, without a pass of the model.
    can_replay = True

    def __init__(self, cache: Cache, kind: LayerKind):
        self._cache = cache

    @property
    def is_allocated(self) -> bool:
        """Whether a pass has allocated its buffers."""
        return False

    @property
    def slot_buffers(self) -> Sequence[torch.Tensor]:
        """Buffers `[B, slots, heads, width]`, in which a token is at its slot; none before the first pass."""
        return ()

    def place(self, *buffers: torch.Tensor) -> None:
        """Take `buffers`, of the shapes of `slot_buffers`, instead of buffers of its own."""

    def restart(self) -> None:
        """Begin with no text in any row. What a slot holds need not be cleared: it is not visible to later texts."""

    def copy_rows(self, rows: torch.Tensor, source: Any, taken: slice | torch.Tensor, slots: int) -> None:
        """Let `rows` be the rows `taken` of `source`, of another cache: `slots` leading slots, and all that is not by
        slot."""

    def packed(self, cache: Cache, batch: int) -> LayerMemory:
        """This layer with its `batch` rows one behind the other, for the `PackedCache` `cache`; see `Use.PACKING`."""
        raise NotImplementedError(f"{type(self).__name__} does not implement packed(), but its kind allows packing.")

    def read_slots(self, layer: Any, padding: Sequence[int], columns: int, batch: int, device: torch.device) -> None:
        """Copy what `layer` of transformers' cache holds in its first `columns` to slots.

        Args:
            padding: of each row, columns before its first token.
            batch, device: of buffers that are not allocated yet.
        """

    def write_slots(self, cache: Any, index: int, slots: torch.Tensor) -> None:
        """Append `slots` `[n, columns]` int64 of the first n rows to layer `index` of `cache`, one of transformers."""

    def read_states(self, layer: Any, ends: torch.Tensor) -> None:
        """Take states from `layer` of transformers' cache, with `ends` `[n]` int64 tokens of each row in them; raises
        `ValueError` if it lacks some, or they have other shapes than those that a pass has allocated."""

    def write_states(self, layer: Any, ends: torch.Tensor) -> Callable[[], None]:
        """Make room in `layer` of transformers' cache for the states, which are those of positions `ends` `[n]` int64;
        returns what writes them there."""
        return lambda: None

    def replay(self, positions: torch.Tensor) -> None:
        """Bring states to `positions` `[B, 1]` int64, up to which all tokens are certain, by what rings hold."""


@dataclass(frozen=True)
class LayerKind(PlugIn):
    """A kind of memory; its fields are what layers of the kind differ by.

    Attributes:
        layer_types: entries of `layer_types` of configurations that name layers of the kind.
        sources: classes of layers of transformers' caches, not subclasses, that it is read from where a call continues
            one.
        is_written: whether layers of transformers' caches take what it holds; else the model fills them.
        obstacles: reasons why a `Use` is not allowed; each follows "it has".
        is_empty, stores_keys, is_by_slot: whether it stores nothing, keys and values, and all of it by slot.
        keeps_states: whether it keeps states of one position of each row, from which no token can be removed.
        reads_mask: whether what reads it takes a mask over slots, and cannot be called by the attention interface.
        window: tokens of the windows that it keeps something of; 0 without windows.
    """

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
        """The kind of a layer of transformers' cache for a model, if it is this one; else None."""
        raise NotImplementedError(f"{cls.__name__} does not implement detect().")

    @property
    def layer_class(self) -> type[LayerMemory]:
        raise NotImplementedError(f"{type(self).__name__} does not implement layer_class.")


# Why attention of a modeling file, which adds a mask to its scores, does not allow a use.
_MASK_OBSTACLES = dict.fromkeys(
    (Use.PACKING, Use.ROW_MEMORY, Use.BATCH_INVARIANCE, Use.TREES),
    "attention of its own; expected layers that use transformers' attention interface",
)


@dataclass(frozen=True)
class LayerKinds:
    """The kinds of the `layers` of a model's cache.

    Attributes:
        takes_mask: whether attention is that of the modeling file, which adds a mask to its scores.
        key_dtype: in which keys and values are stored: that of the model if None, else float8, with scales.
    """

    layers: tuple[LayerKind, ...] = ()
    takes_mask: bool = False
    key_dtype: torch.dtype | None = None

    def __len__(self) -> int:
        return len(self.layers)

    def __bool__(self) -> bool:
        return bool(self.layers)

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
        """Whether a cache of transformers knows how long its texts are: not if it has states only."""
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
    """Class decorator: engines use a `PlugIn`, or find a `LayerKind`; one that is registered later is found first."""
    _registered.append(plug_in)
    return plug_in


def plug_ins() -> list[type[PlugIn]]:
    """All that are registered, kinds of memory included."""
    return list(_registered)


def patches_of(parts: Iterable[type[PlugIn]], *models: nn.Module) -> Iterator[Patch]:
    """The patches of `models`; each is to be entered before the next is looked up, which depends on it."""
    for part in parts:
        if part.patches is not None:
            yield part.patches(*models)


def parts_of(kinds: LayerKinds) -> list[type[PlugIn]]:
    """The kinds of layers, and the plug-ins that are no kinds of layers."""
    return [*dict.fromkeys(map(type, kinds)), *(one for one in _registered if not issubclass(one, LayerKind))]


def layer_kinds() -> list[type[LayerKind]]:
    """The registered kinds of memory, those first that are to be asked first."""
    return [one for one in reversed(_registered) if issubclass(one, LayerKind)]


def detect(layers: Sequence[Any]) -> tuple[LayerKind, ...]:
    """The kinds of `layers` of transformers' cache for a model."""
    kinds = layer_kinds()
    return tuple(next(kind for kind in (one.detect(layer) for one in kinds) if kind is not None) for layer in layers)


def known_layer_types() -> frozenset[str]:
    """Entries of `layer_types` of configurations whose kinds are registered."""
    return frozenset().union(*(kind.layer_types for kind in layer_kinds()))


def first_reason(reasons: Iterable[str | None]) -> str | None:
    """The first of `reasons` that is one."""
    return next((reason for reason in reasons if reason is not None), None)
