"""A drafter in trainers that generate, such as TRL's. Nothing of TRL is imported."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

from .drafters.attachment import Attachment
from .drafters.base import Drafter
from .training.learner import DrafterLearner


class DrafterCallback(TrainerCallback):
    """Attaches a drafter to a trainer's model during `train()`, see `Drafter.attach`.

    The trainer's logs get figures of the calls since the last log: `speculation/acceptance_length`,
    `.../tokens_per_second`, `.../captures` (CUDA graphs) and `.../refusals` (calls that ran plainly). Callbacks that
    report logs elsewhere see them if they come after this one.

    Args:
        drafter: a drafter that is bound to the model.
        learning: whether the drafter learns from each step: True, or arguments of `DrafterLearner`. The logs then also
            have `speculation/draft_loss` and `.../draft_acceptance` of the first draft token.
        options: arguments of `attach`.

    Attributes:
        attachment: the attachment of the current or last training; None before.
        learner: the learner of the current or last training; None without learning.
    """

    def __init__(self, drafter: Drafter, learning: bool | Mapping[str, Any] = False, **options: Any):
        self._drafter, self._learning, self._options = drafter, learning, options
        self.attachment: Attachment | None = None
        self.learner: DrafterLearner | None = None

    def on_train_begin(self, args, state, control, **kwargs: Any) -> None:
        self._leave()  # a training that an error has ended
        self.attachment = self._drafter.attach(kwargs["model"], **self._options)
        self._logged = copy.copy(self.attachment.stats), 0
        if self._learning:
            settings = {} if self._learning is True else self._learning
            try:
                self.learner = DrafterLearner(self._drafter, kwargs["model"], **settings).__enter__()
            except BaseException:
                self.attachment.detach()
                raise

    def on_step_end(self, args, state, control, **kwargs: Any) -> None:
        self.attachment.note_step()
        if self.learner is not None:
            self.learner.step()

    def on_log(self, args, state, control, logs: dict, **kwargs: Any) -> None:
        if self.attachment is None:  # an evaluation without training
            return
        stats, refused = self.attachment.stats, self.attachment.refusals.total()
        before, refused_before = self._logged
        if (stats.calls, refused) == (before.calls, refused_before):
            return
        self._logged = copy.copy(stats), refused
        rounds, committed = stats.rounds - before.rounds, stats.committed - before.committed
        seconds = stats.seconds - before.seconds
        found = {
            "acceptance_length": committed / rounds if rounds else 0.0,
            "tokens_per_second": committed / seconds if seconds else 0.0,
            "captures": stats.captures - before.captures,
            "refusals": refused - refused_before,
        }
        learned = self.learner.metrics() if self.learner is not None else {}
        if learned:
            found |= {"draft_loss": learned["loss"][0], "draft_acceptance": learned["acceptance"][0]}
        for one in (logs, *state.log_history[-1:]):
            one.update({f"speculation/{name}": value for name, value in found.items()})

    def on_train_end(self, args, state, control, **kwargs: Any) -> None:
        self._leave()

    def _leave(self) -> None:
        if self.learner is not None:
            self.learner.__exit__()
        if self.attachment is not None:
            self.attachment.detach()
