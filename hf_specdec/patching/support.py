"""Whether the static engine supports a model, i.e. whether it can run on a `RaggedCache`."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from ..cache.key_layers import attention_layers
from ..cache.layer_kinds import (
    LayerKinds,
    PlugIn,
    PositionMarker,
    Use,
    detect,
    first_reason,
    known_layer_types,
    parts_of,
    plug_ins,
)
from ..host.caches import OUTPUT_NAME, model_cache_name, why_no_cache
from ..host.modeling import (
    ALL_ATTENTION_FUNCTIONS,
    ATTENTION_ENTRY,
    ATTENTION_INTERFACE,
    HOOK_OF_ACCELERATE,
    states_attention_interface,
)
from ..host.parts import why_broken
from ..modules.hidden_states import decoder_layers, find_decoder_layers, modules_of, text_decoder
from ..modules.patch import Replacements, constant, original
from ..modules.signature import fact, files_of, names_in, signature_of

_EAGER = "eager_attention_forward"


def _layers_of_cache(model: PreTrainedModel) -> list[Any]:
    """The layers of transformers' cache for `model`; empty if its configuration describes no cache or a refused one."""
    try:
        return DynamicCache(config=model.config.get_text_config()).layers
    except (AttributeError, ValueError):
        return []


@fact
def configured_layers(model: PreTrainedModel) -> LayerKinds:
    """The kinds of the layers of transformers' cache for `model`; empty if its configuration describes no cache."""
    return LayerKinds(detect(_layers_of_cache(model)))


@fact
def cache_windows(model: PreTrainedModel) -> tuple[int | None, ...]:
    """Number of keys, the query's own included, that each layer of transformers' cache keeps; None for all."""
    return tuple(getattr(layer, "sliding_window", None) for layer in _layers_of_cache(model))


@fact
def cache_layers(model: PreTrainedModel) -> LayerKinds:
    """The kinds of the layers of a cache of `model`; a decoder layer may have several."""
    kinds = configured_layers(model) or attention_layers(len(decoder_layers(model)))
    return LayerKinds(kinds.layers, takes_mask=not uses_attention_interface(model))


@fact
def parts(model: PreTrainedModel) -> list[type[PlugIn]]:
    """The plug-ins that may concern `model`, and the kinds of its layers."""
    return parts_of(configured_layers(model))


@fact
def why_not_used(model: PreTrainedModel, use: Use) -> str | None:
    """The reason why the memory of the layers of `model` does not allow `use`; None if it does."""
    reasons = (part.why_not_used(model, use) for part in plug_ins())
    return cache_layers(model).why_not(use) or first_reason(reasons)


def position_markers(model: PreTrainedModel) -> list[PositionMarker]:
    """The functions that position ids pass through before the patched `model` gets them."""
    return [mark for part in parts(model) if (mark := part.position_marker(model)) is not None]


@fact
def uses_attention_interface(model: PreTrainedModel) -> bool:
    """Whether attention layers of `model` look up their function in transformers' attention interface and read no mask.

    Indexers read a mask, to choose among the tokens that a query sees; compressors add columns to it. Few classes state
    that all layers use the interface. In others some layers name it; the equivalence check finds whether all use it.
    """
    kinds = configured_layers(model)
    if kinds and not kinds.stores_keys:
        return True
    if kinds.reads_mask:
        return False
    if states_attention_interface(model):
        return True
    kinds = set(map(type, modules_of(text_decoder(model))))
    return any(ATTENTION_INTERFACE in names_in(kind.forward) for kind in kinds)


def cache_name(model: PreTrainedModel) -> str:
    """The `forward` parameter of `model` that takes its cache, one of `CACHE_NAMES`."""
    return model_cache_name(type(model)) or OUTPUT_NAME


