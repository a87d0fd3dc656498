"""A call of `generate()` with a drafter: checked, and given to the engine that can run it."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from ..config import AUTO
from ..drafters.base import Drafter
from ..engine.auto_drafts import CANDIDATES
from ..engine.continuous import decode_continuously
from ..engine.equivalence import check_stock, why_not_equivalent, why_not_equivalent_with
from ..engine.first_pass import for_static_engine
from ..engine.output import ContinuousOutput
from ..engine.prompts import read_prompts
from ..engine.request import Request
from ..engine.row_request import ContinuousBatching
from ..engine.static_engine import decode
from ..engine.stock_engine import assist, check_request
from ..host.caches import given_cache, is_of_caller
from ..host.generation import BaseStreamer, GenerateOutput, make_cache, mask_length
from ..parallel.tensor_parallel import check_same_call, check_same_tokens, tensor_parallel_group
from ..patching.signature import looked_at_once
from ..patching.support import configured_layers
from ..sampling.processors import POINTWISE_PROCESSORS, check_processors, check_rows_are_apart
from ..sampling.randomness import Randomness
from .eligibility import check_batch_invariant, empty_attentions, why_not_static
from .validation import check_cache, check_prompts, check_same_device, check_tokens

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


# How the next call of this thread is run by continuous batching; None for the usual call.
_CONTINUOUS: ContextVar[ContinuousBatching | None] = ContextVar("continuous_batching", default=None)


@contextmanager
def continuous_batching(settings: ContinuousBatching) -> Iterator[None]:
    """Context in which a call of `generate()` with a drafter runs by continuous batching: see `ContinuousOutput`."""
    before = _CONTINUOUS.set(settings)
    try:
        yield
    finally:
        _CONTINUOUS.reset(before)


# Requests of continuous batching on which hooks are tried.
_TRIED_REQUESTS = 2

_NEUTRAL = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}


def _call_of(request: Request, engine: str, continuous: ContinuousBatching | None) -> dict[str, Any]:
    """What processes that run one model together must agree on, by the name that the caller has for it.

    The names are the same on all of them, whatever was asked for.
    """
    model, config, randomness, prompts = request.model, request.config, request.randomness, request.prompts
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
        "requests": None if continuous is None else [one.tolist() for one in continuous.prompts],
        "cache": prompts.cached,
        "num_assistant_tokens": (request.num_draft_tokens, request.is_auto),
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


def _on_static_engine(
    request: Request, model_kwargs: dict[str, Any], is_continuous: bool
) -> tuple[Request, str | None]:
    """`request` as the static engine is to run it, and the reason why it cannot; None if it can."""
    model, prompts, config = request.model, request.prompts, request.config
    obstacle = why_not_static(model, config, prompts, model_kwargs, is_continuous)
    if obstacle is not None:
        return request, obstacle
    # Padding that continuous batching makes is not the caller's: its rows are what each of them says by itself.
    is_padded = not is_continuous and any(prompts.padding)
    why_not = functools.partial(why_not_equivalent, model, "static", is_padded=is_padded)
    obstacle = why_not()
    by_target = obstacle is not None and why_not(prompts_by_target=True) is None
    if obstacle is not None and not by_target:
        return request, obstacle
    prepared = for_static_engine(request, model_kwargs, by_target)
    if isinstance(prepared, str):
        return request, prepared
    request, following = prepared
    tried = request
    if is_continuous:  # of many requests a few
        mask, rows = model_kwargs.get("attention_mask"), slice(_TRIED_REQUESTS)
        tried = replace(
            request, prompts=replace(prompts, input_ids=prompts.input_ids[rows], padding=prompts.padding[rows])
        )
        model_kwargs = {} if mask is None else {"attention_mask": mask[rows]}
    return request, why_not_equivalent_with(tried, model_kwargs, following)


def _choose_engine(request: Request, model_kwargs: dict[str, Any], is_continuous: bool) -> tuple[Request, str]:
    """`request` for the engine that runs it, with the reason, and that engine, `"static"` or `"stock"`.

    Args:
        request: the call.
        model_kwargs: inputs of the target as prepared by `generate()`.
        is_continuous: whether it is to run by continuous batching.

    Raises:
        ValueError: the static engine was forced and cannot run it.
    """
    drafter = request.drafter
    on_static, obstacle = _on_static_engine(request, model_kwargs, is_continuous)
    if drafter.engine == "static" and obstacle is not None:
        raise ValueError(f'engine="static" was forced, but {obstacle}; use engine="auto" or "stock".')
    if drafter.engine != "auto":
        engine, reason = drafter.engine, f"forced by engine={drafter.engine!r}"
    else:
        engine, reason = ("static", "the target and the call fit") if obstacle is None else ("stock", obstacle)
    _log_engine(engine, reason)
    if engine == "stock" and drafter.verification != "token":
        _warn(f"verification={drafter.verification!r} has no effect on the stock engine, which judges token by token.")
    return replace(on_static if engine == "static" else request, reason=reason), engine


@looked_at_once()
def generate_with_drafter(
    assisted_decoding: Callable,
    model: PreTrainedModel,
    drafter: Drafter,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    inputs_tensor: torch.Tensor | None = None,
    tokenizer: Any = None,
    seeds: int | Sequence[int] | torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    **model_kwargs: Any,
) -> GenerateOutput | torch.Tensor | ContinuousOutput:
    """`GenerationMixin._assisted_decoding` for a `Drafter`: check the call, choose the engine and run it.

    Args:
        assisted_decoding: transformers' own, for the stock engine.
        model: the target.
        drafter: bound to it.
        seeds, generator: keywords of `generate()` that a call with a `Drafter` has besides, see `Randomness`.
        input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, inputs_tensor,
            tokenizer, model_kwargs: as `generate()` passes them.

    Raises:
        ValueError: no engine can run the call, or what was given is wrong.
    """
    continuous = _CONTINUOUS.get()
    _CONTINUOUS.set(None)  # calls that are made during this one are usual calls
    mask = model_kwargs.get("attention_mask")
    mask = None if mask is None else mask.cpu()  # read several times; the device is waited for once
    # A cache of states only does not know how many tokens it holds.
    cache = given_cache(model_kwargs) if configured_layers(model).knows_length else None
    check_prompts(input_ids, mask, cache, model_kwargs)
    logits_processor = _usable(logits_processor, continuous)
    input_ids = input_ids.long()
    generation_config.max_length = math.ceil(generation_config.max_length)
    check_cache(cache, generation_config)
    randomness = Randomness(seeds, generator)
    num_draft_tokens = _num_draft_tokens(drafter, generation_config, randomness, continuous)
    request = Request(
        model=model,
        drafter=drafter,
        prompts=read_prompts(input_ids, mask, mask_length(generation_config), cache),
        processors=logits_processor,
        criteria=stopping_criteria,
        config=generation_config,
        num_draft_tokens=_most_draft_tokens(drafter) if num_draft_tokens == AUTO else num_draft_tokens,
        is_auto=num_draft_tokens == AUTO,
        randomness=randomness,
        streamer=streamer,
        cache=cache if is_of_caller(cache) else None,
    )
    if continuous is None:
        check_rows_are_apart(logits_processor, input_ids, _vocabulary_of(model))
    attentions = empty_attentions(model, generation_config)
    if attentions is not None:
        generation_config.output_attentions = False
        model_kwargs.pop("output_attentions", None)
    request, engine = _choose_engine(request, model_kwargs, continuous is not None)
    if engine == "stock" or request.inputs is not None:
        _make_cache(model, generation_config, model_kwargs)
    request = _for_engine(request, engine)
    if drafter.batch_invariant:
        check_batch_invariant(request, engine)
    if engine == "static":
        check_same_device(model, drafter)
        check_tokens(model, input_ids.cpu(), mask)
    drafter.sync_with(model)
    if tensor_parallel_group(model) is not None:
        check_same_call(model, stopping_criteria, _call_of(request, engine, continuous))
    if engine == "stock":
        check_request(request, model_kwargs)
        check_stock(request, model_kwargs)
    run_stock = functools.partial(assist, assisted_decoding, inputs_tensor, model_kwargs)
    output = _run(request, engine, continuous, run_stock)
    if attentions is not None:
        output.attentions = (attentions,) * (output.sequences.shape[1] - input_ids.shape[1])
    return output


def _vocabulary_of(model: PreTrainedModel) -> int:
    """How many scores the target gives for a token."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    size = model.config.get_text_config().vocab_size
    return size if weight is None or weight.dim() != 2 else len(weight)


