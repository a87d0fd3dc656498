"""Readers of block drafters of every dialect, into the normal forms `DFlashConfig` and its subclasses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import LlamaConfig, MuseGlimmerAssistantConfig, PreTrainedConfig, Qwen3Config

from ..config import (
    DEFAULT_ROPE_THETA,
    DFlash2Config,
    DFlashConfig,
    DominoConfig,
    DSparkConfig,
    DSpineConfig,
    default_block_layer_ids,
)
from ..host.modeling import ACT2FN
from .checkpoint import Checkpoint
from .detection import architectures, block_settings
from .dialects import DEEPSPEC, SPECFORGE, SPECULATORS, TRANSFORMERS, detect_block_dialect, speculators_depth
from .interpretation import Decisions
from .read_layers import IDS, LayersReader

# Settings whose other values make another model, which is not supported.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "is_neox_style": (None, True),
    "rope_is_neox_style": (None, True),
    "use_gemma_norm": (None, False),
    "enable_qwen35_gated_q_proj": (None, False),
    "log_snr_conditioning": (None, False),
    "micro_block_size": (None,),
}

# Keys in `block_settings` that are read, or on which drafting does not depend.
_KNOWN = re.compile(
    r"attention_(mode|sink_bias|value_scale)|block_size|causal(_head)?|confidence_head_(alpha|with_markov)|num_anchors"
    r"|conv_(group|kernel)_size|dflash_query_causal|dspark_bonus_anchor|emb_dim|(enable|use)_confidence_head"
    r"|final_logit_softcapping|gru_hidden_dim|input_embedding_scale|(target_)?layer_ids|logit_scale|markov_(head_type|rank)"
    r"|mask_token(_id)?|num_target_layers|output_multiplier|projector_type|pure_draft_prefix_len|sample_from_anchor"
    r"|selector_(rank|top_k)|shift_label|transfer_rank|message_size|top_k|(ce|alignment)_weight|alignment_warmup_steps"
    r"|replacement_(layers|probability|hold_ratio|end_ratio)|candidate_mass_threshold|(use_swa|swa_window_size)"
    r"|target_hidden_size|use_aux_hidden_state"
)

_CONFIDENCE = "confidence_head.proj.weight"


class DFlashReader(LayersReader):
    """Reads a checkpoint of DFlash, or of DSpark without a Markov head."""

    config_class: type[DFlashConfig] = DFlashConfig
    detect_dialect = staticmethod(detect_block_dialect)
    nested_settings = staticmethod(block_settings)
    # Sizes of a head on top of the layers: by field, the tensor, its number of dimensions, and the field's dimension.
    head: Mapping[str, tuple[str, int, int]] = {}

    def __init__(self, checkpoint: Checkpoint, target: PreTrainedConfig | None, decisions: Decisions):
        super().__init__(checkpoint, target, decisions)
        if self.dialect == TRANSFORMERS:
            stated = {key: value for key, value in self.top.items() if value is not None}
            self.top = MuseGlimmerAssistantConfig.from_dict(stated).to_dict() | stated
            self.layer = self._layer_settings()
        self._check_supported()

    def _fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        block_size, anchor_first = self._block_size(), self._anchor_first()
        stated, depth = speculators_depth(self.top), block_size - (not anchor_first)
        return {
            **self._head(fields),
            "mask_token_id": self._mask_token(fields["vocab_size"]),
            "block_size": block_size,
            "anchor_first": anchor_first,
            "causal": self._unless_given("causal", lambda: self._causal(fields["layer_types"])),
            "output_bias": self._has("layers.0.self_attn.o_proj.bias", fields["attention_bias"]),
            "embedding_scale": float(self._setting("input_embedding_scale", 1.0)),
            "logit_scale": fields["logit_scale"] * float(self._setting("output_multiplier", 1.0)),
            "logit_softcap": self._setting("final_logit_softcapping") or None,
            "num_assistant_tokens": None if stated is None else min(stated, depth),
        }

    def _head(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        if _CONFIDENCE in self.tensors:
            self._decide("confidence_head", None, "drafts do not depend on it: it states how likely they are accepted")
        sizes = {field: self._size(*place, getattr(self.config_class, field)) for field, place in self.head.items()}
        return {field: self._setting(field, size) for field, size in sizes.items()}

    def _size(self, name: str, num_dims: int, dim: int, planned: int) -> int:
        """A dimension of the tensor `name`, which must exist; `planned` if there are no weight files."""
        if self.is_planned:
            return planned
        tensor = self.tensors.get(name)
        if tensor is None or len(tensor.shape) != num_dims or 0 in tensor.shape:
            raise ValueError(
                f"{self.name} is a {self.config_class.family} drafter by its config.json or its weights, but these "
                f"have no {'matrix' if num_dims == 2 else 'tensor'} {name} of {num_dims} dimensions."
            )
        return tensor.shape[dim]

    def _check_supported(self) -> None:
        for key, neutral in _NEUTRAL.items():
            value = self._setting(key)
            if value not in neutral:
                raise ValueError(
                    f"{self.name} has {key} {value!r} in its config.json, which is not supported in a "
                    f"{self.config_class.family} drafter; expected "
                    f"{'no such key' if neutral[-1] is None else repr(neutral[-1])}."
                )
        for key in sorted(self.nested.keys() - _NEUTRAL.keys()):
            if self.nested[key] and not _KNOWN.fullmatch(key):
                self._decide(
                    key, self.nested[key], "of dflash_config, which is not known here: left out", doubtful=True
                )
        activation = self.layer.get("hidden_act")
        if activation is not None and activation not in ACT2FN:
            raise ValueError(f"{self.name} has hidden_act {activation!r}, which transformers does not know.")

    def _layer_class(self) -> type[PreTrainedConfig]:
        return LlamaConfig if self.layer.get("model_type") == "llama" else Qwen3Config

    def _has_qk_norm(self) -> bool:
        """True: every publisher's layers are Qwen3's, though config.json may have the target's model_type."""
        return True

    def _layers(self) -> dict[str, Any]:
        fields = super()._layers()
        if self.layer.get("vocab_size") is None and self.target is not None:
            rule = "not in config.json; the target's"
            fields["vocab_size"] = self._decide("vocab_size", self.target.vocab_size, rule)
        return fields

    def _windows(self, num_layers: int) -> dict[str, Any]:
        layer, uses_window = self.layer, bool(self.nested.get("use_swa"))
        is_split = layer.get("use_sliding_window") and layer.get("sliding_window") is not None
        if uses_window:
            window = self.nested.get("swa_window_size") or layer.get("sliding_window")
            self.layer = {**layer, "layer_types": ["sliding_attention"] * num_layers, "sliding_window": window}
        elif is_split and layer.get("layer_types") is None:  # transformers' rule for Qwen3
            first = layer.get("max_window_layers", 28)
            types = ["sliding_attention" if index >= first else "full_attention" for index in range(num_layers)]
            self.layer = {**layer, "layer_types": types}
        is_windowed = "sliding_attention" in (self.layer.get("layer_types") or ())
        if is_windowed and layer.get("use_sliding_window") is False and not uses_window:
            raise ValueError(
                f"{self.name} contradicts itself: layer_types has windowed layers, but use_sliding_window is false. "
                "Correct its config.json."
            )
        fields = super()._windows(num_layers)
        if self.dialect == TRANSFORMERS and fields["sliding_window"] is not None:
            rule = "transformers' masks in both directions count the positions on one side, without the token's own"
            fields["sliding_window"] = self._decide("sliding_window", fields["sliding_window"] + 1, rule)
        return fields

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
        """The key of config.json for `anchor_first`, and the value of `anchor_first`; None if there is none."""
        stated = {
            "sample_from_anchor": self._flag("sample_from_anchor"),
            "dspark_bonus_anchor": self._flag("dspark_bonus_anchor"),
            "shift_label": None if self.dialect == SPECULATORS else self._flag("shift_label"),
        }
        found = {key: value != (key == "dspark_bonus_anchor") for key, value in stated.items() if value is not None}
        if len(set(found.values())) > 1 and "anchor_first" not in self.given:
            said = ", ".join(f"{key} is {str(stated[key]).lower()}" for key in found)
            raise ValueError(
                f"{self.name} contradicts itself: {said} in its config.json, of which one says that blocks draft from "
                "the anchor on, and one that masks are filled in. Pass anchor_first=."
            )
        return next(iter(found.items()), None)

    def _is_dspark(self) -> bool:
        """Whether it is a DSpark drafter, by its name in config.json or by its Markov head, which it may lack."""
        return (
            self.config_class is DSparkConfig
            or self.top.get("speculators_model_type") == "dspark"
            or self.nested.get("projector_type") == "dspark"
            or "dspark" in architectures(self.top)
        )

    def _causal(self, layer_types: list[str] | None) -> list[bool]:
        """For each layer, whether attention within a block is causal."""
        count = self._num_layers()
        windowed = [kind == "sliding_attention" for kind in layer_types or ["full_attention"] * count]
        for key, stated in (
            ("is_causal", self.top.get("is_causal")),
            ("causal", self.nested.get("causal")),
            ("causal_head", self.nested.get("causal_head")),
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

    def _layer_ids(self) -> list[int] | None:
        places = [
            (self.top, ["eagle_aux_hidden_state_layer_ids"], 0),
            (self.top, [IDS], 0),
            (self.nested, ["target_layer_ids"], 1),
            (self.top, ["target_layer_ids"], 1),
            (self.nested, ["layer_ids"], 1),
        ]
        stated = self._stated_ids(places)
        if stated is not None:
            key, ids, offset = stated
            if ids != sorted(set(ids)):
                raise ValueError(
                    f"{self.name} has {key} {ids}, which do not ascend, so the columns of fc.weight are in another "
                    "order; expected ascending layer numbers."
                )
            rule = f"{key} counts {'outputs' if offset else 'inputs'} of layers (z-lab, vLLM)"
            return self._decide(IDS, [one + offset for one in ids], rule)
        num_layers = self.top.get("num_target_layers") or (self.target and self.target.num_hidden_layers)
        if num_layers is None:
            return self._decide(IDS, None, "not in config.json; z-lab's rule for the layers of the target")
        default = default_block_layer_ids(num_layers, self._num_layers())
        return self._decide(IDS, default, f"not in config.json; z-lab's rule for {num_layers} layers of the target")

    def _num_aux_hidden_states(self, total: int | None, width: int | None) -> int:
        return self._num_layers()

    def _rope(self) -> dict[str, Any]:
        rope = super()._rope()
        theirs = getattr(self.target, "rope_parameters", None) or {}
        base = theirs.get("rope_theta", DEFAULT_ROPE_THETA) if "rope_type" in theirs else rope["rope_theta"]
        if base != rope["rope_theta"] and "rope_theta" not in self.given:
            rule = f"config.json, though drafters are trained with the target's base, which is {base}"
            self._decide("rope_theta", rope["rope_theta"], rule, doubtful=True)
        return rope

    def _or_default(self, key: str, default: Any, rule: str) -> Any:
        """A setting, or a doubtful `default`."""
        stated = self._setting(key)
        return self._decide(key, default, f"not in config.json; {rule}", True) if stated is None else stated


class DFlash2Reader(DFlashReader):
    """Reads DFlash's settings, and those of the convolutions and the candidate selector."""

    config_class = DFlash2Config
    head = {"selector_rank": ("candidate_selector.predecessor_codebook", 2, 1)}

    def _head(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        default, kernel = DFlash2Config, "layers.0.attention_conv.base_kernel"
        taps = self._size(kernel, 3, 1, self._setting("conv_kernel_size", default.conv_kernel_size))
        width = self._size(kernel, 3, 2, fields["hidden_size"])
        planned = 2 * taps * max(width // default.conv_group_size, 1)
        values = self._size("layers.0.attention_conv.kernel_projection.weight", 2, 0, planned)
        groups = values // (2 * taps)
        if not groups or width % groups:
            raise ValueError(
                f"{self.name} has convolutions of {values} values a token, which is not 2 sides of {taps} "
                f"taps of groups of {width} channels."
            )
        return super()._head(fields) | {
            "conv_kernel_size": self._setting("conv_kernel_size", taps),
            "conv_group_size": self._setting("conv_group_size", width // groups),
            "selector_top_k": self._or_default("selector_top_k", default.selector_top_k, "speculators' default"),
        }


class DominoReader(DFlashReader):
    """Reads DFlash's settings, and those of the GRU correction."""

    config_class = DominoConfig
    head = {"gru_hidden_dim": ("prefix_gru.weight_hh_l0", 2, 1), "emb_dim": ("embed_proj.0.weight", 2, 0)}

    def _head(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        prefix = self._or_default("pure_draft_prefix_len", 0, "SpecForge's default")
        return super()._head(fields) | {"pure_draft_prefix_len": prefix}

    def _anchor_first(self) -> bool:
        if self._stated_anchor_first() is not None:
            return super()._anchor_first()
        return self._decide("anchor_first", False, "shift_label is not in config.json; SpecForge's default", True)


class DSpineReader(DFlashReader):
    """Reads DFlash's settings, and those of the injections in SpecForge's DSpine."""

    config_class = DSpineConfig
    head = {"transfer_rank": ("transfer_codes", 2, 1), "message_size": ("injection.message.weight", 2, 0)}

    def _head(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        stored = [name for name in self.checkpoint.tensors or () if name.endswith("transfer_ready")]
        if stored and not self.checkpoint.only(stored).read()[stored[0]].all():
            raise ValueError(f"{self.name} has transfer_ready false: its transfer_codes were not made yet.")
        default = DSpineConfig.selector_top_k
        top_k = self._decide("selector_top_k", self.nested.get("top_k", default), "top_k of dspine_config, 16 without")
        return super()._head(fields) | {"selector_top_k": top_k}

    def _causal(self, layer_types: list[str] | None) -> list[bool]:
        return self._decide("causal", [True] * self._num_layers(), "DSpine's layers are causal inside of a block")


class DSparkReader(DFlashReader):
    """Reads DFlash's settings, and those of the Markov head."""

    config_class = DSparkConfig
    head = {"markov_rank": ("markov_head.markov_w1.weight", 2, 1)}

    def _head(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        kind = self._setting("markov_head_type")
        if kind is None:
            kinds = {"gate_proj": "gated", "joint_proj": "rnn"}
            found = [kind for part, kind in kinds.items() if f"markov_head.{part}.weight" in self.tensors]
            rule = "not in config.json; by the tensors"
            kind = self._decide("markov_type", found[0] if found else "vanilla", rule)
        head = super()._head(fields) | {"markov_type": kind}
        return head | {"confidence_head": self._reads_markov_head(fields["hidden_size"] + head["markov_rank"])}

    def _reads_markov_head(self, width: int) -> bool:
        """Whether there is a confidence head that reads `width` values."""
        if self.is_planned:
            has_one = self._setting("enable_confidence_head") or self._setting("use_confidence_head")
            return bool(has_one) and bool(self._setting("confidence_head_with_markov", True))
        return _CONFIDENCE in self.tensors and self.tensors[_CONFIDENCE].shape[-1] == width
