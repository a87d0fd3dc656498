"""How long rounds of every class of the zoo take on a GPU, captured as they are and compiled by `torch.compile`.

    python tests/helpers/zoo_rounds.py --processes 16 --write tests/zoo/rounds.json
    python tests/helpers/zoo_rounds.py --targets docs/targets.md

A round without a drafter, of a batch of one, in the shrunk configurations of `zoo_models` and in bfloat16. Tiny layers
leave nothing but launches, so the ratio tells how many operations of a class have no kernel of this package. The file
has, for each class, the GPU's microseconds of a round not compiled and compiled, or why there are none; the second
command writes a section of docs/targets.md from it, as `zoo.py --write` does. Processes are on the GPUs in turn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch
import transformers
import triton
from zoo_models import build, class_names
from zoo_outcomes import last_line
from zoo_workers import Worker, serve

from hf_specdec import NoDrafter
from hf_specdec.bench.batches import random_batches
from hf_specdec.bench.measure import Bench, Case

NEW_TOKENS = 48
PROMPT_LENGTH = 16
SECONDS_PER_CLASS = 150
FILE = Path(__file__).parents[1] / "zoo" / "rounds.json"
HEADING = "## Compiled rounds"
# Lower bounds of the groups of classes in docs/targets.md: a round not compiled over a compiled one.
GROUPS = (2.0, 1.5, 1.2, 1.05, 0.0)


def section(found: dict) -> list[str]:
    """The lines of docs/targets.md about the content of `FILE`."""
    ratios = {name: one[0] / one[1] for name, one in found["rounds"].items() if isinstance(one, list)}
    reasons = Counter(one for one in found["rounds"].values() if isinstance(one, str))
    groups: dict[float, list[str]] = {bound: [] for bound in GROUPS}
    for name, ratio in sorted(ratios.items(), key=lambda pair: (-pair[1], pair[0])):
        groups[next(bound for bound in GROUPS if ratio >= bound)].append(f"{name} {ratio:.2f}")
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return [
        HEADING,
        "",
        "The GPU's time of a captured round over that of a round with `compile=True`, without a drafter, batch 1, "
        f"bfloat16, {found['device']}, {versions}. Layers of these tiny models leave nothing but launches: in a real "
        "model the difference is smaller. It is what operations without a kernel of this package cost. "
        "`python tests/helpers/zoo_rounds.py` measures it.",
        "",
        "| times as long | classes |",
        "|---|---|",
        *(f"| {f'at least {bound}' if bound else 'less'} | {', '.join(of)} |" for bound, of in groups.items() if of),
        "",
        f"Not measured: {sum(reasons.values())} classes, which in these settings do not run on the static engine, or "
        "whose rounds cannot be compiled.",
        "",
    ]


def with_section(text: str, found: dict) -> str:
    """docs/targets.md, `text`, with `section(found)` before its section about images."""
    before, images = text.split("## Images")
    return before.partition(HEADING)[0] + "\n".join(section(found)) + "\n## Images" + images


def rounds_of(name: str) -> list[float] | str:
    """Microseconds of a round of the class `name`, not compiled and compiled, or why there are none. On a CPU they are
    wall times."""
    torch._dynamo.reset()  # what was compiled for the class before
    model = build(name).to("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16)
    times = []
    for compiled in (False, True):
        batches = random_batches(min(model.config.get_text_config().vocab_size, 64), PROMPT_LENGTH, 1, 1, model.device)
        options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
        bench = Bench(model, lambda _, found=batches: found, options, runs=2, bandwidth=1.0, gpu_time=True)
        drafter = NoDrafter(model)
        drafter.configure(compile_rounds=compiled)
        case = bench.measure(Case("engine", 0, 1), drafter)
        if case.error:
            return case.error
        if model.device.type == "cuda" and not case.engine.endswith("not compiled" if not compiled else ", compiled"):
            return f"compile={compiled}: {case.engine}"
        times.append(round(1e3 * (case.gpu_ms_per_round or case.ms_per_round.median), 1))
    return times


def rounds_or_why(name: str) -> list[float] | str:
    """`rounds_of(name)`, or its error."""
    try:
        return rounds_of(name)
    except Exception as error:  # any error of a class that cannot be built or called like this
        return last_line(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--write", type=Path, help="the file; classes that it has times of are not run again")
    parser.add_argument("--targets", type=Path, help="write the section of this page from `FILE`, and run nothing")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(rounds_or_why)
        return
    if args.targets:
        args.targets.write_text(with_section(args.targets.read_text(), json.loads(FILE.read_text())))
        return
    versions = {one.__name__: one.__version__ for one in (torch, transformers, triton)}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    known = json.loads(args.write.read_text()) if args.write and args.write.exists() else {}
    times = {name: found for name, found in known.get("rounds", {}).items() if isinstance(found, list)}
    names = [name for name in class_names() if name not in times and hasattr(transformers, name.partition(" ")[0])]
    gpus, own = itertools.cycle(range(max(torch.cuda.device_count(), 1))), threading.local()

    def start() -> None:
        environment = {"CUDA_VISIBLE_DEVICES": str(next(gpus)), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        own.worker = Worker(__file__, "--worker", environment=environment)

    def measure(name: str) -> tuple[str, list[float] | str]:
        try:
            found = own.worker.run(name, SECONDS_PER_CLASS)
        except (ChildProcessError, TimeoutError) as error:
            return name, str(error)
        if isinstance(found, str) and "CUDA error" in found:
            own.worker.stop()  # the GPU is lost to its process
        return name, found

    with ThreadPoolExecutor(args.processes, initializer=start) as pool:
        for done in as_completed([pool.submit(measure, name) for name in names]):
            name, times[name] = done.result()
            print(name, times[name], flush=True)
            if args.write:
                text = {"device": device, "versions": versions, "rounds": dict(sorted(times.items()))}
                args.write.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
