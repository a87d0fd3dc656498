"""The methods of transformers' `GenerationMixin` that are replaced, so that `generate()` accepts a `Drafter`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation import ContinuousBatchingManager, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.continuous_batching.continuous_api import ContinuousMixin

from ..auto import AutoDrafter
from ..drafters.base import Drafter
from ..engine.cuda_graphs import on_device
from ..engine.stock_engine import DrafterCandidateGenerator
from ..patching.patch import engine
from ..patching.support import CACHE_NAMES
from ..sampling.randomness import Randomness
from .continuous import generate_batch
from .dispatch import UNUSED_SETTINGS, generate_with_drafter
from .locks import lock_of
from .manager import SpeculativeBatchingManager
from .validation import check_call

logger = logging.getLogger(__name__)


# Settings of a call for which it matters that the caller asked for them.
_ASKED = ("num_assistant_tokens", "use_cache", *UNUSED_SETTINGS)

# Keywords of `generate()` that only a call with a `Drafter` has.
_RANDOMNESS = tuple(field.name for field in fields(Randomness))

_ASSISTED_DECODING = GenerationMixin._assisted_decoding
_EXTRACT_GENERATION_MODE_KWARGS = GenerationMixin._extract_generation_mode_kwargs
_GET_CANDIDATE_GENERATOR = GenerationMixin._get_candidate_generator
_PREPARE_CACHE_FOR_GENERATION = GenerationMixin._prepare_cache_for_generation
_PREPARE_GENERATION_CONFIG = GenerationMixin._prepare_generation_config
_VALIDATE_GENERATION_MODE = GenerationMixin._validate_generation_mode


def _refuse_others(assistant: Any) -> None:
    """Raise `ValueError` if a class of ours, or a module around a drafter, was passed where a drafter is expected."""
    if isinstance(assistant, type) and issubclass(assistant, (AutoDrafter, Drafter)):
        raise ValueError(
            f"assistant_model is the class {assistant.__name__}; expected a drafter, which "
            "AutoDrafter.from_pretrained(..., target=model) loads."
        )
    if isinstance(assistant, nn.Module) and not isinstance(assistant, Drafter):
        inner = next((one for one in assistant.modules() if isinstance(one, Drafter)), None)
        if inner is not None:
            raise ValueError(
                f"assistant_model is a {type(assistant).__name__} around a {type(inner).__name__}; expected the "
                "drafter itself, in which the layers of LoRA adapters are, too."
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


@functools.wraps(_PREPARE_CACHE_FOR_GENERATION)
def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
    if generation_config._has_drafter and _makes_new_cache(self, generation_config, model_kwargs):
        # The static engine has one of its own; `generate_with_drafter` makes it for calls that run otherwise.
        generation_config._cache_arguments = args, kwargs
        return None
    return _PREPARE_CACHE_FOR_GENERATION(self, generation_config, model_kwargs, *args, **kwargs)


def _makes_new_cache(model: PreTrainedModel, config: GenerationConfig, model_kwargs: dict[str, Any]) -> bool:
    """Whether transformers would make a `DynamicCache`, and nothing else reads it before the drafter's call runs."""
    is_own = type(model)._prepare_cache_for_generation is _prepare_cache_for_generation
    if not is_own or "_prepare_cache_for_generation" in vars(model) or not model._supports_default_dynamic_cache():
        return False
    is_given = any(model_kwargs.get(name) is not None for name in CACHE_NAMES)
    return not is_given and config.cache_implementation is None and config.use_cache is not False


@functools.wraps(_PREPARE_GENERATION_CONFIG)
def _prepare_generation_config(self, generation_config=None, *args, **kwargs):
    prepared, model_kwargs = _PREPARE_GENERATION_CONFIG(self, generation_config, *args, **kwargs)
    # transformers fills in defaults, after which the settings of the caller cannot be told from them.
    places = (kwargs, {} if generation_config is None else _asked_in(generation_config))
    own = {name: value for name, value in vars(self.generation_config).items() if name != "use_cache"}
    prepared._asked = {
        name: next((place[name] for place in (*places, own) if place.get(name) is not None), None) for name in _ASKED
    }
    prepared._has_drafter, prepared._cache_arguments = False, None  # whatever an earlier call has noted
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
    _refuse_others(assistant_model)
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
    generation_config._has_drafter = True
    if generation_mode_kwargs.get("assistant_tokenizer") is not None:
        raise ValueError(
            "assistant_tokenizer was given, but a drafter reads and says the target's own tokens; expected none. "
            "Drop that option."
        )
    # The rest are transformers' checks for plain decoding; its rules for assistant models do not apply.
    others = {name: value for name, value in generation_mode_kwargs.items() if name != "assistant_model"}
    return _VALIDATE_GENERATION_MODE(self, GenerationMode.SAMPLE, generation_config, others)


