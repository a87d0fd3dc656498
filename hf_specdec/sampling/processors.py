"""From logits to committed tokens: greedy verification and rejection sampling."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
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

from ..ops import (
    divide,
)
from ..patching.patch import caller
from ..state import DecodeState
from .logits import MaskTokenLogitsProcessor, RowTemperature

# Processors whose result for a token does not depend on the tokens before it, so that all K + 1 positions of a block
# can be processed as independent rows. Exact types: a subclass may do something else.
POINTWISE_PROCESSORS = frozenset(
    {
        EpsilonLogitsWarper,
        EtaLogitsWarper,
        InfNanRemoveLogitsProcessor,
        LogitNormalization,
        MaskTokenLogitsProcessor,
        MinPLogitsWarper,
        RowTemperature,
        SuppressTokensLogitsProcessor,
        TemperatureLogitsWarper,
        TopHLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        TypicalLogitsWarper,
    }
)

# Processors that remember earlier calls, so they cannot be asked about drafts that may be rejected.
STATEFUL_PROCESSORS = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)


def check_processors(processors: LogitsProcessorList) -> None:
    """Raise `ValueError` if a processor is known to keep state between calls."""
    for processor in processors:
        if isinstance(processor, STATEFUL_PROCESSORS):
            raise ValueError(
                f"{type(processor).__name__} keeps state from one token to the next and cannot judge draft tokens; "
                "expected processors that are functions of their arguments. Generate without a drafter, or "
                "without the option that adds it."
            )


def row_temperatures(processors: LogitsProcessorList, batch: int) -> torch.Tensor | None:
    """`[batch]` float32: the temperatures of the `RowTemperature` among `processors`; None if there is none.

    Raises:
        ValueError: there are several, or it has not as many temperatures as the batch has rows.
    """
    found = [one for one in processors if isinstance(one, RowTemperature)]
    if len(found) > 1:
        raise ValueError(f"The call has {len(found)} RowTemperature processors; expected one with their products.")
    return found[0].check_rows(batch) if found else None


def _frozen(value: Any) -> str:
    return str(value.tolist() if isinstance(value, torch.Tensor) else value)


class BlockProcessor:
    """Applies `generate()`'s logits processors to every position of a round's block.

    A processor sees what plain `generate()` would show it: the whole batch, prompts with their padding, and at each
    position the tokens before it, drafts included. It must be a function of what it is shown. A row asks only about
    texts that plain `generate()` might reach: not past the length limit, nor after a draft that the processors rule
    out or that ends the row. Rows of the batch that do not ask are shown too, at another point of their text, and the
    answer for them is not used; `prefix_allowed_tokens_fn` is not asked about them.

    Where no processor reads the text, all positions are processed at once, and temperatures, those of a
    `RowTemperature` too, are read from the state, so that a captured round serves any.

    Args:
        processors: as prepared by `generate()`.
        prompts: `[B, P]` int64, left-padded.
        padding: padding tokens of each row; -n where its first n tokens are not in `prompts`, and not shown.
        temperature: of the call, which its states have too; None when decoding is greedy.
    """

    def __init__(
        self,
        processors: LogitsProcessorList,
        prompts: torch.Tensor,
        padding: list[int],
        temperature: float | None = None,
    ):
        self._processors = LogitsProcessorList(map(self._asking_rows_only, processors))
        self._asking: set[int] = set()
        self._prompts = prompts
        self._padding = torch.tensor(padding, device=prompts.device)
        self._is_pointwise = all(type(processor) in POINTWISE_PROCESSORS for processor in processors)
        # Told here, once: a compiled round that looked at the temperatures themselves would be compiled for each.
        self._are_in_state = [self._is_in_state(processor, temperature) for processor in processors]

    @property
    def key(self) -> tuple | None:
        """What the processing depends on besides a state, hashable; None if on the text."""
        if not self._is_pointwise:
            return None
        return tuple(
            (type(one), *(() if is_in_state else ((n, _frozen(v)) for n, v in vars(one).items())))
            for one, is_in_state in zip(self._processors, self._are_in_state, strict=True)
        )

    def __call__(self, logits: torch.Tensor, block: torch.Tensor, state: DecodeState) -> torch.Tensor:
        """Scores `[B, K + 1, V]` of `logits` `[B, K + 1, V]` at the tokens `block` `[B, K + 1]`.

        They are float32; where there is nothing to process they are the logits as they come.
        """
        if not self._processors:
            return logits
        scores = logits.float()
        if self._is_pointwise:
            tokens, shape = block.reshape(-1, 1), scores.shape
            scores = scores.clone()
            for processor, is_in_state in zip(self._processors, self._are_in_state, strict=True):
                if type(processor) is RowTemperature:
                    scores = scores / state.row_temperatures[:, None, None]
                elif is_in_state:
                    scores = divide(scores, state.temperature)
                else:
                    scores = processor(tokens, scores.flatten(0, 1)).view(shape)
            return scores
        return self._one_length_at_a_time(scores.clone(), block, state)

    @staticmethod
    def _is_in_state(processor: LogitsProcessor, temperature: float | None) -> bool:
        # A temperature that the caller hands over as a processor need not be the call's.
        is_of_call = type(processor) is TemperatureLogitsWarper and processor.temperature == temperature
        return is_of_call or type(processor) is RowTemperature

    def _asking_rows_only(self, processor: LogitsProcessor) -> LogitsProcessor:
        # A constraint may know nothing of texts outside its grammar, such as those of rows shown out of turn.
        if type(processor) is not PrefixConstrainedLogitsProcessor:
            return processor
        allowed_tokens = processor._prefix_allowed_tokens_fn

        def allowed(row: int, tokens: torch.Tensor) -> list[int]:
            return allowed_tokens(row, tokens) if row in self._asking else [0]

        return PrefixConstrainedLogitsProcessor(allowed, num_beams=1)

    def _one_length_at_a_time(self, scores: torch.Tensor, block: torch.Tensor, state: DecodeState) -> torch.Tensor:
        # Rows stand at different lengths, but a processor is shown a rectangle: one call for each length that occurs
        # somewhere in the batch, of which every row uses the calls that match its own positions. This path reads the
        # lengths on the host, so it is not part of a captured round.
        width = block.shape[1]
        shown, asks = self._texts(block, state)
        for length in range(min(asks.values(), default=0), max(asks.values(), default=-width) + width):
            steps = {row: length - first for row, first in asks.items() if 0 <= length - first < width}
            if not steps:
                continue
            self._asking = set(steps)
            rows = torch.tensor(list(steps), device=scores.device)
            at = torch.tensor(list(steps.values()), device=scores.device)
            batch_scores = scores[:, 0].clone()
            batch_scores[rows] = scores[rows, at]
            with caller():
                processed = self._processors(shown[:, :length], batch_scores)
            scores[rows, at] = processed[rows]

            draft = block[rows, (at + 1).clamp(max=width - 1)]
            is_over = torch.isin(draft, state.eos) | scores[rows, at, draft].isneginf()
            is_over |= self._padding[rows] + state.limits[rows] <= length + 1
            for row in rows[is_over].tolist():
                del asks[row]
        return scores

    def _texts(self, block: torch.Tensor, state: DecodeState) -> tuple[torch.Tensor, dict[int, int]]:
        """What processors are shown, `[B, longest]`, and for each unfinished row the length of its committed text."""
        batch, width = block.shape
        shown = self._prompts.new_zeros(batch, self._prompts.shape[1] + state.slots + width)
        first = {}
        finished = state.finished.tolist()
        for row, (length, pad) in enumerate(zip(state.lengths.tolist(), self._padding.tolist(), strict=True)):
            begin, hidden = max(pad, 0), max(-pad, 0)
            shown[row, :begin] = self._prompts[row, :begin]
            shown[row, begin : pad + length] = state.tokens[row, hidden:length]
            shown[row, pad + length : pad + length + width - 1] = block[row, 1:]
            if not finished[row]:
                first[row] = pad + length
        return shown, first
