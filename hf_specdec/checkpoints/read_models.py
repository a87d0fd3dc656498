"""Readers of language models that draft: draft models, PARD, PARD-2, and assistants of Gemma 4."""

from __future__ import annotations

import json
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

from ..config import CacheReaderConfig, DraftModelConfig, Pard2Config
from .checkpoint import PROJECTION_FILE, Checkpoint
from .interpretation import Decisions
from .limits import check_mask_token
from .mtp_layouts import holds_modules, module_names

# Trained depth of the published PARD drafters, from `para_num` of AMD-AIG-AIMA/PARD's example configurations; their
# config.json does not state it.
PARD_DEPTH = 8

# Draft tokens a round in the published figures of PARD-2 (AMD-AGI/PARD, `draft_k` of pard2_*_eval.yaml), one fewer than
# in training. The trained number, `para_num` of the trainer's settings, is not in published config.json files.
PARD2_DEPTH = 15
# The default of AMD's code if config.json has no scale.
_DEFAULT_SCALE = 0.02
_IDS = "pard2_target_layers"


def read_draft_model(checkpoint: Checkpoint, target: PreTrainedConfig | None, decisions: Decisions) -> DraftModelConfig:
    """Read the config.json of a causal language model, which is PARD's if it names a mask token. Arguments and errors
    are those of `LayersReader.read`. `bind` checks whether the vocabularies fit."""
    stated = checkpoint.config
    names = checkpoint.tensors or ()
    if holds_modules(stated, names):
        rule = "the target is another model than the one that the MTP modules in its weights are for; they are left out"
        if not module_names(stated, names):
            rule = "its config.json states MTP modules, but its weights hold none, and the target is another model"
        decisions.decide("family", DraftModelConfig.family, rule)
    model = read_language_model(checkpoint)
    is_pard = stated.get("spd_type") == "pard" or stated.get("pard_token") is not None
    parallel, token = _read_drafting(checkpoint, is_pard, decisions)
    depth = stated.get("para_num", PARD_DEPTH) if parallel else DraftModelConfig.num_assistant_tokens
    return DraftModelConfig(
        **_model_fields(checkpoint, model, target, token),
        parallel_drafting=parallel,
        num_assistant_tokens=depth,
        dialect="PARD" if is_pard else "transformers",
    )


def _model_fields(
    checkpoint: Checkpoint, model: PreTrainedConfig, target: PreTrainedConfig | None, token: Any
) -> dict[str, Any]:
    size = model.get_text_config().vocab_size
    return {
        "model": model.to_dict(),
        "vocab_size": size if target is None else target.vocab_size,
        "draft_vocab_size": size if target is None else min(size, target.vocab_size),
        "mask_token_id": None if token is None else check_mask_token(token, size, checkpoint.name),
    }


def _read_drafting(checkpoint: Checkpoint, is_pard: bool, decisions: Decisions) -> tuple[bool, Any]:
    """Whether one pass drafts all tokens, and the mask token or None."""
    stated, token = checkpoint.config.get("parallel_drafting"), checkpoint.config.get("pard_token")
    rule = "config.json has PARD's keys (pard_token, spd_type)" if is_pard else "config.json has no pard_token"
    rule = rule if stated is None else "config.json"
    parallel = decisions.decide("parallel_drafting", is_pard if stated is None else bool(stated), rule)
    # PARD's trainer writes -1 for no token.
    token = None if token == -1 else token
    if token is not None or "mask_token_id" in decisions.given:
        token = decisions.decide("mask_token_id", token, "pard_token of config.json")
    if parallel and token is None:
        raise ValueError(
            f"{checkpoint.name} is to draft in parallel, but its config.json names no mask token: pard_token is "
            f"{checkpoint.config.get('pard_token')!r}. Pass `mask_token_id=` with the id that it was trained with, or "
            "`parallel_drafting=False`."
        )
    if not parallel and "mask_token_id" in decisions.given:
        raise ValueError(
            f"{checkpoint.name} was given mask_token_id {token}, but it drafts token by token, where no mask token "
            "is used. Pass `parallel_drafting=True` too, if it was trained for that."
        )
    return parallel, token


