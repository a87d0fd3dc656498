"""`drafter.attach(model)`: the drafter of a model's calls that name none.

The patched methods of transformers ask for `attachment_of(model)`. The attachment is no attribute of the model, because
copies, pickles and fingerprints would include it.
"""

from __future__ import annotations

import functools
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from transformers import PreTrainedModel

from ..config import check_type
from ..memory.virtual_memory import total_bytes
from ..modules.evaluation import Evaluation
from ..modules.locks import lock_of
from ..modules.signature import note_step
from ..stats import SpeculationStats, TotalStats
from .target_checks import generating_model

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

MODES = ("eval", "keep")

_attachments: WeakKeyDictionary[PreTrainedModel, Attachment] = WeakKeyDictionary()
# The attachments that calls of this thread ignore.
_paused: ContextVar[frozenset[Attachment]] = ContextVar("paused", default=frozenset())


class Attachment:
    """The drafter of one model's calls, returned by `Drafter.attach`.

    Attributes:
        stats: sums over the calls that used the drafter, on any thread.
        refusals: number of calls that ran plainly, by reason; numbers in a reason are replaced by `N`.
    """

    def __init__(
        self, drafter: Any, model: nn.Module, strict: bool, mode: str, memory: float, release_after_call: bool
    ):
        if mode not in MODES:
            raise ValueError(f'mode is {mode!r}; expected "eval" or "keep".')
        check_type("memory", memory, float)
        check_type("strict", strict, bool)
        check_type("release_after_call", release_after_call, bool)
        if not 0 <= memory <= 1:
            raise ValueError(f"memory is {memory!r}; expected a share of the device's memory, from 0 to 1.")
        target = innermost(model)
        drafter.check_bound_to(target)
        if drafter.device != target.device and target.device.type != "meta":  # there its weights are lost
            drafter.to(target.device)
            drafter.bind(target)
        self.drafter, self._model = drafter, ref(target)
        self._is_strict, self._mode = strict, mode
        self._memory, self._releases = memory, release_after_call
        self.stats, self.refusals = TotalStats(), Counter()
        if target in _attachments:
            logger.warning("hf_specdec: %s had a drafter attached, which is replaced.", type(target).__name__)
        _attachments[target] = self

    def detach(self) -> None:
        """Let calls of the model run plainly, and free the drafter's buffers and CUDA graphs."""
        model = self._model()
        if model is not None and _attachments.get(model) is self:
            del _attachments[model]
        self.drafter.release()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which calls of this thread run plainly."""
        token = _paused.set(_paused.get() | {self})
        try:
            yield
        finally:
            _paused.reset(token)

    def note_step(self) -> None:
        """Report a write to weights that torch does not count, so that nothing computed before is reused.

        Steps of torch's optimizers are noticed without it.
        """
        note_step()

    def evaluation(self) -> Evaluation:
        """Context of a call: the drafter, and with `mode="eval"` the model, are in evaluation mode."""
        return Evaluation(self.drafter, *([self._model()] if self._mode == "eval" else []))

    def run(self, with_drafter: Callable[[Callable[[], object]], _T], plainly: Callable[[], _T]) -> _T:
        """Run a call `with_drafter`, which calls its argument once the call is accepted. If it raises `ValueError`
        before, run the call `plainly`, or raise the error with `strict=True`; a later error is always raised."""
        model, start, begun = self._model(), time.perf_counter(), []
        try:
            with lock_of(model), self.evaluation():
                result = with_drafter(functools.partial(begun.append, True))
                if begun:
                    self.note(self.drafter.stats, time.perf_counter() - start)
                return result
        except ValueError as error:
            if begun:
                raise
            self.refuse(error)
        with self.paused():
            return plainly()

    def refuse(self, error: ValueError) -> None:
        """Count a call that runs plainly because of `error`; with `strict=True` raise `error`."""
        if self._is_strict:
            raise error
        reason = re.sub(r"\d+", "N", str(error))
        if reason not in self.refusals:
            logger.warning("hf_specdec: a call of a model with a drafter attached runs without it: %s", error)
        self.refusals[reason] += 1

    def note(self, stats: SpeculationStats, seconds: float) -> None:
        """Add a call that ran with the drafter to `stats`, and free buffers beyond the attachment's share of memory."""
        self.stats.add(stats, seconds)
        if self._releases:
            self.drafter.release()
            if self.drafter.device.type == "cuda":
                torch.cuda.empty_cache()
        elif self.drafter.sessions is not None:
            self.drafter.sessions.shrink(int(self._memory * total_bytes(self.drafter.device)))


def attachment_of(model: PreTrainedModel) -> Attachment | None:
    """The attachment for a call of `model` that names no drafter; None for a plain call.

    Calls inside a call with a drafter are plain: those of the engine, and of the caller's processors and streamers.
    """
    found = _attachments.get(model)
    return None if found is None or found in _paused.get() or lock_of(model).is_mine else found


def innermost(model: nn.Module) -> PreTrainedModel:
    """The model that generates inside of `model`, a wrapper such as PEFT's or `DistributedDataParallel`; raises
    `ValueError` if there is none."""
    parts = model.modules() if isinstance(model, nn.Module) else ()
    found = next((one for one in parts if isinstance(one, PreTrainedModel)), None)
    if found is None:
        raise ValueError(f"{type(model).__name__} has no transformers model inside; expected one that generates.")
    return generating_model(found)
