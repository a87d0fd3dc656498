"""Attention over a `RaggedCache`, registered with transformers as an attention implementation."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig, PreTrainedModel

from .. import ops
from ..cache.layer_kinds import PlugIn, Use, register
from ..cache.ragged_cache import RaggedCache
from ..host.modeling import ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS, ATTENTION_ENTRY, eager_mask
from ..modules.deferred import read_by_attention
from ..modules.patch import Replacements, constant, original, runs_engine
from ..modules.signature import signature_of
from .layer_probes import copied
from .mask_rules import MaskRule, rules_by_module
from .plugins.relative_bias import biased_attention
from .support import runs_flash_attention, uses_attention_interface

ATTENTION_NAME, MASKED_NAME = "hf_specdec", "hf_specdec_masked"
# The attribute of an attention layer that holds its `MaskRule`.
_RULE = "_hf_specdec_mask_rule"


def ragged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    indices: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention interface over a `RaggedCache`.

    With `RaggedCache.attention_mask`, which every layer gets unchanged, it attends by positions. With any other mask,
    such as `slot_mask` or one of a call that does not come from an engine, or with none, it runs the attention that the
    module has otherwise.

    Args:
        query: `[B, heads, n, head_dim]`.
        key, value: `[B, kv_heads, slots, head_dim]`, as `RaggedLayer.update` returns them.
        attention_mask: positions `[B, 1, n, 0, 1, 2 or 2 + W]` int64, or `[1, 2, n, 1]` of a `PackedCache`; another
            mask is bool, or added to scores.
        indices: `[B, n, k]`, the slots that an indexer chose; another mask is changed to hide all others.
        options: see `_attend`; others are ignored.

    Returns:
        `[B, n, heads, head_dim]`, and None instead of attention weights.
    """
    if attention_mask is None or attention_mask.dtype != torch.int64:
        if indices is not None and attention_mask is not None:
            is_chosen = torch.zeros(*indices.shape[:2], key.shape[2], dtype=torch.bool, device=key.device)
            is_chosen.scatter_(-1, indices.long(), True)
            hidden = False if attention_mask.dtype == torch.bool else torch.finfo(attention_mask.dtype).min
            attention_mask = attention_mask.masked_fill(~is_chosen[:, None], hidden)
        # Some functions read the name of their attention from the module's configuration.
        config = copy.copy(module.config)
        vars(config)[ATTENTION_ENTRY] = original(module.config, ATTENTION_ENTRY)
        return _original_attention(module)(copied(module, config=config), query, key, value, attention_mask, **options)
    rule = vars(module).get(_RULE)
    if rule is not None:
        options |= {"sliding_window": rule.window, "chunk": rule.chunk}
    return _attend(query, key, value, attention_mask, **options), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    position_bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """`s_aux` are attention sinks; with `position_bias` (see `relative_bias`) each query has its own `sinks`."""
    query, key, value, scales = read_by_attention(query, key, value)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    starts = ancestors = None
    if mask.shape[3] == 0:
        num_queries, live = query.shape[2], key.shape[2] - 1
        sizes = (size for size in (sliding_window, chunk) if size is not None)
        is_plain = s_aux is None and softcap is None and position_bias is None
        is_causal = is_plain and min(sizes, default=live) >= live
        if is_causal and not ops.is_batch_invariant():
            key, value = _dequantised(key, value, scales, live)  # torch's function is for long prompts
            mask, has_groups = causal_lower_right(num_queries, live), query.shape[1] > key.shape[1]
            out = scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=has_groups)
            return out.transpose(1, 2)
        positions = torch.arange(live - num_queries, live, device=query.device).expand(len(query), -1)
    elif mask.shape[1] == 2:
        positions, starts = mask[..., 0].unbind(1)
    else:
        positions = mask[:, 0, :, 0]
        if mask.shape[3] >= 2:
            starts = mask[:, 0, 0, 1]
        if mask.shape[3] > 2:
            ancestors = mask[:, 0, :, 2:]
    if position_bias is not None:
        key, value = _dequantised(key, value, scales, key.shape[2])
        return biased_attention(query, key, value, positions, position_bias, scaling, sliding_window, sinks, starts)
    seen = sliding_window, s_aux, softcap, starts, None, chunk, scales, ancestors
    return ops.attention(query, key, value, positions, scaling, *seen)


