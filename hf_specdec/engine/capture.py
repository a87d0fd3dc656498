"""Rounds and prefills as CUDA graphs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules import module as all_modules
from transformers import PreTrainedModel
from transformers.utils import output_capturing

from ..device_policy import policy_of
from ..drafters.base import Drafter
from ..errors import first_line
from ..kernels.types import VerificationResult
from ..parallel.tensor_parallel import tensor_parallel_group
from ..patching.experts import capturable_experts, copies_experts
from ..patching.hidden_states import modules_of
from ..sampling.processors import BlockProcessor
from ..state import DecodeState
from .cuda_graphs import Capture
from .fingerprint import behaviour_of
from .rounds import prefill, run_round, target_forward, verify_and_draft
from .sessions import Session
from .target import Target


def has_hooks(modules: list[nn.Module]) -> bool:
    """Whether somebody listens to `modules`, or to all that there are, who would hear nothing of a replay.

    transformers' own hooks, which stay once a call has asked for hidden states, sleep until the next that does.
    """
    return bool(all_modules._global_forward_hooks or all_modules._global_forward_pre_hooks) or any(
        getattr(hook, "__module__", None) != output_capturing.__name__
        for module in modules
        if module._forward_hooks or module._forward_pre_hooks
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    )


logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class CapturedRound:
    """`step`, captured: in one piece if the logits are processed without looking at the text, otherwise in two.

    Args:
        capture: makes graphs.
        state, target, drafter, process: of `step`.

    Attributes:
        execution: how rounds are run, in words.
    """

    def __init__(
        self,
        capture: Capture,
        state: DecodeState,
        target: Target,
        drafter: Drafter,
        process: BlockProcessor,
    ):
        self._state = state
        # What a graph returns stays in memory: nobody reads the scores and logits of a round in one piece. It is plain:
        # torch 2.11 cannot compile functions that return named tuples of their own making.
        with state.idle():
            if process.key is not None:
                self._whole = capture(lambda: tuple(run_round(state, target, drafter, process)[0]))
            else:
                self._whole = None
                self._read = capture(lambda: target_forward(state, target))
                _, logits, aux_hidden_states = self._read.result
                self._scores = torch.zeros_like(logits, dtype=torch.float32)
                self._settle = capture(lambda: tuple(verify_and_draft(state, drafter, self._scores, aux_hidden_states)))
        graphs = "one graph" if self._whole is not None else "two graphs, processors between"
        self.execution = f"captured in {graphs}, {'compiled' if capture.has_compiled else 'not compiled'}"

    def __call__(self, process: BlockProcessor) -> tuple[VerificationResult, None, None]:
        if self._whole is not None:
            return VerificationResult(*self._whole()), None, None
        block, logits, _ = self._read()
        self._scores.copy_(process(logits, block, self._state))
        return VerificationResult(*self._settle()), None, None


def why_not_captured(model: PreTrainedModel, modules: list[nn.Module], wants: dict[str, bool]) -> str | None:
    """The reason why rounds are not captured, so that their buffers need not be kept either; None if they are.

    A warning for what the caller may not know of.

    Args:
        model: the target.
        modules: its own and the drafter's.
        wants: by the names of what a round gives, whether it is kept for the caller.
    """
    if not policy_of(model.device).cuda_graphs:
        return f"nothing is captured on a device of type {model.device.type}"
    wanted = [name for name, is_wanted in wants.items() if is_wanted]
    if wanted:
        return f"{', '.join(wanted)} of every round are kept for the caller"
    if has_hooks(modules):
        reason = "modules have hooks, which would hear nothing of a replay"
        _warn_once(f"Rounds of {type(model).__name__} run eagerly: {reason}. Remove the hooks to have rounds captured.")
        return reason
    return None


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def capture_round(session: Session, target: Target, drafter: Drafter, process: BlockProcessor) -> CapturedRound | None:
    """`step`, captured; None, and a warning, if it does something that cannot be."""
    is_shared = tensor_parallel_group(target.model) is not None
    capture = Capture(target.model.device, session.graph_pool, drafter.compile_rounds, same_everywhere=is_shared)
    return _if_possible(
        "A round", target, drafter, lambda: CapturedRound(capture, session.state, target, drafter, process)
    )


def capture_prefill(session: Session, target: Target, drafter: Drafter, width: int) -> Callable[[], None] | None:
    """`prefill` of `width` columns, captured and not compiled, which would take as long for each width as for a round.

    None, and a warning, if it does something that cannot be captured; None also for mixtures of experts that would
    copy weights for every token. Afterwards the session is to be prefilled again: an attempt may stop half way.
    """
    if copies_experts(target.model, drafter):
        return None
    capture = Capture(target.model.device, session.graph_pool, is_compiled=False)
    return _if_possible(
        "The prefill",
        target,
        drafter,
        lambda: capture(lambda: prefill(session.state, target, drafter, width, chunk_size=width)),
    )


def _if_possible(what: str, target: Target, drafter: Drafter, capture: Callable[[], _T]) -> _T | None:
    modules = modules_of(target.model, drafter)
    try:
        with capturable_experts(target.model, drafter):
            before = behaviour_of(modules)
            captured = capture()
            if behaviour_of(modules) != before:
                raise RuntimeError("its forward pass changes attributes of modules, which a replay would not do")
            return captured
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        name = type(target.model).__name__
        logger.warning(f"{what} of {name} cannot be captured and runs eagerly: {first_line(error)}")
        return None
