"""Whether the static engine supports a model: whether it can run on a `RaggedCache`."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from ..host.caches import (
    OUTPUT_NAME,
    STORE_COMPRESSED,
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    model_cache_name,
    why_no_cache,
)
from ..host.modeling import (
    ALL_ATTENTION_FUNCTIONS,
    ATTENTION_ENTRY,
    ATTENTION_INTERFACE,
    HOOK_OF_ACCELERATE,
    LAYER_TYPES,
    UPDATE_INDEXER,
    states_attention_interface,
)
from ..host.parts import why_broken
from .cache import LayerKind, attention_layers
from .hidden_states import decoder_layers, find_decoder_layers, modules_of
from .length_rope import RopeLimits, rope_limits
from .patch import original
from .recurrent_functions import why_not_replaced
from .signature import fact, files_of, signature_of

_EAGER = "eager_attention_forward"

# Layers with an indexer.
_INDEXED = frozenset(LAYER_TYPES["indexed"])
SUPPORTED_LAYER_TYPES = _INDEXED.union(LAYER_TYPES["others"])


def _layers_of_cache(model: PreTrainedModel) -> list[Any]:
    """The layers of transformers' cache for `model`; none if its configuration describes no cache.

    That of an assistant that reads another model's keys and values only is refused by transformers (ValueError).
    """
    try:
        return DynamicCache(config=model.config.get_text_config()).layers
    except (AttributeError, ValueError):
        return []


@fact
def _configured_layers(model: PreTrainedModel) -> tuple[LayerKind, ...]:
    """What the layers of transformers' cache for `model` store, see `_layers_of_cache`."""
    return tuple(
        LayerKind(
            has_keys=isinstance(layer, CacheLayerMixin),
            num_states=layer.number_of_states if isinstance(layer, LinearAttentionCacheLayerMixin) else 0,
            compress_rate=layer.compress_rate if hasattr(layer, STORE_COMPRESSED) else 0,
        )
        for layer in _layers_of_cache(model)
    )


@fact
def cache_windows(model: PreTrainedModel) -> tuple[int | None, ...]:
    """For each layer of transformers' cache for `model` how many keys it keeps, that of the query included; None for
    all of them."""
    return tuple(getattr(layer, "sliding_window", None) for layer in _layers_of_cache(model))


def cache_layers(model: PreTrainedModel) -> tuple[LayerKind, ...]:
    """What the layers of a cache of `model` store; a decoder layer may have more than one."""
    kinds = _configured_layers(model) or attention_layers(len(decoder_layers(model)))
    if uses_attention_interface(model):
        return kinds
    return tuple(kind._replace(takes_mask=kind.has_keys) for kind in kinds)


def has_recurrent_layers(model: PreTrainedModel) -> bool:
    """Whether layers of `model` keep a recurrent state, from which a rejected token cannot be removed."""
    return any(kind.num_states for kind in _configured_layers(model))


def has_only_states(model: PreTrainedModel) -> bool:
    """Whether layers of `model` keep recurrent states and no keys: its caches do not know how long a text is."""
    kinds = _configured_layers(model)
    return any(kind.num_states for kind in kinds) and not any(kind.has_keys for kind in kinds)


def has_compressed_layers(model: PreTrainedModel) -> bool:
    """Whether layers of `model` keep keys of windows of tokens, whose last tokens' projections are in no slots."""
    return longest_window(model) > 0


def longest_window(model: PreTrainedModel) -> int:
    """Tokens of the longest windows of which layers of `model` keep keys; 0 if there are none."""
    return max((kind.compress_rate for kind in _configured_layers(model)), default=0)


def has_indexers(model: PreTrainedModel) -> bool:
    """Whether modules of `model` keep keys of an indexer in the cache, by which it chooses what a query sees."""
    forwards = {inspect.unwrap(kind.forward) for kind in map(type, modules_of(model))}
    return any(UPDATE_INDEXER in one.__code__.co_names for one in forwards if hasattr(one, "__code__"))


@fact
def uses_attention_interface(model: PreTrainedModel) -> bool:
    """Whether attention layers of `model` look their function up in transformers' attention interface and read no mask.

    Indexers read one, to choose among the tokens that a query sees; compressors add keys, and columns to the mask.

    Few classes state that all of them do. Of others it is known of the layers that name
    the interface; whether these are all is found by the equivalence check. Attention layers of a model where none does
    take a mask. A model may have no attention layers.
    """
    kinds = _configured_layers(model)
    if kinds and not any(kind.has_keys for kind in kinds):
        return True
    if not _INDEXED.isdisjoint(getattr(model.config.get_text_config(), "layer_types", None) or ()):
        return False
    if has_compressed_layers(model):
        return False
    if states_attention_interface(model):
        return True
    forwards = {inspect.unwrap(kind.forward) for kind in {type(module) for module in modules_of(model.get_decoder())}}
    return any(ATTENTION_INTERFACE in one.__code__.co_names for one in forwards if hasattr(one, "__code__"))


