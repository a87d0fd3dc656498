"""What a function does on a device, written down as operations that another process can compile.

A recording says as little of the modules that were called as a CUDA graph does: operators, their arguments, and where
the tensors are that the function has not made itself. It holds none of these alive.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from ..patching.patch import traced

# Modules whose native functions compute nothing on tensors, or only by operators that torch dispatches.
_DISPATCHED = frozenset({"torch", "numpy", *sys.stdlib_module_names})


@dataclass(frozen=True)
class Value:
    """A tensor of a recording, in the arguments of an operation: its number."""

    number: int


class Layout(NamedTuple):
    """A tensor that a function reads or writes and has not made.

    Attributes:
        storage: number of its storage; tensors that share memory have the same.
        nbytes: size of the storage.
        shape, stride, offset: as those of a tensor, in elements.
        dtype, device: of the tensor.
    """

    storage: int
    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class Operation(NamedTuple):
    """A call of an operator.

    Attributes:
        name: of the operator and its overload, `"aten::add.Tensor"`.
        args, kwargs: of the call, with a `Value` for each tensor.
        results: numbers of the tensors that it returns, None for what is no tensor. One that was there before, such as
            the result of an operator that works in place, keeps its number.
        is_single: whether it returns one tensor, not a sequence.
    """

    name: str
    args: tuple
    kwargs: dict[str, Any]
    results: tuple[int | None, ...]
    is_single: bool

    @property
    def reads(self) -> list[int]:
        """Numbers of the tensors among the arguments."""
        found: list[int] = []
        with_values((self.args, self.kwargs), lambda one: found.append(one.number) if isinstance(one, Value) else None)
        return found


@dataclass
class Recording:
    """Operations in the order in which they ran; it can be pickled.

    Attributes:
        inputs: the tensors that were there before, by number.
        operations: on them, and on what they make.
        outputs: numbers of what the function returned.
    """

    inputs: dict[int, Layout] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    outputs: tuple[int, ...] = ()


def with_values(arguments: Any, replace: Callable[[Any], Any]) -> Any:
    """Arguments of an operator with what `replace` gives in the place of each that is no tuple, list or dict."""
    kind = type(arguments)
    if kind is tuple or kind is list:
        return kind([with_values(one, replace) for one in arguments])
    if kind is dict:
        return {name: with_values(one, replace) for name, one in arguments.items()}
    return replace(arguments)


def operator_of(name: str) -> torch._ops.OpOverload:
    """The operator of an `Operation.name`.

    Raises:
        AttributeError: expected an operator that is registered in this process.
    """
    qualified, _, overload = name.partition(".")
    namespace, _, short = qualified.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), short), overload or "default")


def run_operation(operation: Operation, values: dict[int, Any]) -> None:
    """Run it on `values` by number, and add its results to them."""
    args, kwargs = with_values(
        (operation.args, operation.kwargs), lambda one: values[one.number] if isinstance(one, Value) else one
    )
    result = operator_of(operation.name)(*args, **kwargs)
    for number, one in zip(operation.results, [result] if operation.is_single else result or (), strict=True):
        if number is not None:
            values[number] = one


class Addresses:
    """The tensors that a recording begins with, as places in storages that it does not keep alive.

    Attributes:
        constants: those that the function itself made of numbers, by number, which are kept.
    """

    def __init__(self) -> None:
        self._storages: list[StorageWeakRef] = []
        self._numbers: dict[int, int] = {}
        self.constants: dict[int, torch.Tensor] = {}

    def layout_of(self, number: int, tensor: torch.Tensor, is_constant: bool) -> Layout:
        """The layout of an input, which is kept only if it `is_constant`."""
        storage = tensor.untyped_storage()
        if is_constant:
            self.constants[number] = tensor
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._storages)
            # Refers to it weakly, and keeps its number from being used again.
            self._storages.append(StorageWeakRef(storage))
        return Layout(
            self._numbers[storage._cdata],
            storage.nbytes(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.device,
        )

    def tensors(self, inputs: dict[int, Layout]) -> dict[int, torch.Tensor] | None:
        """The inputs by number; None if memory of any has been freed."""
        storages = [torch.UntypedStorage._new_with_weak_ptr(one.cdata) for one in self._storages]
        if any(one is None for one in storages):
            return None
        made = {}
        for number, layout in inputs.items():
            empty = torch.empty(0, dtype=layout.dtype, device=layout.device)
            made[number] = empty.set_(storages[layout.storage], layout.offset, layout.shape, layout.stride)
        return made


def record(function: Callable[[], Sequence[torch.Tensor]]) -> tuple[Recording, Addresses]:
    """Run `function` once, on the tensors that it reads and writes, and record what it does.

    Code that asks `patching.patch.is_traced` behaves as in `torch.compile`. Afterwards the recording holds for as long
    as a CUDA graph of the function would.

    Returns:
        the recording, whose outputs are what the function returns, and where its inputs are.

    Raises:
        RuntimeError: expected a function that reads no value on the host and computes by operators that torch
            dispatches.
    """
    recorder = _Recorder()
    with traced(), torch.no_grad(), _native_calls_refused(recorder), recorder:
        outputs = function()
    recorder.recording.outputs = tuple(recorder.number_of(one) for one in outputs)
    return recorder.recording, recorder.addresses


class _Recorder(TorchDispatchMode):
    """Writes operations down.

    Attributes:
        recording: so far.
        addresses: of its inputs.
        runs_operator: whether an operator runs at the moment; what happens inside belongs to it.
        refused: the name of a function that cannot be recorded and was called nevertheless.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recording, self.addresses = Recording(), Addresses()
        self.runs_operator = False
        self.refused: str | None = None
        self._numbers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._count = 0

    def __torch_dispatch__(self, function: Any, types: Sequence[type], args: tuple = (), kwargs: Any = None) -> Any:
        # Subclasses come back with the operators on plain tensors that they consist of.
        if not all(kind in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if not isinstance(function, torch._ops.OpOverload):
            raise RuntimeError(f"{function} cannot be recorded: it is no operator")
        if torch.Tag.data_dependent_output in function.tags:
            raise RuntimeError(f"{function} cannot be recorded: it reads values on the host")
        # Numbers that the function itself holds, such as those of `torch.tensor([1, 2])`.
        is_constant = function.namespace == "aten" and function.__name__.startswith("lift_fresh")
        numbered = with_values((args, kwargs), lambda one: self._numbered(one, is_constant))
        self.runs_operator = True
        try:
            result = function(*args, **kwargs)
        finally:
            self.runs_operator = False
        if not isinstance(result, (torch.Tensor, tuple, list, type(None))):
            return result  # such as a dtype, which depends on no value of a tensor
        is_single = isinstance(result, torch.Tensor)
        results = (result,) if is_single else tuple(result or ())
        numbers = tuple(self._result_number(one) if isinstance(one, torch.Tensor) else None for one in results)
        self.recording.operations.append(Operation(function.name(), *numbered, numbers, is_single))
        return result

    def number_of(self, tensor: torch.Tensor, is_constant: bool = False) -> int:
        """The number of `tensor`; one that was not seen before is an input."""
        number = self._numbers.get(tensor)
        if number is None:
            number = self._result_number(tensor)
            self.recording.inputs[number] = self.addresses.layout_of(number, tensor, is_constant)
        return number

    def _result_number(self, tensor: torch.Tensor) -> int:
        if tensor not in self._numbers:
            self._numbers[tensor] = self._count
            self._count += 1
        return self._numbers[tensor]

    def _numbered(self, value: Any, is_constant: bool) -> Any:
        return Value(self.number_of(value, is_constant)) if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def _native_calls_refused(recorder: _Recorder) -> Iterator[None]:
    """Context that fails where a native function of another library than torch was called outside of operators.

    Such functions, and Triton kernels that no operator launches, may compute on tensors without torch's knowledge.
    """
    if sys.getprofile() is not None:
        raise RuntimeError("native calls cannot be seen while a profiler is set (sys.setprofile)")

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and not recorder.runs_operator:
            module = getattr(function, "__module__", None)
            if isinstance(module, str) and module.partition(".")[0] not in _DISPATCHED:
                recorder.refused = f"{module}.{getattr(function, '__qualname__', function)}"

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
    if recorder.refused is not None:
        raise RuntimeError(f"{recorder.refused} cannot be recorded: it is no operator of torch")
