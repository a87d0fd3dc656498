"""Whether the static engine supports a model: whether it can run on a `RaggedCache`."""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from ..host.caches import (
    OUTPUT_NAME,
    model_cache_name,
    why_no_cache,
)
from ..host.modeling import (
    ATTENTION_INTERFACE,
    HOOK_OF_ACCELERATE,
    NO_SETTINGS,
    states_attention_interface,
)
from ..host.parts import why_broken
from .hidden_states import ModuleTree, decoder_layers, find_decoder_layers, modules_of
from .key_layers import attention_layers
from .layer_kinds import (
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
from .variants import keep, variant_of

_T = TypeVar("_T")

# Types whose values are compared as they are; values of other types are compared by their `repr`.
_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype})


class _Thread(threading.local):
    # By the `id` of a model, with it: what results are cached by, see `cached_by_settings`; None outside of
    # `settings_read_once`.
    models: dict[int, tuple[PreTrainedModel, Hashable]] | None = None


_thread = _Thread()
# Of settings; numbers are compared in no time.
_numbers: dict[Hashable, int] = {}
_next_number = itertools.count()


@contextmanager
def settings_read_once() -> Iterator[None]:
    """Context in which this thread looks once at what each model is. Nothing may change it meanwhile."""
    before, _thread.models = _thread.models, {}
    try:
        yield
    finally:
        _thread.models = before


def settings_of(config: PreTrainedConfig) -> int:
    """A number for the entries of `config` that determine how its model computes, equal for equal ones."""
    settings = _read_settings(config)
    number = _numbers.get(settings)
    return keep(_numbers, settings, next(_next_number)) if number is None else number


def _read_settings(config: PreTrainedConfig) -> tuple[Hashable, ...]:
    """The entries of `config` that determine how its model computes, hashable."""
    settings: list[Hashable] = [type(config)]
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            settings.append((name, _read_settings(value)))
        elif name not in NO_SETTINGS:
            settings.append((name, value if type(value) in _PLAIN else repr(value)))
    return tuple(settings)


def cached_by_settings(function: Callable[[PreTrainedModel], _T]) -> Callable[[PreTrainedModel], _T]:
    """Decorator: caches what `function` returns by the class, the settings and the variant of the model."""
    results: dict[Hashable, _T] = {}

    @functools.wraps(function)
    def cached(model: PreTrainedModel) -> _T:
        known = _thread.models
        if known is not None and id(model) in known:
            _, key = known[id(model)]
        else:
            key = type(model), settings_of(model.config), variant_of(model)
            if known is not None:
                known[id(model)] = model, key
        if key in results:
            return results[key]
        return keep(results, key, function(model))

    return cached


def _layers_of_cache(model: PreTrainedModel) -> list[Any]:
    """The layers of transformers' cache for `model`; none if its configuration describes no cache.

    That of an assistant that reads another model's keys and values only is refused by transformers (ValueError).
    """
    try:
        return DynamicCache(config=model.config.get_text_config()).layers
    except (AttributeError, ValueError):
        return []


@cached_by_settings
def configured_layers(model: PreTrainedModel) -> LayerKinds:
    """The kinds of the layers of transformers' cache for `model`; none if its configuration describes no cache."""
    return LayerKinds(detect(_layers_of_cache(model)))


@cached_by_settings
def cache_windows(model: PreTrainedModel) -> tuple[int | None, ...]:
    """For each layer of transformers' cache for `model` how many keys it keeps, that of the query included; None for
    all of them."""
    return tuple(getattr(layer, "sliding_window", None) for layer in _layers_of_cache(model))


@cached_by_settings
def cache_layers(model: PreTrainedModel) -> LayerKinds:
    """The kinds of the layers of a cache of `model`; a decoder layer may have more than one."""
    kinds = configured_layers(model) or attention_layers(len(decoder_layers(model)))
    return LayerKinds(kinds.layers, takes_mask=not uses_attention_interface(model))


def parts(model: PreTrainedModel) -> list[type[PlugIn]]:
    """The plug-ins that may have something to say about `model`, and the kinds of its layers."""
    return parts_of(configured_layers(model))


def why_not_used(model: PreTrainedModel, use: Use) -> str | None:
    """The reason why the memory of the layers of `model` does not allow `use`."""
    reasons = (part.why_not_used(model, use) for part in plug_ins())
    return cache_layers(model).why_not(use) or first_reason(reasons)


def position_markers(model: PreTrainedModel) -> list[PositionMarker]:
    """What position ids pass through before `model`, which is patched, is given them."""
    return [mark for part in parts(model) if (mark := part.position_marker(model)) is not None]


@cached_by_settings
def uses_attention_interface(model: PreTrainedModel) -> bool:
    """Whether attention layers of `model` look their function up in transformers' attention interface and read no mask.

    Indexers read one, to choose among the tokens that a query sees; compressors add keys, and columns to the mask.

    Few classes state that all of them do. Of others it is known of the layers that name
    the interface; whether these are all is found by the equivalence check. Attention layers of a model where none does
    take a mask. A model may have no attention layers.
    """
    kinds = configured_layers(model)
    if kinds and not kinds.stores_keys:
        return True
    if kinds.reads_mask:
        return False
    if states_attention_interface(model):
        return True
    forwards = {inspect.unwrap(kind.forward) for kind in {type(module) for module in modules_of(model.get_decoder())}}
    return any(ATTENTION_INTERFACE in one.__code__.co_names for one in forwards if hasattr(one, "__code__"))


def cache_name(model: PreTrainedModel) -> str:
    """The parameter of `forward` of `model` that takes its cache, one of `CACHE_NAMES`."""
    return model_cache_name(type(model)) or OUTPUT_NAME


def stated_positions(model: PreTrainedModel) -> int | None:
    """How many positions the configuration of `model` states; None if it states none."""
    text = model.config.get_text_config()
    stated = (getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    return next((value for value in stated if isinstance(value, int)), None)


@cached_by_settings
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


@cached_by_settings
def _why_not_hosted(model: PreTrainedModel) -> str | None:
    return first_reason(part.why_not_hosted(model) for part in parts(model))


def why_not_supported(model: PreTrainedModel, role: str = "the target", tree: ModuleTree | None = None) -> str | None:
    """The reason why `model` cannot run on a `RaggedCache`; None if it can.

    Args:
        model: to run.
        role: what the reason calls it.
        tree: of `model`, if there is one.
    """
    if (reason := why_broken()) is not None:
        return reason
    text, layers = model.config.get_text_config(), find_decoder_layers(model)
    if layers is None:
        return f"{role} ({type(model).__name__}) has no list of decoder layers"
    devices = set(getattr(model, "hf_device_map", {}).values())
    if len(devices) > 1:
        return f"{role} is spread over {len(devices)} devices by hooks"
    tree = ModuleTree.of(model) if tree is None else tree
    dispatched = tree.having(HOOK_OF_ACCELERATE)
    if dispatched and not set(dispatched).isdisjoint(modules_of(layers)):
        return f"{role}'s layers run under accelerate hooks"
    if (reason := why_no_cache(type(model))) is not None:
        return f"{role} {reason}"
    others = set(getattr(text, "layer_types", None) or ()) - known_layer_types()
    if others:
        return f"{role} has layers of type {', '.join(sorted(others))}"
    if getattr(text, "cross_attention_layers", None):
        return f"{role} has cross-attention layers, whose keys and values have no positions"
    reason = _why_not_hosted(model)
    return None if reason is None else f"{role}'s {reason}"
