"""Drafters without weights, and `NoDrafter`: the static engine with one token a round."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ..checkpoints.checkpoint import Checkpoint
from ..config import DrafterConfig
from ..kernels.types import Proposal, VerificationResult
from ..state import DecodeState
from .base import Drafter


class WeightlessDrafter(Drafter):
    """A drafter without weights, for any target. Its device is that of its target."""

    packs_prompts = True
    _device: torch.device | None = None

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        return torch.get_default_dtype()  # which transformers saves

    @classmethod
    def load_checkpoint(cls, checkpoint: Checkpoint, config: DrafterConfig, *weights: Any, **options: Any) -> Drafter:
        checkpoint.check_differences(unexpected=checkpoint.tensors)
        return cls(config)

    def _fit(self, target: PreTrainedModel) -> None:
        self._device = target.device
        self.config.vocab_size = self.config.draft_vocab_size = target.config.get_text_config().vocab_size

    def sync_with(self, target: PreTrainedModel, anew: bool = False) -> None:
        super().sync_with(target, anew)
        if self._device != target.device:
            self.bind(target)


class NoDrafter(WeightlessDrafter):
    """Drafts nothing: K is 0, and a round is one decoding step of `target` on the static engine.

    It is for targets without a drafter, and for comparisons. It is neither saved nor loaded, hence not registered.

    Args:
        target: the target to bind to.
        batch_invariant, kv_cache_dtype: see `Drafter.configure`.
    """

    def __init__(self, target: PreTrainedModel, batch_invariant: bool = False, kv_cache_dtype: str = "auto"):
        super().__init__(DrafterConfig())
        self.configure(
            draft_probs=False, engine="static", batch_invariant=batch_invariant, kv_cache_dtype=kv_cache_dtype
        )
        self.bind(target)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("A NoDrafter has nothing to save; NoDrafter(model) makes another one.")

    def num_draft_tokens(self, requested: int | str | None, is_bulk: bool = False) -> int:
        return 0

    def propose(
        self, state: DecodeState, aux_hidden_states: torch.Tensor | None, result: VerificationResult
    ) -> Proposal:
        return no_drafts(state)


def no_drafts(state: DecodeState) -> Proposal:
    return Proposal(state.tokens.new_empty(len(state.tokens), 0), None)
