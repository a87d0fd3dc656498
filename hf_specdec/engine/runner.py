"""A `Runner`: the session of a run and the memory of its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from ..auto_k.auto_drafts import Drafts
from ..calls.call import Call
from ..calls.request import Request
from ..kernels.types import RowRules
from ..memory.virtual_memory import RowMemory, available_bytes
from ..sampling.processors import BlockProcessor
from ..state import DecodeState, RoundShape, set_rows, upload
from ..stats import Counters
from .groups import Groups
from .hosted_target import HostedTarget
from .lease import SessionLease
from .prefix_cache import Prefix
from .rounds import RoundOutput, RoundReport, commit_first_token
from .sessions import Session, sessions_of

_T = TypeVar("_T")


class Runner:
    """A session on which a `Run` prefills requests and runs rounds. It does not know which request is in which row.

    Args:
        process: processes the logits of rounds and of first tokens.

    Attributes:
        lease, session, state: the session that rounds run on, its lease and its buffers.
        memory: memory of the rows, which grows with their texts; None if the buffers have a fixed size.
        num_rows, capacity: rows of the session; most tokens of a text, prompt included.
        drafts: chooses the number of drafts of each round.
        prefix_margin: see `Drafter.prefix_margin`; None if there is no prefix reuse.
        target: of the call.
        merges_equal: whether requests with equal prompts in one group are prefilled as one.
    """

    lease: SessionLease
    session: Session
    state: DecodeState
    memory: RowMemory | None
    num_rows: int
    capacity: int
    drafts: Drafts
    prefix_margin: int | None = None
    merges_equal = False
    # The sessions in which requests are prefilled; None if they are prefilled in their rows.
    _groups: Groups | None = None
    # What a row starts with besides its text: for each buffer of the state a list over requests.
    _numbers: Mapping[str, Sequence[int]] = {}

    def __init__(self, call: Call, target: HostedTarget, process: BlockProcessor):
        self._call, self.target, self._process = call, target, process
        self._logprobs = call.logprobs
        # Sampling settings of requests without their own; None for none.
        self._row_sampling = process.row_sampling
        self.execution = "no rounds"

    def counters(self, count: int) -> Counters:
        """The counters of `count` requests."""
        call = self._call
        return Counters(count, call.num_draft_tokens, self.lease.acceptance.observe if call.is_auto else None)

    def _use(self, lease: SessionLease, first: RoundShape | None = None) -> None:
        """Let rounds run on the session of `lease`; `first` as in `SessionLease.drafts`."""
        self.lease, self.session, self.state = lease, lease.session, lease.session.state
        self.state.logprobs = self._logprobs
        self.drafts = lease.drafts(first)
        self.num_rows, self.memory = len(self.state.lengths), self.state.cache.row_memory
        # The last drafts of a tree have slots behind the last position of the text.
        slots = self.state.slots - 1 if self.memory is None else self.memory.capacity
        self.capacity = slots - self.state.most_nodes

    # Requests.

    def fits_group(self, count: int, longest: int) -> bool:
        """Whether `count` requests, with texts of up to `longest` tokens, may be prefilled together."""
        return True

    def prefill(self, prefixes: Sequence[Prefix], requests: Sequence[Request], running: Sequence[Request]) -> None:
        """Begin to prefill `requests`, each in the row of its prefix, beside the `running` requests."""
        raise NotImplementedError(f"{type(self).__name__} does not implement prefill.")

    def prefill_next(self) -> tuple[int, RoundReport] | None:
        """Run the next part of the prefill. Returns how many requests have their first tokens now, the next ones of
        those that are prefilled, and these tokens; None if there are none.

        A prefill may be abandoned: the next one starts afresh.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement prefill_next.")

    def _fill(self, requests: Sequence[Request], state: DecodeState, rows: Sequence[int]) -> None:
        """Put `requests` into `rows` of `state`; they are to be prefilled."""
        adapters, temperatures = self.target.adapters, self._call.row_temperatures
        state.admit(
            rows,
            [one.text[: one.num_prefilled] if one.tokens else one.prompt for one in requests],
            [one.remaining - max(len(one.tokens) - 1, 0) for one in requests],
            [one.seed for one in requests],
            [one.ends for one in requests],
            prompt_lengths=[len(one.prompt) for one in requests],
            adapters=[adapters.active if one.adapter is None else adapters.bits([one.adapter]) for one in requests],
            **{name: [values[one.index] for one in requests] for name, values in self._numbers.items()},
        )
        if self._row_sampling or requests[0].sampling:
            state.set_row_sampling(rows, [one.sampling or self._row_sampling for one in requests])
        if temperatures is not None:
            at = upload(rows, state.lengths)
            state.row_temperatures[at] = upload(temperatures[[one.index for one in requests]], state.row_temperatures)
        rules = {}
        for row, one in zip(rows, requests, strict=True):
            if isinstance(one.processors, RowRules) and one.processors != RowRules():
                rules[row] = one.processors
        if rules:
            state.set_row_rules(list(rules), list(rules.values()))

    def _commit_first_tokens(self, rows: torch.Tensor | slice, known: torch.Tensor | None = None) -> RoundReport:
        return self.report(commit_first_token(self.state, self._process, rows, known))

    def report(self, output: RoundOutput) -> RoundReport:
        """`output` on its way to the host."""
        return RoundReport(output, self.state.logprobs, self._call.kept, self._call.batch)

    def finish(self, rows: Sequence[int]) -> None:
        """Mark `rows` as finished: later rounds commit nothing to them."""
        set_rows(self.state.finished, upload(rows, self.state.lengths), True)

    def observe(self, row: int, request: Request) -> None:
        """Let the drafter read the text of `request`, which has ended in `row`."""
        call, kept = self._call, self.state.cache.hidden_states
        call.drafter.observe(request.prompt, request.tokens)
        # The target has not run all tokens of prompts that are more than tokens, or are in a cache of the caller.
        if kept is not None and call.inputs is None and call.cache is None and call.drafter.rollouts is not None:
            call.drafter.rollouts.keep(kept.buffers[0][row, : request.length - 1, 0], request.prompt, request.tokens)

    def take_failed(self) -> dict[int, str]:
        """Take the errors of logits processors in the last round or the last first tokens, by row."""
        return {}

    def retire(self, row: int) -> None:
        """The request of `row` has ended or was preempted."""

    def why_refused(self, request: Request) -> str | None:
        """The reason why there is no room for `request`; None if there may be room."""
        return None

    # Other sessions.

    def is_to_move(self, num_occupied: int, waiting: Sequence[Request], tokens_left: Callable[[], float]) -> bool:
        """Whether the occupied rows should move to another session, one with room for `waiting` requests."""
        return False

    def move(self, rows: Mapping[int, int], kept: Mapping[int, int], waiting: Sequence[Request]) -> int | None:
        """Move the requests of `rows` to the first rows of another session, one with room for `waiting` requests. The
        rows after those get what the `kept` rows hold, as far as there is room. Both map a row to its number of tokens.
        Returns how many rows of the new session hold a text; None if nothing has moved."""
        return None

    def _first_that_fits(self, attempts: Sequence[Callable[[], _T]]) -> _T:
        """The result of the first of `attempts` that fits in memory. A split target must fit at the first attempt."""
        for attempt in attempts[:-1]:
            try:
                return attempt()
            except torch.OutOfMemoryError:
                if self.target.is_split:
                    raise
            # Here the exception is freed, and with it the tensors of its frames.
            self._free_kept()
        return attempts[-1]()

    def _free_kept(self) -> None:
        sessions_of(self._call.drafter).clear()
        torch.cuda.empty_cache()

    # Memory that grows with the texts.

    def share(self, prefixes: Sequence[Prefix]) -> list[Prefix]:
        """Let rows share the memory of the prefixes that they reuse, and no other memory. Call it before `reserve`.

        Returns `prefixes`; rows that reuse their own text may get a shorter one.
        """
        memory = self.memory
        kept = {one.row: one.length if one.row == one.source else 0 for one in prefixes}
        # Rows of the group may give back their memory before other rows have copied it.
        copies = [
            one for one in prefixes if one.source not in kept and memory.can_share(one.row, one.source, one.length)
        ]
        if copies or any(memory.is_shared(*one) for one in kept.items()):
            self._wait_for_device()
        shared = {one.row for one in copies if memory.share(one.row, one.source, one.length)}
        left = {row: memory.unshare(row, length) for row, length in kept.items() if row not in shared}
        return [one._replace(length=left[one.row]) if one.row == one.source else one for one in prefixes]

    def room(self, rows: Sequence[int]) -> int:
        """Bytes that `rows` may have in all: the free memory and what they hold now."""
        return available_bytes(self.state.tokens.device) + self.memory.held(rows)

    def reserve(self, lengths: Mapping[int, int]) -> bool:
        """Commit memory for `lengths` tokens, by row; returns whether there is enough."""
        try:
            for row, length in lengths.items():
                if length > self.memory.committed_slots[row]:
                    self.memory.commit(row, min(length, self.memory.capacity))
        except torch.OutOfMemoryError:
            return False
        return True

    def give_back(self, lengths: Mapping[int, int]) -> None:
        """Give back the memory of rows beyond `lengths` tokens, by row."""
        self._wait_for_device()
        for row, length in lengths.items():
            self.memory.trim(row, length)

    def _wait_for_device(self) -> None:
        """Wait until the device no longer uses memory that rows have held."""
        self.session.fence.set()
        self.session.fence.synchronize()
