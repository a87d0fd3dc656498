"""Outcomes of a class in the zoo, and of a call."""

from __future__ import annotations

import traceback
from pathlib import Path

RIGHT, REFUSED, WRONG, CRASH, NOT_BUILT, NO_TEXT = "right", "refused", "wrong", "crash", "not built", "no plain text"


def last_line(error: BaseException) -> str:
    """The error in one line, with the place that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]} ({Path(frame.filename).name}:{frame.lineno})"


def is_refusal(error: BaseException, generated: bool, package: Path) -> bool:
    """Whether `error` refuses the call: raised by the code of `package` or transformers, before anything was
    `generated`."""
    if not isinstance(error, ValueError):
        return False
    place = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    ours = package in place.parents
    return ours or (place.parts[-3:-1] == ("transformers", "generation") and not generated)
