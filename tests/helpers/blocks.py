"""Block drafters, written to disk in every published layout, and their drafts, recomputed in float64.

Layouts as the publishers' own code writes them: z-lab/dflash, sgl-project/SpecForge, vllm-project/speculators,
NVIDIA/Model-Optimizer, deepseek-ai/DeepSpec, hao-ai-lab/JetSpec, and transformers' assistant of Muse Glimmer.

The recomputation shares no code with the package and has no cache. A block reads the vectors of all context positions
before its first token, which is at the position of the newest token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dialects import draft_tokens, layer_config, layer_shapes, write_config
from eagle_reference import _mlp, _rms, _rotate, target_hidden_states
from safetensors.torch import save_file
from transformers import Qwen3Config


@dataclass(frozen=True)
class Block:
    """A block drafter, described without any publisher's names. Its auxiliary hidden states enter layers 2, 4, 5.

    `windows` and `causal` are by layer; `markov` is the kind of Markov head, None for others than DSpark. With `taps`
    of its convolutions and `top_k` candidates of each draft it is DFlash-2; with a width `gru` of its state, Domino;
    with a width `transfer` of its features, DSpine.
    """

    hidden_size: int = 32
    target_hidden_size: int = 32
    intermediate_size: int = 48
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 12
    vocab_size: int = 128
    draft_vocab_size: int = 128
    layer_ids: tuple[int, ...] = (2, 4, 5)
    eps: float = 1e-5
    rope_theta: float = 10000.0
    windows: tuple[int | None, ...] = (None, None)
    causal: tuple[bool, ...] = (False, False)
    block_size: int = 17
    anchor_first: bool = False
    mask_token: int = 5
    own_embedding: bool = False
    own_head: bool = False
    bias: bool = False
    embedding_scale: float = 1.0
    multiplier: float = 1.0
    softcap: float | None = None
    markov: str | None = None
    rank: int = 6
    confidence: bool = False
    taps: int = 0
    group: int = 8
    top_k: int = 0
    transfer: int = 0
    message: int = 9
    gru: int = 0
    emb: int = 7
    prefix: int = 1

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def layer_types(self) -> list[str]:
        return ["full_attention" if window is None else "sliding_attention" for window in self.windows]

    @property
    def window(self) -> int | None:
        return next((window for window in self.windows if window is not None), None)

    @property
    def depth(self) -> int:
        return self.block_size if self.anchor_first else self.block_size - 1


DFLASH = Block()
DSPARK = Block(anchor_first=True, block_size=16, markov="vanilla")
DOMINO = Block(anchor_first=True, block_size=16, gru=10)
DFLASH2 = Block(windows=(4, 4), taps=2, top_k=5, multiplier=0.7, softcap=3.0)
DSPINE = Block(causal=(True, True), transfer=11, top_k=6)
# What each layout can state; first what its publisher trains by default.
LAYOUTS: dict[str, list[Block]] = {
    "z-lab": [
        DFLASH,
        Block(windows=(None, 4), causal=(False, True), rope_theta=50000.0),
        Block(windows=(4, 4), causal=(True, True), embedding_scale=0.5, multiplier=0.7, softcap=3.0, bias=True),
    ],
    "speculators-dflash": [
        Block(windows=(4, 4), causal=(True, True), draft_vocab_size=40, own_head=True),
        Block(windows=(None, 4), causal=(False, False)),
        Block(anchor_first=True, hidden_size=24, own_embedding=True, own_head=True),
    ],
    "modelopt-dflash": [DFLASH, Block(windows=(4, 4), causal=(False, False))],
    "deepspec-dflash": [Block(anchor_first=True, own_embedding=True, own_head=True)],
    "muse": [Block(windows=(4, 4), causal=(False, False))],
    "jetspec": [Block(causal=(True, True)), Block(windows=(4, None), causal=(True, True)), DFLASH],
    "z-lab-2": [DFLASH2, Block(taps=3, group=4, top_k=1, embedding_scale=0.5)],
    "speculators-dflash2": [
        Block(windows=(None, 4), taps=2, top_k=8, group=16),
        Block(anchor_first=True, block_size=16, causal=(False, False), taps=1, top_k=16, group=32),
    ],
    "deepspec": [
        Block(anchor_first=True, block_size=16, markov="vanilla", own_embedding=True, own_head=True, confidence=True),
        Block(anchor_first=True, block_size=16, markov="gated", own_embedding=True, own_head=True),
    ],
    "specforge": [DSPARK, Block(anchor_first=True, causal=(True, True), markov="rnn", confidence=True)],
    "specforge-nested": [DSPARK],
    "specforge-dspine": [DSPINE, Block(windows=(None, 4), causal=(True, True), transfer=7, message=5, top_k=1)],
    "specforge-domino": [DOMINO, Block(gru=5, prefix=0, windows=(None, 4), causal=(False, True))],
    "modelopt-domino": [DOMINO, Block(gru=5, prefix=2)],
    "modelopt": [DSPARK, Block(anchor_first=True, markov="gated"), Block(anchor_first=True, markov="rnn")],
    "speculators": [
        Block(anchor_first=True, markov="vanilla", draft_vocab_size=40, own_head=True, confidence=True),
        Block(markov="gated", windows=(4, None), causal=(False, False)),
        Block(markov="rnn", draft_vocab_size=40, own_head=True),
    ],
}


def make_weights(spec: Block, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random weights under the names of the normal form."""
    generator = torch.Generator().manual_seed(seed)
    width, query, key = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(spec.layer_ids) * spec.target_hidden_size),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for index in range(spec.num_layers):
        prefix = f"layers.{index}."
        shapes |= layer_shapes(prefix, spec, width)
        shapes |= {f"{prefix}self_attn.{name}_norm.weight": (spec.head_dim,) for name in "qk"}
        if spec.taps:
            for name in ("attention_conv", "mlp_conv"):
                shapes[f"{prefix}{name}.base_kernel"] = (2, spec.taps, width)
                shapes[f"{prefix}{name}.kernel_projection.weight"] = (2 * spec.taps * (width // spec.group), width)
        if spec.bias:
            sizes = {"q_proj": query, "k_proj": key, "v_proj": key, "o_proj": width}
            shapes |= {f"{prefix}self_attn.{name}.bias": (size,) for name, size in sizes.items()}
    if spec.own_embedding:
        shapes["embed_tokens.weight"] = (spec.vocab_size, width)
    if spec.own_head:
        shapes["lm_head.weight"] = (spec.draft_vocab_size, width)
    if spec.markov is not None:
        shapes["markov_head.markov_w1.weight"] = (spec.vocab_size, spec.rank)
        shapes["markov_head.markov_w2.weight"] = (spec.draft_vocab_size, spec.rank)
    if spec.markov == "gated":
        shapes["markov_head.gate_proj.weight"] = (spec.rank, width + spec.rank)
        shapes["markov_head.gate_proj.bias"] = (spec.rank,)
    if spec.markov == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * spec.rank, 2 * spec.rank + width)
        shapes["markov_head.joint_proj.bias"] = (3 * spec.rank,)
    if spec.gru:
        shapes["prefix_gru.weight_ih_l0"] = (3 * spec.gru, width)
        shapes["prefix_gru.weight_hh_l0"] = (3 * spec.gru, spec.gru)
        shapes["embed_proj.0.weight"] = (spec.emb, width + spec.gru)
        shapes["embed_proj.2.weight"] = (spec.draft_vocab_size, spec.emb)
    if spec.transfer:
        shapes["transfer_codes"] = (spec.vocab_size, spec.transfer)
        shapes["injection.bias"] = (spec.message,)
        for name in ("message", "receiver_gate", "predecessor_gate"):
            shapes[f"injection.{name}.weight"] = (spec.message, spec.transfer)
        for index in range(spec.num_layers):
            shapes[f"injection.readouts.{index}.weight"] = (spec.transfer, width)
            shapes[f"injection.writes.{index}.weight"] = (width, spec.message)
    elif spec.top_k:
        shapes["candidate_selector.hidden_projection.weight"] = (spec.rank, width)
        shapes["candidate_selector.predecessor_codebook"] = (spec.vocab_size, spec.rank)
        shapes["candidate_selector.successor_codebook"] = (spec.vocab_size, spec.rank)
    if spec.confidence:
        shapes |= {"confidence_head.proj.weight": (1, width + spec.rank), "confidence_head.proj.bias": (1,)}
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.3 * noise if "norm" in name else noise / shape[-1] ** 0.5
        if "markov" in name or "codebook" in name:
            weights[name] = 2 * weights[name]
        if "base_kernel" in name or "embed_proj" in name:
            weights[name] = 2 * weights[name]
        if "prefix_gru" in name:
            weights[name] = 3 * weights[name]
    if spec.draft_vocab_size < spec.vocab_size:
        tokens = draft_tokens(spec)
        weights["d2t"] = tokens - torch.arange(len(tokens))
        weights["t2d"] = torch.zeros(spec.vocab_size, dtype=torch.bool).index_fill_(0, tokens, True)
    return weights


def _layer_config(spec: Block) -> dict[str, Any]:
    config = layer_config(spec) | {
        "attention_bias": spec.bias,
        "rope_scaling": None,
        "layer_types": spec.layer_types,
        "sliding_window": spec.window,
        "use_sliding_window": spec.window is not None,
        "max_window_layers": spec.num_layers,
        "block_size": spec.block_size,
    }
    return config | ({"target_hidden_size": spec.target_hidden_size} if spec.target_hidden_size != 32 else {})


def _outputs(spec: Block) -> list[int]:
    return [layer_id - 1 for layer_id in spec.layer_ids]


def _markov_settings(spec: Block) -> dict[str, Any]:
    return {
        "markov_rank": spec.rank,
        "markov_head_type": spec.markov,
        "enable_confidence_head": spec.confidence,
        "confidence_head_with_markov": spec.confidence,
    }


def zlab_config(spec: Block) -> dict[str, Any]:
    nested = {"mask_token_id": spec.mask_token, "target_layer_ids": _outputs(spec)}
    nested |= {"input_embedding_scale": spec.embedding_scale} if spec.embedding_scale != 1 else {}
    nested |= {"output_multiplier": spec.multiplier} if spec.multiplier != 1 else {}
    nested |= {"final_logit_softcapping": spec.softcap} if spec.softcap is not None else {}
    return _layer_config(spec) | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "num_target_layers": 8,
        "dflash_config": nested,
    }


