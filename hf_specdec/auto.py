"""`AutoDrafter`: from a published checkpoint to a drafter that is bound to its target."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .checkpoints.checkpoint import Checkpoint, open_checkpoint
from .checkpoints.detection import (
    DRAFT_MODEL,
    EAGLE3,
    MTP,
    P_EAGLE,
    check_family,
    drafter_tensors,
)
from .checkpoints.dialects import (
    Decision,
    read_eagle3,
    read_peagle,
    refuse_masks,
)
from .checkpoints.tensors import plain_weight
from .config import DrafterConfig, Eagle3Config, PEagleConfig
from .drafters.base import Drafter, registered_drafters
from .drafters.draft_model import DraftModelDrafter, read_draft_model
from .drafters.eagle3 import Eagle3Drafter
from .drafters.mtp import MtpDrafter, read_mtp
from .drafters.peagle import PEagleDrafter
from .patching.hidden_states import device_of_last_layer

logger = logging.getLogger(__name__)

# How the families of published checkpoints are read, and what runs them.
_READERS = {
    EAGLE3: (read_eagle3, Eagle3Drafter),
    P_EAGLE: (read_peagle, PEagleDrafter),
    MTP: (read_mtp, MtpDrafter),
    DRAFT_MODEL: (read_draft_model, DraftModelDrafter),
}


class CheckpointReading(NamedTuple):
    """What a checkpoint was found to be.

    Attributes:
        family: class that runs it.
        config: its configuration in normal form.
        decisions: how what the checkpoint leaves open was settled; empty for our own form.
    """

    family: type[Drafter]
    config: DrafterConfig
    decisions: tuple[Decision, ...]


def read_checkpoint(
    checkpoint: Checkpoint, target: PreTrainedConfig | None = None, overrides: Mapping[str, Any] | None = None
) -> CheckpointReading:
    """Recognise a checkpoint, bring its configuration into normal form, and check its tensors against that.

    Args:
        checkpoint: what was published.
        target: the target's configuration, if there is a target.
        overrides: readings that the caller insists on, by their keywords in `AutoDrafter.from_pretrained`.

    Raises:
        ValueError: a family that is not supported, no known dialect, or contradictions, each named.
    """
    found = read_config(checkpoint, target, overrides)
    with checkpoint.building():
        found.family.check_checkpoint(checkpoint, found.config)
    return found


def read_config(
    checkpoint: Checkpoint, target: PreTrainedConfig | None = None, overrides: Mapping[str, Any] | None = None
) -> CheckpointReading:
    """As `read_checkpoint`, without comparing tensors with what the configuration asks for."""
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    _check_rope(given)
    family = registered_drafters().get(checkpoint.config.get("model_type"))
    with checkpoint.building():
        if family is None:
            text = target.get_text_config() if target is not None else None
            kind = check_family(checkpoint.name, checkpoint.config, checkpoint.tensors, text, given)
            read, family = _READERS[kind]
            reading = read(checkpoint, text, given)
            found = CheckpointReading(family, reading.config, reading.decisions)
        else:
            found = _read_own(checkpoint, family, given)
    found.config.name_or_path = checkpoint.name
    return found


def _check_rope(given: Mapping[str, Any]) -> None:
    rope = given.get("rope_parameters")
    if rope is None:
        return
    if not isinstance(rope, Mapping) or not {"rope_type", "rope_theta"} <= rope.keys():
        raise ValueError(
            f"rope_parameters is {rope!r}; expected the whole of them as transformers has them, such as "
            '{"rope_type": "default", "rope_theta": 10000.0}.'
        )
    if "rope_theta" in given:
        raise ValueError("rope_theta and rope_parameters are both given; expected one of them.")


def _read_own(checkpoint: Checkpoint, family: type[Drafter], given: Mapping[str, Any]) -> CheckpointReading:
    """Our normal form: complete, so the only decisions are the caller's."""
    settings, config_class = dict(checkpoint.config), family.config_class
    if issubclass(config_class, Eagle3Config) and not issubclass(config_class, PEagleConfig):
        refuse_masks(checkpoint.name, given)
    for keyword, field in (("share_embedding", "own_embedding"), ("share_head", "own_head")):
        if given.get(keyword) is False and not settings.get(field, True):
            raise ValueError(f"{keyword} is False, but {checkpoint.name} has none of its own to use instead.")
    for name, value in given.items():
        if name == "rope_theta":
            settings["rope_parameters"] = settings.get("rope_parameters", {}) | {name: float(value)}
        elif name not in ("share_embedding", "share_head"):
            if not hasattr(config_class, name):
                raise ValueError(f"{checkpoint.name} is a {config_class.family} drafter: it has no {name}.")
            settings[name] = value
    decisions = tuple(Decision(name, value, "given by the caller") for name, value in given.items())
    return CheckpointReading(family, config_class.from_dict(settings), decisions)


