"""Triton's interpreter, without what it does again and again."""

import inspect
from typing import Any

from triton.language.core import is_builtin
from triton.runtime import interpreter


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
