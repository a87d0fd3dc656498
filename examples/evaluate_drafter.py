"""Measure a drafter's acceptance by generating with it, and fill in its model card.

    python examples/evaluate_drafter.py --target smollm2 --drafter runs/drafter

Texts are generated greedily, once for each K and tree size, through `model.generate(assistant_model=drafter)`.
Acceptance is reported by file of prompts and by length of the prompt, for all texts, and without texts that degenerate
into repetition (`training/repetition.py`), which are easy to draft.
"""

from __future__ import annotations

import argparse
import json
from itertools import product, starmap, takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm
from training.card import lengths_table, prompts_table, write_card
from training.repetition import is_degenerate
from training.targets import load_target
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import AutoDrafter
from hf_specdec.prompt_sources import encode, load_prompts, pad_on_the_left
from hf_specdec.stats import RowStats, add_up

PROMPTS = Path(__file__).parent / "prompts"
DEGENERATE_RULE = (
    "end in an n-gram of at most 16 tokens that stands there at least 4 times in a row, or whose last 64 tokens have "
    "fewer than half of their 4-grams different"
)
# Upper ends of the ranges of prompts' lengths in tokens, with the chat template, and what they are called.
LENGTHS = {256: "up to 256", 1000: "257 to 1000", 2000: "1001 to 2000", 4000: "2001 to 4000"}
LONGER = "over 4000"


class Shape(NamedTuple):
    """Drafts of a round.

    Attributes:
        num_drafts: K, the most drafts in a row.
        tree: N, drafts of a tree; 0 of a chain.
    """

    num_drafts: int
    tree: int = 0

    def __str__(self) -> str:
        return f"{self.num_drafts}, tree of {self.tree}" if self.tree else str(self.num_drafts)


class Text(NamedTuple):
    """The result of one prompt: its length in tokens, with the chat template, whether the text degenerates into
    repetition, and the statistics of its row."""

    prompt_length: int
    is_degenerate: bool
    stats: RowStats

    @property
    def length_name(self) -> str:
        return next((name for end, name in LENGTHS.items() if self.prompt_length <= end), LONGER)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", default="smollm2", help="Hub id, folder or GGUF file of a chat model, or 'smollm2'")
    add("--drafter", required=True, help="Hub id or folder of the drafter")
    add("--prompts", type=Path, nargs="+", default=sorted(PROMPTS.glob("*.jsonl")), help="jsonl files with `prompt`")
    add("--limit", type=int, default=None, help="only the first prompts of each file")
    add("--num-assistant-tokens", "-k", type=int, nargs="+", default=[3, 5, 7])
    add("--tree", type=int, nargs="+", default=[0], help="drafts that are verified as a tree; 0 for chains of K")
    add("--max-new-tokens", type=int, default=128)
    add("--batch-size", type=int, default=16)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--draft-window-size", type=int, default=None, help="tokens of a text that drafting attends to; all by default")
    add("--output", type=Path, default=None, help="JSON file; by default acceptance.json in a local drafter's folder")
    return parser.parse_args(arguments)


def generate_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter,
    prompts: list[str],
    shape: Shape,
    args: argparse.Namespace,
) -> list[Text]:
    """The continuations of `prompts`, with drafts of `shape` in a round."""
    results, ends = [], model.generation_config.eos_token_id  # a GGUF file's tokenizer may name another one
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    for start in tqdm(range(0, len(prompts), args.batch_size), desc=f"K = {shape}", unit="batch"):
        batch = prompts[start : start + args.batch_size]
        inputs = encode(tokenizer, batch, as_chat=True, padding=True, return_tensors="pt").to(model.device)
        output = model.generate(
            **inputs,
            assistant_model=drafter,
            num_assistant_tokens=shape.num_drafts,
            tree=shape.tree,
            max_new_tokens=args.max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
        )
        lengths = inputs["attention_mask"].sum(dim=1).tolist()
        texts = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        for length, text, stats in zip(lengths, texts, output.speculation.rows, strict=True):
            answer = list(takewhile(lambda token: token not in ends, text))  # padding follows
            results.append(Text(length, is_degenerate(np.asarray(answer)), stats))
    return results


def pool(rows: list[RowStats]) -> dict:
    """Statistics of several rows together, as in the report."""
    total = add_up(rows)
    return {
        "texts": len(rows),
        "rounds": total.rounds,
        "tokens": total.committed,
        "acceptance_length": round(total.acceptance_length, 4),
        "per_position": [round(share, 4) for share in total.acceptance_per_position],
    }


def summarize(texts_by_k: dict[Shape, list[Text]]) -> dict:
    """The entry of the report for texts of the same prompts, by K, and for trees also by size."""
    texts = next(iter(texts_by_k.values()))
    result = {"count": len(texts), "degenerate": sum(text.is_degenerate for text in texts), "by_k": {}}
    for shape, texts in texts_by_k.items():
        result["by_k"][str(shape)] = {
            "all": pool([text.stats for text in texts]),
            "without_repetition": pool([text.stats for text in texts if not text.is_degenerate]),
        }
    return result


def summarize_lengths(texts_by_k: dict[Shape, list[Text]]) -> dict:
    """`summarize` for each range of prompt lengths that occurs, shortest first."""
    results = {}
    for name in (*LENGTHS.values(), LONGER):
        chosen = {k: [text for text in texts if text.length_name == name] for k, texts in texts_by_k.items()}
        if any(chosen.values()):
            results[name] = summarize(chosen)
    return results


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    model, tokenizer = load_target(args.target, getattr(torch, args.dtype), torch.device(args.device))
    pad_on_the_left(tokenizer)
    drafter = AutoDrafter.from_pretrained(args.drafter, target=model, draft_window_size=args.draft_window_size)
    report = {
        "dtype": args.dtype,
        "max_new_tokens": args.max_new_tokens,
        "degenerate_rule": DEGENERATE_RULE,
        "prompts": {},
    }
    every = {shape: [] for shape in starmap(Shape, product(args.num_assistant_tokens, args.tree))}
    for path in args.prompts:
        prompts = load_prompts(path, args.limit)
        texts_by_k = {shape: generate_texts(model, tokenizer, drafter, prompts, shape, args) for shape in every}
        report["prompts"][path.stem] = summarize(texts_by_k)
        print(prompts_table(path.stem, report["prompts"][path.stem]))
        for shape, texts in texts_by_k.items():
            every[shape] += texts
        report["prompt_lengths"] = summarize_lengths(every)
        write_report(args, report)
    print(lengths_table(report["prompt_lengths"]))


def write_report(args: argparse.Namespace, report: dict) -> None:
    """Write what has been measured so far, and the model card if it lies in the drafter's folder."""
    folder = Path(args.drafter)
    output = args.output or (folder / "acceptance.json" if folder.is_dir() else None)
    if output is not None:
        output.write_text(json.dumps(report, indent=1), encoding="utf-8")
    if (folder / "training.json").exists() and output == folder / "acceptance.json":
        write_card(folder)


if __name__ == "__main__":
    main()
