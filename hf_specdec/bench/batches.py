"""Batches of prompts for `generate()`: texts or random tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle, islice

import torch
from transformers import PreTrainedTokenizerBase

from ..prompt_sources import encode, pad_on_the_left

# `input_ids` and `attention_mask`, `[B, n]` int64 each.
Batch = dict[str, torch.Tensor]


def text_batches(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], batch_size: int, device: torch.device
) -> list[Batch]:
    """Left-padded batches of all prompts in order, as user turns if the tokenizer has a chat template. Every batch has
    `batch_size` rows: the first prompts fill up the last batch."""
    pad_on_the_left(tokenizer)
    batches = []
    for texts in _full_batches(prompts, batch_size):
        inputs = encode(tokenizer, texts, padding=True, return_tensors="pt")
        batches.append({name: inputs[name].to(device) for name in ("input_ids", "attention_mask")})
    return batches


def random_batches(
    vocab_size: int, length: int, num_prompts: int, batch_size: int, device: torch.device
) -> list[Batch]:
    """Batches of prompts of `length` random tokens. The prompts are the same for every batch size."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (num_prompts, length), generator=generator)
    return [
        {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
        for rows in (torch.stack(batch).to(device) for batch in _full_batches(list(ids), batch_size))
    ]


def _full_batches(items: Sequence, size: int) -> list[list]:
    repeated = cycle(items)
    return [list(islice(repeated, size)) for _ in range(math.ceil(len(items) / size))]
