"""Sessions: buffers and CUDA graphs of one shape, kept from call to call."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from ..auto_k.auto_drafts import Acceptance, RoundTimes
from ..auto_k.round_costs import CostTable
from ..cache.key_layout import KeyLayout
from ..calls.kv_transfer import DeferredCache
from ..drafters.base import Drafter
from ..graphs.cuda_graphs import GraphPool
from ..memory.fence import Fence
from ..modules.patch import Patch
from ..modules.signature import Fingerprint
from ..state import DecodeState, Shape
from .prefill import PromptBuffers

# Sessions kept for a drafter; the least recently used one is freed first. Continuous batching has one for each size of
# its groups, and one for each number of rows down to its last.
MAX_SESSIONS = 6

# Captured rounds, and captured prefills, kept in a session; the least recently used one is freed first. Each set of
# warpers (each `top_p`) needs its own rounds, one for each K; each power of two of columns needs its own prefill.
MAX_CAPTURES = 16

# Hostings kept for a drafter; the least recently used one is dropped first. Each switch of adapters makes another one.
MAX_HOSTINGS = 6


@dataclass(eq=False)
class Hosting:
    """What stays the same in all calls until target or drafter change.

    Attributes:
        fingerprint: of target and drafter.
        patches: of target and drafter; empty if not known.
        layouts: layouts of keys and values in a `RowMemory`, by K; None where there is none.
        costs: costs of rounds, looked up on demand: those with the drafter (False) and without it (True).
    """

    fingerprint: Fingerprint
    patches: Sequence[Patch] = ()
    layouts: dict[int, KeyLayout | None] = field(default_factory=dict)
    costs: dict[bool, CostTable] = field(default_factory=dict)


class SessionKey(NamedTuple):
    """What a session depends on. With `grows`, keys and values are in a `RowMemory`."""

    shape: Shape
    grows: bool
    compiles_rounds: bool
    hosting: Hosting


class Captures(OrderedDict[Hashable, Any]):
    """CUDA graphs of a session by key; beyond `MAX_CAPTURES` the least recently used one is freed.

    A value of None stands for what cannot be captured.
    """

    def get(self, key: Hashable, default: Any = None) -> Any:
        if key in self:
            self.move_to_end(key)
        return super().get(key, default)

    def add(self, key: Hashable, captured: Any) -> None:
        self[key] = captured
        if len(self) > MAX_CAPTURES:
            self.popitem(last=False)


class Session:
    """Buffers and CUDA graphs for calls of one shape; one call uses them at a time.

    Attributes:
        state: the buffers.
        rounds: captured rounds, by `BlockProcessor.key`, log-probabilities, scores and logits that calls get, K and
            `RaggedCache.kernel_span`.
        catch_ups: captured `catch_up`, by width and `RaggedCache.kernel_span`.
        prefills: captured chunks of prefills, by width.
        capture_seconds: time of all its captures, with the kernels that were built for them.
        patches: patches of the targets that the graphs were captured of; graphs read their tables.
        round_times: times of its rounds in calls with a fixed K, which ranks of one model do not share.
        num_tensor_bytes: GPU memory that its tensors have taken, without what graphs share.
        fence: recorded after the work of the last call.
    """

    def __init__(self, state: DecodeState):
        self.state = state
        self.rounds, self.catch_ups, self.prefills = Captures(), Captures(), Captures()
        self.prompts = PromptBuffers(state)
        self.graph_pool = GraphPool()
        self.capture_seconds = 0.0
        self.patches: list[Sequence[Patch]] = []
        self.round_times = RoundTimes()
        self.num_tensor_bytes = 0
        self.fence = Fence(state.tokens.device)
        self._borrower: Callable[[], DeferredCache | None] = lambda: None

    @property
    def seconds_a_capture(self) -> float:
        """Expected time of another capture: the mean of those so far."""
        return self.capture_seconds / max(len(self.rounds) + len(self.catch_ups) + len(self.prefills), 1)

    @property
    def num_bytes(self) -> int:
        """GPU memory of its tensors and rows."""
        memory = self.state.cache.row_memory
        return self.num_tensor_bytes + (0 if memory is None else memory.committed)

    def free_rows(self) -> bool:
        """Free the memory of the rows once the device no longer uses it; returns whether there was any."""
        self.fence.synchronize()
        memory = self.state.cache.row_memory
        if memory is None or not memory.committed:
            return False
        memory.free()
        return True

    def lend_buffers(self, cache: DeferredCache) -> DeferredCache:
        """Let `cache` read the buffers until another call needs them."""
        self._borrower = weakref.ref(cache)
        return cache

    def acquire(self) -> None:
        """Make the buffers ready for other texts: wait for the last call, copy its cache if that is still lent, and let
        no rows share memory."""
        self.fence.wait()
        borrower = self._borrower()
        if borrower is not None:
            borrower.take_over()
        memory = self.state.cache.row_memory
        rows = () if memory is None else range(len(self.state.lengths))
        shared = [row for row in rows if memory.is_shared(row, 0)]
        if shared:
            self.fence.synchronize()
        for row in shared:
            memory.unshare(row, 0)


class SessionPool:
    """The idle sessions of a drafter by `SessionKey`, its `Hosting`s, and the acceptance of its drafts.

    A call takes a session out of the pool, so simultaneous calls, perhaps on different streams, get different sessions.

    Attributes:
        acceptances: acceptance of the drafts of all calls with `num_assistant_tokens="auto"`, greedy (False) and
            sampling (True).
        substitute: takes the drafter's place in calls that are faster without it.
    """

    def __init__(self) -> None:
        # Least recently used first.
        self._idle: list[tuple[SessionKey, Session]] = []
        self._hostings: list[Hosting] = []
        self.acceptances: defaultdict[bool, Acceptance] = defaultdict(Acceptance)
        self.substitute: Drafter | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._idle)

    def __contains__(self, key: SessionKey) -> bool:
        return any(one == key for one, _ in self._idle)

    def hosting(self, fingerprint: Fingerprint) -> Hosting:
        """The hosting of the target and the drafter with this fingerprint.

        Hostings that no call can use again, and the least recently used ones, are dropped with their sessions.
        """
        with self._lock:
            same = (one for one in self._hostings if one.fingerprint == fingerprint)
            found = next(same, None) or Hosting(fingerprint)
            others = [one for one in self._hostings if one is not found and not one.fingerprint.is_past(fingerprint)]
            self._hostings = [*others, found][-MAX_HOSTINGS:]
            dropped = [one for one in self._idle if one[0].hosting not in self._hostings]
            self._idle = [one for one in self._idle if one[0].hosting in self._hostings]
        _free(dropped)
        return found

    def contents(self, fingerprint: Fingerprint) -> list[tuple]:
        """What is kept for the target and the drafter with this fingerprint, and how many drafts were accepted: a
        description with the same `repr` in all processes that have made the same calls."""
        with self._lock:
            kept: list[tuple] = [(key, vars(one)) for key, one in sorted(self.acceptances.items())]
            for one in self._hostings:
                if one.fingerprint == fingerprint:
                    kept.append((bool(one.patches), {key: table.known for key, table in one.costs.items()}))
            for key, one in self._idle:
                if key.hosting.fingerprint == fingerprint:
                    graphs = len(one.rounds), len(one.catch_ups), len(one.prefills)
                    kept.append((key.shape, key.grows, key.compiles_rounds, graphs))
        return kept

    def forget(self, fingerprint: Fingerprint) -> None:
        """Drop what `contents` describes; the next `hosting` drops the sessions."""
        with self._lock:
            self.acceptances.clear()
            self._hostings = [one for one in self._hostings if one.fingerprint != fingerprint]

    def of_rows(self, count: int, has_drafts: bool) -> list[Session]:
        """Idle sessions of `count` rows, of calls with drafts or of calls without."""
        with self._lock:
            found = [(key.shape, session) for key, session in self._idle]
        return [one for shape, one in found if shape.batch == count and (shape.num_draft_tokens > 0) == has_drafts]

    def take(self, key: SessionKey) -> Session | None:
        """The most recently used session of `key`; None if there is none."""
        with self._lock:
            for place in reversed(range(len(self._idle))):
                if self._idle[place][0] == key:
                    return self._idle.pop(place)[1]
        return None

    def keep(self, key: SessionKey, session: Session) -> None:
        """Return a session after a call without an error; the least recently used sessions are freed."""
        session.fence.set()
        with self._lock:
            if key.hosting not in self._hostings:  # the pool was cleared meanwhile, for want of memory
                self._hostings = [*self._hostings, key.hosting][-MAX_HOSTINGS:]
            self._idle.append((key, session))
            dropped, self._idle = self._idle[:-MAX_SESSIONS], self._idle[-MAX_SESSIONS:]
        _free(dropped)

    def free_rows(self) -> bool:
        """Free the memory of the rows of all idle sessions, whose graphs stay; returns whether there was any."""
        with self._lock:
            return any([session.free_rows() for _, session in self._idle])

    def shrink(self, most: int) -> None:
        """Free the least recently used sessions until the others take at most `most` bytes."""
        with self._lock:
            taken = list(accumulate(session.num_bytes for _, session in reversed(self._idle)))
            fitting = sum(count <= most for count in taken)
            start = len(self._idle) - fitting
            dropped, self._idle = self._idle[:start], self._idle[start:]
        _free(dropped)

    def clear(self) -> None:
        """Free all idle sessions, and drop all hostings."""
        with self._lock:
            dropped, self._idle = self._idle, []
            self._hostings.clear()
            self.substitute = None
        _free(dropped)


_creating = threading.Lock()


def sessions_of(drafter: Drafter) -> SessionPool:
    """The pool of `drafter`, created at its first call."""
    with _creating:
        if drafter.sessions is None:
            drafter.sessions = SessionPool()
        return drafter.sessions


def _free(sessions: list[tuple[SessionKey, Session]]) -> None:
    # Freed memory returns to the stream that allocated it, and another stream may have used it last.
    for _, session in sessions:
        session.free_rows()
    sessions.clear()


@contextmanager
def settled_on_error(session: Session) -> Iterator[None]:
    """Context that, on an error, waits until the device is done with the session, and frees its graphs and the memory
    of its rows: the error's traceback may keep the session, and graphs of a split target the process group."""
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # if the device itself has failed
            session.fence.set()
            session.free_rows()
            for captured in (session.rounds, session.catch_ups, session.prefills):
                captured.clear()
        raise
