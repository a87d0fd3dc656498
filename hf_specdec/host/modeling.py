"""Modeling files and configurations: names of their modules, functions and settings, and where these are registered."""

from __future__ import annotations

from .parts import attribute, in_modeling_files, lazy_part, method, named_in, part

_MODEL = "transformers:PreTrainedModel"
_LLAMA = "transformers.models.llama.modeling_llama"
_MASKS = "transformers.masking_utils"
_ROPE = "transformers.modeling_rope_utils"

ALL_ATTENTION_FUNCTIONS = part(
    "transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS", why="where the engine's attention is registered"
)
ALL_MASK_ATTENTION_FUNCTIONS = part(_MASKS, "ALL_MASK_ATTENTION_FUNCTIONS", why="where its masks are registered")
ALL_EXPERTS_FUNCTIONS = part(
    "transformers.integrations.moe", "ALL_EXPERTS_FUNCTIONS", why="where its mixtures of experts are registered"
)
eager_mask = part(_MASKS, "eager_mask", why="mask of attention outside of the attention interface")
sliding_window_bidirectional_overlay = part(
    _MASKS, "sliding_window_bidirectional_overlay", why="masks of drafters that read a target's cache"
)
ROPE_INIT_FUNCTIONS = part(_ROPE, "ROPE_INIT_FUNCTIONS", why="frequencies of RoPE that depend on length")
dynamic_rope_update = part(_ROPE, "dynamic_rope_update", why="decorator that changes frequencies on the host")
output_capturing = part("transformers.utils", "output_capturing", why="its hooks do nothing in an engine's passes")
ACT2FN = part("transformers.activations", "ACT2FN", why="activations by name")
LlamaRMSNorm = part(_LLAMA, "LlamaRMSNorm", why="norm of drafters")
LlamaMLP = part(_LLAMA, "LlamaMLP", why="MLP of drafters")
LlamaRotaryEmbedding = part(_LLAMA, "LlamaRotaryEmbedding", why="rotary embedding of drafters")
rotate_half = part(_LLAMA, "rotate_half", why="rotary embedding of drafters")
Qwen3NextRMSNorm = part(
    "transformers.models.qwen3_next.modeling_qwen3_next", "Qwen3NextRMSNorm", why="norm of MTP modules"
)
# transformers maps a configuration only to the model with a vision tower around this one.
step3p7_text_model = lazy_part(
    "transformers.models.step3p7.modeling_step3p7", "Step3p7TextModel", why="decoder layers of its MTP modules"
)

ATTENTION_ENTRY = named_in(
    "transformers:PreTrainedConfig", "_attn_implementation_internal", why="entry that names a model's attention"
)
EXPERTS_ENTRY = named_in(
    "transformers:PreTrainedConfig", "_experts_implementation_internal", why="entry that names a model's experts"
)
# Entries of a configuration that do not determine how its model computes.
NO_SETTINGS = frozenset(
    {
        ATTENTION_ENTRY,
        EXPERTS_ENTRY,
        *in_modeling_files("_name_or_path", "_commit_hash", why="entries of a configuration that name its source"),
    }
)
# Attributes of a `PreTrainedModel` that modeling files name for loading and `generate()`, or that calls of `generate()`
# set, such as `rope_deltas`, from which M-RoPE models compute missing position ids.
UNREAD_ATTRIBUTES = frozenset(
    in_modeling_files(
        "_compiled_call",
        "_keys_to_ignore_on_load_unexpected",
        "_last_compile_config",
        "_previous_max_cache_length",
        "generation_config",
        "rope_deltas",
        why="attributes of a model that no forward pass of an engine reads, which fingerprints leave out",
    )
)
# Attributes of modules that only passes with gradients in training mode read, attributes of models for them, and the
# mark of modules whose weights are set.
TRAINING_ATTRIBUTES = frozenset(
    in_modeling_files(
        "gradient_checkpointing",
        "_gradient_checkpointing_func",
        "_require_grads_hook",
        "_require_grads_hooks",
        "_is_hf_initialized",
        why="attributes that change whenever a trainer turns gradient checkpointing on or off, or weights are loaded",
    )
)
(ROPE_DELTAS,) = in_modeling_files("rope_deltas", why="positions of the last prompts, restored after a probe")
(HOOK_OF_ACCELERATE,) = in_modeling_files("_hf_hook", why="accelerate's mark of layers that are moved between devices")

