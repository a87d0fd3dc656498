"""DSpark (arXiv 2607.05147): DFlash with a Markov head, which makes a draft depend on the token before it."""

from __future__ import annotations

import torch
from torch import nn

from ..config import DSparkConfig
from .dflash import DFlashDrafter
from .walking import Places, Step, WalkingDrafter, project


class MarkovHead(nn.Module):
    """Adds a bias that depends on the token before to the logits of a draft token.

    e = w1[token before], of width r, and h is the input of the draft head. The bias is

        vanilla    w2 e
        gated      w2 (sigmoid(gate_proj [h | e]) * e)
        rnn        w2 tanh(o), where [a | c | o] = joint_proj [s | e | h]
                   and s becomes sigmoid(a) s + (1 - sigmoid(a)) tanh(c); s is 0 before the block's first token
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        rank, self.kind = config.markov_rank, config.markov_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def features(self, tokens: torch.Tensor, hidden: torch.Tensor, memory: torch.Tensor | None) -> Step:
        """The input of `markov_w2`, whose output is the bias, and the next s.

        Args:
            tokens: `[...]` int64, the token before each draft, in the target's vocabulary.
            hidden: `[..., H]`, the input of the draft head.
            memory: `[..., r]`, s; None before the block's first token, and unless the head is `"rnn"`.

        Returns:
            `[..., r]`, and s `[..., r]` or None.
        """
        embeds = self.markov_w1(tokens)
        if self.kind == "vanilla":
            return embeds, None
        if self.kind == "gated":
            gate = self.gate_proj(torch.cat([hidden, embeds], dim=-1)).sigmoid()
            return gate * embeds, None
        if memory is None:
            memory = torch.zeros_like(embeds)
        keep, new, output = self.joint_proj(torch.cat([memory, embeds, hidden], dim=-1)).chunk(3, dim=-1)
        keep = keep.sigmoid()
        return output.tanh(), keep * memory + (1 - keep) * new.tanh()


class DSparkDrafter(WalkingDrafter):
    """DSpark drafter: DFlash's pass over a block, then one small step for each draft token, left to right.

    The state of an `"rnn"` head runs through all tokens of a block, as in speculators' trainer. That includes an anchor
    that drafts no token; its token before is the anchor itself.
    """

    config_class = DSparkConfig
    read_by_draft = ("markov_head.markov_w2.", "markov_head.gate_proj.", "markov_head.joint_proj.")

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.markov_head = MarkovHead(config)
        self.confidence_head = None
        if config.confidence_head:  # under its published name
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(config.hidden_size + config.markov_rank, 1)})
        self.post_init()

    def num_read(self, num_draft_tokens: int) -> int:
        return self.num_masks(num_draft_tokens) if self.remembers else super().num_read(num_draft_tokens)

    @property
    def remembers(self) -> bool:
        return self.config.markov_type == "rnn"

    def begin(self, anchors: torch.Tensor, normed: torch.Tensor) -> Step:
        if self.num_read(1) == 1:
            return normed, None
        memory = self.markov_head.features(anchors, normed[..., :1, :], None)[1]
        return normed[..., 1:, :], memory[..., None, :]

    def follow(self, tokens: torch.Tensor, places: Places, memory: torch.Tensor | None) -> Step:
        hidden = places.read[0][..., None, :].expand(*tokens.shape, -1)
        features, memory = self.markov_head.features(tokens, hidden, memory)
        return places.logits[..., None, :] + project(features, self.markov_head.markov_w2, places.candidates), memory

    def confidence(self, normed: torch.Tensor, before: torch.Tensor) -> torch.Tensor | None:
        """Logits `[..., K]` of the probability that a draft is accepted if all drafts before it are: `proj [h | e]`
        with h and e of `MarkovHead`. None without the head. Drafting does not read them.

        It takes the arguments of `head_inputs`. Gradients end at the head, so that training it changes no draft.
        """
        if self.confidence_head is None:
            return None
        hidden = self.begin(before[..., :1], normed)[0]
        inputs = torch.cat([hidden, self.markov_head.markov_w1(before)], dim=-1).detach()
        return self.confidence_head["proj"](inputs)[..., 0]

    def head_inputs(self, normed: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed, memory = self.begin(before[..., :1], normed)
        inputs, weight = DFlashDrafter.head_inputs(self, normed, before)
        features = []
        for hidden, token in zip(normed.split(1, dim=-2), before.split(1, dim=-1), strict=True):
            found, memory = self.markov_head.features(token[..., None], hidden[..., None, :], memory)
            features.append(found[..., 0, :])
        inputs = torch.cat([inputs, torch.cat(features, dim=-2)], dim=-1)
        return inputs, torch.cat([weight, self.markov_head.markov_w2.weight], dim=1)
