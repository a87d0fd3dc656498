"""The seam with transformers: `GenerationMixin` learns to decode with a `Drafter`."""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import ContinuousBatchingManager, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.continuous_batching.continuous_api import ContinuousMixin

from ..auto import AutoDrafter
from ..drafters.base import Drafter
from ..engine.cuda_graphs import on_device
from ..engine.equivalence import why_not_equivalent
from ..engine.prompts import Prompts, read_prompts
from ..engine.static_engine import decode
from ..engine.stock_engine import DrafterCandidateGenerator, assist
from ..parallel.tensor_parallel import check_same_call, check_same_tokens, tensor_parallel_group
from ..patching.patch import engine
from ..sampling.processors import check_processors
from ..sampling.randomness import Randomness
from .eligibility import empty_attentions, why_not_static
from .validation import check_call, check_prompts, check_same_device, check_tokens

logger = logging.getLogger(__name__)

# Settings of transformers' own assisted generation that a drafter cannot follow, and why that does no harm. A caller
# who asks for one is told so. What would change the text, or name another drafter, is refused by `check_call`.
UNUSED_SETTINGS = {
    "num_assistant_tokens_schedule": "a drafter drafts the same number of tokens in every round",
    "assistant_confidence_threshold": "a drafter drafts all tokens of a round, however sure it is of them",
    "assistant_lookbehind": "a drafter reads the target's own tokens",
    "target_lookbehind": "a drafter reads the target's own tokens",
    "max_matching_ngram_size": "a drafter does not look drafts up in the prompt",
}
_NEUTRAL = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}

# Settings of a call for which it matters that the caller asked for them.
_ASKED = ("num_assistant_tokens", "use_cache", *UNUSED_SETTINGS)

# Keywords of `generate()` that only a call with a `Drafter` has.
_RANDOMNESS = tuple(field.name for field in fields(Randomness))

_ASSISTED_DECODING = GenerationMixin._assisted_decoding
_EXTRACT_GENERATION_MODE_KWARGS = GenerationMixin._extract_generation_mode_kwargs
_GET_CANDIDATE_GENERATOR = GenerationMixin._get_candidate_generator
_PREPARE_GENERATION_CONFIG = GenerationMixin._prepare_generation_config
_VALIDATE_GENERATION_MODE = GenerationMixin._validate_generation_mode


# What holds a target through a call with a drafter, in which some of its modules behave in another way.
_HOLDS: WeakKeyDictionary[PreTrainedModel, threading.RLock] = WeakKeyDictionary()
_HOLDS_LOCK = threading.Lock()


def hold(model: PreTrainedModel) -> threading.RLock:
    """The lock of `model`, which one thread at a time can have."""
    with _HOLDS_LOCK:
        return _HOLDS.setdefault(model, threading.RLock())


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
    with hold(self), on_device(self.device), engine():
        return _generate(self, assistant_model, input_ids, *args, **kwargs)


@functools.wraps(_GET_CANDIDATE_GENERATOR)
def _get_candidate_generator(self, *args, assistant_model=None, **kwargs):
    if isinstance(assistant_model, DrafterCandidateGenerator):
        return assistant_model
    return _GET_CANDIDATE_GENERATOR(self, *args, assistant_model=assistant_model, **kwargs)


@functools.wraps(_PREPARE_GENERATION_CONFIG)
def _prepare_generation_config(self, generation_config=None, *args, **kwargs):
    prepared, model_kwargs = _PREPARE_GENERATION_CONFIG(self, generation_config, *args, **kwargs)
    # transformers fills in defaults of its own, after which it cannot be told what the caller asked for.
    places = (kwargs, {} if generation_config is None else _asked_in(generation_config))
    own = {name: value for name, value in vars(self.generation_config).items() if name != "use_cache"}
    prepared._asked = {
        name: next((place[name] for place in (*places, own) if place.get(name) is not None), None) for name in _ASKED
    }
    return prepared, model_kwargs


