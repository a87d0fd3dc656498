"""Starting a program in several processes."""

import os
import subprocess
import sys
from pathlib import Path

from case_counts import ALL_CASES, tries_all

ROOT = Path(__file__).parents[2]
# `accelerate launch` has no launcher of its own for several processes on CPUs; this one starts them, as torchrun does.
ACCELERATE = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--num_processes"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def launch(
    program: str | Path, *arguments: object, processes: int = 2, on_gpus: bool = False, slow_launcher: list = TORCHRUN
) -> subprocess.Popen:
    """Start `program`, on CPUs also where there are GPUs; output is in `stdout`.

    `slow_launcher` starts several processes on a GPU and with `--slow`; otherwise `forked_ranks.py` does, which takes
    less time.
    """
    helpers = ROOT / "tests" / "helpers"
    launcher = slow_launcher if on_gpus or tries_all else [str(helpers / "forked_ranks.py")]
    folders = [str(ROOT), str(helpers), str(ROOT / "examples")]
    settings = {"PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    if not on_gpus:
        settings["CUDA_VISIBLE_DEVICES"] = ""
    if tries_all:  # also because of a GPU that they do not see
        settings[ALL_CASES] = "1"
    return subprocess.Popen(
        [
            sys.executable,
            *([*launcher, str(processes)] if processes > 1 else []),
            str(program),
            *map(str, arguments),
        ],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen, seconds: float = 300) -> str:
    """The output of a launched process, after it has ended without an error."""
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, output
    return output
