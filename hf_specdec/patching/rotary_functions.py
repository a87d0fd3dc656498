"""Rotary embeddings of transformers' attention layers as one kernel, see `ops.rotary`.

Attention layers call a function that is a global of their modeling file. Running it on a few random values on a CPU
finds which pairs it rotates, and how it rounds; it is replaced if it computes the bits of the op's reference.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from .. import ops
from ..host.modeling import ROTATIONS
from ..kernels.types import RotaryKind
from ..modules.deferred import Rotation, plain
from ..modules.hidden_states import modules_of
from ..modules.patch import DTYPES, Replacements, original, uses_layer_kernels
from ..modules.signature import code_of, functions_of, replacing_functions
from .layer_kernels import any_has_layer_kernels
from .layer_probes import same_bits

_ALL_KINDS = (RotaryKind(*flags) for flags in itertools.product((False, True), repeat=len(RotaryKind._fields)))
ROTARY_KINDS = [kind for kind in _ALL_KINDS if kind.shared_angles or not kind.half_angles]

# Rows, columns, and heads of query and key, on which functions are probed.
_BATCH, _COLUMNS, _HEADS = 2, 3, (2, 1)

_states = itertools.count()


def _rotary(function: Callable, state: int, count: int, *args: torch.Tensor, **kwargs: Any) -> Any:
    """`function`, the model's own, of `count` tensors `[B, heads, n, D]`, or `[B, n, heads, D]` if `unsqueeze_dim` is
    2, and of cosines and sines. `state` identifies the functions that it may call."""
    heads_dim = kwargs.get("unsqueeze_dim", 1)
    is_understood = len(args) == count + 2 and kwargs.keys() <= {"unsqueeze_dim"} and heads_dim in (1, 2)
    if not is_understood or not uses_layer_kernels(args[0]):
        return function(*args, **kwargs)
    *states, cos, sin = map(plain, args)
    if heads_dim == 2:
        states = [one.transpose(1, 2) for one in states]
    kind = None
    if _fit(states, cos, sin):
        options = tuple(kwargs.items())
        sizes = states[0].shape[-1], cos.shape[-1]
        kind = _kind_of(function, state, count, states[0].dtype, cos.dtype, *sizes, options)
    if kind is None:
        return function(*args, **kwargs)
    found = Rotation(cos, sin, states, kind).results() if heads_dim == 1 else ops.rotary(cos, sin, states, kind)
    if heads_dim == 2:
        found = [one.transpose(1, 2) for one in found]
    return found[0] if count == 1 else tuple(found)


def _fit(states: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether shapes and dtypes are such as `ops.rotary` takes."""
    first = states[0]
    if first.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape or cos.dtype != sin.dtype:
        return False
    batch, _, columns = first.shape[:3]
    kinds = {(one.dtype, one.device, one.dim(), one.shape[0], *one.shape[2:]) for one in states}
    is_known = first.dtype in DTYPES and cos.dtype in DTYPES
    return len(kinds) == 1 and is_known and cos.shape[0] in (1, batch) and cos.shape[1] == columns


@functools.lru_cache(maxsize=256)
def _kind_of(
    function: Callable,
    state: int,
    count: int,
    dtype: torch.dtype,
    angle_dtype: torch.dtype,
    size: int,
    angles: int,
    options: tuple[tuple[str, Any], ...],
) -> RotaryKind | None:
    """What `function` does with heads of `size` elements and `angles`, given `options`; None if unknown."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cpu")

    states = [draw(_BATCH, heads, _COLUMNS, size).to(dtype) for heads in _HEADS[:count]]
    cos, sin = (draw(_BATCH, _COLUMNS, angles).to(angle_dtype) for _ in range(2))
    is_last = dict(options).get("unsqueeze_dim", 1) == 2
    with torch.no_grad(), ops.references():
        try:
            found = function(*(one.transpose(1, 2) if is_last else one for one in states), cos, sin, **dict(options))
            found = [one.transpose(1, 2) if is_last else one for one in ((found,) if count == 1 else found)]
        except Exception:  # a function may raise anything
            return None
        for kind in ROTARY_KINDS:
            is_whole = kind.half_angles or angles % 2 == 0
            if is_whole and angles * (2 if kind.half_angles else 1) <= size:
                expected = ops.rotary(cos, sin, states, kind)
                if all(same_bits(*pair) for pair in zip(found, expected, strict=True)):
                    return kind
    return None


def rotary_functions(*models: nn.Module) -> Replacements:
    """Context in which attention layers of `models` rotate query and key with `ops.rotary`, on devices whose policy
    says so; other models are not affected."""
    if not any_has_layer_kernels(modules_of(*models)):
        return Replacements({})
    return Replacements(replacing_functions(ROTATIONS, _over_original, *models))


def _over_original(name: str, file: ModuleType) -> Callable:
    function = original(file, name)
    called = functions_of([inspect.getmodule(function) or file])
    return _over(function, _state_of(frozenset(map(weakref.ref, called))))


@functools.lru_cache(maxsize=256)
def _state_of(called: frozenset[weakref.ref]) -> int:
    """A number for the functions of a file; it changes if any, e.g. `rotate_half`, is replaced."""
    return next(_states)


@functools.lru_cache(maxsize=256)
def _over(function: Callable, state: int) -> Callable:
    """The replacement of `function`; `function` itself if its arguments are unknown. The same object every time."""
    code = code_of(function)
    names = () if code is None else code.co_varnames[: code.co_argcount]
    count = names.index("cos") if "cos" in names else 0
    is_understood = count in (1, 2) and names[count : count + 2] == ("cos", "sin")
    return functools.partial(_rotary, function, state, count) if is_understood else function
