"""Compressors of transformers' models over a `RaggedCache`, see `compressed_layers`.

A compressor makes the complete entries, the same number for all rows. Inside `compressed_attention` it makes them by
the window numbers of each row; its projections, norms, rotary embeddings and scorers are called as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...cache.compressed_layers import CompressedLayer
from ...cache.layer_kinds import LayerKind, Use, register
from ...cache.ragged_cache import RaggedCache
from ...host.caches import STORE_COMPRESSED
from ...host.modeling import COMPRESSOR, COMPRESSOR_INDEXER, LAYER_TYPES, ROTATION
from ...modules.hidden_states import modules_of
from ...modules.patch import Replacements, bound, is_unpatched


def _functions_of(module: nn.Module) -> dict[str, Any]:
    return inspect.unwrap(type(module).forward).__globals__


def _has(module: nn.Module, names: tuple[str, ...]) -> bool:
    return all(hasattr(module, name) for name in names)


def _is_compressor(module: nn.Module) -> bool:
    """Whether `module` is the compressor of an attention layer, not one inside an indexer."""
    return (
        _has(module, COMPRESSOR)
        and not _has(module, COMPRESSOR_INDEXER)
        and is_unpatched(module, _forward)
        and ROTATION in _functions_of(module)
        and (not hasattr(module, "indexer") or _has(module.indexer, COMPRESSOR_INDEXER))
    )


def compressed_attention(*models: nn.Module) -> Replacements:
    """Context in which compressors of `models` run on a `RaggedCache`; on other caches they run unchanged."""
    return Replacements({"forward": [(one, bound(_forward)) for one in modules_of(*models) if _is_compressor(one)]})


def _compress(
    module: nn.Module, layer: CompressedLayer, name: str, hidden_states: torch.Tensor, rotate: Callable
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store entries that `[B, n, H]` hidden states complete. All entries `[B, S, D]`; what queries see `[B, n, S]`."""
    values, gates, width = module.kv_proj(hidden_states), module.gate_proj(hidden_states), module.head_dim
    overlaps = values.shape[-1] == 2 * width
    windows = layer.windows(name, module.compress_rate, overlaps)
    values, gates, numbers = windows.add(values, gates)
    gates = gates + module.position_bias
    if overlaps:  # the first half of a token is for the window after its own
        values, gates = (torch.cat([one[:, :-1, :, :width], one[:, 1:, :, width:]], dim=2) for one in (values, gates))
    weights = gates.softmax(dim=2, dtype=torch.float32).to(values.dtype)
    entries = module.kv_norm((values * weights).sum(dim=2))
    positions = numbers * module.compress_rate
    cos, sin = module.rotary_emb(entries, position_ids=positions, layer_type=module.rope_layer_type)
    windows.store(rotate(entries.unsqueeze(1), cos, sin).squeeze(1), numbers)
    return windows.shown()


def _choose(module, entries, is_seen, hidden_states, q_residual, position_ids, rotate):
    """The entries that the indexer `module` chooses for each query among those that it sees, `[B, n, S]` bool."""
    cos, sin = module.rotary_emb(hidden_states, position_ids=position_ids, layer_type=module.rope_layer_type)
    query = module.q_b_proj(q_residual).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
    query = rotate(query, cos, sin).transpose(1, 2)
    scores = module.scorer(query, entries, hidden_states).masked_fill(~is_seen, float("-inf"))
    chosen = scores.topk(min(module.index_topk, entries.shape[1]), dim=-1).indices
    return torch.zeros_like(is_seen).scatter_(-1, chosen, True) & is_seen


def _forward(
    module: nn.Module,
    hidden_states: torch.Tensor,
    q_residual: torch.Tensor,
    position_ids: torch.Tensor,
    cache: Any,
    layer_idx: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `forward` of a compressor: entries `[B, 1, S, D]`, and the bias on their scores, `[B, 1, n, S]`."""
    if not isinstance(cache, RaggedCache):
        return type(module).forward(module, hidden_states, q_residual, position_ids, cache, layer_idx)
    layer, rotate = cache.layers[layer_idx], _functions_of(module)[ROTATION]
    entries, is_seen = _compress(module, layer, "compressor", hidden_states, rotate)
    if hasattr(module, "indexer"):
        keys, _ = _compress(module.indexer, layer, "indexer", hidden_states, rotate)
        is_seen = _choose(module.indexer, keys, is_seen, hidden_states, q_residual, position_ids, rotate)
    bias = entries.new_zeros(is_seen.shape).masked_fill_(~is_seen, float("-inf"))
    return entries.unsqueeze(1), bias.unsqueeze(1)


@register
@dataclass(frozen=True, kw_only=True)
class Compressed(LayerKind):
    """Keys and values by slot, and keys of windows of tokens.

    A compressor keeps the projections of the last tokens only, so a prefix cannot be copied from another text.
    """

    window: int = 0

    layer_types = frozenset(LAYER_TYPES["compressed"])
    is_written = False
    stores_keys = True
    is_by_slot = False
    reads_mask = True
    obstacles = dict.fromkeys(
        (Use.PREFIX_REUSE, Use.OTHER_INPUTS, Use.REPEATED_POSITIONS),
        "compressed keys, which are made of tokens only, at positions that are counted from 0",
    ) | {Use.TREES: "compressed keys, which are made of the tokens of one text"}
    layer_class = CompressedLayer
    patches = staticmethod(compressed_attention)

    @classmethod
    def detect(cls, layer: Any) -> Compressed | None:
        return cls(window=layer.compress_rate) if hasattr(layer, STORE_COMPRESSED) else None
