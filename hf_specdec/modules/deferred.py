"""Tensors that are computed when something reads them: together with their reader, if that is an op.

Modules add to the residual stream and then norm the sum, or rotate keys and then store them, in their own Python code.
An op that computes both in one kernel takes over such a tensor (`ops.add_rms_norm`, `rotate_and_store`). Before
anything else reads it, torch calls `Deferred.__torch_function__`, which computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import ops
from ..kernels.types import NormKind, RotaryKind
from .patch import DTYPES, uses_layer_kernels
from .weights import PLAIN_WEIGHTS

# Functions that read neither elements nor addresses.
_OF_METADATA = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "requires_grad")]
    + [getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "is_floating_point")]
)
_SUMS = frozenset([torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__])


class Deferred(torch.Tensor):
    """Stands for a tensor that may not be computed yet; its sum with another tensor is deferred, too.

    Its own memory is that of another tensor with the same shape, dtype and device, and is never read.

    Attributes:
        value: the plain tensor; None if it is not computed yet.
        pending: computes it, as `result(index)`; None if it is computed.
    """

    value: torch.Tensor | None
    pending: Sum | Rows | Rotation | Stored | None
    index: int

    @staticmethod
    def of(like: torch.Tensor, value: torch.Tensor | None, pending: Any = None, index: int = 0) -> Deferred:
        """Stands for `value`, or for what `pending` computes: a tensor like `like`."""
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
    """`values`, with plain tensors in place of deferred ones, also inside tuples, lists and dictionaries."""
    if isinstance(values, Deferred):
        return plain(values)
    if isinstance(values, (list, tuple)):
        made = [_computed(one) for one in values]
        return type(values)(*made) if hasattr(values, "_fields") else type(values)(made)
    if isinstance(values, dict):
        return {key: _computed(one) for key, one in values.items()}
    return values


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a plain tensor, which is computed if need be."""
    if not isinstance(tensor, Deferred):
        return tensor
    if tensor.value is None:
        tensor.value, tensor.pending = tensor.pending.result(tensor.index), None
    return tensor.value


class Sum:
    """The sum of two tensors, its `terms`, of the same shape and dtype."""

    def __init__(self, *terms: torch.Tensor):
        self.terms = terms

    def result(self, index: int) -> torch.Tensor:
        return torch.add(*self.terms)


def _deferred_sum(first: Any, second: Any) -> Deferred | None:
    """The deferred sum of two tensors; None if no norm could compute it."""
    if not all(type(one) is Deferred or type(one) in PLAIN_WEIGHTS for one in (first, second)):
        return None
    if first.shape != second.shape or first.dtype != second.dtype or first.device != second.device:
        return None
    if first.dtype not in DTYPES or torch.is_grad_enabled() or not uses_layer_kernels(first):
        return None
    terms = plain(first), plain(second)
    return Deferred.of(terms[1], None, Sum(*terms))


def residual_stream(states: torch.Tensor) -> torch.Tensor:
    """`states`, marked so that norms compute sums with it, if layers run kernels of their own."""
    if type(states) is not torch.Tensor or states.dtype not in DTYPES or torch.is_grad_enabled():
        return states
    return Deferred.of(states, states) if uses_layer_kernels(states) else states


def normed(inputs: torch.Tensor, weight: torch.Tensor | None, eps: float, kind: NormKind) -> torch.Tensor:
    """`ops.rms_norm`; also computes `inputs` if they are a deferred sum."""
    pending = inputs.pending if isinstance(inputs, Deferred) else None
    if not isinstance(pending, Sum):
        return ops.rms_norm(plain(inputs), weight, eps, kind)
    inputs.value, out = ops.add_rms_norm(*pending.terms, weight, eps, kind)
    inputs.pending = None
    return out


class Rows:
    """Rows of a `table` `[V, H]`, such as embeddings, at `index` `[B, n]` int64."""

    def __init__(self, table: torch.Tensor, index: torch.Tensor):
        self.parts = table, index

    def result(self, index: int) -> torch.Tensor:
        table, rows = self.parts
        return ops.gather_rows(table[None], rows, None)


