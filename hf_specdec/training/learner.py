"""A drafter that learns while its target is trained, from passes that the target runs anyway."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..config import check_int, check_positive
from ..drafters.attachment import innermost
from ..drafters.base import Drafter
from ..drafters.cached import CachedDrafter
from ..drafters.dflash import DFlashDrafter
from ..drafters.walking import WalkingDrafter
from ..modules.hidden_states import LAST_HIDDEN_STATE, AuxHiddenStateRecorder, decoder_of
from ..modules.stored_linear import StoredLinear
from .objective import Batch, BlockObjective, DraftObjective, Teacher, summarize
from .rollouts import Rollouts

SOURCES = TRAINER, ROLLOUTS = "trainer", "rollouts"


class _Pass(NamedTuple):
    """Texts of a pass of the target, padded only at the end: ids `[B, S]` int64, lengths `[B, 1]` int64, hidden states
    `[B, S, H]` after the final norm, and auxiliary hidden states `[B, S, width]` or None."""

    input_ids: torch.Tensor
    lengths: torch.Tensor
    prompt_lengths: torch.Tensor
    hidden: torch.Tensor
    aux_hidden_states: torch.Tensor | None


class DrafterLearner(AbstractContextManager["DrafterLearner"]):
    """Context in which a drafter learns from passes of its target: the trainer's, or those that generate rollouts.

    The hidden states and the target's distributions come from these passes, so the target runs no other pass. The
    trainer's passes are those with gradients in training mode. The drafter learns at the tokens that `logits_to_keep`
    or `labels` other than -100 ask for, else at all tokens. Rollouts are all texts that calls on the static engine
    generate with the drafter; it learns at their new tokens.

    `step` trains a float32 copy of the drafter and publishes it by `Drafter.load_weights`, so nothing is captured
    again. The target's training does not change, its random numbers included. With several processes gradients are
    averaged, so all of them must call `step` equally often.

    Args:
        drafter: bound to the target; of a family that is trained by `unroll` or `unroll_blocks`, such as EAGLE-3,
            P-EAGLE, MTP modules, DFlash, DSpark.
        model: the target, or its wrapper of PEFT, `DistributedDataParallel` or accelerate.
        learning_rate: of AdamW.
        num_steps: drafts of a chain; the drafter's own K by default.
        step_decay: draft s has the weight `step_decay ** s`.
        temperature: the sampling temperature of the distributions that the drafter learns.
        max_tokens: most tokens that are kept between two steps, with their hidden states: the first tokens of a
            trainer's passes, the last ones of rollouts.
        source: `"trainer"` or `"rollouts"`. Rollouts need no pass of a trainer; buffers of calls then have hidden
            states at all slots, and are captured again.

    Attributes:
        skipped: number of passes that were not learned from: of embeddings, of several texts packed in a row, or in a
            step whose gradients are not finite, which does not change the drafter; and of rollouts that were dropped.

    Raises:
        ValueError: the drafter is not bound to the target, its family cannot learn, or a setting is wrong.
    """

    def __init__(
        self,
        drafter: Drafter,
        model: nn.Module,
        learning_rate: float = 1e-4,
        num_steps: int | None = None,
        step_decay: float = 0.8,
        temperature: float = 1.0,
        max_tokens: int = 8192,
        source: str = TRAINER,
    ):
        if source not in SOURCES:
            raise ValueError(f'source is {source!r}; expected "trainer" or "rollouts".')
        check_positive(learning_rate=learning_rate, step_decay=step_decay, temperature=temperature)
        check_int("max_tokens", max_tokens, 1)
        check_int("num_steps", 1 if num_steps is None else num_steps, 1)
        self.drafter, self._target = drafter, innermost(model)
        with self._random_numbers():
            self._student = _copy_in_float32(drafter, self._target)
        self._teacher = Teacher(self._target, self._student, temperature=temperature)
        kind = BlockObjective if isinstance(self._student, DFlashDrafter) else DraftObjective
        self._objective = kind(self._student, num_steps or drafter.num_own_draft_tokens, step_decay)
        self._optimizer = torch.optim.AdamW(self._student.parameters(), lr=learning_rate, betas=(0.9, 0.95))
        self._max_tokens, self._source, self.skipped = max_tokens, source, 0
        self._passes: list[_Pass] = []
        self._rollouts: Rollouts | None = None
        self._counts: torch.Tensor | int = 0
        self._handles: list[Any] = []
        # Of the running pass: recorder, tokens, mask, and the first column of each answer.
        self._running: tuple[AuxHiddenStateRecorder, torch.Tensor, torch.Tensor | None, Any] | None = None
        self._asked: Mapping[str, Any] = {}

    def __enter__(self) -> DrafterLearner:
        if self._handles or (self._source == ROLLOUTS and self.drafter.rollouts is not None):
            raise ValueError(
                f"{self.drafter.title} learns from {self._source} already; expected one DrafterLearner at a time, "
                "entered once."
            )
        if self._source == ROLLOUTS:
            self._rollouts = self.drafter.rollouts = Rollouts(
                self._student.aux_hidden_state_layer_ids, self._max_tokens
            )
            return self
        decoder = decoder_of(self._target)
        self._handles = [
            self._target.register_forward_pre_hook(self._note_question, with_kwargs=True),
            decoder.register_forward_pre_hook(self._begin_pass, with_kwargs=True),
            decoder.register_forward_hook(self._end_pass, always_call=True),
        ]
        return self

    def __exit__(self, *exception: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._passes = [], []
        if self._rollouts is not None:
            self._rollouts = self.drafter.rollouts = None

    # Engines ignore hooks of this folder (`modules.module_hooks`), which do nothing in the engines' passes.

    def _note_question(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._asked = kwargs if torch.is_grad_enabled() and module.training else {}

    def _begin_pass(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not (torch.is_grad_enabled() and module.training):
            return
        asked, self._asked = self._asked, {}
        input_ids = kwargs.get("input_ids", args[0] if args else None)
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        is_known = input_ids is not None and (mask is None or mask.shape == input_ids.shape)
        if not is_known or (positions is not None and _are_packed(positions, mask)):
            self.skipped += 1
            return
        left = (self._max_tokens - sum(one.input_ids.numel() for one in self._passes)) // input_ids.shape[1]
        if left > 0:
            recorder = AuxHiddenStateRecorder(self._target, self._student.aux_hidden_state_layer_ids)
            first = _first_places(asked, input_ids)
            rows = [None if one is None else one[:left] for one in (input_ids, mask, first)]
            self._running = (recorder.__enter__(), *rows)

    def _end_pass(self, module: nn.Module, args: tuple, output: Any) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        recorder, input_ids, mask, first = running
        with recorder, torch.no_grad():
            if output is None:  # the pass failed
                return
            hidden = output[0] if isinstance(output, (tuple, torch.Tensor)) else output.last_hidden_state
            if self._student.reads_last_hidden_state:
                recorder.recorded[LAST_HIDDEN_STATE] = hidden
            aux = recorder.aux_hidden_states
            if mask is None:
                mask = torch.ones_like(input_ids)
            # Tokens move to the front of their rows, in order.
            order = mask.argsort(dim=1, descending=True, stable=True)
            columns = torch.arange(input_ids.shape[1], device=order.device)
            states = [
                None if one is None else one.detach()[: len(order)].take_along_dim(order[..., None], dim=1)
                for one in (hidden, aux)
            ]
            # Neither an answer's first token nor a text's is drafted, so a prompt has at least one token.
            prompt_lengths = (mask.bool() & (columns < first)).sum(dim=1, keepdim=True).clamp(min=1)
            lengths = mask.bool().sum(dim=1, keepdim=True)
            self._passes.append(_Pass(input_ids.gather(1, order), lengths, prompt_lengths, *states))

    def step(self) -> None:
        """Learn from the passes since the last step, and publish the weights to calls."""
        passes, self._passes = self._passes, []
        if self._rollouts is not None:
            passes = self._pass_of_rollouts(self._rollouts)
        self._student.sync_with(self._target)
        counts = []
        for one in passes:
            batch = Batch.of(one.input_ids, one.lengths, one.prompt_lengths)
            if len(batch.places):
                # The trainer's autocast may have computed them in another dtype.
                states = [None if state is None else state.to(self._target.dtype) for state in one[3:]]
                learned = self._teacher.outputs(batch, *states)
                device, dtype = self._target.device.type, self._target.dtype
                precision = nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype)
                with torch.enable_grad(), precision, self._random_numbers():
                    loss, counted = self._objective(learned)
                    (loss / len(passes)).backward()
                counts.append(counted)
        parameters = [one for one in self._student.parameters() if one.requires_grad]
        if dist.is_initialized() and dist.get_world_size() > 1:
            for one in parameters:
                one.grad = torch.zeros_like(one) if one.grad is None else one.grad
                dist.all_reduce(one.grad)
                one.grad /= dist.get_world_size()
        is_finite = nn.utils.clip_grad_norm_(parameters, 1.0).isfinite()
        if is_finite:
            self._optimizer.step()
            self._counts = sum(counts, self._counts)
        else:
            self.skipped += len(passes)
        self._optimizer.zero_grad(set_to_none=True)
        if is_finite:
            self.drafter.load_weights(dict(self._student.named_parameters()))

    def _pass_of_rollouts(self, rollouts: Rollouts) -> list[_Pass]:
        """The texts of `rollouts` as one pass over all of them; empty if there are none."""
        self.skipped, rollouts.dropped = self.skipped + rollouts.dropped, 0
        texts, pad = rollouts.take(), nn.utils.rnn.pad_sequence
        if not texts:
            return []
        input_ids = pad([one.tokens for one in texts], batch_first=True)
        counts = [[len(one.tokens), max(one.prompt_length, 1)] for one in texts]
        lengths, prompt_lengths = torch.tensor(counts, device=input_ids.device).split(1, dim=1)
        # A text's last token has no hidden states; none are read there.
        states = nn.functional.pad(pad([one.hidden_states for one in texts], batch_first=True), (0, 0, 0, 1))
        width = self._target.config.get_text_config().hidden_size
        hidden, aux = states[..., -width:], states
        if not self._student.reads_last_hidden_state:
            aux = states[..., :-width] if rollouts.layer_ids else None
        return [_Pass(input_ids, lengths, prompt_lengths, hidden, aux)]

    def metrics(self) -> dict[str, Any]:
        """`summarize` of the steps since the last call; empty if there was nothing to learn from."""
        counts, self._counts = self._counts, 0
        return summarize(counts) if isinstance(counts, torch.Tensor) else {}

    def _random_numbers(self) -> AbstractContextManager:
        """Context that does not change the trainer's random numbers."""
        device = self._target.device
        return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _copy_in_float32(drafter: Drafter, target: nn.Module) -> CachedDrafter:
    """A copy in training mode that shares the same weights with the target as `drafter`."""
    is_block = isinstance(drafter, DFlashDrafter)
    method, untrained = ("head_inputs", WalkingDrafter) if is_block else ("head_weight", CachedDrafter)
    if not isinstance(drafter, CachedDrafter) or getattr(type(drafter), method) is getattr(untrained, method):
        raise ValueError(
            f"{type(drafter).__name__} cannot learn: it does not implement {method}(); expected EAGLE-3, P-EAGLE, MTP "
            "modules, DFlash, DSpark, or a draft model."
        )
    drafter.check_bound_to(target)
    if any(isinstance(one, StoredLinear) for one in drafter.modules()):
        raise ValueError(
            f"{drafter.title} cannot learn: it has quantised layers; expected plain weights, as a drafter has that "
            "AutoDrafter.from_pretrained(..., dtype=target.dtype) loads, except draft models."
        )
    student = type(drafter)(copy.deepcopy(drafter.config)).to(drafter.device, torch.float32)
    student.load_state_dict(drafter.state_dict())
    student.bind(target)
    return student.train()


def _are_packed(positions: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether `positions` `[..., S]` fall within a row, from one text to the next; those of padding may be anything."""
    falls = positions.diff(dim=-1) < 0
    if mask is not None:
        falls = falls & mask[:, 1:].bool() & mask[:, :-1].bool()
    return bool(falls.any())


def _first_places(asked: Mapping[str, Any], input_ids: torch.Tensor) -> torch.Tensor:
    """`[B, 1]` int64: the first column of each row's answer, by `labels` or `logits_to_keep` of a pass; else 0."""
    first = torch.zeros(len(input_ids), 1, dtype=torch.int64, device=input_ids.device)
    labels, kept = asked.get("labels"), asked.get("logits_to_keep")
    if labels is not None:
        return (labels != -100).int().argmax(dim=1, keepdim=True)
    if isinstance(kept, int) and kept > 0:  # the logits at a token are about the next one
        first += max(input_ids.shape[1] - kept + 1, 0)
    return first
