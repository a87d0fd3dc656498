"""The methods of transformers' `GenerationMixin` that are replaced so that `generate()` accepts a `Drafter`."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from typing import Any

from torch import nn
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from .auto import AutoDrafter
from .drafters.attachment import Attachment, attachment_of
from .drafters.base import Drafter
from .graphs.cuda_graphs import on_device
from .host.caches import given_cache
from .host.generation import (
    REPLACED_METHODS,
    ContinuousBatchingManager,
    ContinuousMixin,
    GenerationMixin,
    GenerationMode,
    default_settings,
    makes_dynamic_cache,
)
from .integration import scoring  # noqa: F401 (`Drafter.score` runs it)
from .integration.continuous import generate_batch
from .integration.dispatch import UNUSED_SETTINGS, generate_with_drafter, make_call_cache
from .integration.validation import check_call
from .modules.evaluation import Evaluation
from .modules.locks import lock_of
from .modules.patch import engine
from .modules.signature import watch_optimizers
from .parallel.tensor_parallel import failing_together
from .sampling.randomness import Randomness
from .serving.manager import SpeculativeBatchingManager
from .stock.stock_engine import DrafterCandidateGenerator

logger = logging.getLogger(__name__)


# Settings of a call for which it matters whether the caller asked for them.
_ASKED = ("num_assistant_tokens", "use_cache", *UNUSED_SETTINGS)

# Keywords of `generate()` that only calls with a `Drafter` have.
_OF_CALL = (*(field.name for field in fields(Randomness)), "return_logprobs", "adapter_names", "tree")

# Replacements of transformers' methods, by owner and name.
_METHODS: dict[tuple[type, str], Callable] = {}


def _replaces(owner: type, name: str) -> Callable[[Callable], Callable]:
    """Decorator for the replacement of a method; the function gets the original method as its first argument."""

    def register(function: Callable) -> Callable:
        original = REPLACED_METHODS[owner, name]

        @functools.wraps(original)
        def ours(self, *args, **kwargs):
            return function(original, self, *args, **kwargs)

        ours.__signature__ = inspect.signature(original)  # every call of `generate()` asks for one
        _METHODS[owner, name] = ours
        return ours

    return register


def _refuse_others(assistant: Any) -> None:
    """Raise `ValueError` if a name, a class of ours, or a module around a drafter was passed instead of a drafter."""
    is_class = isinstance(assistant, type) and issubclass(assistant, (AutoDrafter, Drafter))
    if is_class or isinstance(assistant, (str, os.PathLike)):
        raise ValueError(
            f"assistant_model is {assistant!r}; expected a drafter, which AutoDrafter.from_pretrained(..., "
            "target=model) loads."
        )
    if isinstance(assistant, nn.Module) and not isinstance(assistant, Drafter):
        inner = next((one for one in assistant.modules() if isinstance(one, Drafter)), None)
        if inner is not None:
            raise ValueError(
                f"assistant_model is a {type(assistant).__name__} around a {type(inner).__name__}; expected the "
                "drafter itself. PEFT puts LoRA layers into it, so they run without the PeftModel around it, too."
            )


def _decode(original, self, input_ids, *args, assistant_model=None, **kwargs):
    """Replaces the decoding loops: for calls with a drafter, and `_sample` where a model's `Attachment` allows it."""
    if isinstance(assistant_model, Drafter):
        with lock_of(self), on_device(self.device), engine(), Evaluation(assistant_model):
            return generate_with_drafter(self, assistant_model, input_ids, *args, **kwargs)
    if not isinstance(assistant_model, Attachment):
        others = {} if assistant_model is None else {"assistant_model": assistant_model}
        return original(self, input_ids, *args, **others, **kwargs)
    attachment, config = assistant_model, kwargs["generation_config"]

    def with_drafter(on_begin):
        # Checks may change the settings.
        own = {**kwargs, "generation_config": copy.copy(config), "on_begin": on_begin}
        return _decode(original, self, input_ids, *args, assistant_model=attachment.drafter, **own)

    def plainly():
        make_call_cache(self, config, kwargs)
        return original(self, input_ids, *args, **kwargs)

    return attachment.run(with_drafter, plainly)


for _name in ("_assisted_decoding", "_sample"):
    _replaces(GenerationMixin, _name)(_decode)


