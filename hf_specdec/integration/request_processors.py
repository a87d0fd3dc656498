"""The logits processors of plain `generate()` for one prompt."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from numbers import Integral, Real
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from ..config import check_type
from ..errors import first_line
from ..host.generation import ENDS, make_logits_processors
from ..sampling.processors import check_processors
from .validation import vocabulary_of

# Sampling settings that each request may have if `per_request_processors` is set.
SAMPLING_OPTIONS = ("do_sample", "temperature", "top_k", "top_p")

# Settings that are `RowRules`.
RULE_OPTIONS = ("min_length", "min_new_tokens", "repetition_penalty")

# Other settings of logits processors that each request may have then: numbers, and others.
_NUMBERS = (
    *RULE_OPTIONS,
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "min_p",
    "no_repeat_ngram_size",
    "top_h",
    "typical_p",
)
PROCESSOR_OPTIONS = (
    *_NUMBERS,
    "bad_words_ids",
    "begin_suppress_tokens",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "remove_invalid_values",
    "renormalize_logits",
    "sequence_bias",
    "suppress_tokens",
    "watermarking_config",
)


def processors_of_prompt(
    model: PreTrainedModel,
    config: GenerationConfig,
    prompt: torch.Tensor,
    max_new_tokens: int,
    ends: Collection[int],
    processors: LogitsProcessorList | None = None,
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None,
) -> LogitsProcessorList:
    """The processors of `generate()` for a `prompt` `[length]` int64, in its order, on its device.

    Raises `ValueError` if a setting is wrong (including tokens without a score, which would fail in a round), or if a
    processor keeps state from one token to the next.
    """
    for name in ("temperature", "top_k", "top_p", *_NUMBERS):
        check_type(name, getattr(config, name, None), Real | None)
    own = copy.copy(config)
    own.max_length, own.num_return_sequences = len(prompt) + max_new_tokens, 1
    vars(own)[ENDS] = torch.tensor(sorted(ends), device=prompt.device) if ends else None
    try:
        found = make_logits_processors(
            model,
            generation_config=own,
            input_ids_seq_length=len(prompt),
            encoder_input_ids=prompt[None],
            prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
            logits_processor=processors,
            device=prompt.device,
        )
    except (TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(
            f"transformers makes no logits processors of the settings ({first_line(error)}); expected settings of the "
            "types that it documents, and end-of-sequence tokens where one of them is about these."
        ) from error
    check_processors(found)
    _check_scored_tokens(config, ends, vocabulary_of(model))
    return found


def _check_scored_tokens(config: GenerationConfig, ends: Collection[int], vocabulary: int) -> None:
    """Raise `ValueError` if a setting of `config` changes the score of a token outside of the `vocabulary`."""
    names = ("bad_words_ids", "forced_bos_token_id", "forced_eos_token_id", "sequence_bias")
    settings = {name: getattr(config, name) for name in names}
    if config.exponential_decay_length_penalty is not None:
        settings["eos_token_id"] = list(ends)
    if isinstance(config.sequence_bias, list):
        settings["sequence_bias"] = [tokens for tokens, _ in config.sequence_bias]
    for name, value in settings.items():
        highest = max(_integers_in(value), default=0)
        if highest >= vocabulary:
            raise ValueError(f"{name} has the token {highest}; expected tokens from 0 to {vocabulary - 1}.")


def _integers_in(value: Any) -> Iterator[int]:
    if isinstance(value, Integral):
        yield int(value)
    elif isinstance(value, Iterable):
        for one in value:
            yield from _integers_in(one)
