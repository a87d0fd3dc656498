"""The process that compiles recordings, in which `main` runs.

It reads pickled `Job`s from its standard input and writes a `Reply` to each to its standard output. Compiling in a
process of its own leaves alone what compiling changes for all threads of a process (settings of the compiler, how
modules are called), and takes no time of the interpreter from the one that generates.
"""

from __future__ import annotations

import operator
import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, BinaryIO

import torch
from torch import fx

from ..errors import first_line
from .recorded_pieces import Piece, Step, fake_values, split, steps_of
from .recording import Recording, Value, operator_of

# Seconds between two looks at whether the process that this one works for is still there.
_LOOK = 1.0


@dataclass
class Job:
    """What is to be compiled.

    Attributes:
        recording: of a round.
        backend: `"inductor"`; other backends of `torch.compile` leave the operations as they are.
        device: that operations without a device index mean.
        precision: of `torch.set_float32_matmul_precision`.
    """

    recording: Recording
    backend: str
    device: torch.device
    precision: str


@dataclass
class Reply:
    """A compiled recording, or why it is none.

    Attributes:
        steps: see `recorded_pieces.Plan`.
        pieces: what `recorded_pieces.Plan.pieces` are loaded from, see `background.load`.
        outputs: see `recorded_pieces.Plan`.
        error: what went wrong; None if nothing did.
    """

    steps: list[Step]
    pieces: list[bytes | Piece]
    outputs: tuple[int, ...]
    error: str | None = None


def compile_job(job: Job) -> Reply:
    """Compile in this process, with its settings."""
    pieces = split(job.recording)
    mode, values = fake_values(job.recording)
    places: dict[Hashable, int] = {}
    kinds, different = [], []
    for piece in pieces:
        key = piece.structure(values)
        if key not in places:
            places[key] = len(different)
            different.append(piece)
        kinds.append(places[key])
    made = [_compiled(piece, mode, values) if job.backend == "inductor" else piece for piece in different]
    return Reply(steps_of(pieces, kinds, job.recording.outputs), made, job.recording.outputs)


def _compiled(piece: Piece, mode: Any, values: dict[int, torch.Tensor]) -> bytes:
    """A piece as compiled by inductor, in the form of `CompiledArtifact.save`."""
    from torch._inductor import standalone_compile

    from .inductor import options

    # Kernels are tuned where they run: here a piece would need memory for all of its inputs.
    patches = {**options(same_everywhere=False), "triton.autotune_at_compile_time": False}
    with torch._guards.tracing(torch._guards.TracingContext(mode)), torch.no_grad():
        artifact = standalone_compile(
            _graph_of(piece, values),
            [values[number] for number in piece.inputs],
            dynamic_shapes="from_tracing_context",
            options={"config_patches": patches},
        )
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "artifact")
        artifact.save(path=path, format="binary")
        with open(path, "rb") as file:
            return file.read()


def _graph_of(piece: Piece, values: dict[int, torch.Tensor]) -> fx.GraphModule:
    graph = fx.Graph()
    nodes: dict[int, fx.Node] = {}

    def noted(number: int, node: fx.Node) -> None:
        nodes[number] = node
        node.meta["example_value"] = node.meta["val"] = values[number]

    for number in piece.inputs:
        noted(number, graph.placeholder(f"value_{number}"))
    for one in piece.operations:
        args, kwargs = fx.node.map_aggregate(
            (one.args, one.kwargs), lambda part: nodes[part.number] if isinstance(part, Value) else part
        )
        node = graph.call_function(operator_of(one.name), args, kwargs)
        for place, number in enumerate(one.results):
            if number is not None and number not in nodes:
                noted(number, node if one.is_single else graph.call_function(operator.getitem, (node, place)))
    graph.output(tuple(nodes[number] for number in piece.outputs))
    return fx.GraphModule(torch.nn.Module(), graph)


def _take_settings(job: Job) -> None:
    torch.set_float32_matmul_precision(job.precision)
    if job.device.type == "cuda":
        torch.cuda.set_device(job.device)
    # An artifact is an entry of these caches.
    torch._inductor.config.force_disable_caches = False
    torch._inductor.config.fx_graph_cache = torch._functorch.config.enable_autograd_cache = True


def serve(jobs: BinaryIO, replies: BinaryIO) -> None:
    """Answer jobs until there are no more, or the process that asks is gone."""
    waiting: SimpleQueue[Job | None] = SimpleQueue()
    threading.Thread(target=_read, args=(jobs, waiting), daemon=True).start()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    while (job := waiting.get()) is not None:
        try:
            _take_settings(job)
            reply = compile_job(job)
        except Exception as error:  # compilers raise anything
            reply = Reply([], [], (), f"{type(error).__name__}: {first_line(error)}")
        pickle.dump(reply, replies)
        replies.flush()


def _read(jobs: BinaryIO, waiting: SimpleQueue[Job | None]) -> None:
    try:
        while True:
            waiting.put(pickle.load(jobs))
    except EOFError:
        os._exit(0)  # nobody waits for what is being compiled


def _end_with(parent: int) -> None:
    """End when `parent` has: others that it forked may hold its end of the pipe open."""
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os._exit(0)


def main() -> None:
    # What libraries print must not be taken for a reply.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, replies)