def _asked_in(config: GenerationConfig) -> dict[str, Any]:
    """The settings of `config` that its owner made."""
    settings = vars(config)
    if "_asked" not in settings:
        return settings
    # It was prepared before, as older pipelines do once for all calls, and filled with defaults.
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
        # Left behind in the model's own settings, by training say: without a cache the text would be the same.
        generation_config.use_cache = True
    check_call(self, drafter, generation_mode, generation_config, synced_gpus)
    if generation_mode_kwargs.get("assistant_tokenizer") is not None:
        raise ValueError(
            "assistant_tokenizer was given, but a drafter reads and says the target's own tokens; expected none. "
            "Drop that option."
        )
    # What is left is what transformers checks for plain decoding; the rules for its own assistants do not apply.
    others = {name: value for name, value in generation_mode_kwargs.items() if name != "assistant_model"}
    return _VALIDATE_GENERATION_MODE(self, GenerationMode.SAMPLE, generation_config, others)


def _without_drafters(method: Callable) -> Callable:
    """`method` of continuous batching, refusing drafters, which it would ignore or not know."""

    @functools.wraps(method)
    def refuse(self, *args, **kwargs):
        for name, value in kwargs.items():
            _refuse_class(value)
            if isinstance(value, Drafter):
                raise ValueError(
                    f"{method.__name__}() was given {name}={type(value).__name__}, but continuous batching does not "
                    f"run drafters; expected a call without one. Use generate(assistant_model=...) with a padded "
                    f"batch, or drop {name}."
                )
        return method(self, *args, **kwargs)

    return refuse


# What is replaced, by its owner and name: as transformers has it, and ours.
_SEAM: dict[tuple[type, str], tuple[Callable, Callable]] = {
    (GenerationMixin, "_assisted_decoding"): (_ASSISTED_DECODING, _assisted_decoding),
    (GenerationMixin, "_extract_generation_mode_kwargs"): (
        _EXTRACT_GENERATION_MODE_KWARGS,
        _extract_generation_mode_kwargs,
    ),
    (GenerationMixin, "_get_candidate_generator"): (_GET_CANDIDATE_GENERATOR, _get_candidate_generator),
    (GenerationMixin, "_prepare_generation_config"): (_PREPARE_GENERATION_CONFIG, _prepare_generation_config),
    (GenerationMixin, "_validate_generation_mode"): (_VALIDATE_GENERATION_MODE, _validate_generation_mode),
    **{
        (owner, name): (vars(owner)[name], _without_drafters(vars(owner)[name]))
        for owner, names in (
            (ContinuousMixin, ("continuous_batching_context_manager", "generate_batch", "init_continuous_batching")),
            (ContinuousBatchingManager, ("add_request", "add_requests")),
        )
        for name in names
    },
}


def install() -> None:
    """Let `generate(assistant_model=drafter)` run our engines. Done on import; doing it twice changes nothing.

    Calls without a `Drafter` go to transformers' own methods unchanged.
    """
    for (owner, name), (_, ours) in _SEAM.items():
        setattr(owner, name, ours)


def uninstall() -> None:
    """Give transformers back exactly the methods it had before `install`."""
    for (owner, name), (original, _) in _SEAM.items():
        setattr(owner, name, original)


