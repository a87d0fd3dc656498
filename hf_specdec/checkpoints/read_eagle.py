"""Readers of EAGLE-3 and P-EAGLE checkpoints of every dialect, into the normal forms `Eagle3Config` and `PEagleConfig`.

A property that a checkpoint leaves open is decided by a stated rule, recorded as a `Decision`, and can be overridden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import Eagle3Config, PEagleConfig, default_aux_layer_ids
from .detection import eagle_settings
from .dialects import DEEPSPEC, MODELOPT, SPECFORGE, SPECULATORS, detect_dialect, speculators_depth
from .read_layers import IDS, LayersReader

# Trained depth of P-EAGLE drafters of speculators and Automodel without `num_depths` in config.json.
PEAGLE_DEPTH = 8

# Model types of targets for whose drafters the ids in `eagle_config` count inputs of layers, whatever the first id is
# (the published drafters of gpt-oss; sgl-project/sglang pull request 32334).
_COUNTED_BY_INPUTS = frozenset({"gpt_oss"})


class Eagle3Reader(LayersReader):
    """Reads an EAGLE-3 checkpoint."""

    config_class: type[Eagle3Config] = Eagle3Config
    detect_dialect = staticmethod(detect_dialect)
    nested_settings = staticmethod(eagle_settings)

    def _fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        depth = self._setting("ttt_length") if self.dialect == DEEPSPEC else speculators_depth(self.top)
        return {
            "norm_before_residual": self._norm_before_residual(),
            "norm_output": self._norm_output(),
            "final_norm": self._final_norm(),
            "use_aux_hidden_state": self._agreed("use_aux_hidden_state", self._reads_aux_hidden_states(), "fc.weight"),
            "norm_before_fc": self._agreed("norm_before_fc", self._flag("norm_before_fc"), "input_norm.weight"),
            "fc_norm": self._agreed("fc_norm", self._flag("fc_norm"), "fc_norm.0.weight"),
            "num_assistant_tokens": depth or Eagle3Config.num_assistant_tokens,
        }

    def _reads_aux_hidden_states(self) -> bool:
        return self._flag("use_aux_hidden_state") is not False

    def _layer_ids(self) -> list[int] | None:
        """The ids as inputs of layers. In `config.json` publishers count inputs or outputs of layers."""
        everywhere = ("eagle_aux_hidden_state_layer_ids", IDS)
        nested = ("eagle_aux_hidden_state_layer_ids", "layer_ids", IDS)
        places = [(self.top, everywhere, 0), (self.top, ("target_layer_ids",), 1), (self.nested, nested, 0)]
        stated = self._stated_ids(places[:2])
        if stated is not None:
            key, ids, offset = stated
            counted = "outputs of layers (DeepSpec)" if offset else "inputs of layers (vLLM, speculators)"
            return self._decide(IDS, [one + offset for one in sorted(set(ids))], f"{key} at top level counts {counted}")
        stated = self._stated_ids(places[2:])
        if stated is not None:
            return self._nested_ids(stated[0], sorted(set(stated[1])))
        if self.target is None:
            rule = "not in config.json; 2, n // 2, n - 3 of a target with n layers, every publisher's default"
            return self._decide(IDS, None, rule)
        num_layers = self.target.num_hidden_layers
        rule = f"not in config.json; 2, n // 2, n - 3 with n = {num_layers} layers, every publisher's default"
        return self._decide(IDS, default_aux_layer_ids(num_layers), rule)

    def _nested_ids(self, key: str, ids: list[int]) -> list[int]:
        """The ids in `eagle_config`; by SGLang's rule they count outputs of layers, as hooks do, if the first is 1."""
        where, model_type = f"{key} in eagle_config", getattr(self.target, "model_type", None)
        if model_type in _COUNTED_BY_INPUTS:
            rule = f"{where} counts inputs of layers in drafters for {model_type} (SGLang)"
        elif ids[0] == 1:
            ids = [one + 1 for one in ids]
            rule = (
                f"{where} begins with 1, so it counts outputs of layers: output i is the input of layer i + 1 (SGLang)"
            )
        else:
            rule = f"{where} begins with {ids[0]}, not with 1, so it counts inputs of layers (SGLang, vLLM)"
        return self._decide(IDS, ids, rule, doubtful=True)

    def _norm_before_residual(self) -> bool:
        stated = self._flag("norm_before_residual")
        if stated is not None:
            return self._decide("norm_before_residual", stated, "config.json")
        if self.dialect == SPECULATORS and self.config_class is Eagle3Config:
            rule = "not in config.json; vLLM reads a speculators EAGLE-3 config without it as True"
            return self._decide("norm_before_residual", True, rule, doubtful=True)
        return self._decide("norm_before_residual", False, f"not in config.json; the default of {self.dialect}")

    def _norm_output(self) -> bool:
        """Whether the normed output is fed back (EAGLE 3.1). In SpecForge before pull request 879: a final norm."""
        stated = self._flag("norm_output")
        if stated is None:
            return self._decide("norm_output", False, "not in config.json; EAGLE-3 feeds back the stream before norm")
        if self.dialect != SPECFORGE or not stated:
            return self._decide("norm_output", stated, "config.json")
        is_31 = self._has("fc_norm.0.weight", self._flag("fc_norm"))
        rule = "SpecForge's norm_output has two meanings; with fc_norm it is EAGLE 3.1's, without it a final norm"
        return self._decide("norm_output", is_31, rule, doubtful=True)

    def _final_norm(self) -> bool:
        present, stated = self._has("norm.weight", True), self._flag("use_last_layernorm")
        if self.dialect == SPECFORGE and self._flag("norm_output") is False:
            rule = "SpecForge's norm_output False meant no final norm before its pull request 879; norm.weight is "
            return self._decide("final_norm", present, rule + ("there" if present else "absent"), doubtful=present)
        if self.dialect == MODELOPT and stated is None and not present:
            return self._decide("final_norm", False, "config.json does not state it, and norm.weight is absent")
        if self.dialect == MODELOPT and stated is not None:
            return self._decide("final_norm", self._agreed("use_last_layernorm", stated, "norm.weight"), "config.json")
        return self._decide("final_norm", True, "the family has a norm before its head")