def read_pard2(checkpoint: Checkpoint, target: PreTrainedConfig | None, decisions: Decisions) -> Pard2Config:
    """Read the config.json of a PARD-2 drafter in AMD's form; arguments and errors are those of `LayersReader.read`."""
    name, stated = checkpoint.name, checkpoint.config
    model = read_language_model(checkpoint)
    token = decisions.decide("mask_token_id", stated.get("pard_token"), "pard_token of config.json")
    ids = stated.get(_IDS)
    if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
        raise ValueError(
            f"{name} is a PARD-2 drafter with {_IDS} {ids!r} in its config.json; expected the indices of the target's "
            "hidden states that it was trained with, such as [-1, -8, -16, -24]. Add them to config.json."
        )
    scale = next((stated[key] for key in ("pard2_scale", "pard_scale", "feat_scale") if key in stated), None)
    if scale is None:
        rule = "not in config.json; AMD's default"
        scale = decisions.decide("hidden_state_scale", _DEFAULT_SCALE, rule, doubtful=True)
    width, has_bias = _read_projection(checkpoint, len(ids), target)
    fields = _model_fields(checkpoint, model, target, token)
    fields["mask_token_id"] = check_mask_token(token, model.get_text_config().vocab_size, name)
    return Pard2Config(
        **fields,
        num_assistant_tokens=stated.get("para_num", PARD2_DEPTH),
        hidden_state_ids=ids,
        target_hidden_size=width,
        hidden_state_scale=float(scale),
        projection_bias=has_bias,
        dialect="AMD",
    )


def _read_projection(checkpoint: Checkpoint, count: int, target: PreTrainedConfig | None) -> tuple[int, bool]:
    """The width of each of the `count` hidden states that the projection reads, and whether it has a bias."""
    config, tensors = checkpoint.config, checkpoint.tensors
    stated_bias = config.get("pard2_proj_bias", config.get("proj_bias"))
    stated = config.get("pard2_target_dim", config.get("pard_target_dim"))
    if tensors is None:
        return (stated // count if stated else target.hidden_size), bool(stated_bias)
    weight = tensors.get("target_proj.weight")
    if weight is None or len(weight.shape) != 2:
        raise ValueError(
            f"{checkpoint.name} is a PARD-2 drafter by its config.json, but has no matrix target_proj.weight; expected "
            f"it in {PROJECTION_FILE}."
        )
    total, has_bias = weight.shape[1], "target_proj.bias" in tensors
    if stated not in (None, total) or total % count:
        raise ValueError(
            f"{checkpoint.name} contradicts itself: target_proj.weight reads {total} values, but by config.json there "
            f"are {stated or total}, of {count} hidden states ({_IDS})."
        )
    if stated_bias not in (None, has_bias):
        raise ValueError(
            f"{checkpoint.name} contradicts itself: pard2_proj_bias is {stated_bias!r} by config.json, but its weights "
            f"have {'a' if has_bias else 'no'} tensor target_proj.bias."
        )
    return total // count, has_bias


def read_cache_reader(
    checkpoint: Checkpoint, target: PreTrainedConfig | None, decisions: Decisions
) -> CacheReaderConfig:
    """Read the config.json of a Gemma 4 assistant, and K from its generation_config.json. Arguments and errors are
    those of `LayersReader.read`."""
    model, file = read_language_model(checkpoint), checkpoint.folder / "generation_config.json"
    settings = json.loads(file.read_text()) if file.is_file() else {}
    stated = settings.get("num_assistant_tokens") if isinstance(settings, Mapping) else None
    return CacheReaderConfig(
        model=model.to_dict(),
        vocab_size=model.get_text_config().vocab_size,
        num_assistant_tokens=CacheReaderConfig.num_assistant_tokens if stated is None else stated,
        dialect="transformers",
    )


def read_language_model(checkpoint: Checkpoint) -> PreTrainedConfig:
    """transformers' configuration of the language model in `checkpoint`. Raises `ValueError` unless it is a
    decoder-only model of transformers."""
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
    """transformers' auto class for a model of `config`: for causal or image-text-to-text models; None if neither."""
    mappings = (
        (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
        (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText),
    )
    return next((auto_class for mapping, auto_class in mappings if type(config) in mapping), None)
