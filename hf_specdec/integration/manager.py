"""`model.init_continuous_batching(..., assistant_model=drafter)`: requests that arrive while rounds run."""

from __future__ import annotations

import asyncio
import copy
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from ..device_policy import policy_of
from ..drafters.base import Drafter
from ..engine.buckets import PACKED_TOKENS, next_power_of_two, row_sizes
from ..engine.request import fitting_tokens, why_too_long
from ..engine.request_rows import GROUP_SIZES, Arrivals, Arrived, ContinuousBatching, RowRequest
from ..errors import first_line
from ..ops import row_seeds
from ..parallel.tensor_parallel import tensor_parallel_group
from ..patching.support import num_positions, stated_positions
from ..sampling.logits import RowSampling
from ..state import NO_TOP_K, SamplingSettings
from .continuous import check_config, check_length, tokens_of
from .dispatch import continuous_batching
from .locks import lock_of
from .validation import check_tokens

logger = logging.getLogger(__name__)

# Seconds for which a run that has nothing to do waits for another request, before the model is as it was.
LINGER = 1.0

# Seconds for which `add_request` waits for room in a queue that is full, as transformers' manager does.
SECONDS_TO_WAIT = 10.0

# Tokens of the prompts and of the answers that `warmup` generates: more than a chunk of a prefill that is captured.
_WARMUP_PROMPT, _WARMUP_ANSWER = 161, 2

# The temperature of drafts for rows that are decoded greedily beside others that are sampled: nearly always the best.
_GREEDY = SamplingSettings(1e-4, 0, 1.0)

# Rounds in which scores are sorted are others than those in which they are not.
_FILTERED = SamplingSettings(1.0, 50, 0.9)

# Sampling settings that a request may have of its own if `per_request_processors` is set.
SAMPLING_OPTIONS = ("do_sample", "temperature", "top_k", "top_p")


@dataclass(eq=False)
class ManagedRequest(RowRequest):
    """A request to a manager.

    Attributes:
        request_id: its name.
        prompt_ids: its prompt, which all of its results share.
        streaming: whether a result is delivered after every round.
        created_time: `time.perf_counter()` when it was added.
    """

    request_id: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    streaming: bool = False
    created_time: float = field(default_factory=time.perf_counter)

    @property
    def has_started(self) -> bool:
        return self.lifespan[0] >= 0 or self.is_over

    def result(self) -> GenerationOutput:
        """What it says so far, as transformers' manager delivers it."""
        status = RequestStatus.DECODING if self.has_started else RequestStatus.PENDING
        if self.is_over:
            status = RequestStatus.FINISHED if self.error is None else RequestStatus.FAILED
        return GenerationOutput(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids,
            generated_tokens=list(self.tokens),
            error=self.error,
            status=status,
            created_time=self.created_time,
            lifespan=self.lifespan,
            timestamps=list(self.timestamps) if self.records_timestamps else None,
        )


