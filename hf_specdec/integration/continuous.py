"""`model.generate_batch(..., assistant_model=drafter)`: continuous batching with a drafter."""

from __future__ import annotations

import heapq
import inspect
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    PreTrainedModel,
    StoppingCriteriaList,
)

from ..calls.call import Call
from ..calls.first_pass import REPLACED_INPUTS
from ..calls.prompts import Prompts
from ..calls.request import ContinuousBatching, Request
from ..calls.transcript import end_tokens_of
from ..config import check_int, check_type
from ..drafters.attachment import Attachment
from ..drafters.base import Drafter
from ..host.generation import GenerationOutput, WorkloadHints, pad_token, prepared_config
from ..host.generation import stopping_criteria as make_criteria
from ..kernels.types import RowRules
from ..modules.patch import on_host
from ..parallel.tensor_parallel import failing_together
from ..sampling.processors import are_of_all_rows, readers_of
from ..sampling.randomness import Randomness
from ..sampling.text_rules import rules_of_prompt
from .dispatch import generate_continuously, new_call, row_adapters
from .request_processors import processors_of_prompt
from .validation import TOKEN_DTYPES, check_call, check_tokens

logger = logging.getLogger(__name__)

# Settings that are also model inputs.
_OUTPUTS = ("output_attentions", "output_hidden_states")


def generate_batch(
    model: PreTrainedModel,
    drafter: Drafter,
    inputs: Sequence[Sequence[int] | torch.Tensor],
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    on_begin: Callable[[], object] = bool,
    attachment: Attachment | None = None,
    adapter_names: Sequence[str] | None = None,
    **kwargs: Any,
) -> dict[str, GenerationOutput]:
    """`ContinuousMixin.generate_batch` with a drafter.

    Args:
        inputs: token ids of every prompt: lists or one-dimensional int64 tensors.
        continuous_batching_config: `max_requests_per_batch` is the most rows of a round; without `allow_block_sharing`
            every prompt is prefilled whole. Its other settings of memory and CUDA graphs are for transformers' own
            engine.
        persistent_manager, warmup: unused: the drafter keeps buffers and CUDA graphs of a call in any case.
        on_begin: called after the checks.
        attachment: the attachment of a call that names no drafter.
        adapter_names: the LoRA adapter of each prompt, or `"__base__"`; None for the active adapters.
        kwargs: settings of `generate()`, such as `num_assistant_tokens` and `seeds` (one for each request).

    Returns:
        results by request id (`req_0`, `req_1`, ...) in the order of the prompts; the ids of further sequences of a
        prompt (`num_return_sequences`) end in `__child#0` and so on, and they come before it.

    Raises:
        ValueError: a prompt is not a list of token ids, or continuous batching does not support the call.
        RuntimeError: a request of a call by an attachment has failed; a trainer would take its tokens for a text.
    """
    with failing_together(model):
        check_type("inputs", inputs, Collection)
        if len(inputs) == 0:
            return {}
        prompts = [tokens_of(prompt, f"inputs[{index}]") for index, prompt in enumerate(inputs)]
        _check_inputs(model, kwargs)
        given = {name: kwargs.pop(name) for name in _OF_CALL if kwargs.get(name) is not None}
        config, settings = settings_of("generate_batch()", model, kwargs, generation_config, continuous_batching_config)
        sequences = check_int("num_return_sequences", config.num_return_sequences or 1, 1)
        with on_host():
            check_tokens(model, torch.cat(prompts)[None], None)
            # The checks depend on the longest text, and on a second row if modules have hooks.
            call, model_kwargs = call_of(model, drafter, config, heapq.nlargest(2, prompts, key=len), **given)
            logprobs = asked_logprobs(settings.return_logprobs)
            names = row_adapters(model, adapter_names, len(prompts))
            if names is not None:
                names = [name for name in names for _ in range(sequences)]
            call = replace(call, logprobs=() if logprobs is None else (logprobs,), adapters=names)

    with tqdm(total=len(prompts) * sequences, disable=not progress_bar, unit="request") as bar:
        run = ContinuousBatching(
            settings.max_requests_per_batch,
            lambda one: bar.update(1),
            records_timestamps=record_timestamps,
            reuses_prefixes=settings.allow_block_sharing,
            processors_of=_processors_of_requests(call, config, sequences, given),
        )
        repeated = [prompt for prompt in prompts for _ in range(sequences)]
        requests = generate_continuously(call, model_kwargs, repeated, run, on_begin)
    failed = next((one for one in requests if one.error is not None), None)
    if failed is not None and attachment is not None:
        raise RuntimeError(f"The request of inputs[{failed.index // sequences}] failed: {failed.error}")
    return _results(requests, sequences)


