"""Generate completions of many prompts, data-parallel: every GPU has a copy of the target and of the drafter.

    accelerate launch examples/generate_batch.py --target <model> --drafter <drafter> \\
        --prompts in.jsonl --output out.jsonl

Prompts are cut into shares of similar length, the longest first. A process takes the next share when it is free, and
generates it by continuous batching: a prompt takes a row of the batch as soon as another has ended. Finished shares are
on disk, so after a crash the same command resumes the run, also with another number of processes. Every line of the
output has a prompt's `id`, its `completion`, the number of its `tokens`, and the statistics of `speculation`; also
`error` where the target has no positions for all of it. `<output>.summary.json` has the totals and the throughput.

Sampling is seeded for every prompt by `--seed` and the prompt's id: a completion depends neither on the process nor on
the other prompts (except for rounding, which depends on the shape of the batch).
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from batch.journal import Journal
from batch.sharing import SharedWork, cut_evenly
from tqdm import tqdm
from transformers import ContinuousBatchingConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.continuous_batching.requests import GenerationOutput

from hf_specdec import AutoDrafter, Drafter
from hf_specdec.device_policy import policy_of
from hf_specdec.loading import load_target, load_tokenizer, set_end_tokens
from hf_specdec.prompt_sources import Prompt, encode, read_prompts
from hf_specdec.stats import RowStats, add_up

# Arguments that no completion depends on: a run may be resumed with other values.
INDIFFERENT = ("prompts", "limit", "output", "batch_size", "tokens_per_batch", "cpu", "compile")
POLL_SECONDS = 0.2
# Prompts of a share for each row. With more, fewer rows are free while the last prompts of a share end; with fewer, a
# crash loses less.
PROMPTS_PER_ROW = 8


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", required=True, help="folder, Hub repository or GGUF file")
    add("--drafter", required=True, help="folder or Hub repository")
    add("--prompts", required=True, help="jsonl file with `prompt` and maybe `id`, or hub:name[:split[:column]]")
    add("--output", type=Path, required=True, help="jsonl file to write")
    add("--limit", type=int, help="only the first prompts")
    add(
        "--num-assistant-tokens",
        "-k",
        type=int,
        help="draft tokens a round; by default chosen round by round, with a temperature the drafter's own number",
    )
    add("--max-new-tokens", type=int, default=256)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--batch-size", type=int, help="rows: prompts at a time; by default 256 on a GPU")
    size.add_argument(
        "--tokens-per-batch", type=int, help="as many rows as have so many tokens: rows x (longest prompt + new tokens)"
    )
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--top-p", type=float)
    add("--top-k", type=int)
    add("--seed", type=int, default=0)
    add("--eos-token", help="the token that ends a completion, where the model's files name a wrong one")
    add("--chat-template", action=argparse.BooleanOptionalAction, help="by default if the tokenizer has one")
    add("--token-ids", action="store_true", help="write the completions' `token_ids` too")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: bfloat16, on a CPU float32")
    add("--cpu", action="store_true", help="compute on the CPU although there is a GPU")
    add("--compile", action=argparse.BooleanOptionalAction, default=False, help="compile rounds on a GPU")
    return parser.parse_args(arguments)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise `ValueError` if an argument is invalid, before anything is loaded."""
    for name in ("limit", "num_assistant_tokens", "max_new_tokens", "batch_size", "tokens_per_batch"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; expected at least 1.")
    if args.temperature < 0:
        raise ValueError(f"--temperature is {args.temperature}; expected 0 (greedy) or more.")
    if args.temperature == 0 and (args.top_p is not None or args.top_k is not None):
        raise ValueError("--top-p and --top-k are for sampling; expected a --temperature above 0 with them.")


def read_work(args: argparse.Namespace) -> tuple[list[Prompt], dict[str, Any]]:
    """The prompts, and the settings that completions depend on; raises `OSError` or `ValueError` as `read_prompts`, and
    if two prompts have the same id."""
    prompts = read_prompts(args.prompts, args.limit)
    if len({prompt.id for prompt in prompts}) < len(prompts):
        seen: set[int | str] = set()
        twice = next(prompt.id for prompt in prompts if prompt.id in seen or seen.add(prompt.id))
        raise ValueError(f"{args.prompts} has two prompts with the id {twice!r}; expected every id once.")
    settings = {name: value for name, value in vars(args).items() if name not in INDIFFERENT}
    settings["prompts"] = hashlib.sha256(repr([tuple(prompt) for prompt in prompts]).encode()).hexdigest()[:16]
    return prompts, settings


def prompt_lengths(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], as_chat: bool | None) -> list[int]:
    """The number of tokens of each prompt; raises `ValueError` if one has none, or `as_chat` and the tokenizer has no
    chat template."""
    if as_chat and tokenizer.chat_template is None:
        raise ValueError("--chat-template is set, but the target's tokenizer has none; expected a chat model.")
    if not prompts:
        return []
    lengths = [len(ids) for ids in encode(tokenizer, [prompt.text for prompt in prompts], as_chat)["input_ids"]]
    if 0 in lengths:
        raise ValueError(f"Prompt {prompts[lengths.index(0)].id!r} has no tokens; expected at least one.")
    return lengths


