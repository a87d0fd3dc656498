"""Small random targets with MTP modules, written to disk under every family's published names, and a recomputation.

Names as in the publishers' checkpoints, which vLLM's readers (deepseek_mtp.py, glm4_moe_mtp.py, step3p5_mtp.py,
mimo_mtp.py, qwen3_next_mtp.py, qwen3_5_mtp.py) and vllm-project/speculators (convert/mtp) spell out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from dialects import write_config
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from targets import _COMMON, _MOE, FAMILIES, PAD
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen2ForCausalLM,
)

from hf_specdec.host.caches import OUTPUT_NAME

_SMALL = _COMMON | {"num_hidden_layers": 3}
_HYBRID = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {"num_experts": 4, "shared_expert_intermediate_size": 16, **_MOE}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


@dataclass(frozen=True)
class Family:
    """How a family publishes and wires its modules.

    Attributes:
        options: of the target's (text) configuration.
        count_key: where config.json has the number of modules.
        frame: published names of the parts around a module's decoder layer: embedding norm, hidden norm, projection,
            final norm, head, embedding; `{i}` is the module, `{n}` its number behind the target's layers.
        block: prefix of a module's decoder layer.
        hidden_first, offset, post_norm, own_head: the wiring.
        engine: that hosts the target.
    """

    options: dict[str, Any]
    count_key: str | None
    frame: tuple[str, str, str, str, str | None, str | None]
    block: str
    hidden_first: bool = False
    offset: bool = False
    post_norm: bool = True
    own_head: bool = False
    engine: str = "static"


_DEEPSEEK = (
    "model.layers.{n}.enorm",
    "model.layers.{n}.hnorm",
    "model.layers.{n}.eh_proj",
    "model.layers.{n}.shared_head.norm",
    "model.layers.{n}.shared_head.head",
    "model.layers.{n}.embed_tokens",
)
_STEP = (
    "model.layers.{n}.enorm",
    "model.layers.{n}.hnorm",
    "model.layers.{n}.eh_proj",
    "model.layers.{n}.transformer.shared_head.norm",
    "model.layers.{n}.transformer.shared_head.output",
    None,
)
_QWEN = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", None, None)


def _mimo(prefix: str) -> tuple[str, str, str, str, None, None]:
    parts = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    return (*(f"{prefix}.{{i}}.{part}" for part in parts), None, None)


MTP_FAMILIES = {
    "deepseek-v3": Family(FAMILIES["deepseek-v3"], "num_nextn_predict_layers", _DEEPSEEK, "model.layers.{n}"),
    "glm-4.5": Family(
        {
            "model_type": "glm4_moe",
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "rope_parameters": _ROPE,
            **_MOE,
        },
        "num_nextn_predict_layers",
        _DEEPSEEK,
        "model.layers.{n}",
    ),
    "step-3.5": Family(
        {
            "model_type": "step3p5",
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "dense", "sparse"],
            "n_routed_experts": 4,
            "share_expert_dim": 16,
            "num_sliding_attention_heads": 6,
            "rope_parameters": {"full_attention": _ROPE, "sliding_attention": {**_ROPE, "rope_theta": 5000.0}},
            **_MOE,
        },
        "num_nextn_predict_layers",
        _STEP,
        "model.layers.{n}",
        offset=True,
        post_norm=False,
        own_head=True,
    ),
    "mimo": Family(
        {"model_type": "qwen2"},
        "num_nextn_predict_layers",
        _mimo("model.mtp_layers"),
        "model.mtp_layers.{i}",
        hidden_first=True,
    ),
    "qwen3-next": Family(
        {"model_type": "qwen3_next", **_HYBRID, **_EXPERTS}, None, _QWEN, "mtp.layers.{i}", offset=True, engine="stock"
    ),
    "qwen3.5": Family(
        {"model_type": "qwen3_5_text", **_HYBRID},
        "mtp_num_hidden_layers",
        _QWEN,
        "mtp.layers.{i}",
        offset=True,
        engine="stock",
    ),
    "qwen3.5-moe": Family(
        {"model_type": "qwen3_5_moe_text", **_HYBRID, **_EXPERTS},
        "mtp_num_hidden_layers",
        _QWEN,
        "mtp.layers.{i}",
        offset=True,
        engine="stock",
    ),
    "speculators": Family({"model_type": "qwen3"}, "num_nextn_predict_layers", _mimo("mtp_layers"), "mtp_layers.{i}"),
}


@dataclass
class Module:
    """One MTP module, in memory, in float64."""

    embedding_norm: torch.Tensor
    hidden_norm: torch.Tensor
    projection: torch.Tensor
    final_norm: torch.Tensor
    head: torch.Tensor | None
    layer: nn.Module


@dataclass
class Published:
    """A target with modules that was written to disk.

    Attributes:
        folder: the argument of `AutoDrafter`.
        target: as loaded from disk, in float32.
        modules: written there, for `propose`.
        rotary: `rotary(x, positions, index)`: RoPE of module `index`.
    """

    family: Family
    folder: Path
    target: PreTrainedModel
    modules: list[Module]
    rotary: Any


def _target_class(family: str) -> Any:
    classes = {"mimo": Qwen2ForCausalLM, "step-3.5": AutoModelForImageTextToText}
    return classes.get(family, AutoModelForCausalLM)


def _new_target(family: str, **changes: Any) -> PreTrainedModel:
    """A random model of the family."""
    options = {**_SMALL, **MTP_FAMILIES[family].options, **changes}
    model_type = options.pop("model_type")
    if model_type == "step3p5":
        vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        config = AutoConfig.for_model("step3p7", text_config=options, vision_config=vision | {"image_size": 28})
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **options), dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.dim() == 1:
                noise = 0.2 * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(parameter + noise)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = PAD, None
    return model.eval()


def _donor(family: str, num_modules: int) -> PreTrainedModel:
    """A random model whose layers become those of the modules."""
    # Norms compute in float32; chains of layers with larger weights would magnify that beyond what tests compare by.
    changes: dict[str, Any] = {"num_hidden_layers": num_modules, "first_k_dense_replace": 0, "initializer_range": 0.1}
    options = MTP_FAMILIES[family].options
    if "layer_types" in options:
        kind = "sliding_attention" if "sliding_window" in options else "full_attention"
        changes["layer_types"] = [kind] * num_modules
    if "mlp_layer_types" in options:
        changes["mlp_layer_types"] = ["dense"] * num_modules
    if "first_k_dense_replace" not in options:
        del changes["first_k_dense_replace"]
    if family == "step-3.5":
        changes["rope_parameters"] = {"sliding_attention": options["rope_parameters"]["sliding_attention"]}
    return _new_target(family, **changes)


def publish(
    family: str, folder: Path, num_modules: int = 1, seed: int = 0, max_shard_size: str | None = None, **changes: Any
) -> Published:
    """Write a target with modules as its family does. `changes` are made to config.json; `...` removes a key."""
    kind = MTP_FAMILIES[family]
    torch.manual_seed(seed)
    target, donor = _new_target(family), _donor(family, num_modules)
    width, num_layers = _SMALL["hidden_size"], _SMALL["num_hidden_layers"]
    is_apart = family == "speculators"
    target_folder = folder.with_name(folder.name + "-target") if is_apart else folder
    target.save_pretrained(target_folder)
    donor.save_pretrained(folder.with_name(folder.name + "-donor"))
    tensors = {} if is_apart else load_file(target_folder / "model.safetensors")

    own = load_file(folder.with_name(folder.name + "-donor") / "model.safetensors")
    for index in range(num_modules):
        for name, tensor in own.items():
            before, found, part = name.partition(f"model.layers.{index}.")
            if not found:
                before, found, part = name.partition(f"language_model.layers.{index}.")
            if found and not before:
                tensors[f"{_place(kind.block, index, num_layers)}.{part}"] = tensor.clone()

    modules, decoder = [], donor.get_decoder().double()
    # The other implementations do not take float64.
    decoder.set_experts_implementation("eager")
    base = 0.0 if kind.offset else 1.0
    shared: list[torch.Tensor] = []
    for index in range(num_modules):
        if not shared or "{" in kind.frame[0]:
            shared = [
                base + 0.2 * torch.randn(width),
                base + 0.2 * torch.randn(width),
                torch.randn(width, 2 * width) / width**0.5,
                base + 0.2 * torch.randn(width),
            ]
        head = torch.randn(_SMALL["vocab_size"], width) / 2
        for name, tensor in zip(kind.frame[:4], shared, strict=True):
            tensors[_place(name, index, num_layers) + ".weight"] = tensor.clone()
        copies = (
            head if kind.own_head else target.get_output_embeddings().weight,
            target.get_input_embeddings().weight,
        )
        for name, tensor in zip(kind.frame[4:], copies, strict=True):
            if name is not None:
                tensors[_place(name, index, num_layers) + ".weight"] = tensor.detach().clone()
        embedding_norm, hidden_norm, projection, final_norm = (tensor.double() for tensor in shared)
        modules.append(
            Module(
                embedding_norm,
                hidden_norm,
                projection,
                final_norm,
                head.double() if kind.own_head else None,
                decoder.layers[index],
            )
        )
    _write(family, folder, target_folder, tensors, num_modules, max_shard_size, changes)
    loaded = _target_class(family).from_pretrained(target_folder, dtype=torch.float32).eval()
    for name, parameter in target.state_dict().items():
        assert torch.equal(parameter, loaded.state_dict()[name]), f"{family} is not what was written: {name}"
    loaded.generation_config.pad_token_id, loaded.generation_config.eos_token_id = PAD, None
    loaded.set_experts_implementation("eager")
    options = [{"layer_type": kind} for kind in decoder.config.layer_types] if family == "step-3.5" else None

    def rotary(x, positions, index):
        rows = positions.expand(3, -1, -1) if family.startswith("qwen3.5") else positions
        return decoder.rotary_emb(x, rows, **(options[index] if options else {}))

    return Published(kind, folder, loaded, modules, rotary)


def _place(name: str, index: int, num_layers: int) -> str:
    return name.format(i=index, n=num_layers + index)


def _write(
    family: str,
    folder: Path,
    target_folder: Path,
    tensors: dict[str, torch.Tensor],
    num_modules: int,
    max_shard_size: str | None,
    changes: dict[str, Any],
) -> None:
    folder.mkdir(exist_ok=True)
    key = MTP_FAMILIES[family].count_key
    config = json.loads((target_folder / "config.json").read_text())
    text = config.get("text_config", config)
    for name in ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers"):
        text.pop(name, None)
    if key is not None:
        text[key] = num_modules
    if family == "mimo":
        config |= {
            "model_type": "mimo",
            "architectures": ["MiMoForCausalLM"],
            "auto_map": {"AutoConfig": "x.MiMoConfig"},
        }
    if family == "step-3.5":
        text.pop("per_layer_config", None)
        text["layer_types"] += ["sliding_attention"] * num_modules
        text["mlp_layer_types"] += ["dense"] * num_modules
    if family.startswith("qwen3.5"):
        # As published: the text model's settings inside those of a model that sees, too.
        top = text["model_type"].removesuffix("_text")
        config = {"model_type": top, "architectures": [config["architectures"][0]], "text_config": text}
    if family == "speculators":
        config = {
            "speculators_model_type": "mtp",
            "architectures": ["MTPDraftModel"],
            "num_nextn_predict_layers": 1,
            "transformer_layer_config": {name: value for name, value in text.items() if name != key},
            "speculators_config": {
                "algorithm": "mtp",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": str(target_folder), "architectures": ["Qwen3ForCausalLM"]},
            },
        }
    write_config(folder, config, changes)
    (folder / "model.safetensors").unlink(missing_ok=True)
    save_torch_state_dict(tensors, folder, max_shard_size=max_shard_size or "1GB")


def _rms(x: torch.Tensor, weight: torch.Tensor, offset: bool, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (1 + weight if offset else weight)


@torch.no_grad()
def last_hidden_states(target: PreTrainedModel, token_ids: torch.Tensor) -> torch.Tensor:
    """`[S, H]` after the final norm, from a float64 pass over `[S]` tokens."""
    if len(token_ids) == 0:
        return torch.zeros(0, _SMALL["hidden_size"], dtype=torch.float64)
    return target.get_decoder()(input_ids=token_ids[None], use_cache=False).last_hidden_state[0]


class KeysOfOneLayer:
    """Stand-in for a cache of one pass; it keeps the keys and values."""

    def __init__(self):
        self.written = None

    def update(self, keys, values, layer_idx, *args, **kwargs):
        self.written = (keys[0], values[0])
        return keys, values


@torch.no_grad()
def _module(
    published: Published, index: int, hidden: torch.Tensor, embeds: torch.Tensor, target: PreTrainedModel
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Module `index` over the slots 0 to n - 1: logits `[n, V]`, its output `[n, H]`, and its keys and values."""
    kind, module, eps = published.family, published.modules[index], target.config.get_text_config().rms_norm_eps
    pair = [
        _rms(embeds, module.embedding_norm, kind.offset, eps),
        _rms(hidden, module.hidden_norm, kind.offset, eps),
    ]
    inputs = (torch.cat(pair[::-1] if kind.hidden_first else pair, dim=-1) @ module.projection.T)[None]
    positions, cache = torch.arange(len(hidden))[None], KeysOfOneLayer()
    distance = positions[0][:, None] - positions[0][None, :]
    window = getattr(module.layer.self_attn, "sliding_window", None) or len(hidden)
    mask = torch.where((distance >= 0) & (distance < window), 0.0, float("-inf")).double()[None, None]
    module.layer.self_attn.config._attn_implementation = "eager"
    output = module.layer(
        inputs,
        attention_mask=mask,
        position_ids=positions,
        **{OUTPUT_NAME: cache},
        position_embeddings=published.rotary(inputs, positions, index),
    )[0]
    normed = _rms(output, module.final_norm, kind.offset, eps)
    head = target.get_output_embeddings().weight if module.head is None else module.head
    return normed @ head.T, normed if kind.post_norm else output, cache.written


