"""Replacement of attributes of modules and configurations while an engine runs, and which thread runs an engine.

Other code may run the target at the same time: another thread, or the caller's logits processors, stopping criteria and
streamers. So replaced functions ask `runs_engine`, and behave as the original ones if that is False.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..device_policy import DEFAULT_POLICY, DEVICE_POLICIES

_HOST = torch.device("cpu")

# Attribute of experts whose gated activation is an op of layers; an `ExpertGate` of `patching.layer_probes`.
EXPERT_GATE = "_hf_specdec_gate"

# Stands for an attribute that is missing in an object's `__dict__`.
ABSENT = object()


class _Thread(threading.local):
    engine: object | None = None  # identifies the innermost `engine` context
    is_inference = False
    default_device = _HOST


# State of this thread.
this_thread = _Thread()


def runs_engine() -> bool:
    """Whether an engine runs the current code. True while torch.compile traces, since only engines compile patches."""
    return torch.compiler.is_compiling() or this_thread.engine is not None


@contextmanager
def engine() -> Iterator[None]:
    """Context in which this thread runs an engine: replaced functions behave as the engine needs them.

    Tensors are on the host unless a device is named, whatever `torch.set_default_device` says.
    """
    before = this_thread.engine, this_thread.is_inference, this_thread.default_device
    this_thread.engine, this_thread.is_inference = object(), torch.is_inference_mode_enabled()
    this_thread.default_device = torch.get_default_device()
    try:
        with _with_default(_HOST, this_thread.default_device):
            yield
    finally:
        this_thread.engine, this_thread.is_inference, this_thread.default_device = before


@contextmanager
def user_code() -> Iterator[None]:
    """Context, within `engine`, for functions of the user: replaced functions behave as the original ones, and
    inference mode and the default device are those outside of `engine`."""
    before = this_thread.engine
    # Tensors made in inference mode cannot be modified outside of it.
    is_left = this_thread.is_inference and not torch.is_inference_mode_enabled()
    this_thread.engine = None
    try:
        with torch.inference_mode() if is_left else nullcontext(), _with_default(this_thread.default_device, _HOST):
            yield
    finally:
        this_thread.engine = before


def on_host() -> AbstractContextManager[Any]:
    """Context in which new tensors are on the host unless a device is named, whatever the default device is."""
    return _with_default(_HOST, torch.get_default_device())


def _with_default(device: torch.device, now: torch.device) -> AbstractContextManager[Any]:
    # A device context slows down every operation, so there is none if it changes nothing.
    return nullcontext() if device == now else device


# Dtypes that ops of layers take, see `ops`.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def register_pre_hook(module: nn.Module, hook: Callable[[nn.Module, tuple, dict[str, Any]], None]) -> RemovableHandle:
    """Register `hook(module, args, kwargs)` to be called before each forward pass of `module`.

    Torch registers a hook first and then notes that it takes keyword arguments: a pass that another thread begins
    between the two would call it without them. `hook` is not called for such a pass.
    """

    def guarded(module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> None:
        if kwargs is not None:
            hook(module, args, kwargs)

    return module.register_forward_pre_hook(guarded, with_kwargs=True)


def uses_layer_kernels(states: torch.Tensor) -> bool:
    """Whether the layers that compute with `states` run ops of layers, such as `ops.rms_norm`.

    They do not in code to be compiled: the compiler fuses small operations, including residual sums, with neighbours.
    """
    if torch.compiler.is_compiling() or this_thread.engine is None:
        return False
    return DEVICE_POLICIES.get(states.device.type, DEFAULT_POLICY).layer_kernels


# Replaced attributes by `id` of the owner and name: the owner, the original value, and the replacements by context,
# latest last.
_replaced: dict[tuple[int, str], tuple[object, Any, dict[object, Any]]] = {}
_lock = threading.Lock()


@contextmanager
def replaced(name: str, values: Iterable[tuple[object, Any]]) -> Iterator[None]:
    """Context in which the attribute `name`, in the `__dict__` of each owner in `values`, has the value given there.

    `ABSENT` removes it. Contexts may overlap in any order, as those of several threads do: the value of the context
    entered last applies, and the original value is restored when the last context exits. A value that other code sets
    inside the context stays.
    """
    values, token = list(values), object()
    try:
        with _lock:
            for owner, value in values:
                attributes = vars(owner)
                before = attributes.get(name, ABSENT)
                _replaced.setdefault((id(owner), name), (owner, before, {}))[2][token] = value
                _set(owner, name, value)
        yield
    finally:
        try:
            _restore(name, values, token)
        except BaseException:  # an interrupt, which may come between any two steps
            _restore(name, values, token)
            raise


def _set(owner: object, name: str, value: Any) -> None:
    if value is ABSENT:
        vars(owner).pop(name, None)
    else:
        vars(owner)[name] = value


def _restore(name: str, values: list[tuple[object, Any]], token: object) -> None:
    """Leave the `replaced` context of `token`, or what remains of it."""
    with _lock:
        for owner, _ in values:
            _, before, own = _replaced.get((id(owner), name), (owner, ABSENT, {}))
            if token in own:
                *_, current = own.values()
                if vars(owner).get(name, ABSENT) is current:
                    _set(owner, name, [before, *(own[one] for one in own if one is not token)][-1])
                del own[token]
            if not own:
                _replaced.pop((id(owner), name), None)


class Patch(AbstractContextManager[None]):
    """A context that patches objects which are looked up in the constructor; it does not keep them alive.

    It can be entered once. Copies (`copy.copy`) share the lookup and may overlap.

    Attributes:
        is_empty: whether there is nothing to patch.
    """

    is_empty = False
    _entered: ExitStack

    def _enter(self, stack: ExitStack) -> None:
        """Patch the objects, with contexts that are entered on `stack`."""
        raise NotImplementedError

    def __enter__(self) -> None:
        with ExitStack() as stack:
            self._enter(stack)
            self._entered = stack.pop_all()

    def __exit__(self, *exception: Any) -> None:
        self._entered.close()


class Replacements(Patch):
    """A `Patch` of `replaced` attributes: by name, pairs of an owner and a function that maps it to the value."""

    def __init__(self, values: Mapping[str, Iterable[tuple[object, Callable[[Any], Any]]]]):
        found = {name: [(weakref.ref(owner), make) for owner, make in pairs] for name, pairs in values.items()}
        self._values = {name: pairs for name, pairs in found.items() if pairs}
        self.is_empty = not self._values

    def _enter(self, stack: ExitStack) -> None:
        for name, pairs in self._values.items():
            owners = [(owner, make(owner)) for reference, make in pairs if (owner := reference()) is not None]
            stack.enter_context(replaced(name, owners))


def constant(value: Any) -> Callable[[object], Any]:
    """For `Replacements`: maps any owner to `value`."""
    return lambda owner: value


def bound(function: Callable, *args: Any) -> Callable[[object], Callable]:
    """For `Replacements`: maps an owner to `function` with the owner and `args` before the arguments of a call."""
    if not args:  # as for all linear layers: without a call for each of them
        return functools.partial(functools.partial, function)
    return lambda owner: functools.partial(function, owner, *args)


def is_unpatched(owner: object, *functions: Callable, name: str = "forward") -> bool:
    """Whether `owner` has no attribute `name`, except one that contexts of other calls have `bound` to `functions`."""
    value = vars(owner).get(name)
    return value is None or getattr(value, "func", None) in functions


def is_anything_replaced() -> bool:
    return bool(_replaced)


def original(owner: object, name: str) -> Any:
    """The attribute `name` of `owner` outside of any `replaced` context; None if its `__dict__` has none."""
    found = _replaced.get((id(owner), name))
    value = vars(owner).get(name) if found is None else found[1]
    return None if value is ABSENT else value
