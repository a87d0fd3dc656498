"""The subcommand `bench`: arguments, order of the cases, output."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import product, starmap
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import PreTrainedModel

from ..auto import AutoDrafter
from ..auto_k.auto_drafts import CANDIDATES
from ..checkpoints.checkpoint import read_config_file
from ..config import AUTO, check_least, check_num_or_auto, number_or_text
from ..drafters import Drafter
from ..drafters.base import KV_CACHE_DTYPES, check_num_nodes
from ..drafters.none import NoDrafter
from ..loading import GGUF_SUFFIX, load_tokenizer, set_end_tokens, usable_device
from ..parallel.tensor_parallel import is_first_process, local_rank, num_processes
from ..prompt_sources import load_prompts
from .batches import Batch, random_batches, text_batches
from .measure import Bench, Case, Setting, compare, short_name
from .models import load_target, random_drafter
from .report import check_matplotlib, draw, environment, table
from .synthetic import acceptance_rates, check_acceptance, scripted_acceptance
from .traffic import copy_bandwidth

BASELINES = ("dynamic", "static", "engine")
DRAFT_PROBS = {"on": True, "off": False, "auto": "auto"}
DTYPES = ("float32", "bfloat16", "float16")


def add_bench(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure how fast a target generates with drafters and without",
        description="Measure how fast a target generates with drafters and without, everything in one run.",
    )
    add, flag = parser.add_argument, partial(parser.add_argument, action="store_true")
    add("--target", required=True, help="folder, Hub repository or GGUF file of the target")
    add("--drafter", nargs="*", default=[], help="folders or Hub repositories of drafters for it")
    add(
        "--num-assistant-tokens",
        "-k",
        type=number_or_text,
        nargs="+",
        help='draft tokens a round; "auto" to choose them round by round; a drafter\'s own number by default',
    )
    add(
        "--tree",
        type=number_or_text,
        nargs="+",
        default=[0],
        help='drafts a round that are verified as a tree of up to K in a row, 0 for a chain of K; "auto" with -k auto',
    )
    add("--batch-size", type=int, nargs="+", default=[1])
    add("--baselines", nargs="*", choices=BASELINES, default=list(BASELINES), help="what to compare with")
    add("--prompts", help="jsonl file with `prompt`, or hub:NAME[:SPLIT[:COLUMN]]; 16 short ones of our own by default")
    add("--limit", type=int, help="only the first prompts; with --random-weights how many, by default one batch")
    add("--max-new-tokens", type=int, default=128)
    add("--temperature", type=float, nargs="+", default=[0.0], help="0 for greedy decoding")
    add(
        "--draft-probs",
        nargs="+",
        choices=DRAFT_PROBS,
        default=["auto"],
        help="when sampling, draw drafts from the drafter's distribution, take its best, or decide by temperature",
    )
    add("--eos-token", help="the token that ends an answer, where the checkpoint names a wrong one")
    flag("--ignore-eos", help="let every answer become --max-new-tokens long")
    # How every case is run.
    add("--dtype", choices=DTYPES, help="bfloat16 on a GPU, else float32, by default")
    add("--device", help="a GPU if there is one")
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="whether rounds are compiled (by default not), and steps with the static cache (by default they are)",
    )
    flag("--batch-invariant", help="drafters and the engine compute the same bits for every batch and number of drafts")
    add(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        help="fp8: drafters and the engine store keys and values as float8, in half the memory",
    )
    add("--draft-window-size", type=int, default=None, help="tokens of a text that drafting attends to, all by default")
    add("--runs", type=int, default=3, help="measured runs of every case, after one that is not counted")
    flag("--continuous", help="drafters and the engine run all prompts in one generate_batch() on --batch-size rows")
    flag("--serve", help="drafters and the engine run the prompts by a manager, --batch-size at once; latencies")
    flag("--gpu-time", help="also record how long the GPU itself computes, in calls of their own")
    flag("--random-weights", help="read config.json files only; prompts are random tokens")
    add("--prompt-length", type=int, nargs="+", default=[128], help="tokens of the prompts of --random-weights")
    flag("--tensor-parallel", help="split the target over the processes of torchrun, with which this is to be started")
    add(
        "--synthetic-acceptance",
        type=float,
        nargs="+",
        help="accept drafts by chance: so many tokens a round on average, or these shares by position",
    )
    # What is shown.
    flag("--json", help="print one JSON object instead of the table")
    add("--output", type=Path, help="JSON file for all figures")
    add("--plots", type=Path, help="folder for pictures; needs matplotlib")
    parser.set_defaults(run=run_bench)


def run_bench(arguments: argparse.Namespace) -> None:
    """Measure every case and print the table. Raises `OSError` or `ValueError` if an argument is invalid, a file does
    not exist, or no case could be measured."""
    check_arguments(arguments)
    was_initialized = dist.is_initialized()
    try:
        measure(arguments)
    finally:
        if dist.is_initialized() and not was_initialized:
            dist.destroy_process_group()


def check_drafters(names: Sequence[str]) -> None:
    """Report drafters that cannot be read, before the baselines are measured; raise `ValueError` if none can be."""
    missing = {}
    for name in names:
        try:
            read_config_file(name)
        except (OSError, ValueError) as error:
            missing[name] = " ".join(str(error).split())
    if missing and len(missing) == len(set(names)):
        raise ValueError(f"No drafter could be read: {'; '.join(f'{name}: {why}' for name, why in missing.items())}")
    for name, why in missing.items():
        if is_first_process():
            print(f"hf-specdec: {name} will not be measured: {why}", file=sys.stderr)


def measure(arguments: argparse.Namespace) -> None:
    """`run_bench` on one rank; rank 0 alone writes files and prints."""
    check_drafters(arguments.drafter)
    device = find_device(arguments.device, arguments.tensor_parallel)
    if not is_first_process():
        arguments.output = arguments.plots = None
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, arguments.dtype or ("float32" if device.type == "cpu" else "bfloat16"))
    prompts = None if arguments.random_weights else load_prompts(arguments.prompts, arguments.limit)
    bandwidth = copy_bandwidth(device)  # while there is memory for two large buffers
    target = load_target(arguments.target, dtype, device, arguments.random_weights, arguments.tensor_parallel)
    hidden = None if is_first_process() else True  # None: hidden without a terminal
    with tqdm(total=count_passes(arguments), desc="bench", unit="run", disable=hidden, leave=False) as bar:
        bench = Bench(
            target=target,
            batches=batch_maker(arguments, prompts, target),
            options={"max_new_tokens": arguments.max_new_tokens},
            runs=arguments.runs,
            bandwidth=bandwidth,
            gpu_time=arguments.gpu_time,
            continuous=arguments.continuous,
            serve=arguments.serve,
            is_scripted=arguments.synthetic_acceptance is not None,
            progress=bar.update,
        )
        report = {
            "environment": environment(device)
            | {"dtype": str(dtype).removeprefix("torch."), "processes": num_processes()},
            "arguments": {name: one for name, one in vars(arguments).items() if name not in ("run", "command")},
            "copy_bandwidth": bandwidth,
            "drift": None,
        }
        cases: list[Case] = []
        for case in measure_all(bench, arguments):
            cases.append(case)
            save(report, cases, arguments.output)  # keeps the figures so far if the next case crashes the process
        report["drift"] = drift = measure_drift(bench, cases, arguments)
    save(report, cases, arguments.output)
    if is_first_process():
        print(json.dumps(report, indent=1, default=os.fspath) if arguments.json else table(cases, drift))
    check_measured(cases, arguments)
    if arguments.plots is not None:
        draw(cases, caption(report), arguments.plots)


def check_measured(cases: list[Case], arguments: argparse.Namespace) -> None:
    if all(case.error is not None for case in cases):
        raise ValueError("No case could be measured.")
    drafted = [case for case in cases if case.name in arguments.drafter]
    if drafted and all(case.error is not None for case in drafted):
        raise ValueError("No drafter could be measured.")


def save(report: dict[str, Any], cases: list[Case], output: Path | None) -> None:
    """Sort `cases` by setting, compare them with the baselines, add them to `report`, and write it to `output`."""
    cases.sort(key=lambda case: case.setting)
    compare(cases)
    report["cases"] = [asdict(case) for case in cases]
    if output is not None:
        output.write_text(json.dumps(report, indent=1, default=os.fspath), encoding="utf-8")


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise `ValueError` if an argument is invalid, before anything is loaded."""
    for k in arguments.num_assistant_tokens or ():
        check_num_or_auto(k)
    for tree in arguments.tree:
        check_num_nodes(tree)
    check_least(arguments, max_new_tokens=2, runs=1, prompt_length=1, batch_size=1, limit=1)
    for temperature in arguments.temperature:
        if not 0 <= temperature < math.inf:
            raise ValueError(f"--temperature is {temperature}; expected 0 for greedy decoding, or more.")
    if not arguments.drafter and not arguments.baselines:
        raise ValueError("There is nothing to measure: no --drafter and no --baselines.")
    if arguments.random_weights and arguments.prompts is not None:
        raise ValueError("--random-weights answers random tokens; drop --prompts or --random-weights.")
    if arguments.synthetic_acceptance is not None:
        check_acceptance(arguments.synthetic_acceptance)
    if arguments.plots is not None:
        check_matplotlib()
    for name in ("continuous", "serve"):
        if getattr(arguments, name) and arguments.gpu_time:
            raise ValueError(f"--gpu-time times rounds of one batch; drop it, or --{name}.")
    if arguments.continuous and arguments.serve:
        raise ValueError("--continuous and --serve are two ways to run the prompts; drop one of them.")
    if arguments.serve and arguments.tensor_parallel:
        raise ValueError("--serve runs in one process; drop it, or --tensor-parallel.")
    if arguments.tensor_parallel and num_processes() == 1:
        raise ValueError(
            "--tensor-parallel splits the target over processes, but this is the only one; expected several. Start it "
            "with torchrun --nproc-per-node 2 -m hf_specdec.cli bench ..."
        )
    if not arguments.tensor_parallel and num_processes() > 1:
        raise ValueError(
            f"This is one of {num_processes()} processes, which would disturb each other; expected one, or "
            "--tensor-parallel for a target that is split over them."
        )
    if arguments.tensor_parallel and Path(arguments.target).suffix == GGUF_SUFFIX:
        raise ValueError(
            f"--target is the GGUF file {arguments.target}, which transformers reads whole; expected a folder or Hub "
            "repository with --tensor-parallel."
        )


