"""Messages of errors raised by torch, compilers and drivers."""

from __future__ import annotations


def first_line(error: Exception) -> str:
    """The first line of the message of `error`, without the advice and stack traces that compilers and drivers add."""
    return str(error).strip().partition("\n")[0]
