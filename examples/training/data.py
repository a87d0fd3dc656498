"""Training data that the target writes itself: prompts after its chat template, then answers to them."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.patching.attention import ragged_attention
from hf_specdec.patching.cache import RaggedCache
from hf_specdec.patching.hidden_states import decoder_layers

from .prompts import PromptFilter, random_opening
from .repetition import is_degenerate, trimmed_length

COMPACT_EVERY = 16
PLACEHOLDER = "\ufff9"


@dataclass
class WriteOptions:
    """How the target writes.

    Attributes:
        prompts_per_round: prompts written, and answered, for one shard.
        batch_size: rows generated at once.
        max_prompt_tokens, max_answer_tokens: lengths, the prompt's counted without the chat template.
        prompt_temperature: of prompts.
        answer_temperatures: of answers, one drawn for each; 0 is greedy.
        min_p: tokens less likely than this share of the most likely one are never drawn.
        looping_share: share of the degenerate answers that are kept whole instead of cut.
        seed: of everything random.
    """

    prompts_per_round: int = 16384
    batch_size: int = 2048
    max_prompt_tokens: int = 64
    max_answer_tokens: int = 384
    prompt_temperature: float = 0.8
    answer_temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 1.0)
    min_p: float = 0.05
    looping_share: float = 0.05
    seed: int = 0


class ChatFormat:
    """The target's chat template, cut where a user begins to write and where the assistant does.

    Args:
        tokenizer: with a chat template.
        model: whose generation config knows the tokens that end a turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel):
        self.tokenizer = tokenizer
        stops = model.generation_config.eos_token_id
        self.stop_ids = sorted({*(stops if isinstance(stops, list) else [stops]), tokenizer.eos_token_id} - {None})
        self.opening = self._render(PLACEHOLDER, add_generation_prompt=False).split(PLACEHOLDER)[0]

    def _render(self, prompt: str, add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def user_turn(self, opening: str) -> list[int]:
        """Ids that end inside the user's turn, after the first words of a prompt."""
        return self.tokenizer(self.opening + opening, add_special_tokens=False).input_ids

    def prompt(self, text: str) -> list[int]:
        """Ids that end where the assistant's answer begins."""
        return self.tokenizer(self._render(text), add_special_tokens=False).input_ids


@torch.no_grad()
def generate(
    model: PreTrainedModel,
    prompts: list[list[int]],
    temperatures: list[float],
    max_new_tokens: int,
    stop_ids: list[int],
    min_p: float,
    generator: torch.Generator,
) -> list[list[int]]:
    """Continue `prompts`, each at its own temperature, on a ragged cache; rows that have stopped leave the batch.

    Returns:
        the new tokens of each row, up to and including the first of `stop_ids`.
    """
    device, batch = model.device, len(prompts)
    longest = max(map(len, prompts))
    cache = RaggedCache(len(decoder_layers(model)), longest + max_new_tokens + 1)
    dummy_slot = cache.slots - 1

    def run(tokens: torch.Tensor, slots: torch.Tensor, live: int) -> torch.Tensor:
        cache.advance(slots, live)
        return model(
            input_ids=tokens,
            attention_mask=cache.attention_mask(slots),
            position_ids=slots.clamp(max=dummy_slot - 1),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in prompts], device=device)
    lengths = torch.tensor([len(ids) for ids in prompts], device=device)
    temperature = torch.tensor(temperatures, device=device)
    stops = torch.tensor(stop_ids, device=device)
    rows = torch.arange(batch, device=device)
    done = torch.zeros(batch, dtype=torch.bool, device=device)
    written = torch.full((batch, max_new_tokens), stop_ids[0], device=device)
    with ragged_attention(model):
        columns = torch.arange(longest, device=device)
        run(padded, torch.where(columns < lengths[:, None] - 1, columns, dummy_slot), longest)
        tokens = padded.gather(1, lengths[:, None] - 1)[:, 0]
        for step in range(max_new_tokens):
            logits = run(tokens[:, None], (lengths - 1 + step)[:, None], longest + step)
            tokens = sample(logits, temperature, min_p, generator)
            written[rows, step] = tokens
            done |= torch.isin(tokens, stops)
            if step % COMPACT_EVERY == COMPACT_EVERY - 1:
                kept = (~done).nonzero()[:, 0]
                if len(kept) == 0:
                    break
                if len(kept) < 0.8 * len(rows):
                    cache.batch_select_indices(kept)
                    rows, done, temperature, tokens, lengths = (
                        tensor[kept] for tensor in (rows, done, temperature, tokens, lengths)
                    )
    return [up_to_stop(row, stop_ids) for row in written.tolist()]


