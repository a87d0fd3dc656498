"""Names of tensors, and the check that a checkpoint holds exactly the tensors that its configuration describes."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..config import DrafterConfig
from .checkpoint import Checkpoint, config_errors
from .weight_files import check_not_quantised

logger = logging.getLogger(__name__)

# `midlayer.` is SafeAILab's and SpecForge's name of EAGLE-3's first layer. `model.` is a prefix of NeMo, `draft_model.`
# of SpecForge's trainer, and `encoder.` of transformers. ModelOpt's export from Megatron numbers `midlayer.` and, as
# SGLang, calls the first norm of later layers `hidden_norm`. `aux_norm_*` are SGLang's older names of `fc_norm`.
# SpecForge wrote `logit_head.` before DSpark's `markov_head.`; ModelOpt writes neither. z-lab's DFlash-2 model has its
# codebooks in embeddings, its files do not.
KEY_MAPPING = {
    r"^draft_model\.": "",
    r"^model\.": "",
    r"^midlayer\.(\d+\.)": r"layers.\1",
    r"^midlayer\.": "layers.0.",
    r"^(layers\.[1-9]\d*)\.hidden_norm\.": r"\1.input_layernorm.",
    r"^aux_norm_low\.": "fc_norm.0.",
    r"^aux_norm_mid\.": "fc_norm.1.",
    r"^aux_norm_high\.": "fc_norm.2.",
    r"^encoder\.fc\.": "fc.",
    r"^encoder\.output_norm_enc\.": "hidden_norm.",
    r"^logit_head\.": "",
    r"^markov_w1\.": "markov_head.markov_w1.",
    r"^markov_w2\.": "markov_head.markov_w2.",
    r"^gate_proj\.": "markov_head.gate_proj.",
    r"^joint_proj\.": "markov_head.joint_proj.",
    r"^confidence_proj\.": "confidence_head.proj.",
    r"^candidate_selector\.predecessor_codebook\.weight$": "candidate_selector.predecessor_codebook",
    r"^candidate_selector\.successor_codebook\.weight$": "candidate_selector.successor_codebook",
}

# Tensors that drafting does not use: the training mask of the draft vocabulary, RoPE tables, the trainer's copy of the
# target, and a confidence head that does not read the Markov head.
_IGNORED = re.compile(
    r"t2d|(.*\.)?rotary_emb\.inv_freq|verifier_.*|confidence_head\.proj\.(weight|bias)|transfer_ready"
)


def rename(name: str, mapping: Mapping[str, str] = KEY_MAPPING) -> str:
    """A tensor's name in the normal form, by a `mapping` of regular expressions."""
    for pattern, replacement in mapping.items():
        name = re.sub(pattern, replacement, name)
    return name


def is_plain(weight: torch.Tensor) -> bool:
    """Whether the memory of `weight` holds its values: it is neither sharded (`DTensor`) nor quantised."""
    return not isinstance(weight, DTensor) and type(weight).dequantize is torch.Tensor.dequantize


def plain_weight(weight: torch.Tensor) -> torch.Tensor:
    """`weight` as a plain tensor: gathered if sharded, dequantised if quantised, else `weight` itself.

    Gathering is a collective operation, so all ranks must call this.
    """
    if isinstance(weight, DTensor):
        weight = weight.full_tensor()
    return weight if is_plain(weight) else weight.dequantize()


def check_tensors(checkpoint: Checkpoint, family: type[nn.Module], config: DrafterConfig) -> None:
    """Compare names and shapes of the files' tensors with those of a `family` model with this `config`.

    No weights but `d2t` are loaded. Raises `ValueError` for differences, which it names, for quantised tensors that
    `with_scales` does not read, and for a `d2t` without offsets.
    """
    with config_errors(checkpoint.name), torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in family(config).state_dict().items()}
    names = [rename(name, family.key_mapping) for name in checkpoint.tensors]
    stored = dict(zip(names, (tensor.shape for tensor in checkpoint.tensors.values()), strict=True))
    check_not_quantised(stored.keys() - expected.keys(), checkpoint.name)
    if len(stored) < len(checkpoint.tensors):
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{checkpoint.name} has several tensors that are {repeated} by their names; expected one.")
    checkpoint.check_differences(
        missing=expected.keys() - stored.keys(),
        unexpected=[name for name in stored.keys() - expected.keys() if not _is_ignored(name, config)],
        mismatched=[
            (name, stored[name], shape) for name, shape in expected.items() if stored.get(name, shape) != shape
        ],
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
    """Raise `ValueError` unless `d2t` has offsets: draft token t is the target's token t + d2t[t]."""
    (name,) = (name for name in checkpoint.tensors if rename(name) == "d2t")
    table = checkpoint.only([name]).read()[name].to(torch.int64)
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
            f"target's {config.vocab_size}. If that is not intended, the table was left out when it was exported."
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
