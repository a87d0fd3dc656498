"""Generations of one shape: their buffers, and what was captured over them, kept from one call to the next."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch

from ..drafters.base import Drafter
from ..state import DecodeState, Shape
from .cuda_graphs import Fence, GraphPool
from .fingerprint import Fingerprint
from .kv_transfer import DeferredCache

# Sessions that a drafter keeps, the least recently used of them being dropped first.
MAX_SESSIONS = 4

# Rounds, and prefills, that a session keeps captured, likewise. Every combination of warpers (each `top_p`) needs a
# round of its own, every power of two of columns a prefill.
MAX_CAPTURES = 8


class SessionKey(NamedTuple):
    """What a session depends on.

    Attributes:
        shape: of its buffers.
        is_compiled: whether rounds are compiled before they are captured.
        fingerprint: of target and drafter.
    """

    shape: Shape
    is_compiled: bool
    fingerprint: Fingerprint


class Captures:
    """Captured work by what it depends on besides a session; the least recently used beyond `MAX_CAPTURES` is freed.

    None stands for what cannot be captured.
    """

    def __init__(self) -> None:
        self._captured: OrderedDict[Hashable, Any] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captured

    def __len__(self) -> int:
        return len(self._captured)

    def get(self, key: Hashable) -> Any:
        """What was captured under `key`; None also if nothing was."""
        if key in self._captured:
            self._captured.move_to_end(key)
        return self._captured.get(key)

    def add(self, key: Hashable, captured: Any) -> None:
        self._captured[key] = captured
        if len(self) > MAX_CAPTURES:
            self._captured.popitem(last=False)


class Session:
    """What generations of one shape share, one after the other.

    Attributes:
        state: their buffers.
        rounds: captured rounds over these buffers, by what they depend on besides.
        prefills: captured prefills, by their width.
        graph_memory: of all these graphs.
        fence: behind the work of the last call, part of which the device may not have begun yet.
    """

    def __init__(self, state: DecodeState):
        self.state = state
        self.rounds, self.prefills = Captures(), Captures()
        self.graph_pool = GraphPool()
        self.fence = Fence(state.tokens.device)
        self._borrower: Callable[[], DeferredCache | None] = lambda: None

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

    A session belongs to one call at a time; calls of several threads at once get several sessions. Calls may be on
    several streams. Copies of a pool, and what is unpickled of one, are empty.
    """

    def __init__(self) -> None:
        self._idle: list[tuple[SessionKey, Session]] = []  # the least recently used first
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple:
        return type(self), ()

    def __len__(self) -> int:
        return len(self._idle)

    def __contains__(self, key: SessionKey | None) -> bool:
        with self._lock:
            return any(kept == key for kept, _ in self._idle)

    @contextmanager
    def session(
        self, key: SessionKey | None, allocate: Callable[[], DecodeState], fill: Callable[[Session], None]
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
        with _settled_on_error(session):
            yield session
        if key is not None:
            self._keep(key, session)

    def _filled(
        self, key: SessionKey | None, allocate: Callable[[], DecodeState], fill: Callable[[Session], None]
    ) -> Session:
        session = None if key is None else self._take(key)
        if session is None:
            session = Session(allocate())
        session.fence.wait()
        with _settled_on_error(session):
            fill(session)
        return session

    def _take(self, key: SessionKey) -> Session | None:
        """The last used session of `key`. Where there is none, those that no call can use any more are freed."""
        with self._lock:
            for place in reversed(range(len(self._idle))):
                if self._idle[place][0] == key:
                    return self._idle.pop(place)[1]
            kept, past = [], []
            for one in self._idle:
                (past if one[0].fingerprint.is_past(key.fingerprint) else kept).append(one)
            self._idle = kept
        _free(past)
        return None

    def _keep(self, key: SessionKey, session: Session) -> None:
        session.fence.set()
        with self._lock:
            self._idle.append((key, session))
            dropped, self._idle = self._idle[:-MAX_SESSIONS], self._idle[-MAX_SESSIONS:]
        _free(dropped)

    def clear(self) -> None:
        """Free everything that no call is using."""
        with self._lock:
            dropped, self._idle = self._idle, []
        _free(dropped)


_creating = threading.Lock()


def sessions_of(drafter: Drafter) -> SessionPool:
    """What is kept for further calls with `drafter`."""
    with _creating:
        if drafter.sessions is None:
            drafter.sessions = SessionPool()
        return drafter.sessions


def _free(sessions: list[tuple[SessionKey, Session]]) -> None:
    # Memory returns to the stream that it was allocated on, which may not be the one that it was last used on.
    for _, session in sessions:
        session.fence.synchronize()
    sessions.clear()


@contextmanager
def _settled_on_error(session: Session) -> Iterator[None]:
    """Context after which, if an error ends it, nothing that the device was given uses the session any more."""
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # where the error is the device's
            session.fence.set()
            session.fence.synchronize()
        raise
