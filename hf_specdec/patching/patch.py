"""Replacing attributes of modules and configurations while an engine runs, and telling which thread runs it.

Other code may run the target at the same time: another thread, or the caller's logits processors, stopping criteria and
streamers. Replaced functions call `runs_engine` and behave as the original ones where it is False.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

# Stands for the value of an attribute that is not in an object's `__dict__`.
ABSENT = object()


class _Thread(threading.local):
    engine: object | None = None
    is_inference = False


_thread = _Thread()


def current_engine() -> object | None:
    """An object that identifies the innermost `engine` context of this thread; None outside of any."""
    return _thread.engine


def runs_engine() -> bool:
    """Whether an engine runs the current code. True while torch.compile traces, since only engines compile patches."""
    return torch.compiler.is_compiling() or _thread.engine is not None


@contextmanager
def engine() -> Iterator[None]:
    """Context in which this thread runs an engine: replaced functions behave as the engine needs them."""
    before = _thread.engine, _thread.is_inference
    _thread.engine, _thread.is_inference = object(), torch.is_inference_mode_enabled()
    try:
        yield
    finally:
        _thread.engine, _thread.is_inference = before


@contextmanager
def caller() -> Iterator[None]:
    """Context, within `engine`, for functions of the caller, such as logits processors.

    Replaced functions behave as the original ones, and inference mode is on if it was on where `engine` was entered.
    """
    before = _thread.engine
    # Tensors that were made in inference mode cannot be modified outside of it.
    is_left = _thread.is_inference and not torch.is_inference_mode_enabled()
    _thread.engine = None
    try:
        with torch.inference_mode() if is_left else nullcontext():
            yield
    finally:
        _thread.engine = before


@dataclass
class _Replaced:
    """An attribute of `owner` that contexts have replaced: its original value, and theirs by context, latest last."""

    owner: object
    original: Any
    values: dict[object, Any] = field(default_factory=dict)


_replaced: dict[tuple[int, str], _Replaced] = {}
_lock = threading.Lock()


@contextmanager
def replaced(name: str, values: Iterable[tuple[object, Any]]) -> Iterator[None]:
    """Context in which the attribute `name` of each owner in `values` has the value given with it.

    On exit the original value is restored, or the attribute removed if the owner's `__dict__` had none. Contexts may
    overlap in any order, as those of several threads do: the value of the context entered last applies, and the
    original value is restored when the last one exits. A value that other code sets inside the context stays.

    Args:
        name: of an attribute that is stored in the owners' `__dict__`.
        values: pairs of an owner, each once, and its value; `ABSENT` removes the attribute.
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
                    _restore(entry, name, token)


def _restore(entry: _Replaced, name: str, token: object) -> None:
    current = next(reversed(entry.values.values()))
    del entry.values[token]
    if vars(entry.owner).get(name, ABSENT) is current:
        _set(entry.owner, name, next(reversed(entry.values.values()), entry.original))
    if not entry.values:
        del _replaced[id(entry.owner), name]


def _set(owner: object, name: str, value: Any) -> None:
    if value is ABSENT:
        vars(owner).pop(name, None)
    else:
        vars(owner)[name] = value


def original(owner: object, name: str) -> Any:
    """The attribute `name` of `owner` without any `replaced` context; None if its `__dict__` has none."""
    entry = _replaced.get((id(owner), name))
    value = vars(owner).get(name) if entry is None else entry.original
    return None if value is ABSENT else value
