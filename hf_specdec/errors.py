"""Messages of errors that others raised."""

from __future__ import annotations


def first_line(error: Exception) -> str:
    """What `error` says, without the advice and stack traces that compilers and drivers add."""
    return str(error).strip().partition("\n")[0]
