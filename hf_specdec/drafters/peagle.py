"""P-EAGLE (arXiv 2602.01469): EAGLE-3 that drafts all K tokens in one pass."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from ..config import PEagleConfig
from .eagle3 import Eagle3Drafter


class PEagleDrafter(Eagle3Drafter):
    """P-EAGLE drafter.

    The first pass of a round is EAGLE-3's, with K - 1 more slots that have no token and no hidden states of the target
    yet: they embed the mask token and read a learned hidden state, `mask_hidden`, which passes through `fc` as
    auxiliary hidden states do. With `config.parallel_drafting` False the same weights draft token by token, as EAGLE-3
    does.
    """

    config_class = PEagleConfig

    def __init__(self, config: PEagleConfig):
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.zeros(config.mask_hidden_shape))

    def bind(self, target: PreTrainedModel) -> None:
        super().bind(target)
        with torch.inference_mode(False), torch.no_grad():
            self.mask_state = self.project_mask()

    def project_mask(self) -> torch.Tensor:
        """`mask_hidden` as the layers read it, `[H]`."""
        return self.combine_hidden_states(self.mask_hidden.view(-1))

    def next_unroll_inputs(
        self, step: int, tokens: torch.Tensor, hidden: torch.Tensor, feedback: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.config.parallel_drafting:
            return super().next_unroll_inputs(step, tokens, hidden, feedback)
        if step > 0:  # These are mask tokens already.
            return tokens, hidden
        # Compiled layers compute wrong gradients of inputs that overlap in memory (seen with torch 2.13).
        mask_state = self.project_mask().expand_as(feedback).contiguous()
        return torch.full_like(tokens, self.config.mask_token_id), mask_state