def find_device(name: str | None, tensor_parallel: bool) -> torch.device:
    """`usable_device`; with `tensor_parallel` the rank's device, of the type that transformers uses."""
    if tensor_parallel:
        kind = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        if name not in (None, kind.type):
            raise ValueError(
                f"--device is {name!r}, but transformers splits a target over devices of type {kind.type} here; "
                "expected no --device with --tensor-parallel. To compute on CPUs set CUDA_VISIBLE_DEVICES to nothing."
            )
        if kind.type == "cpu":
            return kind
        torch.accelerator.set_device_index(local_rank())
        name = f"{kind.type}:{local_rank()}"
    return usable_device(name)


def batch_maker(
    arguments: argparse.Namespace, prompts: list[str] | None, target: PreTrainedModel
) -> Callable[[Case], list[Batch]]:
    """A function that makes the batches of a case. Also sets the end-of-sequence tokens of `target`."""
    ignore_eos = arguments.ignore_eos or arguments.random_weights or arguments.synthetic_acceptance is not None
    if prompts is None:
        set_end_tokens(target, None, arguments.eos_token, ignore_eos)
        vocab_size, limit = target.config.get_text_config().vocab_size, arguments.limit
        return lambda case: random_batches(
            vocab_size, case.prompt_length, limit or case.batch_size, case.batch_size, target.device
        )
    tokenizer = load_tokenizer(arguments.target)
    set_end_tokens(target, tokenizer, arguments.eos_token, ignore_eos)
    return lambda case: text_batches(tokenizer, prompts, case.batch_size, target.device)


