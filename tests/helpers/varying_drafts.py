"""Rounds with chains and trees of drafts that a test chooses."""

import itertools
from collections.abc import Callable, Sequence

import pytest

from hf_specdec.auto_k.auto_drafts import RoundTimes
from hf_specdec.engine import lease
from hf_specdec.state import RoundShape

Drafted = int | tuple[int, int]


def vary_drafts(monkeypatch: pytest.MonkeyPatch, numbers: Sequence[Drafted]) -> list[Drafted]:
    """Let rounds have `numbers` of drafts, repeated: K, or K and N of trees, cut to those of the call; returns those
    asked for so far."""
    asked: list[Drafted] = []

    class Numbers:
        def __init__(self, most: RoundShape, times: RoundTimes, shared: RoundTimes | None):
            self.current = self._most = most
            self._numbers = itertools.cycle(numbers)

        def next(self, tokens_left: Callable[[], float]) -> RoundShape:
            given = next(self._numbers)
            drafted = RoundShape(*map(min, given if isinstance(given, tuple) else (given, 0), self._most))
            asked.append(drafted if drafted.num_nodes else drafted.num_drafts)
            return drafted

        def ran(self, drafted: RoundShape, milliseconds: float, is_typical: bool) -> None:
            pass

    monkeypatch.setattr(lease, "FixedDrafts", Numbers)
    return asked
