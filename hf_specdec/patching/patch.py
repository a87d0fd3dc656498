"""What a call with a drafter changes about modules and configurations while it runs, and for whom.

Others may run the target meanwhile: another thread, or the caller's own logits processors, stopping criteria and
streamers. What is changed asks `runs_engine` and does for them what it did before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

# The value of an attribute that an object does not have of its own.
ABSENT = object()


class _Thread(threading.local):
    engine: object | None = None
    is_inference = False


_thread = _Thread()


def current_engine() -> object | None:
    """What the innermost `engine` of this thread is known by; None where none is at work."""
    return _thread.engine


def runs_engine() -> bool:
    """Whether it is an engine that runs a module; compilers are not asked about the thread: what they trace is ours."""
    return torch.compiler.is_compiling() or _thread.engine is not None


@contextmanager
def engine() -> Iterator[None]:
    """Context in which an engine works in this thread: what it runs behaves as changed for it."""
    before = _thread.engine, _thread.is_inference
    _thread.engine, _thread.is_inference = object(), torch.is_inference_mode_enabled()
    try:
        yield
    finally:
        _thread.engine, _thread.is_inference = before


@contextmanager
def caller() -> Iterator[None]:
    """Context, within `engine`, of what the caller handed over: it runs unchanged models, in the caller's mode."""
    before = _thread.engine
    # Tensors that were made in inference mode can be changed in it only.
    is_left = _thread.is_inference and not torch.is_inference_mode_enabled()
    _thread.engine = None
    try:
        with torch.inference_mode() if is_left else nullcontext():
            yield
    finally:
        _thread.engine = before


@dataclass
class _Replaced:
    """An attribute of `owner` that contexts replace: what it was, and their values, the latest last."""

    owner: object
    original: Any
    values: dict[object, Any] = field(default_factory=dict)


_replaced: dict[tuple[int, str], _Replaced] = {}
_lock = threading.Lock()


@contextmanager
def replaced(name: str, values: Iterable[tuple[object, Any]]) -> Iterator[None]:
    """Context in which the attribute `name` of each owner in `values` is the value beside it.

    Afterwards it is what it was, or gone if the owner had none of its own. Contexts may overlap in any order, as those
    of several threads do: the latest value counts, and what was before them returns with the last. What somebody else
    sets meanwhile stays.

    Args:
        name: of an attribute that lies in the owners' `__dict__`.
        values: owners, each once, and what they get; `ABSENT` for nothing.
    """
    values, token = list(values), object()
    try:
        with _lock:
            for owner, value in values:
                own = vars(owner).get(name, ABSENT)
                entry = _replaced.setdefault((id(owner), name), _Replaced(owner, own))
                entry.values[token] = value
                _set(owner, name, value)
        yield
    finally:
        with _lock:
            for owner, _ in values:
                entry = _replaced.get((id(owner), name))
                if entry is not None and token in entry.values:
                    _end(entry, name, token)


def _end(entry: _Replaced, name: str, token: object) -> None:
    shown = next(reversed(entry.values.values()))
    del entry.values[token]
    if vars(entry.owner).get(name, ABSENT) is shown:
        _set(entry.owner, name, next(reversed(entry.values.values()), entry.original))
    if not entry.values:
        del _replaced[id(entry.owner), name]


def _set(owner: object, name: str, value: Any) -> None:
    if value is ABSENT:
        vars(owner).pop(name, None)
    else:
        vars(owner)[name] = value


def original(owner: object, name: str) -> Any:
    """What `owner` has as attribute `name` outside of every `replaced`; None if nothing of its own."""
    entry = _replaced.get((id(owner), name))
    value = vars(owner).get(name) if entry is None else entry.original
    return None if value is ABSENT else value
