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
import weakref
from collections.abc import Callable, Hashable, Iterable
from types import ModuleType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from torch import nn
from torch.utils.weak import WeakIdRef
from transformers import PreTrainedConfig, PreTrainedModel

from ..host.modeling import ALL_ATTENTION_FUNCTIONS, ATTENTION_ENTRY
from .hidden_states import ModuleTree
from .patch import is_anything_replaced, original

# They compute token by token, whatever their class, unless it has a `forward` of its own: parametrised ones are of
# classes of their own.
_OF_ONE_TOKEN = (nn.Linear, nn.Embedding)
_T = TypeVar("_T")
_EAGER = "eager_attention_forward"

# Results that are kept by variant; a model whose modules get another `forward` for every call has one for each.
MOST_KEPT = 256

_variants: WeakKeyDictionary[nn.Module, _Noted] = WeakKeyDictionary()
# Of variants; numbers are compared in no time.
_numbers: dict[Hashable, int] = {}
_next_number = itertools.count()
# Results of `why_not_known_attention`, by variant.
_reasons: dict[Hashable, str | None] = {}
_keeping = threading.Lock()


class _Noted(NamedTuple):
    """What a model was made of when it was last looked at.

    Attributes:
        number: of the variant.
        parts: weak references to all that it is of.
        identities: the `id` of each; those of living objects tell them apart.
    """

    number: int
    parts: tuple[weakref.ref, ...]
    identities: tuple[Hashable, ...]

    def is_of(self, identities: tuple[Hashable, ...]) -> bool:
        """Whether `identities` are those of the same objects, and of no others that came later."""
        return self.identities == identities and all([part() is not None for part in self.parts])


class Identity(WeakIdRef):
    """A weak reference that equals another one to the same object, and nothing else."""

    __slots__ = ()
    __hash__ = WeakIdRef.__hash__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and super().__eq__(other)


def variant_of(model: PreTrainedModel) -> int:
    """The variant of `model` as of the last `note_variant`: a number, equal for models that are made of the same."""
    if model not in _variants:
        note_variant(model, ModuleTree.of(model))
    return _variants[model].number


def note_variant(model: PreTrainedModel, tree: ModuleTree) -> None:
    """See what `model` is made of now; every call begins so.

    That are the classes of its modules, their `forward`, one that a module has as an attribute, the functions of the
    files that define the classes, and the attention implementation. None of them is kept alive.

    Args:
        model: the target.
        tree: of `model`, as it is now.
    """
    classes = dict.fromkeys(map(type, tree.modules))
    kinds = [kind for kind in classes if not issubclass(kind, _OF_ONE_TOKEN)]
    linear_forwards = list(dict.fromkeys([_forward_of(kind) for kind in classes if issubclass(kind, _OF_ONE_TOKEN)]))
    class_forwards = list(map(_forward_of, kinds))
    forwards = [original(module, "forward") for module in tree.having("forward")]
    forwards = [forward for forward in forwards if forward is not None]
    functions = functions_of(files_of(kinds))
    names = list(dict.fromkeys([original(config, ATTENTION_ENTRY) for config in _configs_of(tree)]))
    chosen = [ALL_ATTENTION_FUNCTIONS.get(name) for name in names]
    parts = [*kinds, *class_forwards, *linear_forwards, *forwards, *functions, *chosen]
    identities = (len(kinds), len(linear_forwards), len(forwards), len(functions), *names, *map(id, parts))
    noted = _variants.get(model)
    if noted is not None and noted.is_of(identities):
        return
    key = (
        frozenset(zip(map(Identity, kinds), map(Identity, class_forwards), strict=True)),
        frozenset(map(Identity, linear_forwards)),
        tuple(map(Identity, forwards)),
        frozenset(map(Identity, functions)),
        frozenset(zip(names, map(_identity, chosen), strict=True)),
    )
    number = _numbers.get(key)
    number = keep(_numbers, key, next(_next_number)) if number is None else number
    _variants[model] = _Noted(number, tuple(weakref.ref(part) for part in parts if part is not None), identities)


def _configs_of(tree: ModuleTree) -> list[PreTrainedConfig]:
    """The configurations that modules of `tree` have, each once."""
    found = {id(config): config for config in map(dict.get, tree.attributes, itertools.repeat("config"))}
    return [config for config in found.values() if isinstance(config, PreTrainedConfig)]


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
    for one in kind.__mro__:
        if "forward" in vars(one):
            return vars(one)["forward"]


def files_of(kinds: Iterable[type]) -> list[ModuleType]:
    """The files that define the classes `kinds`, but for torch's."""
    names = dict.fromkeys([kind.__module__ for kind in kinds])
    return [sys.modules[name] for name in names if name in sys.modules and not name.startswith("torch.")]


def functions_of(files: Iterable[ModuleType]) -> list[types.FunctionType]:
    """The functions that `files` have as globals, without what engines replace."""
    is_patched, found = is_anything_replaced(), []
    for file in files:
        for name, value in list(vars(file).items()):
            value = original(file, name) if is_patched else value
            if type(value) is types.FunctionType:
                found.append(value)
    return found


def why_not_known_attention(model: PreTrainedModel) -> str | None:
    """The reason why it is not known which attention `model` runs; None if it is transformers' own, or its class's.

    What any other function computes with a longer text, a short one need not show.
    """
    number = variant_of(model)
    return _reasons[number] if number in _reasons else keep(_reasons, number, _find_unknown_attention(model))


def _find_unknown_attention(model: PreTrainedModel) -> str | None:
    tree = ModuleTree.of(model)
    names = {original(config, ATTENTION_ENTRY) for config in _configs_of(tree)}
    chosen = {name: ALL_ATTENTION_FUNCTIONS.get(name) for name in names if isinstance(name, str)}
    for name, function in chosen.items():
        if function is not None and not _is_of(function, "transformers"):
            return _not_own(name, function)
    if "eager" in names:
        for file in files_of(set(map(type, tree.modules))):
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
