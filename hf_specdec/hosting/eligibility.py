"""Whether the static engine can run a call, and whether it can be batch-invariant."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ..cache.layer_kinds import Use, first_reason
from ..calls.call import Call
from ..calls.kv_transfer import why_not_readable
from ..device_policy import policy_of
from ..host.caches import given_cache, is_of_caller
from ..host.modeling import attention_of
from ..modules.patch import DTYPES
from ..parallel.tensor_parallel import tensor_parallel_group
from ..patching.linear import computed_by_libraries
from ..patching.mask_rules import why_not_kept
from ..patching.support import (
    cache_layers,
    cache_windows,
    configured_layers,
    parts,
    why_not_known_attention,
    why_not_supported,
    why_not_used,
)
from .equivalence import why_not_batch_invariant

# Caches that a call may ask for without an effect on its text: the engine uses its own cache.
_CACHES = frozenset({None, "dynamic", "dynamic_full", "static", "hybrid", "hybrid_chunked", "sliding_window"})

# Compute capability of the first GPUs that convert from and to float8.
_FLOAT8_CAPABILITY = (8, 9)


def why_not_static(call: Call, model_kwargs: dict[str, Any], is_continuous: bool) -> str | None:
    """The reason why the static engine cannot run a call with `model_kwargs` as prepared by `generate()`; None if it
    can. In continuous batching requests may have any length."""
    model = call.model
    return (
        why_not_supported(model)
        or _why_not_inputs(model)
        or why_not_known_attention(model)
        or _why_not_call(call, model_kwargs)
        or _why_not_length(call)
        or why_not_kept(model, None if is_continuous else call.config.max_length - 1)
    )


def _why_not_length(call: Call) -> str | None:
    """The reason why it is not known what tokens are run with in texts as long as the call's; None if it is known."""
    model, config, prompts = call.model, call.config, call.prompts
    text = model.config.get_text_config()
    floor = text.floor_scale if getattr(text, "attn_temperature_tuning", False) else None
    floor = getattr(text, "log_scaling_n_floor", floor)
    if floor is not None and config.max_length > floor:
        return (
            f"queries are scaled by the number of cached tokens from {floor} tokens on, padding included, and a text "
            f"may have {config.max_length}"
        )
    texts = prompts.width, config.max_length - 1, prompts.cached, config.prefill_chunk_size is not None
    return first_reason([part.why_not_texts(model, *texts) for part in parts(model)])


def _why_not_inputs(model: PreTrainedModel) -> str | None:
    """The static engine does not call `prepare_inputs_for_generation`, so that method must be transformers' own."""
    prepare = model.prepare_inputs_for_generation
    by_class = type(model).prepare_inputs_for_generation
    if getattr(prepare, "__func__", prepare) is by_class and by_class.__module__.partition(".")[0] == "transformers":
        return None
    place = f"{by_class.__module__}.{by_class.__qualname__}"
    if getattr(prepare, "__func__", prepare) is not by_class:
        place = f"{getattr(prepare, '__qualname__', type(prepare).__name__)}, set on the model itself"
    return f"the target's inputs are prepared by a function that is not transformers' own ({place})"


def drop_empty_attentions(call: Call, model_kwargs: dict[str, Any]) -> tuple | None:
    """The attention weights of a step that plain `generate()` returns if the target computes none: empty tuples (only
    eager attention computes weights); the call then no longer asks for them. None if there are weights, or if it does
    not ask for them. Raises `ValueError` if it asks for weights beyond a sliding window, where those of single tokens
    cannot be separated."""
    model, config = call.model, call.config
    if not (config.return_dict_in_generate and config.output_attentions):
        return None
    if attention_of(model.config.get_text_config()) != "eager":
        token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        with torch.no_grad():
            output = model(input_ids=token, use_cache=False, output_attentions=True, return_dict=True)
        attentions = getattr(output, "attentions", None) or ()
        if not any(isinstance(weights, torch.Tensor) for weights in attentions):
            config.output_attentions = False
            model_kwargs.pop("output_attentions", None)
            return attentions
    # Beyond a sliding window a block of tokens reads other numbers of keys than a single token, and transformers'
    # assisted generation, which splits the weights of a block into those of its tokens, takes wrong columns.
    window = min(filter(None, cache_windows(model)), default=None)
    if window is not None and config.max_length > window:
        raise ValueError(
            f"output_attentions is set, but a sequence of {config.max_length} tokens outgrows the window of {window} "
            f"of {type(model).__name__}, where the attention weights of single tokens cannot be told from those of a "
            "block of drafts. Drop output_attentions or assistant_model, or lower max_new_tokens."
        )
    return None


