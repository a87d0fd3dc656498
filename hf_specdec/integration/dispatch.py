"""The dispatch of a `generate()` call with a drafter: check it, and pass it to the engine that can run it."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)

from ..auto_k.auto_drafts import CANDIDATES
from ..calls.call import Call
from ..calls.first_pass import for_static_engine
from ..calls.prompts import Prompts, read_prompts
from ..calls.request import ContinuousBatching, Request
from ..config import AUTO, check_type
from ..drafters.base import MATCH, Drafter
from ..engine.continuous import check_continuous, decode_continuously
from ..engine.static_engine import decode
from ..graphs.cuda_graphs import on_device
from ..host.caches import given_cache, is_of_caller
from ..host.generation import BaseStreamer, GenerateOutput, make_cache, mask_length
from ..hosting.eligibility import check_configured, drop_empty_attentions, why_no_tree, why_not_static
from ..hosting.equivalence import check_stock, why_not_equivalent, why_not_equivalent_with
from ..modules.adapters import names_in_hooks, names_of_rows, without_row_hooks
from ..modules.evaluation import Evaluation
from ..modules.locks import lock_of
from ..modules.module_hooks import hooks_of
from ..modules.patch import engine as engine_context
from ..modules.signature import looked_at_once, settings_of, signature_of, torch_settings
from ..parallel.tensor_parallel import (
    LateErrors,
    check_same_call,
    check_same_tokens,
    failing_together,
    from_first_rank,
    tensor_parallel_group,
)
from ..patching.linear import computed_by_libraries
from ..patching.support import configured_layers
from ..sampling.processors import check_processors, check_rows_are_apart, readers_of
from ..sampling.randomness import Randomness
from ..stock.stock_engine import assist, check_stock_call
from .validation import check_cache, check_prompts, check_tokens, check_whole, vocabulary_of

logger = logging.getLogger(__name__)

# Settings of transformers' own assisted generation that have no effect on a drafter, and why that does no harm. Callers
# who set one are told so. `check_call` refuses settings that would change the text, or name another drafter.
UNUSED_SETTINGS = {
    "num_assistant_tokens_schedule": 'a round drafts num_assistant_tokens tokens, which "auto" chooses round by round',
    "assistant_confidence_threshold": "a drafter drafts all tokens of a round, however sure it is of them",
    "assistant_lookbehind": "a drafter reads the target's own tokens",
    "target_lookbehind": "a drafter reads the target's own tokens",
    "max_matching_ngram_size": "a drafter does not look drafts up in the prompt",
}


_NEUTRAL = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}


# Settings of drafters besides those that are in a `Call`.
_SETTINGS = ("engine", "draft_probs", "compile_rounds", "batch_invariant", "draft_window_size", "kv_cache_dtype")


def _check_same(
    call: Call,
    model_kwargs: dict[str, Any],
    prompts: Sequence[torch.Tensor] | None = None,
    settings: ContinuousBatching | None = None,
) -> None:
    """`check_same_call` for a split target, before anything depends on what ranks know of it. `prompts` are those of
    several texts, `settings` those of continuous batching."""
    model, drafter, config, own = call.model, call.drafter, call.config, call.prompts
    seeds, signatures = call.randomness.seeds, (signature_of(model), signature_of(drafter))
    inputs = {name: list(one.shape) for name, one in model_kwargs.items() if isinstance(one, torch.Tensor)}
    values = {
        "prompts": own.input_ids,
        "attention_mask": (own.padding, own.width),
        "model inputs": inputs,
        "requests": None if prompts is None else [one.tolist() for one in prompts],
        "cache": (own.cached, call.cache is not None),
        "num_assistant_tokens": (call.num_draft_tokens, call.is_auto, call.num_nodes, call.verification),
        "drafters": (type(drafter), settings_of(drafter.config), drafter.rollouts is not None),
        "settings of the drafter": {name: getattr(drafter, name) for name in _SETTINGS},
        "generation settings": {name: value for name, value in config.to_dict().items() if not name.startswith("_")},
        "logits processors or stopping criteria": [
            [type(rule).__name__ for rule in rules] for rules in (call.processors, call.criteria)
        ],
        "return_logprobs": call.logprobs,
        "seeds": torch.as_tensor(seeds) if config.do_sample and seeds is not None else None,
        "use of a generator": call.randomness.generator is not None,
        "adapters": (call.adapters, signatures[0].adapters.state),
        "forward hooks": [len(hooks_of(one.hooked, of_engines=True)) for one in signatures],
        "settings of torch": torch_settings(model.device),
    }
    if settings is not None:
        limits = settings.max_rows, settings.longest, settings.reuses_prefixes
        values["settings of continuous batching"] = (*limits, type(settings.arrivals))
    if check_same_call(model, call.criteria, values, {"facts": signatures[0].known}):
        signatures[0].facts.clear()  # finding one out may run the target


def _fitted_to_static_engine(call: Call, model_kwargs: dict[str, Any], is_continuous: bool) -> tuple[Call, str | None]:
    """`call` prepared for the static engine, and the reason why that cannot run it; None if it can."""
    with _rows_in_state(call):
        found, obstacle = _with_present_hooks(call, model_kwargs, is_continuous)
    if call.adapters is None or obstacle is not None or found.inputs is None:
        return found, obstacle
    # The target itself runs the prompts, with PEFT's hooks if it has any.
    if names_in_hooks(signature_of(call.model).hooked) is None:
        return call, "rows have adapters of their own, but the target itself runs the prompts of this call"
    return _with_present_hooks(replace(call, adapters=None), model_kwargs, is_continuous)


def _rows_in_state(call: Call) -> AbstractContextManager[None]:
    """Context in which the target lacks PEFT's row hooks, if `call` has the adapters of its rows itself."""
    layers = () if call.adapters is None else signature_of(call.model).adapters.layers
    return without_row_hooks(layers)


