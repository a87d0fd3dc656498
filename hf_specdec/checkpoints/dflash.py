"""Checkpoints of drafters of blocks of every dialect, read into the normal forms `DFlashConfig` and those derived."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from ..config import (
    DEFAULT_ROPE_THETA,
    DFlash2Config,
    DFlashConfig,
    DominoConfig,
    DSparkConfig,
    default_block_layer_ids,
)
from ..host.modeling import ACT2FN
from .checkpoint import Checkpoint
from .decisions import NormalizedConfig
from .detection import architectures, block_settings, speculators_type
from .dialects import (
    DEEPSPEC,
    MASK_TOKEN_KEYS,
    SPECFORGE,
    SPECULATORS,
    TRANSFORMERS,
    detect_block_dialect,
    speculators_depth,
    speculators_target,
    stated_mask_token,
)
from .draft_layers import DraftLayersReader
from .limits import check_mask_token
from .overrides import BLOCK_OVERRIDES, check_not_given

# What transformers' MuseGlimmerAssistantConfig has where config.json says nothing.
_MUSE_DEFAULTS = {
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "sliding_window": 2048,
    "block_size": 16,
    "mask_token_id": 201818,
    "target_layer_ids": [1, 13, 25, 37, 49],
}

# Settings with another value than these make another model, which is not supported.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "is_neox_style": (None, True),
    "rope_is_neox_style": (None, True),
    "use_gemma_norm": (None, False),
    "enable_qwen35_gated_q_proj": (None, False),
    "log_snr_conditioning": (None, False),
    "micro_block_size": (None,),
}

# Keys inside of `dflash_config` and `dspark_config` that are read, or of which drafting does not depend.
_KNOWN = frozenset(
    {
        "attention_mode",
        "attention_sink_bias",
        "attention_value_scale",
        "block_size",
        "causal",
        "confidence_head_alpha",
        "confidence_head_with_markov",
        "conv_group_size",
        "conv_kernel_size",
        "dflash_query_causal",
        "dspark_bonus_anchor",
        "emb_dim",
        "enable_confidence_head",
        "final_logit_softcapping",
        "gru_hidden_dim",
        "input_embedding_scale",
        "layer_ids",
        "logit_scale",
        "markov_head_type",
        "markov_rank",
        "mask_token",
        "mask_token_id",
        "num_anchors",
        "num_target_layers",
        "output_multiplier",
        "projector_type",
        "pure_draft_prefix_len",
        "sample_from_anchor",
        "selector_rank",
        "selector_top_k",
        "shift_label",
        "swa_window_size",
        "target_hidden_size",
        "target_layer_ids",
        "use_aux_hidden_state",
        "use_confidence_head",
        "use_swa",
        *_NEUTRAL,
    }
)

_IDS = "aux_hidden_state_layer_ids"


def read_dflash(
    checkpoint: Checkpoint, target: PreTrainedConfig | None, overrides: Mapping[str, Any]
) -> NormalizedConfig:
    """Read a DFlash checkpoint of any dialect; arguments and errors as of `read_eagle3`."""
    return _DFlashReader(checkpoint, target, overrides).read()


def read_dflash2(
    checkpoint: Checkpoint, target: PreTrainedConfig | None, overrides: Mapping[str, Any]
) -> NormalizedConfig:
    """Read a DFlash-2 checkpoint of any dialect; arguments and errors as of `read_eagle3`."""
    return _DFlash2Reader(checkpoint, target, overrides).read()


def read_domino(
    checkpoint: Checkpoint, target: PreTrainedConfig | None, overrides: Mapping[str, Any]
) -> NormalizedConfig:
    """Read a Domino checkpoint of any dialect; arguments and errors as of `read_eagle3`."""
    return _DominoReader(checkpoint, target, overrides).read()


def read_dspark(
    checkpoint: Checkpoint, target: PreTrainedConfig | None, overrides: Mapping[str, Any]
) -> NormalizedConfig:
    """Read a DSpark checkpoint of any dialect; arguments and errors as of `read_eagle3`."""
    return _DSparkReader(checkpoint, target, overrides).read()


class _DFlashReader(DraftLayersReader):
    """Reads one DFlash checkpoint, or one of DSpark without a Markov head."""

    config_class: type[DFlashConfig] = DFlashConfig

    def __init__(self, checkpoint: Checkpoint, target: PreTrainedConfig | None, overrides: Mapping[str, Any]):
        dialect = detect_block_dialect(checkpoint.config)
        super().__init__(checkpoint, dialect, block_settings(checkpoint.config), target, overrides)
        not_ours = self.decisions.overrides.keys() - BLOCK_OVERRIDES
        check_not_given(not_ours, overrides, self.name, self.config_class.family)
        if dialect == TRANSFORMERS:
            self.top = _MUSE_DEFAULTS | {key: value for key, value in self.top.items() if value is not None}
            self.layer = self._layer_settings()
        self._check_supported()

    def read(self) -> NormalizedConfig:
        if any(name.startswith("confidence_") for name in self.tensors):
            self._decide("confidence_head", None, "not used: it states how likely drafts are to be accepted")
        layers = self._layers()
        layer_ids = self._layer_ids()
        block_size, anchor_first = self._block_size(), self._anchor_first()
        config = self.config_class(
            **layers,
            **self._sizes(layers, layer_ids),
            **self._head(),
            mask_token_id=self._mask_token(layers["vocab_size"]),
            aux_hidden_state_layer_ids=layer_ids,
            rope_parameters=self._rope(),
            block_size=block_size,
            anchor_first=anchor_first,
            causal=self._causal(layers["layer_types"]),
            own_embedding=self._has_own("share_embedding", "embed_tokens.weight"),
            own_head=self._has_own("share_head", "lm_head.weight"),
            fc_bias="fc.bias" in self.tensors,
            output_bias="layers.0.self_attn.o_proj.bias" in self.tensors,
            embedding_scale=float(self._setting("input_embedding_scale", 1.0)),
            logit_scale=float(self._setting("logit_scale", 1.0)) * float(self._setting("output_multiplier", 1.0)),
            logit_softcap=self._setting("final_logit_softcapping") or None,
            dialect=self.dialect,
            target_name_or_path=speculators_target(self.top),
        )
        stated = speculators_depth(self.top)
        if stated is not None:
            config.num_assistant_tokens = min(stated, config.depth)
        return NormalizedConfig(config, tuple(self.decisions.made))

    def _head(self) -> dict[str, Any]:
        """The fields of the configuration that describe a head on top of the layers."""
        return {}

    def _shape(self, name: str, num_dims: int) -> tuple[int, ...]:
        """Shape of the tensor called `name`, without which the drafter is of another family."""
        tensor = self.tensors.get(name)
        if tensor is None or len(tensor.shape) != num_dims or 0 in tensor.shape:
            raise ValueError(
                f"{self.name} is a {self.config_class.family} drafter by its config.json or its weights, but these "
                f"have no {name} of {num_dims} dimensions."
            )
        return tensor.shape

    def _check_supported(self) -> None:
        for key, neutral in _NEUTRAL.items():
            value = self._setting(key)
            if value not in neutral:
                raise ValueError(
                    f"{self.name} has {key} {value!r} in its config.json, which is not supported in a "
                    f"{self.config_class.family} drafter; expected "
                    f"{'no such key' if neutral[-1] is None else repr(neutral[-1])}."
                )
        for key in sorted(self.nested.keys() - _KNOWN):
            if self.nested[key]:
                self._decide(
                    key, self.nested[key], "of dflash_config, which is not known here: left out", doubtful=True
                )
        activation = self.layer.get("hidden_act")
        if activation is not None and activation not in ACT2FN:
            raise ValueError(f"{self.name} has hidden_act {activation!r}, which transformers does not know.")

    def _layer_class(self) -> type[PreTrainedConfig]:
        return LlamaConfig if self.layer.get("model_type") == "llama" else Qwen3Config

    def _has_qk_norm(self) -> bool:
        """Every publisher's layers are Qwen3's, whatever model_type config.json has; it may be the target's."""
        return True

    def _layers(self) -> dict[str, Any]:
        fields = super()._layers()
        if self.layer.get("vocab_size") is None and self.target is not None:
            rule = "not in config.json; the target's"
            fields["vocab_size"] = self._decide("vocab_size", self.target.vocab_size, rule)
        return fields

    def _windows(self, num_layers: int) -> dict[str, Any]:
        if self.nested.get("use_swa"):
            window = self.nested.get("swa_window_size") or self.layer.get("sliding_window")
            self.layer = {**self.layer, "layer_types": ["sliding_attention"] * num_layers, "sliding_window": window}
        elif self.layer.get("layer_types") is None and self._are_windowed_by_default():
            first = 0 if self.dialect == TRANSFORMERS else self.layer.get("max_window_layers", 28)
            types = ["sliding_attention" if index >= first else "full_attention" for index in range(num_layers)]
            self.layer = {**self.layer, "layer_types": types}
        is_windowed = "sliding_attention" in (self.layer.get("layer_types") or ())
        if is_windowed and self.layer.get("use_sliding_window") is False and not self.nested.get("use_swa"):
            raise ValueError(
                f"{self.name} contradicts itself: layer_types has windowed layers, but use_sliding_window is false. "
                "Correct its config.json."
            )
        fields = super()._windows(num_layers)
        if self.dialect == TRANSFORMERS and fields["sliding_window"] is not None:
            rule = "transformers' masks in both directions count the positions on one side, without the token's own"
            fields["sliding_window"] = self._decide("sliding_window", fields["sliding_window"] + 1, rule)
        return fields

    def _are_windowed_by_default(self) -> bool:
        """Whether layers are windowed though config.json has no `layer_types`: transformers' rule for Qwen3."""
        is_asked = self.dialect == TRANSFORMERS or bool(self.layer.get("use_sliding_window"))
        return is_asked and self.layer.get("sliding_window") is not None

    def _block_size(self) -> int:
        size = self._setting("block_size")
        if type(size) is not int:
            raise ValueError(
                f"{self.name} has block_size {size!r} in its config.json; expected the number of tokens of a block."
            )
        return size

    def _anchor_first(self) -> bool:
        stated = self._stated_anchor_first()
        if stated is not None:
            return self._decide("anchor_first", stated[1], f"{stated[0]} of config.json")
        if self.dialect == SPECULATORS and self._is_dspark():
            depth, size = speculators_depth(self.top), self._block_size()
            rule = f"sample_from_anchor is not in config.json; speculative_tokens is {depth} of blocks of {size}"
            return self._decide("anchor_first", depth == size, rule, doubtful=True)
        if self._is_dspark():
            rule = "not in config.json; DSpark models of all publishers but speculators draft from the anchor on"
            return self._decide("anchor_first", True, rule, doubtful=self.dialect not in (DEEPSPEC, SPECFORGE))
        return self._decide("anchor_first", False, "not in config.json; DFlash fills in masks")

    def _stated_anchor_first(self) -> tuple[str, bool] | None:
        """The key of config.json that says whether blocks draft from the anchor on, and what it says.

        vLLM's `dspark_bonus_anchor` says the opposite; `shift_label` is ModelOpt's and SpecForge's.
        """
        stated = {
            "sample_from_anchor": self._flag("sample_from_anchor"),
            "dspark_bonus_anchor": self._flag("dspark_bonus_anchor"),
            "shift_label": None if self.dialect == SPECULATORS else self._flag("shift_label"),
        }
        found = {key: value != (key == "dspark_bonus_anchor") for key, value in stated.items() if value is not None}
        if len(set(found.values())) > 1 and "anchor_first" not in self.decisions.overrides:
            said = ", ".join(f"{key} is {str(stated[key]).lower()}" for key in found)
            raise ValueError(
                f"{self.name} contradicts itself: {said} in its config.json, of which one says that blocks draft from "
                "the anchor on, and one that masks are filled in. Pass anchor_first=."
            )
        return next(iter(found.items()), None)

    def _is_dspark(self) -> bool:
        """Whether it is a DSpark drafter by what config.json calls it, or by its head, which may be left out."""
        return (
            self.config_class is DSparkConfig
            or speculators_type(self.top) == "dspark"
            or self.nested.get("projector_type") == "dspark"
            or "dspark" in architectures(self.top)
        )

    def _causal(self, layer_types: list[str] | None) -> list[bool]:
        """Whether the tokens of a block see no later ones, for each layer."""
        count = self._num_layers()
        windowed = [kind == "sliding_attention" for kind in layer_types or ["full_attention"] * count]
        if "causal" in self.decisions.overrides:
            return self._decide("causal", None, "")
        for key, stated in (
            ("is_causal", self.top.get("is_causal")),
            ("causal", self.nested.get("causal")),
            ("dflash_query_causal", self._flag("dflash_query_causal")),
        ):
            if isinstance(stated, bool):
                return self._decide("causal", [stated] * count, f"{key} of config.json")
        if self.dialect == SPECULATORS:
            stated = self._flag("sliding_window_non_causal")
            if stated is None:
                rule = "sliding_window_non_causal is not in config.json; older exports see the whole block"
                return self._decide("causal", [False] * count, rule, doubtful=any(windowed))
            rule = f"sliding_window_non_causal is {stated}; full layers always see the whole block"
            return self._decide("causal", [kind and not stated for kind in windowed], rule)
        if self.dialect in (DEEPSPEC, TRANSFORMERS):
            return self._decide("causal", [False] * count, f"{self.dialect}'s layers see the whole block")
        if self.nested.get("use_swa"):
            return self._decide("causal", [False] * count, "layers windowed by use_swa see the whole block")
        rule = "not in config.json; windowed layers are causal, full ones see the whole block (z-lab, vLLM)"
        return self._decide("causal", windowed, rule, doubtful=any(windowed))

    def _mask_token(self, vocab_size: int) -> int:
        key, value = stated_mask_token(self.top) or (None, None)
        if key is None and "mask_token_id" not in self.decisions.overrides:
            raise ValueError(
                f"{self.name} is a {self.config_class.family} drafter, but its config.json names no mask token; looked "
                f"for {', '.join(MASK_TOKEN_KEYS)}. Pass `mask_token_id=` with the id that it was trained with."
            )
        return check_mask_token(self._decide("mask_token_id", value, f"{key} of config.json"), vocab_size, self.name)

    def _layer_ids(self) -> list[int] | None:
        if _IDS in self.decisions.overrides:
            return self._decide(_IDS, None, "")
        for key, source, offset in (
            ("eagle_aux_hidden_state_layer_ids", self.top, 0),
            (_IDS, self.top, 0),
            ("target_layer_ids", self.nested, 1),
            ("target_layer_ids", self.top, 1),
            ("layer_ids", self.nested, 1),
        ):
            stated = source.get(key)
            if stated in (None, []):
                continue
            if not isinstance(stated, list) or not all(type(one) is int and one >= -offset for one in stated):
                raise ValueError(f"{self.name} has {key} {stated!r}; expected a list of layer numbers.")
            if stated != sorted(set(stated)):
                raise ValueError(
                    f"{self.name} has {key} {stated}, which do not ascend, so the columns of fc.weight are in another "
                    "order; expected ascending layer numbers."
                )
            rule = f"{key} counts {'outputs' if offset else 'inputs'} of layers (z-lab, vLLM)"
            return self._decide(_IDS, [one + offset for one in stated], rule)
        num_layers = self.top.get("num_target_layers") or (self.target and self.target.num_hidden_layers)
        if num_layers is None:
            return self._decide(_IDS, None, "not in config.json; z-lab's rule for the layers of the target")
        default = default_block_layer_ids(num_layers, self._num_layers())
        return self._decide(_IDS, default, f"not in config.json; z-lab's rule for {num_layers} layers of the target")

    def _num_aux_hidden_states(self, total: int, width: int | None, layer_ids: list[int] | None) -> int:
        return len(layer_ids) if layer_ids is not None else self._num_layers()

    def _rope(self) -> dict[str, Any]:
        rope = super()._rope()
        theirs = getattr(self.target, "rope_parameters", None) or {}
        base = theirs.get("rope_theta", DEFAULT_ROPE_THETA) if "rope_type" in theirs else rope["rope_theta"]
        if base != rope["rope_theta"] and not {"rope_parameters", "rope_theta"} & self.decisions.overrides.keys():
            rule = f"config.json, though drafters are trained with the target's base, which is {base}"
            self._decide("rope_theta", rope["rope_theta"], rule, doubtful=True)
        return rope


