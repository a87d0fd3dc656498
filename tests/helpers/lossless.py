"""Comparing `generate()` with a drafter to `generate()` without one."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from case_counts import cases, num_cases, tries_all
from oracle import OracleDrafter, copy_of, random_draft_model, random_eagle3, random_peagle
from targets import padded_prompts
from transformers import DynamicCache, PreTrainedModel

from hf_specdec import Drafter
from hf_specdec.host.caches import OUTPUT_NAME

MAX_NEW_TOKENS = num_cases(16, 12)
PROMPTS = {1: [9], 3: [1, 12, 5], 8: [2, 13, 7, 1, 10, 11, 3, 6]}


def continuations(inputs: dict[str, torch.Tensor], sequences: torch.Tensor) -> torch.Tensor:
    """`[B, T]` int64: the continuation of each row's prompt, long enough for any draft."""
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


def oracle(
    target: PreTrainedModel, inputs: dict[str, torch.Tensor], sequences: torch.Tensor, accuracy: float = 0.6
) -> OracleDrafter:
    """A drafter that knows the output of `target` for `inputs`: `sequences`, `[B, P + T]`."""
    lengths = inputs["attention_mask"].sum(dim=1).tolist()
    return OracleDrafter(target, continuations(inputs, sequences), lengths, accuracy)


class GreedyTexts:
    """Texts of targets without a drafter, each computed once, to compare drafters with.

    Args:
        target_of: returns the target of a name.
        max_new_tokens: of every text.
    """

    def __init__(self, target_of: Callable[[str], PreTrainedModel], max_new_tokens: int):
        self.target_of, self.max_new_tokens = target_of, max_new_tokens
        self._known: dict[tuple, torch.Tensor] = {}

    def greedy(self, target: PreTrainedModel, inputs: dict[str, torch.Tensor], *args, **options) -> torch.Tensor:
        """`greedy` with this number of new tokens."""
        return greedy(target, inputs, *args, **{"max_new_tokens": self.max_new_tokens, **options})

    def plain(self, name: str, lengths: list[int]) -> torch.Tensor:
        """`[B, P + T]`: texts of the target for random prompts of these lengths."""
        key = (name, *lengths)
        if key not in self._known:
            self._known[key] = self.greedy(self.target_of(name), padded_prompts(lengths))
        return self._known[key]

    def check(
        self,
        name: str,
        lengths: list[int],
        drafter_of: Callable[[PreTrainedModel, dict[str, torch.Tensor], torch.Tensor], Drafter],
        num_draft_tokens: int = 3,
        engine: str = "static",
        **options,
    ) -> Drafter:
        """Assert that texts are the same with a drafter, which is made of target, prompts and plain text."""
        plain, target, inputs = self.plain(name, lengths), self.target_of(name), padded_prompts(lengths)
        drafter = drafter_of(target, inputs, plain)
        found = self.greedy(target, inputs, drafter, num_draft_tokens, **options)
        assert torch.equal(found, plain), f"{name} of {lengths}: {found.tolist()} instead of {plain.tolist()}"
        assert drafter.stats.engine == engine, drafter.stats.reason
        return drafter

    def check_draft_model(self, name: str, lengths: list[int], make: Callable[[PreTrainedModel], Drafter]) -> None:
        """Assert that texts are the same with a drafter; a copy of the target has all drafts accepted."""
        drafter = self.check(name, lengths, lambda target, *_: make(target))
        if make is copy_of:
            assert drafter.stats.accepted == drafter.stats.drafted > 0

    def check_continued_cache(self, name: str) -> None:
        """Assert that texts that continue a cache of the caller are the same with a draft model."""
        target = self.target_of(name)
        drafter, first, texts = random_draft_model(target), padded_prompts([20, 12]), []
        for assistant in (None, drafter):
            cache = DynamicCache(config=target.config)
            out = self.greedy(target, first, assistant, 3, max_new_tokens=6, **{OUTPUT_NAME: cache})
            longer = torch.cat([out, padded_prompts([4, 4], seed=1)["input_ids"]], dim=1)
            mask = torch.cat([first["attention_mask"], torch.ones(2, 10, dtype=torch.int64)], dim=1)
            inputs = {"input_ids": longer, "attention_mask": mask}
            texts.append(self.greedy(target, inputs, assistant, 3, **{OUTPUT_NAME: cache}))
        assert torch.equal(*texts) and drafter.stats.engine == "static"

    def check_replayed(self, name: str, drafter: Drafter, batches: list[list[int]]) -> None:
        """Assert that texts of prompts of these lengths are the same with one drafter, in captured rounds."""
        for lengths in batches:
            found = self.greedy(self.target_of(name), padded_prompts(lengths), drafter, 3)
            assert torch.equal(found, self.plain(name, lengths))
        assert drafter.stats.execution.startswith("captured")


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

    `test_lossless.py` compares every family of drafters in this way, also with ends and limits, so random drafters take
    part with `--slow` only. Without it, a single row has a perfect drafter of the smallest K and the stock engine,
    which runs rows one by one; several rows have a perfect and a mediocre drafter of the largest K.
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
        for make in cases([eagle3_of, random_peagle, random_pard], []):
            yield make(target), some
    if tries_all or is_single:
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
        target, inputs: the model, and its prompts.
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
