"""Configurations of transformers' language models, shrunk so that a model is built in milliseconds.

Every entry is shrunk by its kind, so that a short text meets what a long one meets at full size: windows and chunks are
shorter than the prompts, there are more experts than a token chooses, and every kind of layer is present.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from transformers import CLIPVisionConfig, PreTrainedConfig

VOCAB = 128
# Ids of images and the like are put at the end of the vocabulary, where no prompt has tokens.
FIRST_PROMPT_ID, LAST_PROMPT_ID = 5, 95

WIDTH, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 4, 2, 8
NUM_LAYERS = 4
WINDOW = 7

# Largest values of integers by parts of their names, first match first; smaller values are kept.
LARGEST: list[tuple[str, int]] = [
    (r"^(ngram_vocab_size_base|encoder_hash_byte_group_vocab)$", 211),
    (r"type_vocab_size$", 4),
    (r"vocab_size", VOCAB),
    (r"^vocab_offset$", VOCAB),
    (r"(window|chunk_size|chunk_length|mem_len|context_left|local_attention)", WINDOW + 1),
    (r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_len|max_target_positions)$", 256),
    (r"^(model_max_length|context_length|max_source_positions|original_max_position_embeddings)$", 256),
    (r"^num_kv_shared_layers$", 1),
    (r"^(first_k_dense_replace|num_dense_layers|moe_layer_start_index)$", 1),
    (r"^(max_window_layers|no_rope_layer_interval|global_attn_every_n_layers|attn_layer_period)$", 2),
    (r"^attn_layer_offset$", 1),
    (r"^(cross_layer_interval|cross_attention_frequency|merger_times)$", 1),
    (r"^(moe_layer_end_index)$", NUM_LAYERS - 1),
    (r"^(n_layers_per_attn_res_block|layer_group_size|num_layers_per_stack)$", 2),
    (r"(num_hidden_layers|^n_layers?|^num_layers|_layers$|^depth$|_depth$|^layers$|num_blocks)", NUM_LAYERS),
    (r"(num_experts_per_tok|moe_top_?k$|^moe_k$|^top_k_experts$|^num_experts_per_token$)", 2),
    (r"(^topk_group|^n_shared_experts|num_shared_experts)", 1),
    (r"(^n_groups?$|num_expert_group|zero_expert_num)", 2),
    (r"(experts$)", 4),
    (r"^index_topk$", WINDOW),
    (r"^index_topk_blocks$", 2),
    (r"^index_block_size$", 4),
    (r"^index_kpool$", 2),
    # Scores of an indexer are sums of ReLUs over its heads; with few heads many are exactly zero, and which of equals
    # are chosen depends on how many tokens are asked about at once.
    (r"^index_n_heads$", 16),
    (r"^index_head_dim$", 16),
    (
        r"(kv_heads|key_value_heads|kv_n_heads|linear_num_key_heads|num_query_groups|multi_query_group_num)",
        NUM_KV_HEADS,
    ),
    (r"(heads$|^n_head$|heads_per_ngram)", NUM_HEADS),
    (r"(lora_rank|laurel_rank|dt_rank|time_step_rank|norm_rank|hc_lowrank|adapter_rank)", 16),
    (r"(d_state|ssm_state_size|^state_size)", 8),
    (r"^(kv_channels|d_kv|d_head|dim_head|rotary_dim|query_pre_attn_scalar|attention_head_size)$", HEAD_DIM),
    (r"(head_dim|headdim|d_head|rope_head_dim|nope_head_dim)", HEAD_DIM),
    (r"(moe|expert).*(size|dim)$", 16),
    (r"shared_intermediate_size", 16),
    (r"(intermediate|ffn|^d_ff$|^dff$|^dim_ff$|mlp_dim|d_inner|mid_dim|feed_forward_size)", 64),
    (r"per_layer_input$", 8),
    (r"(hidden_size|d_model|n_embd|embed_dim|emb_dim|embedding_dim|embedding_size|dim_model|lru_width)", WIDTH),
    (r"(proj_dim|projection_dim|output_dim|out_dim|in_dim|input_size|d_ssm|hidden_dim|^dim$|text_width|width$)", WIDTH),
]

# What stands for None where a text's configuration leaves open what its models need, or leaves a part out.
UNSET: dict[str, Any] = {
    "head_dim": HEAD_DIM,
    "num_key_value_heads": NUM_KV_HEADS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
    "sliding_window": WINDOW,
}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {**_ROPE, "mrope_section": [2, 1, 1]}
_SLIDING_MLA = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
_SLIDING_MLA |= {"head_dim": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_QWEN4_INDEXER = {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8}

# Arguments of configuration classes that cannot be made without any.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
}

# Parts for images whose models are those of another package.
FOREIGN_VISION = frozenset({"timm_wrapper", "gemma3n_vision"})

# What is set after shrinking, by model type: sizes that must agree, and kinds of layers that defaults do without.
# `...` takes an entry out, so that the configuration derives it.
SETTINGS: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "attn_layer_indices": [1, 3], "layers_block_type": ...},
    "blt": {"num_hidden_layers": NUM_LAYERS},
    "blenderbot": {"encoder_layers": NUM_LAYERS},
    "chameleon": {"vocabulary_map": {"<image>": VOCAB - 1, "IMGIMGA": VOCAB - 2}},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {"sliding_attention": _MROPE, "full_attention": _MROPE},
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "dots1": {"max_window_layers": 2, "layer_types": ...},
    "dots3_note_text": {
        "head_dim": 16,
        "layer_types": ["indexed_attention", "indexed_attention", "sliding_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "per_layer_config": {2: _SLIDING_MLA, 3: _SLIDING_MLA},
    },
    "emu3_vqgan": {"base_channels": 32},
    "emu3": {"vocabulary_map": {"<image>": VOCAB - 1, "<|extra_200|>": VOCAB - 2}},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
    "gemma4_assistant": {"text_config": {"num_kv_shared_layers": NUM_LAYERS}},
    "gemma4_unified_assistant": {"text_config": {"num_kv_shared_layers": NUM_LAYERS}},
    "glm4v_text": {"rope_parameters": _MROPE},
    "glm4v_moe_text": {"rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5}, "head_dim": 16},
    "glm_ocr_text": {"rope_parameters": _MROPE},
    "hunyuan_vl_text": {"rope_parameters": _MROPE},
    "glm5_next_text": {"index_topk": 8},
    "granite4_vision": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-1, 1]],
        "vision_config": {"hidden_size": 64},
    },
    "granitemoehybrid": {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "hrm_text": {"num_layers_per_stack": ..., "num_hidden_layers": 2},
    "inkling_vision": {"patch_size": 4},
    "evolla": {"use_cache": True},
    "mpt": {"use_cache": True},
    "paddleocr_vl_text": {"rope_parameters": _MROPE},
    "qwen2_vl_text": {"rope_parameters": _MROPE},
    "qwen2_5_vl_text": {"rope_parameters": _MROPE},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba2": {"head_dim": 16},
    "molmo2": {"adapter_config": {"vision_feature_layer": [-1, -2]}},
    "qwen4_exp_text": {
        **_QWEN4_INDEXER,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1, 3],
        "number_of_conv_states": 3,
        "eos_token_id": 2,
    },
    "qwen2_5_omni_thinker": {"vision_start_token_id": VOCAB - 9},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": VOCAB - 9},
    "qwen2_5_omni_text": {"rope_parameters": _MROPE},
    # These two have the entry of a window, which their caches heed and their attention does not.
    "qwen3_omni_moe_text": {"rope_parameters": _MROPE, "sliding_window": None},
    "qwen3_vl_moe_text": {"rope_parameters": _MROPE, "sliding_window": None},
    "qwen3_vl_text": {"rope_parameters": _MROPE},
    "reformer": {"is_decoder": True, "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [16, 16]},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {
        "hybrid_layer_ids": ...,
        "attention_head_dim": ...,
        "mamba_headdim": ...,
        "kv_channels": ...,
        "attention_hidden_size": ...,
    },
    "zamba": {
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
}


def is_text(config: Mapping[str, Any]) -> bool:
    return "vocab_size" in config


class Shrinker:
    """Shrinks configurations, with one new id for every special token.

    Args:
        others: also shrink the sizes of parts that read no text, not only their numbers of layers.
    """

    def __init__(self, others: bool = True):
        self.others = others
        self._ids: dict[int, int] = {}

    def __call__(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of `config`, a model's as a dictionary, with smaller entries."""
        source = dict(config)
        layers = self._chosen_layers(source)
        small = {name: self._entry(name, value, layers, source) for name, value in source.items()}
        if source.get("use_sliding_window") is False:
            small |= {"use_sliding_window": True, "sliding_window": WINDOW}
            small.pop("layer_types", None)
        if is_text(source):
            small |= {name: value for name, value in UNSET.items() if name in source and not source[name]}
            if "kv_lora_rank" in source:  # Latent attention has keys and values for every head.
                small["num_key_value_heads"] = small["num_attention_heads"]
                whole = source["qk_nope_head_dim"] + source["qk_rope_head_dim"]
                small |= {name: 2 * HEAD_DIM for name in ("head_dim", "qk_head_dim") if source.get(name) == whole}
        if "per_layer_config" in source and isinstance(source["per_layer_config"], Mapping):
            by_layer = {int(key): value for key, value in source["per_layer_config"].items()}
            small["per_layer_config"] = {
                at: self(by_layer[layer]) for at, layer in enumerate(layers) if layer in by_layer
            }
        return small

    def _chosen_layers(self, source: Mapping[str, Any]) -> list[int]:
        """The layers that stay: the first of every kind, then the first ones."""
        total = next((source[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if source.get(name)), 0)
        per_layer = [v for v in source.values() if isinstance(v, (list, tuple)) and len(v) == total]
        configs = source.get("per_layer_config")
        if isinstance(configs, Mapping):
            by_layer = {int(key): value for key, value in configs.items()}
            per_layer.append([sorted(by_layer.get(layer, {}).items()) for layer in range(total)])
        kinds: dict[str, int] = {}
        for layer in range(total):
            kinds.setdefault(str([values[layer] for values in per_layer]), layer)
        chosen = list(kinds.values())[:8]
        spare = [layer for layer in range(total) if layer not in chosen]
        return sorted(chosen + spare[: max(NUM_LAYERS - len(chosen), 0)])

    def _entry(self, name: str, value: Any, layers: list[int], source: Mapping[str, Any]) -> Any:
        if isinstance(value, Mapping):
            if name in ("rope_parameters", "rope_scaling"):
                return self._rope(value)
            if name.endswith("config") or "model_type" in value:
                return self(value)
            return value
        if re.search(r"(token_id|token_index|token_ids|_index|pad_id|eos_id|bos_id)s?$", name):
            return self._token(value)
        total = next((source[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if source.get(key)), 0)
        if isinstance(value, (list, tuple)):
            if len(value) == total and layers and total > 2:
                if name.endswith(("idxs", "_ids")) or name in ("moe_layers", "kv_source_layers", "rope_scaling_layers"):
                    return list(range(len(layers)))
                return [self._number(name, value[layer], source) for layer in layers]
            if re.search(r"(idxs|indexes|indices|layer_ids|_layers)$", name):
                return [at for at in value if isinstance(at, int) and at < len(layers)]
            return [self._number(name, item, source) for item in value]
        if name in ("num_hidden_layers", "n_layer", "num_layers") and layers and value == total:
            return len(layers)
        return self._number(name, value, source)

    def _number(self, name: str, value: Any, source: Mapping[str, Any]) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return value
        if "initializer" in name or name in ("init_std", "initializer_range"):
            return value
        if isinstance(value, float):
            return value
        for pattern, largest in LARGEST:
            if re.search(pattern, name):
                if not (self.others or is_text(source)) and "layers" not in name and "depth" not in name:
                    return value
                if largest == NUM_KV_HEADS and value == source.get("num_attention_heads"):
                    largest = NUM_HEADS
                return min(value, largest)
        return value

    def _rope(self, rope: Mapping[str, Any]) -> dict[str, Any]:
        small = {}
        for name, value in rope.items():
            if isinstance(value, Mapping):
                small[name] = self._rope(value)
            elif name == "mrope_section" and value:
                # Half of a head, in the same proportions.
                rest = [max(1, part * HEAD_DIM // 2 // sum(value)) for part in value[1:]]
                small[name] = [HEAD_DIM // 2 - sum(rest), *rest]
            elif name == "original_max_position_embeddings":
                small[name] = min(value, 256)
            elif name in ("short_factor", "long_factor"):
                small[name] = value[: HEAD_DIM // 2]
            else:
                small[name] = value
        return small

    def _token(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._token(item) for item in value]
        if isinstance(value, bool) or not isinstance(value, int) or value < FIRST_PROMPT_ID:
            return value
        return self._ids.setdefault(value, VOCAB - 1 - len(self._ids))


def _merged(config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for name, value in settings.items():
        if value is ...:
            merged.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(name), Mapping):
            merged[name] = _merged(merged[name], value)
        else:
            merged[name] = value
    return merged


def tiny_config(
    config_class: type[PreTrainedConfig],
    others: bool = True,
    tied: bool = True,
    extra: Mapping[str, Any] | None = None,
) -> PreTrainedConfig:
    """The default configuration of `config_class`, shrunk.

    Args:
        others: see `Shrinker`.
        tied: keep tied embeddings and heads tied.
        extra: entries to set besides.
    """
    source = config_class(**ARGUMENTS.get(config_class.model_type, {}))
    small = _settled(Shrinker(others)(source.to_dict()))
    for name in ("transformers_version", "architectures", "id2label", "label2id"):
        small.pop(name, None)
    config = config_class.from_dict((small if tied else _untied(small)) | dict(extra or {}))
    vision = getattr(config, "vision_config", None)
    if getattr(vision, "model_type", None) in FOREIGN_VISION:
        # Text never reaches this part, and a package that transformers does without would have to build it.
        plain = CLIPVisionConfig(
            hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=1, num_attention_heads=NUM_HEADS, image_size=28
        )
        plain.model_args = {"embed_dim": WIDTH}
        for name, value in vision.to_dict().items():  # what the other parts read
            if not hasattr(plain, name):
                setattr(plain, name, value)
        object.__setattr__(config, "vision_config", plain)  # past the check of what kind it is
    return config


def _settled(config: dict[str, Any]) -> dict[str, Any]:
    """`config` with the settings of its model type and of its parts'."""
    config = {name: _settled(value) if isinstance(value, dict) else value for name, value in config.items()}
    return _merged(config, SETTINGS.get(config.get("model_type", ""), {}))


def _untied(config: dict[str, Any]) -> dict[str, Any]:
    untied = {name: _untied(value) if isinstance(value, dict) else value for name, value in config.items()}
    return untied | ({"tie_word_embeddings": False} if "model_type" in config else {})
