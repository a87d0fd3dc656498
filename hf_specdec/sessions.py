"""Generations of one shape: their buffers, and the rounds captured over them, kept from one call to the next."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from .state import DecodeState

# Sessions that a drafter keeps, the least recently used of them being dropped first.
MAX_SESSIONS = 4


@dataclass
class Session:
    """What generations of one shape share, one after the other.

    Attributes:
        state: their buffers.
        rounds: captured rounds over these buffers, by what they depend on besides.
    """

    state: DecodeState
    rounds: dict[Hashable, Any] = field(default_factory=dict)


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

    @contextmanager
    def session(self, key: Hashable, allocate: Callable[[], DecodeState]) -> Iterator[Session]:
        """Context that owns a session of `key`; one that is left by an error is not kept."""
        with self._lock:
            idle = self._idle.get(key)
            session = idle.pop() if idle else None
        session = session or Session(allocate())
        yield session
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
    tensors = itertools.chain(*((*model.parameters(), *model.buffers()) for model in models))
    return hash(tuple(map(_place, tensors)))


def _place(tensor: torch.Tensor) -> int:
    if isinstance(tensor, DTensor):
        return tensor.to_local().data_ptr()
    return tensor.data_ptr() or id(tensor)  # a quantised weight has no memory but that of its parts
