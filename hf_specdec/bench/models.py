"""The target and the drafters of a benchmark: loaded, or built from their config.json with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DistributedConfig, PreTrainedConfig, PreTrainedModel

from .. import loading
from ..auto import read_config
from ..checkpoints.checkpoint import (
    Checkpoint,
    StoredTensor,
    quiet_loading,
    read_config_file,
)
from ..checkpoints.detection import (
    DFLASH,
    DFLASH2,
    DOMINO,
    DSPARK,
    EAGLE3,
    MTP,
    P_EAGLE,
    PARD2,
    block_settings,
    check_family,
)
from ..checkpoints.mtp_layouts import implied_names
from ..drafters import Drafter
from ..drafters.registry import registered_drafters
from ..host.modeling import with_random_weights


def load_target(
    name: str, dtype: torch.dtype, device: torch.device, random_weights: bool = False, tensor_parallel: bool = False
) -> PreTrainedModel:
    """The target, prepared by `loading.prepare_target`.

    Args:
        name: folder, Hub repository or GGUF file.
        dtype, device: of its weights.
        random_weights: whether only its config.json is read.
        tensor_parallel: whether it is sharded over the ranks that torchrun has started, each of which reads or draws
            its own shards only; `device` is then the device of this rank.
    """
    if tensor_parallel:
        return loading.prepare_target(_sharded_target(name, dtype, random_weights))
    if not random_weights:
        return loading.load_target(name, dtype, device)
    config = AutoConfig.from_pretrained(**loading.from_pretrained_arguments(name))
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return loading.prepare_target(model)


def _sharded_target(name: str, dtype: torch.dtype, random_weights: bool) -> PreTrainedModel:
    located, sharding = loading.from_pretrained_arguments(name), DistributedConfig(tp_plan="auto")
    if not random_weights:
        return AutoModelForCausalLM.from_pretrained(**located, dtype=dtype, distributed_config=sharding)
    config = AutoConfig.from_pretrained(**located)
    with torch.device("meta"):
        model_class = type(AutoModelForCausalLM.from_config(config))
    torch.manual_seed(0)
    # With an empty state dict transformers initializes all tensors at random, of sharded ones only the rank's shard.
    with quiet_loading():
        return model_class.from_pretrained(None, config=config, state_dict={}, dtype=dtype, distributed_config=sharding)


def random_drafter(name: str, target: PreTrainedModel) -> Drafter:
    """A drafter with random weights in the shapes that its config.json implies, bound to `target`."""
    file, settings = read_config_file(name)
    published = settings.get("model_type") not in registered_drafters()
    text = target.config.get_text_config()
    kind = check_family(name, settings, (), text) if published else None
    shapes = _IMPLIED[kind](settings, text) if kind in _IMPLIED else {}
    tensors = {tensor: StoredTensor(shape, "BF16", Path()) for tensor, shape in shapes.items()}
    found = read_config(Checkpoint(name, file.parent, settings, tensors), target.config)
    torch.manual_seed(0)  # All ranks of a tensor-parallel target draw the same drafter.
    with torch.device(target.device):
        # In the target's dtype from the start, since stacked experts take gigabytes, in float32 twice as many.
        drafter = with_random_weights(found.family, found.config, target.dtype).to(target.dtype).eval()
    drafter.requires_grad_(False)
    drafter.bind(target)
    return drafter


Shapes = dict[str, tuple[int, ...]]


def _implied_tensors(config: Mapping[str, Any], target: PreTrainedConfig) -> Shapes:
    """Names and shapes, as far as the reader of EAGLE-3 and P-EAGLE checkpoints infers settings from them.

    The checkpoint is taken to have its own draft head and to share the target's embedding, as most published ones do.
    """
    speculators, nested = config.get("transformer_layer_config") or {}, config.get("eagle_config") or {}
    stated = {**config, **nested, **speculators}
    width = stated.get("hidden_size") or target.hidden_size
    aux_hidden_size = stated.get("target_hidden_size") or target.hidden_size
    ids = stated.get("eagle_aux_hidden_state_layer_ids") or stated.get("layer_ids") or ()
    num_aux_hidden_states = len(set(ids)) or stated.get("num_aux_hidden_states") or stated.get("num_aux_layers") or 3
    draft_vocab = stated.get("draft_vocab_size") or stated.get("vocab_size") or target.vocab_size
    shapes: Shapes = {"lm_head.weight": (draft_vocab, width), "norm.weight": (width,)}
    if stated.get("use_aux_hidden_state", True):
        shapes["fc.weight"] = (width, num_aux_hidden_states * aux_hidden_size)
    present = {
        "input_norm.weight": stated.get("norm_before_fc"),
        "fc_norm.0.weight": stated.get("fc_norm"),
        "layers.0.self_attn.q_proj.bias": stated.get("attention_bias"),
        "layers.0.mlp.gate_proj.bias": stated.get("mlp_bias"),
        "layers.0.self_attn.q_norm.weight": stated.get("model_type") == "qwen3",
    }
    shapes |= {tensor: () for tensor, there in present.items() if there}
    shapes |= {
        f"layers.{layer}.input_layernorm.weight": (width,) for layer in range(stated.get("num_hidden_layers", 1))
    }
    return shapes


def _implied_block_tensors(config: Mapping[str, Any], target: PreTrainedConfig) -> Shapes:
    """As `_implied_tensors`, of drafters of blocks.

    The checkpoint is taken to share the target's embedding, and its head unless it drafts fewer tokens.
    """
    stated = {**config, **block_settings(config), **(config.get("transformer_layer_config") or {})}
    width, num_layers = stated.get("hidden_size") or target.hidden_size, stated.get("num_hidden_layers", 1)
    ids = stated.get("aux_hidden_state_layer_ids") or stated.get("target_layer_ids") or range(num_layers)
    vocab_size = stated.get("vocab_size") or target.vocab_size
    draft_vocab_size = stated.get("draft_vocab_size") or vocab_size
    shapes: Shapes = {
        "fc.weight": (width, len(ids) * (stated.get("target_hidden_size") or target.hidden_size)),
        "layers.0.self_attn.q_norm.weight": (),
    }
    if stated.get("attention_bias"):
        shapes |= {f"layers.0.self_attn.{name}_proj.bias": () for name in "qo"}
    if draft_vocab_size < vocab_size:
        shapes["lm_head.weight"] = (draft_vocab_size, width)
    if stated.get("selector_rank"):
        taps, group = stated.get("conv_kernel_size", 2), stated.get("conv_group_size", 16)
        shapes["layers.0.attention_conv.base_kernel"] = (2, taps, width)
        shapes["layers.0.attention_conv.kernel_projection.weight"] = (2 * taps * (width // group), width)
        shapes["candidate_selector.predecessor_codebook"] = (vocab_size, stated["selector_rank"])
    if stated.get("gru_hidden_dim"):
        shapes["prefix_gru.weight_hh_l0"] = (3 * stated["gru_hidden_dim"], stated["gru_hidden_dim"])
        shapes["embed_proj.0.weight"] = (stated.get("emb_dim"), width + stated["gru_hidden_dim"])
    if stated.get("markov_rank"):
        shapes["markov_head.markov_w1.weight"] = (vocab_size, stated["markov_rank"])
    shapes |= {f"layers.{layer}.input_layernorm.weight": (width,) for layer in range(num_layers)}
    return shapes


def _implied_projection(config: Mapping[str, Any], target: PreTrainedConfig) -> Shapes:
    """As `_implied_tensors`, of PARD-2 checkpoints, which have their own embedding and head."""
    ids = config.get("pard2_target_layers") or ()
    width = config.get("pard2_target_dim") or len(ids) * target.hidden_size
    shapes: Shapes = {"target_proj.weight": (config.get("hidden_size"), width)}
    return shapes | ({"target_proj.bias": ()} if config.get("pard2_proj_bias") else {})


# By family, what its reader infers settings from.
_IMPLIED: dict[str, Callable[[Mapping[str, Any], PreTrainedConfig], Shapes]] = {
    **dict.fromkeys((EAGLE3, P_EAGLE), _implied_tensors),
    **dict.fromkeys((DFLASH, DFLASH2, DOMINO, DSPARK), _implied_block_tensors),
    MTP: lambda config, _: dict.fromkeys(implied_names(config), ()),
    PARD2: _implied_projection,
}
