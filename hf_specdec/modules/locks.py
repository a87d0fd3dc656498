"""Locks of targets: a call with a drafter patches modules, so only one thread at a time generates with a target."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel


class TargetLock:
    """A reentrant lock that threads get in the order in which they ask for it.

    Attributes:
        guard: what threads run before they wait for the lock, which may raise an error; None for nothing.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._owner: int | None = None
        self._depth = 0
        self.guard: Callable[[], None] | None = None

    @property
    def is_mine(self) -> bool:
        return self._owner == threading.get_ident()

    @property
    def is_wanted(self) -> bool:
        return bool(self._waiting)

    def __enter__(self) -> TargetLock:
        if self.guard is not None:
            self.guard()
        self._acquire(1)
        return self

    def __exit__(self, *exception: object) -> None:
        self._release(1)

    @contextmanager
    def released(self) -> Iterator[None]:
        """Context in which the owner lets other threads have the lock; on exit it waits for its turn."""
        depth = self._depth
        self._release(depth)
        try:
            yield
        finally:
            self._acquire(depth)

    def _acquire(self, depth: int) -> None:
        me, ticket = threading.get_ident(), object()
        with self._changed:
            if self._owner != me:
                self._waiting.append(ticket)
                try:
                    self._changed.wait_for(lambda: self._owner is None and self._waiting[0] is ticket)
                finally:
                    self._waiting.remove(ticket)
                    self._changed.notify_all()
                self._owner = me
            self._depth += depth

    def _release(self, depth: int) -> None:
        with self._changed:
            self._depth -= depth
            if self._depth == 0:
                self._owner = None
                self._changed.notify_all()


_LOCKS: WeakKeyDictionary[PreTrainedModel, TargetLock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()
# Threads that held locks do not exist in a forked process.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_LOCKS.clear)


def lock_of(model: PreTrainedModel) -> TargetLock:
    with _LOCKS_LOCK:
        if model not in _LOCKS:
            _LOCKS[model] = TargetLock()
        return _LOCKS[model]
