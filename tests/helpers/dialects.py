"""Writes the same EAGLE-3 or P-EAGLE weights to disk in every published layout, and draft models.

Layouts as the publishers' own exporters write them: SafeAILab/EAGLE traineagle3, sgl-project/SpecForge,
vllm-project/speculators, NVIDIA/Model-Optimizer; of P-EAGLE also Amazon and NVIDIA-NeMo/Automodel; of draft models
AMD-AIG-AIMA/PARD.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

DIALECTS = ("safeailab", "safeailab-bin", "specforge", "speculators", "modelopt")
# For a `Spec` with `parallel`. Amazon writes its layers' keys at top level, or nested as speculators does.
PEAGLE_DIALECTS = ("amazon", "amazon-nested", "specforge-peagle", "speculators-peagle", "automodel")


@dataclass(frozen=True)
class Spec:
    """An EAGLE-3 drafter, described without any publisher's names. Its auxiliary hidden states enter layers 2, 4 and 5.

    With `parallel` it is a P-EAGLE drafter: it has a tensor `mask_hidden`, and `mask_token` stands for no token.
    """

    hidden_size: int = 32
    target_hidden_size: int = 32
    intermediate_size: int = 48
    num_layers: int = 1
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    vocab_size: int = 128
    draft_vocab_size: int = 40
    target_layers: int = 8
    aux_hidden_state_layer_ids: tuple[int, ...] = (2, 4, 5)
    eps: float = 1e-5
    rope_theta: float = 10000.0
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    maps_vocabulary: bool = True
    parallel: bool = False
    mask_token: int = 5


PLAIN = Spec()
VARIANTS = {
    "plain": PLAIN,
    "normed-residual": replace(PLAIN, norm_before_residual=True),
    "qwen3": replace(PLAIN, qk_norm=True, head_dim=12),
    "two-layers": replace(PLAIN, num_layers=2, own_embedding=True),
    "narrow-drafter": replace(PLAIN, hidden_size=24, own_embedding=True, head_dim=6),
    "norm-before-fc": replace(PLAIN, norm_before_fc=True),
    "eagle-3.1": replace(PLAIN, fc_norm=True, norm_output=True),
    "full-vocabulary": replace(PLAIN, draft_vocab_size=PLAIN.vocab_size, maps_vocabulary=False),
    "rope-base": replace(PLAIN, rope_theta=500000.0),
}
# As P-EAGLE is published: several layers, trained embeddings, the target's vocabulary.
PEAGLE = Spec(num_layers=2, draft_vocab_size=128, maps_vocabulary=False, own_embedding=True, parallel=True)


def tiny_target(
    spec: Spec, seed: int = 0, dtype: torch.dtype = torch.float64, initializer_range: float = 0.15
) -> LlamaForCausalLM:
    """A random Llama whose layers all matter."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=spec.target_hidden_size,
        intermediate_size=64,
        num_hidden_layers=spec.target_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=spec.vocab_size,
        max_position_embeddings=512,
        initializer_range=initializer_range,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def draft_tokens(spec: Any) -> torch.Tensor:
    """`[V_d]` ids in the target's vocabulary: ascending, with gaps."""
    generator = torch.Generator().manual_seed(7)
    return torch.randperm(spec.vocab_size, generator=generator)[: spec.draft_vocab_size].sort().values


