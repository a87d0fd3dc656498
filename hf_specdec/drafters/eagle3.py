"""EAGLE-3 (arXiv 2503.01840): one or more decoder layers that read auxiliary hidden states of the target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..checkpoints.checkpoint import Checkpoint
from ..config import Eagle3Config, default_aux_layer_ids
from ..patching.attention import cached_attend
from ..patching.hidden_states import check_aux_hidden_states, decoder_layers
from ..state import DecodeState
from ..training.unrolled import UnrolledAttention, shift_left
from .base import (
    check_sizes,
    embed,
    register_drafter,
    score,
)
from .cached import CachedDrafter
from .layers import Attend, DraftDecoderLayer, rotary_embedding
from .shared_weights import SharedWeight


def check_fit(config: Eagle3Config, target: PreTrainedConfig, num_layers: int, name: str) -> list[int]:
    """Check that a drafter called `name` fits a target with `num_layers` layers.

    Returns:
        layer ids of the auxiliary hidden states that it reads, ascending.

    Raises:
        ValueError: expected a target of the hidden size, vocabulary size and layers that the drafter was made for.
    """
    check_sizes(config.target_hidden_size, config.vocab_size, target, name)
    target_name = target.name_or_path or target.model_type
    if not config.use_aux_hidden_state:
        return []
    layer_ids = config.aux_hidden_state_layer_ids or default_aux_layer_ids(num_layers)
    if layer_ids[-1] > num_layers or layer_ids[0] < 0:
        raise ValueError(
            f"{name} reads the auxiliary hidden states {layer_ids}, but {target_name} has {num_layers} layers, so ids "
            f"0 to {num_layers}: it is a drafter for another model, or `aux_hidden_state_layer_ids=` must be given."
        )
    if len(layer_ids) != config.num_aux_hidden_states:
        raise ValueError(
            f"{name} reads {config.num_aux_hidden_states} auxiliary hidden states, but the rule for {num_layers} "
            f"layers gives the ids {layer_ids}; pass `aux_hidden_state_layer_ids=` with {config.num_aux_hidden_states} "
            "different ones."
        )
    return layer_ids


@register_drafter
class Eagle3Drafter(CachedDrafter):
    """EAGLE-3 drafter.

    Slot p pairs the embedding of the token at position p + 1 with the target's hidden states at position p, has RoPE
    position p, and predicts the token at position p + 2. After the slots whose hidden states the target has computed,
    every draft token adds a slot that reads the drafter's own previous output instead. The next round overwrites such
    slots with the target's hidden states.
    """

    config_class = Eagle3Config
    shift = 1
    # Tensors of published files that are used in training only; `check_tensors` checks what else a file may hold.
    _keys_to_ignore_on_load_unexpected = [r"^t2d$", r"^d2t$", r"rotary_emb\.", r"^verifier_", r"^norm\.weight$"]

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        width, aux_size = config.hidden_size, config.target_hidden_size
        count = config.num_aux_hidden_states if config.use_aux_hidden_state else 0
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None
        self.input_norm = LlamaRMSNorm(count * aux_size, config.rms_norm_eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList([LlamaRMSNorm(aux_size, config.rms_norm_eps) for _ in range(count)])
            if config.fc_norm
            else None
        )
        self.fc = nn.Linear(count * aux_size, width, bias=config.fc_bias) if config.use_aux_hidden_state else None
        self.layers = nn.ModuleList([DraftDecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps) if config.final_norm else nn.Identity()
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False) if config.own_head else None
        self.rotary_emb = rotary_embedding(config)
        # Token t of the draft vocabulary is token t + d2t[t] of the target's.
        if config.draft_vocab_size < config.vocab_size:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        else:
            self.d2t = None
        # `[H]` hidden state of columns without one of the target: mask tokens. None for zeros, as they are inert.
        self.register_buffer("mask_state", None, persistent=False)
        self._layer_ids = config.aux_hidden_state_layer_ids
        self.post_init()

    @classmethod
    def check_checkpoint(cls, checkpoint: Checkpoint, config: Eagle3Config) -> None:
        try:
            rotary = rotary_embedding(config)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"{checkpoint.name} has rope_parameters {config.rope_parameters}, which transformers cannot apply "
                f"({type(error).__name__}: {error}); expected a rope_type that it knows with all that this type needs. "
                "Pass `rope_parameters=`."
            ) from error
        num_angles = rotary.inv_freq.numel()
        if 2 * num_angles != config.head_dim or not bool(rotary.inv_freq.isfinite().all()):
            raise ValueError(
                f"{checkpoint.name} has rope_parameters {config.rope_parameters} and head_dim {config.head_dim}, which "
                f"make {num_angles} angles; expected {config.head_dim / 2:g} finite ones. Pass `rope_parameters=`."
            )
        super().check_checkpoint(checkpoint, config)

    @property
    def aux_hidden_state_layer_ids(self) -> list[int]:
        return list(self._layer_ids) if self._layer_ids is not None and self.config.use_aux_hidden_state else []

    @property
    def reads_last_hidden_state(self) -> bool:
        return not self.config.use_aux_hidden_state

    @torch.inference_mode(False)  # it keeps tensors that it creates
    def bind(self, target: PreTrainedModel) -> None:
        config, name = self.config, f"{type(self).__name__} ({self.config.name_or_path or 'unnamed'})"
        layer_ids = check_fit(config, target.config, len(decoder_layers(target)), name)
        target_ids = None if self.d2t is None else torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t
        shared = {}
        if self.embed_tokens is None:
            shared["embedding"] = SharedWeight(target.get_input_embeddings(), "embedding", config.hidden_size, name)
        if self.lm_head is None:
            shared["head"] = SharedWeight(
                target.get_output_embeddings(), "head", config.hidden_size, name, rows=target_ids
            )
        check_aux_hidden_states(target, layer_ids, self.reads_last_hidden_state, config.target_hidden_size, name)
        self._shared_weights = shared
        self.target_ids = target_ids
        self._layer_ids = layer_ids
        self._record_binding(target)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embeddings `[..., H]` of `[...]` int64 target tokens."""
        weight = self.embed_tokens.weight if self.embed_tokens is not None else self._shared_weights["embedding"].weight
        return embed(tokens, weight, self.dtype)

    def combine_hidden_states(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """`[..., aux_hidden_size]`, those of ascending layer ids concatenated, to `[..., H]`."""
        aux_hidden_states = aux_hidden_states.to(self.dtype)
        if self.fc is None:
            return aux_hidden_states
        if self.input_norm is not None:
            aux_hidden_states = self.input_norm(aux_hidden_states)
        if self.fc_norm is not None:
            chunks = aux_hidden_states.split(self.config.target_hidden_size, dim=-1)
            aux_hidden_states = torch.cat(
                [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1
            )
        return self.fc(aux_hidden_states)

    def run(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        num_outputs: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass of the layers over `[B, n]` slots.

        Args:
            tokens: `[B, n]` int64, the token after each slot's position.
            hidden: `[B, n, H]` from `combine_hidden_states`, or the previous step's feedback.
            positions: `[B, n]` or `[1, n]` int64 for RoPE.
            attend: attention, which stores keys and values.
            num_outputs: how many of the last slots' outputs are needed; all if None. Of other slots, the last layer
                computes keys and values only.

        Returns:
            inputs of the head and of the next draft step (feedback), both `[B, num_outputs, H]`.
        """
        embeds = self.embed(tokens)
        rotary = self.rotary_emb(embeds, positions)
        for index, layer in enumerate(self.layers, start=1):
            is_last = index == len(self.layers)
            layer_outputs = num_outputs if is_last and num_outputs is not None else tokens.shape[1]
            hidden = layer(embeds, hidden, rotary, attend, layer_outputs)
        normed = self.norm(hidden)
        return normed, normed if self.config.norm_output else hidden

    @property
    def logit_scale(self) -> float:
        return self.config.logit_scale

    @property
    def head_weight(self) -> torch.Tensor:
        """Weight `[V_d, H]` of the draft head: its own or rows of the target's."""
        return self.lm_head.weight if self.lm_head is not None else self._shared_weights["head"].weight

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits `[..., V_d]` of `[..., H]` after the final norm."""
        logits = score(normed, self.head_weight)
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale

    @property
    def num_cached_layers(self) -> int:
        return len(self.layers)

    def gather_hidden_states(self, hidden: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        gathered = hidden.gather(1, sources.clamp(min=0)[..., None].expand(-1, -1, hidden.shape[-1]))
        return torch.where(sources[..., None] < 0, 0.0 if self.mask_state is None else self.mask_state, gathered)

    def extend_cache(
        self,
        state: DecodeState,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        num_logits: int,
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        cache = state.memory.cache
        cache.advance(slots, state.live)
        attend = cached_attend(cache, slots)
        normed, feedback = self.run(tokens, hidden, positions, attend, num_outputs=max(num_logits, 1))
        logits = self.logits(normed) if num_logits else None
        return logits, feedback[:, -1:]

    def forward(
        self, input_ids: torch.Tensor, aux_hidden_states: torch.Tensor, num_steps: int = 1
    ) -> list[torch.Tensor]:
        """Logits `[B, S, V_d]` of each of `num_steps` steps of `unroll`."""
        return [self.logits(normed) for normed in self.unroll(input_ids, aux_hidden_states, num_steps)]

    def unroll(
        self,
        input_ids: torch.Tensor,
        aux_hidden_states: torch.Tensor,
        num_steps: int,
        rows: Sequence[int] | None = None,
    ) -> list[torch.Tensor]:
        attend = UnrolledAttention()
        hidden = self.combine_hidden_states(aux_hidden_states)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        tokens, outputs = shift_left(input_ids), []
        for step in range(num_steps):
            if rows is not None:
                tokens, hidden = tokens[: rows[step]], hidden[: rows[step]]
            normed, feedback = self.run(tokens, hidden, positions + step, attend)
            outputs.append(normed)
            tokens, hidden = self.next_unroll_inputs(step, tokens, hidden, feedback)
        return outputs

    def next_unroll_inputs(
        self, step: int, tokens: torch.Tensor, hidden: torch.Tensor, feedback: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens `[B, S]` and hidden states `[B, S, H]` that step `step + 1` of `unroll` reads.

        Args:
            step: the step that has run.
            tokens: `[B, S]` int64, its tokens.
            hidden: `[B, S, H]`, its hidden states.
            feedback: `[B, S, H]`, its feedback, as `run` returns it.
        """
        return shift_left(tokens), feedback
