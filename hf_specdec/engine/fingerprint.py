"""What a captured graph depends on besides its buffers: modules, their attributes, weights, torch settings."""

from __future__ import annotations

import functools
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain, compress
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from ..host.modeling import UNREAD_ATTRIBUTES
from ..parallel.tensor_parallel import local_shard
from ..patching.hidden_states import ModuleTree
from ..patching.linear import PLAIN_WEIGHTS
from ..patching.variants import Identity, files_of, functions_of

# Attributes of every module. Children, parameters and buffers are compared separately; modules with forward hooks are
# not captured; other hooks are not called in a forward pass without gradients.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}

# Values that are compared as they are.
_PLAIN_VALUES = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.Size}
)

_PLAIN_TENSORS = frozenset(PLAIN_WEIGHTS)

# Larger or more deeply nested containers are compared by kind and length only; objects nested half as deep by identity.
_MOST_ENTRIES, _DEEPEST = 1024, 6


class Fingerprint(NamedTuple):
    """What a captured graph has baked in; equal to a later one if none of it has changed.

    It keeps no module, function or weight alive. What is compared by identity never equals an object created later.

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
        """Whether no future fingerprint can equal this one: a module is gone, or the same modules have other weights
        `now`.
        """
        if any(module() is None for module in self.modules):
            return True
        return self.modules == now.modules and self.weights != now.weights


def fingerprint(tree: ModuleTree, device: torch.device) -> Fingerprint:
    """The fingerprint of modules, which compute on `device`.

    To be taken while the modules are not patched: patching changes how they compute, and may move weights for good.

    Args:
        tree: all modules of target and drafter.
        device: of the graphs.
    """
    modules = tuple(map(weakref.ref, tree.modules))
    return Fingerprint(modules, behaviour_of(tree), weights_of(tree), torch_settings(device))


def behaviour_of(tree: ModuleTree) -> tuple:
    """How modules compute except for their weights: classes, names of children and attributes, values of attributes,
    and the functions of their files.

    Compared by value are numbers, strings and the like, containers of them, and the attributes of objects such as
    configurations; functions (a `forward` set on a module) are compared by identity. A class may list attributes that
    no forward pass reads in `unread_attributes`.
    """
    contents = _Contents()
    attributes, kinds = tree.attributes, list(map(type, tree.modules))
    by_kind: defaultdict[type, list[dict]] = defaultdict(list)
    for kind, one in zip(kinds, attributes, strict=True):
        by_kind[kind].append(one)
    values = [_values_of(kind, alike, contents) for kind, alike in by_kind.items()]
    children = list(map(itemgetter("_modules"), attributes))
    names = list(chain.from_iterable(children))
    # A child is among `modules`, which a fingerprint compares by references: the same `id` is the same module.
    ids = [id(child) for some in children if some for child in some.values()]
    forwards = [(contents.of(kind.forward), contents.of(kind.__call__)) for kind in by_kind]
    functions = list(map(weakref.ref, functions_of(files_of(by_kind))))  # equal only if they are identical
    return kinds, values, list(map(len, children)), names, ids, forwards, functions, contents.of_objects


def _values_of(kind: type[nn.Module], attributes: list[dict], contents: _Contents) -> list[Any]:
    """Names and values of the attributes of modules of class `kind` that a forward pass may read: a tuple of each
    attribute's values, if all have the same ones, as is so with most classes; else of each module.
    """
    count, names, values_of = _layout(kind, *attributes[0])
    # If the number is the same and all names are there, there are no others.
    try:
        if set(map(len, attributes)) != {count}:
            raise KeyError
        values = list(map(values_of, attributes))
    except KeyError:
        layouts = [_layout(kind, *one) for one in attributes]
        values = [layout[2](one) for layout, one in zip(layouts, attributes, strict=True)]
        if any(layout[1] != names for layout in layouts):
            return [(layout[1], contents.of_column(one)) for layout, one in zip(layouts, values, strict=True)]
    columns = zip(*values, strict=True)
    return [names, *[one if _PLAIN_VALUES.issuperset(map(type, one)) else contents.of_column(one) for one in columns]]


def weights_of(tree: ModuleTree) -> tuple:
    """Addresses, shapes, strides and dtypes of parameters and buffers of modules: all that a graph has baked in."""
    pairs = map(itemgetter("_parameters", "_buffers"), tree.attributes)
    owned = list(filter(None, chain.from_iterable(pairs)))
    names = list(chain.from_iterable(owned))
    tensors = list(chain.from_iterable([one.values() for one in owned]))
    has_tensor = [tensor is not None for tensor in tensors]
    return names, has_tensor, _places(list(compress(tensors, has_tensor)))


def versions_of(tree: ModuleTree) -> list[int | None]:
    """How often parameters and buffers of modules were written to in place; None for tensors of inference mode, which
    do not count it. Writes through `.data` are not counted, nor are those of fused optimizers, see
    `optimizer_steps`.
    """
    pairs = map(itemgetter("_parameters", "_buffers"), tree.attributes)
    tensors = chain.from_iterable(owned.values() for owned in chain.from_iterable(pairs) if owned)
    return [None if one.is_inference() else one._version for one in tensors if one is not None]


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
    """Global and thread-local settings of torch that decide which kernels an operation on `device` launches."""
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


@functools.lru_cache(maxsize=1024)
def _layout(kind: type[nn.Module], *attributes: str) -> tuple[int, tuple[str, ...], Callable[[dict], tuple]]:
    """How to read modules of class `kind` with these `attributes`.

    Returns:
        the number of attributes, the sorted names of those that a forward pass may read, and a function that takes
        their values from a module's `__dict__` or raises `KeyError`.
    """
    unread = _OF_EVERY_MODULE | getattr(kind, "unread_attributes", frozenset())
    if issubclass(kind, PreTrainedModel):
        unread |= UNREAD_ATTRIBUTES
    names = sorted(set(attributes) - unread)
    # Of a single name `itemgetter` would make no tuple.
    return len(attributes), tuple(names), itemgetter(*(names or ["training"]), "training")


class _Held(NamedTuple):
    """A reference to an object that cannot have a weak one."""

    held: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


def _identity(value: Any) -> Identity | _Held:
    try:
        return Identity(value)
    except TypeError:
        return _Held(value)


class _Contents:
    """Comparable stand-ins for values that are not plain.

    Attributes:
        of_objects: identities of the objects that were met, and their attributes; many modules share a configuration.
    """

    def __init__(self) -> None:
        self.of_objects: list[Any] = []
        self._numbers: dict[int, tuple] = {}  # by `id`, which is unique as modules keep these objects alive

    def of(self, value: Any, depth: int = 0) -> Any:
        """A stand-in that is equal later if `value` has not changed; `depth` is the level of nesting."""
        kind = type(value)  # `isinstance` is slow for some objects
        if kind in _PLAIN_VALUES or issubclass(kind, type):
            return value
        number = self._numbers.get(id(value))
        if number is not None:
            return number
        if kind is types.FunctionType:
            return weakref.ref(value)  # functions are equal only if they are identical
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
        if issubclass(kind, nn.Module) or depth > _DEEPEST // 2:
            return _identity(value)
        self._numbers[id(value)] = number = (kind, len(self._numbers))
        self.of_objects += (_identity(value), self.of(getattr(value, "__dict__", None), depth + 1))
        return number

    def of_column(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Stand-ins for the values that one attribute has in several modules, some of which are not plain."""
        if len(set(map(id, values))) == 1:  # such as a configuration
            return (self.of(values[0]),) * len(values)
        return tuple(self._of_all(values, 0))

    def _of_entries(self, values: Any, depth: int) -> Any:
        if len(values) > _MOST_ENTRIES or depth == _DEEPEST:
            return len(values)
        entries = self._of_all(values, depth + 1)
        if isinstance(values, dict):
            return entries, self._of_all(values.values(), depth + 1)
        return frozenset(entries) if isinstance(values, (set, frozenset)) else entries

    def _of_all(self, values: Iterable[Any], depth: int) -> list[Any]:
        return [value if type(value) in _PLAIN_VALUES else self.of(value, depth) for value in values]


def _plain_parts(tensors: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], list[Any]]:
    """The plain tensors that `tensors`, quantised or split ones, consist of; and the rest of what they are."""
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
