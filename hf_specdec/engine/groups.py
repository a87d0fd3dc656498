"""Groups of requests, which are prefilled in sessions of their own and then copied to the rows of the rounds.

Prompts that cannot be packed (recurrent layers) are prefilled this way while rounds of other rows go on. Equal prompts
are prefilled once: what target and drafter keep of a whole prompt, recurrent states included, is the same in every row
with that prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..calls.call import Call
from ..calls.request import Request
from ..graphs.buckets import next_power_of_two
from ..state import DecodeState, upload
from .hosted_target import HostedTarget
from .lease import SessionLease, shape_of
from .prefix_cache import Prefix, copy_prefixes, copy_texts, spans_after
from .sessions import settled_on_error

# Batch sizes of captured groups; a group is padded to the next one. With few sizes, groups share buffers.
GROUP_SIZES = (1, 8, 32)

# Most tokens of a group, padding included; a longer prompt is its own group.
MOST_GROUP_TOKENS = 16384


class Groups:
    """The sessions in which groups of requests are prefilled; with `is_continuous` there are many groups."""

    def __init__(self, call: Call, target: HostedTarget, is_continuous: bool):
        self._call, self._target, self._is_continuous = call, target, is_continuous
        self._leases: dict[int, SessionLease] = {}
        # The session that is prefilling a group, and what is to be done after its last chunk.
        self._running: SessionLease | None = None
        self._finish: Callable[[], None] | None = None

    def size(self, count: int) -> int:
        """Rows of the session that prefills `count` requests. Captured sessions have a few sizes only."""
        if not self._target.is_captured:
            return count
        if not self._is_continuous:
            return next_power_of_two(count)
        return next(size for size in GROUP_SIZES if size >= count)

    def fits(self, count: int, longest: int) -> bool:
        """Whether `count` requests, with texts of up to `longest` tokens, may be prefilled together."""
        return count == 1 or (count <= GROUP_SIZES[-1] and longest * self.size(count) <= MOST_GROUP_TOKENS)

    def open(self, requests: Sequence[Request]) -> None:
        """Open the session of the largest group of `requests`; some of them wait."""
        count = min(max(len(requests), 1), GROUP_SIZES[-1])
        longest = max((one.num_prefilled for one in requests), default=1)
        self._lease(count, min(longest, MOST_GROUP_TOKENS // self.size(count)))

    def prefill(
        self,
        state: DecodeState,
        prefixes: Sequence[Prefix],
        margin: int,
        group: Sequence[Request],
        fill: Callable[[Sequence[Request], DecodeState, Sequence[int]], None],
    ) -> None:
        """Begin to prefill `group`. `prefill_next` continues, and at the end copies it to the rows of `prefixes`.

        `fill(requests, state, rows)` puts requests into rows of a state.
        """
        drafter, runs = self._call.drafter, [place for place, one in enumerate(prefixes) if not one.is_whole]
        requests = [group[place] for place in runs]
        own = [prefixes[place]._replace(row=row) for row, place in enumerate(runs)]
        longest = max(one.num_prefilled for one in requests)
        self._running = lease = self._lease(len(runs), longest)
        source = lease.session.state
        with settled_on_error(lease.session):
            source.clear()
            source.set_temperature(self._call.temperature)
            fill(requests, source, list(range(len(runs))))
            source.cached[: len(runs)] = upload([one.length for one in own], source.cached)
            spans = spans_after(own, [one.num_prefilled for one in requests])
            lease.prefill.capture(spans)
            lease.prefill.restart()
            copy_prefixes(source, drafter, own, margin, state)
            lease.prefill.start(spans)

        def finish() -> None:
            at = {prefixes[place].row: row for row, place in enumerate(runs)}
            rows = [(one.row, at[one.source if one.is_whole else one.row]) for one in prefixes]
            copy_texts(state, drafter, rows, source, longest)
            if len(runs) < len(group):
                fill(group, state, [one.row for one in prefixes])  # equal prompts differ in seeds, limits and so on

        self._finish = finish

    def prefill_next(self) -> bool:
        """Run the next chunk of the group; returns whether it was the last, so that the group is in its rows."""
        with settled_on_error(self._running.session):
            if self._running.prefill.run_next().stop == 0:  # a group is complete as a whole
                return False
            self._finish()
        self._finish = None
        return True

    def _lease(self, count: int, longest: int) -> SessionLease:
        size, is_captured = self.size(count), self._target.is_captured
        lease = self._leases.get(size)
        if lease is None or lease.shape.slots <= longest:
            shape = shape_of(self._call, size, longest, is_captured)
            lease = SessionLease(self._call, self._target, shape, is_continuous=self._is_continuous)
            with settled_on_error(lease.take()):
                lease.allocate()
            if not is_captured:
                self._leases.clear()
            elif size in self._leases:
                self._leases[size].keep()
            self._leases[size] = lease
        return lease

    def keep(self) -> None:
        """Return the sessions to the pool."""
        self._running = None
        for lease in self._leases.values():
            lease.keep()
        self._leases.clear()