def _processors_of_requests(
    call: Call, config: GenerationConfig, sequences: int, given: Mapping[str, Any]
) -> Callable[[Request], LogitsProcessorList | RowRules]:
    """`ContinuousBatching.processors_of` for `call`, with `sequences` for each prompt and arguments `given`."""
    model, is_of_all_rows = call.model, False
    processors, allowed = given.get("logits_processor"), given.get("prefix_allowed_tokens_fn")

    def processors_of(one: Request) -> LogitsProcessorList | RowRules:
        nonlocal is_of_all_rows
        if not is_of_all_rows:
            own = None if allowed is None else lambda _, tokens: allowed(one.index // sequences, tokens)
            prompt = one.prompt.to(model.device)
            found = processors_of_prompt(model, config, prompt, call.max_new_tokens, one.ends, processors, own)
            is_of_all_rows = are_of_all_rows(found, one.ends)  # the kinds of processors are the same for all prompts
        return rules_of_prompt(call.processors, len(one.prompt)) if is_of_all_rows else found

    return processors_of


def _results(requests: Sequence[Request], sequences: int) -> dict[str, GenerationOutput]:
    """The return value of `generate_batch`, with `sequences` for each prompt."""
    results = {}
    for one in requests:
        number, child = divmod(one.index, sequences)
        one.request_id = f"req_{number}" if child == sequences - 1 else f"req_{number}__child#{child}"
        results[one.request_id] = result = one.result()
        result.created_time = one.lifespan[0]
        if one.error is not None:
            logger.error("Request %s failed: %s", one.request_id, one.error)
    return results


def call_of(
    model: PreTrainedModel,
    drafter: Drafter,
    config: GenerationConfig,
    prompts: Sequence[torch.Tensor],
    logits_processor: LogitsProcessorList | None = None,
    prefix_allowed_tokens_fn: Callable | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
    synced_gpus: bool = False,
    seeds: Any = None,
    generator: torch.Generator | None = None,
    tree: int | str | None = None,
) -> tuple[Call, dict[str, Any]]:
    """A call of continuous batching, checked and prepared as `generate()` does it, and the inputs of the target.

    The checks use `prompts`, `[length]` int64 each on the host, longest first. `config` is changed. Raises `ValueError`
    if `model` cannot generate with `drafter` as asked.
    """
    config.use_cache = True  # trainers and servers switch it off for transformers' own continuous batching
    check_call(model, drafter, config.get_generation_mode(drafter), config, synced_gpus)
    limit = math.ceil(config.max_length if config.max_new_tokens is None else config.max_new_tokens)
    if limit < 1:
        raise ValueError(f"max_new_tokens is {limit}; expected at least 1.")
    width, config.max_length = len(prompts[0]), None  # so that a criterion on the length is the caller's
    criteria = make_criteria(model, config, stopping_criteria, tokenizer)
    config.max_length = width + limit
    padding = [width - len(one) for one in prompts]
    columns = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left")
    read = Prompts(columns.to(model.device), padding, width)
    model_kwargs = {}
    if any(padding):
        mask = (torch.arange(width) >= torch.tensor(padding)[:, None]).long()
        model_kwargs["attention_mask"] = mask.to(model.device)
    asked = logits_processor, prefix_allowed_tokens_fn
    ends = () if pad_token(config) is None else end_tokens_of(criteria)  # as in `Call.ends`
    found = processors_of_prompt(model, config, read.input_ids[0], limit, ends, *asked)
    # Otherwise those that read the text belong to requests, see `ContinuousBatching.processors_of`.
    readers = () if are_of_all_rows(found, ends) else readers_of(found)
    shared = LogitsProcessorList(_of_any_prompt(one, logits_processor) for one in found if one not in readers)
    fields = {"model": model, "prompts": read, "processors": shared, "criteria": criteria, "streamer": streamer}
    options = {"is_continuous": True, "tree": tree}
    return new_call(drafter, config, Randomness(seeds, generator), found, **options, **fields), model_kwargs


def _of_any_prompt(processor: LogitsProcessor, given: Sequence[LogitsProcessor] | None) -> LogitsProcessor:
    """`processor` for prompts of any length: that of a setting skips the prompt, one that was `given` what it says."""
    if type(processor) is not MinNewTokensLengthLogitsProcessor or all(one is not processor for one in given or ()):
        return processor
    return MinLengthLogitsProcessor(processor.prompt_length_to_skip + processor.min_new_tokens, processor.eos_token_id)


# Arguments of `generate()` that are not settings: the parameters of `call_of` after the first four.
_OF_CALL = tuple(inspect.signature(call_of).parameters)[4:]


def asked_logprobs(asked: bool | str | None) -> str | None:
    """`Request.return_logprobs` for `asked`: True means processed ones, as in transformers; else a name or None."""
    kinds = {None: None, False: None, True: "processed", "processed": "processed", "raw": "raw"}
    if asked not in tuple(kinds):
        raise ValueError(f'return_logprobs is {asked!r}; expected True, "processed", "raw" or None.')
    return kinds[asked]


def tokens_of(prompt: Any, name: str) -> torch.Tensor:
    """`prompt`, which is the argument `name`, as `[length]` int64 on the host; raises `ValueError` if it is not one."""
    try:
        tokens = torch.as_tensor(prompt, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} is {prompt!r:.80}; expected a list of token ids, as a tokenizer makes.") from error
    if tokens.dim() != 1 or not len(tokens) or tokens.dtype not in TOKEN_DTYPES:
        raise ValueError(
            f"{name} has shape {list(tokens.shape)} and dtype {tokens.dtype}; expected token ids in one dimension, at "
            "least one, without padding."
        )
    return tokens.long()


def _check_inputs(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Raise `ValueError` if a call has inputs of `model` besides the tokens of its prompts, such as images."""
    parameters = inspect.signature(inspect.unwrap(type(model).forward)).parameters.keys() - REPLACED_INPUTS
    given = sorted(name for name, value in kwargs.items() if name in parameters and value is not None)
    if given:
        raise ValueError(
            f"generate_batch() was given {', '.join(given)}, but continuous batching runs prompts of text only; "
            "expected none of those. Use generate(assistant_model=...), which takes batches with images."
        )


def settings_of(
    what: str,
    model: PreTrainedModel,
    kwargs: Mapping[str, Any],
    generation_config: GenerationConfig | None,
    continuous_batching_config: ContinuousBatchingConfig | None,
    workload_hints: WorkloadHints | None = None,
) -> tuple[GenerationConfig, ContinuousBatchingConfig]:
    """The settings of `what`, a call of continuous batching or a manager, with its `kwargs`. Raises `ValueError` if an
    argument has another type, a setting is unknown, or texts are limited including their prompts, since prompts differ
    in length."""
    check_type("generation_config", generation_config, GenerationConfig | None)
    check_type("workload_hints", workload_hints, WorkloadHints | None)
    check_type("continuous_batching_config", continuous_batching_config, ContinuousBatchingConfig | None)
    config, settings = generation_config, continuous_batching_config or ContinuousBatchingConfig()
    check_int("max_queue_size", settings.max_queue_size, 0, ", which is any number")
    if settings.max_requests_per_batch is not None:
        check_int("max_requests_per_batch", settings.max_requests_per_batch, 1, ", or None")
    places = [kwargs, *(vars(one) for one in (config, model.generation_config) if one is not None)]
    names = ("max_length", "max_new_tokens")
    longest, most_new = (next((one[name] for one in places if one.get(name) is not None), None) for name in names)
    if longest is not None and most_new is None:
        raise ValueError(
            f"max_length is {longest}, which counts the tokens of a prompt, too, and max_new_tokens is not "
            "set; expected max_new_tokens, which holds for prompts of any length."
        )
    prepared, unknown = prepared_config(model, generation_config, **kwargs)
    unknown = sorted(name for name, value in unknown.items() if value is not None and name not in _OUTPUTS)
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is no setting of {what}; expected settings of a generation config.")
    return prepared, settings
