"""Rounds and prefills as CUDA graphs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from ..device_policy import policy_of
from ..drafters.base import Drafter
from ..errors import first_line
from ..graphs.cuda_graphs import Capture
from ..kernels.types import Proposal, VerificationResult
from ..modules.signature import Signature
from ..parallel.tensor_parallel import tensor_parallel_group
from ..patching.experts import capturable_experts, copies_experts
from ..sampling.processors import BlockProcessor
from ..state import DecodeState
from .prefill import prefill_chunk
from .rounds import RoundOutput, catch_up, draft_and_forward, logprobs_of, run_round, verify_and_commit
from .sessions import Session
from .target import Target

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class CapturedRound:
    """`run_round` as one CUDA graph; as two, where logits processors read the text on the host in between.

    Attributes:
        execution: how rounds are run, for `SpeculationStats.execution`.
    """

    def __init__(self, capture: Capture, state: DecodeState, target: Target, drafter: Drafter, process: BlockProcessor):
        self._state = state
        self._process = process  # whose tensors, those of the call that captures, every replay reads
        # What a graph returns is never freed, so scores and logits are not returned. The result is a plain tuple:
        # torch 2.11 cannot compile functions that return named tuples.
        with state.idle():
            if process.key is not None:

                def whole() -> tuple:
                    result, logprobs, *_ = run_round(state, target, drafter, process)
                    return tuple(result), logprobs

                self._round = capture(whole)
            else:
                self._round = None

                def first_half() -> tuple:
                    proposal, *others = draft_and_forward(state, target, drafter)
                    return tuple(proposal), *others

                self._draft_and_forward = capture(first_half)
                proposal, _, logits, aux_hidden_states = self._draft_and_forward.result
                self._scores = torch.zeros_like(logits, dtype=torch.float32)

                def second_half() -> tuple:
                    result = verify_and_commit(state, self._scores, Proposal(*proposal), aux_hidden_states)
                    return tuple(result), logprobs_of(state, result, self._scores, logits)

                self._verify_and_commit = capture(second_half)
        graphs = "one graph" if self._round is not None else "two graphs, processors between"
        self.execution = f"captured in {graphs}, {'compiled' if capture.has_compiled else 'not compiled'}"

    def __call__(self, process: BlockProcessor) -> RoundOutput:
        if self._round is not None:
            result, logprobs = self._round()
        else:
            _, block, logits, _ = self._draft_and_forward()
            self._scores.copy_(process(logits, block, self._state))
            result, logprobs = self._verify_and_commit()
        return RoundOutput(VerificationResult(*result), logprobs)


def why_not_captured(model: PreTrainedModel, has_hooks: bool, kept: Sequence[str]) -> str | None:
    """The reason why the rounds of a call run eagerly, so that its buffers need not be kept; None if they are captured.

    A replayed graph would not call forward hooks, nor give what is `kept` of every step for the caller, such as scores.
    """
    if not policy_of(model.device).cuda_graphs:
        return f"there are no CUDA graphs on a device of type {model.device.type}"
    if kept:
        return f"{', '.join(kept)} of every round are kept for the caller"
    if has_hooks:
        reason = "modules have hooks, which a replayed CUDA graph does not call"
        _warn_once(f"Rounds of {type(model).__name__} run eagerly: {reason}. Remove the hooks to have rounds captured.")
        return reason
    return None


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def capture_round(session: Session, target: Target, drafter: Drafter, process: BlockProcessor) -> CapturedRound | None:
    """`run_round` as CUDA graphs; None, and a warning, if it does something that cannot be captured."""
    is_shared = tensor_parallel_group(target.model) is not None
    capture = Capture(target.model.device, session.graph_pool, drafter.compiles_rounds, same_everywhere=is_shared)
    return _if_possible(
        "A round", target, drafter, lambda: CapturedRound(capture, session.state, target, drafter, process)
    )


def capture_catch_up(session: Session, target: Target, drafter: Drafter, width: int) -> Callable[[], None] | None:
    """`catch_up` as a CUDA graph, not compiled, since it is rare; None, and a warning, if it cannot be captured."""
    state = session.state
    capture = Capture(target.model.device, session.graph_pool, is_compiled=False)

    def capture_idle() -> Callable[[], None]:
        with state.idle():
            return capture(lambda: catch_up(state, drafter, width))

    return _if_possible("Drafting", target, drafter, capture_idle)


def capture_prefill(session: Session, target: Target, drafter: Drafter, columns: int) -> Callable[[], None] | None:
    """`prefill_chunk` as a CUDA graph, not compiled: compiling takes as long for each width as for a round.

    None, and a warning, if it does something that cannot be captured; None also for mixtures of experts that would
    copy weights for every token. Afterwards the session must be prefilled again from the start.
    """
    if copies_experts(target.model, drafter):
        return None
    capture = Capture(target.model.device, session.graph_pool, is_compiled=False)
    return _if_possible(
        "The prefill",
        target,
        drafter,
        lambda: capture(lambda: prefill_chunk(session.state, target, drafter, columns, session.prompts)),
    )


def _if_possible(what: str, target: Target, drafter: Drafter, capture: Callable[[], _T]) -> _T | None:
    try:
        with capturable_experts(target.model, drafter):
            before = Signature(target.model, drafter).behaviour
            captured = capture()
            if Signature(target.model, drafter).behaviour != before:
                raise RuntimeError("its forward pass changes attributes of modules, which a replay would not do")
            return captured
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        name = type(target.model).__name__
        logger.warning(f"{what} of {name} cannot be captured and runs eagerly: {first_line(error)}")
        return None
