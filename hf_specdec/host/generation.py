"""`GenerationMixin`, continuous batching, and what they pass to a decoding loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList

from .parts import attribute, method, named_in, part, uses

_UTILS = "transformers.generation.utils"
_MIXIN = f"{_UTILS}:GenerationMixin"
_CONTINUOUS = "transformers.generation.continuous_batching"
_MANAGER = f"{_CONTINUOUS}.continuous_api"

GenerationMixin = part(_UTILS, "GenerationMixin", why="class of the methods that are replaced")
ContinuousMixin = part(_MANAGER, "ContinuousMixin", why="class of the methods that are replaced")
ContinuousBatchingManager = part(_MANAGER, "ContinuousBatchingManager", why="refuses drafters in requests")
BackgroundThreadStatus = part(_MANAGER, "BackgroundThreadStatus", why="state of a manager's thread")
GenerationOutput = part(f"{_CONTINUOUS}.requests", "GenerationOutput", why="results of requests")
RequestStatus = part(f"{_CONTINUOUS}.requests", "RequestStatus", why="results of requests")
WorkloadHints = part(f"{_CONTINUOUS}.utils", "WorkloadHints", why="argument of managers")
GenerateOutput = part(_UTILS, "GenerateOutput", why="type of what calls return")
GenerationMode = part("transformers.generation.configuration_utils", "GenerationMode", why="what a call asks for")
CandidateGenerator = part("transformers.generation.candidate_generator", "CandidateGenerator", why="stock engine")
BaseStreamer = part("transformers.generation.streamers", "BaseStreamer", why="base class of streamers")
ModelOutput = part("transformers.utils.generic", "ModelOutput", why="output of a forward pass")


# The methods that are replaced, in their original form, by owner and name.
REPLACED_METHODS: dict[tuple[Any, str], Any] = {
    (owner, name): part(where, name, why="replaced, so that calls accept a drafter")
    for owner, where, names in (
        (
            GenerationMixin,
            _MIXIN,
            (
                "_assisted_decoding",
                "_extract_generation_mode_kwargs",
                "_get_candidate_generator",
                "_prepare_cache_for_generation",
                "_prepare_generation_config",
                "_sample",
                "_validate_generation_mode",
            ),
        ),
        (
            ContinuousMixin,
            f"{_MANAGER}:ContinuousMixin",
            ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager"),
        ),
        (ContinuousBatchingManager, f"{_MANAGER}:ContinuousBatchingManager", ("add_request", "add_requests")),
    )
    for name in names
}
# The loop of transformers' own assisted generation.
assisted_decoding = REPLACED_METHODS[GenerationMixin, "_assisted_decoding"]


# Takes a configuration or its class: the values of settings that nobody sets.
default_settings = method(
    "transformers:GenerationConfig", "_get_default_generation_params", why="tells what a caller has asked for"
)
# Takes a model: whether `generate()` would make a `DynamicCache`.
makes_dynamic_cache = method(_MIXIN, "_supports_default_dynamic_cache", why="tells whether a call would make a cache")


def make_cache(model: PreTrainedModel, config: GenerationConfig, inputs: dict[str, Any], *args: Any, **kw: Any) -> None:
    """Add the cache that `generate()` makes for a call to its `inputs`."""
    model._prepare_cache_for_generation(config, inputs, *args, **kw)


def prepared_config(
    model: PreTrainedModel, config: GenerationConfig | None, **settings: Any
) -> tuple[GenerationConfig, dict[str, Any]]:
    """The configuration of a call of `generate()`, and those `settings` that it does not have."""
    return model._prepare_generation_config(config, **settings)


@uses(_MIXIN, "_prepare_special_tokens", why="tokens that end texts, as generate() has them")
@uses(_MIXIN, "_get_stopping_criteria", why="stopping criteria of many prompts, as generate() has them")
def stopping_criteria(
    model: PreTrainedModel, config: GenerationConfig, criteria: StoppingCriteriaList | None, tokenizer: Any
) -> StoppingCriteriaList:
    """The stopping criteria of `generate()`; `config`, with its defaults filled in, gets tensors of special tokens."""
    model._prepare_special_tokens(config, True, device=model.device, batch_size=1)
    return model._get_stopping_criteria(config, criteria or StoppingCriteriaList(), tokenizer)


# Takes a model and keywords, one a configuration with all defaults filled in; `ENDS` is its entry for the tokens that
# end a text, a tensor or None.
make_logits_processors = method(
    _MIXIN, "_get_logits_processor", why="logits processors of one request, as generate() has them"
)
ENDS = named_in(_MIXIN, "_eos_token_tensor", why="tokens that end its text, which some of them read")
# Takes a model: whether its `forward` has `logits_to_keep`.
keeps_logits = method(_MIXIN, "_supports_logits_to_keep", why="computes the logits that are needed only")
# Takes a model, prompts `[B, P]`, a configuration and prepared inputs; returns the model's output.
prefill = method(_MIXIN, "_prefill", why="runs prompts as plain generate() does")


@uses(_MIXIN, "_update_model_kwargs_for_generation", why="inputs after a pass, as plain generate() has them")
def inputs_after(
    model: PreTrainedModel, outputs: ModelOutput, inputs: Mapping[str, Any], num_new_tokens: int
) -> dict[str, Any]:
    """The inputs of `model` after a pass with `inputs` gave `outputs`, for `num_new_tokens` more tokens."""
    return model._update_model_kwargs_for_generation(outputs, dict(inputs), num_new_tokens=num_new_tokens)


# Takes a configuration: the tensor of the token that finished rows continue with, as prepared by `generate()`.
pad_token = attribute(_MIXIN, "_pad_token_tensor", why="token of finished rows")
# Takes a configuration: columns of the attention mask if `generate()` has dropped it, else None.
mask_length = attribute(
    _MIXIN,
    "_mask_length",
    why="columns of a mask that was dropped since it is all ones",
    since="after 5.17",
    is_needed=False,
)
# Take a `PrefixConstrainedLogitsProcessor`: the number of rows of a prompt; and its function of a prompt's number and a
# text `[n]`.
rows_of_prompt = attribute(
    "transformers:PrefixConstrainedLogitsProcessor", "_num_beams", why="tells of which prompt a row is"
)
allowed_tokens_of = attribute(
    "transformers:PrefixConstrainedLogitsProcessor", "_prefix_allowed_tokens_fn", why="runs for rows that live only"
)