def settings(arguments: argparse.Namespace) -> list[Setting]:
    """The settings in which drafters and baselines are measured; with prompt lengths if prompts are random tokens."""
    lengths = arguments.prompt_length if arguments.random_weights else [None]
    return list(starmap(Setting, product(arguments.batch_size, arguments.temperature, lengths)))


def drafter_cases(name: str, arguments: argparse.Namespace) -> list[Case]:
    """The cases of the drafter called `name`; K is None for the drafter's own."""
    return [
        Case(name, k, *setting, draft_probs, tree)
        for setting in settings(arguments)
        for tree in arguments.tree
        for draft_probs in (arguments.draft_probs if setting.temperature > 0 and tree in (0, AUTO) else [None])
        for k in arguments.num_assistant_tokens or [None]
    ]


def measure_all(bench: Bench, arguments: argparse.Namespace) -> Iterator[Case]:
    for setting in settings(arguments):
        for name in BASELINES:
            if name in arguments.baselines:
                yield measure_baseline(bench, name, setting, arguments)
    for name in arguments.drafter:
        yield from measure_drafter(bench, name, arguments)


def configured(drafter: Drafter, arguments: argparse.Namespace) -> Drafter:
    return drafter.configure(
        compile_rounds=bool(arguments.compile),
        batch_invariant=arguments.batch_invariant,
        kv_cache_dtype=arguments.kv_cache_dtype,
        draft_window_size=None if isinstance(drafter, NoDrafter) else arguments.draft_window_size,
    )


