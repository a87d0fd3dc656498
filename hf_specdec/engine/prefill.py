"""Prefill: target and drafter process the prompts, except for their last tokens.

Prompts of several rows are packed in one, without padding, where target and drafter store keys and values only;
elsewhere each is in a row of its own, padded. `prefill_chunk` is what is run eagerly and captured; nothing in it reads
the device on the host.
"""

from __future__ import annotations

import torch

from ..drafters.base import Drafter
from ..state import DecodeState
from .first_pass import FirstPass
from .packed_prompts import PackedPrompts
from .target import Target


def start_prefill(state: DecodeState, drafter: Drafter) -> None:
    """Begin the prefill of the prompts that `state` holds in all rows: `prefill_chunk` comes next."""
    state.cache.restart()
    drafter.start_prefill(state)
    state.block_width = 1
    reset_rows(state, slice(None))
    state.num_prefilled.zero_()


def reset_rows(state: DecodeState, rows: torch.Tensor | slice) -> None:
    """Let `rows` be as if a round had just committed the last token of each prompt, without its hidden state."""
    state.result.tokens[rows] = 0
    state.result.accepted[rows] = 0
    state.result.committed[rows] = 1
    if state.aux_hidden_states is not None:
        state.aux_hidden_states[rows] = 0


def prefill_chunk(
    state: DecodeState,
    target: Target | FirstPass,
    drafter: Drafter,
    columns: int,
    packed: PackedPrompts | None = None,
) -> None:
    """Prefill target and drafter with the next positions of the prompts, except for the prompts' last tokens.

    After the last chunk the state is as if a round had just committed the last token of each prompt: that token has not
    passed through the target, and the drafter has not seen it. Prefilling again changes nothing.

    Args:
        state: holds the prompts. Positions below `state.cached` are in the target's cache already and are left out.
        target, drafter: to run.
        columns: positions to run: of all rows together if packed, else of each row, where those beyond its prompt are
            padding.
        packed: the positions to prefill, packed in one row; None if each row has its own. If packed, `finish_packed`
            comes after the last chunk.
    """
    device = state.tokens.device
    steps = state.num_prefilled + torch.arange(columns, device=device)
    if packed is not None:
        view, last = packed.state, packed.last - state.num_prefilled
        slots = packed.slots[steps.clamp(max=len(packed.slots) - 1)][None]
        rows = torch.zeros_like(last)
    else:
        prompt_end = state.lengths - 1
        view, last = state, prompt_end - 1 - (state.cached + state.num_prefilled)
        positions = state.cached[:, None] + steps
        slots = torch.where(positions < prompt_end[:, None], positions, state.dummy_slot)
        rows = torch.arange(len(last), device=device)
    _, aux_hidden_states = target(view, view.tokens.gather(1, slots), slots, needs_logits=False)
    drafter.prefill(view, aux_hidden_states, slots)
    if aux_hidden_states is not None:
        here = aux_hidden_states[rows, last.clamp(0, columns - 1)]
        is_here = ((last >= 0) & (last < columns))[:, None]
        if state.aux_hidden_states is None:
            state.aux_hidden_states = here.new_zeros(len(here), state.most_draft_tokens + 1, here.shape[-1])
        if packed is not None and packed.hidden_states is None:
            packed.hidden_states = torch.zeros_like(here)
        kept = state.aux_hidden_states[:, 0] if packed is None else packed.hidden_states
        kept.copy_(torch.where(is_here, here, kept))
    state.num_prefilled += columns


def finish_packed(state: DecodeState, packed: PackedPrompts, rows: torch.Tensor | slice) -> None:
    """After the last chunk of packed prompts: let `rows` be as after `prefill_chunk` of prompts that are not packed.

    Rounds of other rows may have run between the chunks, which overwrite what they leave of these.
    """
    reset_rows(state, rows)
    if packed.hidden_states is not None:
        state.aux_hidden_states[rows, 0] = packed.hidden_states[rows]


def prefill_drafter(state: DecodeState, drafter: Drafter, width: int, chunk_size: int) -> None:
    """Prefill a drafter that reads tokens only with the positions below `width` that the target has in its cache."""
    for chunk in torch.arange(width, device=state.tokens.device).split(chunk_size):
        drafter.prefill(state, None, torch.where(chunk < state.cached[:, None], chunk, state.dummy_slot))
