"""The requests of a manager, from their arrival until their results were taken or passed to handlers of event loops."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from transformers import ContinuousBatchingConfig

from ..calls.request import Request
from ..host.generation import GenerationOutput
from .manager_metrics import ManagerMetrics

logger = logging.getLogger(__name__)

ResultHandler: TypeAlias = Callable[[GenerationOutput], None]


class RequestQueue:
    """Requests that are not over, results that were not taken yet, and handlers of future results.

    Attributes:
        changed: guards the manager's state and notifies of changes. It is never held while waiting for the target's
            lock.
        metrics: metrics of the requests that are over.
        active: requests that are not over, by id.
        on_failed: called with every request that ends before a run takes it; None for nothing.
    """

    def __init__(self, settings: ContinuousBatchingConfig):
        self._settings = settings
        self.changed = threading.Condition()
        self.metrics = ManagerMetrics()
        self.active: dict[str, Request] = {}
        self.on_failed: Callable[[Request], None] | None = None
        # Requests of `active` that had not started when `is_full` last looked.
        self._waiting: dict[str, Request] = {}
        self._arrived: deque[Request] = deque()
        self._withdrawn: list[tuple[Request, str]] = []
        # Ids of `active` requests whose results nobody expects.
        self._disowned: set[str] = set()
        # Results by number, in order of arrival; and the numbers by request.
        self._kept: OrderedDict[int, GenerationOutput] = OrderedDict()
        self._numbers: dict[str, deque[int]] = {}
        self._num_kept = 0
        self._handlers: dict[str, tuple[ResultHandler, asyncio.AbstractEventLoop]] = {}

    @property
    def has_arrivals(self) -> bool:
        """Whether requests wait for a run."""
        return bool(self._arrived)

    @property
    def has_news(self) -> bool:
        """Whether requests have arrived or were withdrawn since the last `take`."""
        return bool(self._arrived or self._withdrawn)

    @property
    def is_full(self) -> bool:
        most = self._settings.max_queue_size
        if most == 0 or len(self._waiting) < most:
            return False
        self._waiting = {name: one for name, one in self._waiting.items() if not one.has_started}
        return len(self._waiting) >= most

    def check_room(self) -> None:
        """Raise `queue.Full` if `max_queue_size` requests wait."""
        with self.changed:
            if self.is_full:
                raise queue.Full(
                    f"{self._settings.max_queue_size} requests wait, as many as may (max_queue_size); try again later."
                )

    def add(self, requests: list[Request]) -> None:
        """Add the sequences of a request, `requests`; those with an error end. Raises `ValueError` if an unfinished
        request has the same id, `queue.Full` if `max_queue_size` requests wait."""
        with self.changed:
            self.check_room()
            taken = [one.request_id for one in requests if one.request_id in self.active]
            if taken:
                raise ValueError(f"The request {taken[0]} is not over; expected another request_id.")
            for one in requests:
                self.active[one.request_id] = self._waiting[one.request_id] = one
                if one.error is not None:
                    self.fail(one, one.error)
                else:
                    self._arrived.append(one)
            self.changed.notify_all()

    def cancel(self, request_id: str) -> None:
        """End a sequence, or all sequences of a prompt, by its id, if they are not over."""
        with self.changed:
            for request in [one for one in self.active.values() if request_id in (one.request_id, one.prompt_id)]:
                error = f"The request {request.request_id} was cancelled."
                if request in self._arrived:
                    self._arrived.remove(request)
                    self.fail(request, error)
                else:
                    self._withdrawn.append((request, error))
            self.changed.notify_all()

    def disown(self, request_ids: Sequence[str]) -> None:
        """End requests whose ids their user never gets, and drop their results."""
        with self.changed:
            for name in request_ids:
                prompt = {one.request_id for one in self.active.values() if one.prompt_id == name} | {name}
                self._disowned |= prompt & self.active.keys()
                self.cancel(name)
                for one in prompt:
                    self._take_results(one)

    def take(self) -> tuple[list[Request], list[tuple[Request, str]]]:
        """Requests that arrived since the last call, and requests that were withdrawn, with an error each."""
        with self.changed:
            self.changed.notify_all()  # admitted requests leave room for others
            arrived, withdrawn = list(self._arrived), list(self._withdrawn)
            self._arrived.clear()
            self._withdrawn.clear()
            return arrived, withdrawn

    def requeue(self) -> None:
        """Requeue all requests for another run, with their tokens so far; withdrawn requests end."""
        with self.changed:
            for request, error in self._withdrawn:
                if request.request_id in self.active:
                    self.fail(request, error)
            self._withdrawn.clear()
            self._arrived = deque(self.active.values())

    def fail(self, request: Request, error: str) -> None:
        """End a request that no run has taken."""
        request.error, request.lifespan = error, (request.lifespan[0], time.perf_counter())
        if self.on_failed is not None:
            self.on_failed(request)
        self.on_finished(request)

    def fail_all(self, error: str) -> None:
        """End all requests while no run has any."""
        with self.changed:
            self._arrived.clear()
            self._withdrawn.clear()
            for request in list(self.active.values()):
                self.fail(request, error)

    def on_finished(self, request: Request) -> None:
        """Deliver the result of a request that is over, unless it is a warm-up request."""
        with self.changed:
            if request.request_id is None:
                return
            self.active.pop(request.request_id, None)
            self._waiting.pop(request.request_id, None)
            self.metrics.count(request)
            if request.request_id in self._disowned:
                self._disowned.remove(request.request_id)
                self.changed.notify_all()
            else:
                self.deliver([request.result()])

    def on_tokens(self, requests: list[Request]) -> None:
        """Deliver the tokens so far of streamed requests."""
        streamed = [one for one in requests if one.streaming and one.request_id not in self._disowned]
        if streamed:
            with self.changed:
                self.deliver([one.result() for one in streamed])

    # Results.

    @property
    def has_no_results(self) -> bool:
        """Whether no result is kept, and no handler waits for one."""
        return not (self._kept or self._handlers)

    def take_result(
        self, request_id: str | None, is_expected: Callable[[], bool], timeout: float | None
    ) -> GenerationOutput | None:
        """The next result, of `request_id` if given; None after `timeout` seconds or if none is expected."""
        with self.changed:
            self.changed.wait_for(lambda: self.has_result(request_id) or not is_expected(), timeout)
            return self._next_result(request_id) if self.has_result(request_id) else None

    def has_result(self, request_id: str | None) -> bool:
        """Whether a result is kept, of `request_id` if given."""
        return bool(self._kept) if request_id is None else request_id in self._numbers

    def _next_result(self, request_id: str | None) -> GenerationOutput:
        """Remove the first kept result, of `request_id` if given, and return it."""
        number = next(iter(self._kept)) if request_id is None else self._numbers[request_id][0]
        result = self._kept.pop(number)
        numbers = self._numbers[result.request_id]
        numbers.popleft()
        if not numbers:
            del self._numbers[result.request_id]
        return result

    def _take_results(self, request_id: str) -> list[GenerationOutput]:
        """Remove all kept results of a request, and return them."""
        return [self._next_result(request_id) for _ in tuple(self._numbers.get(request_id, ()))]

    def add_handler(self, request_id: str, callback: ResultHandler) -> None:
        """Call `callback` on the running event loop with every result of a request, including kept ones."""
        loop = asyncio.get_running_loop()
        with self.changed:
            self._handlers[request_id] = callback, loop
            self.deliver(self._take_results(request_id))

    def drop_handler(self, request_id: str | None) -> None:
        """Drop the handler of a request, unless it is active."""
        with self.changed:
            if request_id not in self.active:
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
        self.changed.notify_all()


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
