"""Processes that run classes of the zoo, so that a class that hangs or dies affects no other."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import transformers


def serve(run: Callable[[str], Any]) -> None:
    """Read names of classes from standard input and write what `run` returns for them to standard output, one a
    line."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(run(line.strip())), file=out, flush=True)


class Worker:
    """A process that runs classes.

    Args:
        command: arguments of Python for a program that calls `serve`.
        environment: variables beside those of this process.
    """

    def __init__(self, *command: str, environment: dict[str, str] | None = None) -> None:
        self._command = command
        self._environment = os.environ | (environment or {})
        self._process: subprocess.Popen | None = None
        self._lines: queue.Queue[str] = queue.Queue()

    def run(self, name: str, seconds: float) -> Any:
        """What the process returns for the class `name`. Raises `ChildProcessError` if it dies, `TimeoutError` if it
        takes more than `seconds`."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            self.stop()
            raise TimeoutError(f"took more than {seconds} s") from None
        if not line:
            raise ChildProcessError(f"the process died with exit code {self._process.wait()}")
        return json.loads(line)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        self._process = process = subprocess.Popen(
            [sys.executable, *self._command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=self._environment,
        )
        self._lines = lines = queue.Queue()

        def read() -> None:
            for line in process.stdout:
                lines.put(line)
            lines.put("")

        threading.Thread(target=read, daemon=True).start()
