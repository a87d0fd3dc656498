"""Layers of the drafters that have decoder layers of their own."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig

from ..config import DFlash2Config, DFlashConfig, DraftLayersConfig, Eagle3Config
from ..host.modeling import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half
from ..kernels.types import RotaryKind
from ..modules.deferred import Rotation, residual_stream
from ..modules.patch import uses_layer_kernels
from ..patching.layer_kernels import norms_side_by_side

# Cosines and sines of positions.
Angles = tuple[torch.Tensor, torch.Tensor]


# Attention of a layer, over a KV cache when drafting, over a whole sequence when training: a function of the attention
# module, its new query, key and value states, `[B, heads, n, head_dim]` after RoPE, and its sliding window or None. It
# returns the queries' outputs, `[B, n, heads, head_dim]`. Queries may be fewer than keys; they are then at the last
# positions. Only it reads `layer_idx`, so that one compiled layer serves all.
Attend = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, int | None], torch.Tensor]


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


def rotate(
    cos: torch.Tensor, sin: torch.Tensor, key: torch.Tensor, query: torch.Tensor | None = None, num_queries: int = 0
) -> list[torch.Tensor]:
    """The last `num_queries` columns of `query` if given, and `key`, `[B, heads, n, head_dim]` each, after RoPE with
    cosines and sines `[B or 1, n, head_dim]`."""
    states = [key] if query is None else [query, key]
    if uses_layer_kernels(key):
        is_part = query is not None and num_queries < key.shape[2]
        return Rotation(cos, sin, states, RotaryKind(), num_queries if is_part else None).results()
    counts = [key.shape[2]] if query is None else [num_queries, key.shape[2]]
    columns = [(one[:, :, -n:], cos[:, None, -n:], sin[:, None, -n:]) for one, n in zip(states, counts, strict=True)]
    return [one * cos + rotate_half(one) * sin for one, cos, sin in columns]


class DraftAttention(nn.Module):
    """Grouped-query attention. Its input may be wider than the layer: EAGLE-3's first layer reads 2H."""

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
        self.q_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, hidden: torch.Tensor, rotary: Angles, attend: Attend, num_outputs: int) -> torch.Tensor:
        shape = *hidden.shape[:2], -1, self.head_dim
        query, key = self.q_proj(hidden).view(shape), self.k_proj(hidden).view(shape)
        value = self.v_proj(hidden).view(shape).transpose(1, 2)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = query.transpose(1, 2), key.transpose(1, 2)
        query, key = rotate(*rotary, key, query, num_outputs)
        return self.o_proj(attend(self, query, key, value, self.window).flatten(2))

    def keys_and_values(self, hidden: torch.Tensor, rotary: Angles) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys after RoPE and values of `[B, n, input_size]`, `[B, kv_heads, n, head_dim]` each."""
        shape = *hidden.shape[:2], -1, self.head_dim
        key, value = self.k_proj(hidden).view(shape), self.v_proj(hidden).view(shape)
        if self.k_norm is not None:
            key = self.k_norm(key)
        (key,) = rotate(*rotary, key.transpose(1, 2))
        return key, value.transpose(1, 2)


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
        self.mlp = LlamaMLP(config)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, rotary: Angles, attend: Attend, num_outputs: int
    ) -> torch.Tensor:
        """The layer's output `[B, num_outputs, H]` at the last of n columns, from `hidden` `[B, n, H]` and, in the
        first layer, token embeddings `embeds` `[B, n, H]`. Keys and values are computed for all columns."""
        if self.is_first:
            inputs = norms_side_by_side(self.input_layernorm, embeds, self.hidden_norm, hidden)
            residual = inputs[..., hidden.shape[-1] :] if self.norm_before_residual else hidden
        else:
            residual = hidden
            inputs = self.input_layernorm(hidden)
        hidden = residual_stream(residual[:, -num_outputs:]) + self.self_attn(inputs, rotary, attend, num_outputs)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class BlockDecoderLayer(nn.Module):
    """Decoder layer of a DFlash drafter: the tokens of a block attend to each other and to the context.

    The context has no queries and no layer norm: each layer computes keys and values from the same vectors.
    In DFlash-2, attention and MLP are each between two convolutions.
    """

    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        width = config.hidden_size
        self.input_layernorm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.self_attn = DraftAttention(config, layer_idx, input_size=width, output_bias=config.output_bias)
        self.post_attention_layernorm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)
        is_convolved = isinstance(config, DFlash2Config)
        self.attention_conv = DynamicConvolution(config) if is_convolved else None
        self.mlp_conv = DynamicConvolution(config) if is_convolved else None

    def forward(
        self, context: torch.Tensor, hidden: torch.Tensor, rotary: Angles, attend: Attend, block_length: int
    ) -> torch.Tensor:
        """The layer's output at the tokens of the blocks, `[B, n, H]`.

        Args:
            context: `[B, c, H]`, the vectors of c context positions.
            hidden: `[B, n, H]`, the layer's input at the n tokens of one or several blocks.
            rotary: cosines and sines at the positions of the context, then of the blocks.
        """

        def attention(inputs: torch.Tensor) -> torch.Tensor:
            return self.self_attn(torch.cat([context, inputs], dim=1), rotary, attend, num_outputs=inputs.shape[1])

        normed = self.input_layernorm(hidden)
        hidden = residual_stream(hidden) + _convolved(self.attention_conv, attention, normed, block_length)
        return hidden + _convolved(self.mlp_conv, self.mlp, self.post_attention_layernorm(hidden), block_length)


class DynamicConvolution(nn.Module):
    """Convolutions of DFlash-2 over the tokens of a block, before and after a sublayer.

    The kernels depend on the token. u is the input of the sublayer. For side s (0 before the sublayer, 1 after it),
    token i of its block and channel c of group g,

        d = kernel_projection(u)                                        [sides, taps, groups] for each token
        conv(s, z)[i, c] = sum_t (base_kernel[s, t, c] + d[i, s, t, g]) z[i - t, c],  z[j] = 0 for j < 0
    """

    def __init__(self, config: DFlash2Config):
        super().__init__()
        taps, width = config.conv_kernel_size, config.hidden_size
        # [sides, taps, groups]
        self._shape = (2, taps, width // config.conv_group_size)
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, math.prod(self._shape), bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1.0

    def forward(
        self, sublayer: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor, block_length: int
    ) -> torch.Tensor:
        """`[B, n, H]`: convolution, `sublayer` and convolution of `inputs` `[B, n, H]`, in blocks of `block_length`."""
        dynamic = self.kernel_projection(inputs).unflatten(-1, self._shape)[..., None]
        kernels = dynamic + self.base_kernel.unflatten(-1, (self._shape[-1], -1)).to(inputs.dtype)
        before, after = kernels.flatten(-2).unbind(2)
        return self._convolve(sublayer(self._convolve(inputs, before, block_length)), after, block_length)

    def _convolve(self, states: torch.Tensor, kernel: torch.Tensor, block_length: int) -> torch.Tensor:
        """`[B, n, H]` from `states` `[B, n, H]` and `kernel` `[B, n, taps, H]`."""
        blocks = states.unflatten(1, (-1, block_length))
        out = states * kernel[:, :, 0]
        for tap in range(1, min(kernel.shape[2], block_length)):
            earlier = F.pad(blocks[:, :, :-tap], (0, 0, tap, 0)).flatten(1, 2)
            out = out + earlier * kernel[:, :, tap]
        return out


def _convolved(
    conv: DynamicConvolution | None,
    sublayer: Callable[[torch.Tensor], torch.Tensor],
    inputs: torch.Tensor,
    block_length: int,
) -> torch.Tensor:
    return sublayer(inputs) if conv is None else conv(sublayer, inputs, block_length)
