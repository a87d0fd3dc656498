"""EAGLE-3 drafting, recomputed in float64 from the files on disk: no cache, no code shared with the package.

Slot p pairs the embedding of token p + 1 with the taps at position p and predicts token p + 2; after the last slot
whose taps are known, each draft token adds a slot that reads the previous slot's output instead (SafeAILab/EAGLE
cnets.py, vLLM llama_eagle3.py).
"""

from __future__ import annotations

from pathlib import Path

import torch
from dialects import Spec
from safetensors.torch import load_file


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint in float64 (integers as they are), the first layer called `layers.0`."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    for file in sorted(folder.glob("*.bin")):
        found |= torch.load(file, weights_only=True)
    return {
        name.replace("midlayer.", "layers.0."): value.double() if value.is_floating_point() else value
        for name, value in found.items()
    }


@torch.no_grad()
def target_taps(target, token_ids: torch.Tensor, boundaries: tuple[int, ...]) -> torch.Tensor:
    """`[S, taps * H_t]`: the streams that enter the layers `boundaries`, from a float64 pass over `[S]` tokens."""
    states = target.double()(token_ids[None], output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[boundary][0] for boundary in boundaries], dim=-1)


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """RoPE on `[n, heads, D]`, halves paired as in Llama."""
    half = x.shape[-1] // 2
    angles = positions.double()[:, None, None] / theta ** (torch.arange(half).double() / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def _layer(
    weights: dict[str, torch.Tensor], spec: Spec, index: int, embeds: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    w = {name.removeprefix(f"layers.{index}."): value for name, value in weights.items()}
    count = len(hidden)
    positions = torch.arange(count)
    residual = hidden
    if index == 0:
        normed = _rms(hidden, w["hidden_norm.weight"], spec.eps)
        residual = normed if spec.norm_before_residual else hidden
        x = torch.cat([_rms(embeds, w["input_layernorm.weight"], spec.eps), normed], dim=-1)
    else:
        x = _rms(hidden, w["input_layernorm.weight"], spec.eps)
    query = (x @ w["self_attn.q_proj.weight"].T).view(count, spec.num_heads, spec.head_dim)
    key = (x @ w["self_attn.k_proj.weight"].T).view(count, spec.num_kv_heads, spec.head_dim)
    value = (x @ w["self_attn.v_proj.weight"].T).view(count, spec.num_kv_heads, spec.head_dim)
    if spec.qk_norm:
        query = _rms(query, w["self_attn.q_norm.weight"], spec.eps)
        key = _rms(key, w["self_attn.k_norm.weight"], spec.eps)
    query, key = _rotate(query, positions, spec.rope_theta), _rotate(key, positions, spec.rope_theta)
    out = torch.zeros_like(query)
    for head in range(spec.num_heads):
        shared = head * spec.num_kv_heads // spec.num_heads
        for slot in range(count):
            scores = key[: slot + 1, shared] @ query[slot, head] / spec.head_dim**0.5
            out[slot, head] = scores.softmax(0) @ value[: slot + 1, shared]
    hidden = residual + out.flatten(1) @ w["self_attn.o_proj.weight"].T
    x = _rms(hidden, w["post_attention_layernorm.weight"], spec.eps)
    gate, up = x @ w["mlp.gate_proj.weight"].T, x @ w["mlp.up_proj.weight"].T
    return hidden + (gate * gate.sigmoid() * up) @ w["mlp.down_proj.weight"].T


def _combine(weights: dict[str, torch.Tensor], spec: Spec, taps: torch.Tensor) -> torch.Tensor:
    if spec.norm_before_fc:
        taps = _rms(taps, weights["input_norm.weight"], spec.eps)
    if spec.fc_norm:
        chunks = taps.split(spec.target_hidden_size, dim=-1)
        taps = torch.cat([_rms(c, weights[f"fc_norm.{i}.weight"], spec.eps) for i, c in enumerate(chunks)], dim=-1)
    return taps @ weights["fc.weight"].T


@torch.no_grad()
def propose(
    weights: dict[str, torch.Tensor], spec: Spec, target, token_ids: torch.Tensor, num_draft_tokens: int
) -> tuple[list[int], list[torch.Tensor]]:
    """Draft after `token_ids` (`[T]` int64, the last of them not yet seen by the target).

    Returns:
        the draft tokens in the target's vocabulary, and the logits `[V_d]` that each came from.
    """
    embedding = weights.get("embed_tokens.weight", target.get_input_embeddings().weight.double())
    hidden = _combine(weights, spec, target_taps(target, token_ids[:-1], spec.taps))
    tokens, drafts, logits = token_ids[1:].tolist(), [], []
    for _ in range(num_draft_tokens):
        stream = hidden
        for index in range(spec.num_layers):
            stream = _layer(weights, spec, index, embedding[tokens], stream)
        normed = _rms(stream[-1], weights["norm.weight"], spec.eps)
        logits.append(weights["lm_head.weight"] @ normed)
        token = int(logits[-1].argmax())
        if spec.maps_vocabulary:
            token += int(weights["d2t"][token])
        drafts.append(token)
        tokens.append(token)
        hidden = torch.cat([hidden, (normed if spec.norm_output else stream[-1])[None]])
    return drafts, logits
