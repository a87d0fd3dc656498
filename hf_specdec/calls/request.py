"""Requests, which take rows of a run; where requests come from, and the callbacks for what they generate."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..host.generation import GenerationOutput, RequestStatus
from ..kernels.types import RowRules, SamplingSettings
from ..modules.patch import user_code


@dataclass(eq=False)
class Request:
    """A request: a row of a call, or a request that has arrived at a manager.

    Attributes:
        index: its row in the call; 0 for one that has arrived.
        prompt: `[length]` int64.
        prompt_ids: the tokens of `prompt` on the host; empty without prefix reuse.
        adapter: the name of its LoRA adapter, or `NO_ADAPTER`; None for the active adapters.
        remaining: most tokens that it may add.
        is_cut: whether `remaining` is less than was asked for, since the target has no positions for more.
        ends: tokens that end it.
        seed: key of its random numbers.
        sampling: its own sampling settings, if it has some.
        user_processors: those of its own logits processors that the user passed.
        processors: its own logits processors, or its `RowRules` for those that all rows share. Before it has a row
            their settings, `max_new_tokens` among them, or None; see `ContinuousBatching.processors_of`.
        criteria: stopping criteria besides `ends`, called with its text, `[1, n]` int64 on the host, after each token.
        request_id: its name; None if nobody takes its result.
        prompt_id: the name of the last sequence of its prompt, by which a manager cancels all of them.
        streaming: whether a result is delivered after every round.
        return_logprobs: which log-probabilities of its tokens it gets, see `Call.logprobs`; None for none.
        logprobs: of `tokens`, if it gets some.
        num_settled: number of tokens before the last round; the drafter has read these.
        timestamps: `time.perf_counter()` when each token reached the host.
        num_drafted, num_accepted: draft tokens that were verified, and accepted.
        first_token: `time.perf_counter()` when its first token reached the host; -1 before that.
        error: why it ended without an end-of-sequence token and before its limit; None if it did not.
        created_time: `time.perf_counter()` when it was made.
        lifespan: `time.perf_counter()` when it was first admitted and when it ended; -1 before that.
    """

    index: int
    prompt: torch.Tensor
    remaining: int
    is_cut: bool = False
    ends: frozenset[int] = frozenset()
    seed: int = 0
    sampling: SamplingSettings | None = None
    user_processors: LogitsProcessorList | None = None
    processors: LogitsProcessorList | RowRules | GenerationConfig | None = None
    criteria: StoppingCriteriaList | None = None
    records_timestamps: bool = False
    request_id: str | None = None
    prompt_id: str = ""
    streaming: bool = False
    prompt_ids: list[int] = field(default_factory=list)
    adapter: str | None = None
    return_logprobs: str | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_settled: int = 0
    timestamps: list[float] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    first_token: float = -1.0
    error: str | None = None
    created_time: float = field(default_factory=time.perf_counter)
    lifespan: tuple[float, float] = (-1.0, -1.0)
    # The text that `criteria` read, with room after it, on the host. Each token is written once.
    _shown: torch.Tensor | None = field(default=None, repr=False)
    # Length of the prompt; reading it from the tensor takes a microsecond, several times a round and row.
    _prompt_length: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._prompt_length = len(self.prompt)

    @property
    def is_over(self) -> bool:
        return self.lifespan[1] >= 0

    @property
    def has_started(self) -> bool:
        return self.lifespan[0] >= 0 or self.is_over

    @property
    def length(self) -> int:
        """Tokens of its text so far, prompt included."""
        return self._prompt_length + len(self.tokens)

    @property
    def left(self) -> int:
        """Most tokens that it may still add."""
        return self.remaining - len(self.tokens)

    @property
    def text(self) -> torch.Tensor:
        """The text so far, `[length]` int64, on the device of the prompt."""
        if not self.tokens:
            return self.prompt
        return torch.cat([self.prompt, torch.tensor(self.tokens, dtype=torch.int64, device=self.prompt.device)])

    @property
    def prefix_ids(self) -> Sequence[Hashable]:
        """`prompt_ids` as a key for prefix reuse; the first element also tells the adapter, if it has one."""
        if self.adapter is None or not self.prompt_ids:
            return self.prompt_ids
        first, *others = self.prompt_ids
        return [(self.adapter, first), *others]

    @property
    def num_prefilled(self) -> int:
        """Tokens that are prefilled when it is admitted: the prompt; after preemption the text without its last token,
        so that its rounds go on as they would have."""
        return self.length - bool(self.tokens)

    @property
    def longest(self) -> int:
        """Most tokens of its text, prompt included."""
        return self._prompt_length + self.remaining

    def limit_to(self, num_positions: int, model: str) -> None:
        """Limit it to the positions of the target, of the class `model`; it gets an error if its prompt is too long."""
        fitting = num_positions + 1 - self._prompt_length  # the last token of a text is not embedded
        self.is_cut, self.remaining = fitting < self.remaining, min(fitting, self.remaining)
        if fitting < 1:
            self.error = (
                f"A prompt has {self._prompt_length} tokens, but {model} has {num_positions} positions "
                "(max_position_embeddings); expected no more tokens than that."
            )

    def add(self, tokens: Sequence[int], now: float) -> bool:
        """Add the committed tokens of a round; returns whether one of `ends`, or before it `criteria`, ends it."""
        if self.criteria is None:
            self.tokens += tokens
            if self.records_timestamps:
                self.timestamps += [now] * len(tokens)
            return bool(tokens) and tokens[-1] in self.ends
        for token in tokens:
            self.tokens.append(token)
            if self.records_timestamps:
                self.timestamps.append(now)
            if token in self.ends or self._meets_criteria():
                return True
        return False

    def result(self) -> GenerationOutput:
        """Its output so far, in the form in which transformers' manager delivers it."""
        status = RequestStatus.DECODING if self.has_started else RequestStatus.PENDING
        if self.is_over:
            status = RequestStatus.FINISHED if self.error is None else RequestStatus.FAILED
        return GenerationOutput(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids,
            generated_tokens=list(self.tokens),
            logprobs=list(self.logprobs),
            error=self.error,
            status=status,
            created_time=self.created_time,
            lifespan=self.lifespan,
            timestamps=list(self.timestamps) if self.records_timestamps else None,
        )

    def _meets_criteria(self) -> bool:
        length = self.length
        if self._shown is None or length > len(self._shown):
            self._shown = torch.nn.functional.pad(self.text.cpu(), (0, length))
        self._shown[length - 1] = self.tokens[-1]
        with user_code():
            return bool(self.criteria(self._shown[None, :length], None).all())


