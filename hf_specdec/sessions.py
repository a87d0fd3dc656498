"""Generations of one shape: their buffers, and what was captured over them, kept from one call to the next."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .graphs import GraphMemory
from .ranks import local_part
from .taps import modules_of

if TYPE_CHECKING:
    from .continuation import DeferredCache
    from .state import DecodeState

# Sessions that a drafter keeps, the least recently used of them being dropped first.
MAX_SESSIONS = 4


@dataclass
class Session:
    """What generations of one shape share, one after the other.

    Attributes:
        state: their buffers.
        rounds: captured rounds over these buffers, by what they depend on besides; None for what cannot be captured.
        prefills: captured prefills, by their width; likewise.
        graph_memory: of all these graphs.
    """

    state: DecodeState
    rounds: dict[Hashable, Any] = field(default_factory=dict)
    prefills: dict[int, Any] = field(default_factory=dict)
    graph_memory: GraphMemory = field(default_factory=GraphMemory)
    _borrower: Callable[[], DeferredCache | None] = lambda: None

    def lend_buffers(self, cache: DeferredCache) -> DeferredCache:
        """Let `cache` read the buffers as long as no other call needs them."""
        self._borrower = weakref.ref(cache)
        return cache

    def give_up_buffers(self) -> None:
        """Have what was lent copied by whoever still may look at it: another call is about to use the buffers."""
        borrower = self._borrower()
        if borrower is not None:
            borrower.take_over()


class SessionPool:
    """Sessions of a drafter that no call uses at the moment, by what they depend on.

    A session belongs to one call at a time; calls of several threads at once get several sessions. Copies of a pool,
    and what is unpickled of one, are empty.
    """

    def __init__(self) -> None:
        self._idle: dict[Hashable, list[Session]] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple:
        return type(self), ()

    def __len__(self) -> int:
        return sum(map(len, self._idle.values()))

    def __contains__(self, key: Hashable) -> bool:
        with self._lock:
            return bool(self._idle.get(key))

    @contextmanager
    def session(
        self, key: Hashable | None, allocate: Callable[[], DecodeState], fill: Callable[[Session], None]
    ) -> Iterator[Session]:
        """Context that owns a session; one that is left by an error is not kept.

        Where memory does not suffice for it, what is kept for other calls is freed, and it is tried once more.

        Args:
            key: of sessions that may be used again; None for one that is not kept.
            allocate: makes the buffers of a new one.
            fill: makes a session ready for the call.
        """
        try:
            session = self._filled(key, allocate, fill)
        except torch.OutOfMemoryError:
            if not len(self):
                raise
            session = None
        if session is None:  # The error, which held what was allocated, is gone.
            self.clear()
            torch.cuda.empty_cache()
            session = self._filled(key, allocate, fill)
        yield session
        if key is not None:
            self._keep(key, session)

    def _filled(
        self, key: Hashable | None, allocate: Callable[[], DecodeState], fill: Callable[[Session], None]
    ) -> Session:
        with self._lock:
            idle = self._idle.get(key)
            session = idle.pop() if idle else None
        session = session or Session(allocate())
        fill(session)
        return session

    def _keep(self, key: Hashable, session: Session) -> None:
        with self._lock:
            self._idle.setdefault(key, []).append(session)
            self._idle[key] = self._idle.pop(key)
            while len(self) > MAX_SESSIONS:
                oldest = next(iter(self._idle))
                self._idle[oldest].pop(0)
                if not self._idle[oldest]:
                    del self._idle[oldest]

    def clear(self) -> None:
        """Free everything that no call is using."""
        with self._lock:
            self._idle.clear()


def fingerprint(*models: nn.Module) -> int:
    """A number that changes when weights of `models` move or are replaced, so that captured work would read others."""
    modules = modules_of(*models)
    tensors = itertools.chain.from_iterable((*one._parameters.values(), *one._buffers.values()) for one in modules)
    return hash(tuple(_place(tensor) for tensor in tensors if tensor is not None))


def _place(tensor: torch.Tensor) -> int:
    return local_part(tensor).data_ptr() or id(tensor)  # a quantised weight has no memory but that of its parts
