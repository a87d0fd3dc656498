"""Triton's interpreter, without what it does again and again."""

import inspect
from dataclasses import replace
from typing import Any

import torch
import triton.language as tl
from triton.language.core import is_builtin
from triton.runtime import interpreter


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether results of kernels are equal, bit for bit on a GPU. In the interpreter numpy computes, whose bits of a
    product depend on its shape, in a way of each processor.
    """
    if found.is_cuda:
        return torch.equal(found, expected)
    return torch.allclose(found.double(), expected.double(), rtol=1e-5, atol=1e-5)


def remember_builtins() -> None:
    """Let Triton's interpreter look for the built-in functions of `triton.language` once.

    It replaces them at every launch of a kernel, and again at every call from a kernel of another function, each time
    by going through all members of the same modules and classes, which took a third of the time of a test of kernels.
    """
    names: dict[Any, list[str]] = {}

    def patch_builtin(owner: Any, *arguments: Any) -> None:
        if owner not in names:  # not replaced yet
            names[owner] = [name for name, member in inspect.getmembers(owner) if is_builtin(member)]
        for name in names[owner]:
            if is_builtin(member := getattr(owner, name)):
                interpreter._patch_attr(owner, name, member, *arguments)

    interpreter._patch_builtin = patch_builtin


def skip_overflow_checks() -> None:
    """Let Triton's interpreter not compute each sum and product of integers a second time, in int64.

    It compares the two where kernels are debugged. Elsewhere, as here, it computes them and compares nothing.
    """
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def remember_dtypes() -> None:
    """Let Triton's interpreter not make its table of NumPy's dtypes whenever it looks one up."""
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
