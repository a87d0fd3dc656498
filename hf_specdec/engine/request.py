"""A call of `generate()` with a drafter."""

from __future__ import annotations

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList

from ..drafters.base import Drafter
from ..patching.support import num_positions
from .prompts import Prompts

# Drafts are drawn from the drafter's distribution from this temperature up, unless `draft_probs` says otherwise. It is
# the lowest at which that was measured to pay: SmolLM2 with its drafters, K = 5, one H200, 2 % more tokens a second at
# 0.3, 6 to 13 % at 0.7, 21 to 33 % at 1.0. At lower temperatures the two ways hardly differ.
DRAFT_PROBS_TEMPERATURE = 0.3


def sampling_temperature(config: GenerationConfig) -> float | None:
    """The temperature that tokens are sampled at; None when decoding is greedy."""
    return (config.temperature or 1.0) if config.do_sample else None


def draws_draft_probs(drafter: Drafter, temperature: float | None, factors: torch.Tensor | None = None) -> bool:
    """Whether drafts are drawn from the drafter's distribution.

    Args:
        temperature: None when decoding is greedy.
        factors: of `row_temperatures`; the hottest row decides for the batch.
    """
    if temperature is None:
        return False
    if drafter.draft_probs == "auto":
        hottest = temperature if factors is None else temperature * float(factors.max())
        return hottest >= DRAFT_PROBS_TEMPERATURE
    return bool(drafter.draft_probs)


def padding_token(criteria: StoppingCriteriaList, config: GenerationConfig) -> int | None:
    """What rows continue with that stopped before others; None if plain `generate()` lets them go on instead."""
    if config._pad_token_tensor is None or not any(hasattr(rule, "eos_token_id") for rule in criteria):
        return None
    return int(config._pad_token_tensor)


def remaining_tokens(model: PreTrainedModel, prompts: Prompts, max_new_tokens: int) -> list[int]:
    """How many tokens each row may continue with: as many as are wanted and `model` has positions for.

    Raises:
        ValueError: a prompt has more tokens than there are positions.
    """
    count = num_positions(model)
    if count is None:
        return [max_new_tokens] * len(prompts.lengths)
    if prompts.longest > count:
        raise ValueError(
            f"A prompt has {prompts.longest} tokens, but {type(model).__name__} has {count} positions "
            "(max_position_embeddings); expected no more tokens than that."
        )
    # The last token of a text is not embedded.
    return [min(max_new_tokens, count + 1 - length) for length in prompts.lengths]
