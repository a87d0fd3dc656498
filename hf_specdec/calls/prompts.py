"""The prompts of a call: padding, lengths, and the part that a user's cache holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from transformers import Cache

from ..host.caches import OUTPUT_NAME


class PromptSpan(NamedTuple):
    """Positions `begin` to `end` (exclusive) of a row that a prefill runs."""

    row: int
    begin: int
    end: int


@dataclass(frozen=True)
class Prompts:
    """The prompts of a call, and how much of them a user's cache holds.

    Columns count the whole text, left padding included, as transformers' caches and attention masks do. Position t of
    row b, which has `padding[b]` columns of padding, is in column `padding[b] + t`.

    Attributes:
        input_ids: `[B, P]` int64 as given to `generate()`: the last P columns of the text.
        padding: columns of padding at the start of each row.
        width: columns of the text; more than P if the user passed only what the cache lacks.
        cached: leading columns that the cache holds; 0 without a cache.
        reread: the last columns of these that the target runs again, for a drafter that reads its hidden states.
    """

    input_ids: torch.Tensor
    padding: list[int]
    width: int
    cached: int = 0
    reread: int = 0

    @cached_property
    def on_host(self) -> torch.Tensor:
        """`input_ids` on the host; the first access waits for the device."""
        return self.input_ids.cpu()

    @cached_property
    def hidden(self) -> int:
        """Number of leading columns whose tokens were not given."""
        return self.width - self.input_ids.shape[1]

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [self.width - pad for pad in self.padding]

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def cached_lengths(self) -> list[int]:
        """Tokens of each row that the cache holds."""
        return self.ends(self.cached)

    def ends(self, columns: int) -> list[int]:
        """Tokens of each row in the leading `columns` of the text, new tokens included."""
        return [max(columns - pad, 0) for pad in self.padding]

    @property
    def reread_spans(self) -> list[PromptSpan]:
        """The positions of each row that the target runs again for the drafter."""
        spans = zip(self.ends(self.cached - self.reread), self.cached_lengths, strict=True)
        return [PromptSpan(row, begin, end) for row, (begin, end) in enumerate(spans)]

    def draft_starts(self, reads_aux_hidden_states: bool) -> list[int]:
        """The first position of each row that the drafter's cache covers. Earlier ones lack what the drafter reads,
        such as hidden states of cached columns that are not run again."""
        if reads_aux_hidden_states:
            starts = zip(self.ends(self.cached - self.reread), self.lengths, strict=True)
            # The slot that belongs to the last token is needed, even without a hidden state.
            return [max(min(start, length - 2), 0) for start, length in starts]
        return self.cached_lengths if self.hidden else [0] * len(self.padding)

    def rows(self, device: torch.device) -> list[torch.Tensor]:
        """Tokens of each row, `[length]` int64; 0 where a token was not given."""
        found = []
        for row, pad in zip(self.input_ids, self.padding, strict=True):
            tokens = row[max(pad - self.hidden, 0) :].to(device)
            missing = max(self.hidden - pad, 0)
            found.append(torch.nn.functional.pad(tokens, (missing, 0)) if missing else tokens)
        return found


def read_prompts(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, mask_width: int | None, cache: Cache | None
) -> Prompts:
    """The prompts `[B, P]` int64 of a call as `generate()` has prepared it.

    Args:
        attention_mask: `[B, width]`; None if all columns are tokens.
        mask_width: `width` if `attention_mask` is None; None for P.
        cache: the cache that the call continues; None or an empty cache for none.

    Raises:
        ValueError: a row is not padding followed by tokens, or prompts and cache do not fit each other.
    """
    batch, given = input_ids.shape
    cached = 0 if cache is None else int(cache.get_seq_length())
    width = mask_width or given if attention_mask is None else attention_mask.shape[1]
    if width not in (given, given + cached):
        both = f", or {given + cached} where input_ids are only what follows the cached tokens" if cached else ""
        raise ValueError(
            f"The attention_mask has {width} columns, but input_ids has {given} and the cache holds {cached}; expected "
            f"{given}{both}."
        )
    if cached >= width:
        raise ValueError(
            f"{OUTPUT_NAME} holds {cached} tokens a row, but the prompts have {width}; expected at least one token "
            "that it does not hold. Pass the whole sequence, or only what follows the cached tokens together with an "
            "attention_mask over both; or, without recurrent states, remove the cache's last n tokens with crop(-n)."
        )
    prompts = Prompts(input_ids, left_padding(batch, attention_mask), width, cached)
    layers = getattr(cache, "layers", ()) if cached else ()  # an encoder-decoder has two caches instead
    filled = (layer.keys for layer in layers if getattr(layer, "keys", None) is not None)
    rows = next(map(len, filled), batch)
    if rows != batch:
        raise ValueError(
            f"{OUTPUT_NAME} holds {rows} rows, but the call has {batch} (prompts times num_return_sequences); "
            "expected as many. Repeat its rows with batch_repeat_interleave()."
        )
    return prompts


def left_padding(batch: int, attention_mask: torch.Tensor | None) -> list[int]:
    """Columns of padding at the start of each of `batch` rows of `attention_mask` `[B, width]`; 0 if that is None.
    Raises `ValueError` if a row is padded on the right or in the middle, or holds padding only."""
    if attention_mask is None:
        return [0] * batch
    mask = attention_mask.bool()
    late = ~mask & (mask.cumsum(dim=1) > 0)
    wrong = late.any(dim=1) | ~mask.any(dim=1)
    if wrong.any():
        row = int(wrong.int().argmax())
        columns = late[row].nonzero()[:, 0].tolist()
        found = f"padding in column {columns[0]}, after tokens" if columns else "padding only"
        raise ValueError(
            f"Row {row} of the batch has an attention_mask with {found}; expected padding on the left, if any, and "
            "then at least one token: set tokenizer.padding_side = 'left'. Without an attention_mask every "
            "pad_token_id counts as padding: pass one."
        )
    return (~mask).sum(dim=1).tolist()
