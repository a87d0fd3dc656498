"""Names of tensors in the normal form, and the check of the draft vocabulary."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

from ..config import DrafterConfig
from .checkpoint import Checkpoint

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
    r"^(markov_w1|markov_w2|gate_proj|joint_proj)\.": r"markov_head.\1.",
    r"^confidence_proj\.": "confidence_head.proj.",
    r"^(candidate_selector\.(predecessor|successor)_codebook)\.weight$": r"\1",
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


def is_ignored(name: str, config: DrafterConfig) -> bool:
    """Whether drafting does not use the tensor called `name` in the normal form."""
    if name == "norm.weight":
        return not getattr(config, "final_norm", True)
    if name == "d2t":
        return config.draft_vocab_size == config.vocab_size
    return _IGNORED.fullmatch(name) is not None


def check_draft_vocabulary(checkpoint: Checkpoint, config: DrafterConfig) -> None:
    """Raise `ValueError` if there is a `d2t` without offsets: draft token t is the target's token t + d2t[t]."""
    name = next((name for name in checkpoint.tensors if rename(name) == "d2t"), None)
    if name is None:
        return
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