def rows_at(index: torch.Tensor, table: torch.Tensor) -> Deferred:
    """`table[index]`, see `Rows`; norms that are joined with others read the table."""
    return Deferred.of(table[0].expand(*index.shape, -1), None, Rows(table, index))


def joined_norms(
    inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], eps: float, kind: NormKind
) -> torch.Tensor:
    """`ops.joined_norms` of two `inputs` `[B, n, D]`; it also takes `rows_at` that are not computed."""
    pending = [one.pending if isinstance(one, Deferred) else None for one in inputs]
    parts = [
        how.parts if isinstance(how, Rows) else (plain(one), None) for one, how in zip(inputs, pending, strict=True)
    ]
    tables, indices = zip(*parts, strict=True)
    return ops.joined_norms(*tables, *indices, *weights, eps, kind)


@dataclass(eq=False)
class Rotation:
    """Rotary embedding of query and key, or of one of them; arguments as in `ops.rotary`.

    With `num_queries` only so many columns of the query, the last ones, are the result.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    states: Sequence[torch.Tensor]
    kind: RotaryKind
    num_queries: int | None = None

    def __post_init__(self) -> None:
        self._results: list[torch.Tensor | None] = [None] * len(self.states)

    def results(self) -> list[torch.Tensor]:
        """All results, computed by their readers; keys by the op that stores them."""
        if torch.is_grad_enabled():
            return [self.result(index) for index in range(len(self.states))]
        return [Deferred.of(self.part(one, index), None, self, index) for index, one in enumerate(self.states)]

    def result(self, index: int) -> torch.Tensor:
        if self._results[index] is None:
            missing = [place for place, one in enumerate(self._results) if one is None]
            states = [self.states[place] for place in missing]
            for place, rotated in zip(missing, ops.rotary(self.cos, self.sin, states, self.kind), strict=True):
                self._results[place] = self.part(rotated, place)
        return self._results[index]

    def part(self, states: torch.Tensor, index: int) -> torch.Tensor:
        """The columns of tensor `index` that are a result."""
        return states[:, :, -self.num_queries :] if index == 0 and self.num_queries is not None else states

    def store(self, index: int, keys: torch.Tensor, values: torch.Tensor, *new: torch.Tensor | None) -> bool:
        """Compute everything but the key, tensor `index`, which is rotated into the cache, with its value stored as by
        `ops.write_kv`. Returns False, and does nothing, if something is computed already, or if the cache has another
        dtype without scales."""
        is_new = index == len(self._results) - 1 and all(one is None for one in self._results)
        is_same = keys.dtype == self.states[-1].dtype and values.dtype == new[0].dtype
        if not is_new or not (is_same or new[2] is not None):
            return False
        rotation = self.cos, self.sin, self.states, self.kind
        self._results[:-1] = [self.part(one, 0) for one in ops.rotate_and_store(*rotation, keys, values, *new)]
        return True


class Stored:
    """Keys and values stored as float8. Attention reads them as they are, others read them dequantised.

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
    """The computed query, and keys, values and scales for attention: as stored if nothing has read them before."""
    query = plain(query)
    if not (isinstance(key, Deferred) or isinstance(value, Deferred)):
        return query, key, value, None
    pending = key.pending if isinstance(key, Deferred) else None
    if isinstance(pending, Stored) and isinstance(value, Deferred) and value.pending is pending:
        return query, *pending.parts
    return query, plain(key), plain(value), None


def store_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    positions: torch.Tensor,
    scales: torch.Tensor | None = None,
) -> None:
    """`ops.write_kv`; also rotates query and key if these are a deferred rotation."""
    if isinstance(key_states, Deferred):
        pending, value_states = key_states.pending, plain(value_states)
        new = value_states, positions, scales
        if isinstance(pending, Rotation) and pending.store(key_states.index, keys, values, *new):
            return
        key_states = plain(key_states)
    ops.write_kv(keys, values, key_states, value_states, positions, scales)
