"""Rounds and prefills as CUDA graphs."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ..device_policy import policy_of
from ..drafters.base import Drafter
from ..errors import first_line
from ..graphs.cuda_graphs import capture, compiled
from ..memory.virtual_memory import tensor_bytes
from ..modules.signature import Signature
from ..parallel.tensor_parallel import tensor_parallel_group
from ..patching.experts import capturable_experts, copies_experts
from ..sampling.processors import BlockProcessor
from ..state import DecodeState
from .hosted_target import HostedTarget
from .prefill import prefill_chunk
from .rounds import RoundOutput, catch_up, commit_first_token, draft_and_forward, run_round, verify_and_commit
from .sessions import Session
from .target import Target

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class CapturedRound:
    """`run_round` as one CUDA graph, or as two with the logits processors between them, if these have no `key`.

    Args:
        kept: see `Call.kept`; outputs have the scores and logits in it.
        backend: of `torch.compile`, which compiles the target's forward pass; None if it is not compiled.

    Attributes:
        execution: how rounds are run, for `SpeculationStats.execution`.
    """

    def __init__(
        self,
        session: Session,
        target: Target,
        drafter: Drafter,
        process: BlockProcessor,
        kept: Sequence[str] = (),
        backend: str | None = None,
    ):
        model, self._state = target.model, session.state
        self._process = process.shared  # kept alive: every replay reads its tensors
        state, graph = session.state, functools.partial(capture, device=model.device, memory=session.graph_pool)
        if backend is not None:
            target = compiled(target, backend, same_everywhere=tensor_parallel_group(model) is not None)

        def result(output: RoundOutput) -> RoundOutput:
            """`output` with the scores and logits in `kept` alone: results of a graph are never freed."""
            others = dict.fromkeys({"scores", "logits"} - set(kept))
            return output._replace(**others).along_path()

        with state.idle():
            if process.key is not None:
                self._round = graph(lambda: result(run_round(state, target, drafter, self._process)))
            else:
                self._round = None
                self._draft_and_forward = graph(lambda: draft_and_forward(state, target, drafter))
                proposal, _, logits, hidden_states = self._draft_and_forward.result
                self._scores = torch.zeros_like(logits, dtype=torch.float32)
                given = self._scores, logits, proposal, hidden_states
                self._verify_and_commit = graph(lambda: result(verify_and_commit(state, *given)))
        graphs = "one graph" if self._round is not None else "two graphs, processors between"
        self.execution = f"captured in {graphs}, {'not compiled' if backend is None else 'compiled'}"

    def __call__(self, process: BlockProcessor) -> RoundOutput:
        if self._round is not None:
            return self._round()
        _, block, logits, _ = self._draft_and_forward()
        self._scores.copy_(process(logits, block, self._state))
        return self._verify_and_commit()


def capture_round(
    session: Session, hosted: HostedTarget, process: BlockProcessor, kept: Sequence[str]
) -> CapturedRound | None:
    """`run_round` as CUDA graphs, see `CapturedRound`; None, with a warning, if it cannot be captured."""
    drafter = hosted.drafter
    backend = policy_of(hosted.model.device).compiler if drafter.compiles_rounds else None

    def captured(target: Target) -> CapturedRound:
        if backend is not None:
            try:
                return CapturedRound(session, target, drafter, process, kept, backend)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # compilers raise anything; an error of the round is raised again below
                logger.warning(
                    f"torch.compile cannot compile a round ({type(error).__name__}: {first_line(error)}); it is "
                    "captured without being compiled. compile=False avoids the attempt."
                )
        return CapturedRound(session, target, drafter, process, kept)

    return _if_possible("A round", session, hosted, captured)


def run_once(session: Session, hosted: HostedTarget, process: BlockProcessor) -> None:
    """Choose first tokens and run a round, both of idle rows. Only processing that a graph contains takes part.

    An error is left to the capture, which says why a round runs eagerly.
    """
    state, target = session.state, hosted()

    def scores(logits: torch.Tensor, block: torch.Tensor, state: DecodeState) -> torch.Tensor:
        return process.shared(logits, block, state) if process.key is not None else logits.float()

    try:
        with capturable_experts(target.model, hosted.drafter), state.idle():
            run_round(state, target, hosted.drafter, scores)
            commit_first_token(state, scores, slice(None))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        pass
    finally:
        state.block_width = 1


def capture_catch_up(session: Session, hosted: HostedTarget, width: int) -> Callable[[], None] | None:
    """`catch_up` as a CUDA graph; None, with a warning, if it cannot be captured."""
    state, run = session.state, functools.partial(catch_up, session.state, hosted.drafter, width)

    def captured(target: Target) -> Callable[[], None]:
        with state.idle():
            return capture(run, target.model.device, session.graph_pool)

    return _if_possible("Drafting", session, hosted, captured)


def capture_prefill(session: Session, hosted: HostedTarget, columns: int) -> Callable[[], None] | None:
    """`prefill_chunk` as a CUDA graph.

    None, with a warning, if it cannot be captured. None also if a mixture of experts would copy weights for every
    token. Afterwards the session must be prefilled again from the start.
    """
    if copies_experts(hosted.model, hosted.drafter):
        return None

    def captured(target: Target) -> Callable[[], None]:
        run = functools.partial(prefill_chunk, session.state, target, hosted.drafter, columns, session.prompts)
        return capture(run, target.model.device, session.graph_pool)

    return _if_possible("The prefill", session, hosted, captured)


def _if_possible(what: str, session: Session, hosted: HostedTarget, make: Callable[[Target], _T]) -> _T | None:
    """What `make` captures for `session`, or None. Counts the capture, its time and the memory that it takes."""
    start, before, captured = time.perf_counter(), tensor_bytes(hosted.model.device), None
    target = hosted()
    if target.patches not in session.patches:
        session.patches.append(target.patches)
    try:
        with capturable_experts(target.model, hosted.drafter):
            behaviour = Signature(target.model, hosted.drafter).behaviour
            captured = make(target)
            if Signature(target.model, hosted.drafter).behaviour != behaviour:
                captured = None
                raise RuntimeError("its forward pass changes attributes of modules, which a replay would not do")
        hosted.num_captures += 1
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        name = type(target.model).__name__
        logger.warning(f"{what} of {name} cannot be captured and runs eagerly: {first_line(error)}")
    session.num_tensor_bytes += max(tensor_bytes(hosted.model.device) - before, 0)
    session.capture_seconds += time.perf_counter() - start
    return captured
