"""Comparing `generate()` with a drafter to `generate()` without one."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from case_counts import cases, tries_all
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
    """`[B, P + T]`: what greedy `generate()` returns, with a drafter or without."""
    if drafter is not None:
        options |= {"assistant_model": drafter, "num_assistant_tokens": num_draft_tokens}
    return target.generate(**inputs, **{"do_sample": False, "max_new_tokens": MAX_NEW_TOKENS, **options})


random_pard = partial(random_draft_model, parallel=True)
eagle3_of = cache(random_eagle3)
_unshaped: dict[tuple, torch.Tensor] = {}


def unshaped_output(target: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """`[B, P + T]`: what plain greedy `generate()` returns without options, computed once."""
    key = (target, *(str(values.tolist()) for values in inputs.values()))
    if key not in _unshaped:
        _unshaped[key] = greedy(target, inputs)
    return _unshaped[key]


def drafters(
    target: PreTrainedModel, inputs: dict[str, torch.Tensor], answers: torch.Tensor, num_draft_tokens: tuple[int, ...]
) -> Iterator[tuple[Drafter, tuple[int, ...]]]:
    """A perfect, a mediocre and random drafters on the static engine, one on the stock engine; and K.

    Every family of drafters is compared so in `test_lossless.py`, also with ends and limits, so that the parallel ones
    take part with `--slow` only. Without it, a single row has a perfect drafter of the smallest K, several rows have a
    perfect, a mediocre and a random drafter of the largest, and both have the stock engine.
    """
    lengths = inputs["attention_mask"].sum(dim=1).tolist()
    is_single = len(lengths) == 1
    some = cases(num_draft_tokens, num_draft_tokens[-1:])
    yield (
        OracleDrafter(target, answers, lengths, accuracy=1.0),
        cases(num_draft_tokens, num_draft_tokens[:1] if is_single else some),
    )
    if tries_all or not is_single:
        yield OracleDrafter(target, answers, lengths, accuracy=0.6), some
        for make in cases([eagle3_of, random_peagle, random_pard], [eagle3_of]):
            yield make(target), some
    yield OracleDrafter(target, answers, lengths, accuracy=0.6).configure(engine="stock"), some


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
        options: makes the arguments of a call that shape the output.
        stops: makes the arguments that end it; the perfect drafter knows what would have come after the end.
        num_draft_tokens: the K to try.
    """

    unstopped = greedy(target, inputs, **given) if (given := options()) else unshaped_output(target, inputs)
    plain = greedy(target, inputs, **options(), **ends) if (ends := stops()) else unstopped
    answers = continuations(inputs, unstopped)
    for drafter, numbers in drafters(target, inputs, answers, num_draft_tokens):
        for num in numbers:
            out = greedy(target, inputs, drafter, num, **options(), **stops())
            name = f"{type(drafter).__name__} on the {drafter.stats.engine} engine, K = {num}"
            assert torch.equal(out, plain), f"{name}: {out.tolist()} instead of {plain.tolist()}"
            assert drafter.stats.num_assistant_tokens == num
    return plain
