"""Prefill of a call of which several rows have the same prompt, where prompts are not packed.

Whatever target and drafter keep of a whole prompt, recurrent states included, is the same for all rows that have it. So
the different prompts are prefilled in a session of fewer rows, and copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..drafters.base import Drafter
from ..state import DecodeState
from . import prefix_reuse
from .buckets import next_power_of_two
from .hosted_target import HostedTarget
from .lease import SessionLease, shape_of
from .prefix_reuse import PrefillWave, Prefix, copy_texts, is_told_by_tokens
from .prompts import Prompts
from .request import Request
from .sessions import settled_on_error


class EqualPrompts:
    """The different prompts of a call, in a session of their own.

    Args:
        request: the call.
        target: of the call.
        firsts: the first row with each of them.
        numbers: of each row of the call, which of them it has.
    """

    def __init__(self, request: Request, target: HostedTarget, firsts: list[int], numbers: list[int]):
        self._request, self._firsts, self._numbers = request, firsts, numbers
        given, self._is_captured = request.prompts, target.is_captured
        padding = [given.padding[row] for row in firsts]
        self._prompts = replace(given, input_ids=given.input_ids[firsts], padding=padding)
        self._waves = [PrefillWave(self._prompts.spans)]
        shape = shape_of(request, _num_rows(len(firsts), target), given.longest, self._is_captured)
        self._lease = SessionLease(target, shape, request.config.prefill_chunk_size)

    @classmethod
    def of(cls, request: Request, target: HostedTarget) -> EqualPrompts | None:
        """Those of `request`; None if they would not save enough tokens, or rows of a prompt may differ."""
        prompts, drafter = request.prompts, type(target.drafter)
        can_copy = drafter.new_memory is Drafter.new_memory or drafter.copy_rows is not Drafter.copy_rows
        most_saved = (request.batch - 1) * prompts.longest
        # Hooks may treat rows with the same prompt in different ways.
        is_told = is_told_by_tokens(request) and not (target.keeps_hidden_states or target.has_hooks)
        if not can_copy or not is_told or most_saved < prefix_reuse.FEWEST_SAVED:
            return None
        found: dict[tuple[int, ...], int] = {}
        numbers = [found.setdefault(tuple(tokens), len(found)) for tokens in prompts.token_ids()]
        firsts = [numbers.index(number) for number in range(len(found))]
        saved = sum(prompts.lengths) - sum(prompts.lengths[row] for row in firsts)
        has_fewer = _num_rows(len(firsts), target) < _num_rows(request.batch, target)
        is_worth = has_fewer and saved >= prefix_reuse.FEWEST_SAVED
        return cls(request, target, firsts, numbers) if is_worth else None

    @property
    def prefixes(self) -> list[Prefix]:
        """Rows of the call that are not prefilled."""
        lengths, firsts = self._request.prompts.lengths, self._firsts
        rows = [(row, firsts[number]) for row, number in enumerate(self._numbers)]
        return [Prefix(row, first, lengths[row] - 1, is_whole=True) for row, first in rows if row != first]

    def lacks(self) -> bool:
        """Whether chunks of the prefill are to be captured and have not been."""
        return self._lease.prefill.lacks(self._waves)

    def capture(self) -> None:
        """Capture these; `prefill` must come before and afterwards."""
        with settled_on_error(self._lease.session):
            self._lease.prefill.capture(self._waves)

    def prefill(self, state: DecodeState, begin: Callable[[DecodeState, Prompts, list[int]], None]) -> None:
        """Prefill the rows of `state`, which is allocated.

        Args:
            state: of the session in which rounds run.
            begin: fills a state with prompts, which are those of rows of the call.
        """
        session, drafter = self._lease.session or self._lease.take(), self._request.drafter
        source, slots = session.state, self._prompts.longest
        with settled_on_error(session):
            begin(source, self._prompts, self._firsts)
            self._lease.prefill.run(self._waves)
            copy_texts(state, drafter, list(enumerate(self._numbers)), source, slots)
            begin(state, self._request.prompts, list(range(len(self._numbers))))
        if not self._is_captured:
            self.drop()

    def drop(self) -> None:
        """Forget the session, so that its memory is freed."""
        self._lease.drop()

    def keep(self) -> None:
        """Leave the session for other calls."""
        if self._is_captured:
            self._lease.keep()


def _num_rows(count: int, target: HostedTarget) -> int:
    """Rows of a session for `count` prompts."""
    return next_power_of_two(count) if target.is_captured else count