def _dequantised(
    key: torch.Tensor, value: torch.Tensor, scales: torch.Tensor | None, live: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `live` slots in the dtype in which torch attends to them."""
    key, value = key[:, :, :live], value[:, :, :live]
    if scales is None:
        return key, value
    return ops.dequantise(key, scales[:, :, :live, 0]), ops.dequantise(value, scales[:, :, :live, 1])


def _original_attention(module: torch.nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """The attention of `module` outside of `ragged_attention`; raises `RuntimeError` for drafters, which have none."""
    name = original(module.config, ATTENTION_ENTRY)
    if name == MASKED_NAME:  # set for good, with eager masks
        name = "eager"
    if name == ATTENTION_NAME and runs_engine():  # a layer of a drafter's model that attends to no tokens
        name = "eager"
    if name == ATTENTION_NAME:
        raise RuntimeError(
            f"{type(module).__name__} belongs to a drafter, whose model runs on the drafter's cache only; expected the "
            "attention mask of a `RaggedCache`. To run the model by itself load a second copy of it."
        )
    # transformers does not register "eager": each modeling file defines its own `eager_attention_forward`.
    forward = inspect.unwrap(type(module).forward)
    names = (*forward.__code__.co_names, "eager_attention_forward")
    eager = [one for one in names if one.endswith("eager_attention_forward") and one in forward.__globals__]
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, forward.__globals__[eager[0]] if eager else None)


def original_mask(*args: Any, config: PreTrainedConfig, **kwargs: Any) -> torch.Tensor | None:
    """transformers' mask interface for calls by other code while `ragged_attention` is active: makes the mask for the
    attention that `config` had before it was patched."""
    name = original(config, ATTENTION_ENTRY)
    if name == ATTENTION_NAME or name not in ALL_MASK_ATTENTION_FUNCTIONS:
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS[name](*args, config=config, **kwargs)


def eager_mask_over_slots(*args: Any, config: PreTrainedConfig, **kwargs: Any) -> torch.Tensor | None:
    """transformers' mask interface for models with their own attention, outside of the attention interface.

    Passes of an engine, recognised by `RaggedCache.get_query_offset`, get `slot_mask`. Others get the mask of eager
    attention: modules that read the name of their attention from the configuration do not find it there.
    """
    slots = kwargs.get("q_offset")
    if isinstance(slots, torch.Tensor) and slots.dim() == 2:
        return slot_mask(slots, kwargs["kv_length"], kwargs["mask_function"], kwargs["attention_mask"], kwargs["dtype"])
    return eager_mask(*args, config=config, **kwargs)


def slot_mask(
    slots: torch.Tensor, span: int, mask_function: Callable[..., torch.Tensor], seen: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The mask for attention of a modeling file, as transformers' `eager_mask` makes it for other caches.

    Args:
        slots: `[B, n]` int64, slots of the queries.
        span: number of leading slots of the cache that are the keys.
        mask_function: transformers' function that tells whether a query sees a key; called with slots.
        seen: `[B, span]` bool, false for slots that no query of the row sees.

    Returns:
        `[B, 1, n, span]`, to be added to scores: 0 where a query sees a key, elsewhere the smallest number.
    """
    rows = torch.arange(len(slots), device=slots.device)[:, None, None, None]
    keys = torch.arange(span, device=slots.device)
    visible = mask_function(rows, 0, slots[:, None, :, None], keys) & seen[:, None, None, :]
    return slots.new_zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, ragged_attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, original_mask)
# Models with their own attention may contain others, e.g. in vision towers.
ALL_ATTENTION_FUNCTIONS.register(MASKED_NAME, ragged_attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(MASKED_NAME, eager_mask_over_slots)


def cached_attend(cache: RaggedCache, slots: torch.Tensor, ends: Sequence[torch.Tensor | None] | None = None):
    """An `Attend` (see `drafters.layers`) that stores keys and values in `cache` and attends to its live slots.

    Args:
        cache: `advance` must have been called with `slots`.
        slots: `[B, n]` int64, slots of the keys. If there are m < n queries, they are at the last m slots.
        ends: for each layer, the last slot that each query sees, `[B, m]` int64, or None for its own. None: so for all.
    """

    def attend(layer, query, key, value, window):
        query, keys, values, scales = read_by_attention(query, *cache.update(key, value, layer.layer_idx))
        positions, scaling = slots[:, -query.shape[2] :], query.shape[-1] ** -0.5
        last = None if ends is None else ends[layer.layer_idx]
        seen = window, None, None, cache.starts_of(positions), last, None, scales
        if cache.nodes is None:
            return ops.attention(query, keys, values, positions, scaling, *seen)
        return ops.attention(query, keys, values, cache.nodes.positions, scaling, *seen, cache.nodes.ancestors)

    return attend


def set_ragged_attention(
    model: PreTrainedModel, rules: Sequence[tuple[torch.nn.Module, MaskRule]] | None = None
) -> None:
    """`ragged_attention` for good, for the `model` of a drafter; `rules` are looked up if not given."""
    name = _name_for(model)
    for module, rule in _rules_of(model) if rules is None else rules:
        vars(module)[_RULE] = rule
    for config in signature_of(model).configs:
        vars(config)[ATTENTION_ENTRY] = name


def ragged_attention(target: PreTrainedModel) -> Replacements:
    """Context in which `target` runs on a `RaggedCache`. Its attention layers run `ragged_attention_forward` with the
    rules of their masks; those outside of transformers' attention interface run as they are, with `slot_mask`."""
    make_name = constant(_name_for(target))
    return Replacements(
        {
            ATTENTION_ENTRY: [(config, make_name) for config in signature_of(target).configs],
            _RULE: [(module, constant(rule)) for module, rule in _rules_of(target)],
        }
    )


def _rules_of(model: PreTrainedModel) -> list[tuple[torch.nn.Module, MaskRule]]:
    """The rules of attention layers besides the windows that they state; flash attention has no others."""
    if runs_flash_attention(model) or not uses_attention_interface(model):
        return []
    return rules_by_module(model)


def _name_for(model: PreTrainedModel) -> str:
    return ATTENTION_NAME if uses_attention_interface(model) else MASKED_NAME


@register
class Chunks(PlugIn):
    """Attention in chunks, which are counted from slot 0."""

    @classmethod
    def why_not_used(cls, model: PreTrainedModel, use: Use) -> str | None:
        if use not in (Use.PACKING, Use.TREES) or all(rule.chunk is None for _, rule in rules_by_module(model)):
            return None
        return "attention in chunks, which are counted from the first slot"
