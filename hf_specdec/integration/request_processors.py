"""The logits processors of plain `generate()` for one prompt."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from numbers import Integral, Real
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, TopHLogitsWarper

from ..config import check_type
from ..errors import first_line
from ..host.generation import logits_processors
from ..kernels.types import RowRules
from ..sampling.logits import PenaltyLogitsProcessor
from ..sampling.processors import check_processors, rules_at_once
from .validation import vocabulary_of

# Sampling settings that each request may have if `per_request_processors` is set.
SAMPLING_OPTIONS = ("do_sample", "temperature", "top_k", "top_p")

# Settings that are `RowRules`.
_RULE_OPTIONS = ("min_length", "min_new_tokens", "repetition_penalty")

# Other settings of logits processors that each request may have then: numbers, and others.
_NUMBERS = (
    *_RULE_OPTIONS,
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
    try:
        found = logits_processors(model, config, prompt, max_new_tokens, ends, processors, prefix_allowed_tokens_fn)
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


def own_processing(
    model: PreTrainedModel,
    config: GenerationConfig,
    options: dict[str, Any],
    prompt: torch.Tensor,
    max_new_tokens: int,
    ends: Collection[int],
    samples_each: bool,
    processors: LogitsProcessorList | None = None,
) -> GenerationConfig | RowRules:
    """The settings of a request whose scores are processed separately; its rules if they are processed with all rows.

    Its `options` replace settings of `config`. With `samples_each` rows have their own `SAMPLING_OPTIONS`. The
    `prompt` is on the host.
    """
    config = copy.copy(config)
    for name, value in options.items():
        if isinstance(value, Real) and not isinstance(value, bool):  # NumPy's; transformers requires Python's
            value = int(value) if isinstance(value, Integral) else float(value)
        if value is not None:
            setattr(config, name, value)
    if config.do_sample and config.temperature == 0:
        config.do_sample = False
    found = processors_of_prompt(model, config, prompt, max_new_tokens, ends, processors)
    rules = rules_at_once(found, ends, prompt[None], [0])
    is_by_rules = rules is not None and not set(options) - {*SAMPLING_OPTIONS, *_RULE_OPTIONS}
    is_by_rules &= all(type(one) is PenaltyLogitsProcessor for one in processors or ())
    # `RowSampling` runs before all other warpers; transformers runs top-h between temperature and top-k.
    if is_by_rules and not (samples_each and any(type(one) is TopHLogitsWarper for one in found)):
        return rules[0] if rules else RowRules()
    config.max_new_tokens = max_new_tokens
    return config
