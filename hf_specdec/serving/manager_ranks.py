"""Manager threads of a target that is split over processes. All run the same rounds of the same requests.

As in transformers, requests go to the first process, which sends them to the others between rounds. Results are
delivered on every process. Every process must start, pause and stop its manager.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ..calls.request import Arrived, Request
from ..host.generation import BackgroundThreadStatus
from ..modules.locks import lock_of
from ..parallel.tensor_parallel import RankAgreement, is_first_rank
from .manager_call import ManagedCall
from .manager_thread import STOPPED, RoundThread

# Seconds for which the first process waits for requests before it tells the others that there are none.
POLL = 0.1


class _Said(NamedTuple):
    """The numbers that processes exchange to agree; of each the largest of all processes counts."""

    status: int  # of `BackgroundThreadStatus`: how soon to stop
    has_failed: bool
    is_paused: bool  # whether a thread of the process has paused the manager
    is_not_paused: bool
    was_paused: bool  # since the last round
    num_news: int  # number of requests that arrived, were withdrawn or failed
    is_open: bool  # whether there are requests that are not over


@dataclass
class _News:
    """Changes on the first process; `failed` requests have ended before a run took them."""

    arrived: list[Request] = field(default_factory=list)
    withdrawn: list[tuple[Request, str]] = field(default_factory=list)
    failed: list[Request] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.arrived) + len(self.withdrawn) + len(self.failed)


class SplitRoundThread(RoundThread):
    """The `RoundThread` of a process of a split target."""

    def __init__(self, call: ManagedCall):
        super().__init__(call)
        self._ranks: RankAgreement | None = None
        # Changes that the first process has not sent to the others yet.
        self._news = _News()
        # Whether another process has reported a failure.
        self._is_told = False
        # Not on the first process: ids of requests that this process was asked to add, and that the first process has
        # not sent yet.
        self._expected: set[str] = set()
        if self.takes_requests:
            self._requests.on_failed = lambda request: self._news.failed.append(request)

    def start(self) -> bool:
        if self.is_running:
            return False
        self._is_told, self._news = False, _News()
        self._expected.clear()
        self._ranks = RankAgreement(self._call.model, self._call.settings.cpu_group_timeout)
        lock_of(self._call.model).guard = self._check_caller
        return super().start()

    @property
    def takes_requests(self) -> bool:
        return is_first_rank(self._call.model)

    def expects(self, request_id: str) -> bool:
        return super().expects(request_id) or request_id in self._expected

    def add(self, requests: list[Request]) -> None:
        if self.takes_requests:
            super().add(requests)
            return
        with self._changed:
            self._check_open()
            self._expected.update(one.request_id for one in requests)

    def _check_caller(self) -> None:
        """Raise `RuntimeError` for a call outside of a pause, because the other processes do not know of it."""
        me = threading.current_thread()
        if me is not self.thread and me.ident not in self._pauses:
            raise RuntimeError(
                f"{type(self._call.model).__name__} is split over processes, whose manager runs its rounds; expected "
                "no other call with a drafter meanwhile, since processes would make it between different rounds. Make "
                "it on all processes within manager.pause(), or after stop()."
            )

    # In the thread.

    def _agree(self, num_news: int = 0, is_open: bool = False, has_failed: bool = False) -> _Said:
        """The largest numbers of all processes; raises `RuntimeError` if another process has failed."""
        with self._changed:
            is_paused, was_paused, self._was_paused = bool(self._pauses), self._was_paused, False
            status = self.status.local_status
        said = _Said(status, has_failed, is_paused, not is_paused, was_paused, num_news, is_open)
        agreed = _Said(*self._ranks.most(said))
        self.status.update_with_tp_status(agreed.status)
        if agreed.has_failed and not has_failed:
            self._is_told = True
            raise RuntimeError(
                "Another process that runs the model has failed; expected all of them to run. See its error."
            )
        return agreed

    def _work(self) -> None:
        try:
            super()._work()
        finally:
            lock_of(self._call.model).guard = None
            self._ranks.close()

    def _tell_of_error(self) -> None:
        if not self._is_told:
            with contextlib.suppress(RuntimeError):  # if a process has died
                self._agree(has_failed=True)

    def _wait_for_requests(self) -> bool:
        while True:
            with self._changed:
                if self._ranks.is_first:
                    self._changed.wait_for(self._is_run_due, POLL)
                # `pause` waits until all agree that no round runs.
                self._runs_rounds = not self._pauses
                num_news = self._requests.has_arrivals or len(self._news.failed)
            # Only agreed values count: this process may have been asked to stop meanwhile, and others not.
            agreed = self._agree(num_news)
            is_hard_stop = agreed.status >= BackgroundThreadStatus.HARD_STOP
            is_stopping = agreed.status >= BackgroundThreadStatus.FLUSH_AND_STOP
            with self._changed:
                is_due = agreed.num_news > 0 and not agreed.is_paused
                if is_hard_stop:
                    self._requests.fail_all(STOPPED)
                self._runs_rounds = is_due and not is_hard_stop
                self._changed.notify_all()
                if self._runs_rounds:
                    return True
                if is_hard_stop or (is_stopping and not agreed.num_news):
                    return False

    def next(self, is_idle: bool, leave_target: Callable[[], None]) -> Arrived:
        has_waited = False
        while True:
            with self._changed:
                if self._ranks.is_first:
                    arrived, withdrawn = self._requests.take()
                    self._news.arrived += arrived
                    self._news.withdrawn += withdrawn
                num_news, is_open = len(self._news), bool(self._requests.active)
            agreed = self._agree(num_news, is_open)
            if agreed.is_not_paused:
                break
            has_waited = True
            self._wait(False, leave_target)
        arrived, withdrawn = self._told() if agreed.num_news else ([], [])
        if agreed.status >= BackgroundThreadStatus.HARD_STOP:
            with self._changed:
                arrived, withdrawn = self._end_all(arrived)
        return Arrived(arrived, withdrawn, bool(agreed.is_open), bool(agreed.was_paused), has_waited)

    def _told(self) -> tuple[list[Request], list[tuple[Request, str]]]:
        """Requests that arrived, and that were withdrawn, on the first process."""
        with self._changed:
            news, self._news = self._news, _News()
        withdrawn = [(one.request_id, error) for one, error in news.withdrawn]
        arrived, withdrawn, failed = self._ranks.from_first((news.arrived, withdrawn, news.failed))
        if self._ranks.is_first:
            return arrived, news.withdrawn
        with self._changed:
            self._expected.difference_update(one.request_id for one in (*arrived, *failed))
            known = self._requests.active
            known.update((one.request_id, one) for one in arrived)
            for one in failed:
                self._requests.on_finished(one)
            return arrived, [(known[name], error) for name, error in withdrawn if name in known]
