"""`num_assistant_tokens="auto"`: each round has the drafts, a chain or a tree, that promise the most tokens a
millisecond.

Rounds are timed and the acceptance at each position is measured as rounds run. A call begins with the times of earlier
calls (`round_costs`) and the acceptance that this drafter has had in the process. Unknown times are estimated in favour
of a trial; trials cost a bounded share of the time.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from transformers import PreTrainedModel

from ..parallel.tensor_parallel import from_first_rank
from ..state import RoundShape

# Candidates for rounds: K of chains, and trees that with the last committed token fill tiles of 16 rows. Where each
# draft of a path takes a pass of the drafter, a wide tree of small depth may be better.
CANDIDATES = (0, 1, 2, 3, 5, 7)
TREES = (RoundShape(3, 15), RoundShape(7, 15), RoundShape(7, 31), RoundShape(7, 47))

# Tokens, of all rows together, that take as long to compute as the weights that they use take to read (one H200,
# Llama-3.1-8B shapes: 10.0 ms for 256, 16.6 for 512, 23.4 for 768); on a CPU, for each thread (SmolLM2, two threads: 65
# ms for 1, 119 for 4, 128 for 8). Bytes that a GPU could read while a layer waits for the one before, whatever its size
# (one H200: 0.63 ms for the 30 layers of SmolLM2, of which reading takes 0.06).
_RIDGE, _RIDGE_OF_THREAD, _BYTES_OF_LAYER = 142.0, 2.0, 1e8
# Layers that take as long as what a pass of a drafter does beside its own: inputs, embedding, norms, logits, choice of
# tokens (SmolLM2 with EAGLE-3 on 8 rows, one H200: 0.07 ms a pass, 0.02 ms a layer of the target).
LAYERS_BESIDE = 2
# Most tokens of a round with trees: beyond, the nodes that a tree has more than a chain are no longer nearly free (one
# H200, 8B shapes: 4.75 ms for 32, 5.56 for 64, 6.39 for 128).
_MOST_TREE_TOKENS = 128

# What an observation of a position counts for after the next one: 1 / e after 2,000.
_KEEP = math.exp(-1 / 2000)
# Prior share of accepted drafts at the first position, and how many observations it counts for; the prior of a further
# position is the share of the position before.
_PRIOR_SHARE, _PRIOR_WEIGHT = 0.7, 4.0
# Prior ratio between the share of accepted drafts of a rank and that of the rank before, where drafts of one position
# are tried by rank; number of ranks that are distinguished.
_PRIOR_DECAY, _NUM_RANKS = 0.6, 8
# Observations after which expected tokens of trees are computed again; prior weight of their correction, in tokens.
_FRESH, _PRIOR_TOKENS = 32, 64.0

# Number of last times of a round shape whose median is taken.
_NUM_TIMES = 9
# Factors that underestimate an unknown time: one on an estimate from a single known time (for fewer drafts, only on the
# part that does not depend on tokens); one on a line through two known times.
_OPTIMISM_OF_ONE, _OPTIMISM = 0.85, 0.9

# A candidate replaces the current one if it gives the first share more tokens a millisecond. Of those within the second
# share of the best, the one with the fewest drafts is chosen (8 requests on 8 rows of 8B shapes, one H200: with K = 5
# rounds commit 1 % more tokens a millisecond than with 3, but the call takes 3 % longer, since rows end apart).
_HYSTERESIS, _NEARLY = 0.01, 0.02
# Milliseconds of rounds that are assumed to follow, in this call or in others, where what is better is known.
_HORIZON = 4000.0
# How many more tokens a millisecond rounds with the drafter must give than those without, while no calls for the same
# work have told: prompts go through it, too, and rows end apart (256 rows of an 8B target, one H200: as fast in rounds,
# but 8 % fewer tokens a second of the call; 512 rows of SmolLM2: 13 %). The most that such calls may tell.
_LEAST_GAIN, _MOST_GAIN = 0.1, 0.25
# Number of last calls of a workload whose median is taken.
_NUM_CALLS = 3
# Rounds of a first trial, and of a later one. The first round is not timed, since it includes what the change of drafts
# costs. Fewest rounds between two later trials.
_ROUNDS_TO_TRY, _ROUNDS_TO_RETRY, _ROUNDS_BETWEEN = 4, 2, 32
# What trials may cost, captures included: this share of the time of all rounds so far, and for a first trial this share
# of what it may win in the rest of the call, by an optimistic estimate.
_BUDGET, _CONFIDENCE = 0.01, 0.5


# Number of rounds after which ranks of one model agree on their times, by a broadcast that waits for the GPU.
ROUNDS_TO_AGREE = 8


def no_memory(drafted: RoundShape) -> torch.OutOfMemoryError:
    """The error for rounds with `drafted` that do not fit in memory."""
    return torch.OutOfMemoryError(
        f"There is no memory for rounds of {max(drafted)} drafts. Pass fewer prompts, or a smaller max_new_tokens."
    )


class Pass(NamedTuple):
    """What passes of a model read: bytes of weights, bytes that one token uses, number of sequential layers."""

    num_bytes: float
    used_by_token: float = 0.0
    num_layers: int = 0


class ExpectedCosts:
    """Expected times of rounds of `rows` rows on `device`, relative to each other.

    Args:
        target: the pass of the target.
        drafting: all passes of the drafter together, by K, as far as they are known.
    """

    def __init__(self, rows: int, device: torch.device, target: Pass, drafting: Mapping[int, Pass]) -> None:
        is_cpu = device.type == "cpu"
        ridge, of_layer = (_RIDGE_OF_THREAD * torch.get_num_threads(), 0.0) if is_cpu else (_RIDGE, _BYTES_OF_LAYER)
        self._of_column = rows * target.used_by_token / ridge
        self._fixed, *drafts = (one.num_bytes + of_layer * one.num_layers for one in (target, *drafting.values()))
        self._drafting = dict(zip(drafting, drafts, strict=True))

    def __call__(self, drafted: RoundShape, factor: float = 1.0) -> float:
        return factor * (self._fixed + self._drafting.get(drafted.num_drafts, 0.0)) + self._of_column * drafted.width

    def low_ratio(self, drafted: RoundShape, other: RoundShape) -> float:
        """A low estimate of the time of a round with `drafted`, relative to one with `other`."""
        if drafted.width > other.width:
            return max(1.0, _OPTIMISM_OF_ONE * self(drafted) / self(other))
        return self(drafted, _OPTIMISM_OF_ONE) / self(other)

    def first(self, asked: int) -> RoundShape:
        """The chain to begin with: the best one of at most `asked` drafts by the prior share of accepted drafts."""

        def rate(drafted: RoundShape) -> float:
            tokens = sum(_PRIOR_SHARE**position for position in range(drafted.num_drafts + 1))
            return tokens / self(drafted) / (1 + _LEAST_GAIN * (drafted.num_drafts > 0))

        return max((RoundShape(one) for one in CANDIDATES if one <= asked), key=rate)


def tree_size(rows: int, device: torch.device) -> int:
    """N of the largest tree to try in rounds of `rows` rows; 0 for no trees, as on a CPU."""
    affordable = 0 if device.type == "cpu" else _MOST_TREE_TOKENS // rows - 1
    return max((one.num_nodes for one in TREES if one.num_nodes <= affordable), default=0)


def candidates(most: RoundShape) -> list[RoundShape]:
    """The candidates for rounds, fewest drafts first: chains, and trees of up to `most.num_nodes`."""
    chains = [RoundShape(one) for one in CANDIDATES if one <= most.num_drafts]
    depth = chains[-1].num_drafts
    trees = {(min(one.num_drafts, depth), one.num_nodes) for one in TREES if one.num_nodes <= most.num_nodes}
    trees = [RoundShape(*one) for one in {*trees, (depth, most.num_nodes)} if one[1] > depth > 0]
    return chains + sorted(trees, key=lambda one: (one.width, one))


class Acceptance:
    """The share of accepted drafts by position and rank, of the drafts that were reached: all drafts before them were
    accepted, and those of their position that the drafter ranks higher were rejected."""

    def __init__(self) -> None:
        # By position and rank; drafts of chains have rank 0.
        self._tried = [[0.0] * _NUM_RANKS for _ in range(CANDIDATES[-1])]
        self._accepted = [[0.0] * _NUM_RANKS for _ in range(CANDIDATES[-1])]
        # Accepted drafts of trees, and those expected by mean shares: a tree's drafts are chosen for their own round.
        self._of_trees, self._expected = _PRIOR_TOKENS, _PRIOR_TOKENS
        # Expected accepted drafts by K, for trees of 0, 1, ... nodes; computed again when `_fresh` reaches 0.
        self._gains: dict[int, list[float]] = {}
        self._fresh = 0

    def observe(
        self, accepted: int, drafted: int, rejected: Sequence[int] | None = None, num_nodes: int = 0, times: int = 1
    ) -> None:
        """Add a round of a row, in which `accepted` of at most `drafted` successive drafts were accepted, or of as many
        rows as `times` says.

        For a tree of `num_nodes`, `rejected` counts the rejected drafts at each position up to `accepted`. None stands
        for a chain, where the draft after the accepted ones was rejected.
        """
        keep = _KEEP**times
        if rejected is not None:
            self._of_trees = self._of_trees * keep + times * min(accepted, drafted)
            self._expected = self._expected * keep + times * self._static_gain(RoundShape(drafted, num_nodes))
        for position in range(min(accepted + 1, drafted)):
            is_accepted = position < accepted
            wrong = rejected[position] if rejected is not None else 1 - is_accepted
            tried, counts = self._tried[position], self._accepted[position]
            for rank in range(min(wrong + is_accepted, _NUM_RANKS)):
                tried[rank] = tried[rank] * keep + times
                counts[rank] = counts[rank] * keep + times * (rank == wrong)
        self._fresh -= times

    def expected_tokens(self, drafted: RoundShape) -> float:
        """Tokens that a round with `drafted` is expected to commit in a row."""
        if drafted.num_nodes:
            return 1.0 + self._static_gain(drafted) * self._of_trees / self._expected
        total = reached = 1.0
        for share, *_ in self._shares(drafted.num_drafts, 1):
            reached *= share
            total += reached
        return total

    def _shares(self, num_drafts: int, num_ranks: int = _NUM_RANKS) -> list[list[float]]:
        """Shares of accepted drafts, by position and rank."""
        found, before = [], [_PRIOR_SHARE * _PRIOR_DECAY**rank for rank in range(num_ranks)]
        for tried, accepted in zip(self._tried[:num_drafts], self._accepted, strict=False):
            shares = []
            for rank, prior in enumerate(before):
                expected = prior if rank == 0 else shares[-1] * prior / before[rank - 1]
                shares.append((accepted[rank] + _PRIOR_WEIGHT * expected) / (tried[rank] + _PRIOR_WEIGHT))
            found.append(shares)
            before = shares
        return found

    def _static_gain(self, drafted: RoundShape) -> float:
        """Expected accepted drafts of the tree `drafted`, if its paths are the likeliest ones by the mean shares."""
        if self._fresh <= 0:
            self._gains.clear()
            self._fresh = _FRESH
        depth, num_nodes = drafted
        gains = self._gains.get(depth, [])
        if len(gains) <= num_nodes:
            gains = self._gains[depth] = self._likeliest(depth, max(num_nodes, TREES[-1].num_nodes))
        return gains[num_nodes]

    def _likeliest(self, depth: int, num_nodes: int) -> list[float]:
        """Sums of the probabilities of the 0, 1, ..., `num_nodes` likeliest paths of at most `depth` drafts."""
        laws = []
        for shares in self._shares(depth):
            law, left = [], 1.0
            for share in shares:
                law.append(left * share)
                left *= 1 - share
            laws.append(law)
        heap, sums = [(-laws[0][0], 1.0, 0, 0)] if laws else [], [0.0]
        while len(sums) <= num_nodes:
            if not heap:
                sums.append(sums[-1])
                continue
            minus, before, position, rank = heapq.heappop(heap)
            sums.append(sums[-1] - minus)
            if rank + 1 < _NUM_RANKS:
                heapq.heappush(heap, (-before * laws[position][rank + 1], before, position, rank + 1))
            if position + 1 < depth:
                heapq.heappush(heap, (minus * laws[position + 1][0], -minus, position + 1, 0))
        return sums


class Workload(NamedTuple):
    """What a call is for, on average: new tokens of a row, new tokens of a request, tokens of a prompt."""

    tokens: float
    tokens_of_request: float = 0.0
    prompt_length: float = 0.0

    @property
    def kind(self) -> Workload:
        """The logarithms, rounded: calls that reach as much of what their rounds promise."""
        return Workload(*(float(round(math.log2(1.0 + one))) for one in self))


class RoundTimes:
    """Times of rounds by their drafts, on buffers of one shape, kept from call to call.

    `known` are milliseconds of a round that were measured before.

    Attributes:
        expected: expected times, relative to each other; None until a call sets them.
        least: milliseconds of a round without the drafter, from which others are estimated while none is known.
        total, unsaved: milliseconds of all rounds, and of those that are not on disk yet.
        spent: milliseconds that trials have cost; those on record have cost their share of `total`.
        alone: milliseconds of calls without the drafter since the last call with it.
        since_trial: rounds of all calls since the last trial.
    """

    def __init__(self, known: Mapping[RoundShape, float] | None = None, total: float = 0.0) -> None:
        self.expected: ExpectedCosts | None = None
        self.least: float | None = None
        self._times = {drafted: deque([one], maxlen=_NUM_TIMES) for drafted, one in (known or {}).items()}
        self._medians = dict(known or {})
        self._measured: set[RoundShape] = set()
        self.total, self.unsaved, self.spent, self.alone = total, 0.0, _BUDGET * total, 0.0
        self.since_trial = 0
        self._reached: dict[Workload, deque[float]] = {}

    @property
    def known(self) -> dict[str, Any]:
        """All that was measured."""
        return {name: value for name, value in vars(self).items() if name != "expected"}

    def reach(self, work: Workload, share: float) -> None:
        """Note which `share` of the tokens that its rounds promise, in all rows all the time, a call has reached."""
        self._reached.setdefault(work.kind, deque(maxlen=_NUM_CALLS)).append(share)

    def reached(self, work: Workload) -> float | None:
        """The median share of the last calls for such work; None if there were none."""
        shares = self._reached.get(work.kind)
        return None if shares is None else statistics.median(tuple(shares))

    def measured(self) -> tuple[dict[RoundShape, float], float]:
        """Milliseconds of a round, by drafts, of rounds that have run in this process; and `unsaved`."""
        return {drafted: self.milliseconds(drafted) for drafted in sorted(self._measured)}, self.unsaved

    def add(self, drafted: RoundShape, milliseconds: float, is_typical: bool) -> None:
        """Add the time of a round. It `is_typical` if a round with the same drafts ran immediately before."""
        self.total += milliseconds
        self.unsaved += milliseconds
        if is_typical:
            self._measured.add(drafted)
            last = self._times.setdefault(drafted, deque(maxlen=_NUM_TIMES))
            last.append(milliseconds)
            self._medians[drafted] = statistics.median(tuple(last))  # other threads may add to it

    def __contains__(self, drafted: RoundShape) -> bool:
        return drafted in self._medians

    def is_known(self, most: RoundShape) -> bool:
        """Whether the time of any candidate of `most` is known."""
        return any(one in self for one in candidates(most))

    @property
    def budget(self) -> float:
        """Milliseconds that trials may cost now; below 0 after first trials that a call was long enough for."""
        return _BUDGET * self.total - self.spent

    def milliseconds(self, drafted: RoundShape) -> float:
        """The median of the last times of such rounds; if there are none, a low estimate from other rounds.

        A tree is estimated from its chain, which takes as long to draft, and from other trees of its depth.
        """
        if drafted in self._medians:
            return self._medians[drafted]
        if not self._medians:
            return self.least * self.expected.low_ratio(drafted, RoundShape(0))
        others = self._medians.keys()
        if drafted.num_nodes:
            chain = RoundShape(drafted.num_drafts)
            others = {chain, *(one for one in others if one.num_nodes and one.num_drafts == drafted.num_drafts)}
        else:
            others = {one for one in others if not one.num_nodes} or {max(others)}
        known, width = sorted(others, key=lambda other: abs(other.width - drafted.width)), drafted.width
        first = self.milliseconds(known[0])
        expected = first * self.expected.low_ratio(drafted, known[0])
        if len(known) == 1:
            return expected
        # From the two around it, or else from the two nearest, which say little about what is far away.
        is_above = known[0].width < width
        other = next((one for one in known[1:] if (one.width > width) == is_above), None)
        second = other or known[1]
        slope = (self.milliseconds(second) - first) / (second.width - known[0].width)
        line = _OPTIMISM * (first + slope * (width - known[0].width))
        return line if other is not None else max(line, expected)


def best_rate(most: RoundShape, acceptance: Acceptance, times: RoundTimes) -> float:
    """The most tokens that rounds commit in a millisecond and row, of the candidates whose times are known, or else of
    those that draft."""
    some = candidates(most)
    known = [one for one in some if one in times] or some[1:]
    return max(acceptance.expected_tokens(one) / times.milliseconds(one) for one in known)


def _least_gain(times: RoundTimes, times_alone: RoundTimes, work: Workload) -> float:
    """How many more tokens a millisecond rounds with the drafter must give than those without it, as a share."""
    reached, alone = times.reached(work), times_alone.reached(work)
    if reached is None:
        return _LEAST_GAIN
    if alone is not None:
        return min(max(alone / reached - 1, 0.0), _MOST_GAIN)
    # A call without the drafter is assumed to lose half as much, so that it is tried where it may be faster.
    return min(max((1 + reached) / 2 / reached - 1, _LEAST_GAIN), _MOST_GAIN)


def is_better_alone(
    most: RoundShape,
    first: RoundShape,
    acceptance: Acceptance,
    times: RoundTimes,
    times_alone: RoundTimes,
    work: Workload,
    price: float = 0.0,
    price_of_drafts: float = 0.0,
) -> bool:
    """Whether a call for `work` is expected to be faster without the drafter.

    Rounds without it are faster than rounds with K = 0; if their time is unknown, it is estimated low. Since texts
    change, there is now and then a call with the drafter, at a bounded share of the time.

    Args:
        most, first, acceptance, times: as in `AutoDrafts`.
        times_alone: times of rounds without the drafter.
        price, price_of_drafts: milliseconds of captures before the call can run without the drafter, and with it.
    """
    none, is_known = RoundShape(0), RoundShape(0) in times_alone
    is_tried = times.is_known(most)
    if not is_tried and not is_known:
        return first == none
    if is_known:
        alone = times.least = times_alone.milliseconds(none)
    else:
        alone = times.milliseconds(none) * (_OPTIMISM if none in times else 1.0)
    gain = alone * best_rate(most, acceptance, times)
    share, left = 1 - gain / (1 + _least_gain(times, times_alone, work)), work.tokens * alone
    cost, is_first = (price, not is_known) if share > 0 else (price_of_drafts, not is_tried)
    if is_first:
        worth = _CONFIDENCE * abs(share) * left + times.budget + times_alone.budget
    else:
        worth = abs(share) * max(left, times.total + times_alone.total, _HORIZON)
    is_alone = (worth > cost) == (share > 0)
    if share > 0 and _BUDGET * times.alone >= share * left + price_of_drafts:
        is_alone = False
    if not is_alone:
        times.alone = 0.0
    return is_alone


class FixedDrafts:
    """The drafts `current` in every round; `times` are the times of the session's rounds, and `shared`, if not None,
    gets them for calls with "auto". Interface: see `AutoDrafts`."""

    def __init__(self, current: RoundShape, times: RoundTimes, shared: RoundTimes | None = None):
        self.current, self.times, self._shared = current, times, shared

    def next(self, tokens_left: Callable[[], float]) -> RoundShape:
        return self.current

    def refuse(self, drafted: RoundShape) -> None:
        raise no_memory(drafted)

    def ran(self, drafted: RoundShape, milliseconds: float, is_typical: bool) -> None:
        self.times.add(drafted, milliseconds, is_typical)
        if self._shared is not None:
            self._shared.add(drafted, milliseconds, is_typical)


class AutoDrafts:
    """Chooses the drafts of every round, beginning with `first` if no time is known.

    Args:
        most: the largest K, and the largest N of a tree, 0 for chains only.
        times: times of rounds on the buffers of the call.
        price: milliseconds of captures before rounds with given drafts can run.
        split: the model that several ranks run together, which use the times of the first rank; None for one process.

    Attributes:
        current: the drafts of rounds that are not trials.
    """

    def __init__(
        self,
        most: RoundShape,
        first: RoundShape,
        acceptance: Acceptance,
        times: RoundTimes,
        price: Callable[[RoundShape], float] = lambda drafted: 0.0,
        split: PreTrainedModel | None = None,
    ):
        self._candidates = candidates(most)
        self._acceptance, self.times, self._price = acceptance, times, price
        # Rounds of a split model whose times the ranks have not agreed on yet.
        self._split, self._own_times = split, []
        known = [one for one in self._candidates if one in times]
        ready = [one for one in known if not price(one)] or known
        if not known and times.least is not None:  # as `is_better_alone` has expected
            ready = self._candidates[1:]
        begin = max(one for one in self._candidates if one.width <= max(first.width, 1))
        self.current = self._best(ready) if ready else begin
        self._plan: deque[RoundShape] = deque()
        # Candidates on trial whose times have not arrived yet.
        self._waiting: set[RoundShape] = set()
        self._is_upwards = False

    def next(self, tokens_left: Callable[[], float]) -> RoundShape:
        """The drafts of the next round. `tokens_left()` is the number of tokens that a row may still generate: the
        more, the more a trial may cost."""
        if not self._plan:
            self._choose(tokens_left)
            self._plan.extend(self._tries(tokens_left))
        if self._plan:
            self.times.since_trial = 0
            return self._plan.popleft()
        self.times.since_trial += 1
        return self.current

    def refuse(self, drafted: RoundShape) -> None:
        """Remove `drafted`, whose rounds do not fit in memory, from the candidates. Raises `OutOfMemoryError` if it is
        the only candidate."""
        if self._candidates == [drafted] or drafted not in self._candidates:
            raise no_memory(drafted)
        self._candidates.remove(drafted)
        self._plan.clear()
        if self.current == drafted:
            self.current = self._nearest(self._candidates)

    def ran(self, drafted: RoundShape, milliseconds: float, is_typical: bool) -> None:
        """Take the time of a round. It `is_typical` if a round with the same drafts ran immediately before."""
        if self._split is None:
            self._learn(drafted, milliseconds, is_typical)
            return
        self._own_times.append((drafted, milliseconds, is_typical))
        if len(self._own_times) == ROUNDS_TO_AGREE:
            times = torch.tensor([one[1:] for one in self._own_times], dtype=torch.float32)
            shared = from_first_rank(times, self._split).tolist()
            for (drafted, *_), (milliseconds, typical) in zip(self._own_times, shared, strict=True):
                self._learn(drafted, milliseconds, bool(typical))
            self._own_times.clear()

    def _learn(self, drafted: RoundShape, milliseconds: float, is_typical: bool) -> None:
        self.times.add(drafted, milliseconds, is_typical)
        if is_typical:
            self._waiting.discard(drafted)

    def _nearest(self, others: Sequence[RoundShape]) -> RoundShape | None:
        """The one of `others` with the most similar width to `current`; None if `others` is empty."""
        return min(others, key=lambda one: abs(one.width - self.current.width), default=None)

    def _rate(self, drafted: RoundShape) -> float:
        """Expected tokens a millisecond and row."""
        return self._acceptance.expected_tokens(drafted) / self.times.milliseconds(drafted)

    def _best(self, some: Sequence[RoundShape]) -> RoundShape:
        """The best of `some`, fewest drafts first; of nearly equal ones the one with the fewest drafts."""
        rates = list(map(self._rate, some))
        enough = (1 - _NEARLY) * max(rates)
        return next(one for one, rate in zip(some, rates, strict=True) if rate >= enough)

    def _choose(self, tokens_left: Callable[[], float]) -> None:
        known = [one for one in self._candidates if one in self.times]
        if not known:
            return
        best, rate = self._best(known), self._rate(self.current)
        is_better = self._rate(best) > (1 + _HYSTERESIS) * rate
        if self.current not in known or (is_better and self._gain(best, rate, tokens_left) > self._price(best)):
            self.current = best

    def _gain(self, drafted: RoundShape, rate: float, tokens_left: Callable[[], float]) -> float:
        """Milliseconds that `drafted` saves over rounds at `rate`: in the time left, the time passed or `_HORIZON`."""
        share = 1 - rate / max(self._rate(drafted), rate)
        return share * max(tokens_left() / rate, self.times.total, _HORIZON)

    def _tries(self, tokens_left: Callable[[], float]) -> Sequence[RoundShape]:
        """Rounds of a trial that is worth its cost; empty if there is none."""
        if self.current not in self.times:
            return ()
        rate = self._rate(self.current)
        unknown = [one for one in self._candidates if one not in self.times and one not in self._waiting]
        found = max(unknown, key=self._rate, default=None)
        if found is not None:
            share = 1 - rate / self._rate(found)
            if share > _HYSTERESIS and self._pays(found, _ROUNDS_TO_TRY, rate, share * tokens_left() / rate):
                self._waiting.add(found)
                return [found] * _ROUNDS_TO_TRY
        if self.times.since_trial < _ROUNDS_BETWEEN:
            return ()
        self._waiting.clear()  # none of their rounds was typical
        # Known times change with the text; neighbours are tried again first.
        self._is_upwards = not self._is_upwards
        others = [one for one in self._candidates if one in self.times and one != self.current]
        again = self._nearest([one for one in others if (one.width > self.current.width) == self._is_upwards])
        if again is None or not self._pays(again, _ROUNDS_TO_RETRY, rate):
            return ()
        return [again] * _ROUNDS_TO_RETRY

    def _pays(self, drafted: RoundShape, num_rounds: int, rate: float, win: float = 0.0) -> bool:
        """Spend what a trial of `drafted` is expected to lose over the same tokens at `rate`, with its captures, if it
        may. `win` is what it may save in the rest of the call."""
        tokens = self._acceptance.expected_tokens(drafted)
        cost = self._price(drafted) + num_rounds * max(self.times.milliseconds(drafted) - tokens / rate, 0.0)
        if cost > _CONFIDENCE * win + self.times.budget:
            return False
        self.times.spent += cost
        return True


# What chooses the drafts of each round.
Drafts: TypeAlias = FixedDrafts | AutoDrafts