def row_adapters(model: PreTrainedModel, names: Sequence[str] | None, count: int) -> list[str] | None:
    """`names_of_rows` of a call of `model`."""
    check_type("adapter_names", names, list[str] | None)
    signature = signature_of(model)
    return names_of_rows(signature.adapters, signature.hooked, names, count)


def _with_present_hooks(call: Call, model_kwargs: dict[str, Any], is_continuous: bool) -> tuple[Call, str | None]:
    """`_fitted_to_static_engine` for a call that runs with the present hooks of modules."""
    obstacle = why_not_static(call, model_kwargs, is_continuous)
    if obstacle is not None:
        return call, obstacle
    # Padding that continuous batching adds is not the user's: each row must equal what it generates alone.
    is_padded = not is_continuous and any(call.prompts.padding)
    why_not = functools.partial(why_not_equivalent, call.model, "static", is_padded=is_padded)
    obstacle = why_not()
    by_target = obstacle is not None and why_not(prompts_by_target=True) is None
    if obstacle is not None and not by_target:
        return call, obstacle
    prepared = for_static_engine(call, model_kwargs, by_target)
    if isinstance(prepared, str):
        return call, prepared
    call, following = prepared
    return call, why_not_equivalent_with(call, model_kwargs, following)


def _choose_engine(call: Call, model_kwargs: dict[str, Any], is_continuous: bool) -> tuple[Call, str]:
    """The prepared `call`, with the reason for its engine, and that engine: `"static"` or `"stock"`. Raises
    `ValueError` if the static engine was forced and cannot run it."""
    drafter = call.drafter
    check_whole(call.model)
    on_static, obstacle = _fitted_to_static_engine(call, model_kwargs, is_continuous)
    is_refused = is_continuous and obstacle is not None  # no other engine runs several texts together
    if drafter.engine == "static" and obstacle is not None and not is_refused:
        raise ValueError(f'engine="static" was forced, but {obstacle}; use engine="auto" or "stock".')
    if drafter.engine != "auto" and not is_refused:
        engine, reason = drafter.engine, f"forced by engine={drafter.engine!r}"
    else:
        engine, reason = ("static", "the target and the call fit") if obstacle is None else ("stock", obstacle)
        libraries = computed_by_libraries(call.model) if obstacle is None else ()
        if libraries:
            reason += f"; {', '.join(libraries)} of it compute as they do by themselves"
    # A warning if it is the slow engine and nobody asked for that.
    say = logger.warning_once if engine == "stock" and drafter.engine == "auto" else logger.info_once
    say("hf_specdec runs the %s engine: %s", engine, reason)
    if engine == "stock" and drafter.verification != "token":
        what = f"verification={drafter.verification!r}"
        logger.warning_once("hf_specdec: %s has no effect on the stock engine, which judges token by token.", what)
    reason = f"{reason}; {call.reason}" if call.reason else reason
    call = replace(on_static if engine == "static" else call, reason=reason)
    if call.chooses_trees and (obstacle := why_no_tree(call, engine)) is not None:
        call = replace(call, chooses_trees=False, reason=f"{reason}; drafts are chains, since {obstacle}")
    if engine == "stock" and call.is_auto:
        what = 'num_assistant_tokens="auto"'
        logger.warning_once("hf_specdec: %s has no effect on the stock engine, whose rounds have the same K.", what)
        call = replace(call, num_draft_tokens=drafter.num_own_draft_tokens, is_auto=False)
    return call, engine


