"""Metrics of a manager: counts and times of its requests."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate

from ..calls.request import Request

# Upper bounds of the histograms' buckets, in seconds.
BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

_TOKENS = {
    "prompt": "Tokens of prompts.",
    "generated": "Tokens that were generated.",
    "drafted": "Draft tokens that were verified.",
    "accepted": "Draft tokens that were accepted.",
}


class Histogram:
    """Histogram of durations in seconds. `counts` has a bucket for each of `BOUNDS`, and one for larger values."""

    def __init__(self) -> None:
        self.counts, self.total = [0] * (len(BOUNDS) + 1), 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    def samples(self) -> list[tuple[str, float]]:
        """Suffixes of the metric's name in Prometheus' text format, and values."""
        sums = list(accumulate(self.counts))
        buckets = [(f'_bucket{{le="{bound}"}}', count) for bound, count in zip((*BOUNDS, "+Inf"), sums, strict=True)]
        return [*buckets, ("_sum", self.total), ("_count", sums[-1])]


class ManagerMetrics:
    """Metrics of the requests of a manager that are over. `RequestQueue.changed` guards them.

    Attributes:
        requests: counts by outcome, `"finished"` or `"failed"`.
        tokens: counts by the names in `_TOKENS`.
        first_token, whole: seconds from a request's arrival to its first token and to its end.
    """

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.first_token, self.whole = Histogram(), Histogram()

    def count(self, request: Request) -> None:
        """Add a request that is over."""
        self.requests["finished" if request.error is None else "failed"] += 1
        self.tokens["prompt"] += len(request.prompt)
        self.tokens["generated"] += len(request.tokens)
        self.tokens["drafted"] += request.num_drafted
        self.tokens["accepted"] += request.num_accepted
        if request.first_token >= 0:
            self.first_token.add(request.first_token - request.created_time)
        self.whole.add(request.lifespan[1] - request.created_time)

    def text(self, running: int, waiting: int) -> str:
        """All metrics in Prometheus' text format, with the numbers of requests that run and wait now."""
        outcomes = [(f'{{outcome="{one}"}}', self.requests[one]) for one in ("finished", "failed")]
        tokens = [(f"{one}_tokens_total", about, [("", self.tokens[one])]) for one, about in _TOKENS.items()]
        first, whole = self.first_token.samples(), self.whole.samples()
        found = [
            ("requests_total", "counter", "Requests that are over.", outcomes),
            *((name, "counter", about, samples) for name, about, samples in tokens),
            ("requests_running", "gauge", "Requests that have a row.", [("", running)]),
            ("requests_waiting", "gauge", "Requests that wait for a row.", [("", waiting)]),
            ("time_to_first_token_seconds", "histogram", "From a request's arrival to its first token.", first),
            ("request_seconds", "histogram", "From a request's arrival to its end.", whole),
        ]
        return "".join(
            f"# HELP hf_specdec_{name} {about}\n# TYPE hf_specdec_{name} {kind}\n"
            + "".join(f"hf_specdec_{name}{suffix} {value}\n" for suffix, value in samples)
            for name, kind, about, samples in found
        )
