"""`model.generate_batch(..., assistant_model=drafter)`: continuous batching with a drafter."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from ..drafters.base import Drafter
from ..engine.continuous import ContinuousBatching, RowRequest
from .dispatch import continuous_batching

logger = logging.getLogger(__name__)

# Settings of `ContinuousBatchingConfig` that ask for more than texts.
_UNSUPPORTED = ("return_logprobs",)


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
        continuous_batching_config: `max_requests_per_batch` is the most rows of a round; what else it says of memory
            and of CUDA graphs is transformers' own engine's.
        record_timestamps, progress_bar: as of transformers.
        persistent_manager, warmup: buffers and CUDA graphs of a call are kept by the drafter in any case.
        kwargs: settings of `generate()`, such as `max_new_tokens`, `num_assistant_tokens` and `seeds` (one for each
            request).

    Returns:
        by request id, `req_0`, `req_1` and so on, in the order of the prompts; further sequences of a prompt
        (`num_return_sequences`) have `__child#0` and so on appended and come before it.

    Raises:
        ValueError: a prompt is empty, or continuous batching does not support the call.
    """
    if not inputs:
        return {}
    prompts = [torch.as_tensor(prompt, dtype=torch.int64).reshape(-1).cpu() for prompt in inputs]
    empty = [index for index, prompt in enumerate(prompts) if not len(prompt)]
    if empty:
        raise ValueError(f"Prompt {empty[0]} of inputs has no tokens; expected at least one.")
    settings = continuous_batching_config or ContinuousBatchingConfig()
    asked = [name for name in _UNSUPPORTED if getattr(settings, name, None)]
    if asked:
        raise ValueError(f"{', '.join(asked)} is set, but generate_batch() with a drafter returns texts only; drop it.")
    width = max(map(len, prompts))
    input_ids = torch.stack([torch.nn.functional.pad(prompt, (width - len(prompt), 0)) for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    attention_mask = (torch.arange(width) >= width - lengths[:, None]).long()
    with tqdm(disable=not progress_bar, unit="request") as bar:

        def on_finished(request: RowRequest) -> None:
            bar.update(1)

        run = ContinuousBatching(settings.max_requests_per_batch, record_timestamps, on_finished)
        with continuous_batching(run):
            output = model.generate(
                input_ids=input_ids.to(model.device),
                attention_mask=attention_mask.to(model.device),
                generation_config=generation_config,
                assistant_model=drafter,
                **kwargs,
            )
    sequences = len(output.requests) // len(prompts)
    results = [_result(request, sequences) for request in output.requests]
    for result in results:
        if result.error is not None:
            logger.error("Request %s failed: %s", result.request_id, result.error)
    return {result.request_id: result for result in results}


def _result(request: RowRequest, sequences: int) -> GenerationOutput:
    """The result of a request of a call with `sequences` for every prompt; the last of them has the prompt's own id."""
    prompt, child = divmod(request.index, sequences)
    name = f"req_{prompt}" if child == sequences - 1 else f"req_{prompt}__child#{child}"
    return GenerationOutput(
        request_id=name,
        prompt_ids=request.prompt.tolist(),
        generated_tokens=request.tokens,
        error=request.error,
        status=RequestStatus.FINISHED if request.error is None else RequestStatus.FAILED,
        created_time=request.lifespan[0],
        lifespan=request.lifespan,
        timestamps=request.timestamps or None,
    )
