"""Signatures of models, which tell whether what was found out about a model earlier still holds.

A `Signature` reads a model in one walk over its modules. What was found out by running a model is kept by its `kind`;
patches and captured graphs by its `Fingerprint`; keys and values of prompts by that and by its `versions`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import threading
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import chain, compress
from operator import attrgetter, contains, itemgetter
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from ..host.modeling import (
    ALL_ATTENTION_FUNCTIONS,
    ATTENTION_ENTRY,
    NO_SETTINGS,
    TRAINING_ATTRIBUTES,
    UNREAD_ATTRIBUTES,
)
from ..host.parts import code_in
from .adapters import ACTIVE_ATTRIBUTES, Adapters, is_lora_linear
from .hidden_states import modules_of
from .patch import EXPERT_GATE, is_anything_replaced, original
from .weights import PLAIN_WEIGHTS, has_zeros, local_shard

_T = TypeVar("_T")

# Whatever their class, these compute token by token, unless they have a `forward` of their own; parametrised modules
# have classes of their own.
_OF_ONE_TOKEN = (nn.Linear, nn.Embedding)

# Attributes of every module. Children, parameters and buffers are compared separately; modules with forward hooks are
# not captured; other hooks are not called in a forward pass without gradients.
OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}

# Base classes of all models, which read a model's attributes to load, save, shard and generate.
_BASES = frozenset((*PreTrainedModel.__mro__, *GenerationMixin.__mro__))

# Types whose values are compared as they are.
PLAIN_VALUES = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.Size}
)

# Larger or more deeply nested containers are compared by type and length only; objects nested half as deep by identity.
_MOST_ENTRIES, _DEEPEST = 1024, 6

# Most kinds whose facts are kept, and most facts of a kind: modules may get another `forward`, or hooks, in every call.
MOST_KEPT = 256

# What was found out about models, by `Signature.kind`.
_facts: dict[Hashable, dict[Hashable, Any]] = {}
_keeping = threading.RLock()


class _Thread(threading.local):
    signatures: dict[nn.Module, Signature] | None = None  # None outside of `looked_at_once`


_thread = _Thread()


@contextmanager
def looked_at_once() -> Iterator[None]:
    """Context, e.g. a call, in which this thread reads the signature of each model once, ignoring later changes."""
    before, _thread.signatures = _thread.signatures, {}
    try:
        yield
    finally:
        _thread.signatures = before


# Numbers of the steps of torch's optimizers: fused optimizers do not count theirs in the versions of the weights.
_step_numbers, _last_step, _watching = itertools.count(1), 0, None


def watch_optimizers(is_on: bool) -> None:
    """Switch on or off that steps of all optimizers of this process are noted; a repeated call changes nothing."""
    global _watching
    if is_on and _watching is None:
        _watching = register_optimizer_step_post_hook(note_step)
    elif not is_on and _watching is not None:
        _watching.remove()
        _watching = None


def note_step(*_: Any) -> None:
    global _last_step
    _last_step = next(_step_numbers)


def versions_of(tensors: Iterable[torch.Tensor | None]) -> tuple[int, list[int | None]]:
    """How often tensors were written in place; None for tensors of inference mode, which do not count it.

    Writes through `.data` are not counted. Those of fused optimizers are: the first number changes after each step.
    """
    return _last_step, [None if one.is_inference() else one._version for one in tensors if one is not None]


def signature_of(model: nn.Module) -> Signature:
    """The signature of `model` as it is now, or as it was when first read inside `looked_at_once`."""
    known = _thread.signatures
    if known is None:
        return Signature(model)
    if model not in known:
        known[model] = Signature(model)
    return known[model]


def fact(function: Callable[..., _T]) -> Callable[..., _T]:
    """Decorator for a `function` that finds out a fact about a model, which holds for all models of the same
    `Signature.kind`. Further arguments must be hashable."""

    @functools.wraps(function)
    def known(model: PreTrainedModel, *args: Hashable) -> _T:
        facts, key = signature_of(model).facts, (function, *args)
        return facts[key] if key in facts else keep(facts, key, function(model, *args))

    return known


def keep(results: dict[Hashable, _T], key: Hashable, result: _T) -> _T:
    """Put `result` into `results` and return it; beyond `MOST_KEPT` the oldest entries are dropped."""
    with _keeping:
        results[key] = result
        while len(results) > MOST_KEPT:
            del results[next(iter(results))]
    return result


def _name_of(key: Hashable) -> str:
    if isinstance(key, tuple):
        return f"({', '.join(map(_name_of, key))})"
    return str(key) if type(key) in PLAIN_VALUES else getattr(key, "__qualname__", type(key).__name__)


class Identity:
    """Equal to another one of the same object, and to nothing later. Keeps alive only what has no weak references."""

    def __init__(self, value: Any):
        self._id = id(value)
        try:
            self._get: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._get = lambda: value

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity) or self._id != other._id:
            return False
        value = self._get()
        return value is not None and value is other._get()


def _identities(values: Iterable[Any]) -> tuple[Hashable, ...]:
    values = list(values)
    # Functions are equal only if identical.
    are_functions = {types.FunctionType}.issuperset(map(type, values))
    return tuple(map(weakref.ref if are_functions else Identity, values))


class Signature:
    """A snapshot of models. Parts are read when first accessed, while nothing is patched.

    Attributes:
        modules: of all models, each once; parts that concern one model are those of the first.
        attributes: the `__dict__` of each module, not copied.
    """

    def __init__(self, *models: nn.Module):
        self.modules = modules_of(*models)
        self.attributes: list[dict[str, Any]] = [one.__dict__ for one in self.modules]

    def having(self, name: str) -> list[nn.Module]:
        """The modules with an attribute `name` of their own, not of their class."""
        return list(compress(self.modules, map(contains, self.attributes, itertools.repeat(name))))

    @cached_property
    def hooked(self) -> list[nn.Module]:
        """The modules with forward hooks, whoever has registered them."""
        names = "_forward_pre_hooks", "_forward_hooks"
        found = [compress(self.modules, map(itemgetter(name), self.attributes)) for name in names]
        return list(dict.fromkeys(chain.from_iterable(found)))

    @cached_property
    def adapters(self) -> Adapters:
        return Adapters.of(self.modules)

    @property
    def configs(self) -> list[PreTrainedConfig]:
        found = {id(one["config"]): one["config"] for one in self.attributes if "config" in one}
        return [config for config in found.values() if isinstance(config, PreTrainedConfig)]

    @cached_property
    def by_class(self) -> dict[type[nn.Module], list[dict[str, Any]]]:
        """`attributes` by class, by first appearance."""
        found: defaultdict[type[nn.Module], list[dict[str, Any]]] = defaultdict(list)
        for module, own in zip(self.modules, self.attributes, strict=True):
            found[type(module)].append(own)
        return found

    @cached_property
    def code(self) -> tuple[Hashable, ...]:
        """The code that modules compute with, i.e. besides weights and attributes; none of it is kept alive.

        It is `forward` and `__call__` of each class; `forward`s that are attributes of modules; functions among the
        globals of the files that define the classes; the attention implementations that configurations name, and their
        functions, if any.
        """
        classes = self.by_class
        own = [original(module, "forward") for module in self.having("forward")]
        names = {original(config, ATTENTION_ENTRY) for config in self.configs}
        chosen = [(name, ALL_ATTENTION_FUNCTIONS.get(name)) for name in names]
        return (
            _identities(map(attrgetter("forward"), classes)),
            _identities(map(attrgetter("__call__"), classes)),
            _identities([forward for forward in own if forward is not None]),
            frozenset(map(weakref.ref, functions_of(files_of(classes)))),
            frozenset([(name, None if found is None else Identity(found)) for name, found in chosen]),
        )

    @cached_property
    def kind(self) -> Hashable:
        """Class, configuration, code and layer attributes of the model, but not its weights. Equal for models that are
        built alike."""
        model, (forwards, _, *others) = self.modules[0], self.code
        # Attributes of layers, such as windows, may differ from the configuration's.
        names = itertools.repeat("layer_idx")
        layers = [one for one in self.by_class.items() if any(map(contains, one[1], names))]
        values = chain.from_iterable([_read(*one)[1] for one in layers])
        pairs = zip(self.by_class, forwards, strict=True)
        return (
            type(model),
            settings_of(model.config),
            frozenset([one if issubclass(kind, _OF_ONE_TOKEN) else (weakref.ref(kind), one) for kind, one in pairs]),
            *others,
            tuple([tuple([value for value in some if type(value) in PLAIN_VALUES]) for some in values]),
        )

    @cached_property
    def facts(self) -> dict[Hashable, Any]:
        """What was found out about models of the same `kind`; add to it with `keep`."""
        with _keeping:  # the least recently used kinds are dropped
            return keep(_facts, self.kind, _facts.pop(self.kind, {}))

    @property
    def known(self) -> list[str]:
        """Names of `facts`: the same in all processes that have found out the same."""
        return sorted(map(_name_of, self.facts))

    @property
    def behaviour(self) -> tuple:
        """How modules compute, except for their weights: code, names of children and attributes, values of attributes.

        Numbers, strings and the like, containers of them and attributes of objects are compared by value; functions by
        identity. A class may list attributes that no forward pass reads in `unread_attributes`. Active adapters are in
        `adapters`.
        """
        contents, kinds = _Contents(), list(map(type, self.modules))
        values = [_values_of(kind, alike, contents) for kind, alike in self.by_class.items()]
        children = list(map(itemgetter("_modules"), self.attributes))
        counts, children = list(map(len, children)), list(filter(None, children))
        names = list(chain.from_iterable(children))
        # Children are among `modules`, which a fingerprint compares by reference: an equal `id` is the same module.
        ids = list(map(id, chain.from_iterable([one.values() for one in children])))
        return self.code, kinds, values, counts, names, ids, contents.of_objects

    @property
    def weights(self) -> tuple:
        """Addresses, shapes, strides and dtypes of parameters and buffers: all that is baked into a graph."""
        owned = self._owned
        names = list(chain.from_iterable(owned))
        tensors = list(chain.from_iterable([one.values() for one in owned]))
        has_tensor = [tensor is not None for tensor in tensors]
        return names, has_tensor, places_of(list(compress(tensors, has_tensor)))

    @property
    def versions(self) -> tuple:
        return versions_of(chain.from_iterable(one.values() for one in self._owned))

    @property
    def _owned(self) -> list[dict[str, torch.Tensor | None]]:
        """The parameters of modules that have any, then the buffers."""
        owned = [map(itemgetter(name), self.attributes) for name in ("_parameters", "_buffers")]
        return list(filter(None, chain.from_iterable(owned)))


class Fingerprint(NamedTuple):
    """Everything that is baked into a captured graph; equal to a later one if nothing has changed. Keeps nothing alive.

    Attributes:
        modules, behaviour, weights: of each signature; modules as weak references.
        settings: see `torch_settings`.
        adapters: active adapters of each signature; empty if each row has its own.
    """

    modules: tuple[tuple[weakref.ref, ...], ...]
    behaviour: tuple
    weights: tuple
    settings: tuple
    adapters: tuple

    @classmethod
    def of(cls, device: torch.device, *signatures: Signature, by_row: Signature | None = None) -> Fingerprint:
        """The fingerprint of unpatched modules on `device`; in those of `by_row`, rows have adapters of their own."""
        return cls(
            tuple([tuple(map(weakref.ref, one.modules)) for one in signatures]),
            tuple([one.behaviour for one in signatures]),
            tuple([one.weights for one in signatures]),
            torch_settings(device),
            tuple([() if one is by_row else one.adapters.state for one in signatures]),
        )

    def is_past(self, now: Fingerprint) -> bool:
        """Whether no future fingerprint can equal this one: a module is gone, or `now` the same modules have other
        weights."""
        if any(module() is None for module in chain.from_iterable(self.modules)):
            return True
        return self.modules == now.modules and self.weights != now.weights


def torch_settings(device: torch.device) -> tuple:
    """Global and thread-local settings of torch that decide which kernels operations on `device` launch."""
    return (
        torch.is_autocast_enabled(device.type),
        torch.get_autocast_dtype(device.type),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        # Also set by `torch.set_float32_matmul_precision`, whose own getter fails after this one was set.
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_fp16_accumulation,
    )


def settings_of(config: PreTrainedConfig) -> tuple[Hashable, ...]:
    """The entries of `config` that determine how its model computes."""
    settings: list[Hashable] = [type(config)]
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            settings.append((name, settings_of(value)))
        elif name not in NO_SETTINGS:
            settings.append((name, value if type(value) in PLAIN_VALUES else repr(value)))
    return tuple(settings)


def files_of(kinds: Iterable[type]) -> list[ModuleType]:
    """The files that define the classes `kinds`, except torch's."""
    names = dict.fromkeys([kind.__module__ for kind in kinds])
    return [sys.modules[name] for name in names if name in sys.modules and not name.startswith("torch.")]


