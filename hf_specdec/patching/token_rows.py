"""Recurrent layers whose function over several tokens is given no state: their tokens are run as rows.

The mixers of Mamba-1 hand their state to the function for a single token only. Between their projections they mix
tokens in two places, the convolution and the recurrence, and both read the cache, which knows the positions of a block.
So `[B, n]` tokens may be given to such a layer as `[B * n, 1]`: it runs its code for a single token, and its state
reaches the functions of `recurrent_functions`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .cache import RaggedCache
from .hidden_states import modules_of
from .patch import original

# Functions over several tokens that are given no state, by the names that transformers' modeling files use.
STATELESS = frozenset({"mamba_selective_scan"})


@functools.cache
def _runs_without_state(kind: type[nn.Module]) -> bool:
    """Whether modules of a class call a function of `STATELESS`."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and not STATELESS.isdisjoint(code.co_names)


def token_row_forwards(*models: nn.Module) -> list[tuple[nn.Module, Callable[[Any], Any]]]:
    """For `Replacements` of `forward`: the modules of `models` whose tokens are to be rows."""
    return [(module, _make_forward) for module in modules_of(*models) if _runs_without_state(type(module))]


def forgets_states(model: nn.Module) -> bool:
    """Whether layers of `model`, where it is not patched, begin without a state in passes over several tokens."""
    return any(_runs_without_state(type(module)) for module in modules_of(model))


def _make_forward(module: nn.Module) -> Callable[..., torch.Tensor]:
    own = original(module, "forward")
    return functools.partial(_forward, type(module).forward.__get__(module) if own is None else own)


def _forward(
    forward: Callable[..., torch.Tensor],
    hidden_states: torch.Tensor,
    *args: Any,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Run a layer over `[B, n, D]` hidden states.

    Args:
        forward: the layer's own.
        hidden_states: its inputs.
        args, kwargs: others of the layer, such as the cache.
        attention_mask: `[B, n]`, 0 where a column is no token; a `RaggedCache` knows that by itself.
    """
    if not any(isinstance(one, RaggedCache) for one in (*args, *kwargs.values())):
        return forward(hidden_states, *args, attention_mask=attention_mask, **kwargs)
    out = forward(hidden_states.flatten(0, 1)[:, None], *args, attention_mask=None, **kwargs)
    return out.reshape(*hidden_states.shape[:2], -1)
