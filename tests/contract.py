"""Comparing `generate()` with a drafter to `generate()` without one."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from oracle import OracleDrafter, random_eagle3
from transformers import PreTrainedModel

from hf_specdec import Drafter

MAX_NEW_TOKENS = 16
PROMPTS = {1: [9], 3: [1, 12, 5]}


def continuations(inputs: dict[str, torch.Tensor], sequences: torch.Tensor) -> torch.Tensor:
    """`[B, T]` int64, what each row continues its prompt with, long enough for any draft."""
    new = sequences[:, inputs["input_ids"].shape[1] :]
    return torch.nn.functional.pad(new, (0, 16), value=2)


def drafters(target: PreTrainedModel, inputs: dict[str, torch.Tensor], answers: torch.Tensor) -> Iterator[Drafter]:
    """A perfect, a mediocre and a random drafter on the static engine; one on the stock engine for a single row."""
    lengths = inputs["attention_mask"].sum(dim=1).tolist()
    yield OracleDrafter(target, answers, lengths, accuracy=1.0)
    yield OracleDrafter(target, answers, lengths, accuracy=0.6)
    yield random_eagle3(target)
    if len(lengths) == 1:
        yield OracleDrafter(target, answers, lengths, accuracy=0.6).configure(engine="stock")


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

    def generate(**arguments):
        return target.generate(**inputs, **{"do_sample": False, "max_new_tokens": MAX_NEW_TOKENS, **arguments})

    answers = continuations(inputs, generate(**options()))
    plain = generate(**options(), **stops())
    for drafter in drafters(target, inputs, answers):
        for num in num_draft_tokens:
            out = generate(**options(), **stops(), assistant_model=drafter, num_assistant_tokens=num)
            name = f"{type(drafter).__name__} on the {drafter.stats.engine} engine, K = {num}"
            assert torch.equal(out, plain), f"{name}: {out.tolist()} instead of {plain.tolist()}"
            assert drafter.stats.num_assistant_tokens == num
    return plain
