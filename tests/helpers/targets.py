"""Small random targets of every family that the static engine is tested on, and prompts for them."""

import copy
import functools
import os
from dataclasses import replace
from itertools import cycle, islice

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_specdec.device_policy import DEVICE_POLICIES, DevicePolicy
from hf_specdec.hosting.equivalence import why_not_equivalent

VOCAB = 96
PAD = 0
NUM_LAYERS = 2  # of families with layers of one kind; other families have one of every kind at least
# Entries of configurations with a list of layers.
PATTERNS = ("layer_types", "mlp_layer_types", "layers_block_type")

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES = {
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 7,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "gpt-oss": {"model_type": "gpt_oss", "sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3-moe": {"model_type": "qwen3_moe", "num_experts": 4, "decoder_sparse_step": 1, **_MOE},
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        **_MOE,
    },
    "qwen3-next": {
        "model_type": "qwen3_next",
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        **_MOE,
    },
}
STATIC_FAMILIES = list(FAMILIES)
# Targets with recurrent layers: the delta rule, with decays of heads and of key channels; Mamba-2, alone and beside
# attention, with time steps that are bounded in the prompt; Mamba-1; short convolutions alone.
_MAMBA2 = {"mamba_d_head": 8, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16}
_LINEAR = ["linear_attention", "linear_attention", "full_attention"]
HYBRIDS = {
    "qwen3-next": FAMILIES["qwen3-next"],
    "kimi-linear": {
        "model_type": "kimi_linear",
        "layer_types": _LINEAR,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_local_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        **_MOE,
    },
    "nemotron-h": {
        "model_type": "nemotron_h",
        "layers_block_type": ["mamba", "moe", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "conv_kernel": 4,
        "expand": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "time_step_min": 0.05,
        **_MOE,
    },
    "falcon-h1": {"model_type": "falcon_h1", "mamba_d_ssm": 64, "mamba_d_conv": 4, **_MAMBA2},
    "jamba": {
        "model_type": "jamba",
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "lfm2": {"model_type": "lfm2", "layer_types": ["conv", "conv", "full_attention"], "conv_L_cache": 3},
}
FAMILIES |= HYBRIDS
# Heads of Mamba-1 that run one by one.
_ZAMBA = {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "num_key_value_heads": 4,
    "n_mamba_heads": 2,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
}
FAMILIES["zamba"] = {"model_type": "zamba", **_ZAMBA}
# Recurrent layers only.
WITHOUT_ATTENTION = {
    "mamba": {"model_type": "mamba", "state_size": 8, "time_step_rank": 4},
    "mamba2": {"model_type": "mamba2", "state_size": 8, "num_heads": 8, "n_groups": 2, "chunk_size": 16},
}
FAMILIES |= WITHOUT_ATTENTION
# Its RoPE changes with the length of the text, and computes the frequencies by itself.
STOCK_FAMILY = "phimoe-longrope"
FAMILIES[STOCK_FAMILY] = {
    "model_type": "phimoe",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "short_mscale": 1.0,
        "long_mscale": 1.0,
        "factor": 2.0,
        "original_max_position_embeddings": 128,
    },
}


def set_policy(patch: pytest.MonkeyPatch, device_type: str, **changes: object) -> None:
    """Change fields of the `DevicePolicy` of a type of device.

    Skips a test of Triton kernels on a CPU where they are compiled for a GPU, not interpreted.
    """
    if device_type == "cpu" and changes.get("triton") and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton kernels run on a CPU in its interpreter only")
    before = DEVICE_POLICIES.get(device_type, DevicePolicy())
    patch.setitem(DEVICE_POLICIES, device_type, replace(before, **changes))


@functools.cache
def tiny_target(family: str, seed: int = 0, num_layers: int | None = None) -> PreTrainedModel:
    """The target of `new_target`, shared between tests: do not change it.

    transformers adds hooks to a model at its first call with `output_hidden_states`, also to this one.
    """
    return new_target(family, seed, num_layers)


def on_gpu(family: str) -> PreTrainedModel:
    """A copy of `tiny_target` on a GPU."""
    return copy.deepcopy(tiny_target(family)).to("cuda")


def num_layers_of(settings: dict) -> int:
    """Layers of a target with these entries in its configuration, unless a test asks for others."""
    return max(NUM_LAYERS, *(len(settings.get(pattern, ())) for pattern in PATTERNS))


def new_target(family: str, seed: int = 0, num_layers: int | None = None) -> PreTrainedModel:
    """A random target in float32 and evaluation mode."""
    if num_layers is None:
        num_layers = num_layers_of(FAMILIES[family])
    options = {**_COMMON, "num_hidden_layers": num_layers, **FAMILIES[family]}
    for pattern in PATTERNS:
        if pattern in options:
            options[pattern] = list(islice(cycle(options[pattern]), num_layers))
    if "layers_block_type" in options:
        del options["num_hidden_layers"]
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "dt_bias", "dt_proj.bias", "dt_proj_bias")):
                parameter.normal_()
            elif name.endswith("A_log"):
                parameter.uniform_(-3, 0.7)
            elif name.endswith(("conv1d.weight", "conv.weight", "conv1d.bias")):
                parameter.normal_(std=0.5)
    model.generation_config.pad_token_id = PAD
    model.generation_config.eos_token_id = None
    if family != STOCK_FAMILY:  # before a test replaces parts of the engine
        reason = why_not_equivalent(model, "static")
        assert reason is None, reason
    return model


def padded_prompts(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random left-padded prompts: `input_ids` and `attention_mask`, `[len(lengths), max(lengths)]`."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    input_ids = torch.full((len(lengths), width), PAD)
    attention_mask = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        input_ids[row, width - length :] = torch.randint(2, VOCAB, (length,), generator=generator)
        attention_mask[row, width - length :] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def build_target(model_type: str, seed: int = 0, **options) -> PreTrainedModel:
    """A random target of any model type, in float32 and evaluation mode, with non-zero biases."""
    config = AutoConfig.for_model(model_type, **{**_COMMON, "num_hidden_layers": num_layers_of(options), **options})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 and (parameter == 0).all():  # biases, and decays that masks are made of
                parameter.normal_(std=0.3)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = PAD, None
    return model