def stated_positions(model: PreTrainedModel) -> int | None:
    """Number of positions that the configuration of `model` states; None if it states none."""
    text = model.config.get_text_config()
    stated = (getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    return next((value for value in stated if isinstance(value, int)), None)


@fact
def num_positions(model: PreTrainedModel) -> int | None:
    """Size of the table of position embeddings of `model`, learned or fixed; None without a table, as with RoPE."""
    stated = stated_positions(model)
    decoder, tokens = text_decoder(model), model.get_input_embeddings()
    if stated is None:
        return None
    tables = (
        module.num_embeddings
        for module in modules_of(decoder)
        if isinstance(module, nn.Embedding) and module is not tokens
    )
    # Fixed tables are as wide as hidden states, or as the rotated part of a head.
    fixed = (
        len(tensor)
        for module in modules_of(decoder)
        for tensor in (*module._buffers.values(), *vars(module).values())
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 2 and tensor.is_floating_point()
    )
    # Position embeddings have a few rows more than the configuration states, for padding.
    return stated if any(0 <= size - stated <= 8 for size in itertools.chain(tables, fixed)) else None


@fact
def _why_not_hosted(model: PreTrainedModel, role: str) -> str | None:
    """`why_not_supported`, as far as it follows from configuration and classes of modules."""
    if find_decoder_layers(model) is None:
        return f"{role} ({type(model).__name__}) has no list of decoder layers"
    if (reason := why_no_cache(type(model))) is not None:
        return f"{role} {reason}"
    text = model.config.get_text_config()
    others = set(getattr(text, "layer_types", None) or ()) - known_layer_types()
    if others:
        return f"{role} has layers of type {', '.join(sorted(others))}"
    if getattr(text, "cross_attention_layers", None):
        return f"{role} has cross-attention layers, whose keys and values have no positions"
    reason = first_reason(part.why_not_hosted(model) for part in parts(model))
    return None if reason is None else f"{role}'s {reason}"


def why_not_supported(model: PreTrainedModel, role: str = "the target") -> str | None:
    """The reason why `model`, called by its `role`, cannot run on a `RaggedCache`; None if it can."""
    if (reason := why_broken()) is not None:
        return reason
    devices = set(getattr(model, "hf_device_map", {}).values())
    if len(devices) > 1:
        return f"{role} is spread over {len(devices)} devices by hooks"
    dispatched = signature_of(model).having(HOOK_OF_ACCELERATE)
    layers = find_decoder_layers(model) if dispatched else None
    if layers is not None and not set(dispatched).isdisjoint(modules_of(layers)):
        return f"{role}'s layers run under accelerate hooks"
    return _why_not_hosted(model, role)


@fact
def why_not_known_attention(model: PreTrainedModel) -> str | None:
    """The reason why it is unknown which attention `model` runs; None if it is transformers' own, or its class's. Other
    functions may compute something else for longer texts, which a short text does not show."""
    signature = signature_of(model)
    names = {original(config, ATTENTION_ENTRY) for config in signature.configs}
    found = [(name, ALL_ATTENTION_FUNCTIONS.get(name), "transformers") for name in names if isinstance(name, str)]
    if "eager" in names:
        files = files_of(set(map(type, signature.modules)))
        found += [("eager", original(file, _EAGER), file.__name__) for file in files]
    for name, function, owner in found:
        file = _file_of(function)
        if function is not None and not f"{file}.".startswith(("transformers.", f"{owner}.")):
            place = f"{file}.{getattr(function, '__qualname__', type(function).__name__)}"
            return f"the target's attention ({name!r}) is a function that is not transformers' own ({place})"
    return None


def _file_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    # Decorators copy `__module__`, but not globals.
    return getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None) or "unknown"


def registered_attention(model: PreTrainedModel, name: str) -> Replacements:
    """Context in which `model` runs the attention implementation that is registered with transformers as `name`."""
    return Replacements({ATTENTION_ENTRY: [(config, constant(name)) for config in signature_of(model).configs]})


def runs_flash_attention(model: PreTrainedModel) -> bool:
    """Whether the text model of `model` runs flash attention outside of `registered_attention`; that gets no mask."""
    return "flash" in str(original(model.config.get_text_config(), ATTENTION_ENTRY))


def difference_of_logits(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of a token's logits `[B, n, V]`, relative to their spread."""
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1).clamp(min=1e-12)
    return float(((found - expected).norm(dim=-1) / spread).max())
