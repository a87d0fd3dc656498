"""What a run runs on: a session, whose rows requests occupy, with the memory of these rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from ..auto_k.auto_drafts import Drafts
from ..calls.call import Call
from ..calls.request import Request
from ..memory.virtual_memory import RowMemory, available_bytes
from ..parallel.tensor_parallel import tensor_parallel_group
from ..row_buffers import set_rows, upload
from ..sampling.processors import BlockProcessor
from ..state import DecodeState, RoundShape
from ..stats import Counters
from .hosted_target import HostedTarget
from .lease import SessionLease
from .prefix_cache import Prefix
from .rounds import RoundReport, commit_first_token
from .sessions import Session, sessions_of

_T = TypeVar("_T")

# First tokens, with the scores and logits that a round would have kept.
FirstTokens = tuple[RoundReport, dict[str, torch.Tensor | None]]


class Runner:
    """A session on which a `Run` prefills requests and runs rounds. It knows rows, not which request is in which.

    Args:
        process: logits, of rounds and of first tokens.

    Attributes:
        lease, session, state: where the rows are.
        memory: of the rows, which follows their texts; None if they have buffers of fixed size.
        num_rows, capacity: of the session; most tokens of a text, prompt included.
        drafts: decides how many drafts a round has.
        acceptance: of the drafts of this call and those before it.
        prefix_margin: see `Drafter.prefix_margin`; None if rows reuse nothing of others.
        target: of the call.
        merges_equal: whether requests with the same prompt that are prefilled together are prefilled as one.
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

    def __init__(self, call: Call, target: HostedTarget, process: BlockProcessor):
        self._call, self.target, self._process = call, target, process
        self.acceptance = sessions_of(call.drafter).acceptance(call.temperature is not None)
        self._logprobs = call.logprobs
        self.execution = "no rounds"

    def counters(self, count: int) -> Counters:
        """For `count` requests."""
        call = self._call
        return Counters(count, call.num_draft_tokens, self.acceptance.observe if call.is_auto else None)

    def _use(self, lease: SessionLease, first: RoundShape | None = None) -> None:
        """Let rounds run on the session of `lease`; arguments as of its `drafts`."""
        self.lease, self.session, self.state = lease, lease.session, lease.session.state
        self.state.logprobs = self._logprobs
        self.drafts = lease.drafts(self.acceptance, first)
        self.num_rows, self.memory = len(self.state.lengths), self.session.row_memory
        # The last drafts of a tree are behind the positions of its text.
        slots = self.state.slots - 1 if self.memory is None else self.memory.capacity
        self.capacity = slots - self.state.most_nodes

    # Requests.

    def fits_group(self, count: int, longest: int) -> bool:
        """Whether so many requests, of texts of up to so many tokens, may be prefilled together."""
        return True

    def prefill(self, prefixes: Sequence[Prefix], requests: Sequence[Request], running: Sequence[Request]) -> None:
        """Begin to let each of `requests` occupy a row, with what is reused of its beginning, beside `running` ones."""
        raise NotImplementedError(f"{type(self).__name__} does not implement prefill.")

    def prefill_next(self) -> FirstTokens | None:
        """Go on with the prefill that was begun, for a limited time; returns the first tokens, if it has ended.

        A prefill may be given up: the next one begins anew.
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement prefill_next.")

    def _commit_first_tokens(self, rows: torch.Tensor | slice, known: torch.Tensor | None = None) -> FirstTokens:
        result, logprobs, _, scores, logits = commit_first_token(self.state, self._process, rows, known)
        return RoundReport(result, logprobs, self.state.logprobs), {"scores": scores, "logits": logits}

    def finish(self, rows: Sequence[int]) -> None:
        """Let `rows` be finished ones, which no later round gives tokens."""
        set_rows(self.state.finished, upload(rows, self.state.lengths), True)

    def observe(self, row: int, request: Request) -> None:
        """`request`, in `row`, has ended."""
        call, kept = self._call, self.state.cache.hidden_states
        call.drafter.observe(request.prompt, request.tokens)
        # Of prompts that are more than tokens, or in a cache of the caller, the target has not run all.
        if kept is not None and call.inputs is None and call.cache is None and call.drafter.rollouts is not None:
            call.drafter.rollouts.keep(kept.buffers[0][row, : request.length - 1, 0], request.prompt, request.tokens)

    def take_failed(self) -> dict[int, str]:
        """Errors of logits processors of rows, of the round or the first tokens before, by row."""
        return {}

    def retire(self, row: int) -> None:
        """The request of `row` has ended, or waits again."""

    def why_refused(self, request: Request) -> str | None:
        """Why there is no room for `request`; None if there may be."""
        return None

    # Other sessions.

    def is_to_move(self, num_occupied: int, waiting: Sequence[Request], tokens_left: Callable[[], float]) -> bool:
        """Whether the occupied rows should go on in another session, one with room for requests that are `waiting`."""
        return False

    def move(self, rows: Mapping[int, int], kept: Mapping[int, int], waiting: Sequence[Request]) -> int | None:
        """Let the requests of `rows` go on in the first rows of another session, one with room for `waiting` requests;
        what `kept` rows hold goes to the rows after those, as far as there is room. Rows have numbers of tokens.
        Returns how many rows hold what was moved; None if they stay."""
        return None

    def _first_that_fits(self, attempts: Sequence[Callable[[], _T]]) -> _T:
        """The result of the first of `attempts` with memory for it; of several processes all need the first one."""
        for attempt in attempts[:-1]:
            try:
                return attempt()
            except torch.OutOfMemoryError:
                if tensor_parallel_group(self._call.model) is not None:
                    raise
            # The error, which held what was allocated, is gone.
            self._free_kept()
        return attempts[-1]()

    def _free_kept(self) -> None:
        sessions_of(self._call.drafter).clear()
        torch.cuda.empty_cache()

    # Memory that follows the texts, where there is such.

    def share(self, prefixes: Sequence[Prefix]) -> list[Prefix]:
        """Let rows share memory of the beginnings that they reuse, and no other memory; before `reserve`.

        Returns `prefixes`; those of rows that keep what they hold may be shorter.
        """
        memory = self.memory
        kept = {one.row: one.length if one.row == one.source else 0 for one in prefixes}
        # What the rows of the group hold may be given back before others have copied it.
        copies = [
            one for one in prefixes if one.source not in kept and memory.can_share(one.row, one.source, one.length)
        ]
        if copies or any(memory.is_shared(*one) for one in kept.items()):
            self._wait_for_device()
        shared = {one.row for one in copies if memory.share(one.row, one.source, one.length)}
        left = {row: memory.unshare(row, length) for row, length in kept.items() if row not in shared}
        return [one._replace(length=left[one.row]) if one.row == one.source else one for one in prefixes]

    def room(self, rows: Sequence[int]) -> int:
        """Bytes that rows may get, those that `rows` hold included."""
        return available_bytes(self.state.tokens.device) + self.memory.held(rows)

    def bytes_for(self, slots: int) -> int:
        """Bytes that a row with so many tokens holds."""
        return self.memory.bytes_for(min(slots, self.memory.capacity))

    def reserve(self, lengths: Mapping[int, int]) -> bool:
        """Let rows have memory for so many tokens each; returns whether there is enough."""
        try:
            for row, length in lengths.items():
                if length > self.memory.committed_slots(row):
                    self.memory.commit(row, min(length, self.memory.capacity))
        except torch.OutOfMemoryError:
            return False
        return True

    def give_back(self, lengths: Mapping[int, int]) -> None:
        """Let rows give back the memory that they hold beyond so many tokens each."""
        self._wait_for_device()
        for row, length in lengths.items():
            self.memory.trim(row, length)

    def _wait_for_device(self) -> None:
        """Wait until the device uses nothing any more that rows have held."""
        self.session.fence.set()
        self.session.fence.synchronize()
