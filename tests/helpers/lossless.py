"""Comparing `generate()` with a drafter to `generate()` without one."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from oracle import OracleDrafter, random_draft_model, random_eagle3, random_peagle
from transformers import PreTrainedModel

from hf_specdec import Drafter

MAX_NEW_TOKENS = 16
PROMPTS = {1: [9], 3: [1, 12, 5], 8: [2, 13, 7, 1, 10, 11, 3, 6]}


def continuations(inputs: dict[str, torch.Tensor], sequences: torch.Tensor) -> torch.Tensor:
    """`[B, T]` int64, what each row continues its prompt with, long enough for any draft."""
    new = sequences[:, inputs["input_ids"].shape[1] :]
    return torch.nn.functional.pad(new, (0, 16), value=2)


def greedy(
    target: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    drafter: Drafter | None = None,
    num_draft_tokens: int | None = None,
    **options,
) -> torch.Tensor:
    """`[B, P + T]`: what greedy `generate()` says, with a drafter or without."""
    if drafter is not None:
        options |= {"assistant_model": drafter, "num_assistant_tokens": num_draft_tokens}
    return target.generate(**inputs, **{"do_sample": False, "max_new_tokens": MAX_NEW_TOKENS, **options})


def drafters(
    target: PreTrainedModel, inputs: dict[str, torch.Tensor], answers: torch.Tensor, num_draft_tokens: tuple[int, ...]
) -> Iterator[tuple[Drafter, tuple[int, ...]]]:
    """A perfect, a mediocre and random drafters on the static engine, one on the stock engine for a single row; and K.

    A parallel drafter is asked for the most draft tokens only, to save time.
    """
    lengths = inputs["attention_mask"].sum(dim=1).tolist()
    yield OracleDrafter(target, answers, lengths, accuracy=1.0), num_draft_tokens
    yield OracleDrafter(target, answers, lengths, accuracy=0.6), num_draft_tokens
    yield random_eagle3(target), num_draft_tokens
    yield random_peagle(target), num_draft_tokens[-1:]
    yield random_draft_model(target, parallel=True), num_draft_tokens[-1:]
    if len(lengths) == 1:
        yield OracleDrafter(target, answers, lengths, accuracy=0.6).configure(engine="stock"), num_draft_tokens


def check_greedy(
    target: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    options: Callable[[], dict[str, Any]],
    stops: Callable[[], dict[str, Any]] = dict,
    num_draft_tokens: tuple[int, ...] = (1, 4),
) -> torch.Tensor:
    """Assert that greedy decoding gives the same tokens with drafters as without, and return those `[B, P + T]`.

    Args:
        target, inputs: what generates, from what.
        options: makes the arguments of a call that shape what is said.
        stops: makes the arguments that end it; the perfect drafter knows what would have come after the end.
        num_draft_tokens: the K to try.
    """

    answers = continuations(inputs, greedy(target, inputs, **options()))
    plain = greedy(target, inputs, **options(), **stops())
    for drafter, numbers in drafters(target, inputs, answers, num_draft_tokens):
        for num in numbers:
            out = greedy(target, inputs, drafter, num, **options(), **stops())
            name = f"{type(drafter).__name__} on the {drafter.stats.engine} engine, K = {num}"
            assert torch.equal(out, plain), f"{name}: {out.tolist()} instead of {plain.tolist()}"
            assert drafter.stats.num_assistant_tokens == num
    return plain
