"""The rows of a batch as calls of one row each, and their outputs joined as plain `generate()` returns them."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    Cache,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..cache.layer_kinds import first_reason
from ..calls.call import Call
from ..calls.prompts import Prompts
from ..calls.transcript import DECIDED_BY_TOKENS
from ..host.caches import OUTPUT_NAME, GenerateDecoderOnlyOutput, given_cache
from ..host.generation import inputs_after, prefill
from ..modules.hidden_states import modules_of
from ..modules.module_hooks import has_hooks
from ..modules.patch import user_code
from ..patching.support import parts
from ..sampling.processors import processors_of_row
from ..sampling.randomness import Randomness
from .compared_texts import why_not_padded_rows, why_not_separate_rows


def why_not_separate(call: Call, model_kwargs: dict[str, Any]) -> str | None:
    """The reason why the rows of `call` cannot run one after the other; None if they can."""
    batch, prompts = call.batch, call.prompts
    if batch == 1:
        return None
    if prompts.cached:
        return (
            f"{OUTPUT_NAME} holds {prompts.cached} tokens of each of {batch} rows, which cannot be taken apart; "
            "expected an empty cache, or one row"
        )
    if has_hooks(modules_of(call.model), of_engines=False):
        return "modules of the target have forward hooks, which may treat each row differently; remove them"
    obstacle = first_reason(_why_not_split(name, value, batch) for name, value in model_kwargs.items())
    if obstacle is not None:
        return obstacle
    model, longest = call.model, call.config.max_length - 1
    if any(prompts.padding):
        obstacle = first_reason(part.why_not_alone(model, longest) for part in parts(model))
        if obstacle is not None:
            return f"{obstacle}; expected prompts of the same length, or fewer new tokens"
        return why_not_padded_rows(model)
    return why_not_separate_rows(model, is_padded=False)


def _why_not_split(name: str, value: Any, batch: int) -> str | None:
    """The reason why the model input `name` does not have an entry for each of `batch` rows; None if it does."""
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        row_dim, shape = _row_dim(name), tuple(value.shape)
        if len(shape) < -row_dim or shape[row_dim] != batch:
            return (
                f"{name} has shape {list(shape)}, which does not say what belongs to which of {batch} rows; expected "
                "an entry for each row"
            )
    if isinstance(value, (dict, list, tuple)) and len(value) > 0:
        content = f" of {', '.join(map(str, value))}" if isinstance(value, dict) else ""
        return (
            f"{name} is a {type(value).__name__}{content}, which does not say what belongs to which of {batch} rows; "
            "expected a tensor with an entry for each row"
        )
    return None


def _row_dim(name: str) -> int:
    # With M-RoPE position ids are `[sections, B, P]`.
    return -2 if name == "position_ids" else 0


def call_of_row(call: Call, model_kwargs: dict[str, Any], row: int) -> tuple[Call, dict[str, Any]]:
    """Row `row` of a call as a call of its own, and its model inputs; a call of one row is returned as it is.

    The row keeps its padding, and gets no streamer. Its criteria are those of the batch: ask for `criteria_of_row` when
    the row begins.
    """
    if call.batch == 1:
        return call, model_kwargs
    prompts, config = call.prompts, copy.copy(call.config)
    config.output_hidden_states = config.output_attentions = False
    config.return_dict_in_generate = call.keeps("scores") or call.keeps("logits")
    own = replace(
        call,
        prompts=Prompts(prompts.input_ids[row : row + 1], prompts.padding[row : row + 1], prompts.width),
        processors=processors_of_row(call.processors, row, call.batch),
        config=config,
        randomness=Randomness(seeds=call.seeds[row : row + 1]),
        streamer=None,
        cache=None,
    )
    inputs = {
        name: _input_of_row(name, value, row)
        for name, value in model_kwargs.items()
        if name not in ("output_attentions", "output_hidden_states")
    }
    return own, inputs


def _input_of_row(name: str, value: Any, row: int) -> Any:
    if isinstance(value, Cache):
        # It is empty. Streams, which offloaded caches have, cannot be copied.
        return copy.deepcopy(value, {id(one): one for one in vars(value).values() if isinstance(one, torch.Stream)})
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    return value.narrow(_row_dim(name), row, 1)


def _is_of_row(rule: StoppingCriteria, call: Call) -> bool:
    """Whether `rule` can be evaluated for one row alone, and ends that row only."""
    waits = call.pad_token_id is not None
    return type(rule) in ((*DECIDED_BY_TOKENS, StopStringCriteria) if waits else (MaxLengthCriteria,))


def criteria_of_row(call: Call, row: int) -> StoppingCriteriaList:
    """The criteria that end one row of a call: tokens, stop strings, the time limit; all criteria if it has one row.

    The time limit is that of the call; the remaining rows share the remaining time equally.
    """
    if call.batch == 1:
        return call.criteria
    rules = StoppingCriteriaList()
    now = time.time()
    for rule in call.criteria:
        if type(rule) is MaxTimeCriteria:
            left = max(rule.initial_timestamp + rule.max_time - now, 0.0)
            rules.append(MaxTimeCriteria(left / (call.batch - row), now))
        elif _is_of_row(rule, call):
            rules.append(rule)
    return rules


def join_rows(
    call: Call, model_kwargs: dict[str, Any], outputs: list[torch.Tensor | GenerateDecoderOnlyOutput]
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Join rows to what plain `generate()` returns: sequences `[B, P + new]` or a `GenerateDecoderOnlyOutput`.

    Stopping criteria that may read the whole batch are evaluated here, once for each step; tokens of a row after the
    step at which they end it are dropped. The streamer also gets the steps.

    Hidden states, attention weights and the cache come from two passes of the target over the finished batch, one over
    its prompts and one over the rest. So they are what plain `generate()` returns for padding and finished rows, too.
    """
    prompts, kept = call.prompts, [name for name in ("scores", "logits") if call.keeps(name)]
    texts = [output if isinstance(output, torch.Tensor) else output.sequences for output in outputs]
    new = [text[0, prompts.width :].tolist() for text in texts]
    rules = [rule for rule in call.criteria if not _is_of_row(rule, call) and type(rule) is not MaxTimeCriteria]
    lengths = prompts.width + torch.tensor(list(map(len, new)))

    def has_ended(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return lengths.to(input_ids.device) <= input_ids.shape[1]

    transcript = call.transcript(StoppingCriteriaList([*rules, has_ended]))
    for row, (tokens, output) in enumerate(zip(new, outputs, strict=True)):
        added = [tokens if other == row else [] for other in range(call.batch)]
        records = {name: torch.cat(output[name])[None].expand(call.batch, -1, -1) for name in kept}
        transcript.add(added, list(map(len, added)), **records)
    sequences = transcript.sequences
    if call.config.return_dict_in_generate:
        result = GenerateDecoderOnlyOutput(
            sequences,
            scores=transcript.record("scores"),
            logits=transcript.record("logits"),
            **_passes(call, model_kwargs, sequences),
        )
    else:
        result = sequences
        if call.cache is not None:
            _passes(call, model_kwargs, sequences)
    transcript.finish()
    return result


def _passes(call: Call, model_kwargs: dict[str, Any], sequences: torch.Tensor) -> dict[str, Any]:
    """Run `[B, P + new]` without the last column; returns the cache, hidden states and attention weights by name."""
    model, width = call.model, call.prompts.width
    after = sequences.shape[1] - width - 1
    with user_code():
        passes = [prefill(model, call.prompts.input_ids, call.config, model_kwargs)]
        if after > 0:
            inputs = inputs_after(model, passes[0], model_kwargs, num_new_tokens=after)
            inputs = model.prepare_inputs_for_generation(sequences[:, :-1], next_sequence_length=after, **inputs)
            passes.append(model(**inputs, return_dict=True))
    found = {OUTPUT_NAME: given_cache(model_kwargs)}
    for name in filter(call.keeps, ("hidden_states", "attentions")):
        found[name] = [passes[0][name]]
        for step in range(after):
            # A step attends to the columns up to its own; layers without attention weights have None.
            columns = width + step + 1 if name == "attentions" else None
            layers = passes[1][name]
            found[name].append(tuple(None if one is None else one[..., step : step + 1, :columns] for one in layers))
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
