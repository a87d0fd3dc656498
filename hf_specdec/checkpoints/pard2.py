"""PARD-2 checkpoints, AMD's own form, read into the normal form `Pard2Config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from ..config import Pard2Config
from .checkpoint import PROJECTION_FILE, Checkpoint
from .decisions import Decisions, NormalizedConfig
from .draft_model import read_language_model
from .limits import check_mask_token
from .overrides import check_not_given

# Draft tokens a round of the published figures (AMD-AGI/PARD, `draft_k` of pard2_*_eval.yaml), for drafters trained
# with one more. How many that were, `para_num` in the trainer's settings, is not in the config.json of published ones.
PARD2_DEPTH = 15
# What AMD's code takes where config.json has no scale.
_DEFAULT_SCALE = 0.02

_IDS = "pard2_target_layers"


def read_pard2(
    checkpoint: Checkpoint, target: PreTrainedConfig | None, overrides: Mapping[str, Any]
) -> NormalizedConfig:
    """Read the config.json of a PARD-2 drafter; arguments as of `read_draft_model`.

    Raises:
        ValueError: expected a model that can draft, with a projection of hidden states, a configuration that agrees
            with itself and the projection, and no overrides but `mask_token_id`.
    """
    name, stated = checkpoint.name, checkpoint.config
    decisions = Decisions(overrides)
    check_not_given(overrides.keys() - {"mask_token_id"}, overrides, name, Pard2Config.family)
    model = read_language_model(checkpoint)
    size = model.get_text_config().vocab_size
    token = decisions.decide("mask_token_id", stated.get("pard_token"), "pard_token of config.json")
    ids = stated.get(_IDS)
    if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
        raise ValueError(
            f"{name} is a PARD-2 drafter with {_IDS} {ids!r} in its config.json; expected the indices of the target's "
            "hidden states that it was trained with, such as [-1, -8, -16, -24]. Add them to config.json."
        )
    scale = next((stated[key] for key in ("pard2_scale", "pard_scale", "feat_scale") if key in stated), None)
    if scale is None:
        rule = "not in config.json; AMD's default"
        scale = decisions.decide("hidden_state_scale", _DEFAULT_SCALE, rule, doubtful=True)
    config = Pard2Config(
        model=model.to_dict(),
        vocab_size=size if target is None else target.vocab_size,
        draft_vocab_size=size if target is None else min(size, target.vocab_size),
        mask_token_id=check_mask_token(token, size, name),
        num_assistant_tokens=stated.get("para_num", PARD2_DEPTH),
        hidden_state_ids=ids,
        target_hidden_size=_target_hidden_size(checkpoint, len(ids)),
        hidden_state_scale=float(scale),
        projection_bias=_has_bias(checkpoint),
        dialect="AMD",
    )
    return NormalizedConfig(config, tuple(decisions.made))


def _target_hidden_size(checkpoint: Checkpoint, count: int) -> int:
    """Width of one of the `count` hidden states that the projection reads."""
    weight = checkpoint.tensors.get("target_proj.weight")
    if weight is None or len(weight.shape) != 2:
        raise ValueError(
            f"{checkpoint.name} is a PARD-2 drafter by its config.json, but has no matrix target_proj.weight; expected "
            f"it in {PROJECTION_FILE}."
        )
    total, config = weight.shape[1], checkpoint.config
    stated = config.get("pard2_target_dim", config.get("pard_target_dim", total))
    if stated != total or total % count:
        raise ValueError(
            f"{checkpoint.name} contradicts itself: target_proj.weight reads {total} values, but by config.json there "
            f"are {stated}, of {count} hidden states ({_IDS})."
        )
    return total // count


def _has_bias(checkpoint: Checkpoint) -> bool:
    """Whether the projection has a bias: decided by its tensor, with which config.json must agree if it states one."""
    present, config = "target_proj.bias" in checkpoint.tensors, checkpoint.config
    stated = config.get("pard2_proj_bias", config.get("proj_bias", present))
    if stated != present:
        raise ValueError(
            f"{checkpoint.name} contradicts itself: pard2_proj_bias is {stated!r} by config.json, but its weights have "
            f"{'a' if present else 'no'} tensor target_proj.bias."
        )
    return present
