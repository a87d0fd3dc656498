"""`Call`: a call of `generate()` with a drafter, as the engines get it; and its output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

from ..drafters.base import MATCH, Drafter
from ..host.caches import GenerateDecoderOnlyOutput
from ..host.generation import BaseStreamer, pad_token
from ..parallel.tensor_parallel import from_first_rank
from ..patching.support import num_positions
from ..sampling.processors import row_temperatures
from ..sampling.randomness import Randomness
from ..stats import SpeculationStats
from .prompts import Prompts
from .request import Request
from .transcript import Transcript, end_tokens_of

# With `draft_probs="auto"` draft tokens are sampled from the drafter's distribution from this temperature up, the
# lowest that was measured to pay: SmolLM2 with its drafters, K = 5, one H200, 2 % more tokens a second at 0.3, 6 to
# 13 % at 0.7, 21 to 33 % at 1.0. At lower temperatures both ways are about as fast.
DRAFT_PROBS_TEMPERATURE = 0.3


@dataclass(frozen=True)
class Call:
    """One call of `generate()` with a drafter.

    Attributes:
        prompts: the prompts, and how much of them `cache` holds.
        processors, criteria, config, streamer: as prepared by `generate()`.
        num_draft_tokens: K, draft tokens a round; with `is_auto` the largest K, since it is chosen round by round.
        logprobs: the distributions whose log-probabilities of new tokens the user gets: `"processed"`, the one that
            tokens are drawn from; `"raw"`, the softmax of the target's logits.
        cache: the user's, which the call fills; None if the user passed none.
        reason: why this engine runs, for the statistics.
        position_offsets: for each row, position ids minus positions after the prompt; None for 0. On the static engine.
        adapters: for each row, or request, the name of its LoRA adapter, or `NO_ADAPTER`; None if all rows have the
            active adapters.
        num_nodes: N, drafts of a round that is verified as a tree of depth K, with `is_auto` the largest; 0 for chains.
        chooses_trees: whether `is_auto` also tries trees, of sizes that suit the number of rows.
        verification: see `Drafter.configure`.
        inputs: model inputs as prepared by `generate()`, if the target itself runs the prompts (see
            `calls.first_pass`); None if the static engine runs them.
        runs_once: whether no other call is like it, so that captures would cost more than they save.
    """

    model: PreTrainedModel
    drafter: Drafter
    prompts: Prompts
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    num_draft_tokens: int
    randomness: Randomness
    logprobs: tuple[str, ...] = ()
    streamer: BaseStreamer | None = None
    cache: Cache | None = None
    is_auto: bool = False
    reason: str = ""
    position_offsets: Sequence[int] | None = None
    adapters: Sequence[str] | None = None
    num_nodes: int = 0
    chooses_trees: bool = False
    verification: str = "token"
    inputs: Mapping[str, Any] | None = None
    runs_once: bool = False

    @cached_property
    def batch(self) -> int:
        """Rows: prompts times `num_return_sequences`."""
        return len(self.prompts.input_ids)

    @cached_property
    def device(self) -> torch.device:
        """The device on which the target embeds tokens."""
        return self.model.device

    @cached_property
    def max_new_tokens(self) -> int:
        return self.config.max_length - self.prompts.input_ids.shape[1]

    @cached_property
    def temperature(self) -> float | None:
        """Sampling temperature; None for greedy decoding."""
        return (self.config.temperature or 1.0) if self.config.do_sample else None

    @cached_property
    def row_temperatures(self) -> torch.Tensor | None:
        """`[B]` float32 factors on `temperature`, see `sampling.processors.row_temperatures`; None if all are 1."""
        return row_temperatures(self.processors, self.batch)

    @property
    def draft_probs(self) -> bool:
        """Whether draft tokens are sampled from the drafter's distribution, instead of its most likely tokens."""
        if self.temperature is None or self.verification == MATCH:
            return False
        if self.drafter.draft_probs == "auto":
            # The row with the highest temperature decides for the batch.
            highest = 1.0 if self.row_temperatures is None else float(self.row_temperatures.max())
            return self.temperature * highest >= DRAFT_PROBS_TEMPERATURE
        return bool(self.drafter.draft_probs)

    @cached_property
    def seeds(self) -> torch.Tensor:
        """`[B]` int64 keys of the rows' random numbers, the same on all ranks of a split target.

        When sampling, the first access takes one number from the generator of `randomness`.
        """
        return from_first_rank(self.randomness.row_seeds(self.batch, self.temperature), self.model)

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end a row; none if rows go on until all have stopped.

        They are those of the criteria, since a criterion of the user replaces the tokens of the config.
        """
        return frozenset() if self.pad_token_id is None else end_tokens_of(self.criteria)

    @cached_property
    def pad_token_id(self) -> int | None:
        """What ended rows continue with until all have ended; None if plain `generate()` lets them go on instead."""
        if pad_token(self.config) is None or not any(hasattr(rule, "eos_token_id") for rule in self.criteria):
            return None
        return int(pad_token(self.config))

    def requests(self, prompts: Sequence[torch.Tensor], seeds: torch.Tensor) -> list[Request]:
        """A request for each prompt, `[length]` int64, and seed, `[n]` int64; those that are too long get an error."""
        count, found = num_positions(self.model), []
        for index, (prompt, seed) in enumerate(zip(prompts, seeds.tolist(), strict=True)):
            own = None if self.adapters is None else self.adapters[index]
            one = Request(index, prompt, self.max_new_tokens, ends=self.ends, seed=seed, adapter=own)
            if count is not None:
                one.limit_to(count, type(self.model).__name__)
            found.append(one)
        return found

    def transcript(self, criteria: StoppingCriteriaList | None = None) -> Transcript:
        """A transcript of the call; its rows end by `criteria`, or by those of the call if None."""
        return Transcript(
            self.prompts.on_host,
            self.criteria if criteria is None else criteria,
            self.pad_token_id,
            self.max_new_tokens,
            self.streamer,
            [*(one for one in self.kept if one != "hidden_states"), *self.logprobs],
            self.prompts.input_ids.device,
        )

    @cached_property
    def kept(self) -> list[str]:
        """The names of the outputs of every step that the user gets."""
        if not self.config.return_dict_in_generate:
            return []
        return [one for one in ("scores", "logits", "hidden_states") if self.keeps(one)]

    def keeps(self, name: str) -> bool:
        """Whether the user gets the `"scores"`, `"logits"`, `"hidden_states"` or `"attentions"` of every step."""
        return bool(self.config.return_dict_in_generate and getattr(self.config, f"output_{name}"))


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with the statistics of the call.

    Plain `generate()` can continue its cache: the user's, or on the static engine one that is copied from the engine's
    buffers on first access. `attentions` are empty there, as for any attention kernel that computes no weights.

    Attributes:
        speculation: rounds, drafted and accepted tokens, the engine that ran and why; also `drafter.stats`.
        logprobs: `[B, new]` float32, of the new tokens under the distribution that they were drawn from, after all
            logits processors; 0 for the padding of rows that had ended; None unless `return_logprobs` asks for it.
        raw_logprobs: the same under the softmax of the target's logits.
    """

    speculation: SpeculationStats | None = None
    logprobs: torch.Tensor | None = None
    raw_logprobs: torch.Tensor | None = None


def no_positions(what: str, request: Request) -> str:
    """The error of a `request`, called `what`, that has used up the positions of the target."""
    return (
        f"{what} has {len(request.prompt)} tokens and has not ended after {request.remaining} new ones, but the target "
        "has no positions for more; expected a limit (max_new_tokens, max_length) that fits max_position_embeddings."
    )
