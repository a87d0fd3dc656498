"""Results of a manager's requests: kept until they are taken, or passed to handlers of event loops."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TypeAlias

from ..host.generation import GenerationOutput

logger = logging.getLogger(__name__)

ResultHandler: TypeAlias = Callable[[GenerationOutput], None]


class Results:
    """Results that were not taken yet, and handlers of future results."""

    def __init__(self, changed: threading.Condition):
        self._changed = changed
        # Results by number, in order of arrival; and the numbers by request.
        self._kept: OrderedDict[int, GenerationOutput] = OrderedDict()
        self._numbers: dict[str, deque[int]] = {}
        self._num_kept = 0
        self._handlers: dict[str, tuple[ResultHandler, asyncio.AbstractEventLoop]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no result is kept, and no handler waits for one."""
        return not (self._kept or self._handlers)

    def take(
        self, request_id: str | None, is_expected: Callable[[], bool], timeout: float | None
    ) -> GenerationOutput | None:
        """The next result, of `request_id` if given; None after `timeout` seconds or if none is expected."""
        with self._changed:
            self._changed.wait_for(lambda: self.has(request_id) or not is_expected(), timeout)
            return self._next(request_id) if self.has(request_id) else None

    def has(self, request_id: str | None) -> bool:
        """Whether a result is kept, of `request_id` if given."""
        return bool(self._kept) if request_id is None else request_id in self._numbers

    def _next(self, request_id: str | None) -> GenerationOutput:
        """Remove the first kept result, of `request_id` if given, and return it."""
        number = next(iter(self._kept)) if request_id is None else self._numbers[request_id][0]
        result = self._kept.pop(number)
        numbers = self._numbers[result.request_id]
        numbers.popleft()
        if not numbers:
            del self._numbers[result.request_id]
        return result

    def drop(self, request_id: str) -> None:
        """Drop the kept results of a request."""
        with self._changed:
            for _ in tuple(self._numbers.get(request_id, ())):
                self._next(request_id)

    def add_handler(self, request_id: str, callback: ResultHandler) -> None:
        """Call `callback` on the running event loop with every result of a request, including kept ones."""
        loop = asyncio.get_running_loop()
        with self._changed:
            self._handlers[request_id] = callback, loop
            self.deliver([self._next(request_id) for _ in tuple(self._numbers.get(request_id, ()))])

    def drop_handler(self, request_id: str | None) -> None:
        """Drop the handler of a request that was not added."""
        with self._changed:
            self._handlers.pop(request_id, None)

    def deliver(self, results: list[GenerationOutput]) -> None:
        """Pass results to their handlers, one call for each event loop, and keep the others; `changed` is held."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[ResultHandler, GenerationOutput]]] = {}
        for one in results:
            callback, loop = self._handlers.get(one.request_id, (None, None))
            if callback is None:
                self._kept[self._num_kept] = one
                self._numbers.setdefault(one.request_id, deque()).append(self._num_kept)
                self._num_kept += 1
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
    """Call handlers in the event loop; an error of one does not stop the others."""
    for callback, result in calls:
        try:
            callback(result)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            message = f"The result handler of the request {result.request_id} failed."
            asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})
