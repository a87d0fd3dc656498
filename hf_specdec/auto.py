"""`AutoDrafter`: from a published checkpoint to a drafter that is bound to its target."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .checkpoints.checkpoint import Checkpoint, HubOptions, config_errors, open_checkpoint
from .checkpoints.detection import Published
from .checkpoints.interpretation import Decision, Decisions, Overrides, check_rope_overrides, overridden, without_none
from .checkpoints.tensors import plain_weight
from .config import DrafterConfig, DraftLayersConfig, check_type, check_types
from .drafters.base import Drafter
from .drafters.registry import find_family, has_no_weights, needed_by, registered_drafters
from .drafters.target_checks import check_target
from .modules.hidden_states import device_of_last_layer
from .modules.patch import on_host
from .modules.weights import tensor_weight

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)


class NormalizedCheckpoint(NamedTuple):
    """The class that runs a checkpoint, its configuration in normal form, and the decisions about what it leaves open.
    For a checkpoint in normal form these are the caller's overrides only."""

    family: type[Drafter]
    config: DrafterConfig
    decisions: tuple[Decision, ...]


class CheckpointKeywords(HubOptions, Overrides, total=False):
    """Keywords of `AutoDrafter.from_pretrained` about the checkpoint: where it is, and how it is interpreted."""


_TYPES = get_type_hints(CheckpointKeywords) | {"compile": bool, "device_map": str | int | torch.device | Mapping}


def read_checkpoint(
    checkpoint: Checkpoint, target: PreTrainedConfig | None = None, overrides: Overrides | None = None
) -> NormalizedCheckpoint:
    """Detect the family of a checkpoint, convert its configuration to normal form, and check its tensors against that.
    Raises `ValueError` for checkpoints that are unsupported or contradict themselves."""
    found = read_config(checkpoint, target, overrides)
    with config_errors(checkpoint.name):
        found.family.check_checkpoint(checkpoint, found.config)
    return found


def find_checkpoint(
    repo: str | Path, target: PreTrainedConfig | None, overrides: Overrides | None = None, **hub: Any
) -> Checkpoint:
    """`open_checkpoint` with the tensors that a drafter for `target` needs; unsupported families are refused."""
    select = needed_by(target, overrides or {})
    return open_checkpoint(repo, select=select, has_no_weights=has_no_weights, **hub)


def read_config(
    checkpoint: Checkpoint, target: PreTrainedConfig | None = None, overrides: Overrides | None = None
) -> NormalizedCheckpoint:
    """`read_checkpoint` without the check of tensors."""
    given = without_none(overrides)
    check_rope_overrides(given)
    drafter = registered_drafters().get(checkpoint.config.get("model_type"))
    with config_errors(checkpoint.name):
        if drafter is not None:
            drafter.config_class.check_keywords(given, checkpoint.name)
            found = _read_normal_form(checkpoint, drafter, given)
        else:
            text = target.get_text_config() if target is not None else None
            published = Published(checkpoint.name, checkpoint.config, checkpoint.tensors or (), text, given)
            family = find_family(published)
            family.drafter.config_class.check_keywords(given, checkpoint.name)
            decisions = Decisions(given)
            config = family.read(checkpoint, text, decisions)
            found = NormalizedCheckpoint(family.drafter, config, tuple(decisions.made))
    found.config.name_or_path = checkpoint.name
    return found


def _read_normal_form(checkpoint: Checkpoint, family: type[Drafter], given: Mapping[str, Any]) -> NormalizedCheckpoint:
    """Read a checkpoint that `save_pretrained` wrote: it is complete, so only overrides are decisions."""
    for keyword, field in (("share_embedding", "own_embedding"), ("share_head", "own_head")):
        if given.get(keyword) is False and not checkpoint.config.get(field, True):
            raise ValueError(f"{keyword} is False, but {checkpoint.name} has none of its own to use instead.")
    decisions = tuple(Decision(name, value, "given by the caller") for name, value in given.items())
    config = family.config_class.from_dict(overridden(checkpoint.config, given))
    return NormalizedCheckpoint(family, config, decisions)


