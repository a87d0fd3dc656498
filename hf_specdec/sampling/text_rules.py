"""Logits processors that need only a few numbers of each row, or of the call, besides its tokens.

A round processes all positions of a block by them at once, on the device. They change the scores of a few tokens (those
of the text, its drafts and its ends), in place, and touch no others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from ..kernels.types import NO_TOKEN, RowRules
from ..ops import divide
from ..state import DecodeState
from .logits import PenaltyLogitsProcessor, RowSampling

# Exact types are compared, since a subclass may compute something else.
LENGTH_RULES = frozenset({MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor})
PENALTY_RULES = frozenset({RepetitionPenaltyLogitsProcessor, PenaltyLogitsProcessor})
TEXT_RULES = LENGTH_RULES | PENALTY_RULES
# With one whose number is the same for all rows, so that it is not in the state.
AT_ONCE = TEXT_RULES | {NoRepeatNGramLogitsProcessor}


def with_all_rules(processors: Sequence[LogitsProcessor]) -> LogitsProcessorList:
    """`processors` of settings and a `RowSampling`, if requests have one, with a processor for each of the `RowRules`,
    where `generate()` has it. The settings of these are not read."""
    others = [one for one in processors if type(one) not in TEXT_RULES]
    place = next((place for place, one in enumerate(others) if type(one) is RowSampling), len(others))
    first = [RepetitionPenaltyLogitsProcessor(1.0), MinLengthLogitsProcessor(0, 0)]
    return LogitsProcessorList([*first, *others[:place], PenaltyLogitsProcessor(0), *others[place:]])


def rules_of_rows(
    processors: Sequence[LogitsProcessor],
    ends: Collection[int],
    prompts: Sequence[torch.Tensor],
    padding: Sequence[int],
) -> list[RowRules] | None:
    """The rules among `processors` for each row of `prompts` `[B, P]` int64, left-padded by `padding`; an empty list if
    there are none, and None if they need more than `RowRules`, the tokens of the rows and the tokens `ends` that end
    them.

    Negative `padding` stands for tokens that are not in `prompts`.
    """
    rules = [one for one in processors if type(one) in TEXT_RULES]
    if any(padding) and any(type(one) is NoRepeatNGramLogitsProcessor for one in processors):
        return None  # n-grams may have padding in them
    if not rules:
        return []
    if any(sum(type(one) is kind for one in rules) > 1 for kind in PENALTY_RULES) or min(padding, default=0) < 0:
        return None
    lengths = [place for place, one in enumerate(processors) if type(one) in LENGTH_RULES]
    # A processor between two minimum lengths sees what the first one leaves.
    if lengths and (lengths[-1] - lengths[0] >= len(lengths) or not _are_about(rules, ends)):
        return None
    pads = [NO_TOKEN] * len(padding)
    for one in rules:
        if type(one) is PenaltyLogitsProcessor and [one.prompt_length] != [len(row) for row in prompts[:1]]:
            return None
        if type(one) is not RepetitionPenaltyLogitsProcessor:
            continue
        ignored = one.prompt_ignore_length
        if ignored is None:
            texts = prompts.tolist() if any(padding) else [[]] * len(padding)
            found = [set(row[:pad]) for row, pad in zip(texts, padding, strict=True)]
            if any(len(tokens) > 1 or min(tokens, default=0) < 0 for tokens in found):
                return None
            pads = [next(iter(tokens), NO_TOKEN) for tokens in found]
        elif not isinstance(ignored, torch.Tensor) or ignored.tolist() != list(padding):
            return None
    return [_rules(rules, count, pad) for count, pad in zip(padding, pads, strict=True)]


def _are_about(rules: Sequence[LogitsProcessor], ends: Collection[int]) -> bool:
    """Whether the minimum lengths among `rules` are about the tokens `ends`. They usually share a tensor, which is read
    once: it may be on a GPU that computes."""
    tensors = {id(one.eos_token_id): one.eos_token_id for one in rules if type(one) in LENGTH_RULES}
    expected = {token for token in ends if token >= 0}
    return all({token for token in one.flatten().tolist() if token >= 0} == expected for one in tensors.values())


def rules_of_prompt(processors: Sequence[LogitsProcessor], length: int) -> RowRules:
    """The rules among `processors` for a row whose prompt has `length` tokens and no padding.

    `MinNewTokensLengthLogitsProcessor` counts from the end of that prompt, whatever its `prompt_length_to_skip` is.
    """
    return _rules(processors, 0, NO_TOKEN, length)


def _rules(processors: Sequence[LogitsProcessor], padding: int, pad: int, length: int | None = None) -> RowRules:
    min_length, repetition, presence, frequency = 0, 1.0, 0.0, 0.0
    for one in processors:
        if type(one) is MinLengthLogitsProcessor:
            min_length = max(min_length, one.min_length - padding)
        elif type(one) is MinNewTokensLengthLogitsProcessor:
            skipped = one.prompt_length_to_skip - padding if length is None else length
            min_length = max(min_length, skipped + one.min_new_tokens)
        elif type(one) is RepetitionPenaltyLogitsProcessor:
            repetition = one.penalty
        elif type(one) is PenaltyLogitsProcessor:
            presence, frequency = one.presence, one.frequency
    return RowRules(min_length, pad, repetition, presence, frequency)


def apply_rule(processor: LogitsProcessor, scores: torch.Tensor, block: torch.Tensor, state: DecodeState) -> None:
    """Change `scores` `[B, n, V]` float32 of a `block` `[B, n]` int64 in place, as the `processor` of a kind in
    `AT_ONCE` does, with the `RowRules` in `state`. The text before a position has the drafts before it."""
    kind = type(processor)
    if kind in LENGTH_RULES:
        apply_min_length(scores, state)
    elif kind is NoRepeatNGramLogitsProcessor:
        apply_no_repeat_ngram(processor.ngram_size, scores, block, state)
    elif kind is RepetitionPenaltyLogitsProcessor:
        apply_repetition_penalty(scores, block, state)
    else:
        apply_presence_and_frequency_penalty(scores, block, state)


def apply_min_length(scores: torch.Tensor, state: DecodeState) -> None:
    """-inf for the tokens that end the row, where the text is shorter than `DecodeState.row_min_lengths`."""
    width, vocabulary = scores.shape[1:]
    ends, some_end = _scored(state.eos, state.eos != NO_TOKEN, vocabulary)
    lengths = state.lengths[:, None] + torch.arange(width, device=scores.device)
    is_early = (lengths < state.row_min_lengths[:, None]) & (some_end >= 0)
    ends = ends[:, None].expand(-1, width, -1)
    scores.scatter_(2, ends, scores.gather(2, ends).masked_fill(is_early[:, :, None], float("-inf")))


def apply_no_repeat_ngram(size: int, scores: torch.Tensor, block: torch.Tensor, state: DecodeState) -> None:
    """-inf for tokens with which an n-gram of `size` tokens would occur in the text again."""
    width, vocabulary = scores.shape[1:]
    tokens, _ = _text(state, 0)
    num_slots = tokens.shape[1]
    # Slots of the last token before each position. Rows that have finished may have none.
    last = (state.lengths[:, None] - 1 + torch.arange(width, device=block.device)).clamp(max=num_slots - 1)
    text = torch.nn.functional.pad(tokens.scatter(1, last, block), (0, size - 1))
    first = torch.arange(num_slots, device=block.device)
    is_repeated = first + size - 1 <= last[:, :, None]
    for place in range(size - 1):
        token = text.gather(1, (last - (size - 2 - place)).clamp(min=0))
        is_repeated &= text[:, None, place : place + num_slots] == token[:, :, None]
    following = text[:, None, size - 1 :].expand(-1, width, -1)
    ruled_out, some = _scored(following, is_repeated, vocabulary)
    scores.scatter_(2, ruled_out, scores.gather(2, ruled_out).masked_fill(some >= 0, float("-inf")))


def apply_repetition_penalty(scores: torch.Tensor, block: torch.Tensor, state: DecodeState) -> None:
    """`DecodeState.row_repetition_penalties` on tokens of the text, and on `DecodeState.row_padding_tokens`."""
    width, vocabulary = scores.shape[1:]
    tokens, is_text = _text(state, 0)
    seen = torch.cat([tokens, state.row_padding_tokens[:, None]], dim=1)
    is_seen = torch.cat([is_text, state.row_padding_tokens[:, None] != NO_TOKEN], dim=1)
    seen, some_seen = _scored(seen, is_seen, vocabulary)
    drafts, some_draft = _scored(*_drafts(block), vocabulary, some_seen[:, None])
    seen = seen[:, None].expand(-1, width, -1)
    penalties = state.row_repetition_penalties[:, None, None]

    def penalised(places: torch.Tensor, some: torch.Tensor) -> torch.Tensor:
        values, by = scores.gather(2, places), torch.where(some >= 0, penalties, 1.0)
        return torch.where(values < 0, values * by, divide(values, by))

    of_seen, of_drafts = penalised(seen, some_seen[:, None]), penalised(drafts, some_draft)
    scores.scatter_(2, seen, of_seen).scatter_(2, drafts, of_drafts)


def apply_presence_and_frequency_penalty(scores: torch.Tensor, block: torch.Tensor, state: DecodeState) -> None:
    """`DecodeState.row_presence_penalties` and `DecodeState.row_frequency_penalties` on tokens after the prompt."""
    batch, width, vocabulary = scores.shape
    tokens, is_new = _text(state, state.prompt_lengths[:, None])
    new, some_new = _scored(tokens, is_new, vocabulary)
    counts = torch.zeros(batch, vocabulary, dtype=scores.dtype, device=scores.device)
    counts.scatter_add_(1, new, (is_new & (tokens == new)).to(scores.dtype))
    drafts, is_before = _drafts(block)
    drafts, _ = _scored(drafts, is_before, vocabulary, some_new[:, None])
    is_same = (drafts[..., None] == block[:, None, None]) & is_before[:, None]
    drafted = counts.gather(1, drafts.flatten(1)).view_as(drafts) + is_same.sum(-1)
    presence, frequency = state.row_presence_penalties[:, None, None], state.row_frequency_penalties[:, None, None]

    def penalised(places: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        values = scores.gather(2, places)
        return torch.where(counts > 0, values - presence - frequency * counts, values)

    of_new = penalised(new[:, None].expand(-1, width, -1), counts.gather(1, new)[:, None])
    of_drafts = penalised(drafts, drafted)
    scores.scatter_(2, new[:, None].expand(-1, width, -1), of_new).scatter_(2, drafts, of_drafts)


def _text(state: DecodeState, begin: torch.Tensor | int) -> tuple[torch.Tensor, torch.Tensor]:
    """The leading slots `[B, S]` of `DecodeState.tokens`, and which of them are of the text from `begin` on."""
    tokens = state.tokens[:, : state.cache.kernel_span]
    slots = torch.arange(tokens.shape[1], device=tokens.device)
    return tokens, (slots >= begin) & (slots < state.lengths[:, None])


def _drafts(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of a `block` `[B, n]` at each position, `[B, n, n]`, and which are drafts before it, `[n, n]`."""
    width = block.shape[1]
    index = torch.arange(width, device=block.device)
    is_draft = index > 0  # after the last committed token
    return block[:, None].expand(-1, width, -1), is_draft & (index <= index[:, None])


def _scored(
    tokens: torch.Tensor, is_given: torch.Tensor, vocabulary: int, some_other: torch.Tensor | int = -1
) -> tuple[torch.Tensor, torch.Tensor]:
    """`tokens` `[..., m]` as places of scores: one that is not given, or has no score, is replaced by another of the
    same row. Equal places get equal scores, so that it does not matter which one is written last.

    Returns the places, and `[..., 1]` the token in place of others: the largest one or `some_other`, which has a score
    or is -1. If all are -1 places are 0.
    """
    is_scored = is_given & (tokens < vocabulary)
    some = torch.where(is_scored, tokens, some_other).amax(dim=-1, keepdim=True)
    return torch.where(is_scored, tokens, some.clamp(min=0)), some