def sample(logits: torch.Tensor, temperature: torch.Tensor, min_p: float, generator: torch.Generator) -> torch.Tensor:
    """One token a row of `[B, V]` logits; rows at temperature 0 take the most likely one."""
    is_drawn = (temperature > 0)[:, None]
    scores = logits.float() / temperature.where(temperature > 0, 1.0)[:, None]
    unlikely = scores < scores.amax(dim=-1, keepdim=True) + np.log(max(min_p, 1e-10))
    noise = torch.empty_like(scores).exponential_(generator=generator).log_()
    return (scores - noise * is_drawn).masked_fill_(unlikely, float("-inf")).argmax(dim=-1)


def up_to_stop(tokens: list[int], stop_ids: list[int]) -> list[int]:
    ends = [tokens.index(stop) + 1 for stop in stop_ids if stop in tokens]
    return tokens[: min(ends)] if ends else tokens


def length_batches(rows: list[list[int]], batch_size: int) -> Iterator[list[int]]:
    """Indices of `rows` in batches of like length."""
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


class Writer:
    """Lets the target write shards of training data.

    Args:
        model, tokenizer: the target.
        options: how it writes.
        prompt_filter: says which prompts must not be used, and counts them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        options: WriteOptions,
        prompt_filter: PromptFilter,
    ):
        self.model = model
        self.options = options
        self.format = ChatFormat(tokenizer, model)
        self.filter = prompt_filter

    def write_shard(self, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """One shard's tensors, and counts of what was written and dropped."""
        rng = random.Random(seed)
        generator = torch.Generator(self.model.device).manual_seed(seed)
        refused_before = self.filter.refused.copy()
        texts = self._write_prompts(rng, generator)
        refused = {reason: count - refused_before[reason] for reason, count in self.filter.refused.items()}
        counts = {"prompts": len(texts), "unfinished": 0, "degenerate": 0, **refused}
        prompts = [self.format.prompt(text) for text in texts]
        temperatures = [rng.choice(self.options.answer_temperatures) for _ in texts]
        answers = self._continue(prompts, temperatures, self.options.max_answer_tokens, generator, "answers")

        documents, prompt_lengths = [], []
        for prompt, answer in zip(prompts, answers, strict=True):
            if answer[-1] not in self.format.stop_ids:
                counts["unfinished"] += 1
                if rng.random() >= self.options.looping_share:
                    length = trimmed_length(np.asarray(answer))
                    counts["degenerate"] += length < len(answer)
                    answer = answer[:length]
            if len(answer) > 1:
                documents.append(prompt + answer)
                prompt_lengths.append(len(prompt))
        tensors = {
            "tokens": torch.tensor([token for document in documents for token in document], dtype=torch.int32),
            "lengths": torch.tensor([len(document) for document in documents], dtype=torch.int32),
            "prompt_lengths": torch.tensor(prompt_lengths, dtype=torch.int32),
        }
        return tensors, counts

    def _write_prompts(self, rng: random.Random, generator: torch.Generator) -> list[str]:
        openings = [random_opening(rng) for _ in range(self.options.prompts_per_round)]
        rows = [self.format.user_turn(opening) for opening in openings]
        temperatures = [self.options.prompt_temperature] * len(rows)
        endings = self._continue(rows, temperatures, self.options.max_prompt_tokens, generator, "prompts")
        texts = []
        for opening, ending in zip(openings, endings, strict=True):
            if ending[-1] in self.format.stop_ids and not is_degenerate(np.asarray(ending)):
                text = opening + self.format.tokenizer.decode(ending, skip_special_tokens=True)
                if self.filter.accepts(text.strip()):
                    texts.append(text.strip())
        if not texts:
            raise RuntimeError(
                "The target wrote no usable prompt: it never ended a user's turn. "
                f"Turns are taken to end with one of the tokens {self.format.stop_ids}."
            )
        return texts

    def _continue(
        self,
        rows: list[list[int]],
        temperatures: list[float],
        max_new_tokens: int,
        generator: torch.Generator,
        what: str,
    ) -> list[list[int]]:
        results: list[list[int]] = [[] for _ in rows]
        with tqdm(total=len(rows), desc=what, unit="row", leave=False) as progress:
            for batch in length_batches(rows, self.options.batch_size):
                written = generate(
                    self.model,
                    [rows[index] for index in batch],
                    [temperatures[index] for index in batch],
                    max_new_tokens,
                    self.format.stop_ids,
                    self.options.min_p,
                    generator,
                )
                for index, tokens in zip(batch, written, strict=True):
                    results[index] = tokens
                progress.update(len(batch))
        return results


