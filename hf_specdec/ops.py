"""The operations that have kernels, and the only importer of `kernels`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import nn
from torch.nn import functional as F

from .kernels import reference
from .kernels.reference import (
    DraftInputs,
    Stream,
    Verdict,
    exponential,
    invert_draft_vocabulary,
    over_vocabulary,
    race,
    row_seeds,
    uniform,
)

__all__ = [
    "DraftInputs",
    "Stream",
    "Verdict",
    "attention",
    "best_draft",
    "draw_draft",
    "exponential",
    "invert_draft_vocabulary",
    "linear",
    "narrow_products",
    "over_vocabulary",
    "prepare_inputs",
    "race",
    "row_seeds",
    "uniform",
    "verify_block",
    "verify_greedy",
    "verify_sampling",
    "write_kv",
]

_NARROW_ROWS = 16
_DECODE_QUERIES = 64


@functools.cache
def _decode_attention() -> Callable[..., torch.Tensor]:
    from .kernels.attention import attention as decode_attention

    return decode_attention


@functools.cache
def _prepare_inputs() -> Callable[..., None]:
    from .kernels.inputs import prepare_inputs as prepare_in_triton

    return prepare_in_triton


@functools.cache
def _write_kv() -> Callable[..., None]:
    from .kernels.cache import write_kv as write_in_triton

    return write_in_triton


@functools.cache
def _verify() -> ModuleType:
    from .kernels import verify

    return verify


def attention(query: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    """`kernels.reference.attention`; on a GPU in Triton for the few queries a row of a round."""
    if query.is_cuda and query.shape[2] <= _DECODE_QUERIES:
        return _decode_attention()(query, *args, **kwargs)
    return reference.attention(query, *args, **kwargs)


def write_kv(keys: torch.Tensor, *args, **kwargs) -> None:
    """`kernels.reference.write_kv`; on a GPU in Triton."""
    if keys.is_cuda:
        _write_kv()(keys, *args, **kwargs)
    else:
        reference.write_kv(keys, *args, **kwargs)


def prepare_inputs(tokens: torch.Tensor, *args, **kwargs) -> None:
    """`kernels.reference.prepare_inputs`; on a GPU in Triton."""
    if tokens.is_cuda:
        _prepare_inputs()(tokens, *args, **kwargs)
    else:
        reference.prepare_inputs(tokens, *args, **kwargs)


def _is_for_triton(scores: torch.Tensor) -> bool:
    return scores.is_cuda and scores.dtype != torch.float64


def verify_greedy(scores: torch.Tensor, drafts: torch.Tensor) -> Verdict:
    """`kernels.reference.verify_greedy`; on a GPU in Triton."""
    return (_verify() if _is_for_triton(scores) else reference).verify_greedy(scores, drafts)


def verify_sampling(scores: torch.Tensor, *args, **kwargs) -> Verdict:
    """`kernels.reference.verify_sampling`; on a GPU in Triton."""
    return (_verify() if _is_for_triton(scores) else reference).verify_sampling(scores, *args, **kwargs)


def verify_block(scores: torch.Tensor, *args, **kwargs) -> Verdict:
    """`kernels.reference.verify_block`; on a GPU in Triton."""
    return (_verify() if _is_for_triton(scores) else reference).verify_block(scores, *args, **kwargs)


def best_draft(logits: torch.Tensor, target_ids: torch.Tensor | None = None) -> torch.Tensor:
    """`kernels.reference.best_draft`; on a GPU in Triton."""
    return (_verify() if _is_for_triton(logits) else reference).best_draft(logits, target_ids)


def draw_draft(logits: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.reference.draw_draft`; on a GPU in Triton."""
    return (_verify() if _is_for_triton(logits) else reference).draw_draft(logits, *args, **kwargs)


def linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`inputs @ weight.T + bias`, `[..., in]` by `[out, in]`; a few float32 rows on a CPU as `(weight @ inputs.T).T`.

    Weight-bound products run about twice as fast that way round: on two cores the products of a 135M-parameter model
    take 31 ms instead of 71 ms at 5 rows (torch 2.13, SmolLM2 shapes). One row is computed as two for the same reason.
    """
    rows = inputs.numel() // inputs.shape[-1]
    if rows > _NARROW_ROWS or inputs.device.type != "cpu" or weight.dtype != torch.float32:
        return F.linear(inputs, weight, bias)
    flat = inputs.reshape(rows, -1)
    if rows == 1:
        flat = flat.repeat(2, 1)
    out = (weight @ flat.t())[:, :rows].t()
    if bias is not None:
        out = out + bias
    return out.reshape(*inputs.shape[:-1], -1)


def _forward(module: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    return linear(inputs, module.weight, module.bias)


@contextmanager
def narrow_products(*models: nn.Module) -> Iterator[None]:
    """Context in which the `nn.Linear` layers of `models` on a CPU compute by `linear`; others are left alone."""
    modules = [
        module
        for model in models
        for module in model.modules()
        if type(module) is nn.Linear and "forward" not in vars(module) and module.weight.device.type == "cpu"
    ]
    try:
        for module in modules:
            module.forward = functools.partial(_forward, module)
        yield
    finally:
        for module in modules:
            vars(module).pop("forward", None)
