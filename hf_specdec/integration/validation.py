"""Checks of a call: target, drafter and settings; shapes, dtypes and tokens of the prompts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from ..config import check_int
from ..drafters.base import Drafter
from ..host.caches import OUTPUT_NAME, Cache, is_of_caller, rounds_keys
from ..host.generation import GenerationMode
from ..modules.hidden_states import modules_of
from ..modules.module_hooks import has_hooks
from ..modules.signature import signature_of
from ..modules.weights import tensor_weight

TOKEN_DTYPES = (torch.int64, torch.int32)


def check_prompts(
    input_ids: torch.Tensor, mask: torch.Tensor | None, cache: Cache | None, model_kwargs: dict[str, Any]
) -> None:
    """Raise `ValueError` unless prompts are `[batch, length]` token ids, with a `mask` of that shape, on the host, or
    None. `cache` is the cache that the call continues."""
    if model_kwargs.get("inputs_embeds") is not None and input_ids.shape[-1] == 0:
        raise ValueError("The prompt was given as inputs_embeds without input_ids, but a drafter reads token ids.")
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(
            f"input_ids has shape {list(input_ids.shape)}; expected [batch, length], at least one row of one token."
        )
    if input_ids.dtype not in TOKEN_DTYPES:
        raise ValueError(f"input_ids is {input_ids.dtype}; expected token ids, torch.int64 or torch.int32.")
    if mask is None:
        return
    # With a filled cache the mask may cover the cached text, too, see `prompts.read_prompts`.
    is_filled = cache is not None and cache.get_seq_length() > 0
    shapes = (tuple(mask.shape[:1]), tuple(input_ids.shape[:1])) if is_filled else (mask.shape, input_ids.shape)
    if mask.dim() != 2 or shapes[0] != shapes[1]:
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)} and input_ids {list(input_ids.shape)}; expected the same."
        )
    others = mask[(mask != 0) & (mask != 1)]
    if len(others) > 0:
        raise ValueError(f"attention_mask holds {others[0].item()}; expected 0 for padding and 1 for tokens only.")


def check_tokens(model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
    """Raise `ValueError` if a token of `[B, P]` prompts is outside the vocabulary, which on a GPU would end the
    process. Tensors are on the host; the mask is `[B, P or more]`."""
    size = max(model.config.get_text_config().vocab_size, _num_rows(model.get_input_embeddings()))
    tokens = input_ids if attention_mask is None else input_ids.where(attention_mask[:, -input_ids.shape[1] :] != 0, 0)
    lowest, highest = torch.stack(tokens.aminmax()).tolist()
    if lowest < 0 or highest >= size:
        raise ValueError(
            f"input_ids holds the token {lowest if lowest < 0 else highest}, but {type(model).__name__} has tokens 0 "
            f"to {size - 1}. Use the tokenizer of this model, and resize_token_embeddings() after adding tokens to it."
        )


def vocabulary_of(model: PreTrainedModel) -> int:
    """Number of scores that the target gives for a token."""
    return _num_rows(model.get_output_embeddings()) or model.config.get_text_config().vocab_size


def _num_rows(module: nn.Module | None) -> int:
    """Rows of the weight of an embedding or head; 0 if unknown."""
    weight = tensor_weight(module)
    return 0 if weight is None or weight.dim() != 2 else len(weight)


_ROUNDED = (
    "which stores rounded keys and values, from which rejected drafts cannot be taken back; expected a cache that "
    "stores them as they are. Drop it or assistant_model."
)


def check_cache(cache: Any) -> None:
    """Raise `ValueError` unless the cache that the caller of a call passed is one of transformers', which stores keys
    and values as they are.

    Rejected drafts are removed from the cache. If it did more, such as rounding or dropping tokens, that would change
    the text of plain `generate()`.
    """
    if not is_of_caller(cache):
        return
    what = f"{OUTPUT_NAME} is a {type(cache).__name__}"
    for part in (cache, *getattr(cache, "layers", ()), getattr(cache, "layer_class_to_replicate", None)):
        if rounds_keys(part):
            raise ValueError(f"{what}, {_ROUNDED}")
        update = getattr(part, "update", None)
        if update is not None and getattr(update, "__module__", "").partition(".")[0] != "transformers":
            kind = part if isinstance(part, type) else type(part)
            raise ValueError(
                f"{what}, in which update() of {kind.__name__} is not transformers' own ({kind.__module__}), so it is "
                "not known what it does with the tokens of a text and with rejected drafts; expected one of "
                "transformers' caches, such as DynamicCache. Drop it or assistant_model."
            )


def _is_gathered(model: PreTrainedModel) -> bool:
    """Whether DeepSpeed (stage 3) has gathered all weights, and no module would release them in its own pass."""
    found = [getattr(one, "ds_status", None) for one in model.parameters()]
    states = {getattr(one, "name", one) for one in found}
    return states == {"AVAILABLE"} and not has_hooks(modules_of(model))


_OTHER_DRAFTERS = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "speculation_type")
# Settings of a call that is refused, and what they ask for.
_REFUSED_SETTINGS = dict.fromkeys(_OTHER_DRAFTERS, "asks for drafts of another kind than those of assistant_model") | {
    "assistant_ensemble_weight": "accepts drafts lossily; hf_specdec is lossless only",
    "dola_layers": "asks for DoLa decoding, but drafts are verified for greedy search and sampling only",
}


def check_call(
    model: PreTrainedModel,
    drafter: Drafter,
    generation_mode: GenerationMode,
    config: GenerationConfig,
    synced_gpus: bool = False,
) -> None:
    """Raise `ValueError` if `model` cannot generate with `drafter` as asked."""
    name = type(model).__name__
    if generation_mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"A drafter works with greedy search and sampling, but the call asks for {generation_mode.value} "
            f"(num_beams={config.num_beams}). Drop that option or assistant_model."
        )
    if synced_gpus and not _is_gathered(model):
        raise ValueError(
            f"synced_gpus is set: {name} is sharded over processes (FSDP or DeepSpeed stage 3), which must run it "
            "equally often, but with drafters their numbers of rounds differ; expected a target that a process can run "
            "by itself. Load all of it in every process, gather it for the call (TRL: ds3_gather_for_generation), "
            "split it with a tp_plan, or drop assistant_model."
        )
    stages = getattr(getattr(model.config, "distributed_config", None), "pp_size", None) or 1
    if stages > 1:
        raise ValueError(
            f"{name} is split into {stages} pipeline stages, so that no process sees all its layers; expected a whole "
            "target, or one split with a tp_plan."
        )
    drafter.check_bound_to(model)
    if model.training:
        raise ValueError(f"{name} is in training mode, so its dropout is active; call model.eval() first.")
    if config.use_cache is False:
        raise ValueError("use_cache is False, but speculative decoding verifies drafts on a cache; drop that option.")
    asked = config.cache_implementation
    if asked not in (None, "offloaded") and asked.startswith("offloaded"):
        raise ValueError(
            f"cache_implementation is {asked!r}, a static cache in another memory, which no engine runs with drafts; "
            'expected "offloaded" or none. Drop that option or assistant_model.'
        )
    if asked == "quantized":
        raise ValueError(f"cache_implementation is {asked!r}, {_ROUNDED}")
    if config.prefill_chunk_size is not None:
        check_int("prefill_chunk_size", config.prefill_chunk_size, 1, ", or None")
    for setting, what in _REFUSED_SETTINGS.items():
        value = getattr(config, setting, None)
        is_off = not value if setting in _OTHER_DRAFTERS else value is None
        if not is_off:
            raise ValueError(f"{setting} is {value!r}, which {what}. Drop that option or assistant_model.")
    if model.device.type == "meta":
        raise ValueError(
            f"The first weights of {name} are offloaded (it is on {model.device}), and assisted generation moves "
            "tokens to where they are; expected them in memory. Offload later layers only (`device_map`)."
        )
    if drafter.device.type == "meta":
        raise ValueError(
            "The drafter is on the meta device, so it has no weights; expected a device that holds them. Load it with "
            "AutoDrafter.from_pretrained(..., target=model)."
        )


def check_whole(model: PreTrainedModel) -> None:
    """Raise `ValueError` if weights of `model` are gathered by its own forward only."""
    if any([hasattr(kind, "set_reshard_after_forward") for kind in signature_of(model).by_class]):
        raise ValueError(
            f"{type(model).__name__} is sharded by fully_shard() (FSDP2), so that its weights are whole only while its "
            "own forward runs; expected a target that a process can run by itself. Load all of it in every process, "
            "split it with a tp_plan, or drop assistant_model."
        )
