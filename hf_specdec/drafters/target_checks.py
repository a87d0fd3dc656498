"""Checks of a target for `Drafter.bind`."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers import MODEL_FOR_MASKED_LM_MAPPING, GenerationMixin, PreTrainedConfig, PreTrainedModel

# Names that end in "generate" but are no `generate()`.
_NO_GENERATION = {"return_dict_in_generate", "can_generate"}


def check_target(target: Any) -> None:
    """Raise `TypeError` unless `target` is a model of transformers, and `ValueError` if it has an encoder."""
    name = type(target).__name__
    if not isinstance(target, nn.Module) or not hasattr(target, "config"):
        raise TypeError(
            f"target is a {name}; expected the model that generates, as AutoModelForCausalLM.from_pretrained() loads "
            "it: not its name or config, nor a module around it (DataParallel)."
        )
    check_decoder(target.config, name)


def check_decoder(config: PreTrainedConfig, name: str) -> None:
    """Raise `ValueError` if the target `name` with this configuration is an encoder-decoder, or an encoder."""
    is_causal = getattr(config, "is_decoder", getattr(config, "causal", False))  # of a class that also fills masks
    if config.is_encoder_decoder or (type(config) in MODEL_FOR_MASKED_LM_MAPPING and not is_causal):
        kind = "encoder-decoder" if config.is_encoder_decoder else "encoder"
        raise ValueError(f"{name} is an {kind}; hf_specdec drafts for decoder-only models.")


def generating_model(target: PreTrainedModel) -> PreTrainedModel:
    """The model whose `GenerationMixin.generate` runs when `target.generate()` is called: mostly `target` itself.

    Some classes that read images (BLIP, BLIP-2, InstructBLIP, Kosmos-2) have a `generate()` that calls the `generate()`
    of the language model inside. Others, such as diffusion models, have a `generate()` that calls no other and may
    silently ignore `assistant_model`. A replacement that holds the previous function in a closure may call it.

    Raises:
        TypeError, ValueError: see `check_target`.
        ValueError: the class has a `generate()` of its own that calls no other.
    """
    check_target(target)
    function = inspect.unwrap(getattr(type(target), "generate", GenerationMixin.generate))
    code = getattr(function, "__code__", None)
    if code is None or function is inspect.unwrap(GenerationMixin.generate):
        return target
    codes = [code, *(one for one in code.co_consts if inspect.iscode(one))]
    # `generate`, or a global such as `original_generate`
    names = {name for one in codes for name in one.co_names} - _NO_GENERATION
    calls_another = any(name.endswith("generate") for name in names)
    if not calls_another and set(code.co_freevars) <= {"__class__"}:
        raise ValueError(
            f"{function.__qualname__} of {type(target).__name__} is a generate() of its own that does not use "
            "assistant_model; expected a target that generates by transformers' GenerationMixin.generate(). Generate "
            "without a drafter."
        )
    if "super" in names:
        return target
    parts = (part for name, part in target.named_children() if name in names and isinstance(part, PreTrainedModel))
    return next((part for part in parts if isinstance(part, GenerationMixin)), target)
