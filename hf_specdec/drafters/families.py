"""Which family of drafter a published checkpoint is: found, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from ..config import DrafterConfig
from .checkpoints import Selection
from .mtp_layouts import FAMILIES as MTP_FAMILIES
from .mtp_layouts import find_family, holds_modules, is_speculators_mtp, needed_tensors, telling_names

EAGLE3, P_EAGLE, MTP, DRAFT_MODEL = "EAGLE-3", "P-EAGLE", "MTP", "draft model"
_NOT_YET = "this version does not run that family yet"


class Refusal(NamedTuple):
    """A known family that this version cannot load.

    `matches` is called with config.json, its architectures in lower case, and the tensors' names.
    """

    family: str
    advice: str
    matches: Callable[[Mapping[str, Any], str, Collection[str]], bool]


def architectures(config: Mapping[str, Any]) -> str:
    """The architectures a config names, in lower case, separated by blanks."""
    return " ".join(config.get("architectures") or []).lower()


def eagle_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The nested `eagle_config` of ModelOpt and SpecForge; empty if there is none."""
    nested = config.get("eagle_config")
    return nested if isinstance(nested, Mapping) else {}


def is_eagle3(config: Mapping[str, Any], tensors: Collection[str]) -> bool:
    """Whether anything but the absence of other marks says EAGLE-3."""
    if "speculators_model_type" in config:
        return config["speculators_model_type"] == "eagle3"
    return (
        "eagle3" in architectures(config)
        or bool(eagle_settings(config))
        or "draft_vocab_size" in config
        or any("midlayer." in name or name.endswith("layers.0.hidden_norm.weight") for name in tensors)
    )


def _has(*keys: str) -> Callable[[Mapping[str, Any], str, Collection[str]], bool]:
    return lambda config, names, tensors: any(config.get(key) is not None for key in keys)


