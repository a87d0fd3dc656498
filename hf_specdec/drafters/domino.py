"""Domino (arXiv 2605.29707): DFlash with a recurrent correction, which makes a draft depend on all drafts before it."""

from __future__ import annotations

import torch
from torch import nn

from ..config import DominoConfig
from ..patching.linear import linear
from .walking import Places, Step, WalkingDrafter, project


class PrefixGRU(nn.Module):
    """One step of a gated recurrent unit without biases. Its tensors are named as in `torch.nn.GRU`.

    x is the input and h the state; r | z | n' = weight_ih x and r' | z' | n'' = weight_hh h;

        r = sigmoid(r + r'), z = sigmoid(z + z'), n = tanh(n' + r n''), and h becomes (1 - z) n + z h
    """

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * hidden_size, input_size))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * hidden_size, hidden_size))
        for weight in (self.weight_ih_l0, self.weight_hh_l0):
            nn.init.uniform_(weight, -(hidden_size**-0.5), hidden_size**-0.5)

    def forward(self, inputs: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        """The state `[..., g]` after `inputs` `[..., H]`; `state` is None for zeros."""
        reset, update, new = linear(inputs, self.weight_ih_l0).chunk(3, dim=-1)
        if state is None:
            return (1 - update.sigmoid()) * new.tanh()
        of_reset, of_update, of_new = linear(state, self.weight_hh_l0).chunk(3, dim=-1)
        update = (update + of_update).sigmoid()
        new = (new + (reset + of_reset).sigmoid() * of_new).tanh()
        return (1 - update) * new + update * state


class DominoDrafter(WalkingDrafter):
    """Domino drafter: DFlash's pass over a block, then one small step for each draft token, left to right.

    z is the input of the draft head, and h the state of a GRU that has read the embeddings of the anchor and of the
    draft tokens before. `embed_proj([z | h])` is added to the logits of a draft token, except for the first
    `config.pure_draft_prefix_len`.
    """

    config_class = DominoConfig
    remembers = True
    read_by_draft = ("prefix_gru.", "embed_proj.")

    def __init__(self, config: DominoConfig):
        super().__init__(config)
        width, size = config.hidden_size, config.gru_hidden_dim
        self.prefix_gru = PrefixGRU(width, size)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + size, config.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(config.emb_dim, config.draft_vocab_size, bias=False),
        )
        self.post_init()

    def follow(self, tokens: torch.Tensor, places: Places, memory: torch.Tensor | None) -> Step:
        state = self.prefix_gru(self.embed(tokens[..., 0, :])[..., None, :, :], memory)
        scores = places.logits[..., None, :]
        if places.first < self.config.pure_draft_prefix_len:
            return scores.expand(*tokens.shape, -1), state
        hidden = places.read[0][..., None, :].expand(*tokens.shape, -1)
        inner = self.embed_proj[1](self.embed_proj[0](torch.cat([hidden, state], dim=-1)))
        return scores + project(inner, self.embed_proj[2], places.candidates), state
