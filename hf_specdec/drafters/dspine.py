"""DSpine (Tencent): DFlash whose tokens of a block tell the next one what they may be, and a walk over candidates."""

from __future__ import annotations

import math

import torch
from torch import nn

from ..config import DSpineConfig
from .dflash2 import widened
from .layers import Attend
from .walking import Places, WalkingDrafter


def _root_mean_square(values: torch.Tensor) -> torch.Tensor:
    """Of the last dimension, which is kept; by operations that batch-invariant calls know."""
    return values.square().mean(-1, keepdim=True).sqrt()


class AdjacentInjection(nn.Module):
    """Adds to the hidden state of a token what the one before it in the block says, after each layer.

    With h `[H]` the hidden state after layer l, r its features and p those of the token before, `[R]` both, it is

        h + |h| / sqrt(H) * writes_l(sigmoid(receiver_gate(r) + predecessor_gate(p) + bias) * message(p))

    Features of h are sqrt(R) * readouts_l(h) / |readouts_l(h)|. Those of a token that is known are its code instead.
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
        """Hidden states `[..., H]`, given their features and those of the tokens before, `[..., R]`."""
        gate = torch.sigmoid(self.receiver_gate(features) + self.predecessor_gate(before) + self.bias)
        size = _root_mean_square(widened(hidden))
        return hidden + size.to(hidden.dtype) * self.writes[layer](gate * self.message(before))


class DSpineDrafter(WalkingDrafter):
    """DSpine drafter: one pass over a block as DFlash's, with an injection after each layer, then a walk.

    The candidates of a draft token are the most likely ones by the head. It is drawn from them by their logits after
    the last injection was made anew, with the code of the draft token before it; all other tokens have probability 0.
    """

    config_class = DSpineConfig
    read_once = (*WalkingDrafter.read_once, "injection.")
    _keys_to_ignore_on_load_unexpected = [*WalkingDrafter._keys_to_ignore_on_load_unexpected, r"^transfer_ready$"]

    def __init__(self, config: DSpineConfig):
        super().__init__(config)
        self.injection = AdjacentInjection(config)
        self.transfer_codes = nn.Parameter(torch.empty(config.vocab_size, config.transfer_rank))
        nn.init.normal_(self.transfer_codes, std=config.transfer_rank**-0.5)
        self.post_init()

    @property
    def read_by_draft(self) -> tuple[str, ...]:
        # Of codes and head few rows are read by a step.
        last = len(self.layers) - 1
        return "injection.message.", "injection.predecessor_gate.", f"injection.writes.{last}."

    def run(
        self, context: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend, block_length: int
    ) -> torch.Tensor:
        """As of DFlash; inputs of the head, and after them hidden states before the last injection, `[B, n, 2 H]`."""
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

    def follow(
        self, tokens: torch.Tensor, places: Places, memory: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden, features, weights = places.read
        refined = self.injection(hidden[..., None, :], features[..., None, :], self._codes(tokens), -1)
        return widened((weights @ self.norm(refined).mT).mT) * self.config.logit_scale, None

    def _codes(self, tokens: torch.Tensor) -> torch.Tensor:
        """Features `[..., R]` of known tokens."""
        return math.sqrt(self.config.transfer_rank) * self.transfer_codes[tokens]
