"""DFlash-2 (z-lab): DFlash with convolutions in its layers and a selector among candidates."""

from __future__ import annotations

import torch
from torch import nn

from ..config import DFlash2Config
from .walking import Places, Step, WalkingDrafter


class CandidateSelector(nn.Module):
    """Scores the candidates of a draft token, given the token before it.

    h is the input of the draft head, p the token before and c a candidate. The selector adds to the logit of c

        < predecessor_codebook[p] * hidden_projection(h), successor_codebook[c] >
    """

    def __init__(self, config: DFlash2Config):
        super().__init__()
        size, rank = config.vocab_size, config.selector_rank
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.empty(size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(size, rank))
        for codebook in (self.predecessor_codebook, self.successor_codebook):
            nn.init.normal_(codebook, std=config.initializer_range)

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """The terms `[..., k]`, float32 or wider, that are added to the logits of `candidates` `[..., k]` int64, given
        the tokens before, `[...]` int64, and `hidden` `[..., r]`, `hidden_projection` of the head's input."""
        context = widened(self.predecessor_codebook[tokens] * hidden)
        return (context[..., None, :] * self.successor_codebook[candidates]).sum(dim=-1)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in float32 or wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class DFlash2Drafter(WalkingDrafter):
    """DFlash-2 drafter: DFlash's pass over a block, then a walk over candidates, left to right.

    The candidates of a draft are the most likely tokens by the head. The draft is drawn from their logits plus the
    selector's terms for the token before it. All other tokens have draft probability 0.
    """

    config_class = DFlash2Config
    # Only a few rows of the codebooks are read.
    read_once = (*WalkingDrafter.read_once, "candidate_selector.hidden_projection.")

    def __init__(self, config: DFlash2Config):
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)
        self.post_init()

    def read(self, normed: torch.Tensor, candidates: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        return (self.candidate_selector.hidden_projection(normed),)

    def follow(self, tokens: torch.Tensor, places: Places, memory: torch.Tensor | None) -> Step:
        added = self.candidate_selector(tokens, places.read[0][..., None, :], places.candidates[..., None, :])
        return places.logits[..., None, :] + added, None
