"""Small random assistants of Gemma 4, and targets for them."""

import copy
from functools import cache

import torch
from targets import VOCAB, build_target
from transformers import AutoConfig, AutoModelForCausalLM

from hf_specdec.config import CacheReaderConfig
from hf_specdec.drafters import CacheReaderDrafter
from hf_specdec.drafters.cache_reader import sharing_all_layers

WINDOW = 7
TEXT = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
    "num_kv_shared_layers": 3,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}
ASSISTANT = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": None,
}
ORDERED = {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 5}


@cache
def gemma4_target(kind="gemma4_text", vocab_size=VOCAB):
    """A target with layers that read the keys of other layers, or, for the other kind, with keys as values."""
    if kind == "gemma4_text":
        return build_target(kind, **TEXT | {"vocab_size": vocab_size, "vocab_size_per_layer_input": vocab_size})
    return build_target(
        "gemma4_text",
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=WINDOW,
        global_head_dim=16,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        hidden_size_per_layer_input=0,
    )


def new_assistant(seed=0, model_type="gemma4_assistant", vocab_size=VOCAB, **options):
    """A random assistant for `gemma4_target`, as transformers has it."""
    sizes = ASSISTANT | {"vocab_size": vocab_size}
    text = AutoConfig.for_model(model_type.replace("assistant", "text"), **sizes)
    config = AutoConfig.for_model(model_type, text_config=text, backbone_hidden_size=32, **options)
    torch.manual_seed(seed)
    with sharing_all_layers(config):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
        if model.masked_embedding is not None:
            model.masked_embedding.token_ordering.copy_(torch.randperm(vocab_size))
    return model


def assistant_drafter(assistant, target):
    """A drafter with the weights of `assistant`, bound to `target`."""
    drafter = CacheReaderDrafter(CacheReaderConfig(vocab_size=assistant.vocab_size), copy.deepcopy(assistant)).eval()
    drafter.bind(target)
    return drafter