class AutoDrafter:
    """Loads a drafter of any supported family and dialect; see `from_pretrained`."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        target: PreTrainedModel,
        *,
        num_assistant_tokens: int | None = None,
        draft_probs: bool | str = "auto",
        engine: str = "auto",
        verification: str = "token",
        compile: bool = True,
        revision: str | None = None,
        subfolder: str = "",
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
        dtype: str | torch.dtype | None = None,
        device_map: Any = None,
        aux_hidden_state_layer_ids: list[int] | None = None,
        norm_before_residual: bool | None = None,
        norm_output: bool | None = None,
        final_norm: bool | None = None,
        rope_theta: float | None = None,
        rope_parameters: dict[str, Any] | None = None,
        share_embedding: bool | None = None,
        share_head: bool | None = None,
        parallel_drafting: bool | None = None,
        mask_token_id: int | None = None,
        hidden_first: bool | None = None,
        norm_offset: bool | None = None,
        zero_first_embedding: bool | None = None,
        chaining: str | None = None,
    ) -> Drafter:
        """Load a drafter as published, bound to `target`, in eval mode.

        Args:
            pretrained_model_name_or_path: folder, or repository on the Hub. The target's own for its MTP modules, of
                whose checkpoint only their tensors are read, and only the shards that hold them are fetched.
            target: the model that is to be sped up.
            num_assistant_tokens: draft tokens a round (K); the checkpoint's own if None.
            draft_probs, engine, verification: see `Drafter.configure`.
            compile: `compile_rounds` of `Drafter.configure`.
            revision, subfolder, token, cache_dir, local_files_only, force_download: where on the Hub, as in
                `PreTrainedModel.from_pretrained`.
            dtype: the target's if None.
            device_map: the device of the target's last layer if None.
            taps: boundaries to tap; boundary b is the stream that enters layer b, or leaves the last for b = n.
            norm_before_residual, norm_output, final_norm: see `Eagle3Config`; `norm_output` also `MtpConfig`.
            rope_theta: base of the draft layers' RoPE.
            rope_parameters: all of the draft layers' RoPE, `{"rope_type": ..., "rope_theta": ..., ...}`.
            share_embedding, share_head: True to use the target's, False to use the checkpoint's own. None: the
                checkpoint's own if it has one that differs from the target's.
            parallel_drafting: True to draft all tokens of a round in one pass, False one after the other; by default
                what the checkpoint was trained for.
            mask_token_id: the token that stands in parallel drafting where there is no token yet.
            hidden_first, norm_offset, zero_first_embedding, chaining: see `MtpConfig`.

        Raises:
            OSError: no such repository, no access, or a file is missing.
            ValueError: not a drafter that can be run, not a drafter for this target, or damaged files.
            TypeError: an unknown keyword, or a target that is no model.
        """
        if not isinstance(target, nn.Module):
            raise TypeError(f"target is {target!r}; expected the model that is to be sped up.")
        overrides = {
            "aux_hidden_state_layer_ids": aux_hidden_state_layer_ids,
            "norm_before_residual": norm_before_residual,
            "norm_output": norm_output,
            "final_norm": final_norm,
            "rope_theta": rope_theta,
            "rope_parameters": rope_parameters,
            "share_embedding": share_embedding,
            "share_head": share_head,
            "parallel_drafting": parallel_drafting,
            "mask_token_id": mask_token_id,
            "hidden_first": hidden_first,
            "norm_offset": norm_offset,
            "zero_first_embedding": zero_first_embedding,
            "chaining": chaining,
        }
        checkpoint = open_checkpoint(
            pretrained_model_name_or_path,
            subfolder=subfolder,
            revision=revision,
            select=drafter_tensors(overrides, target.config.get_text_config()),
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            force_download=force_download,
        )
        found = read_checkpoint(checkpoint, target.config, overrides)
        drafter = found.family.load_checkpoint(
            checkpoint,
            found.config,
            dtype=target.dtype if dtype is None else dtype,
            device_map=_device_map_of(target) if device_map is None else device_map,
            use_safetensors=checkpoint.uses_safetensors,
        )
        drafter.config.name_or_path = checkpoint.name
        share_with_target(drafter, target, share_embedding, share_head)
        drafter.bind(target)
        drafter.configure(num_assistant_tokens, draft_probs, engine, verification, compile)
        _log(checkpoint.name, found)
        return drafter.eval()


def _device_map_of(target: PreTrainedModel) -> dict[str, torch.device] | None:
    device = device_of_last_layer(target)
    return None if device.type == "cpu" else {"": device}


def share_with_target(
    drafter: Drafter, target: PreTrainedModel, share_embedding: bool | None, share_head: bool | None
) -> None:
    """Drop the drafter's own embeddings or heads where they are copies of the target's or the caller says so."""
    pairs = (
        ("embed_tokens", "own_embedding", target.get_input_embeddings(), share_embedding),
        ("lm_head", "own_head", target.get_output_embeddings(), share_head),
    )
    for attribute, field, theirs, share in pairs:
        owners = [module for module in drafter.sharing_modules if getattr(module, attribute, None) is not None]
        if not owners or share is False:
            continue
        if share or all(_same_weight(getattr(module, attribute), theirs) for module in owners):
            for module in owners:
                setattr(module, attribute, None)
            setattr(drafter.config, field, False)


def _same_weight(own: nn.Module, theirs: nn.Module | None) -> bool:
    weight = getattr(theirs, "weight", None)
    if weight is None or weight.shape != own.weight.shape or weight.device.type == "meta":
        return False
    return torch.equal(own.weight, plain_weight(weight).to(own.weight))


def _log(name: str, found: CheckpointReading) -> None:
    """One record a load with every decision, and one warning if a decision may be wrong."""
    if found.decisions:
        logger.info(f"{name} ({found.config.dialect}): " + "; ".join(map(str, found.decisions)))
    doubtful = [decision for decision in found.decisions if decision.doubtful]
    if doubtful:
        logger.warning(
            f"{name} leaves open how it is to be read: {'; '.join(map(str, doubtful))}. If few drafts are accepted, "
            "run `hf-specdec inspect --self-check` on it and its target, and pass what that finds by keyword "
            f"({', '.join(decision.name for decision in doubtful)})."
        )
