"""Recordings in pieces, of which equal ones are compiled once, and what runs them when they are compiled."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .piecewise import last_of_pieces
from .recording import Layout, Operation, Recording, Value, run_operation, with_values

Run = Callable[..., Sequence[torch.Tensor]]


@dataclass
class Step:
    """A piece of a recording at its place.

    Attributes:
        piece: which of the different pieces it is.
        inputs, outputs: numbers of the tensors in the recording.
        done: numbers of the tensors that no later step reads.
    """

    piece: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    done: tuple[int, ...] = ()


@dataclass
class Piece:
    """Operations that are compiled together.

    Attributes:
        inputs: numbers of the tensors that they read and have not made.
        operations: in order.
        outputs: numbers of the tensors that others read.
    """

    inputs: tuple[int, ...]
    operations: list[Operation]
    outputs: tuple[int, ...]

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the operations as they are."""
        values = dict(zip(self.inputs, inputs, strict=True))
        for operation in self.operations:
            run_operation(operation, values)
        return tuple(values[number] for number in self.outputs)

    def structure(self, values: dict[int, torch.Tensor]) -> Hashable:
        """A key that is equal for pieces which compile to the same code.

        Args:
            values: fake tensors of the recording by number.
        """
        storages: dict[int, int] = {}
        layouts = []
        for number in self.inputs:
            one = values[number]
            storage = storages.setdefault(one.untyped_storage()._cdata, len(storages))
            layouts.append((one.shape, one.stride(), one.storage_offset(), storage, one.dtype, one.device))
        places: dict[int, int] = {number: place for place, number in enumerate(self.inputs)}

        def place_of(number: int | None) -> int | None:
            return None if number is None else places.setdefault(number, len(places))

        operations = [
            (one.name, repr(_renumbered((one.args, one.kwargs), place_of)), tuple(map(place_of, one.results)))
            for one in self.operations
        ]
        return tuple(layouts), tuple(operations), tuple(map(place_of, self.outputs))


def _renumbered(arguments: Any, place_of: Callable[[int], int | None]) -> Any:
    return with_values(arguments, lambda one: Value(place_of(one.number)) if isinstance(one, Value) else one)


def split(recording: Recording) -> list[Piece]:
    """The pieces of `recording`, in order; it is split where `piecewise.piecewise_backend` splits graphs."""
    last = last_of_pieces([one.name for one in recording.operations])
    parts: list[list[Operation]] = [[]]
    for place, operation in enumerate(recording.operations):
        parts[-1].append(operation)
        if place in last:
            parts.append([])
    parts = [part for part in parts if part]
    needed, pieces = set(recording.outputs), []
    for part in reversed(parts):
        made = {number for one in part for number in one.results if number is not None}
        inputs: dict[int, None] = {}
        known: set[int] = set()
        for one in part:
            inputs |= dict.fromkeys(number for number in one.reads if number not in known)
            known.update(number for number in one.results if number is not None)
        outputs = tuple(sorted((made - inputs.keys()) & needed))
        pieces.append(Piece(tuple(inputs), part, outputs))
        needed |= inputs.keys()
    return pieces[::-1]


def steps_of(pieces: Sequence[Piece], kinds: Sequence[int], outputs: Sequence[int]) -> list[Step]:
    """How to run pieces of the given kinds one after the other, for `outputs`."""
    steps, later = [], set(outputs)
    for piece, kind in zip(reversed(pieces), reversed(kinds), strict=True):
        used = {*piece.inputs, *piece.outputs}
        steps.append(Step(kind, piece.inputs, piece.outputs, tuple(used - later)))
        later |= used
    return steps[::-1]


@dataclass
class Plan:
    """A recording that is compiled.

    Attributes:
        steps: in order.
        pieces: what runs each different piece.
        outputs: numbers of what the recorded function returns.
    """

    steps: list[Step]
    pieces: list[Run]
    outputs: tuple[int, ...]

    def run(self, inputs: dict[int, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Do on the `inputs`, by number, what was recorded."""
        values = dict(inputs)
        for step in self.steps:
            results = self.pieces[step.piece](*[values[number] for number in step.inputs])
            values.update(zip(step.outputs, results, strict=True))
            for number in step.done:
                del values[number]
        return tuple(values[number] for number in self.outputs)


def fake_values(recording: Recording) -> tuple[FakeTensorMode, dict[int, torch.Tensor]]:
    """All tensors of `recording` by number, without memory but with their layouts, and the mode they belong to."""
    mode, values = FakeTensorMode(shape_env=ShapeEnv()), {}
    storages: dict[int, torch.UntypedStorage] = {}
    with mode, torch.no_grad():
        for number, layout in recording.inputs.items():
            values[number] = _fake(layout, storages)
        for operation in recording.operations:
            run_operation(operation, values)
    return mode, values


def _fake(layout: Layout, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    if layout.storage not in storages:
        made = torch.empty(layout.nbytes, dtype=torch.uint8, device=layout.device)
        storages[layout.storage] = made.untyped_storage()
    empty = torch.empty(0, dtype=layout.dtype, device=layout.device)
    return empty.set_(storages[layout.storage], layout.offset, layout.shape, layout.stride)
