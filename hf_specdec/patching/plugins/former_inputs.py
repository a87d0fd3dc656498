"""Methods of modules that read earlier inputs from the cache, on a `RaggedCache`.

N-gram embeddings read the tokens before their own, dilated convolutions the inputs before theirs. Without a cache such
a method computes the same over the earlier and its own inputs together, so on a `RaggedCache` it runs that way.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import nn

from ...cache.ragged_cache import RaggedCache
from ...host.caches import cache_parameter, given_cache
from ...host.modeling import UPDATE_CONV_STATE
from ...modules.hidden_states import modules_of
from ...modules.patch import bound, is_unpatched
from ...modules.signature import names_in


class _State(NamedTuple):
    """What a method stores in the cache.

    Attributes:
        layer_idx, index: the layer, and the state in it.
        count: number of inputs before its own that a method reads.
        fill: its value for inputs before the first token.
    """

    layer_idx: int
    index: int
    count: int
    fill: float


class _Finder(Exception):
    """Takes the place of a cache: raises itself when a method without inputs stores its `state`."""

    state: _State

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        # A method stores the value for inputs before the first token if that is not zero.
        fill = conv_states.flatten()[0].item() if conv_states.numel() else 0
        self.state = _State(layer_idx, state_idx, conv_kernel_size, fill)
        raise self


def _state_of(method: Callable, module: nn.Module) -> _State | None:
    """What `method` of `module` stores in the cache; None if unknown."""
    for inputs in (torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 0, 1)):  # tokens, hidden states
        try:
            method(module, inputs, _Finder())
        except _Finder as found:
            return found.state
        except Exception:  # a method may raise anything
            continue
    return None


@functools.cache
def _methods(kind: type, others: frozenset[str]) -> tuple[str, ...]:
    """Names of the methods of the class `kind` that store inputs, and call none of the functions `others`."""
    names = []
    for name, function in inspect.getmembers(kind, inspect.isfunction):
        called, parameters = names_in(function), list(inspect.signature(function).parameters)
        if UPDATE_CONV_STATE in called and others.isdisjoint(called) and parameters[2:] == [cache_parameter(function)]:
            names.append(name)
    return tuple(names)


def _run(
    module: nn.Module, name: str, state: _State, inputs: torch.Tensor, cache: Any = None, **named: Any
) -> torch.Tensor:
    """The output of a method for `inputs` `[B, n, ...]`; its cache is given by position, or by one of its names."""
    method, cache = getattr(type(module), name), given_cache({"cache": cache, **named})
    if not isinstance(cache, RaggedCache):
        return method(module, inputs, cache)
    layer = cache.layers[state.layer_idx]
    return method(module, layer.with_former(inputs, state.index, state.count, state.fill), None)[:, state.count :]


def former_inputs(others: Collection[str], *models: nn.Module) -> dict[str, list[tuple[nn.Module, Callable]]]:
    """For `Replacements`: the methods of modules of `models` that read earlier inputs, and call none of the functions
    `others`, in their form for a `RaggedCache`. Methods that somebody has replaced are left as they are."""
    found: dict[str, list[tuple[nn.Module, Callable]]] = {}
    for module in modules_of(*models):
        for name in _methods(type(module), frozenset(others)):
            if is_unpatched(module, _run, name=name) and (state := _state_of(getattr(type(module), name), module)):
                found.setdefault(name, []).append((module, bound(_run, name, state)))
    return found