@torch.no_grad()
def draft(
    published: Published,
    target: PreTrainedModel,
    token_ids: torch.Tensor,
    num_draft_tokens: int,
    chaining: str,
    given: list[int] | None = None,
    hidden: torch.Tensor | None = None,
) -> tuple[list[int], list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Draft after `[T]` tokens, at least 2, the last of them not yet seen by the float64 `target`.

    Every step runs its module over all slots again. With `"modules"`, step k reads at slot p the output of step k - 1
    at p, and the token p + k + 1. With `"target"`, drafts count as text, and outputs of steps at their last slots as
    the target's hidden states there. `given` are drafted in place of the modules' best tokens. `hidden` are the
    `last_hidden_states` of a text that begins with the tokens, if they are known.

    Returns:
        the draft tokens, the logits `[V]` that each came from, and each step's keys and values.
    """
    embedding = target.get_input_embeddings().weight
    text, drafts, logits, caches = token_ids.tolist(), [], [], []
    hidden = last_hidden_states(target, token_ids[:-1]) if hidden is None else hidden[: len(token_ids) - 1]
    for step in range(num_draft_tokens):
        index = step % len(published.modules)
        ahead = 1 + step if chaining == "modules" else 1
        embeds = embedding[torch.tensor(text[ahead : ahead + len(hidden)])]
        scored, handed_on, cache = _module(published, index, hidden, embeds, target)
        hidden = handed_on if chaining == "modules" else torch.cat([hidden, handed_on[-1:]])
        logits.append(scored[-1])
        drafts.append(int(scored[-1].argmax()) if given is None else given[step])
        caches.append(cache)
        text.append(drafts[-1])
    return drafts, logits, caches
