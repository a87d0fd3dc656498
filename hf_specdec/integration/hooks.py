"""The methods of transformers' `GenerationMixin` that are replaced, so that `generate()` accepts a `Drafter`."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any
from weakref import WeakKeyDictionary

from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import ContinuousBatchingManager, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.continuous_batching.continuous_api import ContinuousMixin

from ..auto import AutoDrafter
from ..drafters.base import Drafter
from ..engine.cuda_graphs import on_device
from ..engine.stock_engine import DrafterCandidateGenerator
from ..patching.patch import engine
from ..sampling.randomness import Randomness
from .continuous import generate_batch
from .dispatch import UNUSED_SETTINGS, generate_with_drafter
from .validation import check_call

logger = logging.getLogger(__name__)


# Settings of a call for which it matters that the caller asked for them.
_ASKED = ("num_assistant_tokens", "use_cache", *UNUSED_SETTINGS)

# Keywords of `generate()` that only a call with a `Drafter` has.
_RANDOMNESS = tuple(field.name for field in fields(Randomness))

_ASSISTED_DECODING = GenerationMixin._assisted_decoding
_EXTRACT_GENERATION_MODE_KWARGS = GenerationMixin._extract_generation_mode_kwargs
_GET_CANDIDATE_GENERATOR = GenerationMixin._get_candidate_generator
_PREPARE_GENERATION_CONFIG = GenerationMixin._prepare_generation_config
_VALIDATE_GENERATION_MODE = GenerationMixin._validate_generation_mode


# Locks of targets: a call with a drafter patches modules, so one thread at a time generates with a target.
_LOCKS: WeakKeyDictionary[PreTrainedModel, threading.RLock] = WeakKeyDictionary()
_LOCKS_LOCK = threading.Lock()


def lock_of(model: PreTrainedModel) -> threading.RLock:
    """The lock of `model`."""
    with _LOCKS_LOCK:
        return _LOCKS.setdefault(model, threading.RLock())


def _refuse_class(assistant: Any) -> None:
    """Raise `ValueError` if a class of ours was passed where a drafter is expected."""
    if isinstance(assistant, type) and issubclass(assistant, (AutoDrafter, Drafter)):
        raise ValueError(
            f"assistant_model is the class {assistant.__name__}; expected a drafter, which "
            "AutoDrafter.from_pretrained(..., target=model) loads."
        )


@functools.wraps(_ASSISTED_DECODING)
def _assisted_decoding(self, input_ids, *args, assistant_model=None, **kwargs):
    if not isinstance(assistant_model, Drafter):
        return _ASSISTED_DECODING(self, input_ids, *args, assistant_model=assistant_model, **kwargs)
    with lock_of(self), on_device(self.device), engine():
        return generate_with_drafter(_ASSISTED_DECODING, self, assistant_model, input_ids, *args, **kwargs)


@functools.wraps(_GET_CANDIDATE_GENERATOR)
def _get_candidate_generator(self, *args, assistant_model=None, **kwargs):
    if isinstance(assistant_model, DrafterCandidateGenerator):
        return assistant_model
    return _GET_CANDIDATE_GENERATOR(self, *args, assistant_model=assistant_model, **kwargs)


@functools.wraps(_PREPARE_GENERATION_CONFIG)
def _prepare_generation_config(self, generation_config=None, *args, **kwargs):
    prepared, model_kwargs = _PREPARE_GENERATION_CONFIG(self, generation_config, *args, **kwargs)
    # transformers fills in defaults, after which the settings of the caller cannot be told from them.
    places = (kwargs, {} if generation_config is None else _asked_in(generation_config))
    own = {name: value for name, value in vars(self.generation_config).items() if name != "use_cache"}
    prepared._asked = {
        name: next((place[name] for place in (*places, own) if place.get(name) is not None), None) for name in _ASKED
    }
    return prepared, model_kwargs


def _asked_in(config: GenerationConfig) -> dict[str, Any]:
    """The settings of `config` that were made by its owner."""
    settings = vars(config)
    if "_asked" not in settings:
        return settings
    # It was prepared before, which filled in defaults, as older pipelines do once for all calls.
    defaults = GenerationConfig._get_default_generation_params()
    changed = {name: settings.get(name) for name in _ASKED if settings.get(name) != defaults.get(name)}
    return settings["_asked"] | changed


@functools.wraps(_EXTRACT_GENERATION_MODE_KWARGS)
def _extract_generation_mode_kwargs(self, custom_generate, kwargs, synced_gpus, assistant_model, streamer):
    extracted = _EXTRACT_GENERATION_MODE_KWARGS(self, custom_generate, kwargs, synced_gpus, assistant_model, streamer)
    _refuse_class(assistant_model)
    if not isinstance(assistant_model, Drafter):
        return extracted
    if custom_generate is not None:
        raise ValueError(
            f"custom_generate is {custom_generate!r}, which transformers calls without the assistant_model; expected "
            "one of the two. Drop custom_generate or assistant_model."
        )
    given = {name: kwargs.pop(name) for name in _RANDOMNESS if name in kwargs}
    return extracted | {name: value for name, value in given.items() if value is not None}


@functools.wraps(_VALIDATE_GENERATION_MODE)
def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
    drafter = generation_mode_kwargs.get("assistant_model")
    if not isinstance(drafter, Drafter):
        return _VALIDATE_GENERATION_MODE(self, generation_mode, generation_config, generation_mode_kwargs)
    synced_gpus = generation_mode_kwargs.get("synced_gpus", False)
    if generation_config.use_cache is False and generation_config._asked["use_cache"] is None:
        # Left in the model's own settings, by training for example; the text is the same with a cache.
        generation_config.use_cache = True
    check_call(self, drafter, generation_mode, generation_config, synced_gpus)
    if generation_mode_kwargs.get("assistant_tokenizer") is not None:
        raise ValueError(
            "assistant_tokenizer was given, but a drafter reads and says the target's own tokens; expected none. "
            "Drop that option."
        )
    # The rest are transformers' checks for plain decoding; its rules for assistant models do not apply.
    others = {name: value for name, value in generation_mode_kwargs.items() if name != "assistant_model"}
    return _VALIDATE_GENERATION_MODE(self, GenerationMode.SAMPLE, generation_config, others)


def _without_drafters(method: Callable) -> Callable:
    """`method` of continuous batching, refusing drafters, which it would ignore."""

    @functools.wraps(method)
    def refuse(self, *args, **kwargs):
        for name, value in kwargs.items():
            _refuse_class(value)
            if isinstance(value, Drafter):
                raise ValueError(
                    f"{method.__name__}() was given {name}={type(value).__name__}, but continuous batching by a "
                    f"manager does not run drafters; expected a call without one. Use "
                    f"generate_batch(assistant_model=...), or drop {name}."
                )
        return method(self, *args, **kwargs)

    return refuse


_GENERATE_BATCH = ContinuousMixin.generate_batch


@functools.wraps(_GENERATE_BATCH)
def _generate_batch(self, inputs, *args, assistant_model=None, **kwargs):
    _refuse_class(assistant_model)
    if isinstance(assistant_model, Drafter):
        return generate_batch(self, assistant_model, inputs, *args, **kwargs)
    others = {} if assistant_model is None else {"assistant_model": assistant_model}
    return _GENERATE_BATCH(self, inputs, *args, **others, **kwargs)


# By owner and name: transformers' method and ours.
_METHODS: dict[tuple[type, str], tuple[Callable, Callable]] = {
    (GenerationMixin, "_assisted_decoding"): (_ASSISTED_DECODING, _assisted_decoding),
    (GenerationMixin, "_extract_generation_mode_kwargs"): (
        _EXTRACT_GENERATION_MODE_KWARGS,
        _extract_generation_mode_kwargs,
    ),
    (GenerationMixin, "_get_candidate_generator"): (_GET_CANDIDATE_GENERATOR, _get_candidate_generator),
    (GenerationMixin, "_prepare_generation_config"): (_PREPARE_GENERATION_CONFIG, _prepare_generation_config),
    (GenerationMixin, "_validate_generation_mode"): (_VALIDATE_GENERATION_MODE, _validate_generation_mode),
    (ContinuousMixin, "generate_batch"): (_GENERATE_BATCH, _generate_batch),
    **{
        (owner, name): (vars(owner)[name], _without_drafters(vars(owner)[name]))
        for owner, names in (
            (ContinuousMixin, ("continuous_batching_context_manager", "init_continuous_batching")),
            (ContinuousBatchingManager, ("add_request", "add_requests")),
        )
        for name in names
    },
}


def install() -> None:
    """Let `generate(assistant_model=drafter)` run our engines. Done on import; doing it twice changes nothing.

    Calls without a `Drafter` go to transformers' own methods unchanged.
    """
    for (owner, name), (_, ours) in _METHODS.items():
        setattr(owner, name, ours)


def uninstall() -> None:
    """Give transformers back exactly the methods it had before `install`."""
    for (owner, name), (original, _) in _METHODS.items():
        setattr(owner, name, original)
