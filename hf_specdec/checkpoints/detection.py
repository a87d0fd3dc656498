"""Detection of the family of a published checkpoint, and the families that are known but not supported."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from transformers import CONFIG_MAPPING, PreTrainedConfig

from .checkpoint import has_projection
from .mtp_layouts import FAMILIES as MTP_FAMILIES
from .mtp_layouts import find_family, has_shape_of, holds_modules, is_apart, is_speculators_mtp, module_names
from .tensors import rename

_NOT_YET = "this version does not support that family yet"
_INSTEAD = "it is not supported; use a DFlash or DSpark drafter for the same target"

# Keywords of `AutoDrafter.from_pretrained` that apply only to MTP modules.
MTP_ONLY = frozenset({"chaining", "hidden_first", "norm_offset", "zero_first_embedding"})

# Supported values of `speculators_model_type`, and other known ones.
_SUPPORTED_TYPES = ("eagle3", "peagle", "mtp", "dflash", "dflash2", "dspark")
_OTHER_TYPES = ("domino", "dsv4_dspark", "eagle", "lilicorr", "xpress")


def architectures(config: Mapping[str, Any]) -> str:
    """The `architectures` of config.json, in lower case, separated by spaces."""
    return " ".join(config.get("architectures") or []).lower()


def eagle_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The nested `eagle_config` of ModelOpt and SpecForge; empty if there is none."""
    nested = config.get("eagle_config")
    return nested if isinstance(nested, Mapping) else {}


def block_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The nested `dflash_config` of DFlash and families derived from it, with newer SpecForge's objects for others."""
    nested = [config.get(key) for key in ("dspark_config", "dspine_config", "dflash_config")]
    return {key: value for part in nested if isinstance(part, Mapping) for key, value in part.items()}


@dataclass(frozen=True)
class Published:
    """What is known of a published checkpoint when its family is detected: config.json, the names of tensors as far as
    they are known, the target's text configuration or None, and the `Overrides` that are not None."""

    name: str
    config: Mapping[str, Any]
    tensors: Collection[str] = ()
    target: PreTrainedConfig | None = None
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def speculators(self) -> str | None:
        """vllm-project/speculators' name of the family; None for other publishers."""
        return self.config.get("speculators_model_type")

    @cached_property
    def names(self) -> str:
        return architectures(self.config)

    @cached_property
    def blocks(self) -> Mapping[str, Any]:
        return block_settings(self.config)


class Signs(NamedTuple):
    """Signs of a family, any of which is enough: values of `speculators_model_type`, parts of architectures in lower
    case, keys of config.json or of `block_settings`, and parts of the names of tensors. If there is a
    `speculators_model_type`, only that counts. With `of_blocks` a block drafter is also needed."""

    speculators: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    of_blocks: bool = False

    def __call__(self, found: Published) -> bool:
        if self.of_blocks and not is_block_drafter(found):
            return False
        if found.speculators is not None:
            return found.speculators in self.speculators
        return (
            any(name in found.names for name in self.names)
            or any(part.get(key) is not None for key in self.keys for part in (found.config, found.blocks))
            or any(part in name for part in self.tensors for name in found.tensors)
        )


_certainly_peagle = Signs(("peagle",), ("peagle",), tensors=("mask_hidden",))
_has_block_name = Signs(
    ("dflash", "dflash2", "dspark"), ("dflash", "dspark", "dspine", "domino", "museglimmerassistant")
)
is_dflash2 = Signs(
    ("dflash2",), ("dflash2",), ("conv_kernel_size", "selector_rank"), ("candidate_selector.",), of_blocks=True
)
is_dspine = Signs((), ("dspine",), ("dspine_config",), ("transfer_codes", "injection.readouts."), of_blocks=True)
_has_medusa = Signs(keys=("medusa_num_heads",), tensors=("parallel_draft_heads.", "medusa_"))
_is_deepseek_dspark = Signs(
    ("dsv4_dspark",), keys=("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids")
)
_lilicorr = Signs(("lilicorr",), ("lilicorr",), tensors=("lilicorr",))
# Values of `projector_type`: Domino's (current, and in its authors' first files), and all.
_DOMINO_PROJECTORS = ("domino", "causal_v5")
_PROJECTORS = (None, "dflash", "dspark", "dspine", *_DOMINO_PROJECTORS)


def is_pard2(found: Published) -> bool:
    return has_projection(found.config) or any(name.endswith("target_proj.weight") for name in found.tensors)


def is_block_drafter(found: Published) -> bool:
    """Whether a checkpoint is a block drafter of any kind: DFlash or a family derived from it. Raises `ValueError` for
    an unknown `projector_type`."""
    if not (_has_block_name(found) or (found.speculators is None and _has_blocks(found))):
        return False
    projector = found.blocks.get("projector_type")
    if projector not in _PROJECTORS:
        raise ValueError(
            f"{found.name} is a drafter of blocks with the projector_type {projector!r}, which is not known here; "
            "expected 'dflash', 'domino', 'dspark' or 'dspine'."
        )
    return True


