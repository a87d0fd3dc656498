"""Dialects of published checkpoints of EAGLE-3, P-EAGLE and block drafters: the publisher whose layout config.json has.

`read_eagle.py` and `read_blocks.py` read every dialect into the normal form of the family. The rules follow the
publishers' own code: SafeAILab/EAGLE (cnets.py), sgl-project/SpecForge (llama3_eagle.py, peagle.py),
vllm-project/speculators (models/eagle3, models/peagle), NVIDIA/Model-Optimizer (export/plugins/hf_spec_export.py),
NVIDIA-NeMo/Automodel (speculative/eagle), z-lab/dflash, deepseek-ai/DeepSpec (modeling/dspark), hao-ai-lab/JetSpec
(models/draft_head.py) and vLLM's readers of them (llama_eagle3.py, qwen3_dflash.py, qwen3_dspark.py,
configs/speculators/algos.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .detection import architectures, block_settings, eagle_settings

SAFEAILAB, SPECFORGE, SPECULATORS, MODELOPT = "SafeAILab", "SpecForge", "speculators", "NVIDIA ModelOpt"
AMAZON, AUTOMODEL = "Amazon", "NeMo Automodel"
ZLAB, DEEPSPEC, TRANSFORMERS, JETSPEC = "z-lab", "DeepSpec", "transformers", "JetSpec"

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


# Publishers by their architectures, in lower case.
_ARCHITECTURES = {
    "peagledraftmodel": SPECFORGE,
    "qwen3eagle3model": DEEPSPEC,
    "gemma4eagle3model": DEEPSPEC,
    "llamaeagle3draftmodel": AUTOMODEL,
    "llamapeagledraftmodel": AUTOMODEL,
    "museglimmerassistantmodel": TRANSFORMERS,
    "qwen3dsparkmodel": DEEPSPEC,
    "dsparkdraftmodel": SPECFORGE,
    "dominodraftmodel": SPECFORGE,
    "dspinedraftmodel": SPECFORGE,
}


def _known_publisher(config: Mapping[str, Any]) -> str | None:
    if config.get("speculators_model_type") is not None:
        return SPECULATORS
    return next((_ARCHITECTURES[name] for name in architectures(config).split() if name in _ARCHITECTURES), None)


def detect_dialect(config: Mapping[str, Any]) -> str:
    """The publisher whose layout the `config.json` of an EAGLE-3 or P-EAGLE drafter has."""
    known, nested = _known_publisher(config), eagle_settings(config)
    if known is not None:
        return known
    if "parallel_drafting" in config:
        return AUTOMODEL
    if config.get("ptd_token_id") is not None:
        return AMAZON
    if _MODELOPT_KEYS & set(nested):
        return MODELOPT
    return SPECFORGE if nested or "eagle3" in architectures(config) else SAFEAILAB


def detect_block_dialect(config: Mapping[str, Any]) -> str:
    """The publisher whose layout the `config.json` of a block drafter has. SpecForge exports DFlash in z-lab's."""
    known = _known_publisher(config)
    if known is not None:
        return known
    if config.get("model_type") == "muse_glimmer_assistant":
        return TRANSFORMERS
    stated = block_settings(config)
    if "causal_head" in stated:
        return JETSPEC
    return MODELOPT if {"projector_type", "shift_label", "use_swa"} & stated.keys() else ZLAB


# Keys of the mask token in config.json, in the order of vLLM's look-up (llm_base_proposer.py).
MASK_TOKEN_KEYS = (
    "dflash_config.mask_token_id",
    "mask_token_id",
    "dspark_noise_token_id",
    "pard_token",
    "ptd_token_id",
)


def stated_mask_token(config: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The first of `MASK_TOKEN_KEYS` in `config.json`, and its value; None if it has none."""
    for path in MASK_TOKEN_KEYS:
        value: Any = config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            return path, value
    return None


def speculators_depth(config: Mapping[str, Any]) -> int | None:
    """Draft tokens a round in speculators' `config.json`; None for other publishers."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return methods[0].get("speculative_tokens")


def speculators_target(config: Mapping[str, Any]) -> str | None:
    """Name of the target in speculators' `config.json`; None for other publishers."""
    return (config.get("speculators_config") or {}).get("verifier", {}).get("name_or_path")
