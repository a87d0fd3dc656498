"""PARD-2 (arXiv 2605.08632): PARD that adds a projection of the target's hidden states to the input embeddings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..checkpoints.checkpoint import PROJECTION_FILE, Checkpoint
from ..config import Pard2Config
from ..kernels.types import Columns
from ..modules.hidden_states import check_aux_hidden_states, decoder_layers
from ..state import DecodeState
from .base import Reads
from .draft_model import DraftModelDrafter

_ZEROS_BEFORE = (0, 0, 1, 0)  # for `pad`: a column of zeros before the columns `[B, n, width]`


class Pard2Drafter(DraftModelDrafter):
    """PARD-2 drafter: a causal language model with mask tokens, which reads tokens and hidden states of the target.

    Slot p holds token p with the projected hidden states at position p - 1, which predicted it, and predicts token
    p + 1. The first slot of a row, and the slot where drafting starts in a row, has zeros for them. The K - 1 slots of
    mask tokens after the newest token have the newest token's hidden states.
    """

    config_class = Pard2Config
    packs_prompts = False  # a slot has the hidden states of the position before it in the row
    own_tensors = frozenset({"target_proj.weight", "target_proj.bias"})

    def __init__(self, config: Pard2Config, model: PreTrainedModel | None = None):
        super().__init__(config, model)
        embedding = self.model.get_input_embeddings()
        weight = next(embedding.parameters())
        self.target_proj = nn.Linear(
            len(config.hidden_state_ids) * config.target_hidden_size,
            self.model.config.get_text_config().hidden_size,
            bias=config.projection_bias,
            device=weight.device,
            dtype=self.model.dtype,
        )
        # For each hidden state that `target_proj` reads, its index among the hidden states of ascending layers.
        self._order: list[int] = []

    @classmethod
    def check_checkpoint(cls, checkpoint: Checkpoint, config: Pard2Config) -> None:
        super().check_checkpoint(checkpoint, config)
        width = config.model_config.get_text_config().hidden_size
        expected = {"target_proj.weight": (width, len(config.hidden_state_ids) * config.target_hidden_size)}
        if config.projection_bias:
            expected["target_proj.bias"] = (width,)
        stored = {name: checkpoint.tensors[name].shape for name in expected}
        others = {name for name, tensor in checkpoint.tensors.items() if tensor.file.name == PROJECTION_FILE}
        checkpoint.check_differences(
            unexpected=others - expected.keys(),
            mismatched=[(name, stored[name], shape) for name, shape in expected.items() if stored[name] != shape],
        )

    @classmethod
    def load_checkpoint(cls, checkpoint: Checkpoint, config: Pard2Config, **options: Any) -> Pard2Drafter:
        drafter = super().load_checkpoint(checkpoint, config, **options)
        prefix, module = "target_proj.", drafter.target_proj
        weights = checkpoint.only([f"{prefix}{name}" for name in module.state_dict()]).read()
        module.load_state_dict({name.removeprefix(prefix): weight for name, weight in weights.items()})
        return drafter

    def round_reads(self, num_draft_tokens: int) -> Reads:
        passes, reads = super().round_reads(num_draft_tokens)
        return passes, [*reads, (1, self.target_proj.parameters())]

    def _fit(self, target: PreTrainedModel) -> None:
        config, name = self.config, self.title
        num_layers = len(decoder_layers(target))
        ids = config.check_fit(target.config, num_layers, name)
        ascending = sorted(ids)
        layer_ids, reads_last = [one for one in ascending if one < num_layers], num_layers in ids
        check_aux_hidden_states(target, layer_ids, reads_last, config.target_hidden_size, name)
        super()._fit(target)
        self._layer_ids, self.reads_last_hidden_state = layer_ids, reads_last
        self._order = [ascending.index(one) for one in ids]

    def combine_hidden_states(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """`[B, n, H]` from the target's hidden states of ascending layers, `[B, n, count * H_t]`."""
        states = aux_hidden_states.to(self.target_proj.weight.dtype)
        if self._order != sorted(self._order):
            parts = states.split(self.config.target_hidden_size, dim=-1)
            states = torch.cat([parts[place] for place in self._order], dim=-1)
        return self.target_proj(states) * self.config.hidden_state_scale

    def gather_hidden_states(self, hidden: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        newest = sources.amax(dim=1, keepdim=True).clamp(min=0)
        sources = torch.where(sources < 0, newest, sources)
        return hidden.gather(1, sources[..., None].expand(-1, -1, hidden.shape[-1]))

    def model_inputs(self, tokens: torch.Tensor, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"inputs_embeds": self.model.get_input_embeddings()(tokens) + hidden}

    def unrolled_hidden_states(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        return self.combine_hidden_states(F.pad(aux_hidden_states[:, :-1], _ZEROS_BEFORE))

    def prefix_margin(self, num_draft_tokens: int, has_trees: bool = False) -> int | None:
        # A prefill from position p on writes the slots after p, so slot p itself must be part of the reused prefix.
        margin = super().prefix_margin(num_draft_tokens, has_trees)
        return None if margin is None else margin + 1

    def prefill(self, state: DecodeState, aux_hidden_states: torch.Tensor, positions: torch.Tensor) -> None:
        # Hidden states at position p go with the token at p + 1. The first round reads the newest token.
        none = torch.full_like(positions[:, :1], state.dummy_slot)
        later = torch.where(positions + 1 < state.lengths[:, None] - 1, positions + 1, state.dummy_slot)
        is_first = torch.cat([positions, none], dim=1) == state.draft_starts[:, None]
        slots = torch.where(is_first, state.draft_starts[:, None], torch.cat([none, later], dim=1))
        states = F.pad(aux_hidden_states, _ZEROS_BEFORE).masked_fill(is_first[..., None], 0)
        hidden = self.combine_hidden_states(states)
        columns = Columns(
            state.tokens.gather(1, slots), slots=slots, positions=state.position_ids(slots), hidden=hidden
        )
        self.extend_cache(state, columns, num_logits=0)

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Save the model as transformers does and the projection beside it, as AMD's code reads them. Raises
        `ValueError` for `push_to_hub=True`, which would omit the projection; the method `push_to_hub` uploads all."""
        if kwargs.get("push_to_hub"):
            raise ValueError("save_pretrained(push_to_hub=True) uploads the model alone; use push_to_hub(repo_id).")
        config = self.config
        keys = {
            "pard_token": config.mask_token_id,
            "spd_type": "pard2",
            "pard2": True,
            "pard2_target_layers": config.hidden_state_ids,
            "pard2_target_dim": self.target_proj.in_features,
            "pard2_scale": config.hidden_state_scale,
            "pard2_proj_bias": config.projection_bias,
            "para_num": config.num_assistant_tokens,
        }
        self.model.config.update(keys)
        self.model.save_pretrained(save_directory, **kwargs)
        if kwargs.get("is_main_process", True):
            tensors = {f"target_proj.{name}": one.detach().cpu() for name, one in self.target_proj.named_parameters()}
            torch.save(tensors, Path(save_directory) / PROJECTION_FILE)
