"""Training data: documents, each a prompt and the target's answer, and batches of them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hf_specdec.training.objective import Batch

# Tokens of a bucket of document lengths; buckets of prompt lengths in each doubling.
LENGTH_BUCKET, BUCKETS_PER_DOUBLING = 32, 6
# Cost of a token of a prompt, as a share of an answer's: the target and the drafter's keys read it.
PROMPT_COST = 0.25


class Documents:
    """Prompts and answers, end to end in one tensor, with the lengths `[D]` of documents and of their prompts.
    Documents longer than `max_length` are cut."""

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
        return Batch.of(self.tokens[source].long(), lengths, prompt_lengths)

    def epoch(self, indices: torch.Tensor, tokens_per_batch: int, seed: int) -> list[torch.Tensor]:
        """Random batches of documents whose prompts, and whose answers, are of similar length.

        A batch's padded tokens are at most `tokens_per_batch`; in every document, as many tokens as the shortest prompt
        has count `PROMPT_COST`. The order of the batches, and of the documents in each, is random.
        """
        generator = torch.Generator().manual_seed(seed)
        shuffled = indices[torch.randperm(len(indices), generator=generator)]
        by_length = shuffled[torch.argsort(self.lengths[shuffled] // LENGTH_BUCKET, stable=True)]
        prompt_bucket = (self.prompt_lengths[by_length].clamp(min=1).log2() * BUCKETS_PER_DOUBLING).int()
        order = by_length[torch.argsort(prompt_bucket, stable=True)]
        batches, start = [], 0
        lengths, prompt_lengths = self.lengths[order].tolist(), self.prompt_lengths[order].tolist()
        while start < len(order):
            end, longest, shortest_prompt = start, 0, prompt_lengths[start]
            while end < len(order):
                longest, shortest_prompt = max(longest, lengths[end]), min(shortest_prompt, prompt_lengths[end])
                cost = longest - (1 - PROMPT_COST) * shortest_prompt
                if end > start and cost * (end + 1 - start) > tokens_per_batch:
                    break
                end += 1
            batches.append(order[start:end][torch.randperm(end - start, generator=generator)])
            start = end
        return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]

    def split(self, held_out: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of the documents to train on, and of `held_out` others, with two tokens of answer at least."""
        usable = (self.lengths - self.prompt_lengths >= 2).nonzero()[:, 0]
        shuffled = usable[torch.randperm(len(usable), generator=torch.Generator().manual_seed(seed))]
        return shuffled[held_out:], shuffled[:held_out]

    def counts(self, vocab_size: int) -> torch.Tensor:
        """`[vocab_size]`, how often each token occurs in the documents."""
        return torch.bincount(self.tokens, minlength=vocab_size)

    def answer_counts(self, vocab_size: int) -> torch.Tensor:
        """`[vocab_size]`, how often each token occurs in the answers."""
        end = torch.tensor([len(self.tokens)])
        document = torch.repeat_interleave(torch.arange(len(self)), torch.diff(self.starts, append=end))
        position = torch.arange(len(self.tokens)) - self.starts[document]
        answers = self.tokens[position >= self.prompt_lengths[document]]
        return torch.bincount(answers, minlength=vocab_size)


def shard_counts(folder: Path) -> dict[str, int]:
    """Counts of what was generated and dropped, summed over the shards of `folder`."""
    total: dict[str, int] = {}
    for path in sorted(folder.glob("shard-*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            for key, count in json.loads(shard.metadata()["counts"]).items():
                total[key] = total.get(key, 0) + count
    return total


def written_options(folder: Path) -> dict:
    """The `WriteOptions` of the first shard of `folder`, by name, with the `prompts` of all shards."""
    options = []
    for path in sorted(folder.glob("shard-*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            options.append(json.loads(shard.metadata()["options"]))
    return {**options[0], "prompts": sorted({source for one in options for source in one.get("prompts", ())})}


def draft_vocabulary(counts: torch.Tensor, size: int, always: list[int]) -> tuple[torch.Tensor, float]:
    """The `size` most frequent tokens by their `counts` `[V]` as EAGLE-3's `d2t`, sorted ids minus their indices, and
    the share of all tokens that they cover. The ids `always`, such as ends of turns, are included however rare."""
    ranked = counts.clone()
    ranked[always] = counts.max() + 1
    ids = ranked.argsort(descending=True, stable=True)[:size].sort().values
    return ids - torch.arange(size), float(counts[ids].sum() / counts.sum().clamp(min=1))
