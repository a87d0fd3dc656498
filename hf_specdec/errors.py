"""Messages of errors raised by torch, compilers and drivers."""

from __future__ import annotations

import torch


def first_line(error: Exception) -> str:
    """The first line of the message of `error`, without the advice and stack traces that compilers and drivers add."""
    return str(error).strip().partition("\n")[0]


def failure_of(error: Exception) -> str:
    """Type and first line of an error of a model, which may raise any; raises it again if it is for want of memory."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    return f"{type(error).__name__}: {first_line(error)}"
