"""Logits processors that need only a few numbers of each row besides its tokens.

A round processes all positions of a block by them at once, on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import (
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from ..kernels.types import NO_TOKEN, RowRules
from ..state import DecodeState
from .logits import divide

# Exact types are compared, since a subclass may compute something else.
LENGTH_RULES = frozenset({MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor})
TEXT_RULES = LENGTH_RULES | {RepetitionPenaltyLogitsProcessor}


def ends_of_rules(processors: Sequence[LogitsProcessor]) -> set[tuple[int, ...]]:
    """The end tokens of the `LENGTH_RULES` among `processors`, each set of them once."""
    return {tuple(one.eos_token_id.reshape(-1).tolist()) for one in processors if type(one) in LENGTH_RULES}


def rules_of_rows(
    processors: Sequence[LogitsProcessor], prompts: Sequence[torch.Tensor], padding: Sequence[int]
) -> list[RowRules] | None:
    """The rules among `processors` for each row of `prompts` `[B, P]` int64, left-padded by `padding`; an empty list if
    there are none, and None if they need more than `RowRules` and the tokens of the rows.

    Negative `padding` stands for tokens that are not in `prompts`.
    """
    rules = [one for one in processors if type(one) in TEXT_RULES]
    lengths = [place for place, one in enumerate(processors) if type(one) in LENGTH_RULES]
    penalties = [one for one in rules if type(one) not in LENGTH_RULES]
    if not rules:
        return []
    if len(penalties) > 1 or len(ends_of_rules(rules)) > 1 or min(padding, default=0) < 0:
        return None
    # A processor between two minimum lengths sees what the first one leaves.
    if lengths and lengths[-1] - lengths[0] >= len(lengths):
        return None
    pads = [NO_TOKEN] * len(padding)
    for one in penalties:
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


def rules_of_prompt(processors: Sequence[LogitsProcessor], length: int) -> RowRules:
    """The rules among `processors` for a row whose prompt has `length` tokens and no padding.

    `MinNewTokensLengthLogitsProcessor` counts from the end of that prompt, whatever its `prompt_length_to_skip` is.
    """
    return _rules(processors, 0, NO_TOKEN, length)


def _rules(processors: Sequence[LogitsProcessor], padding: int, pad: int, length: int | None = None) -> RowRules:
    least, penalty = 0, 1.0
    for one in processors:
        if type(one) is MinLengthLogitsProcessor:
            least = max(least, one.min_length - padding)
        elif type(one) is MinNewTokensLengthLogitsProcessor:
            skipped = one.prompt_length_to_skip - padding if length is None else length
            least = max(least, skipped + one.min_new_tokens)
        elif type(one) is RepetitionPenaltyLogitsProcessor:
            penalty = one.penalty
    return RowRules(least, pad, penalty)


def without_early_ends(scores: torch.Tensor, ends: torch.Tensor, state: DecodeState) -> torch.Tensor:
    """`scores` `[B, n, V]` of a block with -inf for the tokens `ends` `[E]` int64, where the text before a position is
    shorter than `DecodeState.row_least`."""
    _, width, vocabulary = scores.shape
    is_end = (torch.arange(vocabulary, device=scores.device)[:, None] == ends).any(dim=1)
    lengths = state.lengths[:, None] + torch.arange(width, device=scores.device)
    is_early = lengths < state.row_least[:, None]
    return scores.masked_fill(is_early[:, :, None] & is_end, float("-inf"))


def penalised(scores: torch.Tensor, block: torch.Tensor, state: DecodeState) -> torch.Tensor:
    """`scores` `[B, n, V]` of a `block` `[B, n]` int64 with the row's `DecodeState.row_penalties` on tokens of the text
    before each position, drafts included, and on `DecodeState.row_pads`."""
    (batch, width, vocabulary), last = scores.shape, block[:, :1]
    tokens = state.tokens[:, : state.cache.kernel_span]
    is_text = torch.arange(tokens.shape[1], device=scores.device) < state.lengths[:, None]
    # The last column is that of tokens which have no score.
    seen = torch.zeros(batch, vocabulary + 1, dtype=torch.bool, device=scores.device)
    seen.scatter_(1, torch.where(is_text, tokens, last).clamp(max=vocabulary), True)
    pads = torch.where(state.row_pads == NO_TOKEN, last[:, 0], state.row_pads)
    seen.scatter_(1, pads.clamp(max=vocabulary)[:, None], True)
    is_before = torch.ones(width, width, dtype=torch.bool, device=scores.device).tril()
    drafts = torch.where(is_before, block[:, None], last[:, None]).clamp(max=vocabulary)
    seen = seen[:, None].expand(-1, width, -1).scatter(2, drafts, True)[:, :, :vocabulary]
    penalties = state.row_penalties[:, None, None]
    return torch.where(seen, torch.where(scores < 0, scores * penalties, divide(scores, penalties)), scores)
