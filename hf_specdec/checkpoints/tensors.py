"""Names of tensors, and whether a checkpoint holds exactly those that its configuration asks for."""

from __future__ import annotations

import logging
import re

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..config import DrafterConfig
from .checkpoint import Checkpoint

logger = logging.getLogger(__name__)

# `midlayer.` is SafeAILab's and SpecForge's name of the first layer, `model.` a prefix that NeMo writes.
KEY_MAPPING = {r"^model\.": "", r"^midlayer\.": "layers.0."}

# Never read when drafting: the training mask of the draft vocabulary, RoPE tables, the trainer's copy of the target.
_IGNORED = re.compile(r"t2d|(.*\.)?rotary_emb\.inv_freq|verifier_.*")


def rename(name: str) -> str:
    """The normal form's name of a tensor."""
    for pattern, replacement in KEY_MAPPING.items():
        name = re.sub(pattern, replacement, name)
    return name


def is_plain(weight: torch.Tensor) -> bool:
    """Whether all values of `weight` are in its own memory: it is neither split over processes nor quantised."""
    return not isinstance(weight, DTensor) and type(weight).dequantize is torch.Tensor.dequantize


def plain_weight(weight: torch.Tensor) -> torch.Tensor:
    """`weight` for others than the module that it belongs to: gathered if processes share it, dequantised if quantised.

    That is `weight` itself, no copy, where it is ordinary. Gathering is a collective: all processes must call this.
    """
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
    return weight if is_plain(weight) else weight.dequantize()


def check_tensors(checkpoint: Checkpoint, family: type[nn.Module], config: DrafterConfig) -> None:
    """Compare names and shapes of the files with those of a `family` model of this `config`, loading no weights.

    Raises:
        ValueError: naming every tensor that is missing, unexpected or of another shape, or a wrong `d2t`.
    """
    with checkpoint.building(), torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in family(config).state_dict().items()}
    stored = {rename(name): tensor.shape for name, tensor in checkpoint.tensors.items()}
    checkpoint.refuse_tensors(
        missing=expected.keys() - stored.keys(),
        unexpected=[name for name in stored.keys() - expected.keys() if not _is_ignored(name, config)],
        reshaped=[(name, stored[name], shape) for name, shape in expected.items() if stored.get(name, shape) != shape],
    )
    if "d2t" in stored:
        _check_draft_vocabulary(checkpoint, config)


def _is_ignored(name: str, config: DrafterConfig) -> bool:
    if name == "norm.weight":
        return not getattr(config, "final_norm", True)
    if name == "d2t":
        return config.draft_vocab_size == config.vocab_size
    return _IGNORED.fullmatch(name) is not None


def _check_draft_vocabulary(checkpoint: Checkpoint, config: DrafterConfig) -> None:
    """`d2t` holds offsets: token t of the draft vocabulary is token t + d2t[t] of the target's."""
    table = next(checkpoint.read(name) for name in checkpoint.tensors if rename(name) == "d2t").to(torch.int64)
    own = torch.arange(len(table))
    if config.draft_vocab_size == config.vocab_size:
        if bool(table.any()) and not torch.equal(table, own):
            raise ValueError(
                f"d2t of {checkpoint.name} permutes the vocabulary, though draft and target vocabulary have the same "
                f"size {config.vocab_size}; expected no d2t, or the identity."
            )
        return
    if not bool(table.any()):
        logger.warning(
            f"d2t of {checkpoint.name} is all zero, so its draft vocabulary is the first {len(table)} tokens of the "
            f"target's {config.vocab_size}. If that was not meant, the table was forgotten when it was exported."
        )
    tokens = own + table
    if _is_vocabulary(tokens, config.vocab_size):
        return
    if _is_vocabulary(table, config.vocab_size):
        raise ValueError(
            f"d2t of {checkpoint.name} is an absolute table of target tokens; expected offsets, "
            "d2t[t] = target token - t. Subtract torch.arange(len(d2t)) from it."
        )
    raise ValueError(
        f"d2t of {checkpoint.name} is no draft vocabulary: t + d2t[t] must increase strictly from at least 0 to below "
        f"vocab_size {config.vocab_size}; found values from {int(tokens.min())} to {int(tokens.max())}."
    )


def _is_vocabulary(tokens: torch.Tensor, vocab_size: int) -> bool:
    return bool((tokens.diff() > 0).all()) and int(tokens[0]) >= 0 and int(tokens[-1]) < vocab_size