def jetspec_config(spec: Block) -> dict[str, Any]:
    config = zlab_config(spec)
    config["dflash_config"] |= {"causal_head": all(spec.causal), "target_hidden_size": spec.target_hidden_size}
    return config


def modelopt_dflash_config(spec: Block) -> dict[str, Any]:
    config = zlab_config(spec) | {"sliding_window": None, "use_sliding_window": False}
    config["layer_types"] = ["full_attention"] * spec.num_layers
    config["dflash_config"] |= {"use_swa": spec.window is not None, "swa_window_size": spec.window}
    return config


def modelopt_config(spec: Block) -> dict[str, Any]:
    config = zlab_config(spec)
    config["dflash_config"] |= {
        "projector_type": "dspark",
        "shift_label": True,
        "markov_rank": spec.rank,
        "markov_head_type": spec.markov,
        "use_confidence_head": spec.confidence,
    }
    return config


def zlab2_config(spec: Block) -> dict[str, Any]:
    config = zlab_config(spec) | {"architectures": ["DFlash2DraftModel"], "is_causal": all(spec.causal)}
    del config["auto_map"]
    config["dflash_config"] |= {"block_size": config.pop("block_size"), **_dflash2_settings(spec)}
    return config


def _dflash2_settings(spec: Block) -> dict[str, Any]:
    return {
        "conv_kernel_size": spec.taps,
        "conv_group_size": spec.group,
        "selector_rank": spec.rank,
        "selector_top_k": spec.top_k,
    }


