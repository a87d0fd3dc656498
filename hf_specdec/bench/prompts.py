"""What the benchmark lets a target answer: prompts, and batches of them as `generate()` reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

Batch = dict[str, torch.Tensor]

HUB_PREFIX = "hub:"
DEFAULT_SPLIT, DEFAULT_COLUMN = "train", "prompt"

# Short and varied: answers in prose, lists, code, sums, tables and verse are drafted with very different success.
PROMPTS = (
    "Why does bread rise, and what goes wrong when it does not?",
    "Write a Python function that merges two sorted lists, with a docstring.",
    "Plan a weekend in a small coastal town for two people who do not like beaches.",
    "A train leaves at 9:40 and arrives at 13:15, with a stop of 25 minutes. How long does it move? Show your steps.",
    "Explain to a ten-year-old how a vaccine works.",
    "List the planets of the solar system with one fact each.",
    "Write a polite email that asks a colleague to send the missing figures by Thursday.",
    "Translate into French and Spanish: 'The library closes early on Fridays.'",
    "What is the difference between a stack and a queue? Give an example of each from daily life.",
    "Write a poem of eight lines about a lighthouse in winter.",
    "Summarise the plot of Romeo and Juliet in four sentences.",
    "Give me a recipe for lentil soup, with amounts for four people.",
    "Write an SQL query for the three customers with the highest total of orders, from tables customers and orders.",
    "What are the arguments for and against daylight saving time?",
    "Return a JSON object that describes a book: title, author, year, and a list of three topics.",
    "My bicycle chain keeps slipping under load. What should I check, and in which order?",
)


def load_prompts(source: str | None, limit: int | None = None) -> list[str]:
    """The texts of `source`: a jsonl file, `hub:name[:split[:column]]`, or our own if None; the first `limit`.

    Raises:
        OSError: no such file.
        ValueError: a line or a data set without prompts, or no `datasets` to load one with.
    """
    if source is None:
        prompts = list(PROMPTS)
    elif source.startswith(HUB_PREFIX):
        prompts = _load_hub(source.removeprefix(HUB_PREFIX), limit)
    else:
        prompts = _load_jsonl(Path(source))
    if not prompts:
        raise ValueError(f"{source} holds no prompts; expected at least one.")
    return prompts[:limit]


def _load_jsonl(path: Path) -> list[str]:
    if not path.is_file():
        raise FileNotFoundError(f"There is no file of prompts at {path}; expected a jsonl file with `prompt`.")
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"Line {number} of {path} is not JSON ({error}).") from error
        if not isinstance(record, dict) or DEFAULT_COLUMN not in record:
            raise ValueError(f"Line {number} of {path} has no `{DEFAULT_COLUMN}`: {line[:80]!r}.")
        prompts.append(_first_turn(record[DEFAULT_COLUMN], f"Line {number} of {path}"))
    return prompts


def _load_hub(name: str, limit: int | None) -> list[str]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"Reading the data set {name} needs the library `datasets`, which is not installed. Install it, or pass a "
            "jsonl file."
        ) from error
    parts = name.split(":")
    if len(parts) > 3:
        raise ValueError(f"{HUB_PREFIX}{name} has {len(parts)} parts; expected {HUB_PREFIX}name[:split[:column]].")
    repo, split, column = parts + [DEFAULT_SPLIT, DEFAULT_COLUMN][len(parts) - 1 :]
    rows = load_dataset(repo, split=split)
    if column not in rows.column_names:
        raise ValueError(
            f"The split {split} of {repo} has no column {column!r}, but {', '.join(map(repr, rows.column_names))}. "
            f"Name the one that holds the prompts: {HUB_PREFIX}{repo}:{split}:COLUMN."
        )
    chosen = rows.select(range(len(rows) if limit is None else min(limit, len(rows))))
    return [_first_turn(value, f"Column {column!r} of {repo}") for value in chosen[column]]


def _first_turn(value: Any, where: str) -> str:
    """A prompt is a text, or the turns of a conversation, of which the first is taken."""
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    if isinstance(value, dict) and "content" in value:
        value = value["content"]
    if not isinstance(value, str):
        raise ValueError(f"{where} holds a {type(value).__name__}; expected a text, or a list of turns.")
    return value


def text_batches(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], batch_size: int, device: torch.device
) -> list[Batch]:
    """All prompts in order, left-padded, as user's turns if the tokenizer knows a chat format.

    Every batch is full: the last is filled up with the first prompts.
    """
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    batches = []
    for texts in _full_batches(prompts, batch_size):
        if tokenizer.chat_template is None:
            inputs = tokenizer(texts, padding=True, return_tensors="pt")
        else:
            chats = [[{"role": "user", "content": text}] for text in texts]
            inputs = tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
            )
        batches.append({name: inputs[name].to(device) for name in ("input_ids", "attention_mask")})
    return batches


def random_batches(
    vocab_size: int, length: int, num_prompts: int, batch_size: int, device: torch.device
) -> list[Batch]:
    """Prompts of `length` random tokens, the same ones whatever the batch size."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (num_prompts, length), generator=generator)
    return [
        {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
        for rows in (torch.stack(batch).to(device) for batch in _full_batches(list(ids), batch_size))
    ]


def _full_batches(items: Sequence, size: int) -> list[list]:
    return [
        [items[(size * batch + row) % len(items)] for row in range(size)]
        for batch in range(math.ceil(len(items) / size))
    ]
