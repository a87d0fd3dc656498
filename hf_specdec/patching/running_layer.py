"""Recurrent layers whose function over several tokens is given no state: the state of the layer that runs.

The mixers of Mamba-1 hand their state to the function for a single token only. While such a layer runs over a
`RaggedCache`, the functions of `recurrent_functions` find its state here.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from ..cache.ragged_cache import RaggedCache
from ..cache.recurrent_layers import RecurrentState
from ..host.modeling import RECURRENCES
from ..modules.hidden_states import modules_of
from ..modules.patch import original
from ..modules.signature import names_in

# Functions over several tokens that are given no state.
STATELESS = frozenset(RECURRENCES["mamba"][:1])


class _Running(threading.local):
    """The layer that this thread runs.

    Attributes:
        state: its recurrent state; None outside of such a layer.
        calls: how many functions have taken it.
    """

    state: RecurrentState | None = None
    calls: int = 0


_running = _Running()


def next_state() -> RecurrentState | None:
    """The state for a function that is given none: in the i-th call of a layer that of its i-th head.

    None if no layer runs over a `RaggedCache`. A layer that runs all heads in one call has the state of the first.
    """
    state, head = _running.state, _running.calls
    if state is None:
        return None
    _running.calls = head + 1
    return state[:, head]


@functools.cache
def is_stateless(kind: type[nn.Module]) -> bool:
    """Whether modules of a class call a function of `STATELESS`."""
    return not STATELESS.isdisjoint(names_in(kind.forward))


def running_layer_forwards(*models: nn.Module) -> list[tuple[nn.Module, Callable[[Any], Any]]]:
    """For `Replacements` of `forward`: the modules of `models` that call a function of `STATELESS`."""
    return [(module, _make_forward) for module in modules_of(*models) if is_stateless(type(module))]


def _make_forward(module: nn.Module) -> Callable[..., Any]:
    own = original(module, "forward")
    return functools.partial(_forward, module, type(module).forward.__get__(module) if own is None else own)


def _forward(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a layer by its own `forward`, with its state where functions find it."""
    cache = next((one for one in (*args, *kwargs.values()) if isinstance(one, RaggedCache)), None)
    if cache is None:
        return forward(*args, **kwargs)
    _running.state, _running.calls = cache.layers[module.layer_idx].recurrent_states[0], 0
    try:
        return forward(*args, **kwargs)
    finally:
        _running.state = None