class Arrived(NamedTuple):
    """What has changed about requests since the last round.

    Attributes:
        requests: new requests, in the order in which they are admitted.
        withdrawn: requests that end at once, each with an error.
        is_open: whether more requests may arrive.
        is_changed: whether the target may compute differently than before.
        has_waited: whether time was spent on waiting.
        must_restart: whether the run ends at once, since another run takes over its requests.
    """

    requests: Sequence[Request] = ()
    withdrawn: Sequence[tuple[Request, str]] = ()
    is_open: bool = True
    is_changed: bool = False
    has_waited: bool = False
    must_restart: bool = False


# Returns what has arrived; called before every round with `is_idle` and `leave_target`. It may wait, for long only if
# `is_idle`, i.e. no round is due. Before it waits it calls `leave_target`, which restores the target for others.
Arrivals = Callable[[bool, Callable[[], None]], Arrived]


@dataclass(frozen=True)
class ContinuousBatching:
    """How requests that come and go are run.

    Attributes:
        max_rows: most rows that rounds run on; None for the device's `DevicePolicy.max_rows`.
        on_finished: called with every request that has ended, in the order in which they end.
        on_tokens: called after a round with the requests that got tokens and have not ended.
        arrivals: source of the requests that arrive while rounds run, which are all requests then; None without.
        longest: tokens of a text that the first buffers have room for, if requests arrive.
        records_timestamps: whether the requests of a call record when each token reached the host.
        reuses_prefixes: whether keys and values of shared prefixes are computed once.
        processors_of: returns the processors or rules of a request that lacks them, see `Request.processors`.
    """

    max_rows: int | None = None
    on_finished: Callable[[Request], None] | None = None
    on_tokens: Callable[[list[Request]], None] | None = None
    arrivals: Arrivals | None = None
    longest: int = 1
    records_timestamps: bool = False
    reuses_prefixes: bool = True
    processors_of: Callable[[Request], LogitsProcessorList | RowRules] | None = None


def end(request: Request, now: float, settings: ContinuousBatching) -> None:
    """End `request` at time `now`."""
    request.lifespan = (request.lifespan[0], now)
    if settings.on_finished is not None:
        with user_code():
            settings.on_finished(request)
