"""EAGLE-3 (arXiv 2503.01840) and P-EAGLE (2602.01469): decoder layers over the target's auxiliary hidden states."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from ..config import Eagle3Config, PEagleConfig
from ..host.modeling import LlamaRMSNorm
from ..kernels.types import Columns
from ..patching.attention import cached_attend
from ..state import DecodeState
from .cached import Outputs
from .draft_layers import DraftLayersDrafter
from .layers import Attend, DraftDecoderLayer


class Eagle3Drafter(DraftLayersDrafter):
    """EAGLE-3 drafter.

    Slot p pairs the embedding of the token at position p + 1 with the target's hidden states at position p, has RoPE
    position p, and predicts the token at position p + 2. After the slots whose hidden states the target has computed,
    every draft token adds a slot that reads the drafter's own previous output instead. The next round overwrites such
    slots with the target's hidden states.
    """

    config_class = Eagle3Config
    shift = 1
    grows_trees = True

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        width, aux_size = config.hidden_size, config.target_hidden_size
        count = config.num_aux_hidden_states if config.use_aux_hidden_state else 0
        self.input_norm = LlamaRMSNorm(count * aux_size, config.rms_norm_eps) if config.norm_before_fc else None
        norms = [LlamaRMSNorm(aux_size, config.rms_norm_eps) for _ in range(count)]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.fc = nn.Linear(count * aux_size, width, bias=config.fc_bias) if config.use_aux_hidden_state else None
        self.layers = nn.ModuleList([DraftDecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps) if config.final_norm else nn.Identity()
        self._add_head()

    @property
    def smallest_window(self) -> int | None:
        config = self.config
        runs_nodes = not config.parallel_drafting and "sliding_attention" in config.layer_types
        return config.sliding_window if runs_nodes else None

    def combine_hidden_states(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states `[..., H]` from `[..., aux_hidden_size]`, concatenated by ascending layer id."""
        aux_hidden_states = aux_hidden_states.to(self.dtype)
        if self.fc is None:
            return aux_hidden_states
        if self.input_norm is not None:
            aux_hidden_states = self.input_norm(aux_hidden_states)
        if self.fc_norm is not None:
            chunks = aux_hidden_states.split(self.config.target_hidden_size, dim=-1)
            normed = [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)]
            aux_hidden_states = torch.cat(normed, dim=-1)
        return self.fc(aux_hidden_states)

    def run(self, columns: Columns, attend: Attend, num_outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass of the layers over `[B, n]` slots.

        Args:
            columns: with the token after each slot's position, hidden states from `combine_hidden_states` or the
                previous step's feedback, and positions `[B, n]` or `[1, n]` for RoPE.
            num_outputs: number of last slots whose outputs are needed. For others the last layer computes only keys and
                values.

        Returns:
            inputs of the head and of the next draft step (feedback), both `[B, num_outputs, H]`.
        """
        embeds, hidden = self.embed(columns.tokens), columns.hidden
        rotary = self.rotary_emb(embeds, columns.positions)
        for index, layer in enumerate(self.layers, start=1):
            count = num_outputs if index == len(self.layers) else columns.tokens.shape[1]
            hidden = layer(embeds, hidden, rotary, attend, count)
        normed = self.norm(hidden)
        return normed, normed if self.config.norm_output else hidden

    unroll_step = run

    def extend_cache(self, state: DecodeState, columns: Columns, num_logits: int) -> Outputs:
        cache = state.memory.cache
        cache.advance(columns.slots, state.live)
        attend = cached_attend(cache, columns.slots)
        count = max(num_logits, 1)
        num_outputs = count if cache.nodes is None else columns.tokens.shape[1]  # attention over a tree takes all nodes
        normed, feedback = self.run(columns, attend, num_outputs)
        return self.logits(normed[:, -count:]) if num_logits else None, feedback[:, -count:]

    def forward(
        self, input_ids: torch.Tensor, aux_hidden_states: torch.Tensor, num_steps: int = 1
    ) -> list[torch.Tensor]:
        """Logits `[B, S, V_d]` of each of `num_steps` steps of `unroll`."""
        return [self.logits(normed) for normed in self.unroll(input_ids, aux_hidden_states, num_steps)]


class PEagleDrafter(Eagle3Drafter):
    """P-EAGLE drafter: EAGLE-3 that drafts all K tokens in one pass.

    The first pass of a round is EAGLE-3's, with K - 1 more slots that have no token and no hidden states of the target.
    They embed the mask token and read a learned hidden state, `mask_hidden`, which passes through `fc` like auxiliary
    hidden states. With `config.parallel_drafting` False the same weights draft token by token, as EAGLE-3 does.
    """

    config_class = PEagleConfig

    def __init__(self, config: PEagleConfig):
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.zeros(config.mask_hidden_shape))

    def _fit(self, target: PreTrainedModel) -> None:
        super()._fit(target)
        with torch.no_grad():
            self.mask_state = self.project_mask()

    def update_derived(self) -> None:
        if self.mask_state is not None:
            self.mask_state.copy_(self.project_mask())

    def project_mask(self) -> torch.Tensor:
        """`mask_hidden` after `fc`, `[H]`."""
        return self.combine_hidden_states(self.mask_hidden.view(-1))

    def masked_hidden_states(self, hidden: torch.Tensor) -> torch.Tensor:
        # Compiled layers compute wrong gradients for inputs that overlap in memory (seen with torch 2.13).
        return self.project_mask().expand_as(hidden).contiguous()
