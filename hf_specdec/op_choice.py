"""The choice between kernel and reference of an op, and the registration of kernels with torch."""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import NoneType, UnionType
from typing import Any, Optional, Union, get_args, get_origin, get_type_hints

import torch
from torch.utils._python_dispatch import _disable_current_modes, _len_torch_dispatch_stack

from .device_policy import DEFAULT_POLICY, DEVICE_POLICIES


def has_kernels(device: torch.device) -> bool:
    """Whether ops on `device` run the Triton kernels."""
    return DEVICE_POLICIES.get(device.type, DEFAULT_POLICY).triton


class _Choice(threading.local):
    """Settings of this thread's ops: kernels or references, whether kernels are launched, and are captured."""

    references_only = False
    capturing = False
    compile_only = False
    batch_invariant = False
    on_reference: Callable[..., object] | None = None


_choice = _Choice()


@contextmanager
def _choosing(**values: Any) -> Iterator[None]:
    before = {name: getattr(_choice, name) for name in values}
    vars(_choice).update(values)
    try:
        yield
    finally:
        vars(_choice).update(before)


def references(on_reference: Callable[..., object] | None = None) -> AbstractContextManager[None]:
    """Context in which this thread's ops run the references and compile no kernel; `torch.compile` ignores it.

    `on_reference` is called with the name and the arguments of each op.
    """
    return _choosing(references_only=True, on_reference=on_reference)


def capturing() -> AbstractContextManager[None]:
    """Context in which this thread's launches are captured, or warm up a capture: the host's time does not matter."""
    return _choosing(capturing=True)


def without_launches() -> AbstractContextManager[None]:
    """Context in which launches of this thread's ops compile kernels only, see `ops.compile_only`."""
    return _choosing(compile_only=True)


def batch_invariant() -> AbstractContextManager[None]:
    """Context in which the bits of a row of an op's result depend on that row only, in 16-bit types and float32.

    They do not depend on other rows, their number, or how queries and prompts are split into passes. The context
    belongs to this thread, and does not apply to functions that `torch.compile` compiles.
    """
    return _choosing(batch_invariant=True)


def is_capturing() -> bool:
    """Whether this thread is in the context `capturing`."""
    return not torch.compiler.is_compiling() and _choice.capturing


def is_compile_only() -> bool:
    """Whether this thread's ops compile kernels and launch none, see `ops.compile_only`."""
    return _choice.compile_only


def is_batch_invariant() -> bool:
    """Whether this thread is in the context `batch_invariant`."""
    return not torch.compiler.is_compiling() and _choice.batch_invariant


def is_for_triton(tensor: torch.Tensor) -> bool:
    """Whether an op on `tensor` runs its Triton kernel."""
    if not torch.compiler.is_compiling() and _choice.references_only:
        return False
    return DEVICE_POLICIES.get(tensor.device.type, DEFAULT_POLICY).triton and tensor.dtype != torch.float64


def without_dispatch_modes() -> AbstractContextManager[None]:
    """Context, within `batch_invariant`, that hides operations from dispatch modes, as the inside of an op does."""
    return _disable_current_modes() if is_batch_invariant() else nullcontext()


# Types of tensors that store their own values: kernels take them as they are.
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def _must_be_dispatched(args: Iterable[Any]) -> bool:
    """Whether torch's dispatcher has to see an op with these arguments."""
    if torch.is_grad_enabled() or _len_torch_dispatch_stack():
        return True
    for one in args:
        if isinstance(one, torch.Tensor):
            if type(one) not in _PLAIN_TENSORS:
                return True
        elif isinstance(one, (list, tuple)) and _must_be_dispatched(one):
            return True
    return False


def _split(args: Sequence[Any], groups: Mapping[int, type[tuple]]) -> list[Any]:
    """The arguments of an op from those of its function, except the first: `groups` are replaced by their elements."""
    found: list[Any] = []
    for place, one in enumerate(args, start=1):
        if place not in groups:
            found.append(one)
        elif one is None or isinstance(one, torch.Tensor):
            found += [one] + [None] * (len(groups[place]._fields) - 1)
        else:
            # Element by element: torch.compile of torch 2.11 cannot append a named tuple to a list.
            found += [one[field] for field in range(len(groups[place]._fields))]
    return found


def _joined(args: Sequence[Any], groups: Mapping[int, type[tuple]]) -> list[Any]:
    found, left = [], list(args)
    while left:
        group = groups.get(len(found))
        count = 1 if group is None else len(group._fields)
        some, left = left[:count], left[count:]
        is_group = any(one is not None for one in some[1:])
        found.append(group(*some) if is_group else some[0])
    return found


def _is_named_tuple(kind: Any) -> bool:
    return hasattr(kind, "_fields")


