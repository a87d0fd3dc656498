"""Triton's interpreter, without its repeated work."""

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.core import is_builtin
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether results of kernels are equal, bit for bit on a GPU. The interpreter uses numpy; its bits of a product
    depend on the shape and the processor.
    """
    if found.is_cuda:
        return torch.equal(found, expected)
    return torch.allclose(found.double(), expected.double(), rtol=1e-5, atol=1e-5)


def replace_builtins_once() -> None:
    """Let Triton's interpreter replace the functions of `triton.language` once for a launch.

    Without this it replaces them at every call of another function from a kernel, each time by going through all
    members of the same modules and classes. That took a third of the time of a test of kernels.
    """
    replace_for, whole = interpreter._patch_lang, SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    running: list[Any] = []  # the scope of the launch that runs

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            running.clear()

    def patch_lang(function: Any) -> Any:
        if not running:
            running.append(scope := Scope())
            scope._changes = replace_for(whole)._changes
            return scope
        return interpreter._LangPatchScope()  # of a call, or of a function of `triton.language`: all is replaced

    members: dict[Any, dict[str, Any]] = {}
    wrapper = tl.load.__code__

    def interpreted(function: Any) -> Any:
        """A builtin that runs interpreted, without the wrapper that refuses to run outside of a kernel."""
        is_wrapped = getattr(function, "__code__", None) is wrapper  # Triton 3.8 also has a class among them
        inner = function.__wrapped__ if is_wrapped else function

        def call(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter.interpreter_semantic
            return inner(*arguments, **options)

        return call

    def patch_builtin(owner: Any, _: Any, scope: Any) -> None:
        if owner not in members:  # not replaced yet
            found = inspect.getmembers(owner, is_builtin)
            members[owner] = {name: interpreted(member) for name, member in found}
        for name, member in members[owner].items():
            if is_builtin(getattr(owner, name)):
                scope.set_attr(owner, name, member)

    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_lang


def share_shapes() -> None:
    """Let Triton's interpreter make shapes and types of tensors, and blocks of one number, only once, and skip the
    search for the common type of two tensors of one type.
    """
    check, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
    known, of_tuple, of_number, of_pair, types = {}, {}, {}, {}, {}

    def look_up(shape: Any) -> tuple[Any, Any, Any, str]:
        """Of a type, of a tensor, its elements, its name; each of them once for all of one shape."""
        if id(shape) in of_tuple:
            return of_tuple[id(shape)]
        key = tuple(one.value if isinstance(one, tl.constexpr) else one for one in shape)
        if key not in known:
            of_type, of_tensor = tl.tuple(key), tl.tuple([tl.constexpr(one) for one in key])
            found = of_type, of_tensor, tl.constexpr(validate_block_shape(key)), str(of_type)
            known[key] = of_tuple[id(of_type)] = of_tuple[id(of_tensor)] = found
        return known[key]

    def make_block_type(self: Any, element_type: Any, shape: Any) -> None:
        if not len(shape):
            raise TypeError("a block without a dimension")
        self.element_ty = element_type
        self.shape, _, numel, name = look_up(shape)
        self.numel = numel.value
        self.name = f"<{name}, {element_type}>"

    def is_same_type(self: Any, other: Any) -> bool:
        return isinstance(other, tl.block_type) and self.shape is other.shape and self.element_ty == other.element_ty

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        _, self.shape, self.numel, _ = look_up(type.shape if type.is_block() else ())

    def broadcast_values(self: Any, left: Any, right: Any) -> Any:
        if left.shape is right.shape:
            return left, right
        pair = id(left.shape), id(right.shape)
        if pair not in of_pair:
            of_pair[pair] = look_up(broadcast(self, left, right)[0].shape)[:2]
        of_type, of_tensor = of_pair[pair]

        def expand(one: Any) -> Any:
            if one.shape is of_tensor:
                return one
            data, scalar, shape = one.handle.data, one.dtype, of_type.values
            data = np.full(shape, data, data.dtype) if data.size == 1 else np.broadcast_to(data, shape)
            if (id(scalar), id(of_type)) not in types:
                types[id(scalar), id(of_type)] = tl.block_type(scalar, of_type)
            return tl.tensor(interpreter.TensorHandle(data, scalar), types[id(scalar), id(of_type)])

        return expand(left), expand(right)

    def check_types(self: Any, left: Any, right: Any, *options: bool, **more: bool) -> Any:
        are_tensors = isinstance(left, tl.tensor), isinstance(right, tl.tensor)
        if all(are_tensors):
            is_division = len(options) > 3 or more  # whose type is another for integers and 16-bit types
            is_one_type = left.dtype is right.dtype or left.dtype == right.dtype
            if is_one_type and not left.dtype.is_ptr() and not is_division:
                return broadcast_values(self, left, right)
        elif any(are_tensors) and not more:
            one, number = (left, right) if are_tensors[0] else (right, left)
            key = are_tensors, one.dtype.name, id(one.shape), type(number), str(number), options
            if key not in of_number:
                found = check(self, left, right, *options)
                if found[not are_tensors[0]] is not one:  # it had to be converted
                    return found
                of_number[key] = found[are_tensors[0]]
            return (one, of_number[key]) if are_tensors[0] else (of_number[key], one)
        return check(self, left, right, *options, **more)

    tl.block_type.__init__, tl.block_type.__eq__, tl.tensor.__init__ = make_block_type, is_same_type, make_tensor
    TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value = check_types, broadcast_values


def skip_overflow_checks() -> None:
    """Let Triton's interpreter not compute each sum and product of integers a second time, in int64.

    It compares the two only when kernels are debugged.
    """
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def remember_dtypes() -> None:
    """Let Triton's interpreter make its table of NumPy's dtypes only once."""
    look_up, known = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    interpreter._get_np_dtype = get_np_dtype


def round_to_float8() -> None:
    """Let Triton's interpreter round to e4m3 as GPUs and torch do: to the nearest, of two to the even one.

    Its own conversion rounds halves up, and loses the carry into the exponent: 127 becomes 64.
    """
    convert = interpreter._convert_float

    def convert_float(values: Any, from_dtype: Any, to_dtype: Any, mode: Any) -> Any:
        if to_dtype != tl.float8e4nv or from_dtype != tl.float32:
            return convert(values, from_dtype, to_dtype, mode)
        return torch.from_numpy(values.astype("float32")).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = convert_float