def layer_shapes(prefix: str, spec: Any, inputs: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of a decoder layer with attention over vectors of `inputs` numbers."""
    width, query, key = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        prefix + "self_attn.q_proj.weight": (query, inputs),
        prefix + "self_attn.k_proj.weight": (key, inputs),
        prefix + "self_attn.v_proj.weight": (key, inputs),
        prefix + "self_attn.o_proj.weight": (width, query),
        prefix + "mlp.gate_proj.weight": (spec.intermediate_size, width),
        prefix + "mlp.up_proj.weight": (spec.intermediate_size, width),
        prefix + "mlp.down_proj.weight": (width, spec.intermediate_size),
        prefix + "input_layernorm.weight": (width,),
        prefix + "post_attention_layernorm.weight": (width,),
    }


def make_weights(spec: Spec, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random weights under the names `layers.0.*`, without prefix."""
    generator = torch.Generator().manual_seed(seed)
    width, aux_size = spec.hidden_size, len(spec.aux_hidden_state_layer_ids) * spec.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, aux_size)}
    for index in range(spec.num_layers):
        prefix = f"layers.{index}."
        shapes |= layer_shapes(prefix, spec, 2 * width if index == 0 else width)
        if index == 0:
            shapes[prefix + "hidden_norm.weight"] = (width,)
        if spec.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (spec.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (spec.head_dim,)
    if spec.norm_before_fc:
        shapes["input_norm.weight"] = (aux_size,)
    if spec.fc_norm:
        shapes |= {
            f"fc_norm.{index}.weight": (spec.target_hidden_size,)
            for index in range(len(spec.aux_hidden_state_layer_ids))
        }
    if spec.own_embedding:
        shapes["embed_tokens.weight"] = (spec.vocab_size, width)
    shapes |= {"norm.weight": (width,), "lm_head.weight": (spec.draft_vocab_size, width)}

    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.3 * noise if len(shape) == 1 else noise / shape[-1] ** 0.5
    if spec.maps_vocabulary:
        tokens = draft_tokens(spec)
        weights["d2t"] = tokens - torch.arange(len(tokens))
        weights["t2d"] = torch.zeros(spec.vocab_size, dtype=torch.bool).index_fill_(0, tokens, True)
    if spec.parallel:
        weights["mask_hidden"] = torch.randn(1, 1, aux_size, generator=generator)
    return weights


def write_config(folder: Path, config: dict[str, Any], changes: dict[str, Any]) -> None:
    """Write config.json with `changes`; a value of `...` removes the key."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {key: value for key, value in (config | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def layer_config(spec: Any) -> dict[str, Any]:
    """What config.json says of the layers of a `Spec`, or of a `Block` of `blocks.py`."""
    return {
        "model_type": "qwen3" if getattr(spec, "qk_norm", True) else "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.eps,
        "max_position_embeddings": 2048,
        "vocab_size": spec.vocab_size,
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": False,
    }


def _optional(spec: Spec, *names: str) -> dict[str, Any]:
    return {name: True for name in names if getattr(spec, name)}


def _plain_config(spec: Spec) -> dict[str, Any]:
    config = layer_config(spec) | {"draft_vocab_size": spec.draft_vocab_size, "torch_dtype": "float16"}
    config |= _optional(spec, "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    if spec.target_hidden_size != spec.hidden_size:
        config["target_hidden_size"] = spec.target_hidden_size
    return config


def safeailab_config(spec: Spec) -> dict[str, Any]:
    return _plain_config(spec) | {"architectures": ["LlamaForCausalLM"]}


def specforge_config(spec: Spec) -> dict[str, Any]:
    nested = {
        "eagle_aux_hidden_state_layer_ids": [layer_id - 1 for layer_id in spec.aux_hidden_state_layer_ids],
        "use_aux_hidden_state": True,
    }
    return _plain_config(spec) | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": nested}


def modelopt_config(spec: Spec) -> dict[str, Any]:
    config = _plain_config(spec) | {"architectures": ["LlamaForCausalLMEagle3"], "rope_scaling": None}
    config["rope_scaling"] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    config["eagle_config"] = {
        "eagle_aux_hidden_state_layer_ids": [layer_id - 1 for layer_id in spec.aux_hidden_state_layer_ids],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": None,
    }
    config["eagle_config"] |= {"norm_before_fc": True} if config.pop("norm_before_fc", False) else {}
    return config


def speculators_config(spec: Spec) -> dict[str, Any]:
    layer = layer_config(spec)
    defaults = (Qwen3Config if spec.qk_norm else LlamaConfig)().to_dict()
    changed = {key: value for key, value in layer.items() if key == "model_type" or defaults.get(key) != value}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "draft_vocab_size": spec.draft_vocab_size,
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.norm_before_fc,
        "fc_norm": spec.fc_norm,
        "norm_output": spec.norm_output,
        "target_hidden_size": spec.target_hidden_size if spec.target_hidden_size != spec.hidden_size else None,
        "eagle_aux_hidden_state_layer_ids": list(spec.aux_hidden_state_layer_ids),
        "transformer_layer_config": changed,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
    }


def deepspec_config(spec: Spec) -> dict[str, Any]:
    return layer_config(spec) | {
        "architectures": ["Qwen3Eagle3Model"],
        "target_layer_ids": [layer_id - 1 for layer_id in spec.aux_hidden_state_layer_ids],
        "num_target_layers": spec.target_layers,
        "ttt_length": 7,
        "step_loss_decay": 0.8,
    }


def amazon_config(spec: Spec) -> dict[str, Any]:
    nested = {
        "eagle_aux_hidden_state_layer_ids": [layer_id - 1 for layer_id in spec.aux_hidden_state_layer_ids],
        "use_aux_hidden_state": True,
    }
    config = _plain_config(spec) | {"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": spec.mask_token}
    return config | {"eagle_config": nested}


def amazon_nested_config(spec: Spec) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "ptd_token_id": spec.mask_token,
        "draft_vocab_size": spec.draft_vocab_size,
        "transformer_layer_config": layer_config(spec),
        **_optional(spec, "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
    }
    if spec.target_hidden_size != spec.hidden_size:
        config["target_hidden_size"] = spec.target_hidden_size
    if spec.aux_hidden_state_layer_ids != Spec.aux_hidden_state_layer_ids:
        config["eagle_aux_hidden_state_layer_ids"] = list(spec.aux_hidden_state_layer_ids)
    return config


def specforge_peagle_config(spec: Spec) -> dict[str, Any]:
    """SpecForge's trainer leaves out the scaling of RoPE, and has no key for the mask token."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    config = _plain_config(spec) | {"architectures": ["PEagleDraftModel"], "mask_token_id": spec.mask_token}
    config |= {"rope_scaling": scaling}
    if spec.aux_hidden_state_layer_ids != Spec.aux_hidden_state_layer_ids:
        config["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": list(spec.aux_hidden_state_layer_ids),
            "use_aux_hidden_state": True,
        }
    return config


def speculators_peagle_config(spec: Spec) -> dict[str, Any]:
    config = speculators_config(spec) | {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "mask_token_id": spec.mask_token,
        "embed_requires_grad": True,
    }
    config["speculators_config"] |= {"algorithm": "peagle"}
    return config


def automodel_config(spec: Spec) -> dict[str, Any]:
    return _plain_config(spec) | {
        "architectures": ["LlamaEagle3DraftModel"],
        "parallel_drafting": True,
        "mask_token_id": spec.mask_token,
        "num_depths": 6,
        "num_aux_hidden_states": len(spec.aux_hidden_state_layer_ids),
        "eagle_aux_hidden_state_layer_ids": list(spec.aux_hidden_state_layer_ids),
    }


_CONFIGS = {
    "safeailab": safeailab_config,
    "safeailab-bin": safeailab_config,
    "specforge": specforge_config,
    "speculators": speculators_config,
    "modelopt": modelopt_config,
    "deepspec": deepspec_config,
    "amazon": amazon_config,
    "amazon-nested": amazon_nested_config,
    "specforge-peagle": specforge_peagle_config,
    "speculators-peagle": speculators_peagle_config,
    "automodel": automodel_config,
}


def write(
    dialect: str,
    folder: Path,
    spec: Spec,
    weights: dict[str, torch.Tensor],
    max_shard_size: str | None = None,
    **changes: Any,
) -> Path:
    """Write `weights` as `dialect` would. `changes` are made to config.json; a value of `...` removes the key."""
    write_config(folder, _CONFIGS[dialect](spec), changes)
    tensors = {name: tensor.clone() for name, tensor in weights.items()}
    if dialect in ("safeailab", "safeailab-bin", "specforge", "amazon", "amazon-nested"):
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    if dialect == "modelopt":
        tensors.pop("t2d", None)
    if dialect in PEAGLE_DIALECTS and spec.draft_vocab_size == spec.vocab_size and dialect != "speculators-peagle":
        tensors |= {
            "d2t": torch.zeros(spec.vocab_size, dtype=torch.int64),
            "t2d": torch.ones(spec.vocab_size, dtype=torch.bool),
        }
    if dialect == "automodel":
        outside = ("lm_head.weight", "d2t", "t2d", "mask_hidden", "model.mask_hidden")
        tensors = {name if name in outside else f"model.{name}": tensor for name, tensor in tensors.items()}
        if "mask_hidden" in tensors:
            tensors["mask_hidden"] = tensors["mask_hidden"].view(1, -1)
    if dialect == "safeailab-bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif max_shard_size is not None:
        save_torch_state_dict(tensors, folder, max_shard_size=max_shard_size)
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_draft_model(
    folder: Path,
    pard_token: int | None = None,
    spec: Spec = Spec(target_layers=2),
    seed: int = 2,
    max_shard_size: str = "1GB",
    **changes: Any,
) -> Path:
    """Write a random Llama as `save_pretrained` does and, with `pard_token`, as PARD's trainer marks its models.

    `changes` are made to config.json; a value of `...` removes the key.
    """
    model = tiny_target(spec, seed, torch.float32)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    config = json.loads((folder / "config.json").read_text())
    if pard_token is not None:
        config |= {"pard_token": pard_token, "spd_type": "pard"}
    write_config(folder, config, changes)
    return folder
