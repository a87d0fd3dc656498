"""The target and the drafters of a benchmark: loaded, or built from their config.json with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed import DistributedConfig

from ..auto import AutoDrafter, read_config
from ..checkpoints.checkpoint import (
    Checkpoint,
    StoredTensor,
    check_folder,
    quiet_loading,
    read_config_file,
)
from ..checkpoints.detection import (
    EAGLE3,
    MTP,
    P_EAGLE,
    check_family,
)
from ..checkpoints.mtp_layouts import implied_names
from ..drafters import Drafter
from ..drafters.base import registered_drafters

GGUF_SUFFIX = ".gguf"


def load_target(
    name: str, dtype: torch.dtype, device: torch.device, random_weights: bool = False, tensor_parallel: bool = False
) -> PreTrainedModel:
    """The target in evaluation mode; `name` is a folder, a Hub repository or a GGUF file.

    Its generation settings are reduced to its special tokens, so that decoding is what the benchmark says it is.

    Args:
        name: of the target.
        dtype, device: of its weights.
        random_weights: whether only its config.json is read.
        tensor_parallel: whether it is split over the processes that torchrun has started, each of which reads or
            draws its part only; `device` is then this process's own.
    """
    if tensor_parallel:
        model = _split_target(name, dtype, random_weights)
    elif random_weights:
        config = AutoConfig.from_pretrained(**_located(name))
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        options: dict[str, Any] = {"dtype": dtype}
        if Path(name).suffix == GGUF_SUFFIX:
            from transformers import GgufConfig

            options["quantization_config"] = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(**_located(name), **options).to(device)
    own = model.generation_config
    model.generation_config = GenerationConfig(
        eos_token_id=own.eos_token_id, bos_token_id=own.bos_token_id, pad_token_id=own.pad_token_id
    )
    return model.requires_grad_(False).eval()


def _split_target(name: str, dtype: torch.dtype, random_weights: bool) -> PreTrainedModel:
    split = DistributedConfig(tp_plan="auto")
    if not random_weights:
        return AutoModelForCausalLM.from_pretrained(**_located(name), dtype=dtype, distributed_config=split)
    config = AutoConfig.from_pretrained(**_located(name))
    with torch.device("meta"):
        family = type(AutoModelForCausalLM.from_config(config))
    torch.manual_seed(0)
    # A checkpoint of no tensors, all of which are then drawn as those are that a checkpoint lacks: in parts.
    with quiet_loading():
        return family.from_pretrained(None, config=config, state_dict={}, dtype=dtype, distributed_config=split)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of the target called `name`."""
    return AutoTokenizer.from_pretrained(**_located(name))


def _located(name: str) -> dict[str, str]:
    """What `from_pretrained` calls `name`."""
    path = Path(name)
    if path.suffix == GGUF_SUFFIX:
        if not path.is_file():
            raise FileNotFoundError(f"There is no GGUF file at {path}.")
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    check_folder(name)
    return {"pretrained_model_name_or_path": name}


def settle_ends(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, eos_token: str | None, ignore_eos: bool
) -> None:
    """Settle which tokens end a row of `model`, and what pads it afterwards.

    Args:
        model: whose generation settings are written.
        tokenizer: of the model, if there is one.
        eos_token: the one token that ends a row; None for those that the model names.
        ignore_eos: no token does.

    Raises:
        ValueError: the tokenizer does not know `eos_token`.
    """
    settings = model.generation_config
    if eos_token is not None:
        known = {} if tokenizer is None else tokenizer.get_vocab()
        if eos_token not in known:
            raise ValueError(f"--eos-token is {eos_token!r}, which is no token of the target's tokenizer.")
        tokenizer.eos_token = tokenizer.pad_token = eos_token
        settings.eos_token_id = settings.pad_token_id = known[eos_token]
    if settings.pad_token_id is None:
        ends = settings.eos_token_id
        settings.pad_token_id = (ends[0] if isinstance(ends, list) else ends) or 0
    if ignore_eos:
        settings.eos_token_id = None


def load_drafter(name: str, target: PreTrainedModel, *, random_weights: bool = False) -> Drafter:
    """The drafter called `name`, a folder or Hub repository, bound to `target`."""
    if not random_weights:
        return AutoDrafter.from_pretrained(name, target)
    return random_drafter(name, target)


def random_drafter(name: str, target: PreTrainedModel) -> Drafter:
    """A drafter with random weights in the shapes that its config.json implies, bound to `target`."""
    file, settings = read_config_file(name)
    published = settings.get("model_type") not in registered_drafters()
    tensors = {}
    kind = check_family(name, settings, (), target.config.get_text_config()) if published else None
    if kind == MTP:
        tensors = dict.fromkeys(implied_names(settings), StoredTensor((), "BF16", Path()))
    elif kind in (EAGLE3, P_EAGLE):
        tensors = _implied_tensors(settings, target.config.get_text_config())
    found = read_config(Checkpoint(name, file.parent, settings, tensors), target.config)
    torch.manual_seed(0)  # Of processes that run the target together, each draws the same.
    with torch.device(target.device):
        # In the target's type from the start: stacked experts are gigabytes, and twice as many in float32.
        drafter = found.family._from_config(found.config, dtype=target.dtype).to(target.dtype).eval()
    drafter.requires_grad_(False)
    drafter.bind(target)
    return drafter


def _implied_tensors(config: Mapping[str, Any], target: PreTrainedConfig) -> dict[str, StoredTensor]:
    """The tensors by which a published EAGLE-3 or P-EAGLE checkpoint tells what it has, as its config.json has it.

    The draft head is taken to be its own and the embedding the target's, as in most of what is published.
    """
    speculators, nested = config.get("transformer_layer_config") or {}, config.get("eagle_config") or {}
    stated = {**config, **nested, **speculators}
    width = stated.get("hidden_size") or target.hidden_size
    aux_hidden_size = stated.get("target_hidden_size") or target.hidden_size
    ids = stated.get("eagle_aux_hidden_state_layer_ids") or stated.get("layer_ids") or ()
    num_aux_hidden_states = len(set(ids)) or stated.get("num_aux_hidden_states") or stated.get("num_aux_layers") or 3
    draft_vocab = stated.get("draft_vocab_size") or stated.get("vocab_size") or target.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"lm_head.weight": (draft_vocab, width), "norm.weight": (width,)}
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
    return {tensor: StoredTensor(shape, "BF16", Path()) for tensor, shape in shapes.items()}
