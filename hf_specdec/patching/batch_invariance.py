"""Passes in which the bits of a row's results depend on that row only.

Linear layers, experts and attention of an engine run kernels of the project. Everything else goes through the torch
dispatch mode of `batch_invariant`: products and reductions run kernels that add in one order; elementwise operations,
copies and exact operations run as they are; others are refused by name. The user's own torch calls are not changed.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .. import ops
from ..modules.patch import runs_engine
from ..ops import row_cumsum, row_softmax, row_sum

_aten = torch.ops.aten
_Result = torch.Tensor | tuple[torch.Tensor, ...]

# Operations, besides elementwise ones and views, that copy elements or have exact results; also in place.
_EXACT_NAMES = """
_local_scalar_dense _pin_memory _to_copy _unsafe_index _unsafe_view alias all amax amin aminmax any arange argmax
argmin bucketize cat clone complex constant_pad_nd contiguous copy cummax cummin detach embedding empty empty_like
empty_strided equal eye fill flip floor_divide fmod full full_like gather glu hardswish index index_copy index_fill
index_put index_select is_nonzero is_pinned is_same_size item lift lift_fresh linspace log_sigmoid_forward masked_fill
masked_scatter masked_select max min new_empty new_empty_strided new_full new_ones new_zeros nonzero ones ones_like
pin_memory polar prelu record_stream remainder repeat repeat_interleave resize roll rsub scalar_tensor scatter
searchsorted select_scatter set slice_scatter sort split split_with_sizes split_with_sizes_copy stack tril triu unbind
where zero zeros zeros_like
"""
_EXACT = frozenset(_EXACT_NAMES.split())


@functools.cache
def _is_exact(function: torch._ops.OpOverload) -> bool:
    """Whether `function` computes every element of its result independently, or exactly."""
    if function.namespace == "hf_specdec":
        return True
    if function.namespace not in ("aten", "prim", "prims"):
        return False
    name = function._schema.name.partition("::")[2]
    return torch.Tag.pointwise in function.tags or function.is_view or name.removesuffix("_") in _EXACT


def _is_exact_with(function: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """`_is_exact`, except for an `index_put` that accumulates, in any order."""
    if not _is_exact(function):
        return False
    return "index_put" not in function._schema.name or not kwargs.get("accumulate", args[3] if len(args) > 3 else False)


def _is_floating(values: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in tree_leaves(values))


def _with_rows(values: torch.Tensor) -> torch.Tensor:
    """`[n, k]` with rows of unit stride: a view, or a copy."""
    return values if values.stride(1) == 1 else values.contiguous()


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return ops.linear(_with_rows(left), _with_rows(right.t()))


def _addmm(
    bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> _Result:
    if beta != 1 or alpha != 1:
        return NotImplemented
    if bias.shape == (right.shape[1],) and bias.dtype == left.dtype:
        return ops.linear(_with_rows(left), _with_rows(right.t()), bias.contiguous())
    return _mm(left, right) + bias


def _bmm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.shape[2] == 1:  # e.g. the angles of RoPE
        return left * right
    return torch.stack([_mm(*pair) for pair in zip(left, right, strict=True)])


def _sum(
    values: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> _Result:
    if not values.is_floating_point():
        return _aten.sum.dim_IntList(values, dim, keepdim, dtype=dtype)
    return _over_dims(values, dim, keepdim, values.dtype if dtype is None else dtype)


def _mean(
    values: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> _Result:
    total = _over_dims(values, dim, keepdim, torch.float32)
    if total is NotImplemented:
        return total
    return (total * (total.numel() / max(values.numel(), 1))).to(values.dtype if dtype is None else dtype)


def _nansum(
    values: torch.Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> _Result:
    return _sum(values.masked_fill(values.isnan(), 0), dim, keepdim, dtype=dtype)


def _logsumexp(values: torch.Tensor, dim: Sequence[int], keepdim: bool = False) -> _Result:
    largest = values.amax(dim, keepdim=True)
    base = largest.masked_fill(largest.isinf(), 0)
    total = _over_dims((values - base).exp(), dim, keepdim, values.dtype)
    return total if total is NotImplemented else total.log() + base.view(total.shape)


def _over_dims(values: torch.Tensor, dim: Sequence[int] | None, keepdim: bool, dtype: torch.dtype) -> _Result:
    """Sums over adjacent dimensions; `NotImplemented` for others."""
    dims = sorted(one % values.dim() for one in (dim or range(values.dim())))
    if not dims or dims != list(range(dims[0], dims[-1] + 1)):
        return NotImplemented
    before, over, after = values.shape[: dims[0]], values.shape[dims[0] : dims[-1] + 1], values.shape[dims[-1] + 1 :]
    shape = (*before, *([1] * len(dims) if keepdim else []), *after)
    if not values.numel():
        return values.new_zeros(shape, dtype=dtype)
    return row_sum(values.reshape(before.numel(), over.numel(), after.numel()), dtype).view(shape)


def _softmax(values: torch.Tensor, dim: int, half_to_float: bool, is_log: bool = False) -> torch.Tensor:
    dtype = torch.float32 if half_to_float else values.dtype
    return _along(values, dim, lambda rows: row_softmax(rows, dtype, is_log))


def _cumsum(values: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    if not values.is_floating_point():
        return _aten.cumsum.default(values, dim, dtype=dtype)
    return _along(values, dim, lambda rows: row_cumsum(rows, values.dtype if dtype is None else dtype))


def _along(values: torch.Tensor, dim: int, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """`function` of the rows `[rows, size]` along dimension `dim` of `values`; it returns as many elements."""
    if not values.numel() or not values.dim():
        return function(values.reshape(-1, 1)).view(values.shape) if values.numel() else values.clone()
    moved = values.movedim(dim, -1)
    return function(moved.reshape(-1, moved.shape[-1])).view(moved.shape).movedim(-1, dim)


def _topk(
    values: torch.Tensor, k: int, dim: int = -1, largest: bool = True, is_sorted: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    # torch.topk may choose any of several equal elements.
    ordered, indices = values.sort(dim=dim, descending=largest, stable=True)
    return ordered.narrow(dim, 0, k), indices.narrow(dim, 0, k)


def _sort(values: torch.Tensor, dim: int = -1, descending: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(values.sort(dim=dim, descending=descending, stable=True))


def _normalised(
    inputs: torch.Tensor,
    shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    has_mean: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm over the last dimensions, of sizes `shape`, in float32; also means and scales, with sizes 1 there."""
    rows = inputs.reshape(-1, math.prod(shape)).float()
    mean = _mean(rows, [1], True) if has_mean else torch.zeros_like(rows[:, :1])
    rows = rows - mean
    scale = torch.rsqrt(_mean(rows * rows, [1], True) + eps)
    rows = rows * scale
    if weight is not None:
        rows = rows * weight.reshape(-1).float()
    if bias is not None:
        rows = rows + bias.reshape(-1).float()
    of_rows = (*inputs.shape[: inputs.dim() - len(shape)], *[1] * len(shape))
    return rows.view(inputs.shape).to(inputs.dtype), mean.view(of_rows), scale.view(of_rows)


