"""Suffix decoding (arXiv 2411.04975): drafts the tokens that followed earlier occurrences of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ..config import SuffixConfig
from ..kernels.types import LONGEST_MATCH, NO_TOKEN, Proposal, VerificationResult
from ..ops import suffix_drafts
from ..state import DecodeState, upload
from .none import WeightlessDrafter, no_drafts


class SuffixDrafter(WeightlessDrafter):
    """Drafts without a model, by `ops.suffix_drafts`: from the prompt, the output so far, and earlier outputs.

    The rule is that of ArcticInference's and vLLM's suffix decoding, for a chain. Every round searches for occurrences
    on the device; there is no suffix tree. Earlier outputs are the latest `history_size` tokens of all calls with this
    drafter, whatever their prompts. Binding it to another target, or to one of another vocabulary, clears them.

    Args:
        target: the target to bind to; or a `SuffixConfig`, for a drafter that is bound later.
        num_assistant_tokens, history_size: see `SuffixConfig`; unused if one is given.
    """

    config_class = SuffixConfig
    varies_num_draft_tokens = True

    def __init__(
        self,
        target: PreTrainedModel | SuffixConfig,
        *,
        num_assistant_tokens: int = SuffixConfig.num_assistant_tokens,
        history_size: int = SuffixConfig.history_size,
    ):
        is_config = isinstance(target, SuffixConfig)
        own = SuffixConfig(num_assistant_tokens=num_assistant_tokens, history_size=history_size)
        super().__init__(target if is_config else own)
        self._history: torch.Tensor | None = None
        if not is_config:
            self.bind(target)

    def _fit(self, target: PreTrainedModel) -> None:
        super()._fit(target)
        is_same = self._target_config is target.config and self._bound_vocab_size == self.config.vocab_size
        empty = torch.full((self.config.history_size,), NO_TOKEN, device=self.device)
        self._history = self._history.to(self.device) if is_same else empty

    def observe(self, prompt: torch.Tensor, tokens: Sequence[int] | torch.Tensor) -> None:
        history = self._history
        if not len(tokens) or not len(history):
            return
        # The end of the prompt lets the beginning of the output be found.
        parts = upload(prompt[-LONGEST_MATCH:], history), upload(tokens, history), history.new_full((1,), NO_TOKEN)
        text = torch.cat(parts)[-len(history) :]
        history.copy_(torch.cat([history[len(text) :], text]))

    def propose(
        self, state: DecodeState, aux_hidden_states: torch.Tensor | None, result: VerificationResult
    ) -> Proposal:
        if state.num_draft_tokens == 0:
            return no_drafts(state)
        return Proposal(suffix_drafts(state.tokens, state.lengths, self._history, state.num_draft_tokens), None)
