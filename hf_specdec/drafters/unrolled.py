"""Attention of training-time test (EAGLE-3): a drafter drafts from every position of a sequence at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from ..host.modeling import ALL_ATTENTION_FUNCTIONS

UNROLLED_NAME = "hf_specdec_unrolled"


class UnrolledAttention:
    """Attention of training-time test (EAGLE-3, arXiv 2503.01840, section 3.2): every slot drafts its own chain.

    In step 0 attention is causal over all slots. In step s the query of slot p attends to step 0's keys of the slots up
    to p, and to slot p's keys of steps 1 to s: the keys that a draft step finds in its cache. One instance serves one
    unrolled forward pass: the n-th call of a layer is its step n - 1. A step may run fewer leading rows of the batch
    than the step before, but not more. Queries, and keys of steps from 1 on, may be those of the last slots only.

    Without a sliding window, and if a fused kernel takes the dtype, the causal part never materialises its scores
    (`_ChainAttention`). Otherwise `explicit_chain_attention` runs.
    """

    def __init__(self) -> None:
        self._written: dict[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    @torch.compiler.disable
    def __call__(
        self, layer: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        query, key = query.to(value.dtype), key.to(value.dtype)
        written = self._written.setdefault(layer, [])
        if written and written[0][0].shape[0] > query.shape[0]:
            written[:] = [(key[: query.shape[0]], value[: query.shape[0]]) for key, value in written]
        written.append((key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)))
        keys, values = zip(*written, strict=True)
        is_fused = query.device.type == "cpu" or (query.is_cuda and query.dtype in (torch.bfloat16, torch.float16))
        if window is not None or not is_fused:
            return explicit_chain_attention(query, keys, values, window).transpose(1, 2)
        if len(written) == 1:
            mask = causal_lower_right(query.shape[2], keys[0].shape[2])  # `is_causal` where both lengths are the same
            return F.scaled_dot_product_attention(query, keys[0], values[0], attn_mask=mask).transpose(1, 2)
        return _ChainAttention.apply(query, *keys, *values).transpose(1, 2)


def unrolled_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    attend: UnrolledAttention | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface for an `UnrolledAttention`, which the model is given as `attend`. transformers
    builds no mask, because no mask function is registered under `UNROLLED_NAME`. Raises `ValueError` unless the layer's
    attention is a plain softmax of scaled dot products."""
    unusual = {
        "attention sinks": s_aux is not None,
        "capped scores": softcap is not None,
        f"scores scaled by {scaling}": scaling is not None and abs(scaling * query.shape[-1] ** 0.5 - 1) > 1e-6,
        "dropout": dropout > 0,
        "an attention mask": attention_mask is not None,
    }
    found = [name for name, is_so in unusual.items() if is_so]
    if found:
        raise ValueError(f"{type(module).__name__} cannot be unrolled for training: it has {', '.join(found)}.")
    return attend(module, query, key, value, sliding_window), None


ALL_ATTENTION_FUNCTIONS.register(UNROLLED_NAME, unrolled_attention_forward)


def shift_left(tokens: torch.Tensor) -> torch.Tensor:
    """`[B, S]` int64 shifted by one position to the left, with a zero at the end."""
    return F.pad(tokens[:, 1:], (0, 1))


def explicit_chain_attention(
    query: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], window: int | None = None
) -> torch.Tensor:
    """`UnrolledAttention` in step `len(keys) - 1` with all scores in memory: the reference of `_ChainAttention`.

    Args:
        query: `[B, heads, n, head_dim]`, this step's queries at the last n of S slots.
        keys, values: of steps 0 to this one: `[B, heads, S, head_dim]` for step 0, then the shape of `query`.
        window: sliding window in positions, or None.
    """
    (base_key, *chain_keys), (base_value, *chain_values) = keys, values
    scale = query.shape[-1] ** -0.5
    length, steps = base_key.shape[2], len(chain_keys)

    slot = torch.arange(length, device=query.device)
    own_slot = slot[length - query.shape[2] :, None]
    visible = own_slot >= slot
    if window is not None:
        visible &= own_slot + steps - slot < window
        chain_keys, chain_values = chain_keys[-window:], chain_values[-window:]
    scores = (query @ base_key.transpose(-1, -2) * scale).masked_fill(~visible, float("-inf"))
    own = [(query * key).sum(-1, keepdim=True) * scale for key in chain_keys]
    weights = torch.cat([scores, *own], dim=-1).softmax(-1).to(query.dtype)
    out = weights[..., :length] @ base_value
    for step, value in enumerate(chain_values):
        out = out + weights[..., length + step, None] * value
    return out


