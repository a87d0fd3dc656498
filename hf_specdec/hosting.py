"""Whether the static engine can host a model and a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from .continuation import Prompts, why_not_readable
from .taps import decoder_layers, find_decoder_layers, modules_of

_T = TypeVar("_T")

HOSTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})

# Model inputs that the static engine replaces by its own; any other that is set keeps a call on the stock loop.
REPLACED_INPUTS = frozenset(
    {
        "attention_mask",
        "cache_position",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "past_key_values",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


def why_not_static(
    model: PreTrainedModel, config: GenerationConfig, prompts: Prompts, model_kwargs: dict[str, Any]
) -> str | None:
    """The reason why the static engine cannot run this call; None if it can.

    Args:
        model: the target.
        config: as prepared by `generate()`.
        prompts: of the call.
        model_kwargs: inputs of the model as prepared by `generate()`.
    """
    return why_not_hosted(model) or _why_not_inputs(model) or _why_not_call(model, config, prompts, model_kwargs)


def _why_not_inputs(model: PreTrainedModel) -> str | None:
    """The static engine does not ask `prepare_inputs_for_generation`, as long as it is one of transformers' own."""
    prepare = model.prepare_inputs_for_generation
    by_class = type(model).prepare_inputs_for_generation
    if getattr(prepare, "__func__", prepare) is by_class and by_class.__module__.partition(".")[0] == "transformers":
        return None
    place = f"{by_class.__module__}.{by_class.__qualname__}"
    if getattr(prepare, "__func__", prepare) is not by_class:
        place = f"{getattr(prepare, '__qualname__', type(prepare).__name__)}, set on the model itself"
    return f"the target's inputs are prepared by a function that is not transformers' own ({place})"


# Values that are compared as they are; others by what they print.
_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype})
# Entries of a configuration that say where it comes from, and those that change while a model generates.
_NOT_SETTINGS = frozenset(
    {"_name_or_path", "_commit_hash", "_attn_implementation_internal", "_experts_implementation_internal"}
)


def settings_of(config: PreTrainedConfig) -> tuple[Hashable, ...]:
    """What `config` says of how its model computes, hashable."""
    settings: list[Hashable] = [type(config)]
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            settings.append((name, settings_of(value)))
        elif name not in _NOT_SETTINGS:
            settings.append((name, value if type(value) in _PLAIN else repr(value)))
    return tuple(settings)


def _kept(function: Callable[[PreTrainedModel], _T]) -> Callable[[PreTrainedModel], _T]:
    """Decorator: an answer about a model is kept for its class and configuration, as finding it takes a while."""
    answers: dict[Hashable, _T] = {}

    @functools.wraps(function)
    def kept(model: PreTrainedModel) -> _T:
        key = type(model), settings_of(model.config)
        if key not in answers:
            answers[key] = function(model)
        return answers[key]

    return kept


@_kept
def _cache_layer_kinds(model: PreTrainedModel) -> tuple[type[CacheLayerMixin], ...]:
    """The kinds of layer of transformers' cache for `model`; none where its configuration describes none."""
    try:
        return tuple(map(type, DynamicCache(config=model.config.get_text_config()).layers))
    except AttributeError:
        return ()


def num_cache_layers(model: PreTrainedModel) -> int:
    """How many layers a cache of `model` has; a decoder layer may have several."""
    return len(_cache_layer_kinds(model)) or len(decoder_layers(model))


def empty_attentions(model: PreTrainedModel, config: GenerationConfig) -> tuple | None:
    """What plain `generate()` returns for each step as attention weights, if `model` computes none.

    Kernels other than eager attention never hold them. None if there are weights, or if nobody asks.

    Raises:
        ValueError: there are weights, but not for every token of a block of drafts.
    """
    if not (config.return_dict_in_generate and config.output_attentions):
        return None
    if model.config.get_text_config()._attn_implementation != "eager":
        token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        with torch.no_grad():
            output = model(input_ids=token, use_cache=False, output_attentions=True, return_dict=True)
        attentions = getattr(output, "attentions", None) or ()
        if not any(isinstance(weights, torch.Tensor) for weights in attentions):
            return attentions
    _check_attention_windows(model, config)
    return None


