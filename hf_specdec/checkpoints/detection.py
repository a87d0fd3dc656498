"""Detects the drafter family of a published checkpoint, or refuses it and names the family."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from transformers import CONFIG_MAPPING, PreTrainedConfig

from ..config import DrafterConfig
from .checkpoint import Selection, has_projection
from .mtp_layouts import FAMILIES as MTP_FAMILIES
from .mtp_layouts import (
    find_family,
    has_shape_of,
    holds_modules,
    is_apart,
    is_speculators_mtp,
    module_names,
    mtp_names,
    needed_tensors,
)
from .overrides import MTP_ONLY, without_none
from .tensors import rename

EAGLE3, P_EAGLE, DFLASH, DFLASH2, DOMINO = "EAGLE-3", "P-EAGLE", "DFlash", "DFlash-2", "Domino"
DSPARK, MTP, DRAFT_MODEL, PARD2 = "DSpark", "MTP", "draft model", "PARD-2"
CACHE_READER = "Gemma 4 assistant"
_NOT_YET = "this version does not support that family yet"

# Values of `projector_type` of Domino: now, and in its authors' first files.
_DOMINO_PROJECTORS = ("domino", "causal_v5")

# Values of `speculators_model_type` that are known; the first six are supported.
_SPECULATORS_TYPES = (
    "eagle3",
    "peagle",
    "mtp",
    "dflash",
    "dflash2",
    "dspark",
    "domino",
    "dsv4_dspark",
    "eagle",
    "lilicorr",
    "xpress",
)


class Refusal(NamedTuple):
    """A known family that this version cannot load.

    Attributes:
        family: its name.
        advice: why not, or what to use instead.
        matches: whether a checkpoint is of the family, given config.json, its architectures in lower case, and the
            tensors' names.
    """

    family: str
    advice: str
    matches: Callable[[Mapping[str, Any], str, Collection[str]], bool]


def architectures(config: Mapping[str, Any]) -> str:
    """The `architectures` of config.json, in lower case, separated by spaces."""
    return " ".join(config.get("architectures") or []).lower()


def eagle_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The nested `eagle_config` of ModelOpt and SpecForge; empty if there is none."""
    nested = config.get("eagle_config")
    return nested if isinstance(nested, Mapping) else {}


def speculators_type(config: Mapping[str, Any]) -> str | None:
    """`speculators_model_type`, the family by vllm-project/speculators' name; None for a checkpoint of others."""
    return config.get("speculators_model_type")


def is_eagle3(config: Mapping[str, Any], tensors: Collection[str]) -> bool:
    """Whether config.json or a tensor's name shows that the checkpoint is an EAGLE-3 drafter."""
    if speculators_type(config) is not None:
        return speculators_type(config) == "eagle3"
    return (
        "eagle3" in architectures(config)
        or bool(eagle_settings(config))
        or "draft_vocab_size" in config
        or any("midlayer." in name or name.endswith("layers.0.hidden_norm.weight") for name in tensors)
    )


def _has(*keys: str) -> Callable[[Mapping[str, Any], str, Collection[str]], bool]:
    return lambda config, names, tensors: any(config.get(key) is not None for key in keys)


