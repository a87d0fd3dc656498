"""What continuous batching runs, and the requests of a call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..drafters.base import Drafter
from ..host.caches import OUTPUT_NAME
from ..kernels.types import NO_TOKEN
from ..parallel.tensor_parallel import from_first_rank
from ..row_buffers import upload
from ..sampling.processors import BlockProcessor
from ..sampling.row_processors import RowsProcessor
from .request import Request
from .row_request import ContinuousBatching, RowRequest
from .transcript import DECIDED_BY_TOKENS


def check_continuous(request: Request) -> None:
    """Raise `ValueError` if a call asks for what continuous batching does not have."""
    others = sorted({type(rule).__name__ for rule in request.criteria if type(rule) not in DECIDED_BY_TOKENS})
    if others:
        raise ValueError(
            f"Continuous batching ends a request at an end-of-sequence token or at max_new_tokens, but the call has "
            f"{', '.join(others)}; expected no other stopping criteria. Use generate() with a padded batch."
        )
    drafter = type(request.drafter)
    if drafter.new_memory is not Drafter.new_memory and drafter.copy_rows is Drafter.copy_rows:
        raise ValueError(
            f"{drafter.__name__} has memory of a generation (new_memory) that cannot be copied row by row; expected a "
            "family that implements copy_rows(). Use generate() with a padded batch."
        )
    asked = {
        "a streamer": request.streamer,
        OUTPUT_NAME: request.cache,
        "row temperatures": request.row_temperatures,
        **{f"output_{name}": request.keeps(name) or None for name in ("scores", "logits", "hidden_states")},
    }
    found = [name for name, value in asked.items() if value is not None]
    if found:
        raise ValueError(f"Continuous batching does not support {', '.join(found)}; expected a call without it.")


def processor_of(request: Request) -> RowsProcessor:
    blank = torch.empty(0, 0, dtype=torch.int64, device=request.model.device)
    return RowsProcessor(BlockProcessor(request.processors, blank, [], request.temperature))


def requests_of(request: Request, settings: ContinuousBatching) -> list[RowRequest]:
    """A request for each of the prompts of `settings`; those that are too long have an error."""
    ends = request.eos_token_ids
    ends = frozenset() if ends is None else frozenset(ends.tolist())
    seeds = from_first_rank(request.randomness.row_seeds(len(settings.prompts), request.temperature), request.model)
    found = []
    for index, (prompt, seed) in enumerate(zip(settings.prompts, seeds.tolist(), strict=True)):
        remaining = request.remaining_after(len(prompt))
        one = RowRequest(index, prompt, remaining, remaining < request.max_new_tokens, ends, seed)
        one.prompt_ids = prompt.tolist()
        one.error = request.why_too_long(len(prompt))
        one.records_timestamps = settings.record_timestamps
        found.append(one)
    return found


def ends_of(requests: Sequence[RowRequest], like: torch.Tensor) -> torch.Tensor | None:
    """`[len(requests), E]` int64: the tokens that end each request, filled up with `NO_TOKEN`; None without any."""
    width = max(len(one.ends) for one in requests)
    if width == 0:
        return None
    rows = [[*one.ends, *[NO_TOKEN] * (width - len(one.ends))] for one in requests]
    return upload(rows, like)