class _ChainAttention(torch.autograd.Function):
    """`explicit_chain_attention` without a window, with a fused kernel for the causal part.

    Forward: the kernel's output over step 0's keys and its log-sum-exp are merged with the scores of the later steps'
    keys. Backward: the gradient of a softmax at a subset of its keys needs only the output and the normaliser of the
    whole softmax, so the kernel's backward gets those of the merged attention.
    """

    @staticmethod
    def forward(ctx, query: torch.Tensor, *keys_values: torch.Tensor) -> torch.Tensor:
        steps = len(keys_values) // 2
        (base_key, *chain_keys), (base_value, *chain_values) = keys_values[:steps], keys_values[steps:]
        base, base_norm, rest = _causal_attention(query, base_key, base_value)
        own = torch.stack([_score(query, key) for key in chain_keys])
        norm = torch.logsumexp(torch.cat([base_norm.unsqueeze(0), own]), dim=0)
        out = base * (base_norm - norm).exp().unsqueeze(-1)
        for score, value in zip(own, chain_values, strict=True):
            out = _add_value(out, score, norm, value)
        out = out.to(query.dtype)
        ctx.rest = rest
        ctx.save_for_backward(query, out, norm, own, *keys_values)
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, out, norm, own, *keys_values = ctx.saved_tensors
        steps = len(keys_values) // 2
        (base_key, *chain_keys), (base_value, *chain_values) = keys_values[:steps], keys_values[steps:]
        grad = grad.contiguous()
        grad_query, grad_base_key, grad_base_value = _causal_attention_backward(
            grad, query, base_key, base_value, out, norm, ctx.rest
        )
        grad_query = grad_query.to(norm.dtype)
        shared = _dot(grad, out)
        grad_keys, grad_values = [grad_base_key], [grad_base_value]
        for score, key, value in zip(own, chain_keys, chain_values, strict=True):
            grad_query, grad_key, grad_value = _chain_gradients(
                grad, query, key, value, score, norm, shared, grad_query
            )
            grad_keys.append(grad_key)
            grad_values.append(grad_value)
        return grad_query.to(query.dtype), *grad_keys, *grad_values


def fused(function: Callable) -> Callable:
    """Compile `function` for GPU tensors, where memory bandwidth bounds its elementwise operations."""

    @functools.cache
    def compiled() -> Callable:  # at the first use, because importing torch's compiler takes a second
        return torch.compile(function)

    @functools.wraps(function)
    def run(first: torch.Tensor, *rest: torch.Tensor) -> Any:
        return (compiled() if first.is_cuda else function)(first, *rest)

    return run


def _inner(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Inner products over the last dimension, `[..., n, d]` to `[..., n]`, in float32 or wider."""
    return (a * b).sum(-1, dtype=torch.promote_types(a.dtype, torch.float32))


_dot = fused(_inner)


@fused
def _score(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Scores `[..., n]` of queries with their own slots' keys of a later step."""
    return _inner(query, key) * query.shape[-1] ** -0.5


@fused
def _add_value(out: torch.Tensor, score: torch.Tensor, norm: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`out` plus the weighted values of a later step."""
    return out + (score - norm).exp().unsqueeze(-1) * value


@fused
def _chain_gradients(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score: torch.Tensor,
    norm: torch.Tensor,
    shared: torch.Tensor,
    grad_query: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`grad_query` plus the contribution of a later step's keys, and the gradients of its keys and values."""
    weight = (score - norm).exp()
    grad_score = (weight * (_inner(grad, value) - shared) * query.shape[-1] ** -0.5).unsqueeze(-1)
    grad_key, grad_value = (grad_score * query).to(key.dtype), (weight.unsqueeze(-1) * grad).to(value.dtype)
    return grad_query + grad_score * key, grad_key, grad_value


def _causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple]:
    """The device's fused kernel: output, log-sum-exp, and further arguments of the backward kernel."""
    if query.is_cuda:
        out, norm, *rest, _ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, is_causal=True)
        return out, norm, tuple(rest)
    mask = _cpu_mask(query, key)
    out, norm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, is_causal=mask is None, attn_mask=mask
    )
    return out, norm, ()


def _causal_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    norm: torch.Tensor,
    rest: tuple,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value of `_causal_attention` for a given output and normaliser."""
    if query.is_cuda:
        cum_seq_q, cum_seq_k, max_q, max_k, seed, offset = rest
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, out, norm, cum_seq_q, cum_seq_k, max_q, max_k, 0.0, True, seed, offset
        )
    mask = _cpu_mask(query, key)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, norm, 0.0, mask is None, attn_mask=mask
    )


def _cpu_mask(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """The mask that is added to scores `[n, S]` if queries are fewer than keys, because the CPU's kernel aligns the
    first query with the first key, and the GPU's the last with the last; None for as many queries as keys."""
    length, count = key.shape[2], query.shape[2]
    if count == length:
        return None
    return torch.full((count, length), float("-inf"), dtype=query.dtype).triu(length - count + 1)
