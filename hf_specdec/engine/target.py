"""The target, patched to run on the engine's KV cache."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from ..cache.hidden_states import HiddenStates
from ..cache.layer_kinds import PositionMarker, patches_of, plug_ins
from ..drafters.base import Drafter
from ..host.generation import keeps_logits
from ..kernels.types import Nodes
from ..modules.hidden_states import AuxHiddenStateRecorder
from ..modules.patch import Patch, engine, replaced, this_thread
from ..op_choice import without_dispatch_modes
from ..parallel.all_reduce import symmetric_memory_all_reduce
from ..parallel.tensor_parallel import local_linears
from ..patching.attention import ragged_attention
from ..patching.experts import triton_experts
from ..patching.fused_linear import fused_linears
from ..patching.layer_kernels import layer_kernels
from ..patching.linear import patched_linear
from ..patching.low_rank import low_rank_updates
from ..patching.rotary_functions import rotary_functions
from ..patching.row_adapters import RowAdapters
from ..patching.support import cache_name, position_markers
from ..state import DecodeState


@dataclass
class Target:
    """The target as a function of tokens and slots, which returns logits and auxiliary hidden states.

    Attributes:
        recorder: records the auxiliary hidden states that the drafter reads.
        rollouts_recorder: records the hidden states that a drafter learns from; None if the call keeps none.
        hidden_states: keeps all hidden states if the caller asked for them.
        position_markers: functions that position ids pass through before the model gets them.
        patches: the patches of target and drafter, in the order in which they are entered.
        adapters: the LoRA adapters of the tokens of a pass; None if rows have no adapters of their own.
        cache_name: see `patching.support.cache_name`; looked up beforehand, since a round may be compiled.
    """

    model: PreTrainedModel
    recorder: AuxHiddenStateRecorder
    rollouts_recorder: AuxHiddenStateRecorder | None = None
    hidden_states: HiddenStates | None = None
    position_markers: Sequence[PositionMarker] = ()
    patches: Sequence[Patch] = ()
    adapters: RowAdapters | None = field(init=False)
    cache_name: str = field(init=False)

    def __post_init__(self) -> None:
        self.cache_name = cache_name(self.model)
        self.adapters = next((one.rows for one in self.patches if isinstance(one, low_rank_updates)), None)

    def __call__(
        self,
        state: DecodeState,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        logits_to_keep: torch.Tensor | int = 0,
        nodes: Nodes | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run `[B, n]` tokens at `[B, n]` slots; `nodes` are given for the block of a tree.

        Returns:
            logits and the parts of auxiliary hidden states, see `AuxHiddenStateRecorder.parts`. Logits are `[B, n, V]`;
            with `logits_to_keep` `[m]` int64 they are `[B, m, V]` of these columns; with 1 they are `[B, 1, V]` of the
            last column (some models return more columns, of which the last one is that of the last token).
        """
        columns, is_recorded = None, self.recorder.records or self.rollouts_recorder is not None
        # A `forward` that only passes on its arguments does not tell whether it keeps the logits of some columns.
        if isinstance(logits_to_keep, torch.Tensor) and not keeps_logits(self.model):
            logits_to_keep, columns = 0, logits_to_keep
        elif isinstance(logits_to_keep, int) and logits_to_keep == 1 and is_recorded:
            # Given the number 1, models whose last layers store no keys would run these over the last token only.
            logits_to_keep = torch.full((1,), slots.shape[1] - 1, device=slots.device)
        state.cache.advance(slots, state.live, state.num_before)
        state.cache.nodes = nodes
        position_ids = state.position_ids(slots if nodes is None else nodes.positions)
        for mark in self.position_markers:
            position_ids = mark(position_ids, state.prompt_lengths, state.prompt_length_gap)
        if self.adapters is not None:
            self.adapters.bits, self.adapters.is_by_row = state.adapters_at(slots), state.row_slots == state.slots
        out = self.model(
            input_ids=tokens,
            attention_mask=state.cache.attention_mask(slots),
            position_ids=position_ids,
            use_cache=True,
            logits_to_keep=logits_to_keep,
            output_hidden_states=self.hidden_states is not None,
            return_dict=True,
            **{self.cache_name: state.cache},
        )
        if self.adapters is not None:
            self.adapters.bits, self.adapters.is_by_row = None, True
        if self.hidden_states is not None:
            self.hidden_states.store(out.hidden_states, slots, state.slots)
        if state.cache.hidden_states is not None:
            recorded, num_packed = self.rollouts_recorder.aux_hidden_states, state.slots // state.row_slots
            state.cache.hidden_states.store([recorded], slots, state.row_slots, num_packed)
        logits = out.logits if columns is None else out.logits[:, columns]
        return logits, self.recorder.parts()


def _look_up(model: PreTrainedModel, drafter: Drafter) -> Iterator[Patch]:
    """The patches of a call, one by one: each must be entered before the next is looked up, which depends on it."""
    yield ragged_attention(model)
    yield from patches_of(plug_ins(), model, drafter)
    yield triton_experts(model, drafter)
    yield local_linears(model)
    yield symmetric_memory_all_reduce(model)
    yield fused_linears(model, drafter)
    yield low_rank_updates(model)
    yield patched_linear(model, drafter)  # those that are not fused
    yield layer_kernels(model, drafter)
    yield rotary_functions(model, drafter)


def _refuse_copies(model: nn.Module, protocol: int) -> tuple:
    """`__reduce_ex__` of a patched `model`: a copy would stay patched, and run modules of `model`."""
    raise RuntimeError(
        f"{type(model).__name__} was to be copied or pickled during a call with a drafter, which changes how modules "
        "compute; expected that before or after the call. A manager has pause() for it."
    )


@contextmanager
def patched_target(
    model: PreTrainedModel, drafter: Drafter, keep_hidden_states: bool, known: Sequence[Patch] = ()
) -> Iterator[Target]:
    """Context in which `model` runs on a `RaggedCache` with the engine's kernels; on exit it is restored.

    `known` are the `Target.patches` of an earlier context of the same `Hosting`; if empty, patches are looked up.
    """
    with ExitStack() as stack:
        if this_thread.engine is None:
            stack.enter_context(engine())
        refusals = [(one, functools.partial(_refuse_copies, one)) for one in (model, drafter)]
        stack.enter_context(replaced("__reduce_ex__", refusals))
        patches = []
        with without_dispatch_modes():  # looking up patches runs modules on a few values
            for patch in known or _look_up(model, drafter):
                if not patch.is_empty:
                    stack.enter_context(copy.copy(patch))
                    patches.append(patch)
        recorder = stack.enter_context(
            AuxHiddenStateRecorder(model, drafter.aux_hidden_state_layer_ids, drafter.reads_last_hidden_state)
        )
        hidden_states = HiddenStates() if keep_hidden_states else None
        rollouts, rollouts_recorder = drafter.rollouts, None
        if rollouts is not None:
            rollouts_recorder = stack.enter_context(AuxHiddenStateRecorder(model, rollouts.layer_ids, True))
        yield Target(model, recorder, rollouts_recorder, hidden_states, position_markers(model), patches)