def write_data(
    folder: Path, writer: Writer, num_tokens: int, max_seconds: float, process: int, log: Callable[[str], None]
) -> None:
    """Add shards to `folder` until this process has written `num_tokens` or `max_seconds` have passed.

    A shard's name and seed follow from the process and the shard's number, so an interrupted run goes on where it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    start, total = time.monotonic(), 0
    for number in range(1_000_000):
        path = folder / f"shard-{process:03d}-{number:05d}.safetensors"
        if path.exists():
            total += len(load_file(path)["tokens"])
            continue
        if total >= num_tokens or time.monotonic() - start > max_seconds:
            return
        tensors, counts = writer.write_shard(seed=writer.options.seed + 1_000_003 * process + number)
        partial = path.with_suffix(".partial")
        about = {"counts": counts, "options": asdict(writer.options)}
        save_file(tensors, partial, metadata={name: json.dumps(value) for name, value in about.items()})
        partial.rename(path)
        total += len(tensors["tokens"])
        log(f"{path.name}: {total / 1e6:.2f}M tokens so far, {time.monotonic() - start:.0f} s, {counts}")


@dataclass
class Batch:
    """Documents side by side, padded at the end.

    Attributes:
        input_ids: `[B, S]`.
        places: `[N]` indices into `[B * S]` of positions that are not before the answer's first token and whose next
            token belongs to the answer, too.
        depths: `[N]` how far they lie into their answers.
        places_before: B + 1 numbers, how many of the places lie in the rows before each.
    """

    input_ids: torch.Tensor
    places: torch.Tensor
    depths: torch.Tensor
    places_before: list[int]

    def to(self, device: torch.device) -> Batch:
        tensors = (self.input_ids, self.places, self.depths)
        if device.type == "cuda":
            tensors = tuple(tensor.pin_memory() for tensor in tensors)
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in tensors), self.places_before)


class Documents:
    """Prompts and answers, end to end in one tensor.

    Args:
        tokens: all documents' tokens.
        lengths, prompt_lengths: `[D]`, of the documents and of the prompts that they begin with.
        max_length: longer documents are cut.
    """

    def __init__(self, tokens: torch.Tensor, lengths: torch.Tensor, prompt_lengths: torch.Tensor, max_length: int):
        self.tokens = tokens
        self.starts = lengths.long().cumsum(0) - lengths
        self.lengths = lengths.long().clamp(max=max_length)
        self.prompt_lengths = prompt_lengths.long()

    @classmethod
    def load(cls, folder: Path, max_length: int) -> Documents:
        shards = [load_file(path) for path in sorted(folder.glob("shard-*.safetensors"))]
        if not shards:
            raise FileNotFoundError(f"{folder} holds no shard-*.safetensors; write data first.")
        joined = (torch.cat([shard[key] for shard in shards]) for key in ("tokens", "lengths", "prompt_lengths"))
        return cls(*joined, max_length=max_length)

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: torch.Tensor) -> Batch:
        lengths, prompt_lengths = self.lengths[indices, None], self.prompt_lengths[indices, None]
        columns = torch.arange(int(lengths.max()))
        source = (self.starts[indices, None] + columns).clamp(max=len(self.tokens) - 1)
        input_ids = self.tokens[source].long().masked_fill(columns >= lengths, 0)
        is_place = (columns >= prompt_lengths) & (columns < lengths - 1)
        places = is_place.flatten().nonzero()[:, 0]
        depths = (columns - prompt_lengths).flatten()[places]
        return Batch(input_ids, places, depths, [0, *is_place.sum(dim=1).cumsum(dim=0).tolist()])

    def epoch(self, indices: torch.Tensor, tokens_per_batch: int, seed: int, bucket: int = 32) -> list[torch.Tensor]:
        """Shuffle `indices` into batches of documents of like length, at most `tokens_per_batch` padded tokens each.

        Batches and the documents in them are in random order.
        """
        generator = torch.Generator().manual_seed(seed)
        shuffled = indices[torch.randperm(len(indices), generator=generator)]
        order = shuffled[torch.argsort(self.lengths[shuffled] // bucket, stable=True)]
        batches, start = [], 0
        lengths = self.lengths[order].tolist()
        while start < len(order):
            end = start
            longest = 0
            while end < len(order):
                longest = max(longest, lengths[end])
                if end > start and longest * (end + 1 - start) > tokens_per_batch:
                    break
                end += 1
            batches.append(order[start:end][torch.randperm(end - start, generator=generator)])
            start = end
        return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]

    def split(self, held_out: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of the documents to train on, and of `held_out` others."""
        shuffled = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return shuffled[held_out:], shuffled[:held_out]

    def counts(self, vocab_size: int) -> torch.Tensor:
        """`[vocab_size]` how often each token stands anywhere."""
        return torch.bincount(self.tokens, minlength=vocab_size)

    def answer_counts(self, vocab_size: int) -> torch.Tensor:
        """`[vocab_size]` how often each token stands in an answer."""
        document = torch.repeat_interleave(torch.arange(len(self)), torch.diff(self.starts, append=self._end()))
        position = torch.arange(len(self.tokens)) - self.starts[document]
        answers = self.tokens[position >= self.prompt_lengths[document]]
        return torch.bincount(answers, minlength=vocab_size)

    def _end(self) -> torch.Tensor:
        return torch.tensor([len(self.tokens)])