# Names in the code of a `forward` that identify kinds of layers.
(ATTENTION_INTERFACE,) = in_modeling_files("ALL_ATTENTION_FUNCTIONS", why="tells layers that use the interface")
(UPDATE_INDEXER,) = in_modeling_files("update_indexer", why="tells indexers, which keep keys in the cache")
(UPDATE_CONV_STATE,) = in_modeling_files("update_conv_state", why="tells methods that keep former inputs in the cache")
_REPLACED = "function of recurrent layers, replaced by one that reads a ring of late inputs"
# Functions of a recurrence over several tokens, and over one.
RECURRENCES = {
    "delta rule": in_modeling_files(
        "torch_chunk_gated_delta_rule",
        "torch_recurrent_gated_delta_rule",
        "chunk_kimi_delta_attention",
        "recurrent_kimi_delta_attention",
        why=_REPLACED,
    ),
    "mamba2": in_modeling_files("mamba2_chunk_scan", "mamba2_selective_state_update", why=_REPLACED),
    "mamba": in_modeling_files("mamba_selective_scan", "mamba_selective_state_update", why=_REPLACED),
    "convolution": in_modeling_files("causal_conv1d_fn", "causal_conv1d_update", why=_REPLACED),
}
(RECURRENT_MASK,) = in_modeling_files("create_recurrent_attention_mask", why="replaced: which tokens a layer reads")
# Parameters of `forward` in modules that compute biases from distances, newest first.
RELATIVE_BIASES = (
    in_modeling_files(
        "hidden_states",
        "relative_distance",
        "position_ids",
        why="parameters by which modules that make biases of distances are told",
        since="5.24; before, as the ones below",
    ),
    in_modeling_files(
        "relative_states",
        "query_positions",
        "key_positions",
        why="parameters by which modules that make biases of distances are told",
    ),
)
# Attributes of a compressor, of indexers that choose among its entries, and the functions that their file rotates with.
COMPRESSOR = in_modeling_files(
    "kv_proj",
    "gate_proj",
    "position_bias",
    "kv_norm",
    "rotary_emb",
    "rope_layer_type",
    "compress_rate",
    why="attributes by which compressors of windows of tokens are told",
)
COMPRESSOR_INDEXER = (
    *COMPRESSOR,
    *in_modeling_files("q_b_proj", "scorer", "index_topk", why="attributes of indexers inside of compressors"),
)
ROTATIONS = in_modeling_files(
    "apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", why="functions by which modeling files rotate"
)
ROTATION = ROTATIONS[0]
_LAYER_TYPES = "`layer_types` of a configuration that the static engine supports"
LAYER_TYPES = {
    "indexed": in_modeling_files(
        "indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention", why="layers with an indexer"
    ),
    "keys": in_modeling_files("full_attention", "sliding_attention", "chunked_attention", why=_LAYER_TYPES),
    "recurrent": in_modeling_files("linear_attention", "conv", "hybrid", "hybrid_sliding", why=_LAYER_TYPES),
    "compressed": in_modeling_files("compressed_sparse_attention", "heavily_compressed_attention", why=_LAYER_TYPES),
    "empty": in_modeling_files("moe", "mlp", why=_LAYER_TYPES),
}


# Takes a model: whether its class states that all its layers use the attention interface.
states_attention_interface = attribute(
    _MODEL, "_supports_attention_backend", why="states that all layers of a class use the attention interface"
)
# Takes a configuration: the name of the attention that models with it run.
attention_of = attribute("transformers:PreTrainedConfig", "_attn_implementation", why="which attention a model runs")
switches_experts = method(
    _MODEL, "_can_set_experts_implementation", why="tells whether a model's experts can be switched"
)
# Takes a module of experts and a tensor `[..., 2 * inner]`.
apply_gate = method("transformers.integrations.moe", "_apply_gate", why="gated activation of experts")
# Takes a class of models, a configuration and a `dtype`.
with_random_weights = method(_MODEL, "_from_config", why="drafters with random weights")