@looked_at_once()
def generate_with_drafter(
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
    return_logprobs: str | None = None,
    adapter_names: Sequence[str] | None = None,
    tree: int | str | None = None,
    on_begin: Callable[[], object] = bool,
    **model_kwargs: Any,
) -> GenerateOutput | torch.Tensor:
    """`GenerationMixin._assisted_decoding` for a `Drafter`: check the call, choose the engine and run it.

    `on_begin` is called after the checks, before the engine runs. Calls with a `Drafter` have additional keywords:
    `seeds`, `generator` (see `Randomness`), `return_logprobs` (`"processed"`, `"raw"` or `"both"`, see
    `SpeculativeOutput.logprobs`), `adapter_names` (as in PEFT's own `generate()`) and `tree` (see `Drafter.configure`).
    Raises `ValueError` if no engine can run the call, or arguments are wrong.
    """
    is_split = tensor_parallel_group(model) is not None
    late = LateErrors(streamer) if is_split and streamer is not None else None
    with failing_together(model):
        mask = model_kwargs.get("attention_mask")
        mask = None if mask is None else mask.cpu()  # read several times, with a single wait for the device
        prompts, cache = _checked_prompts(model, input_ids, mask, generation_config, stopping_criteria, model_kwargs)
        check_processors(logits_processor)
        call = new_call(
            drafter,
            generation_config,
            Randomness(seeds, generator),
            logits_processor,
            tree=tree,
            model=model,
            prompts=prompts,
            processors=logits_processor,
            criteria=stopping_criteria,
            streamer=late or streamer,
            cache=cache,
            logprobs=_logprobs(return_logprobs, generation_config),
            adapters=row_adapters(model, adapter_names, len(input_ids)),
        )
        if logits_processor:
            check_rows_are_apart(logits_processor, prompts.input_ids, vocabulary_of(model))
        if is_split:
            _check_same(call, model_kwargs)
        attentions = drop_empty_attentions(call, model_kwargs)
        call, engine = _choose_engine(call, model_kwargs, False)
        if engine == "stock" or call.inputs is not None:
            make_call_cache(model, generation_config, model_kwargs)
        _check_engine(call, engine, is_split)
    if engine == "static":
        check_tokens(model, prompts.on_host, mask)
        on_begin()
        with _rows_in_state(call):
            output = decode(call)
    else:
        for name, asked in (("adapter_names", adapter_names), ("return_logprobs", return_logprobs)):
            if asked is not None:
                raise ValueError(
                    f"{name} is {asked!r:.200}, which the static engine has, but {type(model).__name__} runs on the "
                    f"stock engine: {call.reason}. Drop it, or the drafter; scores are returned by output_scores=True."
                )
        check_stock_call(call, model_kwargs)
        check_stock(call, model_kwargs)
        on_begin()
        output = assist(inputs_tensor, model_kwargs, call)
    if is_split:
        check_same_tokens(model, output if isinstance(output, torch.Tensor) else output.sequences)
    if late is not None:
        late.raise_error()
    if attentions is not None:
        output.attentions = (attentions,) * (output.sequences.shape[1] - input_ids.shape[1])
    return output


