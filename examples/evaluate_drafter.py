"""Measure a drafter's acceptance by generating with it, and fill in its model card.

    python examples/evaluate_drafter.py --target smollm2 --drafter runs/drafter

Texts are generated greedily, once for each K, through `model.generate(assistant_model=drafter)`. Acceptance is
reported for all texts, and without those that degenerate into repetition (`training/repetition.py`), which are easy
to draft.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from training.card import prompts_table, write_card
from training.repetition import is_degenerate
from training.targets import load_target
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import AutoDrafter
from hf_specdec.prompt_sources import load_prompts
from hf_specdec.stats import RowStats, add_up

PROMPTS = Path(__file__).parent / "prompts"
DEGENERATE_RULE = (
    "end in an n-gram of at most 16 tokens that stands there at least 4 times in a row, or whose last 64 tokens have "
    "fewer than half of their 4-grams different"
)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", default="smollm2", help="Hub id or folder of a chat model, or 'smollm2'")
    add("--drafter", required=True, help="Hub id or folder of the drafter")
    add("--prompts", type=Path, nargs="+", default=sorted(PROMPTS.glob("*.jsonl")), help="jsonl files with `prompt`")
    add("--limit", type=int, default=None, help="only the first prompts of each file")
    add("--num-assistant-tokens", "-k", type=int, nargs="+", default=[3, 5, 7])
    add("--max-new-tokens", type=int, default=128)
    add("--batch-size", type=int, default=16)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--output", type=Path, default=None, help="JSON file; by default acceptance.json in a local drafter's folder")
    return parser.parse_args(arguments)


def generate_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter,
    prompts: list[str],
    num_drafts: int,
    args: argparse.Namespace,
) -> list[tuple[bool, object]]:
    """For each prompt, whether its text degenerates into repetition, and the statistics of its row."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    results = []
    for start in tqdm(range(0, len(chats), args.batch_size), desc=f"K = {num_drafts}", unit="batch"):
        inputs = tokenizer.apply_chat_template(
            chats[start : start + args.batch_size],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        ).to(model.device)
        output = model.generate(
            **inputs,
            assistant_model=drafter,
            num_assistant_tokens=num_drafts,
            max_new_tokens=args.max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
        )
        texts = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        for text, stats in zip(texts, output.speculation.rows, strict=True):
            results.append((is_degenerate(without_end(text, tokenizer.eos_token_id)), stats))
    return results


def without_end(tokens: list[int], eos_token_id: int) -> np.ndarray:
    """A text without its end-of-sequence token and the padding after it."""
    return np.asarray(tokens[: tokens.index(eos_token_id)] if eos_token_id in tokens else tokens)


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


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    model, tokenizer = load_target(args.target, getattr(torch, args.dtype), torch.device(args.device))
    tokenizer.padding_side = "left"
    drafter = AutoDrafter.from_pretrained(args.drafter, target=model, compile=False)
    report = {
        "dtype": args.dtype,
        "max_new_tokens": args.max_new_tokens,
        "degenerate_rule": DEGENERATE_RULE,
        "prompts": {},
    }
    for path in args.prompts:
        prompts = load_prompts(path, args.limit)
        result = {"count": len(prompts), "degenerate": 0, "by_k": {}}
        for num_drafts in args.num_assistant_tokens:
            rows = generate_rows(model, tokenizer, drafter, prompts, num_drafts, args)
            result["degenerate"] = sum(degenerate for degenerate, _ in rows)
            result["by_k"][str(num_drafts)] = {
                "all": pool([stats for _, stats in rows]),
                "without_repetition": pool([stats for degenerate, stats in rows if not degenerate]),
            }
        report["prompts"][path.stem] = result
        print(prompts_table(path.stem, result))

    folder = Path(args.drafter)
    output = args.output or (folder / "acceptance.json" if folder.is_dir() else None)
    if output is not None:
        output.write_text(json.dumps(report, indent=1), encoding="utf-8")
    if (folder / "training.json").exists() and output == folder / "acceptance.json":
        write_card(folder)


if __name__ == "__main__":
    main()