def _why_not_call(call: Call, model_kwargs: dict[str, Any]) -> str | None:
    model, config, prompts = call.model, call.config, call.prompts
    if config.return_dict_in_generate and config.output_attentions:
        return "attention weights were asked for"
    cache = given_cache(model_kwargs)
    if not configured_layers(model).knows_length and is_of_caller(cache):
        return "the call has a cache of recurrent states only, which does not know how many tokens it holds"
    if prompts.cached:
        obstacle = why_not_readable(cache, cache_layers(model))
        if obstacle is not None:
            return obstacle
        if prompts.width - prompts.cached > 1 and any(part.forgets_states(model) for part in parts(model)):
            return (
                f"the call continues a cache with {prompts.width - prompts.cached} tokens at once, for which layers of "
                f"{type(model).__name__} begin without the states that it holds (so does plain generate())"
            )
    if config.cache_implementation not in _CACHES:
        return f"cache_implementation is {config.cache_implementation!r}"
    return None


def _other_engine(call: Call, engine: str) -> str:
    return f"the call runs on the {engine} engine ({call.reason}); expected the static engine"


def check_configured(call: Call, engine: str) -> None:
    """Raise `ValueError` unless a call on `engine` can be batch-invariant, store keys and values as float8 and draft
    trees, where it should. Operations that are not known to be batch-invariant are refused when called, see
    `patching.batch_invariance`."""
    drafter, trees = call.drafter, f"Drafts are to be trees of {call.num_nodes} (tree)"
    page = "docs/batch-invariance.md says what is supported"
    invariant_off = f"drafter.configure(batch_invariant=False) to generate all the same; {page}"
    dtype_off = 'drafter.configure(kv_cache_dtype="auto") to generate all the same'
    asked = (
        (drafter.batch_invariant, _why_not_invariant, "batch_invariant=True", invariant_off),
        (drafter.key_dtype, _why_not_float8_keys, f'kv_cache_dtype="{drafter.kv_cache_dtype}"', dtype_off),
        (call.num_nodes, why_no_tree, trees, "tree=0 for chains of drafts"),
    )
    for setting, why_not, name, other in asked:
        if setting and (reason := why_not(call, engine)) is not None:
            raise ValueError(f"{name}, but {reason}. Set {other}.")


def _why_not_float8_keys(call: Call, engine: str) -> str | None:
    device, name = call.model.device, type(call.model).__name__
    if engine != "static":
        return _other_engine(call, engine)
    if not cache_layers(call.model).stores_keys:
        return f"{name} stores no keys and values; expected a target with attention"
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < _FLOAT8_CAPABILITY:
        found, least = (".".join(map(str, one)) for one in (capability, _FLOAT8_CAPABILITY))
        return f"{name} is on a GPU of compute capability {found}; expected {least} or later, which has float8"
    return None


def why_no_tree(call: Call, engine: str) -> str | None:
    """The reason why the call cannot draft trees; None if it can."""
    model, drafter, name = call.model, call.drafter, type(call.model).__name__
    if engine != "static":
        return _other_engine(call, engine)
    if (reason := why_not_used(model, Use.TREES)) is not None:
        return f"{name} has {reason}"
    windows = {name: cache_windows(model), type(drafter).__name__: (drafter.smallest_window,)}
    for owner, sizes in windows.items():
        window = min(filter(None, sizes), default=None)
        if window is not None and window <= call.num_draft_tokens:
            return f"{owner} has windows of {window} tokens; expected more than num_assistant_tokens"
    if drafter.most_tree_depth is not None and call.num_draft_tokens > drafter.most_tree_depth:
        kind = type(drafter).__name__
        return f"{kind} drafts up to {drafter.most_tree_depth} in a row; expected num_assistant_tokens of at most that"
    if tensor_parallel_group(model) is not None:
        return f"{name} is split over processes, for which trees are not built; expected a target on one GPU"
    return "the hidden states of every step are returned" if "hidden_states" in call.kept else None


def _why_not_invariant(call: Call, engine: str) -> str | None:
    model, name = call.model, type(call.model).__name__
    if not policy_of(model.device).batch_invariant:
        return f"{name} is on a device of type {model.device.type}; expected a GPU, which the kernels are for"
    if model.dtype not in DTYPES:
        return f"{name} is in {model.dtype}; expected torch.bfloat16, torch.float16 or torch.float32"
    if (reason := cache_layers(model).why_not(Use.BATCH_INVARIANCE)) is not None:
        return f"{name} has {reason}"
    if engine != "static":
        return _other_engine(call, engine)
    if call.inputs is not None:
        return f"{name} itself runs the prompts of this call, in one padded batch; expected prompts of tokens only"
    longest = call.config.max_length - 1
    if (reason := first_reason(part.why_not_alone(model, longest) for part in parts(model))) is not None:
        return f"{reason}; expected shorter texts"
    libraries = computed_by_libraries(model)
    if libraries:
        return f"{name} has layers of {', '.join(libraries)}, of which the kernels do not know the format"
    group = tensor_parallel_group(model)
    if group is not None:
        return f"{name} is split over {group.size()} processes; expected a target on one GPU"
    return why_not_batch_invariant(model)
