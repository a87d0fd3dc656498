"""Logits processors over the blocks of draft tokens that a round verifies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from .. import ops
from ..host.generation import allowed_tokens_of, rows_of_prompt
from ..kernels.types import RowRules, SamplingSettings
from ..modules.patch import user_code
from ..state import DecodeState
from .logits import MaskTokenLogitsProcessor, RowSampling, RowTemperature
from .text_rules import AT_ONCE, LENGTH_RULES, TEXT_RULES, apply_rule, rules_of_rows

# Processors that do not read `input_ids`, so that all K + 1 positions of a block can be processed as independent rows.
# Exact types are compared, since a subclass may read them.
POINTWISE_PROCESSORS = frozenset(
    {
        EpsilonLogitsWarper,
        EtaLogitsWarper,
        InfNanRemoveLogitsProcessor,
        LogitNormalization,
        MaskTokenLogitsProcessor,
        MinPLogitsWarper,
        RowSampling,
        RowTemperature,
        SuppressTokensLogitsProcessor,
        TemperatureLogitsWarper,
        TopHLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        TypicalLogitsWarper,
    }
)

# Processors whose settings are read from the state.
IN_STATE = TEXT_RULES | {RowTemperature}

# Processors that keep state between calls, which calls for rejected drafts would corrupt.
STATEFUL_PROCESSORS = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)


# Packages whose processors are known not to mix rows.
_OWN_PACKAGES = frozenset({"transformers", __name__.partition(".")[0]})


def readers_of(processors: Iterable[LogitsProcessor]) -> list[LogitsProcessor]:
    """Those of `processors` that may read the text."""
    return [one for one in processors if type(one) not in POINTWISE_PROCESSORS]


def rules_at_once(
    processors: LogitsProcessorList,
    ends: Collection[int],
    prompts: Sequence[torch.Tensor] = (),
    padding: Sequence[int] = (),
) -> list[RowRules] | None:
    """`rules_of_rows`; None also if another processor may read the text."""
    is_by_rules = all(type(one) in AT_ONCE for one in readers_of(processors))
    return rules_of_rows(processors, ends, prompts, padding) if is_by_rules else None


def are_of_all_rows(processors: LogitsProcessorList, ends: Collection[int]) -> bool:
    """Whether all positions of a block are processed at once, for any rows without padding that `ends` end."""
    return rules_at_once(processors, ends) is not None


def check_processors(processors: LogitsProcessorList) -> None:
    """Raise `ValueError` if a processor is one of `STATEFUL_PROCESSORS`."""
    for processor in processors:
        if isinstance(processor, STATEFUL_PROCESSORS):
            raise ValueError(
                f"{type(processor).__name__} keeps state from one token to the next and cannot process draft tokens; "
                "expected processors that are functions of their arguments. Generate without a drafter, or "
                "without the option that adds it."
            )


def check_rows_are_apart(processors: LogitsProcessorList, input_ids: torch.Tensor, vocabulary: int) -> None:
    """Check that the scores which the caller's processors give a row do not depend on other rows.

    Rows of a batch have different lengths while drafts are verified, so a processor cannot get all of them as in plain
    `generate()`. Each processor is tried on the prompts `[B, P]` int64 with random scores: the first and the last row
    are processed twice, beside the other rows, and beside rows with their own text and other scores.

    Raises:
        ValueError: a processor mixes rows, or returns different scores for the same arguments.
    """
    generator, batch = None, len(input_ids)
    for processor in processors:
        if type(processor).__module__.partition(".")[0] in _OWN_PACKAGES or batch == 1:
            continue
        generator = generator or torch.Generator(input_ids.device).manual_seed(0)
        scores = torch.randn(2, batch, vocabulary, generator=generator, device=input_ids.device)
        for row in (0, batch - 1):
            others = scores[1].clone()
            others[row] = scores[0, row]
            texts = input_ids[row].repeat(batch, 1)
            try:
                with user_code():
                    beside = processor(input_ids.clone(), scores[0].clone())[row]
                    apart = processor(texts, others)[row]
            except Exception:  # it may reject a text that the row does not have, e.g. one outside of its grammar
                continue
            if not torch.allclose(beside, apart, rtol=1e-4, atol=1e-5, equal_nan=True):
                raise ValueError(
                    f"{type(processor).__name__} gives row {row} of the batch scores that depend on other rows, which "
                    "are at other lengths while drafts are verified; expected a function of each row's own text and "
                    "scores. Generate row by row, or without assistant_model."
                )


def row_temperatures(processors: LogitsProcessorList, batch: int) -> torch.Tensor | None:
    """`[batch]` float32: the temperatures of the `RowTemperature` among `processors`; None if there is none. Raises
    `ValueError` if there is more than one, or if it does not have one temperature for each of `batch` rows."""
    found = [one for one in processors if isinstance(one, RowTemperature)]
    if len(found) > 1:
        raise ValueError(
            f"The call has {len(found)} RowTemperature processors; expected one, with the products of "
            "their temperatures."
        )
    return found[0].check_rows(batch) if found else None


def processors_of_row(processors: LogitsProcessorList, row: int, batch: int) -> LogitsProcessorList:
    """`processors` of a call with `batch` rows, for row `row` alone: for `input_ids` `[1, n]` and scores `[1, V]`.
    Processors that read the text may store something for each row, so they are called with a whole batch of copies of
    this row, and the other results are ignored. Raises what `row_temperatures` does."""

    def of_row(processor: LogitsProcessor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        if type(processor) is RowTemperature:
            return RowTemperature(processor.check_rows(batch)[row : row + 1])
        if type(processor) in POINTWISE_PROCESSORS:
            return processor
        if type(processor) is PrefixConstrainedLogitsProcessor:
            # The constraint may depend on the row, and fail on the texts of others.
            allowed_tokens, prompt = allowed_tokens_of(processor), row // rows_of_prompt(processor)
            return PrefixConstrainedLogitsProcessor(lambda _, tokens: allowed_tokens(prompt, tokens), num_beams=1)
        return lambda ids, scores: processor(ids.repeat(batch, 1), scores.repeat(batch, 1))[row : row + 1]

    return LogitsProcessorList(map(of_row, processors))


def _filters_in_state(
    processors: LogitsProcessorList, temperature: float | None
) -> tuple[LogitsProcessorList, SamplingSettings | None]:
    """`processors` with a `RowSampling` in place of `temperature`, top-k and top-p, where these follow one another; and
    the settings of rows besides the temperature, by which drafts are drawn in any case. None if there are none."""
    kinds = [type(one) for one in processors]
    first = next((place for place, kind in enumerate(kinds) if kind in (TopKLogitsWarper, TopPLogitsWarper)), None)
    if first is None or RowSampling in kinds:
        return processors, None
    last = first + (2 if kinds[first : first + 2] == [TopKLogitsWarper, TopPLogitsWarper] else 1)
    settings = {"filter_value": float("-inf"), "min_tokens_to_keep": 1}
    found = SamplingSettings()
    for one in processors[first:last]:
        if any(getattr(one, name, value) != value for name, value in settings.items()):
            return processors, None
        name = "top_k" if type(one) is TopKLogitsWarper else "top_p"
        found = found._replace(**{name: getattr(one, name)})
    if first and kinds[first - 1] is TemperatureLogitsWarper and processors[first - 1].temperature == temperature:
        first -= 1
    elif temperature not in (None, 1.0):
        return processors, found
    return LogitsProcessorList([*processors[:first], RowSampling(), *processors[last:]]), found


class BlockProcessor:
    """Applies `generate()`'s logits processors to every position of a round's block.

    A processor gets the `input_ids` that it would get in `generate()` without a drafter: the whole batch, prompts with
    their padding, and at each position the tokens before it, drafts included. It must be a function of its arguments. A
    row's positions are processed as far as `generate()` could get: not past the length limit, nor after a draft that
    the processors rule out or that ends the row. Since rows have different lengths, a call covers the rows that have a
    position at its length; the other rows of `input_ids` are cut or padded to that length, and their scores are
    ignored. `prefix_allowed_tokens_fn` is not called for them.

    If no processor reads `input_ids`, apart from those in `AT_ONCE` for which `RowRules` are enough, all positions are
    processed at once. Temperatures, including those of `RowTemperature`, top-k, top-p and `RowRules` are then read from
    the state, so that one captured round serves any of them.

    Args:
        processors: as prepared by `generate()`.
        prompts: `[B, P]` int64, left-padded; None for rows that come and go, whose `processors` must process all
            positions at once.
        padding: padding tokens of each row; -n if the first n tokens of the row are not in `prompts`, so that
            processors do not get them.
        temperature: of the call, also in `DecodeState.temperature`; None for greedy decoding.
        ends: tokens that end all rows of `prompts`.

    Attributes:
        reads_text: whether a processor may read the text.
        row_rules: what belongs into the state, for each row of `prompts`; empty if there is nothing.
        row_sampling: what belongs into the state, for every row; None if there is nothing.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        prompts: torch.Tensor | None = None,
        padding: Sequence[int] = (),
        temperature: float | None = None,
        ends: Collection[int] = (),
    ):
        rules = [] if prompts is None else rules_at_once(processors, ends, prompts, padding)
        self.reads_text, self._is_at_once, self.row_rules = bool(readers_of(processors)), rules is not None, rules or []
        if self._is_at_once:  # minimum lengths, which follow one another, are one: `row_min_lengths`
            pairs = itertools.pairwise([None, *processors])
            processors = [one for before, one in pairs if not {type(one), type(before)} <= LENGTH_RULES]
        in_state, self.row_sampling = _filters_in_state(processors, temperature)
        if self._is_at_once:
            processors = in_state
        self._processors = LogitsProcessorList(map(self._for_current_rows, processors))
        self._current_rows: set[int] = set()
        self._texts_of: dict[int, tuple[torch.Tensor, int | None, str]] = {}
        self._prompts = prompts
        self._padding = padding
        # Decided once: a compiled round that compared temperatures would be recompiled for each of them. The caller may
        # also pass a `TemperatureLogitsWarper` with another temperature in `logits_processor`.
        self._are_in_state = [
            type(one) in IN_STATE or (type(one) is TemperatureLogitsWarper and one.temperature == temperature)
            for one in processors
        ]

    @property
    def shared(self) -> BlockProcessor:
        """What a captured round applies: this one, see `RowsProcessor`."""
        return self

    @property
    def key(self) -> tuple | None:
        """What the processing depends on besides the state, hashable; None if the host takes part in it."""
        if not self._is_at_once:
            return None
        return (
            self.row_sampling is None,
            *(
                (type(one), *(() if is_in_state else ((n, self._frozen(v)) for n, v in vars(one).items())))
                for one, is_in_state in zip(self._processors, self._are_in_state, strict=True)
            ),
        )

    def _frozen(self, value: Any) -> str:
        """`value` as text. A tensor is read once, and again after it was written: it may be on a GPU that computes."""
        if not isinstance(value, torch.Tensor):
            return str(value)
        version = None if value.is_inference() else value._version
        known, when, text = self._texts_of.get(id(value), (None, None, ""))
        if known is not value or when != version:
            text = str(value.tolist())
            self._texts_of[id(value)] = value, version, text
        return text

    def __call__(self, logits: torch.Tensor, block: torch.Tensor, state: DecodeState) -> torch.Tensor:
        """Process the logits `[B, K + 1, V]` of a block `[B, K + 1]` int64 (the last committed token and the drafts).
        Returns float32 scores, or `logits` themselves if there are no processors."""
        if not self._processors:
            return logits
        if self._is_at_once:
            tokens, shape, scores = block.reshape(-1, 1), logits.shape, logits
            if type(self._processors[0]) is not RowSampling:
                scores = logits.to(torch.float32, copy=True)
            for processor, is_in_state in zip(self._processors, self._are_in_state, strict=True):
                if type(processor) is RowTemperature:
                    scores = scores / state.row_temperatures[:, None, None]
                elif type(processor) is RowSampling:
                    temperatures = state.row_temperatures
                    if self.row_sampling is not None:
                        temperatures = state.temperature.expand(len(block))
                    scores = ops.apply_top_k_top_p(scores, temperatures, state.row_top_k, state.row_tail)
                elif type(processor) in AT_ONCE:
                    apply_rule(processor, scores, block, state)
                elif is_in_state:
                    scores = ops.divide(scores, state.temperature)
                else:
                    scores = processor(tokens, scores.flatten(0, 1)).view(shape)
            return scores
        return self._one_length_at_a_time(logits.to(torch.float32, copy=True), block, state)

    def _for_current_rows(self, processor: LogitsProcessor) -> LogitsProcessor:
        # A constraint may fail on texts outside of its grammar, such as rows cut or padded to a call's length.
        if type(processor) is not PrefixConstrainedLogitsProcessor:
            return processor
        allowed_tokens, count = allowed_tokens_of(processor), rows_of_prompt(processor)

        def allowed(row: int, tokens: torch.Tensor) -> list[int]:
            return allowed_tokens(row // count, tokens) if row in self._current_rows else [0]

        return PrefixConstrainedLogitsProcessor(allowed, num_beams=1)

    def _one_length_at_a_time(self, scores: torch.Tensor, block: torch.Tensor, state: DecodeState) -> torch.Tensor:
        # Rows have different lengths, but a processor takes a rectangular `input_ids`. So there is one call for each
        # length, and every row uses the calls at the lengths of its own positions. Lengths are read on the host, so
        # this path is not part of a captured round.
        width = block.shape[1]
        texts, lengths = self._texts(block, state)
        for length in range(min(lengths.values(), default=0), max(lengths.values(), default=-width) + width):
            steps = {row: length - first for row, first in lengths.items() if 0 <= length - first < width}
            if not steps:
                continue
            self._current_rows = set(steps)
            rows = torch.tensor(list(steps), device=scores.device)
            at = torch.tensor(list(steps.values()), device=scores.device)
            batch_scores = scores[:, 0].clone()
            batch_scores[rows] = scores[rows, at]
            for processor in self._processors:
                with nullcontext() if type(processor) in POINTWISE_PROCESSORS else user_code():
                    batch_scores = LogitsProcessorList([processor])(texts[:, :length], batch_scores)
            scores[rows, at] = batch_scores[rows].to(scores.dtype)

            draft = block[rows, (at + 1).clamp(max=width - 1)]
            is_ruled_out = scores[rows, at, draft].isneginf()
            if not state.is_sampling:  # greedy decoding chooses a token even if all are ruled out
                is_ruled_out &= scores[rows, at].argmax(dim=1) != draft
            is_over = (draft[:, None] == state.eos[rows]).any(dim=1) | is_ruled_out
            padding = torch.tensor([self._padding[row] for row in steps], device=scores.device)
            is_over |= padding + state.limits[rows] <= length + 1
            for row in rows[is_over].tolist():
                del lengths[row]
        return scores

    def _texts(self, block: torch.Tensor, state: DecodeState) -> tuple[torch.Tensor, dict[int, int]]:
        """The texts: prompt, committed tokens and drafts; and the length of each unfinished row without its drafts."""
        batch, width = block.shape
        texts = self._prompts.new_zeros(batch, self._prompts.shape[1] + state.slots + width)
        lengths = {}
        finished = state.finished.tolist()
        for row, (length, pad) in enumerate(zip(state.lengths.tolist(), self._padding, strict=True)):
            begin, hidden = max(pad, 0), max(-pad, 0)
            texts[row, :begin] = self._prompts[row, :begin]
            texts[row, begin : pad + length] = state.tokens[row, hidden:length]
            texts[row, pad + length : pad + length + width - 1] = block[row, 1:]
            if not finished[row]:
                lengths[row] = pad + length
        return texts, lengths
