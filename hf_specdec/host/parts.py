"""The table of the parts of transformers that the package touches beyond its public names, and which are missing.

The other files of this folder declare each part where they look it up: importable parts with `part` or `lazy_part`,
attributes with `named_in` or `uses`, and names that differ between models with `in_modeling_files`.
"""

from __future__ import annotations

import importlib
import inspect
import re
import types
from collections.abc import Callable, Iterator
from functools import cache
from importlib import metadata
from typing import Any, NamedTuple, TypeVar

import transformers

from .. import __version__

# The oldest and the newest version of transformers that the tests pass on; `.ci/newest` keeps the newest up to date.
TESTED = ("5.17.0", "5.24.0")


class Part(NamedTuple):
    """A part of transformers that the package touches.

    Attributes:
        where: module, or module and class: `transformers.generation.utils:GenerationMixin`.
        names: names of the part there, newest first; several if versions differ; none for the module itself.
        why: what the part is touched for.
        since: version that renamed it.
        is_needed: whether nothing runs without it; otherwise only one feature fails.
        is_found: whether the installed version has it under one of the names.
    """

    where: str
    names: tuple[str, ...]
    why: str
    since: str = ""
    is_needed: bool = True
    is_found: Callable[[], bool] = lambda: True

    def __str__(self) -> str:
        where = f"`{self.where.replace(':', '.')}`"
        return f"{where} has no {any_of(self.names)}" if self.names else f"there is no {where}"


PARTS: list[Part] = []

_F = TypeVar("_F", bound=Callable)


def any_of(names: tuple[str, ...] | list[str]) -> str:
    """`names` as a phrase: `a`, `b` or `c`."""
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} or {quoted[-1]}"


def _owner(where: str) -> Any:
    """The module, or the class in it; None if it is missing."""
    module, _, kind = where.partition(":")
    try:
        found = importlib.import_module(module)
    except Exception:  # a module whose packages are not installed may raise anything
        return None
    return getattr(found, kind, None) if kind else found


def _look_up(where: str, names: tuple[str, ...]) -> Any:
    owner = _owner(where)
    return next((getattr(owner, name) for name in names if hasattr(owner, name)), None) if names else owner


def part(where: str, *names: str, why: str, is_needed: bool = True) -> Any:
    """Declare a class, function, method or module of transformers, and return it; None if it is missing."""
    found = _look_up(where, names)
    is_found = found is not None
    PARTS.append(Part(where, names, why, is_needed=is_needed, is_found=lambda: is_found))
    return found


def lazy_part(where: str, *names: str, why: str, since: str = "") -> Callable[[], Any]:
    """Declare a part of a module that is imported only when its feature is used. Returns a function that returns the
    part, or raises `ImportError` if it is missing."""
    declared = Part(where, names, why, since, False, lambda: _look_up(where, names) is not None)
    PARTS.append(declared)

    @cache
    def look_up() -> Any:
        found = _look_up(where, names)
        if found is None:
            raise ImportError(about(str(declared)))
        return found

    return look_up


def code_in(owner: Any) -> Iterator[types.CodeType]:
    """The code of the functions, methods and properties of a class, or of a module and its classes."""
    for one in vars(owner).values():
        for function in (one, *(getattr(one, name, None) for name in ("fget", "fset", "__func__"))):
            function = inspect.unwrap(function) if callable(function) else None
            code = getattr(function, "__code__", None)
            if code is not None:
                yield code
        if isinstance(owner, types.ModuleType) and isinstance(one, type) and one.__module__ == owner.__name__:
            yield from code_in(one)


def named_in(where: str, name: str, *, why: str, since: str = "", is_needed: bool = True) -> str:
    """Declare the name of an attribute, and return it. If only instances have it, the code there must mention it."""

    def is_found() -> bool:
        owner = _owner(where)
        codes = () if owner is None else code_in(owner)
        return hasattr(owner, name) or any(name in (*code.co_names, *code.co_consts) for code in codes)

    PARTS.append(Part(where, (name,), why, since, is_needed, is_found))
    return name


def uses(where: str, name: str, *, why: str, is_needed: bool = True) -> Callable[[_F], _F]:
    """Decorator of a function that reads or calls an attribute; declares the attribute, see `named_in`."""
    named_in(where, name, why=why, is_needed=is_needed)
    return lambda function: function


def method(where: str, name: str, *, why: str) -> Callable[..., Any]:
    """Declare a method, and return a function that calls it on its first argument."""
    named_in(where, name, why=why)
    return lambda owner, *args, **kwargs: getattr(owner, name)(*args, **kwargs)


def attribute(where: str, name: str, *, why: str, since: str = "", is_needed: bool = True) -> Callable[..., Any]:
    """Declare an attribute, and return a function that reads it from its first argument, with a default."""
    named_in(where, name, why=why, since=since, is_needed=is_needed)
    return lambda owner, default=None: getattr(owner, name, default)


def in_modeling_files(*names: str, why: str, since: str = "") -> tuple[str, ...]:
    """Declare names that modeling files use, and return them; each model may or may not have them."""
    PARTS.append(Part("transformers.models", names, why, since, False))
    return names


@cache
def missing() -> tuple[Part, ...]:
    """The needed parts that the installed transformers lacks."""
    return tuple(one for one in PARTS if one.is_needed and not one.is_found())


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def is_tested() -> bool:
    """Whether the installed transformers is not newer than the newest tested version."""
    installed, newest = (re.findall(r"\d+", one)[:3] for one in (transformers.__version__, TESTED[1]))
    return [*map(int, installed)] <= [*map(int, newest)]


def about(fault: str) -> str:
    """A sentence about `fault` with the installed version and the tested versions."""
    version, (oldest, newest) = transformers.__version__, (one.rpartition(".")[0] for one in TESTED)
    return f"transformers {version}: {fault}; hf_specdec {__version__} is tested with {oldest} to {newest}"


def why_broken() -> str | None:
    """The reason why nothing runs with the installed transformers; None if all needed parts are found."""
    faults = ", ".join(map(str, missing()))
    return about(faults) if faults else None
