"""Recognition of indexers that `pooled_indexers` computes: they choose the same few random tokens.

A copy of an indexer with random weights and a small budget runs on a CPU in float32: once unpatched over a text, and
once on a `RaggedCache` in two passes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ...cache.indexed_layers import IndexedLayer
from ...cache.key_layers import Keys
from ...cache.layer_kinds import LayerKinds, Use, register
from ...cache.ragged_cache import RaggedCache
from ...host.caches import cache_parameter
from ...host.modeling import LAYER_TYPES, UPDATE_INDEXER
from ...modules.hidden_states import modules_of
from ...modules.patch import Replacements, bound, is_unpatched
from ...modules.signature import PLAIN_VALUES, names_in
from ..layer_probes import copied, linear_with, tried
from .pooled_indexers import Form, PooledIndexer, indexer_forward, kind_of, visible_slots

# Pools of the text, and of the budget. More than half a pool of the text's last tokens is not in a complete pool.
_NUM_POOLS, _BUDGET = 5, 2
# Share of queries whose choice may differ, since several pools may have equal scores, e.g. zero.
_TIES = 0.05
# Number of rotated elements of a head.
_NUM_ANGLES = 4

_found: dict[Hashable, Form | None] = {}


def pooled_indexers(*models: nn.Module) -> Replacements:
    """Context in which indexers of `models` that choose pools of tokens run on a `RaggedCache`.

    Other indexers, and modules with a `forward` attribute, are left as they are.
    """
    chosen = []
    for module in modules_of(*models):
        kind = kind_of(module)
        if kind is not None and is_unpatched(module, indexer_forward) and (form := _form_of(module, kind)) is not None:
            chosen.append((module, bound(indexer_forward, kind, form)))
    return Replacements({"forward": chosen})


def _form_of(module: nn.Module, kind: PooledIndexer) -> Form | None:
    """The form of the output of `module`; None if it is not of `kind`. Modules with equal settings are probed once."""
    settings = sorted((name, value) for name, value in vars(module).items() if type(value) in PLAIN_VALUES)
    key = (type(module), *((name, value) for name, value in settings if name not in ("layer_idx", "training")))

    def probe() -> Form | None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return _probe(_random_copy(module, kind), kind)

    return tried(_found, key, probe)


def _random_copy(module: nn.Module, kind: PooledIndexer) -> nn.Module:
    """An indexer like `module`, with random weights in float32 on a CPU and a budget of a few pools."""
    size = getattr(module, kind.size)
    children = {
        name: linear_with(torch.randn(one.out_features, one.in_features, device="cpu"))
        if hasattr(one, "in_features")
        else _with_random_parameters(one)
        for name, one in module._modules.items()
    }
    clone = _with_random_parameters(module)
    vars(clone).update(_modules=children, layer_idx=0)
    vars(clone).update(dict.fromkeys(kind.most_pools, _BUDGET) | dict.fromkeys(kind.most_tokens, _BUDGET * size))
    return clone


def _with_random_parameters(module: nn.Module) -> nn.Module:
    """A copy of `module` itself, with random parameters and its own children."""
    found = module._parameters.items()
    parameters = {name: None if one is None else torch.randn(one.shape, device="cpu") for name, one in found}
    return copied(module, _parameters=parameters)


def _probe(module: nn.Module, kind: PooledIndexer) -> Form | None:
    size = getattr(module, kind.size)
    count = _NUM_POOLS * size + size // 2
    given = _random_inputs(module, kind, count)
    cache_name = cache_parameter(type(module).forward)
    no_cache = {} if cache_name is None else {cache_name: None}
    found = type(module).forward(module, **given, **no_cache)
    if found.dim() == 3:
        form, expected = "indices", visible_slots(found, count)
    elif found.dtype == torch.bool:
        form, expected = "mask", found[:, 0]
    else:
        form, expected = "bias", found[:, 0] == 0

    cache = RaggedCache(LayerKinds((Indexed(),), takes_mask=True), count + 2, torch.tensor([count], device="cpu"))
    passes, first = [], 0
    for end in (count - size - 1, count):
        cache.advance(torch.arange(first, end, device="cpu")[None], end)
        part = {name: _of_pass(value, first, end) for name, value in given.items()}
        passes.append(visible_slots(kind.choose(module, **part, cache=cache), count))
        first = end
    differ = (torch.cat(passes, dim=1) != expected).any(-1)
    selects = not bool(expected[:, -1].all())
    return form if selects and float(differ.float().mean()) <= _TIES else None


def _of_pass(value: torch.Tensor | tuple[torch.Tensor, ...], first: int, end: int) -> Any:
    """The argument of an indexer for the tokens from `first` to `end`; `value` is that of the whole text."""
    if not isinstance(value, tuple):
        return value[:, first:end]
    if first == 0:
        return tuple(angles[:, :end] for angles in value)
    # Angles of slots from before the pass, and of its columns.
    return tuple(torch.cat([F.pad(one[:, :first], (0, 0, 0, end - first)), one[:, first:end]], dim=1) for one in value)


def _random_inputs(module: nn.Module, kind: PooledIndexer, count: int) -> dict[str, Any]:
    """Arguments of `module` for a text of `count` tokens without a cache."""
    widths = {name: getattr(module, linear).in_features for name, linear in kind.inputs.items()}
    given: dict[str, Any] = {name: torch.randn(1, count, width, device="cpu") for name, width in widths.items()}
    given["attention_mask"] = torch.ones(1, count, dtype=torch.bool, device="cpu")
    if "position_embeddings" in kind.arguments:  # such indexers get those of all tokens, and a mask over them
        given["position_embeddings"] = tuple(torch.randn(1, count, _NUM_ANGLES, device="cpu") for _ in range(2))
        given["attention_mask"] = torch.full((1, 1, count, count), torch.finfo(torch.float32).min, device="cpu").triu(1)
    return given


@register
class Indexed(Keys):
    """Keys and values by slot, and keys of an indexer that chooses which slots a query sees."""

    layer_types = frozenset(LAYER_TYPES["indexed"])
    sources = ()
    is_written = False
    reads_mask = True
    obstacles = {
        Use.REPEATED_POSITIONS: "indexers, which choose tokens by a mask that modules are not given; expected layers "
        "of attention to all tokens, or to windows of them. Use a drafter of another family",
        Use.TREES: "indexers, which choose tokens by slots of one text",
    }
    layer_class = IndexedLayer
    patches = staticmethod(pooled_indexers)

    @classmethod
    def detect(cls, layer: Any) -> Indexed | None:
        return cls() if hasattr(layer, UPDATE_INDEXER) else None

    @classmethod
    def why_not_used(cls, model: PreTrainedModel, use: Use) -> str | None:
        """Also for models whose configuration does not name such layers, e.g. a decoder of one layer."""
        has_indexers = any(UPDATE_INDEXER in names_in(kind.forward) for kind in set(map(type, modules_of(model))))
        return cls.obstacles.get(use) if has_indexers else None
