"""The thread of a manager: it runs rounds while there are requests, and lets other calls run between rounds."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..calls.request import Arrived, Request
from ..errors import first_line
from ..host.generation import BackgroundThreadStatus
from ..modules.locks import lock_of
from .manager_call import ManagedCall

logger = logging.getLogger(__name__)

# Seconds for which an idle run waits for another request before it ends and restores the model.
LINGER = 1.0

# Seconds for which `add` waits for room in a full queue, as in transformers' manager.
SECONDS_TO_WAIT = 10.0

STOPPED = "The manager was stopped before the request had ended."


class RoundThread:
    """The thread that runs the requests of a queue. A run gets arrivals from `next`.

    It can be started again after it has ended.

    Attributes:
        status: transformers' status; `fatal_error` is the error that ended the thread, or None.
        thread: None before the start, and after `join` has seen the thread end.
        warm_ups: groups of `ManagedCall.warm_up_groups` that are still to run while there are no requests.
        takes_requests: whether requests go to this process, not to another process of a split model.
    """

    takes_requests = True

    def __init__(self, call: ManagedCall):
        self.status = BackgroundThreadStatus()
        self.thread: threading.Thread | None = None
        self.warm_ups: deque[list[Request]] = deque()
        self._call, self._requests = call, call.requests
        # Also guards the fields below.
        self._changed = self._requests.changed
        # Threads that are in `pause` or wait for it; and whether the thread runs rounds and is not waiting.
        self._pauses: list[int] = []
        self._runs_rounds = False
        # Whether there was a pause, in which the model may have changed, since `next` last reported one.
        self._was_paused = False
        # `ManagedCall.seen` at the beginning of the run; None until the run has asked for arrivals.
        self._seen: tuple | None = None

    @property
    def is_running(self) -> bool:
        """Whether the thread has been started and is alive."""
        return self.thread is not None and self.thread.is_alive()

    @property
    def has_stopped(self) -> bool:
        return self.status.local_status == BackgroundThreadStatus.STOPPED

    @property
    def _is_stopping(self) -> bool:
        return self.status.local_status != BackgroundThreadStatus.DONT_STOP

    @property
    def _is_hard_stop(self) -> bool:
        return self.status.local_status == BackgroundThreadStatus.HARD_STOP

    @property
    def _has_work(self) -> bool:
        return self._requests.has_news or self._is_stopping

    # For other threads.

    def expects(self, request_id: str) -> bool:
        """Whether a request with this id was added and is not over."""
        return request_id in self._requests.active

    def start(self) -> bool:
        """Start the thread; returns False if it was running."""
        with self._changed:
            if self.is_running:
                return False
            self.status.clear()
            self.thread = threading.Thread(target=self._work, name="hf_specdec-continuous-batching")
            self.thread.start()
            return True

    def request_stop(self, is_hard: bool) -> None:
        """Ask the thread to stop when all requests have ended, or after the current round if `is_hard`."""
        if threading.get_ident() in self._pauses:
            raise RuntimeError(
                "stop() was called within pause(), in which no request can end; expected it after that. Leave the "
                "context first."
            )
        with self._changed:
            if not self.has_stopped:
                status = BackgroundThreadStatus.HARD_STOP if is_hard else BackgroundThreadStatus.FLUSH_AND_STOP
                self.status.request_stop(status, 0)
            self._changed.notify_all()

    def join(self, stop_trigger_time: float, timeout: float | None) -> None:
        """Wait at most `timeout` seconds for the thread to end; `stop_trigger_time` is the time of the stop request."""
        thread = self.thread
        if thread is None:
            return
        thread.join(timeout)
        if thread.is_alive():
            logger.warning("The manager's thread still runs after %s seconds.", timeout)
            return
        logger.info("The manager's thread ended after %.2f s.", time.perf_counter() - stop_trigger_time)
        with self._changed:
            if self.thread is thread:  # another waiting thread may have started a new one
                self.thread = None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context in which no round runs."""
        if not self.is_running:
            raise RuntimeError(
                "pause() was called, but the manager does not run; expected it between start() and stop()."
            )
        me = threading.get_ident()
        with self._changed:
            self._pauses.append(me)
            self._changed.notify_all()
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._runs_rounds or self.has_stopped)
                if self.has_stopped:
                    raise RuntimeError("The manager stopped before it could pause.") from self.status.fatal_error
            yield
        finally:
            with self._changed:
                self._pauses.remove(me)
                self._was_paused = True
                self._changed.notify_all()

    def add(self, requests: list[Request]) -> None:
        """Add the sequences of a request to the queue. Waits for room, but not in an event loop."""
        with self._changed:
            if self._requests.is_full and not _is_in_event_loop():
                self._changed.wait_for(lambda: not self._requests.is_full or self._is_stopping, SECONDS_TO_WAIT)
            self._check_open()
            self._requests.add(requests)

    def _check_open(self) -> None:
        if self._is_stopping and self.thread is not None:
            fatal_error = self.status.fatal_error
            about = "is stopping" if fatal_error is None else "has ended by an error"
            raise RuntimeError(f"The manager {about} and takes no more requests.") from fatal_error

    # In the thread.

    def _work(self) -> None:
        try:
            while self._wait_for_requests():
                try:
                    self._seen = None
                    if self.warm_ups and not self._requests.has_arrivals:
                        self._call.warm_up([self.warm_ups[0]])
                        self.warm_ups.popleft()
                    else:
                        self._call.run(self.next)
                finally:
                    with self._changed:
                        self._runs_rounds = False
                        self._changed.notify_all()
        except BaseException as error:
            logger.exception("The manager's thread ends by an error.")
            self.status.request_stop(BackgroundThreadStatus.HARD_STOP, 0)
            with self._changed:
                self.status.record_fatal_error(error)
                self._requests.fail_all(f"{type(error).__name__}: {first_line(error)}")
            self._tell_of_error()
        finally:
            with self._changed:
                self.status.mark_as_stopped()
                self._changed.notify_all()

    def _tell_of_error(self) -> None:
        """Tell the other processes of a split model that the thread ends."""

    def _is_run_due(self) -> bool:
        return not self._pauses and bool(self._requests.has_arrivals or self._is_stopping or self.warm_ups)

    def _wait_for_requests(self) -> bool:
        """Wait until a run is due; False if the manager must stop."""
        with self._changed:
            self._changed.wait_for(self._is_run_due)
            if self._is_hard_stop:
                self._requests.fail_all(STOPPED)
            self._runs_rounds = bool(self._requests.has_arrivals or (self.warm_ups and not self._is_stopping))
            return self._runs_rounds

    def next(self, is_idle: bool, leave_target: Callable[[], None]) -> Arrived:
        """See `Arrivals`. The target's lock is released while this waits, and when another call wants it.

        A run knows the target as it was at the run's beginning, and keeps its keys and values. So if the target has
        changed since, the run ends and requests are requeued for another run; after a pause also those that have begun.
        """
        lock, has_waited = lock_of(self._call.model), False
        if self._seen is None:  # now, because a change may follow the first result at once
            leave_target()
            self._seen = self._call.seen()
        while self._pauses or (not has_waited and (lock.is_wanted or (is_idle and not self._has_work))):
            has_waited = True
            self._wait(is_idle, leave_target)
        if self._was_paused or (is_idle and self._requests.has_arrivals):
            leave_target()
            if self._call.seen() != self._seen:
                self._requests.requeue()
                return Arrived(is_open=False, must_restart=True)
        with self._changed:
            arrived, withdrawn = self._requests.take()
            if self._is_hard_stop:
                arrived, withdrawn = self._end_all(arrived)
            is_changed, self._was_paused = self._was_paused, False
            return Arrived(arrived, withdrawn, bool(self._requests.active), is_changed, has_waited)

    def _end_all(self, arrived: list[Request]) -> tuple[list[Request], list[tuple[Request, str]]]:
        """End the `arrived` requests on a hard stop; returns the arrivals and withdrawals for the run."""
        for request in arrived:
            self._requests.fail(request, STOPPED)
        return [], [(one, STOPPED) for one in self._requests.active.values()]

    def _wait(self, is_idle: bool, leave_target: Callable[[], None]) -> None:
        """Leave the target to others while the manager is paused, and then, if idle, wait `LINGER` seconds for work."""
        leave_target()
        with self._call.evaluation.suspended(), lock_of(self._call.model).released(), self._changed:
            self._runs_rounds = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pauses)
            if is_idle:
                self._changed.wait_for(lambda: self._has_work or self._pauses, LINGER)
                self._changed.wait_for(lambda: not self._pauses)
            self._runs_rounds = True


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
