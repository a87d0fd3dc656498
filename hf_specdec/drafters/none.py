"""The static engine without a drafter: each round generates one token."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from ..config import DrafterConfig
from ..kernels.types import Proposal, VerificationResult
from ..state import DecodeState
from .base import Drafter
from .target_checks import generating_model


class NoDrafter(Drafter):
    """Drafts nothing: K is 0, and a round is one decoding step of `target` on the static engine.

    For targets that have no drafter, and to compare with. It is not registered, since it is neither saved nor loaded.

    Args:
        target: to generate with.
        batch_invariant, kv_cache_dtype: see `Drafter.configure`.
    """

    packs_prompts = True

    def __init__(self, target: PreTrainedModel, batch_invariant: bool = False, kv_cache_dtype: str = "auto"):
        super().__init__(DrafterConfig(vocab_size=target.config.get_text_config().vocab_size))
        self.configure(
            draft_probs=False, engine="static", batch_invariant=batch_invariant, kv_cache_dtype=kv_cache_dtype
        )
        self.bind(target)

    @property
    def device(self) -> torch.device:
        return self._device

    def num_draft_tokens(self, requested: int | str | None, is_bulk: bool = False) -> int:
        return 0

    def bind(self, target: PreTrainedModel) -> None:
        target = generating_model(target)
        self._target_config, self._device = target.config, target.device

    def propose(
        self, state: DecodeState, aux_hidden_states: torch.Tensor | None, result: VerificationResult
    ) -> Proposal:
        return no_drafts(state)


def no_drafts(state: DecodeState) -> Proposal:
    """The proposal of a round without drafts."""
    return Proposal(state.tokens.new_empty(len(state.tokens), 0), None)