def measure_baseline(bench: Bench, name: str, setting: Setting, arguments: argparse.Namespace) -> Case:
    """Plain `generate()` with either cache, or the static engine without a drafter."""
    options = {
        "dynamic": {},
        "static": {"cache_implementation": "static", "disable_compile": arguments.compile is False},
        "engine": {"drafter": configured(NoDrafter(bench.target), arguments)},
    }
    case = Case(name, 0 if name == "engine" else None, *setting)
    return bench.measure(case, **options[name])


def measure_drift(bench: Bench, cases: list[Case], arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Measure the first baseline again, and compare: how much slower has the machine become?

    Cases are measured one after the other, so their ratios are reliable only if this ratio is near 1. None if there is
    no baseline, or only one case.
    """
    first = next((case for case in cases if case.name in BASELINES and case.ms_per_round is not None), None)
    if first is None or len(cases) == 1:
        return None
    again = measure_baseline(bench, first.name, first.setting, arguments)
    if again.ms_per_round is None:
        return None
    ratio = again.ms_per_round.median / first.ms_per_round.median
    return {"case": first.name, **first.setting._asdict(), "ratio": ratio}


def measure_drafter(bench: Bench, name: str, arguments: argparse.Namespace) -> Iterator[Case]:
    """Load the drafter called `name`, measure it at every K and setting, and free it."""
    try:
        load = random_drafter if arguments.random_weights else AutoDrafter.from_pretrained
        drafter = configured(load(name, bench.target), arguments)
        if arguments.synthetic_acceptance is not None:
            drafter.configure(engine="static")  # in the stock engine transformers verifies
    except Exception as error:  # this drafter's cases fail; the others are measured
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"
        yield from (replace(case, error=message) for case in drafter_cases(name, arguments))
        return
    for case in drafter_cases(name, arguments):
        case.k = case.k or drafter.num_assistant_tokens
        if case.draft_probs is not None:
            drafter.configure(draft_probs=DRAFT_PROBS[case.draft_probs])
        yield bench.measure(case, drafter, partial(acceptance, arguments, drafter, case))


def acceptance(arguments: argparse.Namespace, drafter: Drafter, case: Case) -> AbstractContextManager:
    """The context of a drafter's `generate()` calls: scripted acceptance with `--synthetic-acceptance`. With K = "auto"
    an acceptance length is meant for the drafter's own K."""
    asked = arguments.synthetic_acceptance
    if asked is None:
        return nullcontext()
    if case.k != AUTO:
        rates = acceptance_rates(asked, case.k if case.tree in (0, AUTO) else min(case.k, case.tree))
    elif len(asked) > 1:
        rates = acceptance_rates(asked, CANDIDATES[-1])
    else:
        first = acceptance_rates(asked, drafter.num_own_draft_tokens)[0]
        rates = [first**step for step in range(1, CANDIDATES[-1] + 1)]
    return scripted_acceptance(rates, drafter.device)


def caption(report: dict[str, Any]) -> str:
    """The title of the plots: target, dtype, whether weights or acceptance are synthetic, device."""
    stated, found = report["arguments"], report["environment"]
    synthetic = [name.replace("_", " ") for name in ("random_weights", "synthetic_acceptance") if stated[name]]
    return ", ".join([short_name(stated["target"]), found["dtype"], *synthetic]) + "\n" + found["device"]


def count_passes(arguments: argparse.Namespace) -> int:
    baselines = len(arguments.baselines) * len(settings(arguments)) + bool(arguments.baselines)
    drafted = sum(len(drafter_cases(name, arguments)) for name in arguments.drafter)
    return (baselines + drafted) * (arguments.runs + 1)
