"""Tensors whose elements are computed when something reads them: together with what reads them, where that is an op.

Modules add to the residual stream and norm the sum, or rotate keys and store them, in Python of their own. An op that
computes both in one kernel takes such a tensor over (`ops.add_rms_norm`, `rotate_and_store`); before anything
else reads it, torch calls `Deferred.__torch_function__`, which computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import ops
from ..kernels.types import NormKind, RotaryKind
from .patch import DTYPES, uses_layer_kernels

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)

# What reads neither elements nor where they are.
_OF_METADATA = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad")]
    + [getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "is_floating_point")]
)
_SUMS = frozenset([torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__])


class Deferred(torch.Tensor):
    """Stands for a tensor that may not be computed yet; sums of one with another tensor are deferred, too.

    Its own memory is that of another tensor of the same shape, dtype and device, and is never read.

    Attributes:
        value: the tensor, a plain one; None if it is not computed.
        pending: what computes it, as `result(index)`; None if it is computed.
    """

    value: torch.Tensor | None
    pending: Sum | Rotation | Stored | None
    index: int

    @staticmethod
    def of(like: torch.Tensor, value: torch.Tensor | None, pending: Any = None, index: int = 0) -> Deferred:
        """For `value`, or for what `pending` computes: a tensor like `like`."""
        deferred = torch.Tensor._make_subclass(Deferred, like)
        deferred.value, deferred.pending, deferred.index = value, pending, index
        return deferred

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if function in _OF_METADATA:
                return function(*args, **kwargs)
            if function in _SUMS and len(args) == 2 and not kwargs:
                total = _deferred_sum(*args)
                if total is not None:
                    return total
        return function(*_computed(args), **_computed(kwargs))


def _computed(values: Any) -> Any:
    """`values`, and those in tuples, lists and dictionaries of them, with plain tensors for deferred ones."""
    if isinstance(values, Deferred):
        return plain(values)
    if isinstance(values, (list, tuple)):
        made = [_computed(one) for one in values]
        return type(values)(*made) if hasattr(values, "_fields") else type(values)(made)
    if isinstance(values, dict):
        return {key: _computed(one) for key, one in values.items()}
    return values


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, computed, as no `Deferred`."""
    if not isinstance(tensor, Deferred):
        return tensor
    if tensor.value is None:
        tensor.value, tensor.pending = tensor.pending.result(tensor.index), None
    return tensor.value


class Sum:
    """A sum of two tensors, its `terms`, of one shape and dtype."""

    def __init__(self, *terms: torch.Tensor):
        self.terms = terms

    def result(self, index: int) -> torch.Tensor:
        return torch.add(*self.terms)


def _deferred_sum(first: Any, second: Any) -> Deferred | None:
    """The sum of two tensors, not computed; None where a norm would not compute it."""
    if not all(type(one) is Deferred or type(one) in _PLAIN_TENSORS for one in (first, second)):
        return None
    if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
        return None
    if first.dtype not in DTYPES or torch.is_grad_enabled() or not uses_layer_kernels(first):
        return None
    terms = plain(first), plain(second)
    return Deferred.of(terms[1], None, Sum(*terms))


def residual_stream(states: torch.Tensor) -> torch.Tensor:
    """`states`, sums with which are computed by the norm that reads them, where layers run kernels of their own."""
    if type(states) is not torch.Tensor or states.dtype not in DTYPES or torch.is_grad_enabled():
        return states
    return Deferred.of(states, states) if uses_layer_kernels(states) else states


def normed(inputs: torch.Tensor, weight: torch.Tensor | None, eps: float, kind: NormKind) -> torch.Tensor:
    """`ops.rms_norm`; computes `inputs`, too, if they are a sum that is not computed."""
    pending = inputs.pending if isinstance(inputs, Deferred) else None
    if not isinstance(pending, Sum):
        return ops.rms_norm(plain(inputs), weight, eps, kind)
    inputs.value, out = ops.add_rms_norm(*pending.terms, weight, eps, kind)
    inputs.pending = None
    return out


class Rotation:
    """Rotary embedding of query and key, or of one of them; arguments as of `ops.rotary`."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, states: Sequence[torch.Tensor], kind: RotaryKind):
        self._cos, self._sin, self._states, self._kind = cos, sin, states, kind
        self._results: list[torch.Tensor | None] = [None] * len(states)

    def result(self, index: int) -> torch.Tensor:
        if self._results[index] is None:
            missing = [place for place, one in enumerate(self._results) if one is None]
            states = [self._states[place] for place in missing]
            for place, rotated in zip(missing, ops.rotary(self._cos, self._sin, states, self._kind), strict=True):
                self._results[place] = rotated
        return self._results[index]

    def store(self, index: int, keys: torch.Tensor, values: torch.Tensor, *new: torch.Tensor | None) -> bool:
        """Compute all but the key, tensor number `index`, which goes to the cache with its value as `ops.write_kv` has
        it; returns whether it did so: not if anything is computed already, or the cache is of another dtype without
        scales."""
        is_new = index == len(self._results) - 1 and all(one is None for one in self._results)
        is_same = keys.dtype == self._states[-1].dtype and values.dtype == new[0].dtype
        if not is_new or not (is_same or new[2] is not None):
            return False
        rotation = self._cos, self._sin, self._states, self._kind
        self._results[:-1] = ops.rotate_and_store(*rotation, keys, values, *new)
        return True


class Stored:
    """Keys and values that are stored as float8, which attention reads as they are; others read them dequantised.

    Args:
        keys, values: `[B, kv_heads, slots, D]` float8.
        scales: of both, `[B, kv_heads, slots, 2]`, see `kernels.float8_reference`.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, scales: torch.Tensor):
        self.parts = keys, values, scales

    def result(self, index: int) -> torch.Tensor:
        return ops.dequantise(self.parts[index], self.parts[2][..., index])

    def shown(self) -> tuple[Deferred, Deferred]:
        """Keys and values in the dtype of the scales."""
        like = self.parts[2][..., :1]
        keys, values = (Deferred.of(like.expand(one.shape), None, self, i) for i, one in enumerate(self.parts[:2]))
        return keys, values


def read_by_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The query, computed, and keys, values and scales as attention reads them: as stored, if nothing has read them."""
    if isinstance(query, Deferred):
        query = plain(query)
    if not (isinstance(key, Deferred) or isinstance(value, Deferred)):
        return query, key, value, None
    pending = key.pending if isinstance(key, Deferred) else None
    if isinstance(pending, Stored) and isinstance(value, Deferred) and value.pending is pending:
        return query, *pending.parts
    return query, plain(key), plain(value), None


def rotated(
    cos: torch.Tensor, sin: torch.Tensor, states: Sequence[torch.Tensor], kind: RotaryKind
) -> list[torch.Tensor]:
    """`ops.rotary` of query and key, computed when they are read; of keys, by what stores them."""
    if torch.is_grad_enabled():
        return ops.rotary(cos, sin, states, kind)
    rotation = Rotation(cos, sin, states, kind)
    return [Deferred.of(one, None, rotation, index) for index, one in enumerate(states)]


def store_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    positions: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """`ops.write_kv`; also rotates query and key, if these are a rotation that is not computed."""
    if isinstance(key_states, Deferred):
        pending, value_states = key_states.pending, plain(value_states)
        new = value_states, positions, scales
        if isinstance(pending, Rotation) and pending.store(key_states.index, keys, values, *new):
            return
        key_states = plain(key_states)
    ops.write_kv(keys, values, key_states, value_states, positions, scales)
