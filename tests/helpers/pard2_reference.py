"""PARD-2 drafters, written to disk as AMD's trainer writes them, and their drafts, recomputed in float64.

Slot p holds token p with the projected hidden states of the target at p - 1, zeros for the first; mask tokens repeat
those of the newest token (AMD-AGI/PARD pard2_infer.py, pard2_train.py). There is no cache here, and no code shared with
the package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from dialects import write_config
from eagle_reference import _head, _run, read_llama
from transformers import LlamaConfig, LlamaForCausalLM

PROJECTION_FILE = "warp_model.bin"
# Not in the order of the layers, as in AMD's examples; -1 is the state after the final norm.
HIDDEN_STATES = [-1, -4, 2]


def write(
    folder: Path,
    hidden_states: list[int] = HIDDEN_STATES,
    target_hidden_size: int = 32,
    vocab_size: int = 128,
    pard_token: int = 5,
    bias: bool = False,
    seed: int = 4,
    **changes: Any,
) -> Path:
    """Write a random Llama and a projection. `changes` are made to config.json; a value of `...` removes the key."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=24,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=vocab_size,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
            initializer_range=0.2,
        )
    )
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    model.save_pretrained(folder)
    width = len(hidden_states) * target_hidden_size
    tensors = {"target_proj.weight": torch.randn(24, width)}
    if bias:
        tensors["target_proj.bias"] = 10 * torch.randn(24)
    torch.save(tensors, folder / PROJECTION_FILE)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "pard_token": pard_token,
        "spd_type": "pard2",
        "pard2": True,
        "pard2_target_layers": hidden_states,
        "pard2_target_dim": width,
        "pard2_scale": 0.05,
        "pard2_proj_bias": bias,
    }
    write_config(folder, config, changes)
    return folder


@torch.no_grad()
def _inputs(folder: Path, target, token_ids: torch.Tensor, num_masks: int):
    """Weights, shape, and input embeddings `[T + masks, H]`."""
    (weights, spec), config = read_llama(folder), json.loads((folder / "config.json").read_text())
    features = torch.zeros(1, config["pard2_target_dim"], dtype=torch.float64)
    if len(token_ids) > 1:
        states = target.double()(token_ids[None, :-1], output_hidden_states=True, use_cache=False).hidden_states
        seen = torch.cat([states[index][0] for index in config["pard2_target_layers"]], dim=-1)
        features = torch.cat([features, seen])
    features = torch.cat([features, features[-1:].expand(num_masks, -1)])
    projected = features @ weights["target_proj.weight"].T + weights.get("target_proj.bias", 0.0)
    tokens = token_ids.tolist() + [spec.mask_token] * num_masks
    return weights, spec, weights["embed_tokens.weight"][tokens] + config["pard2_scale"] * projected


@torch.no_grad()
def propose(
    folder: Path, target, token_ids: torch.Tensor, num_draft_tokens: int
) -> tuple[list[int], list[torch.Tensor]]:
    """Draft after `token_ids` `[T]` int64: the draft tokens, and the logits `[V]` that each came from."""
    weights, spec, embeds = _inputs(folder, target, token_ids, num_draft_tokens - 1)
    logits = _head(weights, spec, _run(weights, spec, embeds)[0][-num_draft_tokens:])[0]
    return logits.argmax(-1).tolist(), list(logits)


def cache(folder: Path, target, token_ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values `[T, kv_heads, D]` of every layer after a pass over `token_ids`."""
    weights, spec, embeds = _inputs(folder, target, token_ids, 0)
    return _run(weights, spec, embeds)[1]