def _rms_norm(
    inputs: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, ...]:
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    out, _, scale = _normalised(inputs, shape, weight, None, eps, has_mean=False)
    return out, scale


# Replacements of operations; they return `NotImplemented` for arguments that they do not support.
_REPLACED: dict[torch._ops.OpOverload, Callable[..., _Result]] = {
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten.bmm.default: _bmm,
    _aten.sum.dim_IntList: _sum,
    _aten.mean.dim: _mean,
    _aten.nansum.default: _nansum,
    _aten.logsumexp.default: _logsumexp,
    _aten._softmax.default: _softmax,
    _aten._log_softmax.default: functools.partial(_softmax, is_log=True),
    _aten.cumsum.default: _cumsum,
    _aten.topk.default: _topk,
    _aten.sort.default: _sort,
    _aten.native_layer_norm.default: _normalised,
    _aten._fused_rms_norm.default: _rms_norm,
}


def _running_module() -> str:
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            return type(module).__name__
        frame = frame.f_back
    return "the engine"


class _BatchInvariantMode(TorchDispatchMode):
    def __torch_dispatch__(
        self,
        function: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if not runs_engine():
            return function(*args, **kwargs)
        others = [kind for kind in types if kind not in (torch.Tensor, nn.Parameter)]
        if not others:
            replacement = _REPLACED.get(function)
            if replacement is not None:
                result = replacement(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            # Sums of integers are exact.
            elif _is_exact_with(function, args, kwargs) or not _is_floating((args, kwargs)):
                return function(*args, **kwargs)
            elif function.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
                with self:
                    return function.decompose(*args, **kwargs)
        what = f" of {', '.join(kind.__name__ for kind in others)}" if others else ""
        raise ValueError(
            f"batch_invariant=True, but {_running_module()} calls {function}{what}, of which it is not known that the "
            "bits of a row's result depend on that row only; expected linear layers, norms, softmax and sums of plain "
            "tensors, mixtures of experts and attention through transformers' interfaces, and operations on each "
            "element. Generate with batch_invariant=False, or with another target or drafter."
        )


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Context in which this thread's engine runs batch-invariantly, in 16-bit types and float32.

    Raises, inside:
        ValueError: an operation is not known to be batch-invariant; names it, and the module that calls it.
    """
    with ops.batch_invariant(), _BatchInvariantMode():
        yield
