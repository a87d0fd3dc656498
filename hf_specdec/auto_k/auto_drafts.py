"""`num_assistant_tokens="auto"`: every round has the number of drafts (K) with the most expected tokens a millisecond.

Rounds are timed as they run, and acceptance at each position is estimated as it happens. A call begins with the times
that earlier ones have measured (`round_costs`), and the acceptance that this drafter has had in the process. What is
not known is estimated in favour of trying it; what is tried costs a bounded share of the time.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from transformers import PreTrainedModel

from ..parallel.tensor_parallel import from_first_rank

# The numbers of drafts that rounds are tried with.
CANDIDATES = (0, 1, 2, 3, 5, 7)

# In place of a K: rounds of a call without the drafter, which even with K = 0 reads what is committed.
ALONE = -1

# The most tokens of the first rounds, all rows together: with more a GPU is bound by compute (one H200, vLLM 0.26,
# Llama-3.1-8B shapes: 6.1 ms for 64, 10.8 ms for 256, 29.9 ms for 1024), and rounds take longer in proportion. A core
# is so by a few (SmolLM2: 65 ms for 1, 119 for 4, 128 for 8).
_MOST_FIRST_TOKENS, _MOST_ON_CPU = 512, 4

# Observations of a position after which the older ones count for 1 / e.
_MEMORY = 2000
# The share of drafts accepted at the first position before any was verified, and how many observations it counts for;
# further positions begin with the share of the one before.
_PRIOR_SHARE, _PRIOR_WEIGHT = 0.7, 4.0

# Times of a K of which the median is taken.
_NUM_TIMES = 9
# How a time that is not known is underestimated: the share of it that does not depend on K, if one of a larger K is
# known; a factor on the tokens above the most of the first rounds, if one of a smaller K is; a factor on what a line
# through two others gives.
_CONSTANT_SHARE, _TOKEN_OPTIMISM, _OPTIMISM = 0.1, 0.8, 0.9

# A K replaces the one before if it gives so many more tokens a millisecond.
_HYSTERESIS = 0.01
# The share of the gain that a K promises, by estimates in favour of it, for which it is tried.
_CONFIDENCE = 0.5
# Rounds in which a K is tried of which no time is known, or in which it is tried again. The first is not timed, since
# what comes with a change of K is not part of a round.
_ROUNDS_TO_TRY, _ROUNDS_TO_RETRY = 4, 2
# The share of all time that trying again may cost, and the fewest rounds between two tries.
_BUDGET, _ROUNDS_BETWEEN = 0.01, 32


# Rounds after which the processes that run one model together agree on times, by a broadcast that waits for the GPU.
ROUNDS_TO_AGREE = 8


def no_memory(num_drafts: int) -> torch.OutOfMemoryError:
    """The error of rounds of so many drafts that cannot be run."""
    return torch.OutOfMemoryError(f"There is no memory for rounds of {num_drafts} drafts.")


def first_drafts(asked: int, rows: int, device: torch.device) -> int:
    """K to begin with, at most `asked`, where nothing is known: fewer drafts where there are many rows."""
    affordable = max((_MOST_ON_CPU if device.type == "cpu" else _MOST_FIRST_TOKENS) // rows - 1, 0)
    return max(one for one in CANDIDATES if one <= min(asked, affordable))


class Acceptance:
    """The share of drafts accepted at each position, of those that were reached: all before them were accepted."""

    def __init__(self) -> None:
        self._tried, self._accepted = [0.0] * CANDIDATES[-1], [0.0] * CANDIDATES[-1]

    def observe(self, accepted: int, drafted: int) -> None:
        """Add a round of one row, of whose `drafted` drafts the first `accepted` ones were."""
        keep = math.exp(-1 / _MEMORY)
        for position in range(min(accepted + 1, drafted)):
            self._tried[position] = self._tried[position] * keep + 1
            self._accepted[position] = self._accepted[position] * keep + (position < accepted)

    def expected_tokens(self, num_drafts: int) -> float:
        """Tokens that a round of `num_drafts` is expected to commit in a row."""
        total = reached = 1.0
        share = _PRIOR_SHARE
        for tried, accepted in zip(self._tried[:num_drafts], self._accepted, strict=False):
            share = (accepted + _PRIOR_WEIGHT * share) / (tried + _PRIOR_WEIGHT)
            reached *= share
            total += reached
        return total


class RoundTimes:
    """How long rounds of each K take, on buffers of one shape; kept from one call to the next.

    Args:
        known: milliseconds of a round by K, measured before.

    Attributes:
        total: milliseconds of all rounds.
        unsaved: those of them that are not on disk.
        alone: those of calls without the drafter since the last one with it.
    """

    def __init__(self, rows: int, known: Mapping[int, float] | None = None, total: float = 0.0) -> None:
        self._rows = rows
        self._times = {count: deque([one], maxlen=_NUM_TIMES) for count, one in (known or {}).items()}
        self._measured: set[int] = set()
        self.total, self.unsaved, self.alone = total, 0.0, 0.0

    def measured(self) -> tuple[dict[int, float], float]:
        """Milliseconds of a round by K, of those that have run; and `unsaved`."""
        return {count: self.milliseconds(count) for count in sorted(self._measured)}, self.unsaved

    def add(self, num_drafts: int, milliseconds: float, is_typical: bool) -> None:
        """Add a round; one that `is_typical` followed a round of the same K, and nothing between."""
        self.total += milliseconds
        self.unsaved += milliseconds
        if is_typical:
            self._measured.add(num_drafts)
            self._times.setdefault(num_drafts, deque(maxlen=_NUM_TIMES)).append(milliseconds)

    def __contains__(self, num_drafts: int) -> bool:
        return num_drafts in self._times

    def milliseconds(self, num_drafts: int) -> float:
        """The median of the last rounds of this K; if there is none, a low estimate from those of others."""
        if num_drafts in self._times:
            return statistics.median(tuple(self._times[num_drafts]))  # other threads may add to it
        known = sorted(self._times.keys() - {ALONE}, key=lambda other: abs(other - num_drafts))
        first = self.milliseconds(known[0])
        if len(known) == 1:
            if num_drafts < known[0]:
                return first * (_CONSTANT_SHARE + (1 - _CONSTANT_SHARE) * (num_drafts + 1) / (known[0] + 1))
            tokens, fewer = (self._rows * (count + 1) for count in (num_drafts, known[0]))
            return first * max(1.0, _TOKEN_OPTIMISM * tokens / max(fewer, _MOST_FIRST_TOKENS))
        # Of those around it, or else of the two that are nearest.
        others = [other for other in known[1:] if (other > num_drafts) != (known[0] > num_drafts)] or known[1:]
        slope = (self.milliseconds(others[0]) - first) / (others[0] - known[0])
        return max(_OPTIMISM * (first + slope * (num_drafts - known[0])), _CONSTANT_SHARE * first)


def is_better_alone(most: int, acceptance: Acceptance, times: RoundTimes, tokens: int) -> bool:
    """Whether a call for `tokens` tokens a row is expected to be faster without the drafter.

    Rounds without it are shorter than those with K = 0, at first by what is not known. Texts change: now and then there
    is a call with it, which costs a bounded share of the time.
    """
    if 0 not in times:
        return False
    alone = times.milliseconds(ALONE) if ALONE in times else _OPTIMISM * times.milliseconds(0)
    known = [one for one in CANDIDATES if one <= most and one in times]
    share = 1 - alone * max(acceptance.expected_tokens(one) / times.milliseconds(one) for one in known)
    if share <= _HYSTERESIS:
        return False
    if _BUDGET * times.alone < share * tokens * alone:
        return True
    times.alone = 0.0
    return False


class FixedDrafts:
    """The same number of drafts, K = `current`, in every round; `times` are those of the rounds. See `AutoDrafts`."""

    def __init__(self, current: int, times: RoundTimes):
        self.current, self._times = current, times

    def next(self, tokens_left: Callable[[], float]) -> int:
        return self.current

    def refuse(self, num_drafts: int) -> None:
        raise no_memory(num_drafts)

    def ran(self, num_drafts: int, milliseconds: float, is_typical: bool) -> None:
        self._times.add(num_drafts, milliseconds, is_typical)


class AutoDrafts:
    """Chooses K of every round.

    Processes that run one model together choose the same if they are told the same times.

    Args:
        first: K of the first rounds, where nothing is known.
        times: of rounds on the buffers of the call.
        price: milliseconds that it takes to be able to run rounds of a K.
    """

    def __init__(
        self,
        most: int,
        first: int,
        acceptance: Acceptance,
        times: RoundTimes,
        price: Callable[[int], float] = lambda num_drafts: 0.0,
    ):
        self._candidates = [one for one in CANDIDATES if one <= most]
        self._acceptance, self._times = acceptance, times
        self._price = price
        known = [one for one in self._candidates if one in times]
        ready = [one for one in known if not price(one)] or known
        self._current = max(ready, key=self._rate, default=max(one for one in self._candidates if one <= max(first, 0)))
        self._plan: deque[int] = deque()
        # Candidates that were tried, until their times arrive.
        self._waiting: set[int] = set()
        self._since_try = 0
        self._spent = self._elapsed = 0.0
        self._is_upwards = False

    @property
    def current(self) -> int:
        """K of the rounds in which none is tried."""
        return self._current

    def next(self, tokens_left: Callable[[], float]) -> int:
        """K of the next round; `tokens_left` tells how many tokens a row may still generate, which counts for what is
        worth trying.
        """
        if not self._plan:
            self._choose(tokens_left)
            self._plan.extend(self._tries(tokens_left))
        if self._plan:
            self._since_try = 0
            return self._plan.popleft()
        self._since_try += 1
        return self._current

    def refuse(self, num_drafts: int) -> None:
        """Take `num_drafts` from the candidates, since there is no memory for its rounds.

        Raises:
            torch.OutOfMemoryError: there is no other.
        """
        if self._candidates == [num_drafts]:
            raise no_memory(num_drafts)
        self._candidates.remove(num_drafts)
        self._plan.clear()
        if self._current == num_drafts:
            self._current = min(self._candidates, key=lambda one: abs(one - num_drafts))

    def ran(self, num_drafts: int, milliseconds: float, is_typical: bool) -> None:
        """Take the time of a round, which `is_typical` if it followed one of the same K at once."""
        self._times.add(num_drafts, milliseconds, is_typical)
        self._elapsed += milliseconds
        if is_typical:
            self._waiting.discard(num_drafts)

    def _rate(self, num_drafts: int) -> float:
        """Tokens a millisecond and row."""
        return self._acceptance.expected_tokens(num_drafts) / self._times.milliseconds(num_drafts)

    def _choose(self, tokens_left: Callable[[], float]) -> None:
        known = [one for one in self._candidates if one in self._times]
        if not known:
            return
        best, rate = max(known, key=self._rate), self._rate(self._current)
        is_better = self._rate(best) > (1 + _HYSTERESIS) * rate
        if self._current not in known or (is_better and self._gain(best, rate, tokens_left) > self._price(best)):
            self._current = best

    def _gain(self, num_drafts: int, rate: float, tokens_left: Callable[[], float]) -> float:
        """Milliseconds that rounds of `num_drafts` are expected to save of those that rounds of `rate` take.

        In the time that is left; or, if more calls follow, in as much as has passed.
        """
        share = 1 - rate / max(self._rate(num_drafts), rate)
        return share * max(tokens_left() / rate, self._times.total)

    def _tries(self, tokens_left: Callable[[], float]) -> Sequence[int]:
        """Rounds of a K that is worth trying, if there is one."""
        if self._current not in self._times:
            return ()
        rate = self._rate(self._current)
        unknown = [one for one in self._candidates if one not in self._times and one not in self._waiting]
        found = max(unknown, key=self._rate, default=None)
        if found is not None:
            cost = self._price(found) + _ROUNDS_TO_TRY * self._loss(found, rate)
            is_better = self._rate(found) > (1 + _HYSTERESIS) * rate
            if is_better and _CONFIDENCE * self._gain(found, rate, tokens_left) > cost:
                self._waiting.add(found)
                return [found] * _ROUNDS_TO_TRY
        if self._since_try < _ROUNDS_BETWEEN:
            return ()
        self._waiting.clear()  # none of their rounds was timed
        # What is known changes with the text, of neighbours first.
        self._is_upwards = not self._is_upwards
        others = [one for one in self._candidates if one in self._times and one != self._current]
        around = [one for one in others if (one > self._current) == self._is_upwards]
        again = min(around, key=lambda one: abs(one - self._current), default=None)
        if again is None:
            return ()
        loss = self._price(again) + _ROUNDS_TO_RETRY * self._loss(again, rate)
        if self._spent + loss > _BUDGET * self._elapsed:
            return ()
        self._spent += loss
        return [again] * _ROUNDS_TO_RETRY

    def _loss(self, num_drafts: int, rate: float) -> float:
        """Milliseconds that a round of `num_drafts` is expected to cost more than the same tokens at `rate`."""
        tokens = self._acceptance.expected_tokens(num_drafts)
        return max(self._times.milliseconds(num_drafts) - tokens / rate, 0.0)


class SharedClock:
    """Choices of K by processes that run one model together: those that the first one's times give.

    Args:
        drafts: chooses, on every process; see it for the methods.
    """

    def __init__(self, drafts: AutoDrafts, model: PreTrainedModel):
        self._drafts, self._model = drafts, model
        self.next, self.refuse = drafts.next, drafts.refuse
        self._rounds: list[tuple[int, float, bool]] = []

    @property
    def current(self) -> int:
        return self._drafts.current

    def ran(self, num_drafts: int, milliseconds: float, is_typical: bool) -> None:
        self._rounds.append((num_drafts, milliseconds, is_typical))
        if len(self._rounds) == ROUNDS_TO_AGREE:
            times = from_first_rank(torch.tensor([one[1:] for one in self._rounds], dtype=torch.float32), self._model)
            for (count, *_), (shared, typical) in zip(self._rounds, times.tolist(), strict=True):
                self._drafts.ran(count, shared, bool(typical))
            self._rounds.clear()


# What decides how many drafts (K) each round has.
Drafts: TypeAlias = FixedDrafts | AutoDrafts | SharedClock