def _check_attention_windows(model: PreTrainedModel, config: GenerationConfig) -> None:
    # Behind a window the keys that a layer reads are another number for a block than for a token, and transformers'
    # assisted generation, which cuts a block's weights into those of its tokens, takes them from the wrong place.
    layers = DynamicCache(config=model.config.get_text_config()).layers
    window = min((layer.sliding_window for layer in layers if getattr(layer, "sliding_window", None)), default=None)
    if window is not None and config.max_length > window:
        raise ValueError(
            f"output_attentions is set, but a text of {config.max_length} tokens outgrows the window of {window} of "
            f"{type(model).__name__}, where the attention weights of single tokens cannot be told from those of a "
            "block of drafts; expected a shorter text. Drop output_attentions or assistant_model."
        )


def has_recurrent_layers(model: PreTrainedModel) -> bool:
    """Whether layers of `model` keep a state that a token cannot be taken out of again."""
    return any(issubclass(kind, LinearAttentionCacheLayerMixin) for kind in _cache_layer_kinds(model))


@_kept
def num_positions(model: PreTrainedModel) -> int | None:
    """How many positions the table of `model` has; None where positions are computed, or none are embedded."""
    stated = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    decoder, tokens = model.get_decoder(), model.get_input_embeddings()
    if not isinstance(stated, int):
        return None
    # Tables have some rows more, for padding.
    tables = (
        module.num_embeddings
        for module in modules_of(decoder)
        if isinstance(module, nn.Embedding) and module is not tokens and 0 <= module.num_embeddings - stated <= 8
    )
    return stated if next(tables, None) is not None else None


def why_not_hosted(model: PreTrainedModel, role: str = "the target") -> str | None:
    """The reason why `model`, called `role` in it, cannot run on a `RaggedCache`; None if it can."""
    text, layers = model.config.get_text_config(), find_decoder_layers(model)
    if layers is None:
        return f"{role} ({type(model).__name__}) does not keep its layers in `get_decoder().layers`"
    devices = set(getattr(model, "hf_device_map", {}).values())
    if len(devices) > 1:
        return f"{role} is spread over {len(devices)} devices by hooks"
    if any("_hf_hook" in vars(module) for module in modules_of(layers)):
        return f"{role}'s layers run under accelerate hooks"
    if has_recurrent_layers(model):
        return f"{role} has linear-attention layers, whose state cannot be indexed by position"
    others = set(getattr(text, "layer_types", None) or ()) - HOSTED_LAYER_TYPES
    if others:
        return f"{role} has layers of type {', '.join(sorted(others))}"
    if not getattr(model, "_supports_attention_backend", False):
        return f"{type(model).__name__} does not use transformers' attention interface"
    if getattr(text, "num_kv_shared_layers", 0):
        return f"layers of {role} share keys and values"
    return _why_not_positions(text, role)


def _why_not_positions(text: Any, role: str) -> str | None:
    rope = getattr(text, "rope_parameters", None) or {}
    by_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in by_layer_type or [rope]:
        if parameters.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            return f"{role}'s RoPE ({parameters['rope_type']}) changes with the length of the text"
        if parameters.get("mrope_section"):
            return f"{role}'s tokens have several positions each (M-RoPE)"
    return None


def _why_not_call(
    model: PreTrainedModel, config: GenerationConfig, prompts: Prompts, model_kwargs: dict[str, Any]
) -> str | None:
    if config.return_dict_in_generate and config.output_attentions:
        return "attention weights were asked for"
    if prompts.cached:
        obstacle = why_not_readable(model_kwargs["past_key_values"], num_cache_layers(model))
        if obstacle is not None:
            return obstacle
    if config.cache_implementation not in (None, "dynamic", "dynamic_full", "static", "hybrid", "sliding_window"):
        return f"the call asks for a {config.cache_implementation} cache"
    given = sorted(name for name, value in model_kwargs.items() if name not in REPLACED_INPUTS and _is_input(value))
    if given:
        return f"the call has model inputs besides tokens: {', '.join(given)}"
    positions = model_kwargs.get("position_ids")
    if positions is not None and not _are_ordinary(positions, prompts):
        return "the call has position_ids of its own"
    return None


def _is_input(value: Any) -> bool:
    # transformers gives a model that also sees an empty dictionary of images for a text.
    return isinstance(value, torch.Tensor) or (value is not None and value is not False and value != {})


def _are_ordinary(position_ids: torch.Tensor, prompts: Prompts) -> bool:
    if position_ids.dim() != 2 or position_ids.shape[1] != prompts.width:
        return False
    padding = torch.tensor(prompts.padding, device=position_ids.device)[:, None]
    expected = torch.arange(prompts.width, device=position_ids.device) - padding
    return torch.equal(torch.where(expected < 0, expected, position_ids), expected)