def specforge_config(spec: Block) -> dict[str, Any]:
    config = zlab_config(spec) | {"architectures": ["DSparkDraftModel"]}
    config["auto_map"] = {"AutoModel": "dspark.DSparkDraftModel"}
    config["dflash_config"] |= {"projector_type": "dspark", "attention_mode": "gqa", **_markov_settings(spec)}
    return config | ({"is_causal": True} if all(spec.causal) else {})


def specforge_domino_config(spec: Block) -> dict[str, Any]:
    config = modelopt_domino_config(spec) | {"architectures": ["DominoDraftModel"]}
    return config | {"auto_map": {"AutoModel": "domino.DominoDraftModel"}}


def modelopt_domino_config(spec: Block) -> dict[str, Any]:
    config = zlab_config(spec)
    config["dflash_config"] |= {
        "projector_type": "domino",
        "emb_dim": spec.emb,
        "gru_hidden_dim": spec.gru,
        "pure_draft_prefix_len": spec.prefix,
        "shift_label": spec.anchor_first,
    }
    return config


def specforge_dspine_config(spec: Block) -> dict[str, Any]:
    config = zlab_config(spec) | {"architectures": ["DSpineDraftModel"]}
    settings = {"transfer_rank": spec.transfer, "message_size": spec.message, "top_k": spec.top_k}
    return config | {"dspine_config": settings | {"ce_weight": 0.1, "replacement_layers": 3}}


