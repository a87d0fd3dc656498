"""Untrained drafters of every family, with shapes derived from a target."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec.config import (
    DFlashConfig,
    DraftModelConfig,
    DSparkConfig,
    Eagle3Config,
    MtpConfig,
    Pard2Config,
    PEagleConfig,
    default_aux_layer_ids,
    default_block_layer_ids,
    mtp_block_settings,
)
from hf_specdec.drafters import (
    DFlashDrafter,
    DraftModelDrafter,
    DSparkDrafter,
    Eagle3Drafter,
    MtpDrafter,
    Pard2Drafter,
    PEagleDrafter,
)
from hf_specdec.drafters.cached import CachedDrafter
from hf_specdec.drafters.draft_layers import DraftLayersDrafter
from hf_specdec.modules.hidden_states import decoder_layers

_ADAMW = {"optimizer": "adamw", "lr": 1e-3}
_TOKEN_BY_TOKEN = {"step_decay": 0.9, "depth_ratio": 1.0, "survival_floor": 1.0, "round_floor": 1.0, **_ADAMW}
_AT_MASKS = {
    **_ADAMW,
    "mask_token_id": None,
    "num_steps": 8,
    "step_decay": 0.9,
    "depth_ratio": 0.8,
    "survival_floor": 0.2,
    "round_floor": 1.0,
}
_LAYERS = {"draft_vocab_size": 16384, "intermediate_size": None, "key_value_heads": None, "init_from": None}
_EAGLE = {**_LAYERS, "fc_norm": True, "norm_output": True}
_BLOCKS = {
    **_LAYERS,
    "optimizer": "muon",
    "lr": 5e-3,
    "aux_layers": None,
    "mask_token_id": None,
    "num_steps": 7,
    "anchors": 64,
    "step_decay": 0.78,  # exp(-1 / 4), of blocks of 7 or 8 in DFlash's paper and in DeepSpec
    "survival_floor": 0.2,
    "replay_share": 0.0,
    "short_share": 0.25,
}
# Options that differ between families, with their defaults, by family.
DEFAULTS = {
    "eagle3": {"layers": 1, "num_steps": 7, **_EAGLE, **_TOKEN_BY_TOKEN},
    "p-eagle": {"layers": 4, **_EAGLE, **_AT_MASKS},
    "pard": {"layers": 4, **_AT_MASKS},
    "pard2": {"layers": 4, **_AT_MASKS},
    "dflash": {"layers": 3, **_BLOCKS},
    "dspark": {"layers": 3, "markov_rank": 64, **_BLOCKS},
    "mtp": {"layers": 3, "num_steps": 3, "intermediate_size": None, "norm_output": True, **_TOKEN_BY_TOKEN},
}
MASK_SCALE = 0.02
# Entries of a configuration that describe the files of its model, not its layers.
NOT_INHERITED = ("quantization_config", "dtype", "architectures", "_name_or_path", "_model_name_or_path")


def new_drafter(
    args: argparse.Namespace, target: PreTrainedModel, d2t: torch.Tensor, mask_token_id: int | None
) -> CachedDrafter:
    """An untrained drafter, bound to `target`. `d2t` `[V_d]` int64 is the draft vocabulary; `mask_token_id` is None for
    a drafter that drafts one token a pass."""
    name = args.target_name or target.config.name_or_path
    if args.family in ("pard", "pard2"):
        drafter = _new_pard(args, target, mask_token_id, name)
    elif args.family == "mtp":
        drafter = _new_mtp(args, target, name)
    else:
        drafter = _new_with_layers(args, target, d2t, mask_token_id, name)
    drafter.bind(target)
    return drafter


def _new_with_layers(
    args: argparse.Namespace, target: PreTrainedModel, d2t: torch.Tensor, mask_token_id: int | None, name: str
) -> DraftLayersDrafter:
    """EAGLE-3, P-EAGLE, DFlash or DSpark with layers in the shapes of the target's; it shares embedding and head.

    All layers of blocks see the whole block, and DSpark's Markov head adds zeros at first.
    """
    text, count = target.config.get_text_config(), len(decoder_layers(target))
    settings = {
        "vocab_size": text.vocab_size,
        "draft_vocab_size": len(d2t),
        "hidden_size": text.hidden_size,
        "target_hidden_size": text.hidden_size,
        "intermediate_size": args.intermediate_size or text.intermediate_size,
        "num_hidden_layers": args.layers,
        "num_attention_heads": text.num_attention_heads,
        "num_key_value_heads": args.key_value_heads or text.num_key_value_heads,
        "head_dim": getattr(text, "head_dim", None),
        "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
        "max_position_embeddings": text.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta(text)},
        "own_embedding": False,
        "own_head": False,
        "target_name_or_path": name,
    }
    if args.family in ("dflash", "dspark"):
        settings |= {"aux_hidden_state_layer_ids": default_block_layer_ids(count, args.aux_layers or args.layers)}
    else:
        settings |= {"aux_hidden_state_layer_ids": default_aux_layer_ids(count), "fc_norm": args.fc_norm}
        settings |= {"norm_output": args.norm_output}
    if mask_token_id is not None:
        settings |= {"mask_token_id": mask_token_id}
    if args.family == "dflash":
        drafter = DFlashDrafter(DFlashConfig(**settings, block_size=args.num_steps + 1))
    elif args.family == "dspark":
        settings |= {"block_size": args.num_steps, "markov_rank": args.markov_rank, "confidence_head": True}
        drafter = DSparkDrafter(DSparkConfig(**settings))
        drafter.markov_head.markov_w2.weight.data.zero_()
    elif mask_token_id is None:
        drafter = Eagle3Drafter(Eagle3Config(**settings))
    else:
        drafter = PEagleDrafter(PEagleConfig(**settings, num_assistant_tokens=args.num_steps))
        drafter.mask_hidden.data.normal_(std=MASK_SCALE)
    if drafter.d2t is not None:
        drafter.d2t.copy_(d2t)
    drafter.to(target.device)
    _scale_like_final_norm(drafter.norm, target)
    return drafter


def _new_mtp(args: argparse.Namespace, target: PreTrainedModel, name: str) -> MtpDrafter:
    """Modules of one layer each, of the class of the target's layers; embedding and head are shared with the target.

    Raises:
        ValueError: MTP modules do not support the target's layers, or `--intermediate-size` is given and the size of
            their MLPs is not `intermediate_size` alone.
    """
    text = target.config.get_text_config()
    block = {key: value for key, value in mtp_block_settings(text, args.layers).items() if key not in NOT_INHERITED}
    if args.intermediate_size is not None:
        if "intermediate_size" not in block or "moe_intermediate_size" in block:
            raise ValueError(
                f"--intermediate-size is {args.intermediate_size}, but layers of {text.model_type} have no MLPs whose "
                "size is intermediate_size alone; leave it out."
            )
        block["intermediate_size"] = args.intermediate_size
    settings = {"norm_output": args.norm_output, "num_assistant_tokens": args.num_steps, "target_name_or_path": name}
    drafter = MtpDrafter(MtpConfig.for_target(text, block, **settings)).to(target.device)
    for frame in drafter.frames:
        _scale_like_final_norm(frame.final_norm, target)
    return drafter


@torch.no_grad()
def _scale_like_final_norm(norm: nn.Module, target: PreTrainedModel) -> None:
    """Initialize `norm` with the weight of the target's final norm, since the shared head was trained with it."""
    final_norm = getattr(target.get_decoder(), "norm", None)
    if type(final_norm).__name__.endswith("RMSNorm"):
        ones = torch.ones(1, len(norm.weight), dtype=target.dtype, device=target.device)
        norm.weight.copy_(final_norm(ones)[0])


