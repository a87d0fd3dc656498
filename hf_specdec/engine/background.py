"""Compiling recorded rounds in the background, see `compile_process`.

A round runs uncompiled until its compiled form is there. One process at a time compiles for this one; it is started
when there is something to compile, and ended when there has been nothing for a while. A thread waits for it and loads
what it has compiled; it touches no module, and no tensor of a model or of a session.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from ..device_policy import policy_of
from ..errors import first_line
from .compile_process import Job, Reply, main
from .cuda_graphs import on_device, settings_of_compiler, without_autocast_cache
from .recorded_pieces import Plan, Run
from .recording import Addresses, Recording, record

logger = logging.getLogger(__name__)

# Seconds without anything to compile after which the process that compiles is ended: it has a context on the GPU.
IDLE_SECONDS = 30.0


class Compilation:
    """A function that is being compiled.

    Args:
        recording: of the function.
        addresses: of what it reads and writes.
        device: that it computes on.

    Attributes:
        recording, device: as given.
        is_done: whether nothing will change any more.
        plan: the compiled function; None until it is there, and if it could not be compiled.
    """

    def __init__(self, recording: Recording, addresses: Addresses, device: torch.device):
        self.recording, self._addresses, self.device = recording, addresses, device
        self.plan: Plan | None = None
        self.is_done = False

    @property
    def kept(self) -> Any:
        """What a graph of the function launches and reads, and does not keep: loaded kernels, and constants."""
        return self.plan, self._addresses.constants

    def function(self) -> Callable[[], tuple[torch.Tensor, ...]] | None:
        """The compiled function on the tensors on which it was recorded; None if there is none, or memory was freed."""
        plan, inputs = self.plan, self._addresses.tensors(self.recording.inputs)
        if plan is None or inputs is None:
            return None
        device_type = self.device.type

        def run() -> tuple[torch.Tensor, ...]:
            # What autocast does was recorded.
            with torch.autocast(device_type, enabled=False), torch.no_grad():
                return plan.run(inputs)

        return run


def compile_later(function: Callable[[], Any], device: torch.device) -> Compilation | None:
    """Have `function` compiled in the background; it is run once, see `recording.record`.

    Returns:
        what it will become, which is given up when nothing refers to it; None, and a warning, if it cannot be.
    """
    try:
        with on_device(device), without_autocast_cache():
            compilation = Compilation(*record(function), device)
    except Exception as error:  # an error of the function has come up when it was captured
        warn(error)
        return None
    _compiler.submit(compilation)
    return compilation


def warn(error: Exception | str) -> None:
    """Say, once for each reason, that a round stays as it is."""
    _warn_once(error if isinstance(error, str) else f"{type(error).__name__}: {first_line(error)}")


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning(
        f"A round cannot be compiled in the background ({reason}); it stays uncompiled. compile=True compiles rounds "
        "before they run, compile=False avoids the attempt."
    )


class BackgroundCompiler:
    """The queue of what is to be compiled, the thread that works on it, and the process that compiles."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[weakref.ref[Compilation]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_running = self._is_closed = False
        self._process: subprocess.Popen | None = None
        self._errors: Any = None

    def submit(self, compilation: Compilation) -> None:
        """Compile `compilation` when what came before is done."""
        self._waiting.put(weakref.ref(compilation))
        with self._lock:
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._work, name="hf_specdec compiler", daemon=True).start()

    def close(self) -> None:
        """Give up; for the end of the interpreter."""
        self._is_closed = True
        self._end_process()

    def _work(self) -> None:
        while not self._is_closed:
            try:
                waiting = self._waiting.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                self._end_process()
                with self._lock:
                    if self._waiting.empty():
                        self._is_running = False
                        return
                continue
            try:
                plan = self._plan(waiting)
            except Exception as error:  # compilers raise anything
                plan = None
                if not self._is_closed:
                    warn(error)
            compilation = waiting()
            if compilation is not None:
                compilation.plan, compilation.is_done = plan, True
            del compilation

    def _plan(self, waiting: weakref.ref[Compilation]) -> Plan | None:
        compilation = waiting()
        if compilation is None:
            return None
        device = compilation.device
        job = job_of(compilation.recording, device)
        del compilation  # its session may be freed meanwhile
        reply = self._ask(job)
        if reply.error is not None:
            warn(reply.error)
        if reply.error is not None or waiting() is None:
            return None
        with on_device(device):
            return load(reply)

    def _ask(self, job: Job) -> Reply:
        """Let the process compile, which is started if need be."""
        asked = pickle.dumps(job)
        try:
            if self._process is None:
                self._process, self._errors = _start()
            self._process.stdin.write(asked)
            self._process.stdin.flush()
            return pickle.load(self._process.stdout)
        except (OSError, EOFError) as error:
            raise RuntimeError(f"the process that compiles has ended: {self._last_words()}") from error
        except BaseException:
            self._end_process()
            raise

    def _last_words(self) -> str:
        """The last line that the process has written to its standard error; it is ended."""
        if self._errors is None:
            return "it could not be started"
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        self._end_process()
        return next((line for line in reversed(lines) if line.strip()), "it said nothing")

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(OSError):
                process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, self._errors):
                with suppress(OSError):
                    stream.close()
            self._errors = None


def job_of(recording: Recording, device: torch.device) -> Job:
    """The job to compile `recording` with the settings of this process."""
    return Job(recording, policy_of(device).compiler, device, torch.get_float32_matmul_precision())


def _start() -> tuple[subprocess.Popen, Any]:
    if not sys.executable:
        raise RuntimeError("sys.executable does not say what runs this Python")
    errors = tempfile.TemporaryFile()  # noqa: SIM115, closed when the process is ended
    process = subprocess.Popen(
        [sys.executable, "-c", f"from {main.__module__} import main; main()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # an interrupt at a terminal is for this process
    )
    return process, errors


def load(reply: Reply) -> Plan:
    """What the process has compiled, ready to run in this one."""
    pieces: list[Run] = []
    for piece in reply.pieces:
        if isinstance(piece, bytes):
            with settings_of_compiler():
                piece = _load_piece(piece)
        pieces.append(piece)
    return Plan(reply.steps, pieces, reply.outputs)


def _load_piece(saved: bytes) -> Run:
    from torch._inductor import CompiledArtifact

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "artifact")
        with open(path, "wb") as file:
            file.write(saved)
        return CompiledArtifact.load(path=path, format="binary")


_compiler = BackgroundCompiler()
# Of processes that this one was forked from, whose pipes it must not write to when it frees them.
_inherited: list[BackgroundCompiler] = []
atexit.register(lambda: _compiler.close())


def _begin_anew() -> None:
    """In a forked process, which has neither the thread nor, as its own, the process."""
    global _compiler
    _inherited.append(_compiler)
    _compiler = BackgroundCompiler()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
