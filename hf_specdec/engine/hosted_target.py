"""The target of a call, patched at its first use."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain

from transformers import PreTrainedModel

from ..auto_k.round_costs import CostTable, find_table
from ..cache.hidden_states import HiddenStates
from ..device_policy import policy_of
from ..drafters.base import Drafter
from ..modules.module_hooks import has_hooks
from ..modules.patch import engine, is_anything_replaced
from ..modules.signature import Fingerprint, signature_of
from ..parallel.tensor_parallel import find_differences, tensor_parallel_group
from ..patching.batch_invariance import batch_invariant
from .sessions import Hosting, sessions_of
from .target import Target, patched_target

logger = logging.getLogger(__name__)


class HostedTarget(ExitStack):
    """The target of a call, patched at its first use: a call that only replays graphs does not touch its modules.

    A context manager; on exit the target is restored. `kept` and `runs_once` are those of `Call`.

    Attributes:
        is_split: whether other processes run it, too, which must run the same rounds.
        pool: the sessions of the drafter.
        has_hooks: whether modules of target or drafter have forward hooks of the caller.
        eager_reason: why rounds are not captured; None if they are.
        is_captured: whether rounds are captured; if so, sessions are kept for other calls.
        keeps_hidden_states: whether the caller gets all hidden states.
        num_captures: number of graphs that the call has captured.
    """

    def __init__(self, model: PreTrainedModel, drafter: Drafter, kept: Sequence[str] = (), runs_once: bool = False):
        super().__init__()
        self.model, self.drafter = model, drafter
        self.is_split, self.pool = tensor_parallel_group(model) is not None, sessions_of(drafter)
        self._device = model.device
        self._signatures = signature_of(model), signature_of(drafter)
        self.has_hooks = has_hooks(chain.from_iterable(one.hooked for one in self._signatures))
        self.eager_reason = self._why_not_captured(kept, runs_once)
        self.is_captured = self.eager_reason is None
        self.keeps_hidden_states = "hidden_states" in kept
        self.adapters = self._signatures[0].adapters
        self.num_captures = 0
        self._patches = ExitStack()
        self._patched: Target | None = None
        self._hosting: Hosting | None = None

    def __enter__(self) -> HostedTarget:
        if self.drafter.batch_invariant:
            # The first tokens of a row are computed outside of the target's passes, also where passes are replayed.
            self.enter_context(engine())
            self.enter_context(batch_invariant())
        self.callback(self._patches.close)
        return self

    def unpatch(self) -> None:
        """Restore the target until it is used again."""
        self._patched = None
        self._patches.close()

    def __call__(self) -> Target:
        """The patched target. Its patches are those that an earlier call has found, or else are looked up now."""
        if self._patched is not None:
            return self._patched
        before = None if self.has_hooks else self.hosting  # hooks are not in a fingerprint
        # A fingerprint does not tell what other calls have replaced of a shared configuration.
        is_told = before is not None and not is_anything_replaced()
        known = before.patches if is_told else ()
        patched = patched_target(self.model, self.drafter, self.keeps_hidden_states, known)
        self._patched = self._patches.enter_context(patched)
        if before is not None and not known:  # looking it up may move weights
            weights = tuple(one.weights for one in self._signatures)
            self._hosting = self._hosting_of(before.fingerprint._replace(weights=weights))
            if is_told:
                self._hosting.patches = self._patched.patches
        return self._patched

    @property
    def hosting(self) -> Hosting:
        """The `Hosting` of target and drafter as they are unpatched, with the weights where they are now."""
        if self._hosting is None:
            by_row = self._signatures[0] if self.adapters.why_not_by_row is None else None
            fingerprint = Fingerprint.of(self._device, *self._signatures, by_row=by_row)
            self._hosting = self._hosting_of(fingerprint)
        return self._hosting

    def _hosting_of(self, fingerprint: Fingerprint) -> Hosting:
        """The `Hosting` of `fingerprint`. Processes of one model that do not keep the same for it begin anew together:
        a capture runs the model, which a process that has the graph would not take part in."""
        if self.is_split and find_differences(self.model, {"sessions": self.pool.contents(fingerprint)}):
            self.pool.forget(fingerprint)
        return self.pool.hosting(fingerprint)

    def costs(self, substitute: Drafter | None = None) -> CostTable:
        """The costs of rounds of target and drafter, or of the `substitute` in its place."""
        tables, is_alone = self.hosting.costs, substitute is not None
        if is_alone not in tables:
            tables[is_alone] = find_table(self.model, substitute or self.drafter, self.is_captured)
        return tables[is_alone]

    @property
    def reads_hidden_states(self) -> bool:
        """Whether the drafter reads hidden states of the target."""
        return bool(self.drafter.aux_hidden_state_layer_ids) or self.drafter.reads_last_hidden_state

    @property
    def hidden_states(self) -> HiddenStates | None:
        """All hidden states, if the caller asked for them and the target is patched; else None."""
        return None if self._patched is None else self._patched.hidden_states

    def _why_not_captured(self, kept: Sequence[str], runs_once: bool) -> str | None:
        """The reason why the rounds of the call run eagerly; None if they are captured."""
        if not policy_of(self._device).cuda_graphs:
            return f"there are no CUDA graphs on a device of type {self._device.type}"
        if "hidden_states" in kept:
            return "the hidden states of every round are kept for the caller"
        if runs_once:
            return "no other call is like this one"
        if self.has_hooks:
            reason = "modules have hooks, which a replayed CUDA graph does not call"
            name = type(self.model).__name__
            logger.warning_once(f"Rounds of {name} run eagerly: {reason}. Remove the hooks to have rounds captured.")
            return reason
        return None