def _new_pard(args: argparse.Namespace, target: PreTrainedModel, mask_token_id: int, name: str) -> DraftModelDrafter:
    """A draft model initialized with copies of some of the target's layers, and of its embedding, norm and head.

    PARD-2's projection begins at zero, so it begins as PARD. It reads the last hidden state and those of three layers,
    as far apart as in the published drafters.
    """
    text, count = target.config.get_text_config(), len(decoder_layers(target))
    kept = spread_layers(count, args.layers)
    settings = {
        "model": thinned_config(target, kept),
        "vocab_size": text.vocab_size,
        "parallel_drafting": True,
        "mask_token_id": mask_token_id,
        "num_assistant_tokens": args.num_steps,
        "target_name_or_path": name,
    }
    if args.family == "pard":
        drafter = DraftModelDrafter(DraftModelConfig(**settings))
    else:
        ids = dict.fromkeys([-1, *(-max(part * count // 4, 1) for part in (1, 2, 3))])
        settings |= {"hidden_state_ids": list(ids), "hidden_state_scale": 1.0, "target_hidden_size": text.hidden_size}
        drafter = Pard2Drafter(Pard2Config(**settings))
        drafter.target_proj.weight.data.zero_()
    source = {}
    for key, tensor in target.get_decoder().state_dict().items():
        place, _, rest = key.removeprefix("layers.").partition(".")
        if not key.startswith("layers."):
            source[key] = tensor
        elif int(place) in kept:
            source[f"layers.{kept.index(int(place))}.{rest}"] = tensor
    drafter.model.get_decoder().load_state_dict(source)
    drafter.model.get_output_embeddings().load_state_dict(target.get_output_embeddings().state_dict())
    return drafter.to(target.device)


@torch.no_grad()
def start_from(drafter: DraftLayersDrafter, trained: DraftLayersDrafter) -> None:
    """Initialize `drafter` with the weights of `trained`, which may have fewer layers or MLPs of other widths.

    A narrower MLP keeps the units with the largest weights. The outputs of layers and of units of MLPs that `trained`
    lacks begin at zero, so the first draft token is that of `trained`. The hidden state of mask tokens is copied if
    `trained` has one. EAGLE-3 and P-EAGLE begin from one another, DFlash and DSpark each from its own kind.

    Raises:
        ValueError: the families, the mask tokens, the draft vocabularies of Markov heads or the shapes of other tensors
            differ.
    """
    if type(drafter) is not type(trained) and not (_is_eagle(drafter) and _is_eagle(trained)):
        raise ValueError(
            f"--init-from is a {type(trained).__name__}, but a {type(drafter).__name__} is to be trained; expected one "
            "of the same family, or of eagle3 and p-eagle for one of these."
        )
    masks = trained.config.mask_token_id, drafter.config.mask_token_id
    is_parallel = None not in masks
    if is_parallel and masks[0] != masks[1]:
        raise ValueError(
            f"--init-from was trained with mask token {masks[0]}, but the new drafter has {masks[1]}; expected the "
            "same one. Pass --mask-token-id."
        )
    d2ts = [one.d2t for one in (drafter, trained) if one.d2t is not None]
    if hasattr(drafter, "markov_head") and len(d2ts) == 2 and not torch.equal(*d2ts):
        raise ValueError(
            "--init-from has a Markov head for another draft vocabulary than the new drafter's; expected the same one."
        )
    source = trained.state_dict()
    for index, layer in enumerate(drafter.layers):
        if index >= len(trained.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            continue
        mlp, own_mlp = trained.layers[index].mlp, layer.mlp
        parts = (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight.T)
        size = torch.stack([part.float().norm(dim=1) for part in parts]).prod(dim=0)
        units = size.topk(min(drafter.config.intermediate_size, len(size))).indices.sort().values
        added = torch.zeros_like(own_mlp.down_proj.weight[:, len(units) :])
        for name, part in zip(("gate_proj", "up_proj", "down_proj"), parts, strict=True):
            rest = added.T if name == "down_proj" else getattr(own_mlp, name).weight[len(units) :]
            widened = torch.cat([part[units], rest])
            source[f"layers.{index}.mlp.{name}.weight"] = widened.T if name == "down_proj" else widened
    own = drafter.state_dict()
    for name, tensor in own.items():
        if name == "d2t" or _layer_of(name) >= len(trained.layers) or (name == "mask_hidden" and not is_parallel):
            continue
        if name.startswith("confidence_head.") and not trained.config.confidence_head:
            continue
        if name not in source or source[name].shape != tensor.shape:
            found = list(source[name].shape) if name in source else "nothing"
            raise ValueError(
                f"--init-from has {found} for {name}, but the new drafter has {list(tensor.shape)} there; expected "
                "the same options as it was trained with, but for more --layers and another --intermediate-size."
            )
        tensor.copy_(source[name])


def _is_eagle(drafter: CachedDrafter) -> bool:
    return isinstance(drafter, (Eagle3Drafter, PEagleDrafter))


def _layer_of(name: str) -> int:
    """Index of the layer that the tensor `name` is part of; -1 for tensors outside of layers."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "layers" else -1


def spread_layers(count: int, kept: int) -> list[int]:
    """Indices of `kept` of `count` layers, evenly spaced, with the first and the last; `ValueError` for other sizes."""
    if not 1 <= kept <= count:
        raise ValueError(f"--layers is {kept}; expected 1 to the target's {count}, some of which are copied.")
    return [round(index * (count - 1) / max(kept - 1, 1)) for index in range(kept)]


def thinned_config(target: PreTrainedModel, kept: list[int]) -> dict:
    """The target's configuration with the layers `kept` only; raises `ValueError` if it states another number."""
    config = target.config.get_text_config().to_dict()
    count = config.get("num_hidden_layers")
    if count != len(decoder_layers(target)):
        raise ValueError(
            f"The layers of {type(target).__name__} cannot be copied into a smaller model: it has "
            f"{len(decoder_layers(target))}, but its configuration says num_hidden_layers = {count}."
        )
    by_layer = {
        key: [value[index] for index in kept]
        for key, value in config.items()
        if isinstance(value, list) and len(value) == count
    }
    config = {key: value for key, value in config.items() if key not in NOT_INHERITED}
    return {**config, **by_layer, "num_hidden_layers": len(kept)}


def rope_theta(text) -> float:
    """The target's RoPE base; the one of its full-attention layers if layer types differ."""
    parameters = text.rope_parameters or {}
    parameters = parameters.get("full_attention", parameters)
    return parameters.get("rope_theta", 10000.0)


def choose_mask_token(counts: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> int:
    """The token with the highest id that occurs in no document, by `counts` `[V]`, a special token if possible. Raises
    `ValueError` if every token occurs."""
    unused = (counts == 0).nonzero()[:, 0].tolist()
    if not unused:
        raise ValueError("Every token occurs in the training data; give one that may stand for masks: --mask-token-id.")
    added = getattr(tokenizer, "added_tokens_decoder", {})
    reserved = {token for token, entry in added.items() if entry.special} - {tokenizer.eos_token_id}
    return max(reserved.intersection(unused) or unused)
