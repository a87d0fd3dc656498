"""Times the first calls of a process, of random weights: with an empty cache of Triton's kernels, and with a full one.

    python tests/helpers/first_call.py --target <config folder> [--drafter <config folder>]

Each measurement is a process of its own. Its clock starts when the weights are on the device. `generate` is a call of
`generate()` with one prompt, and `batch` a call of `generate_batch()` with `--prompts` prompts. `server` is the time of
`hf-specdec serve` from the loaded target to the first answer. `again` is the second call. Prints JSON lines, seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from transformers import ContinuousBatchingConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from hf_specdec.bench.models import load_target, random_drafter
from hf_specdec.drafters.base import Drafter
from hf_specdec.drafters.none import NoDrafter
from hf_specdec.serving.server import ServeSettings

# Tokens of a single prompt, and of many prompts, most of them short.
PROMPT, SHORT, LONG, SHARE_OF_LONG = 128, (20, 120), (200, 1400), 0.1


class FirstToken(BaseStreamer):
    """Notes the time of the first new token, which comes after the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def random_prompt(model: PreTrainedModel, rng: random.Random, length: int) -> list[int]:
    return rng.choices(range(model.config.get_text_config().vocab_size), k=length)


def time_generate(model: PreTrainedModel, drafter: Drafter, args: argparse.Namespace) -> dict[str, float]:
    found, rng = {}, random.Random(0)
    for suffix in ("", "_again"):
        ids = torch.tensor([random_prompt(model, rng, PROMPT)], device=model.device)
        streamer, start = FirstToken(), time.perf_counter()
        options = {"max_new_tokens": args.max_new_tokens, "do_sample": False, "streamer": streamer}
        model.generate(ids, attention_mask=torch.ones_like(ids), **options, assistant_model=drafter)
        found[f"first_token{suffix}"] = streamer.times[1] - start
        found[f"call{suffix}"] = time.perf_counter() - start
    return found


def time_batch(model: PreTrainedModel, drafter: Drafter, args: argparse.Namespace) -> dict[str, float]:
    found, rng = {}, random.Random(0)
    for suffix in ("", "_again"):
        lengths = [rng.randint(*(LONG if rng.random() < SHARE_OF_LONG else SHORT)) for _ in range(args.prompts)]
        prompts, start = [random_prompt(model, rng, length) for length in lengths], time.perf_counter()
        options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
        model.generate_batch(prompts, None, ContinuousBatchingConfig(), assistant_model=drafter, **options)
        found[f"call{suffix}"] = time.perf_counter() - start
    return found


def time_server(model: PreTrainedModel, drafter: Drafter, args: argparse.Namespace) -> dict[str, float]:
    start = time.perf_counter()
    manager = ServeSettings(lambda _: drafter).manager_for(model, None)
    found, rng = {"ready": time.perf_counter() - start}, random.Random(0)
    for suffix in ("", "_again"):
        asked = time.perf_counter()
        name = manager.add_request(random_prompt(model, rng, PROMPT), max_new_tokens=args.max_new_tokens)
        result = manager.get_result(name)
        if result.error is not None:
            raise RuntimeError(result.error)
        found[f"request{suffix}"] = time.perf_counter() - asked
    while not manager.warmed_up:
        if not manager.is_running():
            raise RuntimeError("the manager has ended") from manager.background_thread_status.fatal_error
        time.sleep(0.05)
    found["all_sizes"] = time.perf_counter() - start
    manager.stop()
    return found


CASES = {"generate": time_generate, "batch": time_batch, "server": time_server}


def measure(case: str, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of the first calls of this process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_target(args.target, dtype, device, random_weights=True)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    drafter = NoDrafter(model) if args.drafter is None else random_drafter(args.drafter, model)
    if args.drafter is not None and args.num_assistant_tokens is not None:
        drafter.configure(args.num_assistant_tokens)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return CASES[case](model, drafter, args)


def run_process(case: str, cache: str) -> dict[str, Any]:
    """The output of a process that measures `case`, started by the same command."""
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", case]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_CACHE_DIR": cache}, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, help="folder with a config.json")
    parser.add_argument(
        "--drafter", help="folder with the config.json of a drafter; without one, rounds have no drafts"
    )
    parser.add_argument("--num-assistant-tokens", "-k", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=480)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        print(json.dumps(measure(args.measure, args)))
        return
    for case in args.cases:
        with tempfile.TemporaryDirectory() as cache:
            for name in ("empty", "full"):
                found = {key: round(value, 2) for key, value in run_process(case, cache).items()}
                print(json.dumps({"case": case, "cache": name, **found}), flush=True)


if __name__ == "__main__":
    main()