def replacing_functions(
    names: Iterable[str], make: Callable[[str, ModuleType], Any], *models: nn.Module
) -> dict[str, list[tuple[ModuleType, Callable[[ModuleType], Any]]]]:
    """For `Replacements`: `make` returns the replacements of the functions `names` in the files of `models`."""
    files = files_of(map(type, modules_of(*models)))
    return {name: [(file, functools.partial(make, name)) for file in files if name in vars(file)] for name in names}


def code_of(function: Callable) -> types.CodeType | None:
    """The code of `function` without its decorators; None if it is not Python's."""
    return getattr(inspect.unwrap(function), "__code__", None)


def names_in(function: Callable) -> tuple[str, ...]:
    """Names of globals and attributes in the code of `function`."""
    return getattr(code_of(function), "co_names", ())


def functions_of(files: Iterable[ModuleType]) -> list[types.FunctionType]:
    """The functions among the globals of `files`, in the form that they have outside of engines."""
    is_patched, found = is_anything_replaced(), []
    for file in files:
        for name, value in list(vars(file).items()):
            value = original(file, name) if is_patched else value
            if type(value) is types.FunctionType:
                found.append(value)
    return found


def _values_of(kind: type[nn.Module], attributes: list[dict], contents: _Contents) -> list[Any]:
    """What `_read` returns, with comparable stand-ins: by module, or by attribute if all modules have the same ones, as
    in most classes."""
    names, values = _read(kind, attributes)
    if len(names) > 1:
        return [(some, contents.of_column(one)) for some, one in zip(names, values, strict=True)]
    if PLAIN_VALUES.issuperset(map(type, chain.from_iterable(values))):
        return [names, values]
    columns = zip(*values, strict=True)
    return [names, *[one if PLAIN_VALUES.issuperset(map(type, one)) else contents.of_column(one) for one in columns]]