def row_seed(seed: int, prompt_id: int | str) -> int:
    """Seed of a prompt's sampling: 63 bits of a hash of both arguments."""
    return int.from_bytes(hashlib.sha256(repr((seed, prompt_id)).encode()).digest()[:8], "little") >> 1


class Generator:
    """Generates completions of prompts with a drafter that is bound to the target."""

    def __init__(
        self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, drafter: Drafter, args: argparse.Namespace
    ):
        self._target, self._tokenizer, self._drafter, self._args = target, tokenizer, drafter, args
        ends = target.generation_config.eos_token_id
        self._ends = set() if ends is None else set(ends) if isinstance(ends, list) else {ends}
        self._options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "do_sample": args.temperature > 0}
        if args.temperature > 0:
            # 0 is no top-k; the default of transformers is 50.
            self._options |= {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k or 0}
        if args.num_assistant_tokens is not None:
            self._options["num_assistant_tokens"] = args.num_assistant_tokens

    def complete(self, prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """The line of the output for each prompt."""
        ids = encode(self._tokenizer, [prompt.text for prompt in prompts], self._args.chat_template)["input_ids"]
        rows = num_rows(self._args, max(map(len, ids)))
        results = self._target.generate_batch(
            ids,
            continuous_batching_config=ContinuousBatchingConfig(max_requests_per_batch=rows),
            assistant_model=self._drafter,
            seeds=[row_seed(self._args.seed, prompt.id) for prompt in prompts],
            **self._options,
        )
        return [self._record(*row) for row in zip(prompts, results.values(), self._drafter.stats.rows, strict=True)]

    def _record(self, prompt: Prompt, result: GenerationOutput, stats: RowStats) -> dict[str, Any]:
        tokens = result.generated_tokens
        record = {
            "id": prompt.id,
            "completion": self._tokenizer.decode(tokens, skip_special_tokens=True),
            "tokens": len(tokens),
            "ended": bool(tokens) and tokens[-1] in self._ends,
            "speculation": vars(stats),
        }
        if result.error is not None:
            record["error"] = result.error
        return record | ({"token_ids": tokens} if self._args.token_ids else {})


def generate_all(
    generator: Generator, shares: Sequence[Sequence[Prompt]], work: SharedWork, journal: Journal, bar: tqdm
) -> None:
    """Generate the `shares` that this process claims from `work`; the main process returns when all processes are done.
    `bar` counts the prompts of all processes."""
    initial = bar.n
    while (number := work.claim()) < len(shares):
        start = time.perf_counter()
        journal.write(generator.complete(shares[number]))
        work.report(len(shares[number]), time.perf_counter() - start)
        bar.update(initial + work.done - bar.n)
    if PartialState().is_main_process:
        total = sum(map(len, shares))
        while work.done < total:
            time.sleep(POLL_SECONDS)
            bar.update(initial + work.done - bar.n)


def totals(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Totals over the records of the output."""
    stats = add_up([RowStats(**record["speculation"]) for record in records])
    return {
        "prompts": len(records),
        "tokens": sum(record["tokens"] for record in records),
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "acceptance_length": stats.acceptance_length,
        "acceptance_per_position": stats.acceptance_per_position,
    }


def num_rows(args: argparse.Namespace, longest: int) -> int:
    """Rows for prompts of up to `longest` tokens."""
    if args.tokens_per_batch is not None:
        return max(args.tokens_per_batch // (longest + args.max_new_tokens), 1)
    return args.batch_size


def make_shares(
    prompts: Sequence[Prompt], lengths: Sequence[int], args: argparse.Namespace, num_processes: int
) -> list[list[Prompt]]:
    """Shares of prompts of similar length, the longest first; `lengths` are those of the prompts in tokens."""
    order = sorted(range(len(prompts)), key=lambda index: -lengths[index])
    limit = PROMPTS_PER_ROW * (args.tokens_per_batch or args.batch_size)

    def cost(count: int, longest: int) -> int:
        return count if args.tokens_per_batch is None else count * (longest + args.max_new_tokens)

    cuts = cut_evenly([lengths[index] for index in order], limit, cost, num_processes)
    return [[prompts[order[place]] for place in places] for places in cuts]


def run(args: argparse.Namespace, state: PartialState) -> None:
    """The program of each process."""
    if args.batch_size is None:
        args.batch_size = policy_of(state.device).max_rows
    args.dtype = args.dtype or ("float32" if state.device.type == "cpu" else "bfloat16")
    prompts, settings = read_work(args)
    journal = Journal(args.output, settings)
    (done,) = broadcast_object_list([journal.begin() if state.is_main_process else None])
    if done is None:
        if state.is_main_process:
            print(f"{args.output} is complete already.")
        return
    journal.open(state.process_index)
    work = SharedWork(state)

    tokenizer = load_tokenizer(args.target)
    target = load_target(args.target, getattr(torch, args.dtype), state.device)
    set_end_tokens(target, tokenizer, args.eos_token, ignore_eos=False)
    drafter = AutoDrafter.from_pretrained(args.drafter, target).configure(compile_rounds=args.compile)
    pending = [prompt for prompt in prompts if prompt.id not in done]
    shares = make_shares(pending, prompt_lengths(tokenizer, pending, args.chat_template), args, state.num_processes)

    start = time.perf_counter()
    generator = Generator(target, tokenizer, drafter, args)
    with tqdm(total=len(prompts), initial=len(done), unit="prompt", disable=not state.is_main_process) as bar:
        generate_all(generator, shares, work, journal, bar)
    seconds = time.perf_counter() - start
    if not state.is_main_process:
        return
    records = journal.records()
    now = totals([records[prompt.id] for prompt in pending])
    summary = {
        **totals(list(records.values())),
        "engine": drafter.stats.engine if drafter.stats else None,
        "this_run": {
            "processes": state.num_processes,
            "shares": len(shares),
            "prompts": now["prompts"],
            "tokens": now["tokens"],
            "seconds": round(seconds, 3),
            "tokens_per_second": round(now["tokens"] / seconds, 2),
            "busy_seconds": [round(busy, 3) for busy in work.seconds()],
        },
    }
    journal.finish((records[prompt.id] for prompt in prompts), summary)
    print(
        f"{summary['prompts']} prompts, {summary['tokens']} tokens in {args.output}, acceptance length "
        f"{summary['acceptance_length']:.2f}; this run {summary['this_run']['tokens_per_second']} tokens/s on "
        f"{state.num_processes} processes"
    )


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 on success, 1 after an `OSError` or `ValueError`, whose message is printed on stderr."""
    args = parse_arguments(arguments)
    try:
        check_arguments(args)
        state = PartialState(cpu=args.cpu or not torch.accelerator.is_available())
        try:
            run(args, state)
        finally:
            state.destroy_process_group()
    except (OSError, ValueError) as error:
        print(f"generate_batch: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
