"""The bytes that a round must read, and the device's copy bandwidth, for the share of it in use.

For a tensor-parallel target the bytes are those of one rank.
"""

from __future__ import annotations

import time

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..drafters import Drafter
from ..modules.hidden_states import text_decoder
from ..modules.weights import local_shard, num_bytes, num_experts
from ..parallel.tensor_parallel import tensor_parallel_group
from .clock import synchronize

# Larger than the caches of most devices.
COPY_BYTES = 2**28


def copy_bandwidth(device: torch.device, groups: int = 4) -> float:
    """Bytes a second that a copy in the device's memory reads and writes; the best of several groups of copies."""
    copies = 1 if device.type == "cpu" else 16  # several, so that launch overhead does not count on a GPU
    # Not zeros: on a CPU the system allocates pages of zeros only when they are written to.
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    copied = source.clone()
    best = float("inf")
    for _ in range(groups):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(copies):
            copied.copy_(source)
        synchronize(device)
        best = min(best, (time.perf_counter() - start) / copies)
    del source, copied
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return 2 * COPY_BYTES / best


def round_bytes(
    target: PreTrainedModel, drafter: Drafter | None, num_draft_tokens: int, batch: int, length: float
) -> int | None:
    """Bytes of weights, keys and values that a round must read if `batch` rows are `length` tokens long on average.

    The target's weights count once, the drafter's once for each pass. Embeddings do not count, because only a few rows
    are read. For a tensor-parallel target the rank's shards and its share of the KV heads count. None for
    mixture-of-experts models, where it depends on routing, and for drafters without `round_reads`.
    """
    text = target.config.get_text_config()
    if num_experts(text):
        return None
    group = tensor_parallel_group(target)
    width = None if drafter is None or drafter.key_dtype is None else drafter.key_dtype.itemsize
    cached = _kv_bytes(text, batch, length, width or target.dtype.itemsize)
    total = _model_bytes(target) + (cached if group is None else cached // group.size())
    if drafter is None or num_draft_tokens == 0:
        return total
    config, reads = drafter.attention_config, drafter.passes_and_bytes(num_draft_tokens)
    if reads is None or num_experts(config):
        return None
    passes, weights = reads
    if config is None:
        return total + weights
    return total + weights + passes * _kv_bytes(config, batch, length, width or drafter.dtype.itemsize)


def _model_bytes(model: PreTrainedModel) -> int:
    """Bytes of the decoder and the head; the embedding counts only if it is tied to the head."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    place = local_shard(embedding).data_ptr()
    others = [one for one in text_decoder(model).parameters() if local_shard(one).data_ptr() != place]
    return num_bytes([*others, head])


def _kv_bytes(config: PreTrainedConfig, batch: int, length: float, itemsize: int) -> int:
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:  # all layers are recurrent
        return 0
    if getattr(config, "kv_lora_rank", None):
        a_token = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        a_token = 2 * (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    window = getattr(config, "sliding_window", None)
    everywhere = "sliding_attention" if window and getattr(config, "use_sliding_window", True) else "full_attention"
    types = getattr(config, "layer_types", None) or [everywhere] * config.num_hidden_layers
    lengths = {"full_attention": length, "sliding_attention": min(length, window or length)}
    tokens = sum(lengths.get(kind, 0) for kind in types)
    return int(batch * tokens * a_token * itemsize)
