"""Requests to a manager: `RequestFactory` checks and makes them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from math import inf
from numbers import Real
from typing import Any

import torch
from transformers import StoppingCriteriaList, StopStringCriteria

from ..calls.request import Request
from ..config import check_int, check_type, is_integer
from ..integration.continuous import asked_logprobs, tokens_of
from ..integration.request_processors import PROCESSOR_OPTIONS, SAMPLING_OPTIONS
from ..integration.validation import check_tokens
from ..kernels.types import NO_TOP_K, SamplingSettings
from ..modules.adapters import check_adapters
from ..modules.patch import on_host
from ..ops import row_seeds
from ..patching.support import num_positions, stated_positions
from .manager_call import ManagedCall

# Options of a request that are not settings of a generation config.
_OWN_OPTIONS = ("seed", "stop_strings", "tokenizer", "logits_processor", "adapter_name", "return_logprobs")

# Most sets of stop strings that are kept for later requests.
MOST_STOP_STRINGS = 32

# For greedy rows beside sampled rows. At this temperature drafts are nearly always the most likely tokens.
GREEDY = SamplingSettings(1e-4, 0, 1.0)


class StopStrings(StopStringCriteria):
    """`StopStringCriteria` that reads a text only if its last token may end a stop string, which most tokens cannot.

    It is called with one text, `[1, n]` int64 on the host.
    """

    def __init__(self, tokenizer: Any, strings: list[str]):
        super().__init__(tokenizer, strings)
        # By token: valid positions in the strings, valid lengths of a string's end in the token, and its length.
        first, count = self.max_valid_positions * self.num_stop_strings, self.num_stop_strings
        ends = self.embedding_vec[:, first : first + self.max_valid_end_lens * count]
        self._may_end = ((ends > 0).any(dim=1) | bool((self.target_lens == 0).any())).tolist()
        self._no = torch.zeros(1, dtype=torch.bool)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if not self._may_end[min(int(input_ids[0, -1]), len(self._may_end) - 1)]:
            return self._no
        return super().__call__(input_ids, scores, **kwargs)


class RequestFactory:
    """Makes requests of `call`, whose settings have the defaults of `seed` and `return_logprobs`; several threads may
    use it at once. A new request does not get an id that is in use."""

    def __init__(self, call: ManagedCall):
        self._call, self._model, self._config = call, call.model, call.config
        self.num_positions = num_positions(call.model)
        self._seeds, seed = torch.Generator(), call.settings.seed
        with on_host():
            self._seeds.manual_seed(int(torch.randint(0, 2**63 - 1, (1,))) if seed is None else seed)
        self._names = map("req_{}".format, itertools.count())
        # Stopping criteria by tokenizer and stop strings, because making them reads the whole vocabulary.
        self._criteria = functools.lru_cache(MOST_STOP_STRINGS)(
            lambda tokenizer, strings: StoppingCriteriaList([StopStrings(tokenizer, list(strings))])
        )

    def make(
        self,
        input_ids: Sequence[int] | torch.Tensor,
        request_id: str | None,
        max_new_tokens: int | None,
        streaming: bool,
        record_timestamps: bool,
        eos_token_id: int | list[int] | None,
        options: dict[str, Any],
        name: str = "input_ids",
    ) -> list[Request]:
        """The requests of all sequences of a prompt; the last has its id. `error` is set if they cannot run."""
        prompt = tokens_of(input_ids, name)
        check_tokens(self._model, prompt[None], None)
        options = dict(options)
        seed, stop_strings, tokenizer, processors, adapter, logprobs = (
            options.pop(name, None) for name in _OWN_OPTIONS
        )
        if stop_strings is None:
            stop_strings = self._config.stop_strings
        self._check_options(options, processors)
        check_adapters(self._model, None if adapter is None else [adapter])
        limit = self._limit(max_new_tokens, len(prompt))
        count = check_int("num_return_sequences", self._config.num_return_sequences or 1, 1)
        seeds, prompt_ids, ends = self._seeds_of(seed, count), prompt.tolist(), self._call.end_tokens(eos_token_id)
        sampling = self._sampling(options)
        own = self._call.own_processing(options, prompt, limit, ends, processors)
        logprobs = asked_logprobs(self._call.settings.return_logprobs if logprobs is None else logprobs)
        if request_id is None:
            queue = self._call.requests
            request_id = next(one for one in self._names if one not in queue.active and not queue.has_result(one))
        requests = [
            Request(
                index=0,
                prompt=prompt,
                remaining=limit,
                ends=ends,
                seed=seeds[number],
                sampling=sampling,
                user_processors=processors,
                processors=own,
                criteria=self._stop_strings(stop_strings, tokenizer),
                records_timestamps=record_timestamps,
                request_id=request_id if number == count - 1 else f"{request_id}__child#{number}",
                prompt_id=request_id,
                prompt_ids=prompt_ids,
                streaming=streaming,
                adapter=adapter,
                return_logprobs=logprobs,
            )
            for number in range(count)
        ]
        for one in requests if self.num_positions is not None else ():
            one.limit_to(self.num_positions, type(self._model).__name__)
        return requests

    def _stop_strings(self, strings: str | list[str] | None, tokenizer: Any) -> StoppingCriteriaList | None:
        check_type("stop_strings", strings, str | list[str] | None)
        found = [strings] if isinstance(strings, str) else strings
        if not found:
            return None
        if tokenizer is None:
            raise ValueError(f"stop_strings is {strings!r}, but the request has no tokenizer; expected both.")
        return self._criteria(tokenizer, tuple(found))

    def _limit(self, max_new_tokens: int | None, length: int) -> int:
        """Limit of a request's new tokens: `max_new_tokens`, the generation config's, or all that have positions."""
        asked = self._config.max_new_tokens if max_new_tokens is None else max_new_tokens
        if asked is None:
            positions = stated_positions(self._model)
            if positions is None:
                raise ValueError(
                    f"max_new_tokens is not set, and {type(self._model).__name__} states no number of positions; "
                    "expected max_new_tokens of the request, or of the generation config."
                )
            return max(positions + 1 - length, 1)
        return check_int("max_new_tokens", asked, 1)

    def _seeds_of(self, seed: int | None, count: int) -> list[int]:
        if seed is None:
            with self._call.requests.changed:
                return torch.randint(0, 2**63 - 1, (count,), generator=self._seeds).tolist()
        if not is_integer(seed) or not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed is {seed!r}; expected an integer of 64 bits.")
        seed = int(seed)
        return [seed] if count == 1 else row_seeds(torch.tensor([seed]), count).tolist()

    def _check_options(self, options: dict[str, Any], processors: Any) -> None:
        """Raise `ValueError` if a request cannot have its own `options`, which are those without `_OWN_OPTIONS`."""
        unknown = sorted(set(options) - set(SAMPLING_OPTIONS) - set(PROCESSOR_OPTIONS))
        if unknown:
            raise ValueError(
                f"{', '.join(unknown)} cannot be set for a request; expected some of seed, stop_strings, adapter_name, "
                f"return_logprobs, {', '.join(SAMPLING_OPTIONS + PROCESSOR_OPTIONS)}, logits_processor, or a "
                "setting of the manager's generation config."
            )
        if processors is not None and not isinstance(processors, list):
            raise ValueError(f"logits_processor is a {type(processors).__name__}; expected a LogitsProcessorList.")
        asked = sorted(options) + ["logits_processor"] * (processors is not None)
        if asked and not self._call.samples_each:
            raise ValueError(
                f"{', '.join(asked)} was set for a request, but the manager samples all requests alike; expected "
                "ContinuousBatchingConfig(per_request_processors=True), or no such setting."
            )

    def _sampling(self, options: dict[str, Any]) -> SamplingSettings | None:
        if not self._call.samples_each:
            return None
        do_sample, temperature, top_k, top_p = (
            getattr(self._config, name) if options.get(name) is None else options[name] for name in SAMPLING_OPTIONS
        )
        check_int("top_k", top_k, 0)
        for name, value, is_right, expected in (
            ("temperature", temperature, lambda one: 0 <= one < inf, "a number of at least 0"),
            ("top_p", top_p, lambda one: 0 < one <= 1, "a number above 0 and up to 1"),
        ):
            if not isinstance(value, Real) or not is_right(value):
                raise ValueError(f"{name} is {value!r}; expected {expected}.")
        if not do_sample or temperature == 0:
            return GREEDY
        return SamplingSettings(float(temperature), min(int(top_k), NO_TOP_K) or NO_TOP_K, float(top_p))


def check_request_id(request_id: Any) -> None:
    """Raise `ValueError` unless `request_id` is hashable."""
    try:
        hash(request_id)
    except TypeError as error:
        raise ValueError(f"request_id is {request_id!r:.80}; expected a str, or None for a new one.") from error
