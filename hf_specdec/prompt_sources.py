"""Prompts from jsonl files and from data sets on the Hub, shared by `hf-specdec bench` and the examples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import BatchEncoding, PreTrainedTokenizerBase

HUB_PREFIX = "hub:"
DEFAULT_SPLIT, DEFAULT_COLUMN, ID_COLUMN = "train", "prompt", "id"

# Short and diverse: acceptance differs much between prose, lists, code, arithmetic, tables and verse.
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


class Prompt(NamedTuple):
    """The first turn of a user. Its `id` is that of its source, or else its index there."""

    id: int | str
    text: str


def load_prompts(source: str | Path | None, limit: int | None = None) -> list[str]:
    """The texts of `read_prompts`."""
    return [prompt.text for prompt in read_prompts(source, limit)]


def read_prompts(source: str | Path | None, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a source.

    Args:
        source: a jsonl file with `prompt` in each line, or `hub:name[:split[:column]]`, by default the split "train"
            and the column "prompt"; None for `PROMPTS`. Lines and rows may have an `id`.
        limit: None for all.

    Raises:
        OSError: the file does not exist.
        ValueError: a line is not JSON, has no `prompt`, or holds text without a UTF-8 encoding; the source is empty;
            the data set has no such column; or the library `datasets` is not installed.
    """
    if source is None:
        prompts = [Prompt(*numbered) for numbered in enumerate(PROMPTS)]
    elif str(source).startswith(HUB_PREFIX):
        prompts = _load_hub(str(source).removeprefix(HUB_PREFIX), limit)
    else:
        prompts = _load_jsonl(Path(source))
    if not prompts:
        raise ValueError(f"{source} holds no prompts; expected at least one.")
    return prompts[:limit]


def _load_jsonl(path: Path) -> list[Prompt]:
    if not path.is_file():
        raise FileNotFoundError(f"There is no file of prompts at {path}; expected a jsonl file with `prompt`.")
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"Line {number} of {path} is not JSON ({error}).") from error
        if not isinstance(record, dict) or DEFAULT_COLUMN not in record:
            raise ValueError(f"Line {number} of {path} has no `{DEFAULT_COLUMN}`: {line[:80]!r}.")
        text = _first_turn(record[DEFAULT_COLUMN], f"Line {number} of {path}")
        prompts.append(_prompt(record.get(ID_COLUMN), len(prompts), text, f"Line {number} of {path}"))
    return prompts


def _load_hub(name: str, limit: int | None) -> list[Prompt]:
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
    texts = [_first_turn(value, f"Column {column!r} of {repo}") for value in chosen[column]]
    ids = chosen[ID_COLUMN] if ID_COLUMN in rows.column_names else [None] * len(texts)
    rows = enumerate(zip(ids, texts, strict=True))
    return [_prompt(own, number, text, f"Row {number} of {repo}") for number, (own, text) in rows]


def _prompt(own_id: Any, number: int, text: str, where: str) -> Prompt:
    """The prompt `text` with its own id, or else `number`. Raises `ValueError` for halves of surrogate pairs."""
    for value in (own_id, text):
        try:
            str(value).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where} holds {value!r:.80}, which is no text: {error}.") from error
    return Prompt(own_id if isinstance(own_id, (int, str)) else number, text)


def _first_turn(value: Any, where: str) -> str:
    """`value` if it is a text; its first turn if it is a conversation."""
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    if isinstance(value, dict) and "content" in value:
        value = value["content"]
    if not isinstance(value, str):
        raise ValueError(f"{where} holds a {type(value).__name__}; expected a text, or a list of turns.")
    return value


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], as_chat: bool | None = None, **options: Any
) -> BatchEncoding:
    """Tokenize prompts; with `as_chat` as a user's turn in the chat template. None: if the tokenizer has a template."""
    if as_chat is None:
        as_chat = tokenizer.chat_template is not None
    if not as_chat:
        return tokenizer(list(texts), **options)
    chats = [[{"role": "user", "content": text}] for text in texts]
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True, **options)


def pad_on_the_left(tokenizer: PreTrainedTokenizerBase) -> None:
    """Set `tokenizer` to pad on the left, with its end-of-sequence token if it has no padding token."""
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
