"""Results of a manager's requests: kept until they are asked for, or handed to handlers of event loops."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from transformers.generation.continuous_batching.requests import GenerationOutput

logger = logging.getLogger(__name__)

ResultHandler: TypeAlias = Callable[[GenerationOutput], None]


class Results:
    """Results that nobody has taken yet, and the handlers of those that are to come.

    Args:
        changed: guards them, and tells of changes.
    """

    def __init__(self, changed: threading.Condition):
        self._changed = changed
        self._kept: deque[GenerationOutput] = deque()
        self._handlers: dict[str, tuple[ResultHandler, asyncio.AbstractEventLoop]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no result is kept, and no handler waits for one."""
        return not (self._kept or self._handlers)

    def take(
        self, request_id: str | None, is_expected: Callable[[], bool], timeout: float | None
    ) -> GenerationOutput | None:
        """The next result, of `request_id` if it is given; None after `timeout` seconds or if none is expected."""
        with self._changed:
            self._changed.wait_for(lambda: self._find(request_id) is not None or not is_expected(), timeout)
            place = self._find(request_id)
            if place is None:
                return None
            result = self._kept[place]
            del self._kept[place]
            return result

    def _find(self, request_id: str | None) -> int | None:
        """Place of the first result, of `request_id` if it is given."""
        places = (place for place, one in enumerate(self._kept) if request_id in (None, one.request_id))
        return next(places, None)

    def add_handler(self, request_id: str, callback: ResultHandler) -> None:
        """Call `callback` on the running event loop with every result of a request, those that are kept included."""
        loop = asyncio.get_running_loop()
        with self._changed:
            self._handlers[request_id] = callback, loop
            come = [one for one in self._kept if one.request_id == request_id]
            for one in come:
                self._kept.remove(one)
            self.deliver(come)

    def drop_handler(self, request_id: str | None) -> None:
        """Forget the handler of a request that was not added."""
        with self._changed:
            self._handlers.pop(request_id, None)

    def deliver(self, results: list[GenerationOutput]) -> None:
        """Hand results to their handlers, all of an event loop at once, and keep the others; `changed` is held."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[ResultHandler, GenerationOutput]]] = {}
        for one in results:
            callback, loop = self._handlers.get(one.request_id, (None, None))
            if callback is None:
                self._kept.append(one)
                continue
            by_loop.setdefault(loop, []).append((callback, one))
            if one.is_finished():
                del self._handlers[one.request_id]
        for loop, calls in by_loop.items():
            try:
                loop.call_soon_threadsafe(_call_all, calls)
            except RuntimeError:
                logger.warning("%d results were dropped, since their event loop is closed.", len(calls))
        self._changed.notify_all()


def _call_all(calls: list[tuple[ResultHandler, GenerationOutput]]) -> None:
    for callback, result in calls:
        callback(result)
