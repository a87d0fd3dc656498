"""Attention with relative biases in a modeling file, on a `RaggedCache` (Inkling).

Such attention adds to a score the query's bias for the distance of the key, with the same distances in all rows. Inside
`relative_biases` the modules that make biases return those of each distance, and attention applies them by positions.
"""

from __future__ import annotations

import inspect

import torch
from torch import nn
from transformers import PreTrainedModel

from ...cache.layer_kinds import PlugIn, Use, register
from ...host.modeling import RELATIVE_BIASES
from ...modules.hidden_states import modules_of
from ...modules.patch import Replacements, bound, is_unpatched, runs_engine


def _makes_biases(module: nn.Module) -> bool:
    """Whether `module` makes biases from the positions of queries and keys."""
    return (
        "proj" in module._parameters
        and hasattr(module, "rel_extent")
        and tuple(inspect.signature(inspect.unwrap(type(module).forward)).parameters)[1:] in RELATIVE_BIASES
        and is_unpatched(module, _forward)
    )


def relative_biases(*models: nn.Module) -> Replacements:
    """Context in which attention of `models` with relative biases runs on a `RaggedCache`."""
    found = (module for module in modules_of(*models) if _makes_biases(module))
    return Replacements({"forward": [(module, bound(_forward)) for module in found]})


def _forward(module: nn.Module, states: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Biases by distance, `[B, heads, n, rel_extent]`; outside of an engine by key, `[B, heads, n, m]`. `states` are
    queries' `[B, n, heads, d_rel]`, or hidden states `[B, n, H]`; `others` are the positions of both, or distances and
    position ids."""
    if not runs_engine():
        return type(module).forward(module, states, *others)
    if states.dim() == 3:
        _, position_ids = others
        states = module.linear(states).view(*states.shape[:-1], module.num_heads, -1)
        states = module.norm(states, position_ids)
    return (states @ module.proj).transpose(1, 2)


def biased_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    biases: torch.Tensor,
    scaling: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention with a bias for every distance, over all given slots.

    Args:
        query: `[B, heads, n, head_dim]`.
        key, value: `[B, kv_heads, slots, head_dim]`.
        positions: `[B, n]` int64, slots of the queries.
        biases: `[B, heads, n, E]`, added to the scores of keys at distances 0 to E - 1.
        scaling: factor on the products of queries and keys.
        window: a query sees only slots at smaller distances.
        sinks: `[B, heads, n, 1]`, a score without a value for each query.
        starts: `[B]` int64, the first slot of each row that is seen.

    Returns:
        `[B, n, heads, head_dim]`.
    """
    slots = torch.arange(key.shape[2], device=key.device)
    distance = (positions[..., None] - slots)[:, None]
    is_seen = distance >= 0
    if window is not None:
        is_seen = is_seen & (distance < window)
    if starts is not None:
        is_seen = is_seen & (slots >= starts[:, None, None, None])
    extent = biases.shape[-1]
    index = distance.clamp(0, extent - 1).expand(-1, biases.shape[1], -1, -1)
    bias = biases.gather(-1, index).masked_fill(distance >= extent, 0.0)
    groups = query.shape[1] // key.shape[1]
    keys, values = (one.repeat_interleave(groups, dim=1) for one in (key, value))
    scores = query @ keys.transpose(2, 3) * scaling + bias
    scores = scores.masked_fill(~is_seen, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32)[..., : key.shape[2]].to(query.dtype)
    return (weights @ values).transpose(1, 2).contiguous()


@register
class RelativeBias(PlugIn):
    """Attention with relative biases."""

    patches = staticmethod(relative_biases)

    @classmethod
    def why_not_used(cls, model: PreTrainedModel, use: Use) -> str | None:
        is_biased = use is Use.TREES and any(map(_makes_biases, modules_of(model)))
        return "relative biases, which are of slots" if is_biased else None
