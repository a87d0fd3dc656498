"""Caches of transformers: their classes, and the names of the parameters that take them in models and calls."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import cache as cached
from typing import Any

from .parts import about, any_of, attribute, in_modeling_files, part, uses

_FILE = "transformers.cache_utils"


def _layers(*names: str) -> tuple[Any, ...]:
    why = "kinds of layers that can be copied to and from the engine's cache"
    return tuple(part(_FILE, name, why=why) for name in names)


Cache = part(_FILE, "Cache", why="base class of the engine's cache")
CacheLayerMixin = part(_FILE, "CacheLayerMixin", why="base class of the engine's layers with keys and values")
LinearAttentionCacheLayerMixin = part(
    _FILE, "LinearAttentionCacheLayerMixin", why="base class of the engine's recurrent layers"
)
KEYED_LAYERS = _layers("StaticLayer", "StaticSlidingWindowLayer", "DynamicLayer", "DynamicSlidingWindowLayer")
StaticLayer, *_ = KEYED_LAYERS
RECURRENT_LAYERS = _layers(
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "LinearAttentionAndStaticFullAttentionLayer",
    "LinearAttentionAndStaticSlidingWindowAttentionLayer",
)


is_of_caller = attribute(
    "transformers.generation.utils:GenerationMixin", "_is_user_defined", why="marks a cache that the caller passed"
)


@uses(f"{_FILE}:QuantizedLayer", "_quantize", why="tells caches that round keys and values")
def rounds_keys(part_of_cache: Any) -> bool:
    """Whether a cache, one of its layers or their class rounds what it stores."""
    return hasattr(part_of_cache, "_quantize")


@uses(f"{_FILE}:DynamicSlidingWindowLayer", "record_past", why="set by assisted generation, restored after a call")
@contextmanager
def recording_restored(cache: Any) -> Iterator[None]:
    """Context after which layers of `cache` keep tokens that have left their window, or not, as before."""
    before = [(layer, layer.record_past) for layer in getattr(cache, "layers", ()) if hasattr(layer, "record_past")]
    try:
        yield
    finally:
        for layer, is_recording in before:
            layer.record_past = is_recording


(STORE_COMPRESSED,) = in_modeling_files("store_compression_weights", why="tells layers with keys of windows of tokens")

# Names of the cache: as parameter of `forward` in a model or a layer, and among model inputs in `generate()`.
CACHE_NAMES = in_modeling_files(
    "cache",
    "past_key_values",
    "cache_params",
    why="parameter of `forward` that takes the cache, input of `generate()`, entry of outputs",
    since="5.24: `cache`; before, `past_key_values`, and `cache_params` of models with recurrent layers only",
)
# Names of models' own caches, which are not transformers' `Cache`.
_OWN_CACHES = in_modeling_files("state", "mems", "past_buckets_states", why="caches of a model's own")


@cached
def cache_parameter(function: Callable) -> str | None:
    """The cache parameter of `function`, one of `CACHE_NAMES`; None if it has none of them."""
    parameters = inspect.signature(inspect.unwrap(function)).parameters
    return next((name for name in CACHE_NAMES if name in parameters), None)


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """The cache among keyword arguments of a model, a layer or a function of transformers; None if there is none."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)


@cached
def _parameters_of(kind: type, forward: Callable) -> dict[str, inspect.Parameter]:
    """Parameters of `forward` in a class, and in those of its bases that it may pass others on to."""
    found: dict[str, inspect.Parameter] = {}
    for function in (vars(base)["forward"] for base in kind.__mro__ if "forward" in vars(base)):
        parameters = inspect.signature(inspect.unwrap(function)).parameters
        found = {**parameters, **found}
        if all(one.kind is not one.VAR_KEYWORD for one in parameters.values()):
            break
    return found


def _is_own(parameter: inspect.Parameter) -> bool:
    """Whether the annotation of a parameter is a class of caches other than transformers' `Cache`."""
    kinds = [one for one in (parameter.annotation, *typing.get_args(parameter.annotation)) if isinstance(one, type)]
    return any(one.__name__.endswith("Cache") and not issubclass(one, Cache) for one in kinds)


def model_cache_name(kind: type) -> str | None:
    """The parameter that takes a `Cache` in models of class `kind`; None if there is none."""
    parameters = _parameters_of(kind, kind.forward)
    return next((name for name in CACHE_NAMES if name in parameters and not _is_own(parameters[name])), None)


def why_no_cache(kind: type) -> str | None:
    """The reason why models of class `kind` do not take a `Cache`; None if they do."""
    if model_cache_name(kind) is not None:
        return None
    own = [
        name
        for name, parameter in _parameters_of(kind, kind.forward).items()
        if name in _OWN_CACHES or (name in CACHE_NAMES and _is_own(parameter))
    ]
    if own:
        return f"keeps its states in a cache of its own ({any_of(own)} of {kind.__name__}.forward)"
    return about(f"`{kind.__name__}.forward` has no parameter {any_of(CACHE_NAMES)}")


GenerateDecoderOnlyOutput = part("transformers.generation.utils", "GenerateDecoderOnlyOutput", why="what calls return")
_ENTRIES = {one.name for one in fields(GenerateDecoderOnlyOutput)} if GenerateDecoderOnlyOutput else set()

# The entry of an output of `generate()` that holds the cache, and the model input of the same name. Older versions have
# another one for models with recurrent layers only.
OUTPUT_NAME = next((name for name in CACHE_NAMES if name in _ENTRIES), CACHE_NAMES[0])