def specforge_nested_config(spec: Block) -> dict[str, Any]:
    config = zlab_config(spec) | {"architectures": ["DSparkDraftModel"], "dspark_config": _markov_settings(spec)}
    config["dflash_config"] |= {"projector_type": "dspark"}
    return config


def deepspec_config(spec: Block) -> dict[str, Any]:
    return _layer_config(spec) | {
        "architectures": ["Qwen3DSparkModel"],
        "mask_token_id": spec.mask_token,
        "target_layer_ids": _outputs(spec),
        "num_target_layers": 8,
        "num_anchors": 512,
        **_markov_settings(spec),
        "markov_rank": 0 if spec.markov is None else spec.rank,
    }


def speculators_config(spec: Block) -> dict[str, Any]:
    layer, defaults = _layer_config(spec), Qwen3Config().to_dict()
    del layer["block_size"]
    changed = {key: value for key, value in layer.items() if key == "model_type" or defaults.get(key) != value}
    algorithm = "dflash" if spec.markov is None else "dspark"
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",
        "draft_vocab_size": spec.draft_vocab_size,
        "block_size": spec.block_size,
        "target_hidden_size": None if spec.target_hidden_size == spec.hidden_size else spec.target_hidden_size,
        "aux_hidden_state_layer_ids": list(spec.layer_ids),
        "mask_token_id": spec.mask_token,
        "sliding_window_non_causal": not any(spec.causal),
        "sample_from_anchor": spec.anchor_first,
        "transformer_layer_config": changed,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": spec.depth}],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
    }
    if spec.taps:
        config |= {"architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2"}
        return config | _dflash2_settings(spec)
    if spec.markov is None:
        return config | {"projector_type": "dflash", "shift_label": False}
    return config | _markov_settings(spec)


def muse_config(spec: Block) -> dict[str, Any]:
    config = _layer_config(spec) | {
        "model_type": "muse_glimmer_assistant",
        "architectures": ["MuseGlimmerAssistantModel"],
        "mask_token_id": spec.mask_token,
        "target_layer_ids": _outputs(spec),
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "sliding_window": spec.window - 1,
    }
    for key in ("vocab_size", "layer_types", "use_sliding_window", "max_window_layers", "rope_theta", "rope_scaling"):
        del config[key]
    return config


_CONFIGS = {
    "z-lab": zlab_config,
    "speculators-dflash": speculators_config,
    "modelopt-dflash": modelopt_dflash_config,
    "deepspec-dflash": deepspec_config,
    "muse": muse_config,
    "jetspec": jetspec_config,
    "z-lab-2": zlab2_config,
    "speculators-dflash2": speculators_config,
    "deepspec": deepspec_config,
    "specforge": specforge_config,
    "specforge-nested": specforge_nested_config,
    "specforge-domino": specforge_domino_config,
    "specforge-dspine": specforge_dspine_config,
    "modelopt-domino": modelopt_domino_config,
    "modelopt": modelopt_config,
    "speculators": speculators_config,
}