def _checked_prompts(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    mask: torch.Tensor | None,
    config: GenerationConfig,
    criteria: StoppingCriteriaList,
    model_kwargs: dict[str, Any],
) -> tuple[Prompts, Cache | None]:
    """The prompts of a call of `generate()` whose attention mask is `mask`, on the host, and the caller's cache. The
    limit of `criteria` becomes that of `config`."""
    # A criterion of the caller replaces the limit of the settings; it is evaluated after a token.
    limits = [rule.max_length for rule in criteria if type(rule) is MaxLengthCriteria]
    config.max_length = max(math.ceil(min(limits, default=config.max_length)), input_ids.shape[1] + 1)
    # A cache with recurrent states only does not know how many tokens it holds.
    cache = given_cache(model_kwargs) if configured_layers(model).knows_length else None
    check_prompts(input_ids, mask, cache, model_kwargs)
    check_cache(cache)
    prompts = read_prompts(input_ids.long(), mask, mask_length(config), cache)
    return prompts, cache if is_of_caller(cache) else None


def _logprobs(asked: str | None, config: GenerationConfig) -> tuple[str, ...]:
    """The distributions whose log-probabilities a call returns."""
    kinds = {None: (), "processed": ("processed",), "raw": ("raw",), "both": ("processed", "raw")}
    if not (asked is None or isinstance(asked, str)) or asked not in kinds:
        raise ValueError(f'return_logprobs is {asked!r}; expected "processed", "raw", "both" or None.')
    if asked is not None and not config.return_dict_in_generate:
        raise ValueError(
            f"return_logprobs is {asked!r}, but return_dict_in_generate is not set, so that only token ids are "
            "returned; expected return_dict_in_generate=True, too."
        )
    return kinds[asked]


def new_call(
    drafter: Drafter,
    config: GenerationConfig,
    randomness: Randomness,
    all_processors: Sequence[LogitsProcessor],
    is_continuous: bool = False,
    tree: int | str | None = None,
    **others: Any,
) -> Call:
    """A call of `generate()`, or of continuous batching, with its K and N; `others` are further fields of `Call`. Warns
    about settings of `config` that have no effect.

    If one of `all_processors`, of the call and its requests, reads the text, drafts are chains, since a tree is not one
    text.
    """
    tree = drafter.check_tree(drafter.tree if tree is None else tree)
    readers = [type(one).__name__ for one in readers_of(all_processors)]
    given = getattr(config, "_asked", {})
    for setting, why in UNUSED_SETTINGS.items():
        if given.get(setting) not in (None, _NEUTRAL.get(setting)):
            logger.warning_once("hf_specdec: %s has no effect: %s.", f"{setting}={given[setting]!r}", why)
    # Sampled texts depend on K, which "auto" chooses by time, but a call with seeds should be repeatable.
    is_free = is_continuous and not (config.do_sample and randomness.is_given)
    asked = drafter.num_draft_tokens(given.get("num_assistant_tokens"), is_free)
    limit = drafter.most_draft_tokens
    most = max(one for one in CANDIDATES if limit is None or one <= limit) if asked == AUTO else asked
    # Trees are not verified by rejection sampling; where chains are, the call keeps to chains.
    is_match = not config.do_sample or drafter.verification == MATCH
    why_chains = ""
    if tree and readers:
        why_chains = f"{' and '.join(readers)} may read the text"
    elif tree == AUTO and asked != AUTO:
        why_chains = f'num_assistant_tokens is {asked}, and tree is "{AUTO}"'
    elif tree == AUTO and not is_match:
        why_chains = f'tree is "{AUTO}", and verification "{drafter.verification}"'
    num_nodes = 0 if why_chains or tree == AUTO else tree
    return Call(
        drafter=drafter,
        config=config,
        randomness=randomness,
        num_draft_tokens=most,
        is_auto=asked == AUTO,
        num_nodes=num_nodes,
        chooses_trees=tree == AUTO and not why_chains,
        reason=f"drafts are chains, since {why_chains}" if why_chains else "",
        verification=MATCH if tree and tree != AUTO else drafter.verification,
        **others,
    )


