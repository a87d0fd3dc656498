"""Starting a program in several processes."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def launch(program: str | Path, *arguments: object, processes: int = 2, on_gpus: bool = False) -> subprocess.Popen:
    """Start `program`, several processes under torchrun, on CPUs also where there are GPUs; output is in `stdout`."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    folders = [str(ROOT), str(ROOT / "tests" / "helpers"), str(ROOT / "examples")]
    settings = {"PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
    if not on_gpus:
        settings["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.Popen(
        [sys.executable, *(torchrun if processes > 1 else []), str(program), *map(str, arguments)],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen, seconds: float = 300) -> str:
    """Output of a process that was launched, once it has ended without an error."""
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == 0, output
    return output