@_replaces(GenerationMixin, "_get_candidate_generator")
def _get_candidate_generator(original, self, *args, assistant_model=None, **kwargs):
    if isinstance(assistant_model, DrafterCandidateGenerator):
        return assistant_model
    return original(self, *args, assistant_model=assistant_model, **kwargs)


@_replaces(GenerationMixin, "_prepare_cache_for_generation")
def _prepare_cache_for_generation(original, self, generation_config, model_kwargs, *args, **kwargs):
    # Some models prepare a configuration of their own, which has not passed through `_prepare_generation_config`.
    if getattr(generation_config, "_has_drafter", False) and _makes_new_cache(self, generation_config, model_kwargs):
        # The static engine has its own cache; `generate_with_drafter` makes this one for other calls.
        generation_config._cache_arguments = args, kwargs
        return None
    return original(self, generation_config, model_kwargs, *args, **kwargs)


def _makes_new_cache(model: PreTrainedModel, config: GenerationConfig, model_kwargs: dict[str, Any]) -> bool:
    """Whether transformers would make a `DynamicCache` that nothing reads before the drafter's call runs."""
    is_own = type(model)._prepare_cache_for_generation is _prepare_cache_for_generation
    if not is_own or "_prepare_cache_for_generation" in vars(model) or not makes_dynamic_cache(model):
        return False
    return given_cache(model_kwargs) is None and config.cache_implementation is None and config.use_cache is not False


@_replaces(GenerationMixin, "_prepare_generation_config")
def _prepare_generation_config(original, self, generation_config=None, *args, **kwargs):
    prepared, model_kwargs = original(self, generation_config, *args, **kwargs)
    # transformers fills in defaults, after which they can no longer be told from the caller's settings.
    own = vars(self.generation_config) | {"use_cache": None}
    places = (own, {} if generation_config is None else _asked_in(generation_config), kwargs)  # the last one decides
    prepared._asked = dict.fromkeys(_ASKED)
    for place in places:
        prepared._asked |= {name: place[name] for name in _ASKED if place.get(name) is not None}
    prepared._has_drafter, prepared._cache_arguments = False, None  # an earlier call may have set them
    return prepared, model_kwargs


def _asked_in(config: GenerationConfig) -> dict[str, Any]:
    """The settings of `config` that its owner has made."""
    settings = vars(config)
    if "_asked" not in settings:
        return settings
    # It was prepared before, which filled in defaults; older pipelines do so once for all calls.
    defaults = default_settings(GenerationConfig)
    changed = {name: settings.get(name) for name in _ASKED if settings.get(name) != defaults.get(name)}
    return settings["_asked"] | changed


@_replaces(GenerationMixin, "_extract_generation_mode_kwargs")
def _extract_generation_mode_kwargs(original, self, custom_generate, kwargs, synced_gpus, assistant_model, streamer):
    extracted = original(self, custom_generate, kwargs, synced_gpus, assistant_model, streamer)
    _refuse_others(assistant_model)
    drafter = attachment_of(self) if assistant_model is None else assistant_model
    if not isinstance(drafter, Attachment | Drafter):
        return extracted
    if custom_generate is not None:
        name = getattr(custom_generate, "__qualname__", custom_generate)
        error = ValueError(
            f"custom_generate is {name!r}, which transformers calls without a drafter; expected none. Drop "
            "custom_generate or the drafter."
        )
        if isinstance(drafter, Drafter):
            raise error
        drafter.refuse(error)
        return extracted
    if isinstance(drafter, Attachment):
        return extracted | {"assistant_model": drafter}
    given = {name: kwargs.pop(name) for name in _OF_CALL if name in kwargs}
    return extracted | {name: value for name, value in given.items() if value is not None}


@_replaces(GenerationMixin, "_validate_generation_mode")
def _validate_generation_mode(original, self, generation_mode, generation_config, generation_mode_kwargs):
    drafter = generation_mode_kwargs.get("assistant_model")
    # transformers checks the rest as plain decoding: its rules for assistant models do not apply.
    others = {name: value for name, value in generation_mode_kwargs.items() if name != "assistant_model"}
    if isinstance(drafter, Drafter):
        with failing_together(self):
            _check(self, drafter, generation_mode, generation_config, others)
        generation_mode = GenerationMode.SAMPLE
    elif isinstance(drafter, Attachment):
        try:
            _check_attached(self, drafter, generation_mode, generation_config, others)
        except ValueError as error:
            drafter.refuse(error)
            del generation_mode_kwargs["assistant_model"]  # the call goes on with this dictionary
    else:
        others = generation_mode_kwargs
    return original(self, generation_mode, generation_config, others)


