"""Calls with "auto" that run without their drafter: with K = 0 a drafter would still read the committed tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ..auto_k.auto_drafts import RoundTimes, is_better_alone
from ..calls.call import Call
from ..drafters.none import NoDrafter
from ..parallel.tensor_parallel import tensor_parallel_group
from ..state import RoundShape
from .hosted_target import HostedTarget
from .lease import first_drafts, round_times, shape_of
from .sessions import sessions_of


def times_if_alone(call: Call, target: HostedTarget, rows: int, tokens: float) -> RoundTimes | None:
    """The round times of `call` if it is expected to be faster without the drafter; else None. The call has `rows`
    rows, and each may generate `tokens` new tokens."""
    # Ranks of one model would have to agree.
    if not (call.is_auto and call.num_draft_tokens) or tensor_parallel_group(call.model) is not None:
        return None
    shape, pool = shape_of(call, rows, 1, target.is_captured), sessions_of(call.drafter)
    times = round_times(call, target, shape)
    alone = target.costs(_substitute(call)).times(shape._replace(draft_probs=False))
    most = RoundShape(call.num_draft_tokens, shape.num_nodes)
    # Eager rounds need no capture, so a first call with the drafter finds out at hardly any cost.
    first = first_drafts(call, shape, times) if target.is_captured else most
    acceptance = pool.acceptance(call.temperature is not None)

    def price(has_drafts: bool) -> float:
        """Milliseconds to capture a session of this kind: 0 if there is one, else what those of the other kind took."""
        if not target.is_captured or pool.of_rows(rows, has_drafts):
            return 0.0
        others = pool.of_rows(rows, not has_drafts)
        return max((1e3 * one.capture_seconds for one in others), default=0.0)

    prices = price(has_drafts=False), price(has_drafts=True)
    return times if is_better_alone(most, first, acceptance, times, alone, tokens, *prices) else None


@contextmanager
def without_drafter(call: Call, times: RoundTimes) -> Iterator[Call]:
    """Context that gives `call` without its drafter, which gets the statistics; `times` is of `times_if_alone`."""
    substitute = _substitute(call)
    # Both share one pool, so that either call can free what the other one keeps where memory is short.
    substitute.sessions = sessions_of(call.drafter)
    reason = f"{call.reason}; without the drafter, whose drafts are not expected to pay for so many rows"
    try:
        yield replace(call, drafter=substitute, num_draft_tokens=0, num_nodes=0, chooses_trees=False, reason=reason)
    finally:
        substitute.sessions = None
    call.drafter._last_stats = stats = substitute.stats
    times.alone += 1e3 * stats.seconds


def _substitute(call: Call) -> NoDrafter:
    drafter, pool = call.drafter, sessions_of(call.drafter)
    if pool.substitute is None or pool.substitute._target_config is not call.model.config:
        pool.substitute = NoDrafter(call.model)
    same = {name: getattr(drafter, name) for name in ("compile_rounds", "batch_invariant", "kv_cache_dtype")}
    pool.substitute.configure(**same)
    pool.substitute.rollouts, pool.substitute.observe = drafter.rollouts, drafter.observe
    return pool.substitute
