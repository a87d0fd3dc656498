"""Prompts as lists of tokens, and their texts: generated alone, and in bulk calls on a few rows."""

from collections.abc import Sequence
from functools import cache

import torch
from targets import tiny_target
from transformers import ContinuousBatchingConfig, PreTrainedModel

from hf_specdec import Drafter


@cache
def prompts_of(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 90, (length,), generator=generator).tolist() for length in lengths]


def without_padding(inputs: dict[str, torch.Tensor]) -> list[list[int]]:
    """The prompts of padded `input_ids` with their `attention_mask`."""
    rows = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    return [row[mask.bool()].tolist() for row, mask in rows]


def continued(target: PreTrainedModel, prompt: Sequence[int], new: int, ends: Sequence[int] = ()) -> list[int]:
    """The new tokens of greedy `generate()` without a drafter, at most `new`."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": list(ends) or None}
    return target.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


@cache
def alone(family: str, prompt: tuple[int, ...], new: int, ends: tuple[int, ...] = ()) -> list[int]:
    """The new tokens of the tiny target of a family for a prompt."""
    return continued(tiny_target(family), prompt, new, ends)


def all_alone(family: str, prompts: list[list[int]], new: int, ends: Sequence[int] = ()) -> list[list[int]]:
    """The new tokens of the tiny target of a family for each of `prompts`."""
    return [alone(family, tuple(one), new, tuple(ends)) for one in prompts]


def in_rows(
    target: PreTrainedModel, drafter: Drafter, prompts: list[list[int]], rows: int, **options: object
) -> list[list[int]]:
    """The texts of a bulk call on a number of rows, greedy by default; asserts that no request fails."""
    config = ContinuousBatchingConfig(max_requests_per_batch=rows)
    results = target.generate_batch(prompts, None, config, assistant_model=drafter, **{"do_sample": False, **options})
    assert [(one.is_finished(), one.error) for one in results.values()] == [(True, None)] * len(results)
    return [one.generated_tokens for one in results.values()]


def check_rows(
    target: PreTrainedModel, drafter: Drafter, prompts: list[list[int]], new: int = 12, rows: int = 2
) -> None:
    """Assert that requests that come and go on a few rows generate the same texts as alone."""
    found = in_rows(target, drafter, prompts, rows, max_new_tokens=new)
    assert found == [continued(target, one, new) for one in prompts]
