"""Rounds with numbers of drafts that a test chooses."""

import itertools
from collections.abc import Callable, Sequence

import pytest

from hf_specdec.auto_k.auto_drafts import RoundTimes
from hf_specdec.engine import lease


def vary_drafts(monkeypatch: pytest.MonkeyPatch, numbers: Sequence[int]) -> list[int]:
    """Let rounds have `numbers` of drafts, again and again, cut to K of the call; returns those asked for so far."""
    asked: list[int] = []

    class Numbers:
        def __init__(self, most: int, times: RoundTimes):
            self.current = self._most = most
            self._numbers = itertools.cycle(numbers)

        def next(self, tokens_left: Callable[[], float]) -> int:
            asked.append(min(next(self._numbers), self._most))
            return asked[-1]

        def ran(self, num_drafts: int, milliseconds: float, is_typical: bool) -> None:
            pass

    monkeypatch.setattr(lease, "FixedDrafts", Numbers)
    return asked
