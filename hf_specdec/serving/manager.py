"""`model.init_continuous_batching(..., assistant_model=drafter)`: the manager that users call.

`manager_requests.py` checks and makes requests, `manager_queue.py` holds them and delivers their results, and
`manager_thread.py` runs rounds by the calls of `manager_call.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from ..drafters.attachment import Attachment
from ..drafters.base import Drafter
from ..host.generation import GenerationOutput
from ..integration.continuous import settings_of
from ..modules.patch import on_host
from ..parallel.tensor_parallel import tensor_parallel_group
from .manager_call import ManagedCall
from .manager_queue import RequestQueue
from .manager_ranks import SplitRoundThread
from .manager_requests import RequestFactory, check_request_id
from .manager_thread import RoundThread

logger = logging.getLogger(__name__)


class SpeculativeBatchingManager:
    """Continuous batching with a drafter, for requests that arrive at any time.

    It has the methods of transformers' `ContinuousBatchingManager`. `init_continuous_batching` and
    `continuous_batching_context_manager` of a model make one if they are given a drafter. Its thread runs rounds while
    there are requests, and requests are admitted to free rows between rounds. Other calls of `generate()` with a
    drafter for the same model also run between rounds.

    A target that is split over processes (tensor parallel) has a manager on each process, and all run the same rounds.
    Requests are added and cancelled on the first process, as in transformers; on other processes these calls do
    nothing. Every process has all results. Every process must make, start, pause and stop its manager, and other calls
    with a drafter need `pause()`.

    Args:
        generation_config: settings of all requests; the model's own if None.
        continuous_batching_config: `max_requests_per_batch` is the most rows of a round, `max_queue_size` the most
            waiting requests (0 for no limit), `seed` the seed for requests without their own. With
            `per_request_processors` requests may have their own settings of logits processors. Without
            `allow_block_sharing` there is no prefix cache. Other settings are for transformers' own engine.
        workload_hints: `max_prompt_length` and `max_generated_length` size the first buffers; longer requests open
            larger ones.
        attachment: the attachment whose drafter this is, if the caller named none.
        tree: see `Drafter.configure`; the drafter's if None. Drafts are chains while a request has processors that
            read its text.
        kwargs: settings of `generate()`, such as `num_assistant_tokens`.

    Attributes:
        background_thread_status: its `fatal_error` is the error that ended the thread, or None.
        num_positions: positions that the target has embeddings of; None for any number.

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
        attachment: Attachment | None = None,
        tree: int | str | None = None,
        **kwargs: Any,
    ):
        self.model, self.drafter, hints = model, drafter, workload_hints
        given = generation_config, continuous_batching_config, hints
        config, settings = settings_of("a manager", model, kwargs, *given)
        self.generation_config, self.continuous_batching_config = config, settings
        self._queue = RequestQueue(settings)
        longest = 1 if hints is None else max(hints.max_prompt_length + hints.max_generated_length, 1)
        self._call = ManagedCall(model, drafter, config, settings, longest, self._queue, attachment, tree)
        self._factory = RequestFactory(self._call)
        self.num_positions = self._factory.num_positions
        self._rounds = (RoundThread if tensor_parallel_group(model) is None else SplitRoundThread)(self._call)
        self.background_thread_status = self._rounds.status
        self._is_warming_up = False
        self._call.check()

    # Control.

    def is_running(self) -> bool:
        """Whether the thread has been started and is alive."""
        return self._rounds.is_running

    def start(self) -> None:
        """Start the thread."""
        if not self._rounds.start():
            logger.warning("The manager has been started already.")

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Stop the thread when all requests have ended.

        Args:
            block: whether to wait for that, and then to free buffers and CUDA graphs.
            timeout: most seconds to wait; None for no limit.
            keep_for_next_session: whether to keep buffers and CUDA graphs.
            hard_stop: whether to stop after the current round; requests then fail.

        Raises:
            RuntimeError: the calling thread has paused the manager.
        """
        if self._rounds.thread is None:
            logger.warning("The manager has not been started.")
            return
        start = time.perf_counter()
        self._rounds.request_stop(hard_stop)
        if block:
            self.join(start, timeout)
            if self._rounds.thread is None and not keep_for_next_session:
                self.drafter.release()

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Wait at most `timeout` seconds for the thread to end; `stop_trigger_time` is transformers'."""
        self._rounds.join(stop_trigger_time, timeout)

    def destroy(self) -> None:
        """Stop the thread if it runs, and free buffers and CUDA graphs."""
        if self.is_running():
            self.stop()
        self.drafter.release()

    def warmup(self, block: bool = True) -> None:
        """On a GPU, capture rounds and prefills for all numbers of rows, so that no request waits for a capture.

        Args:
            block: whether to do it now. If not, the thread does it while there are no requests, one number of rows
                after the other; a request may still need a capture. A split target always does it now.
        """
        groups = self._call.warm_up_groups()
        if block or tensor_parallel_group(self.model) is not None:
            self._call.warm_up(groups)
        else:
            with self._queue.changed:
                self._rounds.warm_ups.extend(groups)
                self._queue.changed.notify_all()
        self._is_warming_up = True

    @property
    def warmed_up(self) -> bool:
        """Whether `warmup` was called and has finished."""
        return self._is_warming_up and not self._rounds.warm_ups

    def pause(self) -> AbstractContextManager[None]:
        """Context in which no round runs, so that the model can be used or changed in place. Requests stay. Raises
        `RuntimeError` if the thread does not run or ends before it pauses."""
        return self._rounds.pause()

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
        """Add a request and return its id.

        With `num_return_sequences` in the generation config, the ids of other sequences end in `__child#0` and so on.

        Args:
            input_ids: token ids of the prompt.
            request_id: the request's id; `req_0`, `req_1` and so on if None.
            max_new_tokens, eos_token_id: the generation config's if None; end-of-sequence tokens below 0 are ignored.
            streaming: whether a result with all tokens so far is delivered after every round.
            record_timestamps: whether results have a time for each token.
            options: `seed` of the random numbers; `adapter_name` of a LoRA adapter, or `"__base__"` for none (by
                default the active adapters); `stop_strings` (the generation config's if None) with a `tokenizer`;
                `return_logprobs`, as in the manager's settings; with `per_request_processors` also `do_sample`,
                `temperature` (0 for greedy decoding), `top_k`, `top_p`, other settings of a generation config for
                logits processors (`PROCESSOR_OPTIONS`), such as `repetition_penalty` and `min_new_tokens`, and
                `logits_processor`, a list of functions of the request's text `[1, n]` and scores `[1, V]`.

        Raises:
            ValueError: an argument is wrong, or an unfinished request has the id.
            RuntimeError: the manager is stopping, or has ended by an error.
            queue.Full: `max_queue_size` requests wait, and none was admitted for seconds; at once in an event loop.
        """
        check_request_id(request_id)
        try:
            with on_host():
                requests = self._factory.make(
                    input_ids, request_id, max_new_tokens, streaming, record_timestamps, eos_token_id, options
                )
            self._rounds.add(requests)
        except BaseException:
            self._queue.drop_handler(request_id)
            raise
        return requests[-1].request_id

    def add_requests(
        self,
        inputs: Sequence[Sequence[int] | torch.Tensor],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **options: Any,
    ) -> list[str]:
        """Add several requests and return their ids; see `add_request`.

        If one is wrong, none is added. If the queue is too full for one, those before it end without results.
        """
        with on_host():
            groups = [
                self._factory.make(
                    prompt, None, max_new_tokens, streaming, record_timestamps, None, options, f"inputs[{index}]"
                )
                for index, prompt in enumerate(inputs)
            ]
        names = [requests[-1].request_id for requests in groups]
        for number, requests in enumerate(groups):
            try:
                self._rounds.add(requests)
            except BaseException:
                self._queue.disown(names[:number])
                raise
        return names

    def check_room(self) -> None:
        """Raise `queue.Full` if `max_queue_size` requests wait."""
        self._queue.check_room()

    def is_active(self, request_id: str) -> bool:
        """Whether a request with this id was added and is not over."""
        return request_id in self._queue.active

    def metrics(self) -> str:
        """Counts and times of all requests so far, in Prometheus' text format."""
        with self._queue.changed:
            started = [one.has_started for one in self._queue.active.values()]
            return self._queue.metrics.text(sum(started), len(started) - sum(started))

    def cancel_request(self, request_id: str) -> None:
        """End a request; its result has an error and the tokens so far. Does nothing if the request is over.

        The id that `add_request` returned ends all sequences of the prompt.
        """
        if self._rounds.takes_requests:
            self._queue.cancel(request_id)

    # Results.

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The next result, of `request_id` if given. None after `timeout` seconds, or if none can come, because the
        thread does not run or the request is over."""

        def is_expected() -> bool:
            is_running = self.is_running() and not self._rounds.has_stopped
            return is_running and (request_id is None or self._rounds.expects(request_id))

        return self._queue.take_result(request_id, is_expected, timeout)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Results as they come, until the manager stops."""
        while (result := self.get_result()) is not None:
            yield result

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Results of a request until it ends."""
        while (result := self.get_result(request_id)) is not None:
            yield result
            if result.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """Call `callback` on the running event loop with every result of a request, including earlier ones."""
        self._queue.add_handler(request_id, callback)
