"""Prefill of requests in padded groups: for prompts that cannot be packed, such as those of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..state import DecodeState, upload
from . import request_rows
from .lazy_target import LazyTarget
from .lease import SessionLease, shape_of
from .packed_prompts import PromptSpan
from .request import Request
from .request_rows import RowRequest
from .sessions import settled_on_error


class PaddedGroups:
    """Sessions in which groups of requests are prefilled, before they are copied to where rounds run.

    Args:
        request: the call.
        target: of the call.
    """

    def __init__(self, request: Request, target: LazyTarget):
        self._request, self._target = request, target
        self._leases: dict[int, SessionLease] = {}

    def size(self, count: int) -> int:
        """Rows of the session in which `count` requests are prefilled: a few sizes, where sessions are kept."""
        return next(size for size in request_rows.GROUP_SIZES if size >= count) if self._target.is_captured else count

    def open(self, requests: Sequence[RowRequest]) -> None:
        """Open the session of the largest group of `requests`, of which some wait."""
        count = min(max(len(requests), 1), request_rows.GROUP_SIZES[-1])
        longest = max((len(one.prompt) for one in requests), default=1)
        self._lease(count, min(longest, request_rows.MOST_GROUP_TOKENS // self.size(count)))

    def prefill(
        self,
        state: DecodeState,
        rows: list[int],
        group: list[RowRequest],
        fill: Callable[[DecodeState, Sequence[int]], None],
    ) -> None:
        """Prefill `group` and copy it into `rows` of `state`.

        Args:
            state: where rounds run.
            rows: of it.
            group: of requests.
            fill: puts them into rows of a state.
        """
        longest = max(len(one.prompt) for one in group)
        lease = self._lease(len(group), longest)
        source = lease.session.state
        with settled_on_error(lease.session):
            source.clear()
            source.set_temperature(self._request.temperature)
            fill(source, range(len(group)))
            source.live = longest
            spans = [PromptSpan(row, 0, len(one.prompt) - 1) for row, one in enumerate(group)]
            if lease.prefill.lacks(spans):
                lease.prefill.capture(spans)
            lease.prefill.run(spans)
            to = upload(rows, state.lengths)
            state.copy_rows(to, source, longest)
            self._request.drafter.copy_rows(state, to, source, longest)

    def _lease(self, count: int, longest: int) -> SessionLease:
        """Where `count` requests are prefilled, whose prompts have at most `longest` tokens."""
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
