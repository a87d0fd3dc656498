"""The target and drafters of a benchmark: loaded, or built from config.json with random weights."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DistributedConfig, PreTrainedModel

from .. import loading
from ..auto import read_config
from ..checkpoints.checkpoint import Checkpoint, quiet_loading, read_config_file
from ..drafters import Drafter
from ..host.modeling import with_random_weights
from ..modules.weights import local_shard


def load_target(
    name: str, dtype: torch.dtype, device: torch.device, random_weights: bool = False, tensor_parallel: bool = False
) -> PreTrainedModel:
    """The target, a folder, Hub repository or GGUF file, prepared by `loading.prepare_target`.

    With `random_weights` only config.json is read. With `tensor_parallel` the target is sharded over torchrun's ranks,
    each of which reads or draws only its own shards, on its own device.
    """
    if not (random_weights or tensor_parallel):
        return loading.load_target(name, dtype, device)
    located, sharding = loading.from_pretrained_arguments(name), DistributedConfig(tp_plan="auto")
    if not random_weights:
        model = AutoModelForCausalLM.from_pretrained(**located, dtype=dtype, distributed_config=sharding)
        return loading.prepare_target(model)
    config = AutoConfig.from_pretrained(**located)
    torch.manual_seed(0)
    with torch.device("meta" if tensor_parallel else device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if tensor_parallel:
        # With an empty state dict transformers initializes all tensors at random, and only the rank's shards.
        options = {"config": config, "state_dict": {}, "dtype": dtype, "distributed_config": sharding}
        with quiet_loading():
            model = type(model).from_pretrained(None, **options)
    _enlarge_embeddings(model)
    return loading.prepare_target(model)


def _enlarge_embeddings(model: PreTrainedModel) -> None:
    """Make the embeddings of a `model` of random weights as large as the sum of its layers' outputs, in place.

    With those of an initialization (0.02) layers alone decide what a text becomes, and rounding decides which experts
    they choose: in bfloat16, shapes of Qwen3-Next and Nemotron-3-Nano differed by 0.4 and 0.9 of the spread of logits
    between two ways to compute them, too much for the equivalence check. Tied embeddings are those of the head, too,
    and stay.
    """
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    if head is None or head.weight is not embeddings:
        shard = local_shard(embeddings.detach())
        shard.mul_(model.config.get_text_config().num_hidden_layers ** 0.5 / shard.std())


def random_drafter(name: str, target: PreTrainedModel) -> Drafter:
    """A drafter with random weights in the shapes of its config.json, bound to `target`."""
    file, settings = read_config_file(name)
    found = read_config(Checkpoint(name, file.parent, settings, None), target.config)
    torch.manual_seed(0)  # all ranks of a tensor-parallel target draw the same drafter
    with torch.device(target.device):
        # In the target's dtype from the start, because stacked experts take gigabytes, twice as many in float32.
        drafter = with_random_weights(found.family, found.config, dtype=target.dtype).to(target.dtype).eval()
    drafter.requires_grad_(False)
    drafter.bind(target)
    return drafter