@torch.no_grad()
def generate_continuously(
    call: Call,
    model_kwargs: dict[str, Any],
    prompts: Sequence[torch.Tensor],
    settings: ContinuousBatching,
    on_begin: Callable[[], object] = bool,
) -> list[Request]:
    """Check a call and run it with continuous batching on the static engine. Each of `prompts`, `[length]` int64 on the
    host, becomes a request; there are none if requests arrive. The checks use the call's own few prompts, which
    `model_kwargs` belong to. Raises `ValueError` if the static engine cannot run the call."""
    model = call.model
    with lock_of(model), on_device(model.device), engine_context(), Evaluation(call.drafter), looked_at_once():
        call = on_static_engine(call, model_kwargs, prompts, settings)
        requests: list[Request] = []
        if prompts:  # requests that arrive have seeds already
            seeds = from_first_rank(call.randomness.row_seeds(len(prompts), call.temperature), model)
            requests = call.requests(prompts, seeds)
        for one in requests:
            one.prompt_ids, one.records_timestamps = one.prompt.tolist(), settings.records_timestamps
            one.return_logprobs = next(iter(call.logprobs), None)
        check_continuous(call)
        on_begin()
        decode_continuously(call, requests, settings)
        check_same_tokens(model, torch.tensor([token for one in requests for token in one.tokens], dtype=torch.int64))
    return requests


def _check_engine(call: Call, engine: str, is_split: bool) -> None:
    """Check that `engine` can run the call now, on all ranks of a split target."""
    model, drafter, config = call.model, call.drafter, call.config
    check_configured(call, engine)
    if engine == "static" and drafter.device != model.device:
        raise ValueError(
            f"The drafter is on {drafter.device} and {type(model).__name__} on {model.device}; expected the same "
            f"device. Move it with drafter.to({str(model.device)!r})."
        )
    anew: list[str] = []
    if is_split:
        state = None
        if engine == "stock" and config.do_sample and not call.randomness.is_given:
            # transformers samples with the generator of the target's device; our seeds are those of the first rank.
            on_gpu = model.device.type == "cuda"
            state = torch.cuda.get_rng_state(model.device) if on_gpu else torch.get_rng_state()
        values = {"engine": engine, "random state (set_seed)": state}
        # To gather a split embedding or head takes all ranks.
        anew = check_same_call(model, call.criteria, values, {"shared weights": drafter.outdated(model)})
    drafter.sync_with(model, anew=bool(anew))


def make_call_cache(model: PreTrainedModel, config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Put the call's cache into `model_kwargs`; `generate()` has left it to be made where it is needed."""
    config._has_drafter = False
    if config._cache_arguments is not None:
        args, kwargs = config._cache_arguments
        make_cache(model, config, model_kwargs, *args, **kwargs)


def on_static_engine(
    call: Call,
    model_kwargs: dict[str, Any],
    prompts: Sequence[torch.Tensor],
    settings: ContinuousBatching | None = None,
) -> Call:
    """`call` prepared for the static engine, for a pass over several texts. Raises `ValueError` if that cannot run it.
    `prompts` and `settings` as in `_check_same`; no `settings` if texts are only scored."""
    with failing_together(call.model):
        is_split = tensor_parallel_group(call.model) is not None
        if is_split:
            _check_same(call, model_kwargs, prompts, settings)
        drop_empty_attentions(call, model_kwargs)
        call, engine = _choose_engine(call, model_kwargs, True)
        name, what, instead = type(call.model).__name__, "Continuous batching", "Use generate(assistant_model=...)."
        if settings is None:
            what, instead = "drafter.score()", "Compute log-probabilities from the logits of the model's own forward."
        if engine != "static":
            raise ValueError(
                f"{what} runs on the static engine, but {name} with this drafter runs on the {engine} engine: "
                f"{call.reason}. {instead}"
            )
        if call.inputs is not None:
            raise ValueError(
                f"{what} runs several texts together, but {name} itself must run them in a pass of their own; expected "
                f"a target whose text is causal. {instead}"
            )
        _check_engine(call, engine, is_split)
    return call