def shard_counts(folder: Path) -> dict[str, int]:
    """What was written and dropped, summed over the shards of `folder`."""
    total: dict[str, int] = {}
    for path in sorted(folder.glob("shard-*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            for key, count in json.loads(shard.metadata()["counts"]).items():
                total[key] = total.get(key, 0) + count
    return total


def written_options(folder: Path) -> dict:
    """How the target wrote the first shard of `folder`, by the names of `WriteOptions`."""
    with safe_open(min(folder.glob("shard-*.safetensors")), framework="pt") as shard:
        return json.loads(shard.metadata()["options"])


def draft_vocabulary(counts: torch.Tensor, size: int, always: list[int]) -> tuple[torch.Tensor, float]:
    """The `size` most frequent tokens as EAGLE-3's `d2t`: sorted ids, less their indices.

    Args:
        counts: `[V]` frequencies.
        size: at most V.
        always: ids that are in the draft vocabulary however rare, such as those that end a turn.

    Returns:
        `d2t` and the share of the counted tokens that the draft vocabulary covers.
    """
    ranked = counts.clone()
    ranked[always] = counts.max() + 1
    ids = ranked.argsort(descending=True, stable=True)[:size].sort().values
    return ids - torch.arange(size), float(counts[ids].sum() / counts.sum().clamp(min=1))