@fact
def _why_not_recurrent(model: PreTrainedModel) -> str | None:
    return why_not_replaced(model) if has_recurrent_layers(model) else None


def cache_name(model: PreTrainedModel) -> str:
    """The parameter of `forward` of `model` that takes its cache, one of `CACHE_NAMES`."""
    return model_cache_name(type(model)) or OUTPUT_NAME


def stated_positions(model: PreTrainedModel) -> int | None:
    """How many positions the configuration of `model` states; None if it states none."""
    text = model.config.get_text_config()
    stated = (getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    return next((value for value in stated if isinstance(value, int)), None)


@fact
def num_positions(model: PreTrainedModel) -> int | None:
    """Size of the table of position embeddings of `model`, learned or fixed; None if it has none, such as with RoPE."""
    stated = stated_positions(model)
    decoder, tokens = model.get_decoder(), model.get_input_embeddings()
    if stated is None:
        return None
    tables = (
        module.num_embeddings
        for module in modules_of(decoder)
        if isinstance(module, nn.Embedding) and module is not tokens
    )
    # Fixed ones are as wide as hidden states, or as the part of a head that is rotated.
    fixed = (
        len(tensor)
        for module in modules_of(decoder)
        for tensor in (*module._buffers.values(), *vars(module).values())
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.is_floating_point()
    )
    # Position embeddings have a few rows more than the configuration states, for padding.
    return stated if any(0 <= size - stated <= 8 for size in itertools.chain(tables, fixed)) else None


@fact
def _rope_limits(model: PreTrainedModel) -> RopeLimits | str:
    """Where RoPE changes with the length of the text; or the reason why that cannot be told."""
    try:
        return rope_limits(model)
    except ValueError as error:
        return str(error)


def length_limits(model: PreTrainedModel) -> RopeLimits:
    """Where RoPE of `model` changes with the length of the text; nowhere if that cannot be told."""
    limits = _rope_limits(model)
    return RopeLimits() if isinstance(limits, str) else limits


def why_not_supported(model: PreTrainedModel, role: str = "the target") -> str | None:
    """The reason why `model`, which is called by its `role`, cannot run on a `RaggedCache`; None if it can."""
    if (reason := why_broken()) is not None:
        return reason
    text, layers = model.config.get_text_config(), find_decoder_layers(model)
    if layers is None:
        return f"{role} ({type(model).__name__}) has no list of decoder layers"
    devices = set(getattr(model, "hf_device_map", {}).values())
    if len(devices) > 1:
        return f"{role} is spread over {len(devices)} devices by hooks"
    dispatched = signature_of(model).having(HOOK_OF_ACCELERATE)
    if dispatched and not set(dispatched).isdisjoint(modules_of(layers)):
        return f"{role}'s layers run under accelerate hooks"
    if (reason := why_no_cache(type(model))) is not None:
        return f"{role} {reason}"
    if (reason := _why_not_recurrent(model)) is not None:
        return f"{role}'s {reason}"
    others = set(getattr(text, "layer_types", None) or ()) - SUPPORTED_LAYER_TYPES
    if others:
        return f"{role} has layers of type {', '.join(sorted(others))}"
    if getattr(text, "cross_attention_layers", None):
        return f"{role} has cross-attention layers, whose keys and values have no positions"
    limits = _rope_limits(model)
    return f"{role}'s {limits}" if isinstance(limits, str) else None


@fact
def why_not_known_attention(model: PreTrainedModel) -> str | None:
    """The reason why it is not known which attention `model` runs; None if it is transformers' own, or its class's.

    What any other function computes with a longer text, a short one need not show.
    """
    signature = signature_of(model)
    names = {original(config, ATTENTION_ENTRY) for config in signature.configs}
    chosen = {name: ALL_ATTENTION_FUNCTIONS.get(name) for name in names if isinstance(name, str)}
    for name, function in chosen.items():
        if function is not None and not _is_of(function, "transformers"):
            return _not_own(name, function)
    if "eager" in names:
        for file in files_of(set(map(type, signature.modules))):
            function = original(file, _EAGER)
            if function is not None and not _is_of(function, "transformers", file.__name__):
                return _not_own("eager", function)
    return None


def _not_own(name: str, function: Callable) -> str:
    place = f"{_file_of(function)}.{getattr(function, '__qualname__', type(function).__name__)}"
    return f"the target's attention ({name!r}) is a function that is not transformers' own ({place})"


def _file_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    # Decorators copy `__module__`.
    return getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None) or "unknown"


def _is_of(function: Any, *places: str) -> bool:
    file = _file_of(function)
    return any(file == place or file.startswith(f"{place}.") for place in places)