def _generate(
    model: PreTrainedModel,
    drafter: Drafter,
    input_ids: torch.Tensor,
    logits_processor,
    stopping_criteria,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer=None,
    inputs_tensor: torch.Tensor | None = None,
    tokenizer=None,
    seeds=None,
    generator: torch.Generator | None = None,
    **model_kwargs,
):
    """`GenerationMixin._assisted_decoding` for a `Drafter`: choose the engine and run it.

    `seeds` and `generator` are keywords of `generate()` that a call with a `Drafter` has: see `Randomness`.
    """
    mask = model_kwargs.get("attention_mask")
    mask = None if mask is None else mask.cpu()  # read here and there; a device is waited for once
    check_prompts(input_ids, mask, model_kwargs)
    input_ids = input_ids.long()
    generation_config.max_length = math.ceil(generation_config.max_length)
    asked = getattr(generation_config, "_asked", {})
    num_draft_tokens = drafter.num_draft_tokens(asked.get("num_assistant_tokens"))
    for setting, why in UNUSED_SETTINGS.items():
        if asked.get(setting) not in (None, _NEUTRAL.get(setting)):
            _warn(f"{setting}={asked[setting]!r} has no effect: {why}.")
    check_processors(logits_processor)
    randomness = Randomness(seeds, generator)
    cache = model_kwargs.get("past_key_values")
    prompts = read_prompts(input_ids, mask, getattr(generation_config, "_mask_length", None), cache)
    attentions = empty_attentions(model, generation_config)
    if attentions is not None:
        generation_config.output_attentions = False
        model_kwargs.pop("output_attentions", None)
    obstacle = why_not_static(model, generation_config, prompts, model_kwargs)
    if obstacle is None and not drafter.is_equivalence_check:
        obstacle = why_not_equivalent(model, "static")
    engine, reason = _choose_engine(drafter, obstacle)
    if not drafter.is_equivalence_check:
        _log_engine(engine, reason)
    if engine == "static":
        check_same_device(model, drafter)
        check_tokens(model, input_ids.cpu(), mask)
    drafter.sync_with(model)
    if tensor_parallel_group(model) is not None:
        call = _what_is_asked(model, prompts, num_draft_tokens, generation_config, engine, randomness)
        check_same_call(model, stopping_criteria, call)
    if engine == "static":
        output = decode(
            model,
            drafter,
            prompts,
            cache if getattr(cache, "_is_user_defined", False) else None,
            logits_processor,
            stopping_criteria,
            generation_config,
            num_draft_tokens,
            reason,
            randomness,
            streamer,
        )
    else:
        if drafter.verification != "token":
            _warn(
                f"verification={drafter.verification!r} has no effect on the stock engine, which judges token by token."
            )
        output = assist(
            _ASSISTED_DECODING,
            model,
            drafter,
            prompts,
            generation_config,
            stopping_criteria,
            num_draft_tokens,
            reason,
            logits_processor=logits_processor,
            randomness=randomness,
            streamer=streamer,
            inputs_tensor=inputs_tensor,
            **model_kwargs,
        )
    check_same_tokens(model, output if isinstance(output, torch.Tensor) else output.sequences)
    if attentions is not None:
        output.attentions = (attentions,) * (output.sequences.shape[1] - input_ids.shape[1])
    return output


def _what_is_asked(
    model: PreTrainedModel,
    prompts: Prompts,
    num_draft_tokens: int,
    config: GenerationConfig,
    engine: str,
    randomness: Randomness,
) -> dict[str, Any]:
    """What processes that run one model together must agree on, by the name that the caller has for it.

    The names are the same on all of them, whatever was asked for.
    """
    seeds, state = None, None
    if config.do_sample and randomness.seeds is not None:
        seeds = torch.as_tensor(randomness.seeds)
    elif config.do_sample and engine == "stock" and randomness.generator is None:
        # transformers draws from the target's device wherever it samples; our seeds are the first process's.
        on_gpu = model.device.type == "cuda"
        state = torch.cuda.get_rng_state(model.device) if on_gpu else torch.get_rng_state()
    return {
        "prompts": prompts.input_ids,
        "attention_mask": (prompts.padding, prompts.width),
        "past_key_values": prompts.cached,
        "num_assistant_tokens": num_draft_tokens,
        "engine": engine,
        "generation settings": {name: value for name, value in config.to_dict().items() if not name.startswith("_")},
        "seeds": seeds,
        "use of a generator": randomness.generator is not None,
        "random state (set_seed)": state,
    }


@functools.cache
def _log_engine(engine: str, reason: str) -> None:
    """Say once which engine runs and why; loudly if it is the slow one and nobody asked for it."""
    level = logging.WARNING if engine == "stock" and not reason.startswith("forced") else logging.INFO
    logger.log(level, "hf_specdec runs the %s engine: %s", engine, reason)


@functools.cache
def _warn(message: str) -> None:
    logger.warning("hf_specdec: %s", message)


def _choose_engine(drafter: Drafter, obstacle: str | None) -> tuple[str, str]:
    if drafter.engine == "static" and obstacle is not None:
        raise ValueError(f'engine="static" was forced, but {obstacle}; use engine="auto" or "stock".')
    if drafter.engine != "auto":
        return drafter.engine, f"forced by engine={drafter.engine!r}"
    return ("static", "the target and the call fit") if obstacle is None else ("stock", obstacle)
