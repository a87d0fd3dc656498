"""P-EAGLE checkpoints of every dialect, read into the normal form `PEagleConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from ..config import Eagle3Config, PEagleConfig
from .checkpoint import Checkpoint
from .decisions import NormalizedConfig
from .dialects import MASK_TOKEN_KEYS, SPECFORGE, SPECULATORS, speculators_depth, stated_mask_token
from .draft_layers import layer_config_class
from .eagle3 import Eagle3Reader
from .limits import check_mask_token

# Trained depth of speculators' and Automodel's drafters whose config.json has no `num_depths`.
PEAGLE_DEPTH = 8


def read_peagle(
    checkpoint: Checkpoint, target: PreTrainedConfig | None, overrides: Mapping[str, Any]
) -> NormalizedConfig:
    """Read a P-EAGLE checkpoint of any dialect; arguments and errors as of `read_eagle3`."""
    return _PEagleReader(checkpoint, target, overrides).read()


class _PEagleReader(Eagle3Reader):
    """Reads what EAGLE-3 checkpoints have, and the mask token and hidden state of positions without a token."""

    config_class = PEagleConfig

    def _drafting(self) -> dict[str, Any]:
        self.parallel = self._decide("parallel_drafting", True, "the checkpoint is a P-EAGLE drafter")
        return {"parallel_drafting": self.parallel, "mask_token_id": self._mask_token()}

    def _mask_token(self) -> int | None:
        stated = stated_mask_token(self.top)
        if stated is not None:
            key, value = stated
            return self._checked_token(self._decide("mask_token_id", value, f"{key} of config.json"))
        if "mask_token_id" in self.decisions.overrides:
            return self._checked_token(self._decide("mask_token_id", None, ""))
        if not self.parallel:
            return self._decide("mask_token_id", None, "not in config.json, and not needed to draft token by token")
        raise ValueError(
            f"{self.name} is a P-EAGLE drafter, but its config.json names no mask token; looked for "
            f"{', '.join(MASK_TOKEN_KEYS)}. Pass `mask_token_id=` with the id that it was trained with, or "
            "`parallel_drafting=False`."
        )

    def _checked_token(self, token: Any) -> int:
        vocab_size = self.layer.get("vocab_size") or layer_config_class(self.layer, self.name)().vocab_size
        return check_mask_token(token, vocab_size, self.name)

    def _sizes(self, layers: dict[str, Any], layer_ids: list[int] | None) -> dict[str, Any]:
        sizes = super()._sizes(layers, layer_ids)
        mask = self.tensors.get("mask_hidden")
        if mask is None:
            return sizes
        width = (
            sizes["num_aux_hidden_states"] * sizes["target_hidden_size"]
            if sizes["num_aux_hidden_states"]
            else layers["hidden_size"]
        )
        return sizes | {"mask_hidden_shape": [1] * (len(mask.shape) - 1) + [width]}

    def _trained_rope(self, rope: dict[str, Any]) -> dict[str, Any]:
        if self.dialect != SPECFORGE or rope["rope_type"] == "default":
            return rope
        plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        rule = f"SpecForge's P-EAGLE trainer leaves out the {rope['rope_type']} scaling that config.json has"
        return self._decide("rope_parameters", plain, rule, doubtful=True)

    def _fc_norm(self) -> bool:
        used = super()._fc_norm()
        if used and self.dialect == SPECULATORS:
            rule = "fc_norm.0.weight is in the checkpoint, and its trainer applies it; vLLM leaves it out for peagle"
            return self._decide("fc_norm", used, rule)
        return used

    def _default_norm_before_residual(self) -> bool:
        return self._decide("norm_before_residual", False, "not in config.json; the default of P-EAGLE's publishers")

    def _norm_output(self) -> bool:
        stated = bool(self._flag("norm_output")) and self.dialect != SPECFORGE
        rule = "config.json" if stated else "the stream before norm, as in EAGLE-3"
        return self._decide("norm_output", stated, f"{rule}; only used when drafting token by token")

    def _final_norm(self) -> bool:
        return self._decide("final_norm", True, "P-EAGLE has a norm before its head")

    def _num_assistant_tokens(self) -> int:
        default = PEAGLE_DEPTH if self.parallel else Eagle3Config.num_assistant_tokens
        return speculators_depth(self.top) or self._setting("num_depths") or default
