"""EAGLE-3 checkpoints of every dialect, read into the normal form `Eagle3Config`.

What a checkpoint leaves open is decided by a stated rule, recorded as a `Decision`, and can be overridden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from ..config import Eagle3Config
from .checkpoint import Checkpoint
from .decisions import NormalizedConfig
from .detection import eagle_settings
from .dialects import DEEPSPEC, MODELOPT, SPECFORGE, SPECULATORS, detect_dialect, speculators_depth, speculators_target
from .draft_layers import DraftLayersReader
from .layer_ids import read_layer_ids
from .overrides import BLOCK_ONLY, check_no_mask_token, check_not_given


def read_eagle3(
    checkpoint: Checkpoint, target: PreTrainedConfig | None, overrides: Mapping[str, Any]
) -> NormalizedConfig:
    """Read an EAGLE-3 checkpoint of any dialect.

    Args:
        checkpoint: as published.
        target: the target's text configuration; without it, what depends on the target stays open.
        overrides: see `Overrides`.

    Raises:
        ValueError: expected a config.json that agrees with itself and with the tensors.
    """
    return Eagle3Reader(checkpoint, target, overrides).read()


class Eagle3Reader(DraftLayersReader):
    """Reads one EAGLE-3 checkpoint."""

    config_class: type[Eagle3Config] = Eagle3Config

    def __init__(self, checkpoint: Checkpoint, target: PreTrainedConfig | None, overrides: Mapping[str, Any]):
        config = checkpoint.config
        super().__init__(checkpoint, detect_dialect(config), eagle_settings(config), target, overrides)
        check_not_given(BLOCK_ONLY, overrides, self.name, self.config_class.family)

    def read(self) -> NormalizedConfig:
        drafting = self._drafting()
        layers = self._layers()
        layer_ids = self._layer_ids()
        config = self.config_class(
            **drafting,
            **layers,
            **self._sizes(layers, layer_ids),
            aux_hidden_state_layer_ids=layer_ids,
            rope_parameters=self._rope(),
            norm_before_residual=self._norm_before_residual(),
            norm_output=self._norm_output(),
            final_norm=self._final_norm(),
            own_embedding=self._has_own("share_embedding", "embed_tokens.weight"),
            own_head=self._has_own("share_head", "lm_head.weight"),
            use_aux_hidden_state=self._agreed("use_aux_hidden_state", self._use_aux, "fc.weight"),
            norm_before_fc=self._agreed("norm_before_fc", self._flag("norm_before_fc"), "input_norm.weight"),
            fc_norm=self._fc_norm(),
            fc_bias="fc.bias" in self.tensors,
            logit_scale=float(self._setting("logit_scale", 1.0)),
            num_assistant_tokens=self._num_assistant_tokens(),
            dialect=self.dialect,
            target_name_or_path=speculators_target(self.top),
        )
        return NormalizedConfig(config, tuple(self.decisions.made))

    @property
    def _use_aux(self) -> bool:
        stated = self._flag("use_aux_hidden_state")
        return True if stated is None else stated

    def _drafting(self) -> dict[str, Any]:
        """The fields of the configuration that state whether all tokens are drafted in one pass."""
        check_no_mask_token(self.name, self.decisions.overrides)
        return {}

    def _layer_ids(self) -> list[int] | None:
        if not self._use_aux:
            return None
        return read_layer_ids(self.top, self.nested, self.target, self.name, self.decisions)

    def _fc_norm(self) -> bool:
        return self._agreed("fc_norm", self._flag("fc_norm"), "fc_norm.0.weight")

    def _norm_before_residual(self) -> bool:
        stated = self._flag("norm_before_residual")
        if stated is not None:
            return self._decide("norm_before_residual", stated, "config.json")
        return self._default_norm_before_residual()

    def _default_norm_before_residual(self) -> bool:
        if self.dialect == SPECULATORS:
            rule = "not in config.json; vLLM reads a speculators EAGLE-3 config without it as True"
            return self._decide("norm_before_residual", True, rule, doubtful=True)
        return self._decide("norm_before_residual", False, f"not in config.json; the default of {self.dialect}")

    def _norm_output(self) -> bool:
        """Whether the hidden state fed back is taken after the final norm (EAGLE 3.1).

        In SpecForge before its pull request 879, True only meant that a final norm exists.
        """
        stated = self._flag("norm_output")
        if stated is None:
            return self._decide("norm_output", False, "not in config.json; EAGLE-3 feeds back the stream before norm")
        if self.dialect != SPECFORGE or not stated:
            return self._decide("norm_output", stated, "config.json")
        is_31 = "fc_norm.0.weight" in self.tensors
        rule = "SpecForge's norm_output has two meanings; with fc_norm it is EAGLE 3.1's, without it a final norm"
        return self._decide("norm_output", is_31, rule, doubtful=True)

    def _final_norm(self) -> bool:
        present, stated = "norm.weight" in self.tensors, self._flag("use_last_layernorm")
        if self.dialect == SPECFORGE and self._flag("norm_output") is False:
            rule = "SpecForge's norm_output False meant no final norm before its pull request 879; norm.weight is "
            return self._decide("final_norm", present, rule + ("there" if present else "absent"), doubtful=present)
        if self.dialect == MODELOPT and stated is None and not present:
            return self._decide("final_norm", False, "config.json does not state it, and norm.weight is absent")
        if self.dialect == MODELOPT and stated is not None:
            return self._decide("final_norm", self._agreed("use_last_layernorm", stated, "norm.weight"), "config.json")
        return self._decide("final_norm", True, "EAGLE-3 has a norm before its head")

    def _num_assistant_tokens(self) -> int:
        trained = self._setting("ttt_length") if self.dialect == DEEPSPEC else speculators_depth(self.top)
        return trained or Eagle3Config.num_assistant_tokens