def write(layout: str, folder: Path, spec: Block, weights: dict[str, torch.Tensor], **changes: Any) -> Path:
    """Write `weights` in a layout. `changes` are made to config.json; a value of `...` removes the key."""
    write_config(folder, _CONFIGS[layout](spec), changes)
    renamed = {}
    for name, tensor in weights.items():
        if layout == "muse":
            name = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}.get(
                name, name
            )
        if layout == "modelopt":
            name = name.removeprefix("markov_head.").replace("confidence_head.proj", "confidence_proj")
        if layout.startswith("specforge") and name.startswith(("markov_head.", "prefix_gru.", "embed_proj.")):
            name = f"logit_head.{name}"
        renamed[name] = tensor.clone()
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _context(weights: dict[str, torch.Tensor], spec: Block, target, token_ids: torch.Tensor) -> torch.Tensor:
    """`[T - 1, H]`: the vectors of all positions that the target has processed."""
    states = target_hidden_states(target, token_ids[:-1], spec.layer_ids)
    return _rms(states @ weights["fc.weight"].T, weights["hidden_norm.weight"], spec.eps)


def _keys_and_values(w: dict[str, torch.Tensor], spec: Block, x: torch.Tensor, positions: torch.Tensor):
    key, value = (
        (x @ w[f"self_attn.{name}.weight"].T + w.get(f"self_attn.{name}.bias", 0.0)).unflatten(-1, (-1, spec.head_dim))
        for name in ("k_proj", "v_proj")
    )
    return _rotate(_rms(key, w["self_attn.k_norm.weight"], spec.eps), positions, spec.rope_theta), value


