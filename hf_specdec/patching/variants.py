"""What a model computes with besides what its class and configuration say: what somebody has put in place of that.

What was found out about a model by running it is kept for its class and its configuration, and holds for another model
of them only if that is made of the same classes, functions and attention.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from types import ModuleType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.weak import WeakIdRef
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .hidden_states import modules_of
from .implementations import IMPLEMENTATION
from .patch import is_anything_replaced, original

# They compute token by token, whatever their class, unless it has a `forward` of its own: parametrised ones are of
# classes of their own.
_OF_ONE_TOKEN = (nn.Linear, nn.Embedding)
_T = TypeVar("_T")
_EAGER = "eager_attention_forward"

# Results that are kept by variant; a model whose modules get another `forward` for every call has one for each.
MOST_KEPT = 256

_variants: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
# Of variants; numbers are compared in no time.
_numbers: dict[Hashable, int] = {}
_next_number = itertools.count()
# Results of `why_not_known_attention`, by variant.
_reasons: dict[Hashable, str | None] = {}
_keeping = threading.Lock()


class Identity(WeakIdRef):
    """A weak reference that equals another one to the same object, and nothing else."""

    __slots__ = ()
    __hash__ = WeakIdRef.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and super().__eq__(other)


def variant_of(model: PreTrainedModel) -> int:
    """The variant of `model` as of the last `note_variant`: a number, equal for models that are made of the same."""
    if model not in _variants:
        note_variant(model)
    return _variants[model]


def note_variant(model: PreTrainedModel) -> None:
    """See what `model` is made of now; every call begins so.

    That are the classes of its modules, their `forward`, one that a module has as an attribute, the functions of the
    files that define the classes, and the attention implementation. None of them is kept alive.
    """
    kinds: set[type] = set()
    forwards: list[Identity] = []
    configs: dict[int, PreTrainedConfig] = {}
    for module in modules_of(model):
        attributes = module.__dict__
        kinds.add(type(module))
        if "forward" in attributes and (forward := original(module, "forward")) is not None:
            forwards.append(Identity(forward))
        if isinstance(config := attributes.get("config"), PreTrainedConfig):
            configs[id(config)] = config
    linear = {_forward_of(kind) for kind in kinds if issubclass(kind, _OF_ONE_TOKEN)}
    kinds = {kind for kind in kinds if not issubclass(kind, _OF_ONE_TOKEN)}
    names = {original(config, IMPLEMENTATION) for config in configs.values()}
    classes = frozenset((Identity(kind), Identity(_forward_of(kind))) for kind in kinds)
    functions = frozenset(map(Identity, functions_of(files_of(kinds))))
    attention = frozenset((name, _identity(ALL_ATTENTION_FUNCTIONS.get(name))) for name in names)
    parts = classes, frozenset(map(Identity, linear)), tuple(forwards), functions, attention
    number = _numbers.get(parts)
    _variants[model] = keep(_numbers, parts, next(_next_number)) if number is None else number


def keep(results: dict[Hashable, _T], key: Hashable, result: _T) -> _T:
    """Put `result` into `results`, of which the oldest beyond `MOST_KEPT` are dropped; returns it."""
    with _keeping:
        results[key] = result
        while len(results) > MOST_KEPT:
            del results[next(iter(results))]
    return result


def _identity(value: Any) -> Identity | None:
    return None if value is None else Identity(value)


def _forward_of(kind: type[nn.Module]) -> Any:
    """`forward` as it is in a class: not bound, which would be another object each time."""
    return next(vars(one)["forward"] for one in kind.__mro__ if "forward" in vars(one))


def files_of(kinds: Iterable[type]) -> list[ModuleType]:
    """The files that define the classes `kinds`, but for torch's."""
    names = dict.fromkeys(kind.__module__ for kind in kinds)
    return [sys.modules[name] for name in names if name in sys.modules and not name.startswith("torch.")]


def functions_of(files: Iterable[ModuleType]) -> Iterator[types.FunctionType]:
    """The functions that `files` have as globals, without what engines replace."""
    is_patched = is_anything_replaced()
    for file in files:
        for name, value in list(vars(file).items()):
            value = original(file, name) if is_patched else value
            if type(value) is types.FunctionType:
                yield value


def why_not_known_attention(model: PreTrainedModel) -> str | None:
    """The reason why it is not known which attention `model` runs; None if it is transformers' own, or its class's.

    What any other function computes with a longer text, a short one need not show.
    """
    number = variant_of(model)
    return _reasons[number] if number in _reasons else keep(_reasons, number, _find_unknown_attention(model))


def _find_unknown_attention(model: PreTrainedModel) -> str | None:
    modules = modules_of(model)
    configs = {id(one): one for one in (vars(module).get("config") for module in modules) if one is not None}
    names = {original(config, IMPLEMENTATION) for config in configs.values() if isinstance(config, PreTrainedConfig)}
    chosen = {name: ALL_ATTENTION_FUNCTIONS.get(name) for name in names if isinstance(name, str)}
    for name, function in chosen.items():
        if function is not None and not _is_of(function, "transformers"):
            return _not_own(name, function)
    if "eager" in names:
        for file in files_of({type(module) for module in modules}):
            function = original(file, _EAGER)
            if function is not None and not _is_of(function, "transformers", file.__name__):
                return _not_own("eager", function)
    return None


def _not_own(name: str, function: Callable) -> str:
    place = f"{_file_of(function)}.{getattr(function, '__qualname__', type(function).__name__)}"
    return f"the target's attention ({name!r}) is a function that is not transformers' own ({place})"


def _file_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    # Decorators copy `__module__`.
    return getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None) or "unknown"


def _is_of(function: Any, *places: str) -> bool:
    file = _file_of(function)
    return any(file == place or file.startswith(f"{place}.") for place in places)
