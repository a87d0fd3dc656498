"""Dialects of published EAGLE-3 and P-EAGLE checkpoints: whose layout a `config.json` has.

`eagle3.py` and `peagle.py` read all of them into the one normal form, `Eagle3Config` and `PEagleConfig`. The rules
follow the publishers' own code: SafeAILab/EAGLE (cnets.py), sgl-project/SpecForge (llama3_eagle.py, peagle.py),
vllm-project/speculators (models/eagle3, models/peagle), NVIDIA/Model-Optimizer (export/plugins/hf_spec_export.py),
NVIDIA-NeMo/Automodel (speculative/eagle) and vLLM's readers of them (llama_eagle3.py, configs/speculators/algos.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .detection import architectures, eagle_settings, speculators_type

SAFEAILAB, SPECFORGE, SPECULATORS, MODELOPT = "SafeAILab", "SpecForge", "speculators", "NVIDIA ModelOpt"
AMAZON, AUTOMODEL = "Amazon", "NeMo Automodel"

# Keys that only ModelOpt's export writes into `eagle_config`.
_MODELOPT_KEYS = {
    "use_input_layernorm_in_first_layer",
    "use_last_layernorm",
    "use_mtp_layernorm",
    "next_layer_regular",
    "parallel_draft_step",
    "norm_before_fc",
    "layer_ids",
}


def detect_dialect(config: Mapping[str, Any]) -> str:
    """The publisher whose layout the `config.json` of an EAGLE-3 or P-EAGLE drafter has."""
    if speculators_type(config) is not None:
        return SPECULATORS
    names, nested = architectures(config), eagle_settings(config)
    if "peagledraftmodel" in names.split():
        return SPECFORGE
    if {"llamaeagle3draftmodel", "llamapeagledraftmodel"} & set(names.split()) or "parallel_drafting" in config:
        return AUTOMODEL
    if config.get("ptd_token_id") is not None:
        return AMAZON
    if _MODELOPT_KEYS & set(nested):
        return MODELOPT
    return SPECFORGE if nested or "eagle3" in names else SAFEAILAB


def speculators_depth(config: Mapping[str, Any]) -> int | None:
    """Draft tokens a round that speculators' `config.json` states; None for a checkpoint of others."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return methods[0].get("speculative_tokens")


def speculators_target(config: Mapping[str, Any]) -> str | None:
    """Name of the target that speculators' `config.json` states; None for a checkpoint of others."""
    return (config.get("speculators_config") or {}).get("verifier", {}).get("name_or_path")
