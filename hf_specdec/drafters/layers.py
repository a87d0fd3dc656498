"""The layers of drafters with decoder layers of their own."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from ..config import DFlashConfig, DraftLayersConfig, Eagle3Config


class Attend(Protocol):
    """Attention of a layer: over a KV cache when drafting, over a whole sequence when training.

    Called with the layer's index, its new query, key and value states, `[B, heads, n, head_dim]` after RoPE, and the
    layer's sliding window or None. There may be fewer queries than keys; they are those of the last positions. Returns
    the queries' outputs, `[B, n, heads, head_dim]`.
    """

    def __call__(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
    ) -> torch.Tensor: ...


def rotary_embedding(config: DraftLayersConfig) -> LlamaRotaryEmbedding:
    """transformers' rotary embedding for the draft layers, of any of its RoPE types."""
    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=config.num_attention_heads * config.head_dim,
            num_attention_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters),
        )
    )


def rotate(states: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """RoPE on `[B, heads, n, head_dim]`, given cosines and sines `[B or 1, n, head_dim]`."""
    cos, sin = (part.unsqueeze(1) for part in rotary)
    return states * cos + rotate_half(states) * sin


class DraftAttention(nn.Module):
    """Grouped-query attention whose input may be wider than the layer (EAGLE-3's first layer reads 2H)."""

    def __init__(self, config: DraftLayersConfig, layer_idx: int, input_size: int, output_bias: bool = False):
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.window = config.sliding_window if config.layer_types[layer_idx] == "sliding_attention" else None
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(input_size, key_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(input_size, key_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=output_bias)
        self.q_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend: Attend, num_outputs: int
    ) -> torch.Tensor:
        query = self.q_norm(self._heads(self.q_proj(hidden))).transpose(1, 2)
        key, value = self.keys_and_values(hidden, rotary)
        query = rotate(query[:, :, -num_outputs:], tuple(part[:, -num_outputs:] for part in rotary))
        return self.o_proj(attend(self.layer_idx, query, key, value, self.window).flatten(2))

    def keys_and_values(
        self, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys after RoPE and values of `[B, n, input_size]`, `[B, kv_heads, n, head_dim]` each."""
        key = self.k_norm(self._heads(self.k_proj(hidden))).transpose(1, 2)
        return rotate(key, rotary), self._heads(self.v_proj(hidden)).transpose(1, 2)

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        return states.view(*states.shape[:2], -1, self.head_dim)


class DraftMLP(nn.Module):
    """Gated MLP, as Llama's."""

    def __init__(self, config: DraftLayersConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(hidden)) * self.up_proj(hidden))


class DraftDecoderLayer(nn.Module):
    """Decoder layer of an EAGLE-3 drafter.

    The first layer reads `[input_layernorm(embedding) | hidden_norm(hidden)]`, later layers their normed input.
    """

    def __init__(self, config: Eagle3Config, layer_idx: int):
        super().__init__()
        width = config.hidden_size
        self.is_first = layer_idx == 0
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = LlamaRMSNorm(width, config.rms_norm_eps)
        if self.is_first:
            self.hidden_norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.self_attn = DraftAttention(config, layer_idx, input_size=2 * width if self.is_first else width)
        self.post_attention_layernorm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.mlp = DraftMLP(config)

    def forward(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
        num_outputs: int,
    ) -> torch.Tensor:
        """Output of the layer at the last `num_outputs` of n columns, `[B, num_outputs, H]`.

        Args:
            embeds: `[B, n, H]` embeddings of the tokens; read by the first layer only.
            hidden: `[B, n, H]` input of the layer.
            rotary: cosines and sines of the columns' positions.
            attend: attention, which stores keys and values.
            num_outputs: columns whose output is needed; keys and values are computed for all.
        """
        if self.is_first:
            normed = self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else hidden
            inputs = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        else:
            residual = hidden
            inputs = self.input_layernorm(hidden)
        hidden = residual[:, -num_outputs:] + self.self_attn(inputs, rotary, attend, num_outputs)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class BlockDecoderLayer(nn.Module):
    """Decoder layer of a DFlash drafter: the tokens of a block attend to each other and to the context.

    The context has no queries and passes no layer norm: each layer makes keys and values of the same vectors.
    """

    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        width = config.hidden_size
        self.input_layernorm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.self_attn = DraftAttention(config, layer_idx, input_size=width, output_bias=config.output_bias)
        self.post_attention_layernorm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.mlp = DraftMLP(config)

    def forward(
        self,
        context: torch.Tensor,
        hidden: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        attend: Attend,
    ) -> torch.Tensor:
        """Output of the layer at the block's tokens, `[B, n, H]`.

        Args:
            context: `[B, c, H]` vectors of c context positions.
            hidden: `[B, n, H]` input of the layer, of n tokens of the block.
            rotary: cosines and sines of the positions of context and block.
            attend: attention, which stores keys and values.
        """
        inputs = torch.cat([context, self.input_layernorm(hidden)], dim=1)
        hidden = hidden + self.self_attn(inputs, rotary, attend, num_outputs=hidden.shape[1])
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
