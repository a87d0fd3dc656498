"""Parts of MTP modules: decoder layers of the target's kind, and the norms and projection around each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers import MODEL_MAPPING, AutoConfig, PreTrainedModel

from ..cache.layer_kinds import Use, first_reason, plug_ins
from ..config import MtpConfig
from ..host.caches import CACHE_NAMES, cache_parameter
from ..host.modeling import LlamaRMSNorm, Qwen3NextRMSNorm, step3p7_text_model
from ..host.parts import any_of
from ..patching.attention import ATTENTION_NAME
from ..patching.layer_kernels import norms_side_by_side
from ..patching.support import configured_layers


def build_decoder(settings: Mapping[str, Any]) -> PreTrainedModel:
    """transformers' decoder with the settings `settings`, without its embedding and final norm. Raises `ValueError`
    unless transformers has such a model, it computes the RoPE of its layers, and its layers can run here."""

    def unfit(why: str) -> ValueError:
        model_type = settings.get("model_type")
        return ValueError(f"Layers of model_type {model_type!r} cannot be those of MTP modules: {why}")

    try:
        block = AutoConfig.for_model(**settings)
    except Exception as error:  # a configuration may raise anything
        found = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise unfit(f"there is no configuration of one layer for each ({found}).") from error
    if type(block) in MODEL_MAPPING:
        decoder_class = MODEL_MAPPING[type(block)]
    elif block.model_type == "step3p5":  # Only the model with a vision tower around it is in the mapping.
        decoder_class = step3p7_text_model()
    else:
        raise unfit(f"transformers {transformers.__version__} has no decoder layers of that model_type.")
    decoder = decoder_class(block)
    if getattr(decoder, "rotary_emb", None) is None or not hasattr(decoder, "layers"):
        name = decoder_class.__name__
        raise unfit(f"{name} has no rotary_emb, or no layers; expected one that embeds positions for all its layers.")
    layer = type(decoder.layers[0])
    if cache_parameter(layer.forward) is None:
        raise unfit(f"{layer.__name__}.forward has no parameter {any_of(CACHE_NAMES)}.")
    use = Use.REPEATED_POSITIONS
    reason = first_reason(part.why_not_used(decoder, use) for part in plug_ins())
    if reason is not None or (reason := configured_layers(decoder).why_not(use)) is not None:
        raise unfit(f"they have {reason}.")
    decoder.embed_tokens = decoder.norm = None
    decoder.set_attn_implementation(ATTENTION_NAME)
    return decoder


class MtpFrame(nn.Module):
    """A module without its decoder layer: norms, projection, and its own embedding and head if it has any."""

    def __init__(self, config: MtpConfig):
        super().__init__()
        width, norm = config.hidden_size, Qwen3NextRMSNorm if config.norm_offset else LlamaRMSNorm
        self.hidden_first = config.hidden_first
        self.embedding_norm = norm(width, eps=config.rms_norm_eps)
        self.hidden_norm = norm(width, eps=config.rms_norm_eps)
        self.projection = nn.Linear(2 * width, width, bias=False)
        self.final_norm = norm(width, eps=config.rms_norm_eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False) if config.own_head else None

    def forward(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Input of the decoder layer, `[B, n, H]`, from embeddings and hidden states `[B, n, H]`."""
        pairs = (self.embedding_norm, embeds), (self.hidden_norm, hidden)
        first, second = pairs[::-1] if self.hidden_first else pairs
        return self.projection(norms_side_by_side(*first, *second))
