"""DFlash-2 (z-lab): DFlash with convolutions in its layers, and a selector that walks over candidates."""

from __future__ import annotations

import torch
from torch import nn

from ..config import DFlash2Config
from .walking import Places, WalkingDrafter


class CandidateSelector(nn.Module):
    """Scores the candidates of a draft token, given the token before it.

    With h the input of the draft head, p the token before and c a candidate, it adds to the logit of c

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
        """What is added to the logits of `candidates` `[..., k]` int64, in float32 or wider: by the `tokens` `[...]`
        int64 before, and `hidden` `[..., r]`, `hidden_projection` of what the draft head reads."""
        context = widened(self.predecessor_codebook[tokens] * hidden)
        return (context[..., None, :] * self.successor_codebook[candidates]).sum(dim=-1)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """In float32 or wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


class DFlash2Drafter(WalkingDrafter):
    """DFlash-2 drafter: one pass over a block as DFlash's, then a walk over candidates, left to right.

    The candidates of a draft token are the most likely ones by the head. It is drawn from them by their logits and what
    the selector adds given the token before it; all other tokens have probability 0 in what verification reads.
    """

    config_class = DFlash2Config
    # Of the codebooks few rows are read.
    read_once = (*WalkingDrafter.read_once, "candidate_selector.hidden_projection.")

    def __init__(self, config: DFlash2Config):
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)
        self.post_init()

    def read(self, normed: torch.Tensor, candidates: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        return (self.candidate_selector.hidden_projection(normed),)

    def follow(
        self, tokens: torch.Tensor, places: Places, memory: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        added = self.candidate_selector(tokens, places.read[0][..., None, :], places.candidates[..., None, :])
        return places.logits[..., None, :] + added, None