def _has_blocks(found: Published) -> bool:
    """Whether config.json has DFlash's settings. `block_size` alone may be a sparse attention model's."""
    if _certainly_peagle(found) or "eagle3" in found.names:
        return False
    stems = {name.removeprefix("model.").removesuffix(".weight") for name in found.tensors}
    keys = ("mask_token_id", "target_layer_ids", "aux_hidden_state_layer_ids")
    has_size = found.config.get("block_size") is not None and (
        any(found.config.get(key) is not None for key in keys) or {"fc", "hidden_norm"} <= stems
    )
    return bool(found.blocks) or "markov_rank" in found.config or has_size


def is_domino(found: Published) -> bool:
    """Whether a block drafter has a GRU correction, by its name, config.json or tensors."""
    projectors = {found.blocks.get("projector_type"), found.config.get("projector_type")}
    return is_block_drafter(found) and (
        "domino" in found.names
        or bool(projectors & set(_DOMINO_PROJECTORS))
        or any(rename(name).startswith("prefix_gru.") for name in found.tensors)
    )


def is_dspark(found: Published) -> bool:
    """Whether a block drafter has a Markov head, by its tensors or config.json."""
    stated = any(part.get("markov_rank") for part in (found.blocks, found.config))
    return is_block_drafter(found) and (stated or any("markov_w1." in name for name in found.tensors))


def is_cache_reader(found: Published) -> bool:
    """Whether config.json is that of an assistant that reads the target's keys and values."""
    return found.config.get("backbone_hidden_size") is not None and "assistantforcausallm" in found.names


def is_eagle3(found: Published) -> bool:
    """Whether config.json or a tensor's name is that of an EAGLE-3 drafter."""
    if found.speculators is not None:
        return found.speculators == "eagle3"
    return (
        "eagle3" in found.names
        or bool(eagle_settings(found.config))
        or "draft_vocab_size" in found.config
        or any("midlayer." in name or name.endswith("layers.0.hidden_norm.weight") for name in found.tensors)
    )


def is_peagle(found: Published) -> bool:
    if _certainly_peagle(found):
        return True
    reads_hidden_states = is_eagle3(found) or "transformer_layer_config" in found.config
    if found.speculators is not None or not reads_hidden_states:
        return False
    if found.config.get("parallel_drafting") is not None:
        return bool(found.config["parallel_drafting"])
    return any(found.config.get(key) is not None for key in ("ptd_token_id", "mask_token_id", "pard_token"))


def is_mtp(found: Published) -> bool:
    """Whether a checkpoint is used for its MTP modules, and not as a draft model. Raises `ValueError` for modules of an
    unsupported model type."""
    is_eagle = is_eagle3(found) or is_peagle(found)
    holds = is_speculators_mtp(found.config) or (not is_eagle and holds_modules(found.config, found.tensors))
    if not holds or _is_whole_draft_model(found):
        return False
    if find_family(found.config) is None:
        raise ValueError(
            f"{found.name} is a checkpoint with MTP modules (multi-token prediction) of a model type that is not "
            f"supported; expected one of {', '.join(sorted(MTP_FAMILIES))}, or speculators' form for Qwen3, "
            "Qwen3-Next and Qwen3.5."
        )
    return True


def _is_whole_draft_model(found: Published) -> bool:
    """Whether a language model that may have MTP modules is used as a draft model: if the target is another model, or
    if there is no target and the checkpoint holds no modules."""
    if is_apart(found.config, found.tensors) or not is_language_model(found):
        return False
    if found.config.get("model_type") not in CONFIG_MAPPING or MTP_ONLY & found.given.keys():
        return False
    if found.target is None:
        return not module_names(found.config, found.tensors)
    return not has_shape_of(found.config, found.target)


def is_language_model(found: Published) -> bool:
    """Whether config.json describes a language model; `read_draft_model` checks whether it can draft."""
    return any(head in found.names for head in ("forcausallm", "lmhead", "forconditionalgeneration")) or (
        "AutoModelForCausalLM" in (found.config.get("auto_map") or {})
    )


def _is_medusa(found: Published) -> bool:
    heads = eagle_settings(found.config).get("parallel_draft_step")
    return _has_medusa(found) or found.config.get("model_type") == "medusa" or heads not in (None, 0, 1)


def _is_lilicorr(found: Published) -> bool:
    return _lilicorr(found) or any(key.startswith("lilicorr") for key in (*found.config, *found.blocks))


def _is_mimo(found: Published) -> bool:
    stated = {**found.config, **found.blocks}
    has_sinks = bool(stated.get("attention_sink_bias")) or any("attention_sink_bias" in name for name in found.tensors)
    return is_block_drafter(found) and (has_sinks or stated.get("attention_value_scale") not in (None, 1))