def _without_drafters(method: Callable) -> Callable:
    """`method` of a manager without a drafter, refusing drafters, which it would ignore."""

    @functools.wraps(method)
    def refuse(self, *args, **kwargs):
        for name, value in kwargs.items():
            _refuse_others(value)
            if isinstance(value, Drafter):
                raise ValueError(
                    f"{method.__name__}() was given {name}={type(value).__name__}, but the drafter is the manager's; "
                    "expected a request without one. Pass it to init_continuous_batching(assistant_model=...)."
                )
        return method(self, *args, **kwargs)

    return refuse


_GENERATE_BATCH = ContinuousMixin.generate_batch


@functools.wraps(_GENERATE_BATCH)
def _generate_batch(self, inputs, *args, assistant_model=None, **kwargs):
    _refuse_others(assistant_model)
    if isinstance(assistant_model, Drafter):
        return generate_batch(self, assistant_model, inputs, *args, **kwargs)
    others = {} if assistant_model is None else {"assistant_model": assistant_model}
    return _GENERATE_BATCH(self, inputs, *args, **others, **kwargs)


_INIT_CONTINUOUS_BATCHING = ContinuousMixin.init_continuous_batching
_CONTINUOUS_BATCHING_CONTEXT_MANAGER = ContinuousMixin.continuous_batching_context_manager


@functools.wraps(_INIT_CONTINUOUS_BATCHING)
def _init_continuous_batching(self, *args, assistant_model=None, **kwargs):
    _refuse_others(assistant_model)
    if isinstance(assistant_model, Drafter):
        return SpeculativeBatchingManager(self, assistant_model, *args, **kwargs)
    others = {} if assistant_model is None else {"assistant_model": assistant_model}
    return _INIT_CONTINUOUS_BATCHING(self, *args, **others, **kwargs)


@functools.wraps(_CONTINUOUS_BATCHING_CONTEXT_MANAGER)
def _continuous_batching_context_manager(self, *args, assistant_model=None, **kwargs):
    _refuse_others(assistant_model)
    if isinstance(assistant_model, Drafter):
        return _running_manager(self, assistant_model, *args, **kwargs)
    others = {} if assistant_model is None else {"assistant_model": assistant_model}
    return _CONTINUOUS_BATCHING_CONTEXT_MANAGER(self, *args, **others, **kwargs)


@contextmanager
def _running_manager(
    model: PreTrainedModel,
    drafter: Drafter,
    generation_config: GenerationConfig | None = None,
    block: bool = True,
    timeout: float | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    persistent_manager: bool = False,
    warmup: bool = True,
    workload_hints: Any = None,
    **kwargs: Any,
) -> Iterator[SpeculativeBatchingManager]:
    """`ContinuousMixin.continuous_batching_context_manager` with a drafter, with its arguments."""
    manager = SpeculativeBatchingManager(
        model, drafter, generation_config, continuous_batching_config, workload_hints, **kwargs
    )
    if warmup:
        manager.warmup()
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(block=block, timeout=timeout, keep_for_next_session=persistent_manager)


# By owner and name: transformers' method and ours.
_METHODS: dict[tuple[type, str], tuple[Callable, Callable]] = {
    (GenerationMixin, "_assisted_decoding"): (_ASSISTED_DECODING, _assisted_decoding),
    (GenerationMixin, "_extract_generation_mode_kwargs"): (
        _EXTRACT_GENERATION_MODE_KWARGS,
        _extract_generation_mode_kwargs,
    ),
    (GenerationMixin, "_get_candidate_generator"): (_GET_CANDIDATE_GENERATOR, _get_candidate_generator),
    (GenerationMixin, "_prepare_cache_for_generation"): (
        _PREPARE_CACHE_FOR_GENERATION,
        _prepare_cache_for_generation,
    ),
    (GenerationMixin, "_prepare_generation_config"): (_PREPARE_GENERATION_CONFIG, _prepare_generation_config),
    (GenerationMixin, "_validate_generation_mode"): (_VALIDATE_GENERATION_MODE, _validate_generation_mode),
    (ContinuousMixin, "generate_batch"): (_GENERATE_BATCH, _generate_batch),
    (ContinuousMixin, "init_continuous_batching"): (_INIT_CONTINUOUS_BATCHING, _init_continuous_batching),
    (ContinuousMixin, "continuous_batching_context_manager"): (
        _CONTINUOUS_BATCHING_CONTEXT_MANAGER,
        _continuous_batching_context_manager,
    ),
    **{
        (ContinuousBatchingManager, name): (
            vars(ContinuousBatchingManager)[name],
            _without_drafters(vars(ContinuousBatchingManager)[name]),
        )
        for name in ("add_request", "add_requests")
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
