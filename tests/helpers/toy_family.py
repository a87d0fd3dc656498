"""A family of drafters as another package adds it: the token that most often follows the last one, by a table.

Its checkpoints have a form of their own: `config.json` with `{"bigram": {"tokens": V, "chain": K}}`, and a
tensor `counts` [V, V] of how often a token follows another.
"""

from __future__ import annotations

import torch
from torch import nn

from hf_specdec import Drafter, DrafterConfig, register_drafter
from hf_specdec.kernels.types import Proposal


class BigramConfig(DrafterConfig):
    model_type = "toy_bigram"
    family = "bigram"

    def report(self):
        return {"chain": self.num_assistant_tokens}


def is_bigram(found):
    return "bigram" in found.config


def read_bigram(checkpoint, target, decisions):
    stated = checkpoint.config["bigram"]
    return BigramConfig(vocab_size=stated["tokens"], num_assistant_tokens=stated["chain"], dialect="toys")


@register_drafter(detect=is_bigram, read=read_bigram)
class BigramDrafter(Drafter):
    """Drafts K tokens, each the likeliest after the token before; it keeps nothing, and reads no hidden states."""

    config_class = BigramConfig
    key_mapping = {r"^counts$": "table.weight"}
    varies_num_draft_tokens = True

    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, config.vocab_size)
        self.post_init()

    def bind(self, target):
        self.config.check_fit(target.config, target.config.num_hidden_layers, self.name_or_path)
        self._record_binding(target)

    def propose(self, state, aux_hidden_states, result):
        tokens = [state.tokens.gather(1, (state.lengths - 1)[:, None])]
        for _ in range(state.num_draft_tokens):
            tokens.append(self.table(tokens[-1]).argmax(-1))
        return Proposal(torch.cat(tokens, dim=1)[:, 1:], None)

    def round_reads(self, num_draft_tokens):
        return num_draft_tokens, []  # a row of the table for each draft
