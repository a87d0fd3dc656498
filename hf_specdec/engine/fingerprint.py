"""What captured work depends on besides the buffers of a call: modules, their attributes, weights, torch's settings."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdRef
from transformers import PreTrainedModel

from ..parallel.tensor_parallel import local_shard
from ..patching.linear import PLAIN_WEIGHTS

# What every module has. Children, parameters and buffers are looked at by themselves, forward hooks keep rounds from
# being captured, and no other hook is called in a forward pass without gradients.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}

# Values that are compared as they are.
_PLAIN_VALUES = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.Size}
)

_PLAIN_TENSORS = frozenset(PLAIN_WEIGHTS)

# What loading, saving, splitting and `generate()` keep on a `PreTrainedModel` for themselves.
_OF_EVERY_MODEL = frozenset(
    {
        "_compiled_call",
        "_ep_plan",
        "_fsdp_plan",
        "_keep_in_fp32_modules",
        "_keep_in_fp32_modules_strict",
        "_keys_to_ignore_on_load_missing",
        "_keys_to_ignore_on_load_unexpected",
        "_keys_to_ignore_on_save",
        "_last_compile_config",
        "_no_split_modules",
        "_pp_plan",
        "_previous_max_cache_length",
        "_skip_keys_device_placement",
        "_tp_plan",
        "all_tied_weights_keys",
        "generation_config",
        "name_or_path",
    }
)

# Of containers with more entries, or that are nested deeper, the kind and the length are compared; of objects that are
# nested half as deep, which one it is.
_MOST_ENTRIES, _DEEPEST = 1024, 6


class Fingerprint(NamedTuple):
    """What was baked into captured work; it equals another if nothing of that has changed.

    It keeps no module, function or weight alive. What is compared by identity equals nothing that came after it.

    Attributes:
        modules: weak references to all modules.
        behaviour: see `behaviour_of`.
        weights: see `weights_of`.
        settings: see `torch_settings`.
    """

    modules: tuple[weakref.ref, ...]
    behaviour: tuple
    weights: tuple
    settings: tuple

    def is_past(self, now: Fingerprint) -> bool:
        """Whether nothing can equal this one any more: a module is gone, or the modules have other weights `now`."""
        if any(module() is None for module in self.modules):
            return True
        return self.modules == now.modules and self.weights != now.weights


def fingerprint(modules: Sequence[nn.Module], device: torch.device) -> Fingerprint:
    """The fingerprint of `modules`, which compute on `device`.

    To be taken while they are not hosted, which changes how they compute for a while, and may move weights for good.

    Args:
        modules: all of some models, see `taps.modules_of`.
        device: that work is captured on.
    """
    return Fingerprint(
        tuple(map(weakref.ref, modules)), behaviour_of(modules), weights_of(modules), torch_settings(device)
    )


def behaviour_of(modules: Sequence[nn.Module]) -> tuple:
    """How `modules` compute but for their weights: classes, names of all that they have, and plain attributes.

    Attributes are numbers, strings and the like, containers of such, functions (a `forward` that was put on a module),
    and objects, such as configurations, with the plain ones of their own. A class may name attributes that no forward
    pass reads in `unread_attributes`.
    """
    numbers = {None: None, **dict(zip(modules, range(len(modules)), strict=True))}
    contents = _Contents()
    number_of, content_of, are_plain, plain = numbers.__getitem__, contents.of, _PLAIN_VALUES.issuperset, _PLAIN_VALUES
    layouts: dict[type, tuple] = {}  # of the last module of a class: most classes have one
    found: list[Any] = []
    for module in modules:
        attributes = module.__dict__
        kind = type(module)
        count, names, values_of = layouts.get(kind, _NO_LAYOUT)
        # With the same number of names, all of which are there, a module has no others.
        try:
            if count != len(attributes):
                raise KeyError
            values = values_of(attributes)
        except KeyError:
            layouts[kind] = count, names, values_of = _layout(kind, *attributes)
            values = values_of(attributes)
        if not are_plain(map(type, values)):
            values = tuple([value if type(value) in plain else content_of(value) for value in values])
        found += (kind, names, values)
        children = attributes["_modules"]
        if children:
            found += children
            found += map(number_of, children.values())
    forwards = [(content_of(kind.forward), content_of(kind.__call__)) for kind in layouts]
    return (*found, *forwards, *contents.of_objects)


def weights_of(modules: Iterable[nn.Module]) -> tuple:
    """Where parameters and buffers of `modules` are, and all that captured work knows of them but their values."""
    names: list[str] = []
    tensors: list[torch.Tensor | None] = []
    for module in modules:
        attributes = module.__dict__
        parameters, buffers = attributes["_parameters"], attributes["_buffers"]
        if parameters:
            names += parameters
            tensors += parameters.values()
        if buffers:
            names += buffers
            tensors += buffers.values()
    has_tensor = [tensor is not None for tensor in tensors]
    return names, has_tensor, _places([tensor for tensor in tensors if tensor is not None])


def _places(tensors: list[torch.Tensor]) -> tuple:
    others: list[Any] = []
    if not _PLAIN_TENSORS.issuperset(map(type, tensors)):
        tensors, others = _plain_parts(tensors)
    return (
        [tensor.data_ptr() for tensor in tensors],
        [tensor.shape for tensor in tensors],
        [tensor.stride() for tensor in tensors],
        [tensor.dtype for tensor in tensors],
        others,
    )


def torch_settings(device: torch.device) -> tuple:
    """Settings of torch, of this thread or of all, that decide what an operation on `device` launches."""
    return (
        torch.is_autocast_enabled(device.type),
        torch.get_autocast_dtype(device.type),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        # Also what `torch.set_float32_matmul_precision` sets; its own getter fails where this one was set.
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_fp16_accumulation,
    )


# A number of attributes that no module has.
_NO_LAYOUT = (-1, (), tuple)


@functools.lru_cache(maxsize=1024)
def _layout(kind: type[nn.Module], *attributes: str) -> tuple[int, tuple[str, ...], Callable[[dict], tuple]]:
    """What modules of one class that have the same attributes have in common.

    Returns:
        how many these are, the sorted names of those that forward passes may read, and what takes these out of a
        module's `__dict__` or raises `KeyError`.
    """
    unread = _OF_EVERY_MODULE | getattr(kind, "unread_attributes", frozenset())
    if issubclass(kind, PreTrainedModel):
        unread |= _OF_EVERY_MODEL
    names = sorted(set(attributes) - unread)
    # Of a single name `itemgetter` would make no tuple.
    return len(attributes), tuple(names), itemgetter("training", *names, "training")


class _Identity(WeakIdRef):
    """A weak reference that equals another one to the same object, and nothing else."""

    __slots__ = ()
    __hash__ = WeakIdRef.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and super().__eq__(other)


class _Held(NamedTuple):
    """A reference to an object that cannot have a weak one."""

    held: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


def _identity(value: Any) -> _Identity | _Held:
    try:
        return _Identity(value)
    except TypeError:
        return _Held(value)


class _Contents:
    """What can be compared later on of values that are not plain.

    Attributes:
        of_objects: which objects there were, and their attributes; many modules have one configuration.
    """

    def __init__(self) -> None:
        self.of_objects: list[Any] = []
        self._numbers: dict[int, tuple] = {}  # by `id`: what is looked at belongs to modules

    def of(self, value: Any, depth: int = 0) -> Any:
        """What equals another value's if nothing has changed; `depth` containers and objects are around `value`."""
        number = self._numbers.get(id(value))
        if number is not None:
            return number
        kind = type(value)  # some objects take their time to answer `isinstance`
        if kind in _PLAIN_VALUES or issubclass(kind, type):
            return value
        if issubclass(kind, torch.Tensor):
            return kind, _places([value])
        if issubclass(kind, (dict, list, tuple, set, frozenset)):
            return kind, self._of_entries(value, depth)
        if issubclass(kind, functools.partial):
            return kind, self._of_entries((value.func, value.args, value.keywords), depth)
        if issubclass(kind, types.MethodType):
            return kind, _identity(value.__self__), _identity(value.__func__)
        if issubclass(kind, (int, float, str, bytes)):  # such as the members of some enumerations
            return kind, value
        if issubclass(kind, (types.FunctionType, nn.Module)) or depth > _DEEPEST // 2:
            return _identity(value)
        self._numbers[id(value)] = number = (kind, len(self._numbers))
        self.of_objects += (_identity(value), self.of(getattr(value, "__dict__", None), depth + 1))
        return number

    def _of_entries(self, values: Any, depth: int) -> Any:
        if len(values) > _MOST_ENTRIES or depth == _DEEPEST:
            return len(values)
        entries = [self.of(value, depth + 1) for value in values]
        if isinstance(values, dict):
            return entries, [self.of(value, depth + 1) for value in values.values()]
        return frozenset(entries) if isinstance(values, (set, frozenset)) else entries


def _plain_parts(tensors: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], list[Any]]:
    """The tensors with memory of their own that `tensors` are made of; and what else they are."""
    plain: list[torch.Tensor] = []
    others: list[Any] = []
    for tensor in tensors:
        part = local_shard(tensor)
        if is_traceable_wrapper_subclass(part):
            names, settings = part.__tensor_flatten__()
            inner, more = _plain_parts([getattr(part, name) for name in names])
            plain += inner
            others += (type(part), len(inner), _Contents().of(settings), *more)
            continue
        plain.append(part)
        if part.data_ptr() == 0 and part.numel() > 0:
            others.append(_identity(part))
    return plain, others
