"""Runs a program in several processes, as torchrun does; imports happen once, before the processes are forked.

    python tests/helpers/forked_ranks.py <processes> <program> <argument>...

Ends with the status of the first process that fails; its failure ends the others.
"""

import gc
import importlib
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

import small_models
from torch.distributed import TCPStore


def run(program: str, arguments: list[str]) -> int:
    """Status of `program`, run as `__main__`."""
    sys.argv = [program, *arguments]
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def start_store() -> tuple[int, str]:
    """The process of a store where ranks meet, and its port. The store has a thread, and a process that has threads
    should not be forked."""
    parent, (reading, writing) = os.getpid(), os.pipe()
    server = os.fork()
    if server == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        os.close(writing)
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        return server, pipe.read()


def main(processes: int, program: str, arguments: list[str]) -> int:
    small_models.prepare()
    importlib.import_module(Path(program).stem)
    gc.freeze()
    server, port = start_store()
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    running = set()
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            status = run(program, arguments)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        running.add(child)
    failed = 0
    while running:
        child, status = os.wait()
        running.discard(child)
        if status and not failed:
            failed = os.waitstatus_to_exitcode(status)
            for other in running:
                os.kill(other, signal.SIGKILL)
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    return abs(failed)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
