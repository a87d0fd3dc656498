"""Prefill of requests in padded groups: for prompts that cannot be packed, such as those of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..row_buffers import upload
from ..state import DecodeState
from . import request_rows
from .hosted_target import HostedTarget
from .lease import SessionLease, shape_of
from .prefix_reuse import Prefix, copy_prefixes, copy_texts, wave_after
from .request import Request
from .row_request import RowRequest
from .sessions import settled_on_error


class PaddedGroups:
    """Sessions in which groups of requests are prefilled, before they are copied to where rounds run.

    Args:
        request: the call.
        target: of the call.
    """

    def __init__(self, request: Request, target: HostedTarget):
        self._request, self._target = request, target
        self._leases: dict[int, SessionLease] = {}
        # Where a group is being prefilled, and what is left to do then.
        self._running: SessionLease | None = None
        self._finish: Callable[[], None] | None = None

    def size(self, count: int) -> int:
        """Rows of the session in which `count` requests are prefilled: a few sizes, where sessions are kept."""
        return next(size for size in request_rows.GROUP_SIZES if size >= count) if self._target.is_captured else count

    def open(self, requests: Sequence[RowRequest]) -> None:
        """Open the session of the largest group of `requests`, of which some wait."""
        count = min(max(len(requests), 1), request_rows.GROUP_SIZES[-1])
        longest = max((one.num_prefilled for one in requests), default=1)
        self._lease(count, min(longest, request_rows.MOST_GROUP_TOKENS // self.size(count)))

    def prefill(
        self,
        state: DecodeState,
        prefixes: Sequence[Prefix],
        margin: int,
        group: list[RowRequest],
        fill: Callable[[Sequence[RowRequest], DecodeState, Sequence[int]], None],
    ) -> None:
        """Begin to prefill `group`; `prefill_next` goes on, and copies it into rows of `state`.

        Args:
            state: where rounds run.
            prefixes: the row of each request in it, and what it reuses of other rows there or of the group.
            margin: see `Drafter.prefix_margin`.
            group: of requests.
            fill: puts requests into rows of a state.
        """
        drafter, run = self._request.drafter, [place for place, one in enumerate(prefixes) if not one.is_whole]
        requests = [group[place] for place in run]
        own = [prefixes[place]._replace(row=row) for row, place in enumerate(run)]
        longest = max(one.num_prefilled for one in requests)
        self._running = lease = self._lease(len(run), longest)
        source = lease.session.state
        with settled_on_error(lease.session):
            source.clear()
            source.set_temperature(self._request.temperature)
            fill(requests, source, range(len(run)))
            source.cached[: len(run)] = upload([one.length for one in own], source.cached)
            source.live = longest
            wave = wave_after(own, [one.num_prefilled for one in requests])
            if lease.prefill.lacks([wave]):
                lease.prefill.capture([wave])
            lease.prefill.start(wave, lambda: copy_prefixes(source, drafter, own, margin, state))

        def finish() -> None:
            at = {prefixes[place].row: row for row, place in enumerate(run)}
            rows = [(one.row, at[one.source if one.is_whole else one.row]) for one in prefixes]
            copy_texts(state, drafter, rows, source, longest)
            if len(run) < len(group):
                fill(group, state, [one.row for one in prefixes])  # what they do not have in common

        self._finish = finish

    def prefill_next(self) -> bool:
        """Run the next chunk of the group; returns whether it was the last, and the group is in its rows."""
        with settled_on_error(self._running.session):
            if not self._running.prefill.run_next():
                return False
            self._finish()
        self._finish = None
        return True

    def _lease(self, count: int, longest: int) -> SessionLease:
        """Where `count` requests are prefilled, whose texts have at most `longest` tokens."""
        size, is_captured = self.size(count), self._target.is_captured
        lease = self._leases.get(size)
        if lease is None or lease.shape.slots <= longest:
            shape = shape_of(self._request, size, longest, is_captured)
            lease = SessionLease(self._target, shape, self._request.config.prefill_chunk_size, is_continuous=True)
            with settled_on_error(lease.take()):
                lease.allocate()
            if not is_captured:
                self._leases.clear()
            elif size in self._leases:
                self._leases[size].keep()
            self._leases[size] = lease
        return lease

    def keep(self) -> None:
        """Leave the sessions for other calls."""
        for lease in self._leases.values():
            lease.keep()