def _is_latent_block(found: Published) -> bool:
    # "mha" and "gqa" are SpecForge's names of attention that the layers' settings describe.
    is_latent = str(found.blocks.get("attention_mode") or "gqa").lower() not in ("gqa", "mha") or _has_latent(found)
    return is_block_drafter(found) and is_latent


def _has_latent(found: Published) -> bool:
    return any("kv_a_proj_with_mqa" in name for name in found.tensors)


def _is_mla(found: Published) -> bool:
    return "eagle3deepseek" in found.names or ((is_eagle3(found) or is_peagle(found)) and _has_latent(found))


def _is_eagle1(found: Published) -> bool:
    if is_peagle(found) or is_block_drafter(found):
        return False
    return (
        found.speculators == "eagle"
        or found.config.get("model_type") == "eagle"
        or ("eagle" in found.names and "eagle3" not in found.names)
        or (not is_eagle3(found) and any(name in ("fc.weight", "model.fc.weight") for name in found.tensors))
    )


class Refusal(NamedTuple):
    """A known family that this version cannot load: its name, the reason or an alternative, and its detection."""

    family: str
    advice: str
    matches: Callable[[Published], bool]


# In the order in which they are tried.
REFUSALS = (
    Refusal("Medusa heads", "they are not supported; use an EAGLE-3 drafter for the same target", _is_medusa),
    Refusal("Hydra heads", "they are not supported; use an EAGLE-3 drafter", Signs(keys=("hydra_num_heads",))),
    Refusal("DFlare", _INSTEAD, Signs(names=("dflare",), tensors=("layer_fusion_weights",))),
    Refusal(
        "JetSpec with an adapter of hidden sizes",
        "its weights are random by its authors; use one that was trained for the target",
        Signs(tensors=("hidden_dim_adapter.",)),
    ),
    Refusal("DFlash-2 with a beam", _NOT_YET, Signs(names=("dflash2beam",))),
    Refusal("Domino of speculators", _NOT_YET, Signs(speculators=("domino",))),
    Refusal("XPress", _INSTEAD, Signs(("xpress",), ("xpress",), tensors=("xpress_head.", "refiner_head."))),
    Refusal(
        "LiLiCorr", "no checkpoint was published to check a reader with; use a DFlash or DSpark drafter", _is_lilicorr
    ),
    Refusal(
        "EAGLE-4",
        "which hidden states it reads is stated by code that is not open source; use an EAGLE-3 drafter",
        Signs((), ("eagle4",), ("efficient_lm_head_config",), ("efficient_lm_head",)),
    ),
    Refusal(
        "DSpark inside of a DeepSeek-V4 checkpoint",
        "it is not supported; expected a drafter with a checkpoint of its own",
        lambda found: _is_deepseek_dspark(found) and not _certainly_peagle(found),
    ),
    Refusal("DSpark with the layers of Gemma 4", _NOT_YET, Signs(names=("gemma4dsparkmodel",))),
    Refusal(
        "DFlash of Laguna, whose attention has gates",
        _NOT_YET,
        lambda found: (
            is_block_drafter(found)
            and any(part in name for part in ("self_attn.g_proj.", "aux_hidden_norms.") for name in found.tensors)
        ),
    ),
    Refusal("DFlash with attention sinks (MiMo)", _NOT_YET, _is_mimo),
    Refusal("DFlash or DSpark with other attention in its draft layers", _NOT_YET, _is_latent_block),
    Refusal(
        "an LSTM speculator",
        "it is not supported; use an EAGLE-3 drafter",
        lambda found: (
            found.config.get("n_predict") is not None
            and any("lstm" in one for one in (found.names, str(found.config.get("method"))))
        ),
    ),
    Refusal("an MLP speculator", "it is not supported; use an EAGLE-3 drafter", Signs(keys=("n_predict",))),
    Refusal("EAGLE-3 or P-EAGLE with multi-head latent attention in its draft layers", _NOT_YET, _is_mla),
    Refusal("EAGLE-1 or EAGLE-2", "they are not supported; use an EAGLE-3 drafter for the same target", _is_eagle1),
)


def check_not_refused(found: Published) -> None:
    """Raise `ValueError`, which names the checkpoint's family, if the family is known and not supported, or unknown and
    of speculators."""
    if found.speculators not in (None, *_SUPPORTED_TYPES, *_OTHER_TYPES):
        raise ValueError(
            f"{found.name} is a drafter of speculators_model_type {found.speculators!r}, which is not known here; "
            "expected 'eagle3', 'peagle', 'dflash', 'dflash2', 'dspark' or 'mtp'."
        )
    for refusal in REFUSALS:
        if refusal.matches(found):
            raise ValueError(f"{found.name} is a drafter of another family, {refusal.family}: {refusal.advice}.")