def _kinds_of(hint: Any) -> tuple[Any, ...]:
    """The types of a union; `hint` itself if it is no union."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _signature_of(
    reference: Callable, writes: Collection[str]
) -> tuple[inspect.Signature, list[str], dict[int, type[tuple]]]:
    """The signature of the op that `reference` defines, its parameters that are written, and the named tuples among the
    parameters of `reference`, by place. The op takes their elements; an argument may also be None or the first element
    alone, as the types allow."""
    hints, groups, parameters, written = get_type_hints(reference), {}, [], []
    for place, (name, parameter) in enumerate(inspect.signature(reference).parameters.items()):
        kinds, parts = _kinds_of(hints[name]), {name: hints[name]}
        group = next(filter(_is_named_tuple, kinds), None)
        if group is not None:
            groups[place] = group
            parts = {f"{name}_{field}": hint for field, hint in get_type_hints(group).items()}
        written += parts if name in writes else ()
        default = None if parameter.default is None and name not in writes else parameter.empty
        for number, (part, hint) in enumerate(parts.items()):
            kind, *others = _kinds_of(hint)
            may_lack = others or NoneType in kinds or (number > 0 and torch.Tensor in kinds)
            annotation = Optional[kind] if may_lack else kind  # noqa: UP045 (what torch looks up)
            parameters.append(parameter.replace(name=part, annotation=annotation, default=default))
    found = hints["return"]
    if _is_named_tuple(found):
        found = tuple[(torch.Tensor,) * len(found._fields)]
    return inspect.Signature(parameters, return_annotation=None if found is NoneType else found), written, groups


def _contiguous(results: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Contiguous tensors with the shapes and dtypes of `results`, and arbitrary values."""
    if isinstance(results, tuple):
        return tuple(one.new_empty(one.shape) for one in results)
    return results.new_empty(results.shape)


def _tensors(values: Any) -> list[torch.Tensor]:
    """The tensors among `values`, also inside of tuples."""
    if isinstance(values, (list, tuple)):
        return [tensor for one in values for tensor in _tensors(one)]
    return [values] if isinstance(values, torch.Tensor) else []


def kernel_op(
    place: str,
    writes: Collection[str] = (),
    launch: Callable | None = None,
    fake: Callable | None = None,
    is_opaque: bool = False,
) -> Callable:
    """A function that runs a Triton kernel if the device of its first argument has kernels, else the reference.

    It calls the kernel without torch's dispatcher, which takes the host several times as long as the launch. It calls a
    custom op of torch if something has to see the call: `torch.compile`, a dispatch mode, a tensor subclass, or
    autograd, which refuses to differentiate it. The op's schema follows from the types of the reference; for fake
    tensors it returns what the reference does, contiguous.

    Args:
        place: `module.function` of the kernel in `kernels`, imported at its first call; the reference is
            `module_reference.function`.
        writes: names of the parameters that are written.
        launch: called instead of the kernel, with the same arguments.
        fake: what the op returns for fake tensors, if results are not contiguous or the reference is opaque.
        is_opaque: whether the reference, too, reads values on the host, so that nothing can trace or record it.
    """
    module, _, name = place.partition(".")
    plain = getattr(importlib.import_module(f"{__package__}.kernels.{module}_reference"), name)
    kernels = functools.cache(functools.partial(importlib.import_module, f"{__package__}.kernels.{module}"))
    signature, written, groups = _signature_of(plain, writes)
    returned = get_type_hints(plain)["return"]
    result = returned if _is_named_tuple(returned) else tuple
    places = [place for place, one in enumerate(inspect.signature(plain).parameters) if one in writes]

    def run_kernel(*args: Any) -> Any:
        with torch.cuda.device_of(args[0]):  # Triton launches on the current device
            out = (launch or getattr(kernels(), name))(*args)
        return without_launch(out, args) if _choice.compile_only else out

    def without_launch(out: Any, args: Sequence[Any]) -> Any:
        """The results of the op after it has compiled its kernel only; `out` are those that nothing was written to."""
        with without_dispatch_modes():
            results = _tensors(out)
            if not all(one.is_floating_point() for one in [*results, *_tensors([args[place] for place in places])]):
                return plain(*args)
            for one in results:
                one.zero_()
        return out

    def run_op(*args: Any) -> Any:
        args = _joined(args, groups)
        out = (plain if is_opaque and not is_for_triton(args[0]) else run_kernel)(*args)
        return tuple(out) if isinstance(out, tuple) else out

    def run_fake(*args: Any) -> Any:
        args = _joined(args, groups)
        if fake is not None:
            return fake(*args)
        with torch.autocast(args[0].device.type, enabled=False):
            return _contiguous(plain(*args))

    run_op.__signature__ = signature
    op = torch.library.custom_op(f"hf_specdec::{name}", run_op, mutates_args=written)
    if signature.return_annotation is not None:
        op.register_fake(run_fake)

    @functools.wraps(plain)
    def run(tensor: torch.Tensor, *args: Any) -> Any:
        takes_kernel = is_for_triton(tensor)
        if is_opaque or takes_kernel:
            if torch.compiler.is_compiling() or _must_be_dispatched((tensor, *args)):
                out = op(tensor, *_split(args, groups))
            else:
                out = (run_kernel if takes_kernel else plain)(tensor, *args)
        elif torch.compiler.is_compiling() or not (_choice.batch_invariant or _choice.on_reference):
            out = plain(tensor, *args)
        else:
            if _choice.on_reference is not None:
                _choice.on_reference(name, tensor, *args)
            with without_dispatch_modes():
                out = plain(tensor, *args)
        return out if result is tuple else result(*out)

    return run