def _make_cache(model: PreTrainedModel, config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Put the cache of the call into `model_kwargs`, which `generate()` has left to be made where it is needed."""
    config._has_drafter = False
    if config._cache_arguments is not None:
        args, kwargs = config._cache_arguments
        make_cache(model, config, model_kwargs, *args, **kwargs)


def _run(
    request: Request,
    engine: str,
    continuous: ContinuousBatching | None,
    run_stock: Callable[[Request], GenerateOutput | torch.Tensor],
) -> GenerateOutput | torch.Tensor | ContinuousOutput:
    """What `engine` generates, the stock engine by `run_stock`; the same on all processes that run the target."""
    if continuous is not None:
        _check_continuous(request, engine)
        output = decode_continuously(request, continuous)
    elif engine == "static":
        output = decode(request)
    else:
        output = run_stock(request)
    check_same_tokens(request.model, output if isinstance(output, torch.Tensor) else output.sequences)
    return output


def _usable(processors: LogitsProcessorList, continuous: ContinuousBatching | None) -> LogitsProcessorList:
    """`processors` that the call runs for all rows, which are checked.

    By continuous batching others are those of each request, see `ContinuousBatching.processors_of`.
    """
    check_processors(processors)
    if continuous is None:
        return processors
    return LogitsProcessorList(one for one in processors if type(one) in POINTWISE_PROCESSORS)


def _for_engine(request: Request, engine: str) -> Request:
    """`request` without what `engine` does not have."""
    if engine == "stock" and request.is_auto:
        _warn('num_assistant_tokens="auto" has no effect on the stock engine, where all rounds have the same K.')
        return replace(request, num_draft_tokens=request.drafter.num_own_draft_tokens, is_auto=False)
    return request


def _check_continuous(request: Request, engine: str) -> None:
    if engine != "static":
        raise ValueError(
            f"Continuous batching runs on the static engine, but {type(request.model).__name__} with this drafter runs "
            f"on the {engine} engine: {request.reason}. Use generate(assistant_model=...)."
        )
    if request.inputs is not None:
        raise ValueError(
            f"Continuous batching runs prompts together with other requests, but {type(request.model).__name__} itself "
            "must run them in a pass of their own; expected a target whose text is causal. Use "
            "generate(assistant_model=...)."
        )


def _num_draft_tokens(
    drafter: Drafter, config: GenerationConfig, randomness: Randomness, continuous: ContinuousBatching | None
) -> int | str:
    """K of a call with the settings `config`, or `AUTO`; warns of those that have no effect."""
    asked = getattr(config, "_asked", {})
    for setting, why in UNUSED_SETTINGS.items():
        if asked.get(setting) not in (None, _NEUTRAL.get(setting)):
            _warn(f"{setting}={asked[setting]!r} has no effect: {why}.")
    # Drawn texts depend on K, which "auto" chooses by time: a call with seeds is to be repeatable.
    is_free = continuous is not None and not (config.do_sample and randomness.is_given)
    return drafter.num_draft_tokens(asked.get("num_assistant_tokens"), is_free)


def _most_draft_tokens(drafter: Drafter) -> int:
    """The largest K that is tried where it is chosen round by round."""
    limit = drafter.most_draft_tokens
    return max(one for one in CANDIDATES if limit is None or one <= limit)