class AutoDrafter:
    """Loads a drafter of any supported family and dialect; see `from_pretrained`."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        target: PreTrainedModel,
        *,
        num_assistant_tokens: int | str | None = None,
        draft_probs: bool | str = "auto",
        engine: str = "auto",
        verification: str = "token",
        compile: bool = False,
        batch_invariant: bool = False,
        draft_window_size: int | str | None = None,
        kv_cache_dtype: str = "auto",
        tree: int | str | None = None,
        dtype: str | torch.dtype | None = None,
        device_map: Any = None,
        **keywords: Unpack[CheckpointKeywords],
    ) -> Drafter:
        """Load a published drafter, bound to `target`, in eval mode.

        Args:
            pretrained_model_name_or_path: folder, or repository on the Hub. For MTP modules the target's own; then only
                the tensors of these are read, and only the shards that hold them are downloaded.
            target: the model whose generation is to be accelerated.
            num_assistant_tokens: draft tokens a round (K), or `"auto"`; None for the checkpoint's own.
            draft_probs, engine, verification, compile, batch_invariant, draft_window_size, kv_cache_dtype, tree:
                see `Drafter.configure`, where `compile` is `compile_rounds`.
            dtype: None for the target's, where quantised layers stay as they are in the files. With a dtype they are
                dequantised to it; draft models are loaded by transformers.
            device_map: None for the device of the target's last layer.
            revision, subfolder, variant, token, cache_dir, local_files_only, force_download: the checkpoint's location
                on the Hub, as in `PreTrainedModel.from_pretrained`.
            aux_hidden_state_layer_ids: layer ids of the auxiliary hidden states. Id b is the residual stream that
                enters layer b of the target (`hidden_states[b]` in transformers); id n, of n layers, leaves the last.
            norm_before_residual, norm_output, final_norm: see `Eagle3Config`; `norm_output` also `MtpConfig`.
            rope_theta: base of the draft layers' RoPE.
            rope_parameters: all RoPE parameters of the draft layers, `{"rope_type": ..., "rope_theta": ..., ...}`.
            share_embedding, share_head: True for the target's, False for the checkpoint's own. None: the checkpoint's
                own if it has one that differs from the target's.
            parallel_drafting: True to draft all tokens of a round in one pass, False to draft token by token; None: as
                the checkpoint was trained.
            mask_token_id: the token that parallel drafting embeds at positions without a token.
            hidden_first, norm_offset, zero_first_embedding, chaining: see `MtpConfig`.
            anchor_first, causal: see `DFlashConfig`.

        Raises:
            OSError: the folder or repository does not exist, is not accessible, or lacks files of a checkpoint.
            ValueError: the drafter is unsupported, damaged, or was not made for the target.
            TypeError: an unknown keyword, or a target that is no model.
        """
        unknown = sorted(keywords.keys() - _TYPES.keys())
        if unknown:
            raise TypeError(f"AutoDrafter.from_pretrained() got an unexpected keyword argument {unknown[0]!r}")
        check_type("pretrained_model_name_or_path", pretrained_model_name_or_path, str | Path)
        check_types(without_none({"compile": compile, "device_map": device_map, **keywords}), _TYPES)
        hub = {name: value for name, value in keywords.items() if name in HubOptions.__annotations__}
        overrides = {name: value for name, value in keywords.items() if name in Overrides.__annotations__}
        check_target(target)
        device = device_of_last_layer(target)
        if device_map is None and device.type != "cpu":
            device_map = {"": device}
        _check_places(device_map)
        with on_host(), torch.inference_mode(False):  # whatever the caller's: the drafter outlives the call
            checkpoint = find_checkpoint(pretrained_model_name_or_path, target.config, overrides, **hub)
            found = read_checkpoint(checkpoint, target.config, overrides)
            if dtype is not None:
                found.config.stored_layers = None
            options = {"dtype": target.dtype if dtype is None else dtype, "device_map": device_map}
            drafter = found.family.load_checkpoint(checkpoint, found.config, **options)
            drafter.config.name_or_path = drafter.name_or_path = checkpoint.name
            share_with_target(drafter, target, overrides.get("share_embedding"), overrides.get("share_head"))
            drafter.bind(target)
        drafter.configure(num_assistant_tokens, draft_probs, engine, verification, compile, batch_invariant)
        drafter.configure(draft_window_size=draft_window_size, kv_cache_dtype=kv_cache_dtype, tree=tree)
        _log(checkpoint.name, found)
        return drafter.eval()


def _check_places(device_map: Any) -> None:
    """Raise `ValueError` if `device_map` names a device that is not there or has no memory."""
    places = device_map.values() if isinstance(device_map, Mapping) else [device_map]
    numbers = [one for one in places if isinstance(one, int)]
    if not places or "meta" in map(str, places) or (numbers and max(numbers) >= torch.accelerator.device_count()):
        raise ValueError(
            f"device_map, by default the device of the target's last layer, is {device_map!r}, where weights have no "
            "values; expected devices with memory. Load the target's weights, or pass another device_map."
        )


def share_with_target(
    drafter: Drafter, target: PreTrainedModel, share_embedding: bool | None, share_head: bool | None
) -> None:
    """Drop the drafter's own embeddings and heads if they equal the target's, or if the caller wants them shared."""
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
    weight = tensor_weight(theirs)
    if weight is None or weight.shape != own.weight.shape or weight.device.type == "meta":
        return False
    return torch.equal(own.weight, plain_weight(weight).to(own.weight))


def _log(name: str, found: NormalizedCheckpoint) -> None:
    """Log all decisions in one record, and warn once if some may be wrong."""
    if found.decisions:
        logger.info(f"{name} ({found.config.dialect}): " + "; ".join(map(str, found.decisions)))
    doubtful = [decision for decision in found.decisions if decision.doubtful]
    if doubtful:
        keywords = [decision.name for decision in doubtful if decision.name in Overrides.__annotations__]
        passed = f", and pass what it reports by keyword ({', '.join(keywords)})" if keywords else ""
        check = f"run `hf-specdec inspect {name} --target TARGET --self-check`{passed}"
        advice = check if isinstance(found.config, DraftLayersConfig) else "state it in config.json"
        logger.warning(
            f"{name} leaves open how it is to be interpreted: {'; '.join(map(str, doubtful))}. If few draft tokens are "
            f"accepted, {advice}."
        )
