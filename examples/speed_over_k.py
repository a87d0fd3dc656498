"""Tokens a second over K, with each of several drafters and without: which drafter wins where.

    python examples/speed_over_k.py --drafters model_cards/smollm2-135m-instruct-eagle3 ...

One prompt at a time, greedy, a plain `generate()` in the same run; times include everything that `generate()` does.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from training.prompts import load_prompts
from training.targets import load_target
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import AutoDrafter

CARDS = Path(__file__).parents[1] / "model_cards"
PROMPTS = Path(__file__).parent / "prompts" / "chat.jsonl"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", default="smollm2", help="Hub id or folder of a chat model, or 'smollm2'")
    add("--drafters", nargs="+", default=sorted(str(path.parent) for path in CARDS.glob("*/model*.safetensors*")))
    add("--prompts", type=Path, default=PROMPTS, help="jsonl file with `prompt`")
    add("--limit", type=int, default=8, help="only the first prompts")
    add("--num-assistant-tokens", "-k", type=int, nargs="+", default=list(range(1, 9)))
    add("--max-new-tokens", type=int, default=96)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16" if torch.cuda.is_available() else "float32")
    add("--output", type=Path, help="JSON file for the figures")
    return parser.parse_args(arguments)


def measure(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], max_new_tokens: int, **options
) -> dict:
    """Tokens a second over all prompts, with what was committed a round if `options` name a drafter."""
    drafter = options.get("assistant_model")
    tokens, seconds, rounds, committed = 0, 0.0, 0, 0
    for index, prompt in enumerate([prompts[0], *prompts]):
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        start = time.perf_counter()
        out = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens, **options).tolist()
        took = time.perf_counter() - start
        if index == 0:  # warm-up
            continue
        seconds += took
        tokens += len(out[0]) - inputs["input_ids"].shape[1]
        if drafter is not None:
            rounds += drafter.stats.rounds
            committed += drafter.stats.committed
    result = {"tokens_per_second": round(tokens / seconds, 2)}
    if rounds:
        result |= {"acceptance_length": round(committed / rounds, 3), "ms_per_round": round(1e3 * seconds / rounds, 2)}
    return result


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    model, tokenizer = load_target(args.target, getattr(torch, args.dtype), torch.device(args.device))
    prompts = [prompt["prompt"] for prompt in load_prompts(args.prompts)][: args.limit]
    plain = measure(model, tokenizer, prompts, args.max_new_tokens)
    print(f"plain: {plain['tokens_per_second']} tokens/s")
    rows = []
    for path in args.drafters:
        drafter = AutoDrafter.from_pretrained(path, target=model)
        for num_drafts in args.num_assistant_tokens:
            found = measure(
                model,
                tokenizer,
                prompts,
                args.max_new_tokens,
                assistant_model=drafter,
                num_assistant_tokens=num_drafts,
            )
            speedup = round(found["tokens_per_second"] / plain["tokens_per_second"], 3)
            rows.append({"drafter": Path(path).name, "k": num_drafts, **found, "speedup": speedup})
            print(json.dumps(rows[-1]))
    if args.output:
        device = torch.cuda.get_device_name() if args.device != "cpu" else "CPU"
        about = {"device": device, "dtype": args.dtype, "prompts": len(prompts), "plain": plain}
        args.output.write_text(json.dumps({**about, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
