"""What a manager has done since it was made: counts and times of its requests."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from ..calls.request import Request

# Upper bounds of the histograms, in seconds.
BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass
class Histogram:
    """How many seconds things took.

    Attributes:
        counts: by the numbers of `BOUNDS`; the last one is of those above all.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds


class ManagerMetrics:
    """Counts the requests of a manager that are over.

    Attributes:
        requests: by outcome, `"finished"` and `"failed"`.
        tokens: `"prompt"`, `"generated"`, `"drafted"` and `"accepted"` ones.
        first_token, whole: seconds from a request's arrival to its first token and to its end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.first_token, self.whole = Histogram(), Histogram()

    def count(self, request: Request) -> None:
        """Add a request that is over."""
        with self._lock:
            self.requests["finished" if request.error is None else "failed"] += 1
            self.tokens["prompt"] += len(request.prompt)
            self.tokens["generated"] += len(request.tokens)
            self.tokens["drafted"] += request.num_drafted
            self.tokens["accepted"] += request.num_accepted
            if request.first_token >= 0:
                self.first_token.add(request.first_token - request.created_time)
            self.whole.add(request.lifespan[1] - request.created_time)

    def text(self, running: int, waiting: int) -> str:
        """All of it in the text format of Prometheus, with how many requests run and wait now."""
        with self._lock:
            lines = []
            for outcome in ("finished", "failed"):
                lines.append(f'hf_specdec_requests_total{{outcome="{outcome}"}} {self.requests[outcome]}')
            found = [("requests_total", "counter", "Requests that are over.", lines)]
            for kind, about in (
                ("prompt", "Tokens of prompts."),
                ("generated", "Tokens that were generated."),
                ("drafted", "Draft tokens that were verified."),
                ("accepted", "Draft tokens that were accepted."),
            ):
                name = f"{kind}_tokens_total"
                found.append((name, "counter", about, [f"hf_specdec_{name} {self.tokens[kind]}"]))
            for name, about, value in (
                ("requests_running", "Requests that have a row.", running),
                ("requests_waiting", "Requests that wait for a row.", waiting),
            ):
                found.append((name, "gauge", about, [f"hf_specdec_{name} {value}"]))
            for name, about, one in (
                ("time_to_first_token_seconds", "From a request's arrival to its first token.", self.first_token),
                ("request_seconds", "From a request's arrival to its end.", self.whole),
            ):
                found.append((name, "histogram", about, _lines(f"hf_specdec_{name}", one)))
        return "".join(
            f"# HELP hf_specdec_{name} {about}\n# TYPE hf_specdec_{name} {kind}\n"
            + "".join(f"{one}\n" for one in lines)
            for name, kind, about, lines in found
        )


def _lines(name: str, histogram: Histogram) -> list[str]:
    lines, count = [], 0
    for bound, number in zip((*BOUNDS, "+Inf"), histogram.counts, strict=True):
        count += number
        lines.append(f'{name}_bucket{{le="{bound}"}} {count}')
    return [*lines, f"{name}_sum {histogram.total}", f"{name}_count {count}"]