def _read(kind: type[nn.Module], attributes: list[dict]) -> tuple[list[tuple[str, ...]], list[tuple]]:
    """Names and values of the attributes of modules of class `kind` that a forward pass may read, by module; the names
    once if all modules have the same ones."""
    count, names, values_of = _layout(kind, *attributes[0])
    with suppress(KeyError):
        # If the number is equal and all names are there, there are no other names.
        if set(map(len, attributes)) == {count}:
            return [names], list(map(values_of, attributes)) if names else []
    layouts = [_layout(kind, *one) for one in attributes]
    found = [layout[1] for layout in layouts]
    values = [layout[2](one) for layout, one in zip(layouts, attributes, strict=True)]
    return found[:1] if len(set(found)) == 1 else found, values


@functools.lru_cache(maxsize=1024)
def _layout(kind: type[nn.Module], *attributes: str) -> tuple[int, tuple[str, ...], Callable[[dict], tuple]]:
    """How to read modules of class `kind` with these `attributes`: the number of these; the sorted names that a forward
    pass may read; a function that gets their values from a module's `__dict__`, or raises `KeyError`."""
    unread = OF_EVERY_MODULE | {EXPERT_GATE} | TRAINING_ATTRIBUTES | getattr(kind, "unread_attributes", frozenset())
    if kind is nn.Linear and "forward" not in attributes:
        unread |= set(attributes)  # it reads its weights alone, whose shapes are compared
    if is_lora_linear(kind):
        unread |= ACTIVE_ATTRIBUTES
    if issubclass(kind, PreTrainedModel):
        unread |= UNREAD_ATTRIBUTES
        if "forward" not in attributes:  # that may read any attribute; a class does not read what trainers add
            unread |= set(attributes) - _mentioned(kind)
    names = sorted(set(attributes) - unread)
    # With a single name `itemgetter` would return no tuple. Modules around compiled ones have no `training` themselves.
    return len(attributes), tuple(names), itemgetter(*names, names[-1]) if names else lambda one: ()