def says_peagle(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    """Whether a checkpoint can be nothing but P-EAGLE: by its name, or by the hidden state of its masks."""
    named = config.get("speculators_model_type")
    if named is not None:
        return named == "peagle"
    return "peagle" in names or any(name.rpartition(".")[2] == "mask_hidden" for name in tensors)


def _is_pard2(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    return (
        any(key.startswith("pard2_") for key in config)
        or config.get("spd_type") == "pard2"
        or any(name.endswith("target_proj.weight") for name in tensors)
    )


def _is_medusa(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    return (
        config.get("medusa_num_heads") is not None
        or config.get("model_type") == "medusa"
        or (eagle_settings(config).get("parallel_draft_step") or 1) > 1
        or any("parallel_draft_heads." in name or "medusa_" in name for name in tensors)
    )


def _is_dspark(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    nested = config.get("dflash_config") or {}
    return (
        config.get("speculators_model_type") == "dspark"
        or "dspark" in names
        or (
            not says_peagle(config, names, tensors)
            and any(key in source for source in (config, nested) for key in ("dspark_noise_token_id", "markov_rank"))
        )
    )


def _is_dflash(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    return (
        config.get("speculators_model_type") in ("dflash", "dflash2")
        or "dflash" in names
        or (
            not says_peagle(config, names, tensors)
            and any(config.get(key) is not None for key in ("dflash_config", "block_size"))
        )
    )


def _is_peagle(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    if says_peagle(config, names, tensors):
        return True
    if "speculators_model_type" in config or not _reads_taps(config, tensors):
        return False
    if config.get("parallel_drafting") is not None:
        return bool(config["parallel_drafting"])
    return any(config.get(key) is not None for key in ("ptd_token_id", "mask_token_id", "pard_token"))


def _reads_taps(config: Mapping[str, Any], tensors: Collection[str]) -> bool:
    return is_eagle3(config, tensors) or "transformer_layer_config" in config


def _is_mla(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    is_drafter = is_eagle3(config, tensors) or _is_peagle(config, names, tensors)
    return "eagle3deepseek" in names or (is_drafter and any("kv_a_proj_with_mqa" in name for name in tensors))


def _is_mtp(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    is_eagle = is_eagle3(config, tensors) or _is_peagle(config, names, tensors)
    return is_speculators_mtp(config) or (not is_eagle and holds_modules(config, tensors))


def _is_other_mtp(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    return _is_mtp(config, names, tensors) and find_family(config) is None


def _is_eagle1(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    if _is_peagle(config, names, tensors):
        return False
    return (
        config.get("speculators_model_type") == "eagle"
        or config.get("model_type") == "eagle"
        or ("eagle" in names and "eagle3" not in names)
        or (not is_eagle3(config, tensors) and any(name in ("fc.weight", "model.fc.weight") for name in tensors))
    )


def _is_language_model(config: Mapping[str, Any], names: str) -> bool:
    """Whether config.json describes a model that writes text; `read_draft_model` tells which of those can draft."""
    return any(head in names for head in ("forcausallm", "lmhead", "forconditionalgeneration")) or (
        "AutoModelForCausalLM" in (config.get("auto_map") or {})
    )


# The first that matches names the checkpoint.
REFUSALS = (
    Refusal("PARD-2", "it is not supported; use an EAGLE-3 drafter for the same target", _is_pard2),
    Refusal("Medusa heads", "they are not supported; use an EAGLE-3 drafter for the same target", _is_medusa),
    Refusal("DSpark", _NOT_YET, _is_dspark),
    Refusal("DFlash", _NOT_YET, _is_dflash),
    Refusal("an MLP speculator", "it is not supported; use an EAGLE-3 drafter", _has("n_predict")),
    Refusal("EAGLE-3 or P-EAGLE with multi-head latent attention in its draft layers", _NOT_YET, _is_mla),
    Refusal(
        "MTP modules (multi-token prediction) of a model type that is not supported",
        f"supported are {', '.join(sorted(MTP_FAMILIES))} and speculators' form for Qwen3, Qwen3-Next and Qwen3.5",
        _is_other_mtp,
    ),
    Refusal("EAGLE-1 or EAGLE-2", "they are not supported; use an EAGLE-3 drafter for the same target", _is_eagle1),
)


def check_family(name: str, config: Mapping[str, Any], tensors: Collection[str]) -> str:
    """Return `EAGLE3`, `P_EAGLE`, `MTP` or `DRAFT_MODEL`.

    Raises:
        ValueError: another family, named, or none; then with what was looked for.
    """
    names, model_type = architectures(config), config.get("model_type") or ""
    if model_type.startswith(DrafterConfig.model_type):
        raise ValueError(
            f"{name} is of the family {model_type!r}, which is not registered: it was saved by a newer hf_specdec, or "
            "its class was not passed to register_drafter."
        )
    for refusal in REFUSALS:
        if refusal.matches(config, names, tensors):
            raise ValueError(f"{name} is a drafter of another family, {refusal.family}: {refusal.advice}.")
    if _is_peagle(config, names, tensors):
        return P_EAGLE
    if is_eagle3(config, tensors):
        return EAGLE3
    if _is_mtp(config, names, tensors):
        return MTP
    if _is_language_model(config, names):
        return DRAFT_MODEL
    raise ValueError(
        f"{name} is a checkpoint of no known drafter dialect. Looked in config.json for a model_type of hf_specdec, "
        "speculators_model_type (speculators), eagle_config (NVIDIA ModelOpt, SpecForge), an Eagle3 architecture "
        "(SpecForge), draft_vocab_size (SafeAILab), ptd_token_id (Amazon), num_nextn_predict_layers and its like "
        "(MTP), a ForCausalLM architecture (draft models, PARD); "
        f"found model_type {config.get('model_type')!r}, architectures {config.get('architectures')!r} and the keys "
        f"{sorted(config)}."
    )


def drafter_tensors(overrides: Mapping[str, Any]) -> Selection:
    """Which tensors of a checkpoint a drafter needs: those of the MTP modules if it holds such, otherwise all.

    Args:
        overrides: by their keywords in `AutoDrafter.from_pretrained`; they may ask for tensors that would be borrowed.
    """

    def select(config: Mapping[str, Any], names: Collection[str]) -> Collection[str]:
        model_type = config.get("model_type") or ""
        if model_type.startswith(DrafterConfig.model_type) or not _is_mtp(config, architectures(config), names):
            return names
        if find_family(config) is None:
            return telling_names(names)
        return [tensor.published for tensor in needed_tensors(config, names, overrides)]

    return select
