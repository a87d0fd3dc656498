"""Calls with "auto" that run without their drafter: with K = 0 a drafter would still read the committed tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ..auto_k.auto_drafts import Acceptance, RoundTimes, Workload, best_rate, is_better_alone
from ..calls.call import Call
from ..drafters.none import NoDrafter
from ..state import RoundShape
from ..stats import SpeculationStats
from .hosted_target import HostedTarget
from .lease import first_drafts, round_times, shape_of
from .sessions import sessions_of


@dataclass(frozen=True)
class Choice:
    """Whether a call for `work` runs without its drafter, and what it was chosen by: round times with and without it,
    on `rows` rows."""

    is_alone: bool
    times: RoundTimes
    times_alone: RoundTimes
    most: RoundShape
    acceptance: Acceptance
    rows: int
    work: Workload

    def note(self, stats: SpeculationStats) -> None:
        """Note what the call has reached, if it has run rounds and captured nothing."""
        times, most = (self.times_alone, RoundShape(0)) if self.is_alone else (self.times, self.most)
        if stats.committed and not stats.captures and times.is_known(most):
            promised = self.rows * 1e3 * stats.seconds * best_rate(most, self.acceptance, times)
            times.reach(self.work, stats.committed / promised)


def choose(call: Call, target: HostedTarget, rows: int, work: Workload) -> Choice | None:
    """Choose whether `call`, for `work` on `rows` rows, runs without its drafter; None if that is no question."""
    # Ranks of one model would have to agree.
    if not (call.is_auto and call.num_draft_tokens) or target.is_split:
        return None
    shape, pool = shape_of(call, rows, 1, target.is_captured), sessions_of(call.drafter)
    times = round_times(call, target, shape)
    alone = target.costs(_substitute(call)).times(shape._replace(draft_probs=False))
    most = RoundShape(call.num_draft_tokens, shape.num_nodes)
    # Eager rounds need no capture, so a first call with the drafter finds out at hardly any cost.
    first = first_drafts(call, shape, times) if target.is_captured else most
    acceptance = pool.acceptances[call.temperature is not None]

    def price(has_drafts: bool) -> float:
        """Milliseconds to capture a session of this kind: 0 if there is one, else what those of the other kind took."""
        if not target.is_captured or pool.of_rows(rows, has_drafts):
            return 0.0
        others = pool.of_rows(rows, not has_drafts)
        return max((1e3 * one.capture_seconds for one in others), default=0.0)

    prices = price(has_drafts=False), price(has_drafts=True)
    is_alone = is_better_alone(most, first, acceptance, times, alone, work, *prices)
    return Choice(is_alone, times, alone, most, acceptance, rows, work)


@contextmanager
def without_drafter(call: Call, choice: Choice) -> Iterator[Call]:
    """Context that gives `call` without its drafter, which gets the statistics."""
    substitute = _substitute(call)
    # Both share one pool, so that either call can free what the other one keeps where memory is short.
    substitute.sessions = sessions_of(call.drafter)
    reason = f"{call.reason}; without the drafter, whose drafts are not expected to pay for so many rows"
    try:
        yield replace(call, drafter=substitute, num_draft_tokens=0, num_nodes=0, chooses_trees=False, reason=reason)
    finally:
        substitute.sessions = None
    call.drafter._last_stats = stats = substitute.stats
    choice.times.alone += 1e3 * stats.seconds
    choice.note(stats)


def _substitute(call: Call) -> NoDrafter:
    drafter, pool = call.drafter, sessions_of(call.drafter)
    if pool.substitute is None or pool.substitute._target_config is not call.model.config:
        pool.substitute = NoDrafter(call.model)
    same = {name: getattr(drafter, name) for name in ("compile_rounds", "batch_invariant", "kv_cache_dtype")}
    pool.substitute.configure(**same)
    pool.substitute.rollouts, pool.substitute.observe = drafter.rollouts, drafter.observe
    return pool.substitute