class SpeculativeBatchingManager:
    """Continuous batching with a drafter of requests that arrive at any time.

    It has the methods of transformers' `ContinuousBatchingManager`. `init_continuous_batching` and
    `continuous_batching_context_manager` of a model make one if they are given a drafter. A thread of its own runs
    rounds while there are requests; requests take free rows between two rounds. Other calls of `generate()` with a
    drafter for the same model run between two rounds, too.

    Args:
        model: the target.
        drafter: bound to it.
        generation_config: of all requests; the model's own if None.
        continuous_batching_config: `max_requests_per_batch` is the most rows of a round, `max_queue_size` the most
            requests that wait for one (0 for any number), `seed` that of requests without a seed. With
            `per_request_processors` a request may have `do_sample`, `temperature`, `top_k` and `top_p` of its own.
            `drop_unsupported_processors` is as of transformers. Other settings are transformers' own engine's.
        workload_hints: `max_prompt_length` and `max_generated_length` are what the first buffers are made for; longer
            requests open larger ones.
        kwargs: settings of `generate()`, such as `num_assistant_tokens`.

    Attributes:
        background_thread_status: its `fatal_error` is the error that has ended the thread, or None.
        warmed_up: whether `warmup` was called.

    Raises:
        ValueError: continuous batching does not support the settings, the target or the drafter.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
        **kwargs: Any,
    ):
        check_length(model, generation_config, kwargs)
        if tensor_parallel_group(model) is not None:
            raise ValueError(
                f"{type(model).__name__} is split over several processes, which would have to admit the same requests; "
                "expected a target that one process runs. Use generate_batch(assistant_model=...)."
            )
        self.model, self.drafter = model, drafter
        self.continuous_batching_config = continuous_batching_config or ContinuousBatchingConfig()
        check_config(self.continuous_batching_config)
        self.generation_config, unknown = model._prepare_generation_config(generation_config, **kwargs)
        if unknown:
            raise ValueError(
                f"{', '.join(sorted(unknown))} is no setting of a manager; expected settings of a generation config."
            )
        self.generation_config.use_cache = True  # servers leave it off for transformers' own cache
        self._samples_each = bool(self.continuous_batching_config.per_request_processors)
        self._longest = _longest_of(workload_hints)
        self._seeds = torch.Generator()
        seed = self.continuous_batching_config.seed
        self._seeds.manual_seed(int(torch.randint(0, 2**63 - 1, (1,))) if seed is None else seed)
        self._num_positions = num_positions(model)

        self.background_thread_status = BackgroundThreadStatus()
        self.warmed_up = False
        self._thread: threading.Thread | None = None
        # Guards all that follows, and tells of changes. It is never held while waiting for the lock of the target.
        self._changed = threading.Condition()
        self._arrived: deque[ManagedRequest] = deque()
        self._withdrawn: list[tuple[ManagedRequest, str]] = []
        # By id: requests that are not over.
        self._active: dict[str, ManagedRequest] = {}
        self._results: deque[GenerationOutput] = deque()
        self._handlers: dict[str, tuple[Callable[[GenerationOutput], None], asyncio.AbstractEventLoop]] = {}
        self._num_named = 0
        # Threads that are in `pause` or wait for it; whether the thread runs rounds, and does not wait in them.
        self._pauses: list[int] = []
        self._runs_rounds = False
        self._generate(_Script([]))

    # Control.

    def is_running(self) -> bool:
        """Whether the thread has been started and is alive."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        if self.is_running():
            logger.warning("The manager has been started already.")
            return
        self.background_thread_status.clear()
        self._thread = threading.Thread(target=self._work, name="hf_specdec-continuous-batching")
        self._thread.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Stop the thread, when all requests have ended.

        Args:
            block: whether to wait for it, and then to free buffers and graphs.
            timeout: most seconds to wait; None for any number.
            keep_for_next_session: whether to keep buffers and graphs.
            hard_stop: whether to stop after the round that runs; requests fail then.

        Raises:
            RuntimeError: this thread has paused the manager.
        """
        if self._thread is None:
            logger.warning("The manager has not been started.")
            return
        if threading.get_ident() in self._pauses:
            raise RuntimeError(
                "stop() was called within pause(), in which no request can end; expected it after that. Leave the "
                "context first."
            )
        start = time.perf_counter()
        status = BackgroundThreadStatus.HARD_STOP if hard_stop else BackgroundThreadStatus.FLUSH_AND_STOP
        with self._changed:
            if self.background_thread_status.local_status < BackgroundThreadStatus.STOPPED:
                self.background_thread_status.request_stop(status, 0)
            self._changed.notify_all()
        if block:
            self.join(start, timeout)
            if self._thread is None and not keep_for_next_session:
                self.drafter.release()

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Wait for the thread to end, at most `timeout` seconds; `stop_trigger_time` is as of transformers."""
        if self._thread is None:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("The manager's thread still runs after %s seconds.", timeout)
        else:
            logger.info("The manager's thread ended after %.2f s.", time.perf_counter() - stop_trigger_time)
            self._thread = None

    def destroy(self) -> None:
        """Stop the thread, if it runs, and free buffers and graphs."""
        if self.is_running():
            self.stop()
        self.drafter.release()

    def warmup(self) -> None:
        """On a GPU: capture what rounds and prefills of all numbers of rows need, so that no request waits for it."""
        policy = policy_of(self.model.device)
        if policy.cuda_graphs:
            most = self.continuous_batching_config.max_requests_per_batch or policy.max_rows
            counts = {min(count, most) for count in (*row_sizes(most, is_captured=True), *GROUP_SIZES)}
            self._generate(
                _Script(
                    [
                        [
                            RowRequest(0, torch.zeros(length, dtype=torch.int64), _WARMUP_ANSWER, sampling=sampling)
                            for length in lengths
                        ]
                        for sampling in ((_GREEDY, _FILTERED) if self._samples_each else (SamplingSettings(),))
                        for count in sorted(counts)
                        for lengths in self._warmup_lengths(count)
                    ]
                )
            )
        self.warmed_up = True

    def _warmup_lengths(self, count: int) -> Iterator[list[int]]:
        """Lengths of `count` prompts each, for every chunk of packed prompts that may come."""
        yield [_WARMUP_PROMPT] * count
        longest = max(self._longest - _WARMUP_ANSWER, _WARMUP_PROMPT)
        for tokens in PACKED_TOKENS:
            many, rest = divmod(tokens, count)
            if count > 1 and many + 2 <= longest:
                yield [1 + many + (row < rest) for row in range(count)]

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context in which no round runs, so that the model can be used or changed in place; requests stay.

        Raises:
            RuntimeError: the thread does not run, or ends before it pauses.
        """
        if not self.is_running():
            raise RuntimeError(
                "pause() was called, but the manager does not run; expected it between start() and stop()."
            )
        me = threading.get_ident()
        with self._changed:
            self._pauses.append(me)
            self._changed.notify_all()
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._runs_rounds or self._has_stopped)
                if self._has_stopped:
                    raise RuntimeError("The manager stopped before it could pause.") from self._fatal_error
            yield
        finally:
            with self._changed:
                self._pauses.remove(me)
                self._changed.notify_all()

    # Requests.

    def add_request(
        self,
        input_ids: Sequence[int] | torch.Tensor,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **options: Any,
    ) -> str:
        """Add a request; returns its id.

        With `num_return_sequences` in the generation config, further sequences have `__child#0` and so on appended.

        Args:
            input_ids: token ids of its prompt.
            request_id: its id; `req_0`, `req_1` and so on if None.
            max_new_tokens, eos_token_id: the generation config's if None; tokens below 0 end nothing.
            streaming: whether a result is delivered after every round, with all tokens so far.
            record_timestamps: whether results have a time for each token.
            options: `seed`, of its random numbers; `stop_strings` with a `tokenizer`, which end it; with
                `per_request_processors` also `do_sample`, `temperature` (0 for greedy decoding), `top_k`, `top_p`.

        Raises:
            ValueError: an argument is wrong, or an unfinished request has the id.
            RuntimeError: the manager is stopping, or has ended by an error.
            queue.Full: `max_queue_size` requests wait, and none got a row for some seconds; at once in an event loop.
        """
        try:
            requests = self._requests_of(
                input_ids, request_id, max_new_tokens, streaming, record_timestamps, eos_token_id, options
            )
            return self._add(requests)
        except BaseException:
            with self._changed:
                if request_id not in self._active:
                    self._handlers.pop(request_id, None)
            raise

    def add_requests(
        self,
        inputs: Sequence[Sequence[int] | torch.Tensor],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **options: Any,
    ) -> list[str]:
        """Add several requests, none if one is wrong; see `add_request`. Returns their ids."""
        groups = [
            self._requests_of(prompt, None, max_new_tokens, streaming, record_timestamps, None, options, index)
            for index, prompt in enumerate(inputs)
        ]
        return [self._add(requests) for requests in groups]

    def check_room(self, num_tokens: int) -> None:
        """Check that a prompt of `num_tokens` tokens may be added.

        Raises:
            ValueError: the target has no positions for it.
            queue.Full: `max_queue_size` requests wait.
        """
        error = why_too_long(self.model, num_tokens, self._num_positions)
        if error is not None:
            raise ValueError(error)
        with self._changed:
            if self._is_full:
                raise queue.Full(self._about_full_queue())

    def is_active(self, request_id: str) -> bool:
        """Whether a request of this id has been added and is not over."""
        return request_id in self._active

    def cancel_request(self, request_id: str) -> None:
        """End a request; its result has failed, with the tokens so far. Nothing happens if it is over."""
        with self._changed:
            request = self._active.get(request_id)
            if request is not None:
                self._withdraw(request, f"The request {request_id} was cancelled.")
                self._changed.notify_all()

    # Results.

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The next result, of `request_id` if it is given.

        Returns:
            None after `timeout` seconds, and if none can come: the thread does not run, or the request is over.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._find(request_id) is not None or not self._expects(request_id), timeout)
            place = self._find(request_id)
            if place is None:
                return None
            result = self._results[place]
            del self._results[place]
            return result

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Results as they come, until the manager stops."""
        while (result := self.get_result()) is not None:
            yield result

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Results of one request, until it ends."""
        while (result := self.get_result(request_id)) is not None:
            yield result
            if result.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """Call `callback` on the running event loop with every result of a request, those that have come included."""
        loop = asyncio.get_running_loop()
        with self._changed:
            self._handlers[request_id] = callback, loop
            come = [one for one in self._results if one.request_id == request_id]
            for one in come:
                self._results.remove(one)
            self._deliver(come)

    # What the methods above are made of.

    @property
    def _fatal_error(self) -> BaseException | None:
        return self.background_thread_status.fatal_error

    @property
    def _has_stopped(self) -> bool:
        return self.background_thread_status.local_status == BackgroundThreadStatus.STOPPED

    @property
    def _is_stopping(self) -> bool:
        return self.background_thread_status.local_status != BackgroundThreadStatus.DONT_STOP

    def _find(self, request_id: str | None) -> int | None:
        """Place of the first result, of `request_id` if it is given."""
        places = (place for place, one in enumerate(self._results) if request_id in (None, one.request_id))
        return next(places, None)

    def _expects(self, request_id: str | None) -> bool:
        """Whether a result may still come."""
        return self.is_running() and not self._has_stopped and (request_id is None or request_id in self._active)

    def _requests_of(
        self,
        input_ids: Sequence[int] | torch.Tensor,
        request_id: str | None,
        max_new_tokens: int | None,
        streaming: bool,
        record_timestamps: bool,
        eos_token_id: int | list[int] | None,
        options: dict[str, Any],
        index: int = 0,
    ) -> list[ManagedRequest]:
        """A request, and one for each further sequence of its prompt, before it; see `add_request`."""
        prompt = tokens_of(input_ids, index)
        check_tokens(self.model, prompt[None], None)
        options = dict(options)
        seed, stop_strings, tokenizer = (options.pop(name, None) for name in ("seed", "stop_strings", "tokenizer"))
        limit = self._limit(max_new_tokens, len(prompt))
        remaining = fitting_tokens(len(prompt), limit, self._num_positions)
        count = self.generation_config.num_return_sequences or 1
        seeds, prompt_ids = self._seeds_of(seed, count), prompt.tolist()
        with self._changed:
            if request_id is None:
                request_id, self._num_named = f"req_{self._num_named}", self._num_named + 1
        return [
            ManagedRequest(
                index=0,
                prompt=prompt,
                remaining=remaining,
                is_cut=remaining < limit,
                ends=self._ends(eos_token_id),
                seed=seeds[number],
                sampling=self._sampling(options),
                criteria=_stop_strings(stop_strings, tokenizer),
                records_timestamps=record_timestamps,
                error=why_too_long(self.model, len(prompt), self._num_positions),
                request_id=request_id if number == count - 1 else f"{request_id}__child#{number}",
                prompt_ids=prompt_ids,
                streaming=streaming,
            )
            for number in range(count)
        ]

    def _limit(self, max_new_tokens: int | None, length: int) -> int:
        """New tokens of a request that asks for `max_new_tokens`; all there are positions for if there is no limit."""
        asked = self.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens
        if asked is None:
            positions = stated_positions(self.model)
            if positions is None:
                raise ValueError(
                    f"max_new_tokens is not set, and {type(self.model).__name__} states no number of positions; "
                    "expected max_new_tokens of the request, or of the generation config."
                )
            return max(positions + 1 - length, 1)
        if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
            raise ValueError(f"max_new_tokens is {asked!r}; expected an int of at least 1.")
        return asked

    def _ends(self, eos_token_id: int | list[int] | None) -> frozenset[int]:
        tokens = self.generation_config.eos_token_id if eos_token_id is None else eos_token_id
        tokens = [] if tokens is None else tokens if isinstance(tokens, (list, tuple)) else [tokens]
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in tokens):
            raise ValueError(f"eos_token_id is {eos_token_id!r}; expected a token id or a list of them.")
        ends = frozenset(one for one in tokens if one >= 0)
        own = self.generation_config.eos_token_id
        most = next_power_of_two(max(8, len(own) if isinstance(own, list) else 1))
        if len(ends) > most:
            raise ValueError(f"eos_token_id has {len(ends)} tokens; expected at most {most}.")
        return ends

    def _seeds_of(self, seed: int | None, count: int) -> list[int]:
        """Keys of the random numbers of the sequences of a request."""
        if seed is None:
            with self._changed:
                return torch.randint(0, 2**63 - 1, (count,), generator=self._seeds).tolist()
        if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed is {seed!r}; expected an integer of 64 bits.")
        return [seed] if count == 1 else row_seeds(torch.tensor([seed]), count).tolist()

    def _sampling(self, options: dict[str, Any]) -> SamplingSettings:
        """How a request with `options` is sampled, which must be those of `SAMPLING_OPTIONS`."""
        unknown = sorted(set(options) - set(SAMPLING_OPTIONS))
        if unknown:
            raise ValueError(
                f"{', '.join(unknown)} cannot be set for a request; expected some of seed, stop_strings, "
                f"{', '.join(SAMPLING_OPTIONS)}, or a setting of the manager's generation config."
            )
        if not self._samples_each:
            if options:
                raise ValueError(
                    f"{', '.join(sorted(options))} was set for a request, but the manager samples all requests alike; "
                    "expected ContinuousBatchingConfig(per_request_processors=True), or no such setting."
                )
            return SamplingSettings()
        do_sample, temperature, top_k, top_p = (
            getattr(self.generation_config, name) if options.get(name) is None else options[name]
            for name in SAMPLING_OPTIONS
        )
        for name, value, is_right, expected in (
            ("temperature", temperature, 0 <= temperature < float("inf"), "a number of at least 0"),
            ("top_k", top_k, isinstance(top_k, int) and top_k >= 0, "an int of at least 0"),
            ("top_p", top_p, 0 < top_p <= 1, "a number above 0 and up to 1"),
        ):
            if not is_right:
                raise ValueError(f"{name} is {value!r}; expected {expected}.")
        if not do_sample or temperature == 0:
            return _GREEDY
        return SamplingSettings(float(temperature), top_k or NO_TOP_K, float(top_p))

    def _add(self, requests: list[ManagedRequest]) -> str:
        """Let `requests`, the sequences of one, wait for rows; returns the id."""
        with self._changed:
            if self._is_full and not _is_in_event_loop():
                self._changed.wait_for(lambda: not self._is_full or self._is_stopping, SECONDS_TO_WAIT)
            if self._is_stopping and self._thread is not None:
                about = "is stopping" if self._fatal_error is None else "has ended by an error"
                raise RuntimeError(f"The manager {about} and takes no more requests.") from self._fatal_error
            if self._is_full:
                raise queue.Full(self._about_full_queue())
            taken = [one.request_id for one in requests if one.request_id in self._active]
            if taken:
                raise ValueError(f"The request {taken[0]} is not over; expected another request_id.")
            for one in requests:
                self._active[one.request_id] = one
                if one.error is not None:
                    self._end(one, one.error)
                else:
                    self._arrived.append(one)
            self._changed.notify_all()
        return requests[-1].request_id

    @property
    def _is_full(self) -> bool:
        most = self.continuous_batching_config.max_queue_size
        return most > 0 and sum(not one.has_started for one in self._active.values()) >= most

    def _about_full_queue(self) -> str:
        most = self.continuous_batching_config.max_queue_size
        return f"{most} requests wait, as many as may (max_queue_size); try again later."

    def _end(self, request: ManagedRequest, error: str) -> None:
        """End a request that no run has got."""
        request.error, request.lifespan = error, (request.lifespan[0], time.perf_counter())
        self._on_finished(request)

    def _withdraw(self, request: ManagedRequest, error: str) -> None:
        if request in self._arrived:
            self._arrived.remove(request)
            self._end(request, error)
        else:
            self._withdrawn.append((request, error))

    def _on_finished(self, request: RowRequest) -> None:
        with self._changed:
            if isinstance(request, ManagedRequest):  # not of `warmup`
                self._active.pop(request.request_id, None)
                self._deliver([request.result()])

    def _on_tokens(self, requests: list[RowRequest]) -> None:
        results = [one.result() for one in requests if isinstance(one, ManagedRequest) and one.streaming]
        if results:
            with self._changed:
                self._deliver(results)

    def _deliver(self, results: list[GenerationOutput]) -> None:
        """Hand results to their handlers, all of an event loop at once, and keep the others; `_changed` is held."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Callable, GenerationOutput]]] = {}
        for one in results:
            callback, loop = self._handlers.get(one.request_id, (None, None))
            if callback is None:
                self._results.append(one)
                continue
            by_loop.setdefault(loop, []).append((callback, one))
            if one.is_finished():
                del self._handlers[one.request_id]
        for loop, calls in by_loop.items():
            try:
                loop.call_soon_threadsafe(_call_all, calls)
            except RuntimeError:
                logger.warning("%d results were dropped, since their event loop is closed.", len(calls))
        self._changed.notify_all()

    # The thread.

    def _work(self) -> None:
        try:
            while self._wait_for_requests():
                try:
                    self._generate(self)
                finally:
                    with self._changed:
                        self._runs_rounds = False
                        self._changed.notify_all()
        except BaseException as error:
            logger.exception("The manager's thread ends by an error.")
            with self._changed:
                self.background_thread_status.request_stop(BackgroundThreadStatus.HARD_STOP, 0)
                self.background_thread_status.record_fatal_error(error)
                self._fail_all(f"{type(error).__name__}: {first_line(error)}")
        finally:
            with self._changed:
                self.background_thread_status.mark_as_stopped()
                self._changed.notify_all()

    def _wait_for_requests(self) -> bool:
        """Wait until a run is due; False if the manager is to stop."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pauses and (self._arrived or self._is_stopping))
            if self._is_hard_stop:
                self._fail_all("The manager was stopped before the request had ended.")
            self._runs_rounds = bool(self._arrived)
            return self._runs_rounds

    @property
    def _is_hard_stop(self) -> bool:
        return self.background_thread_status.local_status == BackgroundThreadStatus.HARD_STOP

    def _fail_all(self, error: str) -> None:
        with self._changed:
            self._arrived.clear()
            self._withdrawn.clear()
            for request in list(self._active.values()):
                self._end(request, error)

    def _generate(self, arrivals: Arrivals) -> None:
        """A run for the requests of `arrivals`: a call of `generate()` whose prompt is none of them."""
        config, processors = copy.deepcopy(self.generation_config), LogitsProcessorList()
        if self._samples_each:
            config.do_sample, config.temperature, config.top_k, config.top_p = True, 1.0, 0, 1.0
            processors.append(RowSampling())
        ends = sorted(self._ends(None))
        config.eos_token_id, config.num_return_sequences = ends or None, 1
        if config.pad_token_id is None:
            config.pad_token_id = (ends or [0])[0]
        # Requests have limits of their own; this one bounds the drafts of a round.
        config.max_new_tokens, config.max_length = max(config.max_new_tokens or 0, 64), None
        settings = ContinuousBatching(
            max_rows=self.continuous_batching_config.max_requests_per_batch,
            on_finished=self._on_finished,
            on_tokens=self._on_tokens,
            arrivals=arrivals,
            longest=self._longest,
            drops_processors=bool(self.continuous_batching_config.drop_unsupported_processors),
        )
        blank = torch.zeros(1, 1, dtype=torch.int64, device=self.model.device)
        with continuous_batching(settings):
            self.model.generate(
                input_ids=blank,
                attention_mask=torch.ones_like(blank),
                generation_config=config,
                assistant_model=self.drafter,
                logits_processor=processors,
            )

    def next(self, is_idle: bool) -> Arrived:
        """`Arrivals.next`; the lock of the target is let go while this waits, and when another call wants it."""
        lock, has_waited = lock_of(self.model), False
        while self._pauses or (not has_waited and (lock.is_wanted or (is_idle and not self._has_work))):
            has_waited = True
            with lock.released():
                self._wait(is_idle)
        with self._changed:
            self._changed.notify_all()  # requests that were admitted leave room for others
            arrived, withdrawn = list(self._arrived), list(self._withdrawn)
            self._arrived.clear()
            self._withdrawn.clear()
            if self._is_hard_stop:
                error = "The manager was stopped before the request had ended."
                for request in arrived:
                    self._end(request, error)
                arrived, withdrawn = [], [(one, error) for one in list(self._active.values())]
            return Arrived(arrived, withdrawn, is_open=bool(self._active), has_waited=has_waited)

    @property
    def _has_work(self) -> bool:
        return bool(self._arrived or self._withdrawn or self._is_stopping)

    def _wait(self, is_idle: bool) -> None:
        """Wait while the manager is paused and, if no round is due, a while for work."""
        with self._changed:
            self._runs_rounds = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pauses)
            if is_idle:
                self._changed.wait_for(lambda: self._has_work or self._pauses, LINGER)
                self._changed.wait_for(lambda: not self._pauses)
            self._runs_rounds = True


class _Script:
    """Requests that arrive group by group, each when the one before it has ended.

    Args:
        groups: of requests.
    """

    def __init__(self, groups: list[list[RowRequest]]):
        self._groups = deque(groups)
        self._is_first = True

    def next(self, is_idle: bool) -> Arrived:
        if not (is_idle or self._is_first):
            return Arrived()
        self._is_first = False
        return Arrived(self._groups.popleft()) if self._groups else Arrived(is_open=False)


def _longest_of(hints: Any) -> int:
    """Tokens of the longest text by the `WorkloadHints` of transformers."""
    return max((hints.max_prompt_length + hints.max_generated_length) if hints is not None else 1, 1)


def _stop_strings(strings: str | list[str] | None, tokenizer: Any) -> StoppingCriteriaList | None:
    if strings is None:
        return None
    if tokenizer is None:
        raise ValueError(f"stop_strings is {strings!r}, but tokenizer is not set; expected both.")
    return StoppingCriteriaList([StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)])


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _call_all(calls: list[tuple[Callable, GenerationOutput]]) -> None:
    for callback, result in calls:
        callback(result)