@functools.cache
def _mentioned(kind: type[nn.Module]) -> frozenset[str]:
    """Names and strings in the code of a class, of its base classes in modeling files, and of functions in these."""
    classes = [one for one in kind.__mro__ if one not in _BASES]
    codes = [*map(code_of, functions_of(files_of(classes))), *chain.from_iterable(map(code_in, classes))]
    found: set[str] = set()
    while codes:
        if (code := codes.pop()) is not None:
            found.update(code.co_names, [one for one in code.co_consts if type(one) is str])
            codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return frozenset(found - {"generate", "generate_batch"})  # they run forward passes


class _Contents:
    """Comparable stand-ins for values that are not plain.

    Attributes:
        of_objects: identities of the objects found, and their attributes; many modules share a configuration.
    """

    def __init__(self) -> None:
        self.of_objects: list[Any] = []
        self._numbers: dict[int, tuple] = {}  # by `id`, which is unique as modules keep these objects alive

    def of(self, value: Any, depth: int = 0) -> Any:
        """A stand-in that later ones equal as long as `value` has not changed; `depth` is the level of nesting."""
        kind = type(value)  # `isinstance` is slow for some objects
        if kind in PLAIN_VALUES or issubclass(kind, type):
            return value
        number = self._numbers.get(id(value))
        if number is not None:
            return number
        if issubclass(kind, torch.Tensor):
            return kind, places_of([value])
        if issubclass(kind, (dict, list, tuple, set, frozenset)):
            return kind, self._of_entries(value, depth)
        if issubclass(kind, functools.partial):
            return kind, self._of_entries((value.func, value.args, value.keywords), depth)
        if issubclass(kind, types.MethodType):
            return kind, Identity(value.__self__), Identity(value.__func__)
        if issubclass(kind, (int, float, str, bytes)):  # e.g. members of some enumerations
            return kind, value
        if kind is types.FunctionType:
            return weakref.ref(value)
        if issubclass(kind, nn.Module) or depth > _DEEPEST // 2:
            return Identity(value)
        self._numbers[id(value)] = number = (kind, len(self._numbers))
        self.of_objects += (Identity(value), self.of(getattr(value, "__dict__", None), depth + 1))
        return number

    def of_column(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Stand-ins for the values of one attribute in several modules, some of which are not plain."""
        if len(set(map(id, values))) == 1:  # e.g. a configuration
            return (self.of(values[0]),) * len(values)
        return tuple([value if type(value) in PLAIN_VALUES else self.of(value) for value in values])

    def _of_entries(self, values: Any, depth: int) -> Any:
        if len(values) > _MOST_ENTRIES or depth == _DEEPEST:
            return len(values)
        entries = [*values, *values.values()] if isinstance(values, dict) else list(values)
        if not PLAIN_VALUES.issuperset(map(type, entries)):
            entries = [value if type(value) in PLAIN_VALUES else self.of(value, depth + 1) for value in entries]
        return frozenset(entries) if isinstance(values, (set, frozenset)) else entries


def places_of(tensors: list[torch.Tensor]) -> tuple:
    """Addresses, shapes, strides (True if contiguous) and dtypes of tensors; of the parts of quantised or sharded
    ones."""
    others: list[Any] = []
    if not PLAIN_WEIGHTS.issuperset(map(type, tensors)):
        tensors, others = _plain_parts(tensors)
    return (
        [tensor.data_ptr() for tensor in tensors],
        [tensor.size() for tensor in tensors],  # `shape` takes twice as long
        [tensor.is_contiguous() or tensor.stride() for tensor in tensors],
        [tensor.dtype for tensor in tensors],
        others,
    )


def _plain_parts(tensors: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], list[Any]]:
    """The plain tensors that `tensors`, quantised or sharded ones, consist of; and what else defines them."""
    plain: list[torch.Tensor] = []
    others: list[Any] = []
    for tensor in tensors:
        part = local_shard(tensor)
        if is_traceable_wrapper_subclass(part):
            names, settings = part.__tensor_flatten__()
            inner, more = _plain_parts([getattr(part, name) for name in names])
            plain += inner
            others += (type(part), len(inner), _Contents().of(settings), has_zeros(part), *more)
            continue
        plain.append(part)
        if type(part) not in PLAIN_WEIGHTS:  # e.g. bitsandbytes', which have their scales as attributes
            contents = _Contents()
            others += (type(part), contents.of(vars(part)), contents.of_objects)
        if part.data_ptr() == 0 and part.numel() > 0:
            others.append(Identity(part))
    return plain, others
