"""Steps of torch's optimizers, which fused ones make without counting them in the versions of the weights."""

from __future__ import annotations

import itertools
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

_NUMBERS = itertools.count(1)
_LAST = 0
_HANDLE: Any = None


def _note(*_: Any) -> None:
    global _LAST
    _LAST = next(_NUMBERS)


def watch() -> None:
    """Note the steps of all optimizers of this process, from now on; twice is once."""
    global _HANDLE
    if _HANDLE is None:
        _HANDLE = register_optimizer_step_post_hook(_note)


def unwatch() -> None:
    """Do not."""
    global _HANDLE
    if _HANDLE is not None:
        _HANDLE.remove()
        _HANDLE = None


def last_step() -> int:
    """A number that is another one after each step, of whatever optimizer."""
    return _LAST
