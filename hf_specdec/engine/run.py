"""A run: requests are admitted to rows, rounds give them tokens, and they retire.

`generate()`, `generate_batch()` and managers make requests, and a `Runner` with rows for them. A call in lockstep is
one that admits all its rows before the first round, and whose transcript gets all tokens.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..calls.call import Call, no_positions
from ..calls.request import Arrivals, Arrived, ContinuousBatching, Request, end
from ..calls.transcript import Transcript, no_distribution
from ..device_policy import policy_of
from ..graphs.cuda_graphs import RoundClock
from ..kernels.types import NO_TOKEN
from ..modules.patch import user_code
from ..state import RoundShape
from ..stats import Counters, SpeculationStats
from .prefix_cache import Plan, Prefix, RowPrefixes
from .rounds import RoundReport
from .runner import Runner

# Tokens for which an admitted request has memory beyond its text so far.
TOKENS_AHEAD = 64

# Waiting requests are admitted once this share of the rows is free: prefilling few rows takes about as long as many.
SHARE_TO_ADMIT = 1 / 8


@dataclass
class _Launched:
    """A round whose results have not been read yet, or first tokens, which have no `drafted`, `start` and `end`."""

    occupants: dict[int, Request]
    report: RoundReport
    drafted: RoundShape | None = None
    is_typical: bool = False
    start: Any = None
    end: Any = None


class Run:
    """The requests that wait for rows and those that run in them, and the loop over rounds.

    Results of captured rounds are read one round late, so the GPU never waits for the host.

    Args:
        counters: of the requests, by their `index`.
        transcript: of a call in lockstep, and may stop rows; None for other calls.
    """

    def __init__(
        self,
        runner: Runner,
        arrived: Arrived,
        counters: Counters,
        settings: ContinuousBatching,
        transcript: Transcript | None = None,
    ):
        self._runner, self._settings, self.transcript = runner, settings, transcript
        self._counters = counters
        self.rounds_by_shape: Counter[RoundShape] = Counter()
        # By row. Tuples made for each row and round would let Python collect garbage for 0.2 s in a bulk call.
        self._occupants: dict[int, Request] = {}
        # Least recently used first.
        self._free = list(range(runner.num_rows))
        self._prefixes = RowPrefixes(runner.prefix_margin, runner.merges_equal)
        # Rows in prefill, and the requests that will occupy them.
        self._entering: list[tuple[int, Request]] = []
        self._waiting: deque[Request] = deque()
        self._tokens_waiting, self._is_open = 0, True
        # Requests of a call in lockstep whose limit is the number of positions of the target.
        self._cut = [one for one in arrived.requests if one.is_cut] if transcript is not None else []
        device = runner.state.tokens.device
        # Eager rounds take the host longer than the device, and one more than needed is a round lost.
        self._rounds_ahead = policy_of(device).rounds_ahead if runner.target.is_captured else 0
        self._clock = RoundClock(device)
        self._launched: deque[_Launched] = deque()
        # The shape of the last round, and when it ended; None if something else came after it.
        self._last: tuple[RoundShape, Any] | None = None
        self.seconds = 0.0
        self._take_arrived(arrived)

    @property
    def is_complete(self) -> bool:
        return not self._is_open and not self._waiting and self._is_empty

    @property
    def _is_empty(self) -> bool:
        """Whether no request is in a row or in prefill."""
        return not self._num_occupied

    @property
    def _num_occupied(self) -> int:
        return self._runner.num_rows - len(self._free)

    def run(self) -> None:
        """Run rounds until all requests have ended. Rounds that the device has begun by then are ignored."""
        if self.transcript is not None:  # a call for one token needs no round
            self._read_results(0)
        start = time.perf_counter()
        while self.round():
            pass
        self.seconds = time.perf_counter() - start

    def round(self) -> bool:
        """Admit requests, then run a round, or move to another session; returns False if the run is complete."""
        if self.admit():
            self._last = None
        if self.is_complete:
            return False
        if self._is_to_move:
            self._read_results(0)
            if self._is_to_move:
                self._move()
                self._last = None
        elif self._reserve_next():
            self._launch()
            self._read_results(self._rounds_ahead)
        return True

    def stats(self, call: Call) -> SpeculationStats:
        """The statistics of the call; they become the drafter's."""
        rounds, by_k, by_tree = self.rounds_by_shape, Counter(), Counter()
        for drafted, count in rounds.items():
            by_k[drafted.num_drafts] += count
            if drafted.num_nodes:
                by_tree[drafted.num_nodes] += count
        call.drafter._last_stats = stats = self._counters.summary(
            num_assistant_tokens=call.num_draft_tokens,
            tree=max(by_tree, default=0),
            engine="static",
            reason=call.reason,
            execution=self._runner.execution,
            batch_invariant=call.drafter.batch_invariant,
            draft_probs=call.draft_probs,
            num_rounds=rounds.total(),
            rounds_by_k=dict(by_k),
            rounds_by_tree=dict(by_tree),
            captures=self._runner.target.num_captures,
            seconds=self.seconds,
        )
        return stats

    # Admission.

    def admit(self) -> bool:
        """Admit waiting requests to free rows: at first all that fit, later whenever enough rows are free.

        If no row needs another round, it may wait for requests to arrive. Returns whether it has taken time.
        """
        has_waited = self._settings.arrivals is not None and self._receive(self._settings.arrivals)
        if self._entering:
            self._enter()
            return True
        num_admitted = min(len(self._free), len(self._waiting))
        enough = max(1, round(self._runner.num_rows * SHARE_TO_ADMIT))
        if not num_admitted or (not self._is_empty and num_admitted < min(enough, len(self._waiting))):
            return has_waited
        while self._free and self._waiting and not self._entering:
            prefixes, group = self._place_group(self._next_group())
            if not group:
                if not self._is_empty or self._waiting[0].longest > self._runner.capacity:
                    break
                request = self._waiting.popleft()
                self._withdraw(request, _no_memory(request))
                continue
            self._runner.prefill(prefixes, group, list(self._occupants.values()))
            self._enter()
            has_waited = True
        return has_waited

    def _next_group(self) -> list[Request]:
        """Take the next requests to admit: as many as rows are free, and as may be prefilled together."""
        group: list[Request] = []
        longest, room, runner = 0, 0.0, self._runner
        if self._waiting and runner.memory is not None:
            room = self._room()
            while runner.memory.bytes_for(_at_first(self._waiting[0])) > room and runner.free_others():
                room = self._room()
        while self._waiting and len(group) < len(self._free):
            one = self._waiting[0]
            if runner.memory is not None:
                room -= runner.memory.bytes_for(_at_first(one))
            longest = max(longest, one.num_prefilled)
            if one.longest > runner.capacity or room < 0 or not runner.fits_group(len(group) + 1, longest):
                break
            group.append(self._waiting.popleft())
            self._tokens_waiting -= one.left
        return group

    def _room(self) -> float:
        """Bytes for requests that enter rows, while each running request may still grow by a step."""
        return self._runner.room(self._free) - self._num_occupied * self._runner.memory.bytes_for(1)

    def _place_group(self, group: list[Request]) -> tuple[list[Prefix], list[Request]]:
        """Place `group`: returns the prefixes and the requests that are prefilled now; none if memory is short."""
        for row, request in self._occupants.items():
            self._prefixes.advance(row, request)
        runner, has_memory = self._runner, self._runner.memory is not None
        plan = self._prefixes.plan(group, self._free, is_lockstep=self.transcript is not None)
        if has_memory:
            plan = self._without_conflicts(plan)
        now, later = ([group[number] for number in numbers] for numbers in (plan.now, plan.later))
        prefixes = runner.share(plan.prefixes) if has_memory else plan.prefixes
        if has_memory:
            lengths = {prefix.row: _at_first(one) for prefix, one in zip(prefixes, now, strict=True)}
            if not self._reserve(lengths, {one.source for one in prefixes if one.source != one.row}):
                self._prefixes.leave(lengths)
                self._requeue(group)
                if runner.room(self._free) <= runner.room(()):
                    return [], []
                # Too much is held by other free rows, or by longer texts in these rows.
                self._empty(list(self._free))
                return self._place_group(self._next_group())
        if later:
            self._requeue(later)
        for prefix, request in zip(prefixes, now, strict=True):
            self._free.remove(prefix.row)
            self._counters.rows[request.index].cached_tokens += prefix.length
        self._entering = [(prefix.row, request) for prefix, request in zip(prefixes, now, strict=True)]
        return prefixes, now

    def _without_conflicts(self, plan: Plan) -> Plan:
        """`plan` without requests that would write to shared memory in rows that others of the group copy from."""
        # Twins copy what the source row prefills now, not what it holds.
        sources = {one.source for one in plan.prefixes if one.source != one.row and not one.is_whole}
        kept = {one.row: one.length if one.row == one.source else 0 for one in plan.prefixes if one.row in sources}
        held_up = {row for row, length in kept.items() if self._runner.memory.is_shared(row, length)}
        return self._prefixes.hold_up(plan, held_up) if held_up else plan

    def _enter(self) -> None:
        """Run a chunk of the prefill, or chunks until a row is occupied; requests whose prompts are complete enter
        their rows.

        Where requests arrive while rounds run, one chunk runs before each round, so that prompts do not hold up running
        requests. Where all requests are there from the start, all chunks run. Between chunks requests may be withdrawn;
        if all are, the prefill is abandoned.
        """
        arrivals = self._settings.arrivals
        while True:
            entered = self._runner.prefill_next()
            if entered is not None:
                self._occupy(*entered)
            if not self._entering or (arrivals is not None and self._occupants):
                return
            if arrivals is not None:
                self._receive(arrivals)
                if not self._entering:
                    return

    def _occupy(self, count: int, first: RoundReport) -> None:
        """Let the next `count` requests, whose first tokens are `first`, enter their rows."""
        now, entered, self._entering = time.perf_counter(), self._entering[:count], self._entering[count:]
        for row, request in entered:
            self._prefixes.enter(row)
            if request.is_over:  # withdrawn
                self._runner.finish([row])
                self._free_row(row)
            else:
                if request.lifespan[0] < 0:
                    request.lifespan = (now, -1.0)
                self._occupants[row] = request
        self._launched.append(_Launched(dict(entered), first))
        self._withdraw_failed()

    def _receive(self, arrivals: Arrivals) -> bool:
        """Take what has arrived, and wait for it if there is nothing else to do. Returns whether it has waited."""
        has_waited = False
        while True:
            arrived = arrivals(self._is_empty and not self._waiting, self._runner.target.unpatch)
            has_waited = has_waited or arrived.has_waited
            if arrived.must_restart:
                self._leave_all()
                return has_waited
            self._take_arrived(arrived)
            while self._waiting and (error := self._runner.why_refused(self._waiting[0])) is not None:
                self._withdraw(self._waiting.popleft(), error)
            if self._waiting or not self._is_empty or not self._is_open:
                return has_waited

    def _take_arrived(self, arrived: Arrived) -> None:
        """Queue the requests that have arrived; end those that are withdrawn or name an unknown adapter."""
        self._is_open = arrived.is_open
        if arrived.is_changed:
            self._prefixes.forget()
        self._waiting.extend(arrived.requests)
        self._tokens_waiting += sum([one.left for one in arrived.requests])
        withdrawn = list(arrived.withdrawn)
        for one in arrived.requests:
            error = None if one.adapter is None else self._runner.target.adapters.why_no_rows([one.adapter])
            if error is not None:
                withdrawn.append((one, error))
        for request, error in withdrawn:
            self._withdraw(request, error)
        if withdrawn:
            self._waiting = deque(one for one in self._waiting if not one.is_over)
            if self._entering and all(one.is_over for _, one in self._entering):  # the prefill is abandoned
                self._clear([row for row, _ in self._entering])
                self._entering = []

    def _leave_all(self) -> None:
        """Drop all requests, so that the run is complete."""
        self._waiting.clear()
        self._launched.clear()
        self._is_open, self._entering = False, []
        self._occupants.clear()
        self._free = list(range(self._runner.num_rows))

    def _requeue(self, requests: Sequence[Request]) -> None:
        """Put `requests` at the head of the queue."""
        self._waiting.extendleft(reversed(requests))
        self._tokens_waiting += sum(one.left for one in requests)

    # Moves to other sessions, and memory.

    @property
    def _is_to_move(self) -> bool:
        if self._entering or (self._is_empty and not self._waiting):
            return False
        return self._runner.is_to_move(self._num_occupied, self._waiting, self.tokens_left)

    def _move(self) -> None:
        """Go on in another session. The results of all rounds must have been read."""
        rows = {row: one.length for row, one in self._occupants.items()}
        kept = self._prefixes.kept(self._free) if self._is_open else {}
        count = self._runner.move(rows, kept, self._waiting)
        if count is None:
            return
        self._prefixes.move([*rows, *kept][:count])
        self._occupants = dict(enumerate(self._occupants.values()))
        self._free = [*range(count, self._runner.num_rows), *reversed(range(len(rows), count))]

    def tokens_left(self) -> float:
        """Tokens that a row may still generate, for all requests that will occupy it from now on."""
        running = [one.left for one in self._occupants.values()]
        return (sum(running) + self._tokens_waiting) / max(len(running), 1)

    def _reserve_next(self) -> bool:
        """Reserve memory for the next round. If it is short, read all results, preempt if need be, and return False."""
        if self._runner.memory is None:
            return True
        most = 2 * (self._runner.state.most_draft_tokens + 1)
        if self.reserve(self._tokens_in_flight() + most):
            return True
        self._read_results(0)
        if not self.reserve(most):
            self.preempt()
        return False

    def _tokens_in_flight(self) -> int:
        """Most tokens that unread rounds may have given to a row."""
        return sum([1 if one.drafted is None else one.drafted.num_drafts + 1 for one in self._launched])

    def reserve(self, ahead: int) -> bool:
        """Reserve memory for `ahead` tokens of each row beyond those that are read; returns whether there is enough."""
        nodes, committed = self._runner.state.most_nodes, self._runner.memory.committed_slots
        if all([one.length + ahead + nodes <= committed[row] for row, one in self._occupants.items()]):
            return True
        lengths = {row: min(one.length + ahead, one.longest) + nodes for row, one in self._occupants.items()}
        return self._reserve(lengths)

    def _reserve(self, lengths: Mapping[int, int], sources: Collection[int] = ()) -> bool:
        """Reserve memory for texts of `lengths`, by row; if need be, free rows other than `sources` are emptied."""
        if self._runner.reserve(lengths):
            return True
        self._runner.give_back({row: length for row, length in lengths.items() if row not in sources})
        for row in [row for row in self._free if row not in lengths and row not in sources]:
            self._empty([row])
            if self._runner.reserve(lengths):
                return True
        while self._runner.free_others():
            if self._runner.reserve(lengths):
                return True
        return False

    def _empty(self, rows: Sequence[int]) -> None:
        self._prefixes.leave(rows)
        if self._runner.memory is not None:
            self._runner.give_back(dict.fromkeys(rows, 0))

    def preempt(self) -> None:
        """Preempt the most recently admitted request and requeue it; if it is the only one, end it with an error."""
        if self._is_empty:
            return
        row, request = max(self._occupants.items(), key=lambda item: (item[1].lifespan[0], item[0]))
        if len(self._occupants) == 1 and not self._entering:
            self._withdraw(request, _no_memory(request))
            return
        self._clear([row])
        self._requeue([request])

    def _clear(self, rows: Sequence[int]) -> None:
        """Free `rows`, whose requests do not go on in them, and drop what they hold."""
        self._runner.finish(rows)
        for row in rows:
            self._free_row(row)
        self._empty(rows)

    # Rounds.

    def _launch(self) -> None:
        runner, last = self._runner, self._last
        # Slots up to the tokens of the rounds that are not read yet, and up to the drafts of this one.
        before = max([one.length for one in self._occupants.values()], default=1) + self._tokens_in_flight()
        num_captures = runner.target.num_captures
        while True:
            drafted = runner.lease.allowed(runner.drafts.next(self.tokens_left))
            runner.state.live = before + max(drafted)
            if runner.lease.prepare(drafted):
                break
            runner.drafts.refuse(drafted)
        # The time of a capture is not that of a round: longer texts may need another graph of the same drafts.
        is_typical = last is not None and last[0] == drafted and runner.target.num_captures == num_captures
        start = last[1] if is_typical else self._clock.mark()
        output = runner.lease.run_round(drafted)
        end = self._clock.mark()
        report = runner.report(output)
        self._launched.append(_Launched(dict(self._occupants), report, drafted, is_typical, start, end))
        self._last = drafted, end
        self._withdraw_failed()

    def _read_results(self, rounds_ahead: int) -> None:
        """Read the results of all rounds but the last `rounds_ahead`."""
        while len(self._launched) > rounds_ahead:
            one = self._launched.popleft()
            self._take(one)
            if one.drafted is not None:
                milliseconds = self._clock.milliseconds(one.start, one.end)
                self._runner.drafts.ran(one.drafted, milliseconds, one.is_typical)

    def _take(self, launched: _Launched) -> None:
        """Add the tokens of a round, or first tokens, to their requests, and retire the rows that have ended."""
        report, drafted, transcript = launched.report, launched.drafted, self.transcript
        tokens, accepted, committed, rejected = report.read()
        # Preempted requests have their first token already.
        running = {
            row: one for row, one in launched.occupants.items() if not (one.is_over or (drafted is None and one.tokens))
        }
        if drafted is not None:
            self.rounds_by_shape[drafted] += 1
            num_drafts, num_nodes = drafted
            counted = self._count(running, num_drafts, accepted, committed)
            self._counters.count(counted, None if rejected is None else [rejected[row] for row in running], num_nodes)
        self._add(running, tokens, committed, report.logprobs)
        if transcript is None:
            return
        counts = [0] * len(transcript.stopped)
        for row in running:
            counts[row] = committed[row]
        transcript.add(tokens[: len(counts)], counts, **report.records, **report.logprobs)
        for one in self._cut:
            if not transcript.stopped[one.index] and transcript.steps >= one.remaining:
                raise ValueError(no_positions(f"Row {one.index} of the batch", one))
        is_complete = transcript.is_complete
        ended = {row: one for row, one in running.items() if (is_complete or transcript.done[row]) and not one.is_over}
        if ended:
            self._runner.finish(list(ended))
            for row, one in ended.items():
                self._retire(row, one, time.perf_counter())

    def _count(
        self, running: Mapping[int, Request], num_drafts: int, accepted: Sequence[int], committed: Sequence[int]
    ) -> Iterator[tuple[int, int, int, int]]:
        """Count the drafts of each request; yields what `Counters.count` takes."""
        for row, request in running.items():
            request.num_settled = len(request.tokens)
            drafted = min(request.left, num_drafts)
            request.num_drafted += drafted
            request.num_accepted += min(accepted[row], drafted)
            yield request.index, accepted[row], committed[row], drafted

    def _add(
        self,
        running: Mapping[int, Request],
        tokens: Sequence[list[int]],
        committed: Sequence[int],
        logprobs: Mapping[str, torch.Tensor],
    ) -> None:
        """Add new tokens, and log-probabilities if asked for, to the requests of rows; requests that end retire."""
        now, going_on, stopped = time.perf_counter(), [], []
        asked = {one.return_logprobs for one in running.values()} - {None} if logprobs else ()
        of_rows = {name: logprobs[name].tolist() for name in asked}
        for row, request in running.items():
            new = tokens[row][: committed[row]]
            has_failed = bool(new) and new[-1] == NO_TOKEN
            if not request.tokens:
                request.first_token = now
            is_ended = request.add(new[:-1] if has_failed else new, now)
            if request.return_logprobs is not None:
                request.logprobs += of_rows[request.return_logprobs][row][: len(request.tokens) - len(request.logprobs)]
            is_full = request.left <= 0
            if is_ended and request.criteria is not None:  # the device knows end-of-sequence tokens only
                stopped.append(row)
            elif not is_ended and has_failed:
                request.error = no_distribution("The request", len(request.tokens))
            elif not is_ended and is_full and request.is_cut:
                request.error = no_positions("The request", request)
            if is_ended or has_failed or is_full:
                self._retire(row, request, now)
            else:
                going_on.append(request)
        if stopped:
            self._runner.finish(stopped)
        if going_on and self._settings.on_tokens is not None:
            with user_code():
                self._settings.on_tokens(going_on)

    # The end of requests.

    def _withdraw(self, request: Request, error: str) -> None:
        """End `request` with `error`, wherever it is. If it waits, the caller removes it from the queue."""
        if request.is_over:
            return
        request.error = error
        now = time.perf_counter()
        row = next((row for row, one in self._occupants.items() if one is request), None)
        if row is not None:
            self._runner.finish([row])
            self._retire(row, request, now)
        else:
            if not any(one is request for _, one in self._entering):
                self._tokens_waiting -= request.left
            end(request, now, self._settings)

    def _withdraw_failed(self) -> None:
        """End the requests whose logits processors failed in the last launch."""
        for row, error in self._runner.take_failed().items():
            if row in self._occupants:
                self._withdraw(self._occupants[row], error)

    def _retire(self, row: int, request: Request, now: float) -> None:
        self._prefixes.advance(row, request)
        self._runner.observe(row, request)
        self._free_row(row)
        end(request, now, self._settings)

    def _free_row(self, row: int) -> None:
        self._occupants.pop(row, None)
        self._free.append(row)
        self._runner.retire(row)


def _at_first(request: Request) -> int:
    """Tokens for which `request` has memory when it is admitted."""
    return min(request.length + TOKENS_AHEAD, request.longest)


def _no_memory(request: Request) -> str:
    return (
        f"There is no memory for a sequence of {request.length} tokens or more, even alone. Pass a shorter prompt or a "
        "smaller max_new_tokens."
    )
