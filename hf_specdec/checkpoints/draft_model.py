"""Checkpoints of causal language models, PARD's included, read into the normal form `DraftModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)

from ..config import DraftModelConfig
from .checkpoint import Checkpoint
from .decisions import Decisions, NormalizedConfig
from .limits import check_mask_token
from .mtp_layouts import holds_modules, module_names
from .overrides import DRAFT_MODEL_OVERRIDES

# Trained depth of the published PARD drafters (AMD-AIG-AIMA/PARD, `para_num` of its example configurations), which
# their config.json does not state.
PARD_DEPTH = 8


def read_draft_model(
    checkpoint: Checkpoint, target: PreTrainedConfig | None, overrides: Mapping[str, Any]
) -> NormalizedConfig:
    """Read the config.json of a causal language model, which is PARD's if it names a mask token.

    Args:
        checkpoint: as published.
        target: the target's text configuration, if there is a target. `bind` checks whether the vocabularies fit.
        overrides: see `Overrides`.

    Raises:
        ValueError: expected a model that can draft, a configuration that agrees with itself, and only overrides in
            `DRAFT_MODEL_OVERRIDES`.
    """
    decisions = Decisions(overrides)
    unknown = overrides.keys() - DRAFT_MODEL_OVERRIDES
    if unknown:
        raise ValueError(
            f"{checkpoint.name} is a draft model, which reads tokens only: it has no {', '.join(sorted(unknown))}."
        )
    if holds_modules(checkpoint.config, checkpoint.tensors):
        decisions.decide("family", DraftModelConfig.family, _why_not_mtp(checkpoint))
    model = read_language_model(checkpoint)
    size = model.get_text_config().vocab_size
    is_pard = checkpoint.config.get("spd_type") == "pard" or checkpoint.config.get("pard_token") is not None
    parallel, token = _read_drafting(checkpoint, is_pard, decisions)
    config = DraftModelConfig(
        model=model.to_dict(),
        vocab_size=size if target is None else target.vocab_size,
        draft_vocab_size=size if target is None else min(size, target.vocab_size),
        parallel_drafting=parallel,
        mask_token_id=None if token is None else check_mask_token(token, size, checkpoint.name),
        num_assistant_tokens=(
            checkpoint.config.get("para_num", PARD_DEPTH) if parallel else DraftModelConfig.num_assistant_tokens
        ),
        dialect="PARD" if is_pard else "transformers",
    )
    return NormalizedConfig(config, tuple(decisions.made))


def _read_drafting(checkpoint: Checkpoint, is_pard: bool, decisions: Decisions) -> tuple[bool, Any]:
    """Whether all tokens are drafted in one pass, and the mask token, None if there is none."""
    stated, token = checkpoint.config.get("parallel_drafting"), checkpoint.config.get("pard_token")
    rule = "config.json has PARD's keys (pard_token, spd_type)" if is_pard else "config.json has no pard_token"
    rule = rule if stated is None else "config.json"
    parallel = decisions.decide("parallel_drafting", is_pard if stated is None else bool(stated), rule)
    # PARD's trainer writes -1 if it was given no token.
    token = None if token == -1 else token
    if token is not None or "mask_token_id" in decisions.overrides:
        token = decisions.decide("mask_token_id", token, "pard_token of config.json")
    if parallel and token is None:
        raise ValueError(
            f"{checkpoint.name} is to draft in parallel, but its config.json names no mask token: pard_token is "
            f"{checkpoint.config.get('pard_token')!r}. Pass `mask_token_id=` with the id that it was trained with, or "
            "`parallel_drafting=False`."
        )
    if not parallel and "mask_token_id" in decisions.overrides:
        raise ValueError(
            f"{checkpoint.name} was given mask_token_id {token}, but it drafts token by token, where no mask token "
            "is used. Pass `parallel_drafting=True` too, if it was trained for that."
        )
    return parallel, token


def _why_not_mtp(checkpoint: Checkpoint) -> str:
    if module_names(checkpoint.config, checkpoint.tensors):
        return "the target is another model than the one that the MTP modules in its weights are for; they are left out"
    return "its config.json states MTP modules, but its weights hold none, and the target is another model"


def read_language_model(checkpoint: Checkpoint) -> PreTrainedConfig:
    """transformers' configuration of the causal language model in `checkpoint`.

    Raises:
        ValueError: expected a decoder-only language model that is part of transformers.
    """
    model_type = checkpoint.config.get("model_type")
    found = f"{checkpoint.name} is a checkpoint of model_type {model_type!r}"
    if model_type not in CONFIG_MAPPING:
        if checkpoint.config.get("auto_map"):
            raise ValueError(
                f"{found}, which runs on code of its own ({checkpoint.config['auto_map']}). Such code is not run here; "
                "expected a model that is part of transformers."
            )
        raise ValueError(f"{found}, which transformers {transformers.__version__} does not know; a newer one may.")
    config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
    if config.is_encoder_decoder:
        raise ValueError(f"{found}, an encoder-decoder; expected a decoder-only model, which continues a text.")
    if auto_class(config) is None:
        raise ValueError(f"{found}, of which transformers has no causal language model; a draft model must be one.")
    return config


def auto_class(config: PreTrainedConfig) -> type | None:
    """transformers' auto class for the model of `config`: a causal or an image-text-to-text one; None if neither."""
    mappings = (
        (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
        (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText),
    )
    return next((auto_class for mapping, auto_class in mappings if type(config) in mapping), None)
