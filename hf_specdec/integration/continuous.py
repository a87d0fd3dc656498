"""`model.generate_batch(..., assistant_model=drafter)`: continuous batching with a drafter."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from tqdm import tqdm
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList, PreTrainedModel

from ..drafters.base import Drafter
from ..engine.first_pass import REPLACED_INPUTS
from ..engine.request import Request
from ..engine.row_request import ContinuousBatching, RowRequest
from ..host.generation import GenerationOutput, RequestStatus, prepared_config
from ..patching.patch import on_host
from .dispatch import continuous_batching
from .request_processors import are_of_all_rows, processors_of_prompt
from .validation import TOKEN_DTYPES, check_tokens

logger = logging.getLogger(__name__)

# Settings of `ContinuousBatchingConfig` that ask for more than texts.
_UNSUPPORTED = ("return_logprobs",)

_LENGTHS = ("max_length", "max_new_tokens")


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
    **kwargs: Any,
) -> dict[str, GenerationOutput]:
    """`ContinuousMixin.generate_batch` with a drafter.

    Args:
        model: the target.
        drafter: bound to it.
        inputs: token ids of every prompt, lists or one-dimensional int64 tensors.
        generation_config: of all requests.
        continuous_batching_config: `max_requests_per_batch` is the most rows of a round; without `allow_block_sharing`
            every prompt is prefilled whole. What else it says of memory and of CUDA graphs is transformers' own
            engine's.
        record_timestamps, progress_bar: as of transformers.
        persistent_manager, warmup: buffers and CUDA graphs of a call are kept by the drafter in any case.
        kwargs: settings of `generate()`, such as `max_new_tokens`, `num_assistant_tokens` and `seeds` (one for each
            request).

    Returns:
        by request id, `req_0`, `req_1` and so on, in the order of the prompts; further sequences of a prompt
        (`num_return_sequences`) have `__child#0` and so on appended and come before it.

    Raises:
        ValueError: a prompt is not a list of token ids, or continuous batching does not support the call.
    """
    if len(inputs) == 0:
        return {}
    prompts = [tokens_of(prompt, index) for index, prompt in enumerate(inputs)]
    _check_inputs(model, kwargs)
    check_length(model, generation_config, kwargs)
    settings = continuous_batching_config or ContinuousBatchingConfig()
    check_config(settings)
    with on_host():
        check_tokens(model, torch.cat(prompts)[None], None)
        input_ids, attention_mask = _call_of(prompts)
    sequences = _asked("num_return_sequences", model, generation_config, kwargs) or 1
    total = len(prompts) * sequences
    config, _ = prepared_config(model, generation_config, **kwargs)
    with tqdm(total=total, disable=not progress_bar, unit="request") as bar:

        def on_finished(request: RowRequest) -> None:
            bar.update(1)

        def processors_of(one: RowRequest, call: Request) -> LogitsProcessorList | None:
            asked, prompt = _callers_processors(kwargs, one.index), one.prompt.to(model.device)
            found = processors_of_prompt(model, config, prompt, call.max_new_tokens, one.ends, *asked)
            return None if are_of_all_rows(found) else found

        run = ContinuousBatching(
            settings.max_requests_per_batch,
            record_timestamps,
            on_finished,
            reuses_prefixes=settings.allow_block_sharing,
            processors_of=processors_of,
            prompts=[prompt for prompt in prompts for _ in range(sequences)],
        )
        with continuous_batching(run):
            output = model.generate(
                input_ids=input_ids.to(model.device),
                attention_mask=attention_mask.to(model.device),
                generation_config=generation_config,
                assistant_model=drafter,
                **kwargs | {"use_cache": True},  # as with managers: trainers and servers leave it off
            )
    results = [_result(request, prompts[request.index // sequences], sequences) for request in output.requests]
    for result in results:
        if result.error is not None:
            logger.error("Request %s failed: %s", result.request_id, result.error)
    return {result.request_id: result for result in results}


def _call_of(prompts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """`input_ids` and `attention_mask` of the call that is made for `prompts`: the longest of them, and one other.

    What a call is checked by depends on its longest text, and on more than one row where modules have hooks.
    """
    longest = max(range(len(prompts)), key=lambda index: len(prompts[index]))
    rows = [prompts[longest], *[one for index, one in enumerate(prompts) if index != longest][:1]]
    width = len(rows[0])
    padded = [torch.nn.functional.pad(row, (width - len(row), 0)) for row in rows]
    lengths = torch.tensor([len(row) for row in rows])
    return torch.stack(padded), (torch.arange(width) >= width - lengths[:, None]).long()


def _callers_processors(kwargs: dict[str, Any], index: int) -> tuple[LogitsProcessorList | None, Callable | None]:
    """The `logits_processor` and the `prefix_allowed_tokens_fn` of a call, as of the request with this `index`."""
    allowed = kwargs.get("prefix_allowed_tokens_fn")
    own = None if allowed is None else lambda _, tokens: allowed(index, tokens)
    return kwargs.get("logits_processor"), own


def check_config(settings: ContinuousBatchingConfig) -> None:
    """Raise `ValueError` if `settings` ask for what continuous batching with a drafter does not have."""
    asked = [name for name in _UNSUPPORTED if getattr(settings, name, None)]
    if asked:
        raise ValueError(
            f"{', '.join(asked)} is set, but continuous batching with a drafter returns texts only; drop it."
        )
    most = settings.max_queue_size
    if not isinstance(most, Integral) or most < 0:
        raise ValueError(f"max_queue_size is {most!r}; expected an int of at least 0, which is any number.")
    rows = settings.max_requests_per_batch
    if rows is not None and rows < 1:
        raise ValueError(f"max_requests_per_batch is {rows}; expected at least 1, or None.")


def tokens_of(prompt: Any, index: int) -> torch.Tensor:
    """`prompt`, which is `inputs[index]`, as `[length]` int64 on the host.

    Raises:
        ValueError: it is not a list or a one-dimensional tensor of token ids, at least one.
    """
    try:
        tokens = torch.as_tensor(prompt, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"inputs[{index}] is {prompt!r:.80}; expected a list of token ids.") from error
    if tokens.dim() != 1 or not len(tokens) or tokens.dtype not in TOKEN_DTYPES:
        raise ValueError(
            f"inputs[{index}] has shape {list(tokens.shape)} and dtype {tokens.dtype}; expected token ids in one "
            "dimension, at least one, without padding."
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


def check_length(model: PreTrainedModel, config: GenerationConfig | None, kwargs: dict[str, Any]) -> None:
    """Raise `ValueError` if a call states how long texts may be with their prompts, whose lengths differ."""
    asked = {name: _asked(name, model, config, kwargs) for name in _LENGTHS}
    if asked["max_length"] is not None and asked["max_new_tokens"] is None:
        raise ValueError(
            f"max_length is {asked['max_length']}, which counts the tokens of a prompt, too, and max_new_tokens is not "
            "set; expected max_new_tokens, which holds for prompts of any length."
        )


def _asked(name: str, model: PreTrainedModel, config: GenerationConfig | None, kwargs: dict[str, Any]) -> Any:
    """The setting `name` of a call of `generate()`; None if nobody has made it."""
    places = [kwargs, *(vars(one) for one in (config, model.generation_config) if one is not None)]
    return next((one[name] for one in places if one.get(name) is not None), None)


def _result(request: RowRequest, prompt: torch.Tensor, sequences: int) -> GenerationOutput:
    """The result of a request of a call with `sequences` for every prompt; the last of them has the prompt's own id."""
    number, child = divmod(request.index, sequences)
    name = f"req_{number}" if child == sequences - 1 else f"req_{number}__child#{child}"
    return GenerationOutput(
        request_id=name,
        prompt_ids=prompt.tolist(),
        generated_tokens=request.tokens,
        error=request.error,
        status=RequestStatus.FINISHED if request.error is None else RequestStatus.FAILED,
        created_time=request.lifespan[0],
        lifespan=request.lifespan,
        timestamps=request.timestamps or None,
    )
