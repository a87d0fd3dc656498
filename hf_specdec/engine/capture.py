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
from ..graphs.cuda_graphs import capture, compiled
from ..modules.signature import Signature
from ..parallel.tensor_parallel import tensor_parallel_group
from ..patching.experts import capturable_experts, copies_experts
from ..sampling.processors import BlockProcessor
from .prefill import prefill_chunk
from .rounds import RoundOutput, catch_up, draft_and_forward, logprobs_of, run_round, verify_and_commit
from .sessions import Session
from .target import Target

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class CapturedRound:
    """`run_round` as one CUDA graph; as two, where logits processors read the text on the host in between.

    Args:
        backend: of `torch.compile`, by which the target's forward pass is compiled; None if it is not.

    Attributes:
        execution: how rounds are run, for `SpeculationStats.execution`.
    """

    def __init__(
        self, session: Session, target: Target, drafter: Drafter, process: BlockProcessor, backend: str | None = None
    ):
        model, self._state = target.model, session.state
        self._process = process  # whose tensors, those of the call that captures, every replay reads
        state, graph = session.state, functools.partial(capture, device=model.device, memory=session.graph_pool)
        if backend is not None:
            target = compiled(target, backend, same_everywhere=tensor_parallel_group(model) is not None)
        # What a graph returns is never freed, so scores and logits are not returned.
        with state.idle():
            if process.key is not None:
                self._round = graph(lambda: run_round(state, target, drafter, process)[:3])
            else:
                self._round = None
                self._draft_and_forward = graph(lambda: draft_and_forward(state, target, drafter))
                proposal, _, logits, aux_hidden_states = self._draft_and_forward.result
                self._scores = torch.zeros_like(logits, dtype=torch.float32)

                def second_half() -> tuple:
                    result, walk = verify_and_commit(state, self._scores, proposal, aux_hidden_states)
                    return result, logprobs_of(state, result, self._scores, logits, walk), walk

                self._verify_and_commit = graph(second_half)
        graphs = "one graph" if self._round is not None else "two graphs, processors between"
        self.execution = f"captured in {graphs}, {'not compiled' if backend is None else 'compiled'}"

    def __call__(self, process: BlockProcessor) -> RoundOutput:
        if self._round is not None:
            return RoundOutput(*self._round())
        _, block, logits, _ = self._draft_and_forward()
        self._scores.copy_(process(logits, block, self._state))
        return RoundOutput(*self._verify_and_commit())


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
    backend = policy_of(target.model.device).compiler if drafter.compiles_rounds else None
    session.keep_patches(target.patches)

    def captured() -> CapturedRound:
        if backend is not None:
            try:
                return CapturedRound(session, target, drafter, process, backend)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # compilers raise anything; an error of the round is raised again below
                logger.warning(
                    f"torch.compile cannot compile a round ({type(error).__name__}: {first_line(error)}); it is "
                    "captured without being compiled. compile=False avoids the attempt."
                )
        return CapturedRound(session, target, drafter, process)

    return _if_possible("A round", target, drafter, captured)


def capture_catch_up(session: Session, target: Target, drafter: Drafter, width: int) -> Callable[[], None] | None:
    """`catch_up` as a CUDA graph; None, and a warning, if it cannot be captured."""

    def captured() -> Callable[[], None]:
        with session.state.idle():
            return capture(lambda: catch_up(session.state, drafter, width), target.model.device, session.graph_pool)

    return _if_possible("Drafting", target, drafter, captured)


def capture_prefill(session: Session, target: Target, drafter: Drafter, columns: int) -> Callable[[], None] | None:
    """`prefill_chunk` as a CUDA graph.

    None, and a warning, if it does something that cannot be captured; None also for mixtures of experts that would
    copy weights for every token. Afterwards the session must be prefilled again from the start.
    """
    if copies_experts(target.model, drafter):
        return None
    session.keep_patches(target.patches)

    chunk = functools.partial(prefill_chunk, session.state, target, drafter, columns, session.prompts)
    graph = functools.partial(capture, chunk, target.model.device, session.graph_pool)
    return _if_possible("The prefill", target, drafter, graph)


def _if_possible(what: str, target: Target, drafter: Drafter, make: Callable[[], _T]) -> _T | None:
    try:
        with capturable_experts(target.model, drafter):
            before = Signature(target.model, drafter).behaviour
            captured = make()
            if Signature(target.model, drafter).behaviour != before:
                raise RuntimeError("its forward pass changes attributes of modules, which a replay would not do")
            return captured
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        name = type(target.model).__name__
        logger.warning(f"{what} of {name} cannot be captured and runs eagerly: {first_line(error)}")
        return None