def is_certainly_peagle(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    """Whether a checkpoint can only be P-EAGLE: by its architecture, or because it has a tensor `mask_hidden`."""
    if speculators_type(config) is not None:
        return speculators_type(config) == "peagle"
    return "peagle" in names or any(name.rpartition(".")[2] == "mask_hidden" for name in tensors)


def _is_pard2(config: Mapping[str, Any], tensors: Collection[str]) -> bool:
    return has_projection(config) or any(name.endswith("target_proj.weight") for name in tensors)


def _is_medusa(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    return (
        config.get("medusa_num_heads") is not None
        or config.get("model_type") == "medusa"
        or eagle_settings(config).get("parallel_draft_step") not in (None, 0, 1)
        or any("parallel_draft_heads." in name or "medusa_" in name for name in tensors)
    )


def block_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The nested `dflash_config` of DFlash and what is made of it, with newer SpecForge's `dspark_config`."""
    nested = [config.get(key) for key in ("dspark_config", "dflash_config")]
    return {key: value for part in nested if isinstance(part, Mapping) for key, value in part.items()}


def _is_block_drafter(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    """Whether a checkpoint is a drafter of blocks of any kind: DFlash, or made of it."""
    if speculators_type(config) is not None:
        return speculators_type(config) in ("dflash", "dflash2", "dspark")
    if any(part in names for part in ("dflash", "dspark", "domino", "museglimmerassistant")):
        return True
    if is_certainly_peagle(config, names, tensors) or "eagle3" in names:
        return False
    return bool(block_settings(config)) or "markov_rank" in config or _drafts_blocks(config, tensors)


def _is_dspark(config: Mapping[str, Any], tensors: Collection[str]) -> bool:
    """Whether a drafter of blocks has a Markov head, by its tensors or by config.json."""
    stated = [source["markov_rank"] for source in (block_settings(config), config) if "markov_rank" in source]
    return any("markov_w1." in name for name in tensors) or any(stated)


def _has_tensor(*parts: str) -> Callable[[Mapping[str, Any], str, Collection[str]], bool]:
    return lambda config, names, tensors: any(part in name for name in tensors for part in parts)


def _is_dflash2(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    """Whether a drafter of blocks has convolutions or a selector of candidates, by name, config.json or tensors."""
    if speculators_type(config) is not None:
        return speculators_type(config) == "dflash2"
    return (
        "dflash2" in names
        or bool({"conv_kernel_size", "selector_rank"} & block_settings(config).keys())
        or any(part in name for name in tensors for part in ("candidate_selector.", "attention_conv."))
    )


def _is_domino(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    """Whether a drafter of blocks has a correction by a GRU, by name, config.json or tensors."""
    projectors = {block_settings(config).get("projector_type"), config.get("projector_type")}
    return (
        "domino" in names
        or bool(projectors & set(_DOMINO_PROJECTORS))
        or any(rename(name).startswith("prefix_gru.") for name in tensors)
    )


def _is_xpress(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    return (
        speculators_type(config) == "xpress"
        or "xpress" in names
        or any(part in name for name in tensors for part in ("xpress_head.", "refiner_head."))
    )


def _is_dflare(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    return "dflare" in names or any(name.endswith("layer_fusion_weights") for name in tensors)


def _is_lstm(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    return config.get("n_predict") is not None and ("lstm" in names or "lstm" in str(config.get("method")))


def _is_lilicorr(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    keys = {*config, *block_settings(config)}
    return (
        speculators_type(config) == "lilicorr"
        or "lilicorr" in names
        or any(key.startswith("lilicorr") for key in keys)
        or any("lilicorr" in name for name in tensors)
    )


def _is_deepseek_dspark(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    keys = ("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids")
    return speculators_type(config) == "dsv4_dspark" or (
        any(config.get(key) is not None for key in keys) and not is_certainly_peagle(config, names, tensors)
    )


def _of_blocks(
    matches: Callable[[Mapping[str, Any], str, Collection[str]], bool],
) -> Callable[[Mapping[str, Any], str, Collection[str]], bool]:
    return lambda config, names, tensors: _is_block_drafter(config, names, tensors) and matches(config, names, tensors)


def _is_mimo(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    stated = {**config, **block_settings(config)}
    return (
        bool(stated.get("attention_sink_bias"))
        or stated.get("attention_value_scale") not in (None, 1)
        or any("attention_sink_bias" in name for name in tensors)
    )


def _is_latent_block(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    # SpecForge's names of as many heads of keys as of queries, and of fewer, which the layers' settings state.
    mode = block_settings(config).get("attention_mode")
    return str(mode or "gqa").lower() not in ("gqa", "mha") or any("kv_a_proj_with_mqa" in name for name in tensors)


def _drafts_blocks(config: Mapping[str, Any], tensors: Collection[str]) -> bool:
    """Whether config.json has a `block_size` that is DFlash's, not that of a language model with sparse attention."""
    stems = {name.removeprefix("model.").removesuffix(".weight") for name in tensors}
    return config.get("block_size") is not None and (
        any(config.get(key) is not None for key in ("mask_token_id", "target_layer_ids", "aux_hidden_state_layer_ids"))
        or {"fc", "hidden_norm"} <= stems
    )


def _is_peagle(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    if is_certainly_peagle(config, names, tensors):
        return True
    if speculators_type(config) is not None or not _reads_hidden_states(config, tensors):
        return False
    if config.get("parallel_drafting") is not None:
        return bool(config["parallel_drafting"])
    return any(config.get(key) is not None for key in ("ptd_token_id", "mask_token_id", "pard_token"))


def _reads_hidden_states(config: Mapping[str, Any], tensors: Collection[str]) -> bool:
    return is_eagle3(config, tensors) or "transformer_layer_config" in config


def _is_mla(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    is_drafter = is_eagle3(config, tensors) or _is_peagle(config, names, tensors)
    return "eagle3deepseek" in names or (is_drafter and any("kv_a_proj_with_mqa" in name for name in tensors))


def _is_mtp(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    is_eagle = is_eagle3(config, tensors) or _is_peagle(config, names, tensors)
    return is_speculators_mtp(config) or (not is_eagle and holds_modules(config, tensors))


def _is_whole_draft_model(
    config: Mapping[str, Any],
    tensors: Collection[str],
    target: PreTrainedConfig | None,
    overrides: Mapping[str, Any],
) -> bool:
    """Whether a language model that may have MTP modules is used as a draft model, and not for these modules.

    It is, if the target is another model. Without a target, a checkpoint that holds modules is used for them.
    """
    if is_apart(config, tensors) or not _is_language_model(config, architectures(config)):
        return False
    if config.get("model_type") not in CONFIG_MAPPING or MTP_ONLY & overrides.keys():
        return False
    if target is None:
        return not module_names(config, tensors)
    return not has_shape_of(config, target)


def _is_eagle1(config: Mapping[str, Any], names: str, tensors: Collection[str]) -> bool:
    if _is_peagle(config, names, tensors) or _is_block_drafter(config, names, tensors):
        return False
    return (
        speculators_type(config) == "eagle"
        or config.get("model_type") == "eagle"
        or ("eagle" in names and "eagle3" not in names)
        or (not is_eagle3(config, tensors) and any(name in ("fc.weight", "model.fc.weight") for name in tensors))
    )


def _is_cache_reader(config: Mapping[str, Any], names: str) -> bool:
    """Whether config.json is that of an assistant which reads the target's keys and values."""
    return config.get("backbone_hidden_size") is not None and "assistantforcausallm" in names


def _is_language_model(config: Mapping[str, Any], names: str) -> bool:
    """Whether config.json describes a language model; `read_draft_model` checks whether it can draft."""
    return any(head in names for head in ("forcausallm", "lmhead", "forconditionalgeneration")) or (
        "AutoModelForCausalLM" in (config.get("auto_map") or {})
    )


# In the order in which they are tried.
REFUSALS = (
    Refusal("Medusa heads", "they are not supported; use an EAGLE-3 drafter for the same target", _is_medusa),
    Refusal("Hydra heads", "they are not supported; use an EAGLE-3 drafter", _has("hydra_num_heads")),
    Refusal("DFlare", "it is not supported; use a DFlash or DSpark drafter for the same target", _is_dflare),
    Refusal("DFlash-2 with a beam", _NOT_YET, lambda config, names, tensors: "dflash2beam" in names),
    Refusal("Domino of speculators", _NOT_YET, lambda config, names, tensors: speculators_type(config) == "domino"),
    Refusal("XPress", "it is not supported; use a DFlash or DSpark drafter for the same target", _is_xpress),
    Refusal("LiLiCorr", "it is not supported; use a DFlash or DSpark drafter for the same target", _is_lilicorr),
    Refusal(
        "DSpark inside of a DeepSeek-V4 checkpoint",
        "it is not supported; expected a drafter with a checkpoint of its own",
        _is_deepseek_dspark,
    ),
    Refusal("DSpark with the layers of Gemma 4", _NOT_YET, lambda config, names, tensors: "gemma4dsparkmodel" in names),
    Refusal(
        "DFlash of Laguna, whose attention has gates",
        _NOT_YET,
        _of_blocks(_has_tensor("self_attn.g_proj.", "aux_hidden_norms.")),
    ),
    Refusal("DFlash with attention sinks (MiMo)", _NOT_YET, _of_blocks(_is_mimo)),
    Refusal("DFlash or DSpark with other attention in its draft layers", _NOT_YET, _of_blocks(_is_latent_block)),
    Refusal("an LSTM speculator", "it is not supported; use an EAGLE-3 drafter", _is_lstm),
    Refusal("an MLP speculator", "it is not supported; use an EAGLE-3 drafter", _has("n_predict")),
    Refusal("EAGLE-3 or P-EAGLE with multi-head latent attention in its draft layers", _NOT_YET, _is_mla),
    Refusal("EAGLE-1 or EAGLE-2", "they are not supported; use an EAGLE-3 drafter for the same target", _is_eagle1),
)


def check_not_refused(name: str, config: Mapping[str, Any], tensors: Collection[str] = ()) -> None:
    """Check that a checkpoint is not of one of the families in `REFUSALS`; arguments as of `check_family`.

    Raises:
        ValueError: expected another family; names the one found.
    """
    names = architectures(config)
    for refusal in REFUSALS:
        if refusal.matches(config, names, tensors):
            raise ValueError(f"{name} is a drafter of another family, {refusal.family}: {refusal.advice}.")


def check_family(
    name: str,
    config: Mapping[str, Any],
    tensors: Collection[str],
    target: PreTrainedConfig | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> str:
    """The family of a checkpoint: `EAGLE3`, `P_EAGLE`, `DFLASH`, `DFLASH2`, `DOMINO`, `DSPARK`, `CACHE_READER`,
    `PARD2`, `MTP` or `DRAFT_MODEL`.

    Args:
        name: of the checkpoint.
        config: content of its config.json.
        tensors: names of its tensors.
        target: the target's text configuration, if there is a target. A language model with MTP modules is a draft
            model for any target but the one that the modules belong to.
        overrides: see `Overrides`.

    Raises:
        ValueError: expected a supported family; names the family found, or what was looked for.
    """
    names, model_type = architectures(config), config.get("model_type") or ""
    if model_type.startswith(DrafterConfig.model_type):
        raise ValueError(
            f"{name} is of the family {model_type!r}, which is not registered: it was saved by a newer hf_specdec, or "
            "its class was not passed to register_drafter."
        )
    if speculators_type(config) not in (None, *_SPECULATORS_TYPES):
        raise ValueError(
            f"{name} is a drafter of speculators_model_type {speculators_type(config)!r}, which is not known here; "
            "expected 'eagle3', 'peagle', 'dflash', 'dflash2', 'dspark' or 'mtp'."
        )
    if _is_pard2(config, tensors):
        return PARD2
    check_not_refused(name, config, tensors)
    if _is_block_drafter(config, names, tensors):
        return _check_block_family(name, config, tensors)
    if _is_cache_reader(config, names):
        return CACHE_READER
    if _is_peagle(config, names, tensors):
        return P_EAGLE
    if is_eagle3(config, tensors):
        return EAGLE3
    if _is_mtp(config, names, tensors) and not _is_whole_draft_model(config, tensors, target, overrides or {}):
        if find_family(config) is None:
            raise ValueError(
                f"{name} is a checkpoint with MTP modules (multi-token prediction) of a model type that is not "
                f"supported; expected one of {', '.join(sorted(MTP_FAMILIES))}, or speculators' form for Qwen3, "
                "Qwen3-Next and Qwen3.5."
            )
        return MTP
    if _is_language_model(config, names):
        return DRAFT_MODEL
    raise ValueError(
        f"{name} is a checkpoint of no known drafter dialect. Looked in config.json for a model_type of hf_specdec, "
        "speculators_model_type (speculators), eagle_config (NVIDIA ModelOpt, SpecForge), an Eagle3 architecture "
        "(SpecForge), draft_vocab_size (SafeAILab), ptd_token_id (Amazon), dflash_config or block_size (DFlash and "
        "DSpark), num_nextn_predict_layers and its like (MTP), a ForCausalLM architecture (draft models, PARD); "
        f"found model_type {config.get('model_type')!r}, architectures {config.get('architectures')!r} and the keys "
        f"{sorted(config)}."
    )


def _check_block_family(name: str, config: Mapping[str, Any], tensors: Collection[str]) -> str:
    """The family of a drafter of blocks; arguments and errors as of `check_family`."""
    names = architectures(config)
    if _is_domino(config, names, tensors):
        return DOMINO
    projector = block_settings(config).get("projector_type")
    if projector not in (None, "dflash", "dspark"):
        raise ValueError(
            f"{name} is a drafter of blocks with the projector_type {projector!r}, which is not known here; expected "
            "'dflash', 'domino' or 'dspark'."
        )
    if _is_dflash2(config, names, tensors):
        return DFLASH2
    return DSPARK if _is_dspark(config, tensors) else DFLASH


def drafter_tensors(overrides: Mapping[str, Any], target: PreTrainedConfig | None = None) -> Selection:
    """Selects the tensors that a drafter needs: those of the MTP modules if it drafts with them, otherwise all.

    Args:
        overrides: see `Overrides`; `share_head` and `share_embedding` decide whether copies are needed.
        target: the target's text configuration, if there is a target.
    """
    given = without_none(overrides)

    def select(config: Mapping[str, Any], names: Collection[str]) -> Collection[str]:
        model_type = config.get("model_type") or ""
        if model_type.startswith(DrafterConfig.model_type) or _is_pard2(config, names):
            return names
        if not _is_mtp(config, architectures(config), names):
            return names
        if _is_whole_draft_model(config, names, target, given):
            return names
        if find_family(config) is None:
            return mtp_names(names)
        return [tensor.published for tensor in needed_tensors(config, names, given)]

    return select