class PEagleReader(Eagle3Reader):
    """Reads EAGLE-3's settings, and the mask token and the hidden state of positions without a token."""

    config_class = PEagleConfig

    def _fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        parallel = self._decide("parallel_drafting", True, "the checkpoint is a P-EAGLE drafter")
        depth = PEAGLE_DEPTH if parallel else Eagle3Config.num_assistant_tokens
        found = super()._fields(fields) | {
            "parallel_drafting": parallel,
            "mask_token_id": self._mask_token(fields["vocab_size"], is_needed=parallel),
            "num_assistant_tokens": speculators_depth(self.top) or self._setting("num_depths") or depth,
        }
        if found["fc_norm"] and self.dialect == SPECULATORS:
            rule = "fc_norm.0.weight is in the checkpoint, and its trainer applies it; vLLM leaves it out for peagle"
            self._decide("fc_norm", True, rule)
        mask = self.tensors.get("mask_hidden")
        if mask is not None:
            count, width = fields["num_aux_hidden_states"], fields["target_hidden_size"]
            total = count * width if count else fields["hidden_size"]
            found["mask_hidden_shape"] = [1] * (len(mask.shape) - 1) + [total]
        return found

    def _rope(self) -> dict[str, Any]:
        rope = super()._rope()
        if self.dialect != SPECFORGE or rope["rope_type"] == "default":
            return rope
        plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        rule = f"SpecForge's P-EAGLE trainer leaves out the {rope['rope_type']} scaling that config.json has"
        return self._decide("rope_parameters", plain, rule, doubtful=True)

    def _norm_output(self) -> bool:
        stated = bool(self._flag("norm_output")) and self.dialect != SPECFORGE
        rule = "config.json" if stated else "the stream before norm, as in EAGLE-3"
        return self._decide("norm_output", stated, f"{rule}; only used when drafting token by token")

    def _final_norm(self) -> bool:
        return self._decide("final_norm", True, "the family has a norm before its head")