def _layer(weights: dict[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
    prefix = f"layers.{index}."
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def _double(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in weights.items()}


def _convolve(
    w: dict[str, torch.Tensor], spec: Block, name: str, side: int, read: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """`[n, H]`: `states` convolved channel by channel, before (side 0) or after a sublayer that reads `read`."""
    groups = spec.hidden_size // spec.group
    out = torch.zeros_like(states)
    for token in range(len(states)):
        dynamic = (w[f"{name}.kernel_projection.weight"] @ read[token]).view(2, spec.taps, groups)
        for tap in range(min(spec.taps, token + 1)):
            factors = w[f"{name}.base_kernel"][side, tap] + dynamic[side, tap].repeat_interleave(spec.group)
            out[token] += factors * states[token - tap]
    return out


@torch.no_grad()
def block_hidden_states(
    weights: dict[str, torch.Tensor], spec: Block, target, token_ids: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """`[n, H]`: inputs of the head at the n tokens of a block; the first is the last of `token_ids`."""
    context = _context(weights, spec, target, token_ids)
    anchor = len(token_ids) - 1
    tokens = [int(token_ids[-1])] + [spec.mask_token] * (num_tokens - 1)
    table = weights.get("embed_tokens.weight", target.get_input_embeddings().weight.double())
    hidden, block = table[tokens] * spec.embedding_scale, torch.arange(anchor, anchor + num_tokens)
    for index, (window, is_causal) in enumerate(zip(spec.windows, spec.causal, strict=True)):
        w = _layer(weights, index)
        x = normed = _rms(hidden, w["input_layernorm.weight"], spec.eps)
        if spec.taps:
            x = _convolve(w, spec, "attention_conv", 0, normed, x)
        positions = torch.arange(anchor + num_tokens)
        key, value = _keys_and_values(w, spec, torch.cat([context, x]), positions)
        query = (x @ w["self_attn.q_proj.weight"].T + w.get("self_attn.q_proj.bias", 0.0)).view(
            num_tokens, spec.num_heads, spec.head_dim
        )
        query = _rotate(_rms(query, w["self_attn.q_norm.weight"], spec.eps), block, spec.rope_theta)
        out = torch.zeros_like(query)
        distance = block[:, None] - positions
        is_hidden = torch.zeros_like(distance, dtype=torch.bool)
        if is_causal:
            is_hidden |= distance < 0
        if window is not None:
            is_hidden |= distance.abs() >= window
        for head in range(spec.num_heads):
            kv = head // (spec.num_heads // spec.num_kv_heads)
            scores = query[:, head] @ key[:, kv].T / spec.head_dim**0.5
            out[:, head] = scores.masked_fill(is_hidden, float("-inf")).softmax(-1) @ value[:, kv]
        out = out.flatten(1) @ w["self_attn.o_proj.weight"].T + w.get("self_attn.o_proj.bias", 0.0)
        if spec.taps:
            hidden = hidden + _convolve(w, spec, "attention_conv", 1, normed, out)
            normed = _rms(hidden, w["post_attention_layernorm.weight"], spec.eps)
            x = _convolve(w, spec, "mlp_conv", 0, normed, normed)
            gate, up = x @ w["mlp.gate_proj.weight"].T, x @ w["mlp.up_proj.weight"].T
            out = (gate * gate.sigmoid() * up) @ w["mlp.down_proj.weight"].T
            hidden = hidden + _convolve(w, spec, "mlp_conv", 1, normed, out)
        else:
            hidden = hidden + out
            hidden = hidden + _mlp(w, spec, hidden)
        before = hidden.clone()
        if spec.transfer:
            features = [_code(weights, spec, tokens[0])]
            features += [_features(weights, spec, index, one) for one in before[1:]]
            for token in range(1, num_tokens):
                hidden[token] = injected(weights, spec, index, before[token], features[token - 1])
    if spec.transfer:
        return torch.cat([_rms(hidden, weights["norm.weight"], spec.eps), before], dim=-1)
    return _rms(hidden, weights["norm.weight"], spec.eps)


@torch.no_grad()
def propose(
    weights: dict[str, torch.Tensor], spec: Block, target, token_ids: torch.Tensor, num_draft_tokens: int
) -> tuple[list[int], list[torch.Tensor]]:
    """Draft after `token_ids`, `[T]` int64, the last of them not yet seen by the target.

    Returns:
        the draft tokens in the target's vocabulary, and the logits `[V_d]` that each came from.
    """
    weights = _double(weights)
    last, memory, drafts, logits = int(token_ids[-1]), torch.zeros(spec.rank, dtype=torch.float64), [], []
    if spec.anchor_first:
        hidden = block_hidden_states(weights, spec, target, token_ids, num_draft_tokens)
    else:
        anchor, *hidden = block_hidden_states(weights, spec, target, token_ids, num_draft_tokens + 1)
        if spec.markov is not None:  # speculators: the head runs over the whole block, the anchor before itself
            memory = markov_bias(weights, spec, last, anchor, memory)[1]
    own = draft_tokens(spec) if spec.draft_vocab_size < spec.vocab_size else torch.arange(spec.vocab_size)
    head = weights["lm_head.weight"] if spec.own_head else target.get_output_embeddings().weight.double()[own]
    for state in hidden:
        state, before = state[: spec.hidden_size], state[spec.hidden_size :]
        scored = head @ state * spec.multiplier
        if spec.softcap is not None:
            scored = spec.softcap * torch.tanh(scored / spec.softcap)
        if spec.markov is not None:
            bias, memory = markov_bias(weights, spec, last, state, memory)
            scored = scored + bias
        if spec.gru and len(drafts) >= spec.prefix:
            scored = scored + correction(weights, spec, target, [int(token_ids[-1]), *drafts], state)
        if spec.transfer:
            refined = injected(weights, spec, spec.num_layers - 1, before, _code(weights, spec, last))
            exact = head @ _rms(refined, weights["norm.weight"], spec.eps) * spec.multiplier
            kept = scored.argsort(descending=True)[: spec.top_k]
            scored = torch.full_like(scored, float("-inf")).index_copy_(0, kept, exact[kept])
        elif spec.top_k:
            scored = selected(weights, spec, last, state, scored)
        last = int(own[scored.argmax()])
        drafts.append(last)
        logits.append(scored)
    return drafts, logits


def markov_bias(
    weights: dict[str, torch.Tensor], spec: Block, last: int, state: torch.Tensor, memory: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bias `[V_d]` and the memory after it, given the token before, the head's input `[H]`, and the memory `[r]`."""
    embed, w2 = weights["markov_head.markov_w1.weight"][last], weights["markov_head.markov_w2.weight"]
    if spec.markov == "gated":
        gate = weights["markov_head.gate_proj.weight"] @ torch.cat([state, embed])
        embed = embed * torch.sigmoid(gate + weights["markov_head.gate_proj.bias"])
    if spec.markov == "rnn":
        joint = weights["markov_head.joint_proj.weight"] @ torch.cat([memory, embed, state])
        keep, new, out = (joint + weights["markov_head.joint_proj.bias"]).split(spec.rank)
        memory = torch.sigmoid(keep) * memory + (1 - torch.sigmoid(keep)) * torch.tanh(new)
        embed = torch.tanh(out)
    return w2 @ embed, memory


def correction(
    weights: dict[str, torch.Tensor], spec: Block, target, before: list[int], state: torch.Tensor
) -> torch.Tensor:
    """`[V_d]`: Domino's addition to the logits of a draft token after the tokens `before`, the anchor first."""
    gru = torch.nn.GRU(spec.hidden_size, spec.gru, bias=False, dtype=torch.float64)
    gru.load_state_dict({name: weights[f"prefix_gru.{name}"] for name in ("weight_ih_l0", "weight_hh_l0")})
    table = weights.get("embed_tokens.weight", target.get_input_embeddings().weight.double())
    _, memory = gru(table[before] * spec.embedding_scale)
    inner = weights["embed_proj.0.weight"] @ torch.cat([state, memory[0]])
    return weights["embed_proj.2.weight"] @ (inner * inner.sigmoid())


def _features(weights: dict[str, torch.Tensor], spec: Block, layer: int, state: torch.Tensor) -> torch.Tensor:
    """DSpine's features `[R]` of a hidden state `[H]` after a layer."""
    read = weights[f"injection.readouts.{layer}.weight"] @ state
    return read * (spec.transfer / (read * read).sum()) ** 0.5


def _code(weights: dict[str, torch.Tensor], spec: Block, token: int) -> torch.Tensor:
    return weights["transfer_codes"][token] * spec.transfer**0.5


def injected(
    weights: dict[str, torch.Tensor], spec: Block, layer: int, state: torch.Tensor, before: torch.Tensor
) -> torch.Tensor:
    """DSpine's hidden state `[H]` after a layer, given the features `[R]` of the token before."""
    w = {name.removeprefix("injection."): value for name, value in weights.items()}
    opened = w["receiver_gate.weight"] @ _features(weights, spec, layer, state)
    opened = opened + w["predecessor_gate.weight"] @ before + w["bias"]
    told = w[f"writes.{layer}.weight"] @ (torch.sigmoid(opened) * (w["message.weight"] @ before))
    return state + (state * state).mean() ** 0.5 * told


def selected(
    weights: dict[str, torch.Tensor], spec: Block, last: int, state: torch.Tensor, scored: torch.Tensor
) -> torch.Tensor:
    """DFlash-2's scores `[V]` of the candidates, minus infinity for all others."""
    w = {name.removeprefix("candidate_selector."): value for name, value in weights.items()}
    context = w["predecessor_codebook"][last] * (w["hidden_projection.weight"] @ state)
    found = torch.full_like(scored, float("-inf"))
    for candidate in scored.argsort(descending=True)[: spec.top_k].tolist():
        found[candidate] = scored[candidate] + context @ w["successor_codebook"][candidate]
    return found


@torch.no_grad()
def context_cache(
    weights: dict[str, torch.Tensor], spec: Block, target, token_ids: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values `[T - 1, kv_heads, D]` of the context in every layer."""
    weights = _double(weights)
    context, positions = _context(weights, spec, target, token_ids), torch.arange(len(token_ids) - 1)
    return [_keys_and_values(_layer(weights, index), spec, context, positions) for index in range(spec.num_layers)]
