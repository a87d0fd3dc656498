"""Attention over a `RaggedCache`, registered with transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from . import ops
from .cache import RaggedCache

ATTENTION_NAME = "hf_specdec"


def ragged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface over a `RaggedCache`.

    `attention_mask` is that of `RaggedCache.attention_mask`, int64: a 4-D mask reaches every layer untouched, sliding
    ones included, and visibility is a function of positions alone.
    """
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    out = ops.attention(
        query,
        key,
        value,
        positions=attention_mask[:, 0, :, 0],
        scaling=scaling,
        window=sliding_window,
        sinks=s_aux,
        softcap=softcap,
        starts=attention_mask[:, 1, 0, 0] if attention_mask.shape[1] > 1 else None,
    )
    return out, None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, ragged_attention_forward)


def cached_attend(cache: RaggedCache, slots: torch.Tensor):
    """An `Attend` (see `drafters.layers`) that stores keys and values in `cache` and attends to its live slots.

    `slots` `[B, n]` int64 are those of the keys; fewer queries are those of the last keys.
    """

    def attend(layer_idx, query, key, value, window):
        keys, values = cache.update(key, value, layer_idx)
        asking, scaling = slots[:, -query.shape[2] :], query.shape[-1] ** -0.5
        return ops.attention(query, keys, values, asking, scaling, window=window, starts=cache.starts)

    return attend


def ragged_attention(target: PreTrainedModel) -> AbstractContextManager[None]:
    """Within the context `target` runs `ragged_attention_forward`; afterwards what it ran before."""
    return registered_attention(target, ATTENTION_NAME)


def registered_attention(model: PreTrainedModel, name: str) -> AbstractContextManager[None]:
    """Within the context `model` runs the attention registered under `name`; afterwards what it ran before."""
    return configured(submodel_configs(model), "_attn_implementation_internal", name)


@contextmanager
def configured(configs: Iterable[PreTrainedConfig], entry: str, value: str) -> Iterator[None]:
    """Within the context `entry` of `configs` is `value`; afterwards what it was before."""
    before = [(config, getattr(config, entry)) for config in configs]
    try:
        for config, _ in before:
            setattr(config, entry, value)
        yield
    finally:
        for config, old in before:
            setattr(config, entry, old)


def submodel_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configurations that modules of `model` look at, each once."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in configs if isinstance(config, PreTrainedConfig)}.values())
