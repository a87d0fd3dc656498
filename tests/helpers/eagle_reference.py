"""Drafting, recomputed in float64 from the files on disk: no cache, no code shared with the package.

EAGLE-3: slot p pairs the embedding of token p + 1 with the hidden states at position p and predicts token p + 2. After
the last slot with known hidden states, each draft token adds a slot that reads the previous slot's output instead
(SafeAILab/EAGLE cnets.py, vLLM llama_eagle3.py).

P-EAGLE: K - 1 slots of the mask token beside `mask_hidden` follow that slot. `mask_hidden` goes through `fc` as hidden
states do, and one causal pass drafts K tokens (vLLM llama_eagle3.py, llm_base_proposer.py).

Draft models: slot p holds token p and predicts token p + 1; PARD puts K - 1 mask tokens after the text and drafts K
tokens in one causal pass (AMD-AIG-AIMA/PARD pard_infer.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from dialects import Spec
from safetensors.torch import load_file


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint in float64 (integers as they are), without `model.`, the first layer `layers.0`."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    for file in sorted(folder.glob("*.bin")):
        found |= torch.load(file, weights_only=True)
    return {
        name.removeprefix("model.").replace("midlayer.", "layers.0."): value.double()
        if value.is_floating_point()
        else value
        for name, value in found.items()
    }


class Remembering:
    """A causal `target` in float64 with fixed weights: a prefix of a text that it has run is not run again."""

    def __init__(self, target):
        self._target, self._passes = target, []

    def __getattr__(self, name: str):
        return getattr(self._target, name)

    def double(self) -> Remembering:
        return self

    def __call__(self, token_ids: torch.Tensor, **options) -> SimpleNamespace:
        length = token_ids.shape[1]
        found = next((run for text, run in self._passes if torch.equal(text[:, :length], token_ids)), None)
        if found is None:
            found = self._target.double()(token_ids, **options).hidden_states
            self._passes.append((token_ids, found))
        return SimpleNamespace(hidden_states=[states[:, :length] for states in found])


@torch.no_grad()
def target_hidden_states(target, token_ids: torch.Tensor, layer_ids: tuple[int, ...]) -> torch.Tensor:
    """`[S, ids * H_t]`: the residual streams that enter the layers `layer_ids`, from a pass in float64."""
    if len(token_ids) == 0:
        return torch.zeros(0, len(layer_ids) * target.config.hidden_size, dtype=torch.float64)
    states = target.double()(token_ids[None], output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[layer_id][0] for layer_id in layer_ids], dim=-1)


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


def _attention(
    w: dict[str, torch.Tensor], spec: Spec, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Causal attention over `[n, ...]`: its output, and the keys and values `[n, kv_heads, D]`."""
    count, groups = len(x), spec.num_heads // spec.num_kv_heads
    query = (x @ w["self_attn.q_proj.weight"].T).view(count, spec.num_heads, spec.head_dim)
    key = (x @ w["self_attn.k_proj.weight"].T).view(count, spec.num_kv_heads, spec.head_dim)
    value = (x @ w["self_attn.v_proj.weight"].T).view(count, spec.num_kv_heads, spec.head_dim)
    if spec.qk_norm:
        query = _rms(query, w["self_attn.q_norm.weight"], spec.eps)
        key = _rms(key, w["self_attn.k_norm.weight"], spec.eps)
    positions = torch.arange(count)
    query, key = _rotate(query, positions, spec.rope_theta), _rotate(key, positions, spec.rope_theta)
    is_future = positions[None, :] > positions[:, None]
    out = torch.zeros_like(query)
    for head in range(spec.num_heads):
        scores = query[:, head] @ key[:, head // groups].T / spec.head_dim**0.5
        out[:, head] = scores.masked_fill(is_future, float("-inf")).softmax(-1) @ value[:, head // groups]
    return out.flatten(1) @ w["self_attn.o_proj.weight"].T, key, value


def _mlp(w: dict[str, torch.Tensor], spec: Spec, hidden: torch.Tensor) -> torch.Tensor:
    x = _rms(hidden, w["post_attention_layernorm.weight"], spec.eps)
    gate, up = x @ w["mlp.gate_proj.weight"].T, x @ w["mlp.up_proj.weight"].T
    return (gate * gate.sigmoid() * up) @ w["mlp.down_proj.weight"].T


def _run(
    weights: dict[str, torch.Tensor], spec: Spec, hidden: torch.Tensor, embeds: torch.Tensor | None = None
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """All layers over `[n, H]`: the stream before the final norm, and each layer's keys and values.

    With `embeds` the first layer is EAGLE-3's, which reads `[embedding | hidden]`.
    """
    cache = []
    for index in range(spec.num_layers):
        w = {name.removeprefix(f"layers.{index}."): value for name, value in weights.items()}
        residual = hidden
        if index == 0 and embeds is not None:
            normed = _rms(hidden, w["hidden_norm.weight"], spec.eps)
            residual = normed if spec.norm_before_residual else hidden
            x = torch.cat([_rms(embeds, w["input_layernorm.weight"], spec.eps), normed], dim=-1)
        else:
            x = _rms(hidden, w["input_layernorm.weight"], spec.eps)
        out, key, value = _attention(w, spec, x)
        cache.append((key, value))
        hidden = residual + out
        hidden = hidden + _mlp(w, spec, hidden)
    return hidden, cache


def _combine(weights: dict[str, torch.Tensor], spec: Spec, aux_hidden_states: torch.Tensor) -> torch.Tensor:
    if spec.norm_before_fc:
        aux_hidden_states = _rms(aux_hidden_states, weights["input_norm.weight"], spec.eps)
    if spec.fc_norm:
        chunks = aux_hidden_states.split(spec.target_hidden_size, dim=-1)
        aux_hidden_states = torch.cat(
            [_rms(c, weights[f"fc_norm.{i}.weight"], spec.eps) for i, c in enumerate(chunks)], dim=-1
        )
    return aux_hidden_states @ weights["fc.weight"].T


def _head(weights: dict[str, torch.Tensor], spec: Spec, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[n, V_d]` of streams `[n, H]`, and the head's inputs."""
    normed = _rms(stream, weights["norm.weight"], spec.eps)
    return normed @ weights["lm_head.weight"].T, normed


def _said(weights: dict[str, torch.Tensor], spec: Spec, logits: torch.Tensor) -> list[int]:
    """The most likely tokens, in the target's vocabulary, by logits `[n, V_d]`."""
    tokens = logits.argmax(-1)
    return (tokens + weights["d2t"][tokens] if spec.maps_vocabulary else tokens).tolist()


def _embedding(weights: dict[str, torch.Tensor], target) -> torch.Tensor:
    return weights.get("embed_tokens.weight", target.get_input_embeddings().weight.double())


@torch.no_grad()
def propose(
    weights: dict[str, torch.Tensor], spec: Spec, target, token_ids: torch.Tensor, num_draft_tokens: int
) -> tuple[list[int], list[torch.Tensor]]:
    """Draft after `token_ids` (`[T]` int64, the last of them not yet seen by the target), one token after the other.

    Returns:
        the draft tokens in the target's vocabulary, and the logits `[V_d]` that each came from; nothing after a text
        of one token, which leaves no slot to draft from.
    """
    embedding = _embedding(weights, target)
    hidden = _combine(weights, spec, target_hidden_states(target, token_ids[:-1], spec.aux_hidden_state_layer_ids))
    tokens, drafts, logits = token_ids[1:].tolist(), [], []
    for _ in range(num_draft_tokens if tokens else 0):
        stream, _cache = _run(weights, spec, hidden, embedding[tokens])
        scored, normed = _head(weights, spec, stream[-1:])
        logits.append(scored[0])
        drafts += _said(weights, spec, scored)
        tokens.append(drafts[-1])
        hidden = torch.cat([hidden, normed if spec.norm_output else stream[-1:]])
    return drafts, logits


@torch.no_grad()
def propose_in_parallel(
    weights: dict[str, torch.Tensor], spec: Spec, target, token_ids: torch.Tensor, num_draft_tokens: int
) -> tuple[list[int], list[torch.Tensor]]:
    """P-EAGLE's one pass; as `propose`. After a text of one token there is no slot for the first draft token."""
    num_masks = num_draft_tokens - 1
    aux_hidden_states = target_hidden_states(target, token_ids[:-1], spec.aux_hidden_state_layer_ids)
    hidden = torch.cat([aux_hidden_states, weights["mask_hidden"].view(1, -1).expand(num_masks, -1)])
    hidden = _combine(weights, spec, hidden)
    tokens = token_ids[1:].tolist() + [spec.mask_token] * num_masks
    stream, _cache = _run(weights, spec, hidden, _embedding(weights, target)[tokens])
    logits, _normed = _head(weights, spec, stream[-num_draft_tokens:])
    return _said(weights, spec, logits), list(logits)


@torch.no_grad()
def eagle_cache(
    weights: dict[str, torch.Tensor], spec: Spec, target, token_ids: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values `[T - 1, kv_heads, D]` of every layer after a pass over `token_ids` with true hidden states."""
    hidden = _combine(weights, spec, target_hidden_states(target, token_ids[:-1], spec.aux_hidden_state_layer_ids))
    return _run(weights, spec, hidden, _embedding(weights, target)[token_ids[1:]])[1]


def read_llama(folder: Path) -> tuple[dict[str, torch.Tensor], Spec]:
    """A Llama checkpoint: its tensors, and its shape; `parallel` if it is PARD."""
    config = json.loads((folder / "config.json").read_text())
    weights = read_tensors(folder)
    weights.setdefault("lm_head.weight", weights["embed_tokens.weight"])
    spec = Spec(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        vocab_size=config["vocab_size"],
        draft_vocab_size=config["vocab_size"],
        eps=config["rms_norm_eps"],
        rope_theta=config["rope_parameters"]["rope_theta"],
        maps_vocabulary=False,
        parallel="pard_token" in config,
        mask_token=config.get("pard_token", 0),
    )
    return weights, spec


@torch.no_grad()
def llama(
    weights: dict[str, torch.Tensor], spec: Spec, token_ids: torch.Tensor
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Logits `[T, V]` of a Llama over `[T]` tokens, and keys and values `[T, kv_heads, D]` of every layer."""
    stream, cache = _run(weights, spec, weights["embed_tokens.weight"][token_ids])
    return _head(weights, spec, stream)[0], cache


def draft_as_llama(
    weights: dict[str, torch.Tensor], spec: Spec, token_ids: torch.Tensor, num_draft_tokens: int
) -> tuple[list[int], list[torch.Tensor]]:
    """Draft after `[T]` tokens, one token after the other; returns as `propose`."""
    drafted = []
    for _ in range(num_draft_tokens):
        logits, _cache = llama(weights, spec, token_ids)
        drafted.append(logits[-1])
        token_ids = torch.cat([token_ids, logits[-1:].argmax(-1)])
    return token_ids[-num_draft_tokens:].tolist(), drafted


def draft_as_pard(
    weights: dict[str, torch.Tensor], spec: Spec, token_ids: torch.Tensor, num_draft_tokens: int
) -> tuple[list[int], list[torch.Tensor]]:
    """Draft after `[T]` tokens in one pass; returns as `propose`."""
    masked = torch.cat([token_ids, torch.tensor([spec.mask_token] * (num_draft_tokens - 1), dtype=torch.int64)])
    logits = llama(weights, spec, masked)[0][-num_draft_tokens:]
    return logits.argmax(-1).tolist(), list(logits)
