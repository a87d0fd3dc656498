"""The runs of a manager's requests, and the warm-up runs that capture CUDA graphs."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    TopHLogitsWarper,
)

from ..calls.request import Arrivals, Arrived, ContinuousBatching, Request
from ..config import is_integer
from ..device_policy import policy_of
from ..drafters.attachment import Attachment
from ..drafters.base import Drafter
from ..engine.groups import GROUP_SIZES
from ..graphs.buckets import PACKED_TOKENS, next_power_of_two, row_sizes
from ..host.generation import prepared_config
from ..integration.continuous import asked_logprobs, call_of
from ..integration.dispatch import generate_continuously
from ..integration.request_processors import RULE_OPTIONS, SAMPLING_OPTIONS, processors_of_prompt
from ..kernels.types import RowRules
from ..modules.evaluation import Evaluation
from ..modules.locks import lock_of
from ..modules.module_hooks import hooks_of
from ..modules.patch import on_host
from ..modules.signature import Fingerprint, Signature
from ..sampling.logits import PenaltyLogitsProcessor, RowSampling
from ..sampling.processors import rules_at_once
from .manager_queue import RequestQueue

# Tokens of the prompts and answers of `warm_up`: prompts are longer than a captured chunk of a prefill.
_WARMUP_PROMPT, _WARMUP_ANSWER = 161, 2

# Rounds in which some row has rules are captured apart from rounds in which none has.
_WITH_RULES = RowRules(repetition_penalty=1.1)


@dataclass
class ManagedCall:
    """A call whose requests arrive while it runs. It may be made repeatedly.

    Attributes:
        longest: number of tokens of the longest text for which the first buffers are made.
        requests: the queue that gets the requests' tokens.
        attachment, tree: see `SpeculativeBatchingManager`.
        evaluation: context of the current run: drafter, and by the attachment target, are in evaluation mode.
    """

    model: PreTrainedModel
    drafter: Drafter
    config: GenerationConfig
    settings: ContinuousBatchingConfig
    longest: int
    requests: RequestQueue
    attachment: Attachment | None = None
    tree: int | str | None = None
    evaluation: Evaluation = field(default_factory=Evaluation)

    @property
    def samples_each(self) -> bool:
        """Whether requests may have their own `SAMPLING_OPTIONS` and `PROCESSOR_OPTIONS`."""
        return bool(self.settings.per_request_processors)

    def end_tokens(self, eos_token_id: int | list[int] | None = None) -> frozenset[int]:
        """End-of-sequence tokens of a request: `eos_token_id`, or those of the call if None. Raises `ValueError` if
        they are no token ids, or too many."""
        own = self.config.eos_token_id
        asked = own if eos_token_id is None else eos_token_id
        tokens = [] if asked is None else asked if isinstance(asked, (list, tuple)) else [asked]
        if not all(is_integer(one) and one < 2**63 for one in tokens):
            raise ValueError(f"eos_token_id is {asked!r}; expected a token id or a list of them.")
        ends = frozenset(int(one) for one in tokens if one >= 0)
        most = next_power_of_two(max(8, len(own) if isinstance(own, list) else 1))
        if len(ends) > most:
            raise ValueError(f"eos_token_id has {len(ends)} tokens; expected at most {most}.")
        return ends

    def own_processing(
        self, options: dict[str, Any], prompt: torch.Tensor, limit: int, ends: Collection[int], processors: list | None
    ) -> GenerationConfig | RowRules:
        """The settings of a request whose scores are processed separately; its rules if they are processed with all
        rows. Its `options` replace settings of the call. The `prompt` is on the host; `limit` is of its new tokens."""
        config = copy.copy(self.config)
        for name, value in options.items():
            if isinstance(value, Real) and not isinstance(value, bool):  # NumPy's; transformers requires Python's
                value = int(value) if isinstance(value, Integral) else float(value)
            if value is not None:
                setattr(config, name, value)
        if config.do_sample and config.temperature == 0:
            config.do_sample = False
        found = processors_of_prompt(self.model, config, prompt, limit, ends, processors)
        rules = rules_at_once(found, ends, prompt[None], [0])
        is_by_rules = rules is not None and not set(options) - {*SAMPLING_OPTIONS, *RULE_OPTIONS}
        is_by_rules &= all(type(one) is PenaltyLogitsProcessor for one in processors or ())
        # `RowSampling` runs before all other warpers; transformers runs top-h between temperature and top-k.
        if is_by_rules and not (self.samples_each and any(type(one) is TopHLogitsWarper for one in found)):
            return rules[0] if rules else RowRules()
        config.max_new_tokens = limit
        return config

    def run(self, arrivals: Arrivals) -> None:
        """Run the requests of `arrivals`."""
        (config, _), processors = prepared_config(self.model, self.config), LogitsProcessorList()
        if self.samples_each:
            config.do_sample, config.temperature, config.top_k, config.top_p = True, 1.0, 0, 1.0
            processors.append(RowSampling())
        ends = sorted(self.end_tokens())
        config.eos_token_id, config.num_return_sequences, config.stop_strings = ends or None, 1, None
        if config.pad_token_id is None:
            config.pad_token_id = (ends or [0])[0]
        # Requests have their own limits; this limit bounds the drafts of a round.
        config.max_new_tokens = max(config.max_new_tokens or 0, 64)
        settings = ContinuousBatching(
            max_rows=self.settings.max_requests_per_batch,
            on_finished=self.requests.on_finished,
            on_tokens=self.requests.on_tokens,
            arrivals=arrivals,
            longest=self.longest,
            reuses_prefixes=self.settings.allow_block_sharing,
            processors_of=self._processors_of,
        )
        attachment, before = self.attachment, (self.drafter.stats, self.evaluation)
        with lock_of(self.model):
            self.evaluation = Evaluation(self.drafter) if attachment is None else attachment.evaluation()
            try:
                with self.evaluation:
                    with on_host():
                        prompts = [torch.zeros(1, dtype=torch.int64)]
                        options = {"tree": self.tree}
                        call, model_kwargs = call_of(self.model, self.drafter, config, prompts, processors, **options)
                    generate_continuously(call, model_kwargs, (), settings)
            finally:
                self.evaluation = before[1]
            stats = self.drafter.stats
            if attachment is not None and stats is not before[0]:
                attachment.note(stats, stats.seconds)

    def _processors_of(self, request: Request) -> LogitsProcessorList:
        prompt, config = request.prompt.to(self.model.device), request.processors
        limit = config.max_new_tokens
        return processors_of_prompt(self.model, config, prompt, limit, request.ends, request.user_processors)

    def seen(self) -> tuple:
        """A description of how target and drafter compute, which is equal later unless they were changed.

        It must be taken while the target is not patched by a run.
        """
        found = Signature(self.model, self.drafter)
        return Fingerprint.of(self.model.device, found), hooks_of(found.hooked), found.versions

    def check(self) -> None:
        """Make the call without requests."""
        self.run(_script([]))

    def warm_up_groups(self) -> list[list[Request]]:
        """Groups of requests whose runs capture rounds and prefills for all numbers of rows; empty without CUDA
        graphs."""
        policy = policy_of(self.model.device)
        if not policy.cuda_graphs:
            return []
        most = self.settings.max_requests_per_batch or policy.max_rows
        counts = {min(count, most) for count in (*row_sizes(most, is_captured=True), *GROUP_SIZES)}
        ends = self.end_tokens()
        own = self.own_processing({}, torch.zeros(1, dtype=torch.int64), _WARMUP_ANSWER, ends, None)
        every = (own, _WITH_RULES) if self.samples_each and own == RowRules() else (own,)
        return [
            [
                Request(
                    0,
                    torch.zeros(length, dtype=torch.int64),
                    _WARMUP_ANSWER,
                    ends=ends,
                    processors=one,
                    return_logprobs=asked_logprobs(self.settings.return_logprobs),
                )
                for length in lengths
            ]
            for one in every
            for count in sorted(counts)
            for lengths in self._warmup_lengths(count)
        ]

    def warm_up(self, groups: list[list[Request]]) -> None:
        """Run `groups` of `warm_up_groups` one after the other."""
        if groups:
            self.run(_script(groups))

    def _warmup_lengths(self, count: int) -> Iterator[list[int]]:
        """Lists of the lengths of `count` prompts, one list for each possible chunk of packed prompts."""
        yield [_WARMUP_PROMPT] * count
        longest = max(self.longest - _WARMUP_ANSWER, _WARMUP_PROMPT)
        for tokens in PACKED_TOKENS:
            many, rest = divmod(tokens, count)
            if count > 1 and many + 2 <= longest:
                yield [1 + many + (row < rest) for row in range(count)]


def _script(groups: list[list[Request]]) -> Arrivals:
    """Arrivals of groups of requests; a group arrives when the group before it has ended."""
    left = deque([*map(Arrived, groups), Arrived(is_open=False)])

    def arrivals(is_idle: bool, leave_target: Callable[[], None]) -> Arrived:
        is_first = len(left) > len(groups)
        return left.popleft() if is_idle or is_first else Arrived()

    return arrivals
