"""DSpine (Tencent): DFlash in which each token of a block sends a message to the next, and a walk over candidates."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..config import DSpineConfig
from .dflash2 import widened
from .layers import Attend
from .walking import Places, Step, WalkingDrafter


def _root_mean_square(values: torch.Tensor) -> torch.Tensor:
    """Over the last dimension, which is kept; from operations that batch-invariant calls replace."""
    return values.square().mean(-1, keepdim=True).sqrt()


class AdjacentInjection(nn.Module):
    """Adds a message from the token before in the block to a token's hidden state, after each layer.

    h `[H]` is the hidden state after layer l, r `[R]` its features, and p `[R]` those of the token before. h becomes

        h + |h| / sqrt(H) * writes_l(sigmoid(receiver_gate(r) + predecessor_gate(p) + bias) * message(p))

    The features of h are sqrt(R) * readouts_l(h) / |readouts_l(h)|. A known token has its code as features.
    """

    def __init__(self, config: DSpineConfig):
        super().__init__()
        width, rank, size = config.hidden_size, config.transfer_rank, config.message_size
        layers = range(config.num_hidden_layers)
        self.readouts = nn.ModuleList([nn.Linear(width, rank, bias=False) for _ in layers])
        self.writes = nn.ModuleList([nn.Linear(size, width, bias=False) for _ in layers])
        self.message = nn.Linear(rank, size, bias=False)
        self.receiver_gate = nn.Linear(rank, size, bias=False)
        self.predecessor_gate = nn.Linear(rank, size, bias=False)
        self.bias = nn.Parameter(torch.zeros(size))

    def features(self, hidden: torch.Tensor, layer: int) -> torch.Tensor:
        """Features `[..., R]` of hidden states `[..., H]` after layer number `layer`."""
        read = widened(self.readouts[layer](hidden))
        return (read / _root_mean_square(read).clamp_min(1e-12)).to(hidden.dtype)

    def forward(self, hidden: torch.Tensor, features: torch.Tensor, before: torch.Tensor, layer: int) -> torch.Tensor:
        """New hidden states `[..., H]`, given `features` of the tokens and of the tokens `before`, `[..., R]` each."""
        gate = torch.sigmoid(self.receiver_gate(features) + self.predecessor_gate(before) + self.bias)
        size = _root_mean_square(widened(hidden))
        return hidden + size.to(hidden.dtype) * self.writes[layer](gate * self.message(before))


class DSpineDrafter(WalkingDrafter):
    """DSpine drafter: DFlash's pass over a block, with an injection after each layer, then a walk over candidates.

    The candidates of a draft are the most likely tokens by the head. For their logits the last injection is computed
    again with the code of the draft before. All other tokens have draft probability 0.
    """

    config_class = DSpineConfig
    read_once = (*WalkingDrafter.read_once, "injection.")

    def __init__(self, config: DSpineConfig):
        super().__init__(config)
        self.injection = AdjacentInjection(config)
        self.transfer_codes = nn.Parameter(torch.empty(config.vocab_size, config.transfer_rank))
        nn.init.normal_(self.transfer_codes, std=config.transfer_rank**-0.5)
        self.post_init()

    @property
    def read_by_draft(self) -> tuple[str, ...]:
        # A step reads only a few rows of the codes and of the head.
        last = len(self.layers) - 1
        return "injection.message.", "injection.predecessor_gate.", f"injection.writes.{last}."

    def run(
        self, context: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend, block_length: int
    ) -> torch.Tensor:
        """As DFlash's, but returns `[B, n, 2 H]`: inputs of the head, then hidden states before the last injection."""
        hidden = before = self.embed(tokens)
        rotary = self.rotary_emb(hidden, positions)
        anchors = self._codes(tokens.unflatten(1, (-1, block_length))[..., :1])
        for index, layer in enumerate(self.layers):
            before = layer(context, hidden, rotary, attend, block_length)
            blocks = before.unflatten(1, (-1, block_length))
            features = self.injection.features(blocks, index)
            known = torch.cat([anchors, features[..., 1:-1, :]], dim=-2)[..., : block_length - 1, :]
            rest = self.injection(blocks[..., 1:, :], features[..., 1:, :], known, index)
            hidden = torch.cat([blocks[..., :1, :], rest], dim=-2).flatten(1, 2)
        return torch.cat([self.norm(hidden), before], dim=-1)

    def read(self, normed: torch.Tensor, candidates: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Hidden states before the last injection, their features, and rows of the head."""
        hidden = normed[..., self.config.hidden_size :]
        return hidden, self.injection.features(hidden, -1), self.head_weight[candidates].to(normed.dtype)

    def follow(self, tokens: torch.Tensor, places: Places, memory: torch.Tensor | None) -> Step:
        hidden, features, weights = places.read
        refined = self.injection(hidden[..., None, :], features[..., None, :], self._codes(tokens), -1)
        return widened((weights @ self.norm(refined).mT).mT) * self.config.logit_scale, None

    def _codes(self, tokens: torch.Tensor) -> torch.Tensor:
        """Features `[..., R]` of known tokens."""
        return math.sqrt(self.config.transfer_rank) * self.transfer_codes[tokens]