def _check(self, drafter, generation_mode, generation_config, others):
    if generation_config.use_cache is False and generation_config._asked["use_cache"] is None:
        # Left in the model's own settings, for example by training; the text is the same with a cache.
        generation_config.use_cache = True
    check_call(self, drafter, generation_mode, generation_config, others.get("synced_gpus", False))
    if others.get("assistant_tokenizer") is not None:
        raise ValueError(
            "assistant_tokenizer was given, but a drafter reads and says the target's own tokens; expected none. "
            "Drop that option."
        )
    generation_config._has_drafter = True


def _check_attached(self, attachment, generation_mode, generation_config, others):
    """`_check` for a call that would be plain without an attachment."""
    if type(self)._sample is not GenerationMixin._sample:
        raise ValueError(f"{type(self).__name__} has a loop of decoding of its own; expected transformers' `_sample`.")
    use_cache, generation_config._asked["use_cache"] = generation_config.use_cache, None
    if generation_mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        generation_mode = GenerationMode.ASSISTED_GENERATION
    try:
        with lock_of(self), failing_together(self), attachment.evaluation():
            _check(self, attachment.drafter, generation_mode, generation_config, others)
    except ValueError:
        generation_config.use_cache = use_cache
        raise


def _without_drafters(original: Callable, self, *args, **kwargs):
    """A method of a manager without a drafter; it refuses drafters, which it would ignore."""
    for name, value in kwargs.items():
        if not isinstance(value, str):  # such as a request_id
            _refuse_others(value)
        if isinstance(value, Drafter):
            raise ValueError(
                f"{original.__name__}() was given {name}={type(value).__name__}, but the drafter is the manager's; "
                "expected a request without one. Pass it to init_continuous_batching(assistant_model=...)."
            )
    return original(self, *args, **kwargs)


for _name in ("add_request", "add_requests"):
    _replaces(ContinuousBatchingManager, _name)(_without_drafters)


def _continuously(function, original, self, *args, assistant_model=None, **kwargs):
    """A method of continuous batching; with a drafter, `function` of model and drafter replaces it."""
    _refuse_others(assistant_model)
    if isinstance(assistant_model, Drafter):
        return function(self, assistant_model, *args, **kwargs)
    attachment = attachment_of(self) if assistant_model is None else None
    if attachment is not None:
        return attachment.run(
            lambda on_begin: function(
                self, attachment.drafter, *args, **kwargs, on_begin=on_begin, attachment=attachment
            ),
            lambda: original(self, *args, **kwargs),
        )
    others = {} if assistant_model is None else {"assistant_model": assistant_model}
    return original(self, *args, **others, **kwargs)


def _manager(model: PreTrainedModel, drafter: Drafter, *args, on_begin=None, **kwargs) -> SpeculativeBatchingManager:
    return SpeculativeBatchingManager(model, drafter, *args, **kwargs)


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
) -> AbstractContextManager[SpeculativeBatchingManager]:
    """`ContinuousMixin.continuous_batching_context_manager` with a drafter, with its arguments."""
    manager = _manager(model, drafter, generation_config, continuous_batching_config, workload_hints, **kwargs)

    @contextmanager
    def running() -> Iterator[SpeculativeBatchingManager]:
        if warmup:
            manager.warmup()
        manager.start()
        try:
            yield manager
        finally:
            manager.stop(block=block, timeout=timeout, keep_for_next_session=persistent_manager)

    return running()


for _name, _function in (
    ("generate_batch", generate_batch),
    ("init_continuous_batching", _manager),
    ("continuous_batching_context_manager", _running_manager),
):
    _replaces(ContinuousMixin, _name)(functools.partial(_continuously, _function))


def install() -> None:
    """Let `generate(assistant_model=drafter)` run our engines. Runs on import; a second time changes nothing.

    Calls without a `Drafter` go to transformers' own methods unchanged.
    """
    for (owner, name), ours in _METHODS.items():
        setattr(owner, name, ours)
    watch_optimizers(True)


def uninstall() -> None:
    """Restore exactly the methods that transformers had before `install`."""
    for owner, name in _METHODS:
        setattr(owner, name, REPLACED_METHODS[owner, name])
    watch_optimizers(False)