class _DFlash2Reader(_DFlashReader):
    """Reads what DFlash checkpoints have, convolutions, and the selector of candidates."""

    config_class = DFlash2Config

    def _head(self) -> dict[str, Any]:
        kernel = self._shape("layers.0.attention_conv.base_kernel", 3)
        projection = self._shape("layers.0.attention_conv.kernel_projection.weight", 2)
        codebook = self._shape("candidate_selector.predecessor_codebook", 2)
        taps = self._setting("conv_kernel_size", kernel[1])
        groups = projection[0] // (2 * kernel[1])
        if not groups or kernel[2] % groups:
            raise ValueError(
                f"{self.name} has convolutions of {projection[0]} values a token, which is not 2 sides of {kernel[1]} "
                f"taps of groups of {kernel[2]} channels."
            )
        top_k = self._setting("selector_top_k")
        if top_k is None:
            default = DFlash2Config.selector_top_k
            top_k = self._decide("selector_top_k", default, "not in config.json; speculators' default", doubtful=True)
        return {
            "conv_kernel_size": taps,
            "conv_group_size": self._setting("conv_group_size", kernel[2] // groups),
            "selector_rank": self._setting("selector_rank", codebook[1]),
            "selector_top_k": top_k,
        }


class _DominoReader(_DFlashReader):
    """Reads what DFlash checkpoints have, and the correction by a GRU."""

    config_class = DominoConfig

    def _head(self) -> dict[str, Any]:
        state, between = self._shape("prefix_gru.weight_hh_l0", 2), self._shape("embed_proj.0.weight", 2)
        prefix = self._setting("pure_draft_prefix_len")
        if prefix is None:
            prefix = self._decide("pure_draft_prefix_len", 0, "not in config.json; SpecForge's default", doubtful=True)
        return {
            "gru_hidden_dim": self._setting("gru_hidden_dim", state[1]),
            "emb_dim": self._setting("emb_dim", between[0]),
            "pure_draft_prefix_len": prefix,
        }

    def _anchor_first(self) -> bool:
        stated = self._stated_anchor_first()
        if stated is not None:
            return self._decide("anchor_first", stated[1], f"{stated[0]} of config.json")
        return self._decide("anchor_first", False, "shift_label is not in config.json; SpecForge's default", True)


class _DSparkReader(_DFlashReader):
    """Reads what DFlash checkpoints have, and the Markov head."""

    config_class = DSparkConfig

    def _head(self) -> dict[str, Any]:
        table = self.tensors.get("markov_head.markov_w1.weight")
        if table is None or len(table.shape) != 2:
            raise ValueError(
                f"{self.name} is a dspark drafter by its config.json, but its weights have no matrix "
                "markov_head.markov_w1.weight."
            )
        rank = self._setting("markov_rank", table.shape[1])
        return {"markov_rank": rank, "markov_type": self._markov_type()}

    def _markov_type(self) -> str:
        stated = self._setting("markov_head_type")
        if stated is not None:
            return stated
        kinds = {"gate_proj": "gated", "joint_proj": "rnn"}
        found = [kind for part, kind in kinds.items() if f"markov_head.{part}.weight" in self.tensors]
        return self._decide("markov_type", found[0] if found else "vanilla", "not in config.json; by the tensors")
