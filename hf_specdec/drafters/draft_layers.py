"""Drafters with decoder layers of their own that read hidden states of the target."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from .. import ops
from ..checkpoints.checkpoint import Checkpoint
from ..config import DraftLayersConfig
from ..modules.hidden_states import check_aux_hidden_states, decoder_layers
from .base import Reads
from .cached import CachedDrafter
from .layers import rotary_embedding
from .shared_weights import SharedWeight, embed, score


class DraftLayersDrafter(CachedDrafter):
    """Base of EAGLE-3 and DFlash: layers, auxiliary hidden states, and an embedding and head that may be shared.

    A family creates `layers` and then calls `_add_head`.
    """

    config_class = DraftLayersConfig
    layers: nn.ModuleList
    # Prefixes of the names of weights that a round reads once, and of weights that it reads for each draft.
    read_once: tuple[str, ...] = ("fc.", "input_norm.", "fc_norm.", "hidden_norm.")
    read_by_draft: tuple[str, ...] = ()

    def __init__(self, config: DraftLayersConfig):
        super().__init__(config)
        # `[H]`, the hidden state of mask tokens, for which the target has none. None for zeros.
        self.register_buffer("mask_state", None, persistent=False)
        self._layer_ids = (config.use_aux_hidden_state and config.aux_hidden_state_layer_ids) or []
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embedding else None

    def _add_head(self) -> None:
        config, size = self.config, self.config.draft_vocab_size
        self.lm_head = nn.Linear(config.hidden_size, size, bias=False) if config.own_head else None
        self.rotary_emb = rotary_embedding(config)
        # Token t of the draft vocabulary is token t + d2t[t] of the target's.
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.int64) if size < config.vocab_size else None)
        self.post_init()

    @classmethod
    def check_checkpoint(cls, checkpoint: Checkpoint, config: DraftLayersConfig) -> None:
        try:
            rotary = rotary_embedding(config)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"{checkpoint.name} has rope_parameters {config.rope_parameters}, which transformers cannot apply "
                f"({type(error).__name__}: {error}); expected a rope_type that it knows with all that this type needs. "
                "Pass `rope_parameters=`."
            ) from error
        num_angles = rotary.inv_freq.numel()
        if 2 * num_angles != config.head_dim or not bool(rotary.inv_freq.isfinite().all()):
            raise ValueError(
                f"{checkpoint.name} has rope_parameters {config.rope_parameters} and head_dim {config.head_dim}, which "
                f"make {num_angles} angles; expected {config.head_dim / 2:g} finite ones. Pass `rope_parameters=`."
            )
        super().check_checkpoint(checkpoint, config)

    @property
    def reads_last_hidden_state(self) -> bool:
        return not self.config.use_aux_hidden_state

    def _fit(self, target: PreTrainedModel) -> None:
        config, name = self.config, self.title
        layer_ids = config.check_fit(target.config, len(decoder_layers(target)), name)
        target_ids = None if self.d2t is None else torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t
        shared = {}
        if self.embed_tokens is None:
            shared["embedding"] = SharedWeight(target, "embedding", config.hidden_size, name)
        if self.lm_head is None:
            shared["head"] = SharedWeight(target, "head", config.hidden_size, name, rows=target_ids)
        check_aux_hidden_states(target, layer_ids, self.reads_last_hidden_state, config.target_hidden_size, name)
        self._shared_weights = shared
        self.target_ids = target_ids
        self._layer_ids = layer_ids

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings `[..., H]` of `[...]` int64 target tokens."""
        weight = self.embed_tokens.weight if self.embed_tokens is not None else self._shared_weights["embedding"].weight
        return embed(tokens, weight, self.dtype)

    @property
    def logit_scale(self) -> float:
        return self.config.logit_scale

    @property
    def head_weight(self) -> torch.Tensor:
        return self.lm_head.weight if self.lm_head is not None else self._shared_weights["head"].weight

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits `[..., V_d]` of `[..., H]` after the final norm."""
        logits = score(normed, self.head_weight)
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale

    @property
    def num_cached_layers(self) -> int:
        return len(self.layers)

    @property
    def attention_config(self) -> DraftLayersConfig:
        return self.config

    def round_reads(self, num_draft_tokens: int) -> Reads:
        def weights(prefixes: tuple[str, ...]) -> list[torch.Tensor]:
            return [one for name, one in self.named_parameters() if name.startswith(prefixes)]

        passes = self.num_passes(num_draft_tokens)
        each = [*weights(("layers.", "norm.")), self.head_weight]
        return passes, [(1, weights(self.read_once)), (num_draft_tokens, weights(self.read_by_draft)), (passes, each)]

    def gather_hidden_states(self, hidden: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        return ops.gather_rows(hidden, sources, self.mask_state)
