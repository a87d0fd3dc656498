"""Prefill: target and drafter process the prompts, the drafter except for their last tokens.

Prompts of several rows are packed in one, without padding, where target and drafter store keys and values only;
elsewhere each is in a row of its own, padded in front. `prefill_chunk` is what is run eagerly and captured; nothing in
it reads the device on the host.
"""

from __future__ import annotations

import torch

from ..drafters.base import Drafter
from ..state import DecodeState
from .first_pass import FirstPass
from .packed_prompts import PromptBuffers
from .target import Target


def start_prefill(state: DecodeState, drafter: Drafter) -> None:
    """Begin the prefill of the prompts that `state` holds in all rows: `prefill_chunk` comes next."""
    state.cache.restart()
    drafter.start_prefill(state)
    state.block_width = 1


def prefill_chunk(
    state: DecodeState, target: Target | FirstPass, drafter: Drafter, columns: int, prompts: PromptBuffers
) -> None:
    """Prefill target and drafter with the next positions of the prompts, the drafter without the prompts' last tokens.

    `finish_prefill` comes after the last chunk. Prefilling again changes nothing.

    Args:
        state: holds the prompts. Positions below `state.cached` are in the target's cache already and are left out.
        columns: steps to run: tokens of all rows together if packed, else columns of each row, where those before its
            first position are padding.
    """
    packed = prompts.packed
    view, (slots, drafted) = _slots_of(state, prompts, columns)
    rows = torch.zeros_like(state.lengths)
    if packed is None:
        rows = torch.arange(len(rows), device=rows.device)
    # The column of this chunk in which the last token of each prompt is, if it is in one.
    last = state.lengths - 1 - prompts.starts - prompts.num_done
    logits_to_keep = 1 if packed is None else last.clamp(0, columns - 1)
    logits, aux_hidden_states = target(view, view.tokens.gather(1, slots), slots, logits_to_keep)
    drafter.prefill(view, aux_hidden_states, drafted)
    is_here = (last >= 0) & (last < columns)
    logits = logits[:, -1] if packed is None else logits[0]
    if state.prompt_logits is None:
        state.prompt_logits = torch.zeros_like(logits)
    state.prompt_logits.copy_(torch.where(is_here[:, None], logits, state.prompt_logits))
    if aux_hidden_states is not None:
        _keep_hidden_states(state, prompts, aux_hidden_states, rows, last)
    prompts.num_done += columns


def _slots_of(
    state: DecodeState, prompts: PromptBuffers, columns: int
) -> tuple[DecodeState, tuple[torch.Tensor, torch.Tensor]]:
    """What a chunk runs on, and its slots `[1 or B, columns]` int64 for the target, and for the drafter."""
    steps, packed = prompts.num_done + torch.arange(columns, device=prompts.starts.device), prompts.packed
    if packed is not None:
        slots = packed.slots[steps.clamp(max=len(packed.slots) - 1)][None]
        is_drafted = slots % state.slots < state.lengths[slots // state.slots] - 1
        return packed.state, (slots, torch.where(is_drafted, slots, packed.state.dummy_slot))
    positions = prompts.starts[:, None] + steps
    slots = torch.where(positions >= state.cached[:, None], positions, state.dummy_slot)
    return state, (slots, torch.where(slots < state.lengths[:, None] - 1, slots, state.dummy_slot))


def _keep_hidden_states(
    state: DecodeState, prompts: PromptBuffers, hidden: torch.Tensor, rows: torch.Tensor, last: torch.Tensor
) -> None:
    """Keep the hidden states of a chunk at the last tokens of the prompts.

    Args:
        hidden: `[1 or B, n, H]`, those of the chunk.
        rows: `[B]` int64, which of its rows each prompt is in.
        last: `[B]` int64, the column of each prompt's last token, which may be outside of the chunk.
    """
    width, columns = state.first_block_width, hidden.shape[1]
    if prompts.hidden_states is None:
        prompts.hidden_states = hidden.new_zeros(len(last), width, hidden.shape[-1])
    back = torch.arange(1 - width, 1, device=last.device)
    at = last[:, None] + back
    # In a packed row other prompts are before the first position that is run.
    is_run = (state.lengths - 1)[:, None] + back >= state.cached[:, None]
    is_here = is_run & (at >= 0) & (at < columns)
    here = hidden[rows[:, None], at.clamp(0, columns - 1)]
    prompts.hidden_states.copy_(torch.where(is_here[..., None], here, prompts.hidden_states))


def finish_prefill(state: DecodeState, prompts: PromptBuffers, rows: torch.Tensor | slice) -> None:
    """After the last chunk: let the hidden states of `rows` be those at the last tokens of the prompts.

    Rounds of other rows may have run between the chunks, which overwrite what they leave of these. Then the first new
    token can be committed.
    """
    kept = prompts.hidden_states
    if kept is not None:
        if state.aux_hidden_states is None:
            state.aux_hidden_states = kept.new_zeros(len(kept), state.most_draft_tokens + 1, kept.shape[-1])
        state.aux_hidden_states[rows, : kept.shape[1]] = kept[rows]


def prefill_drafter(state: DecodeState, drafter: Drafter, width: int, chunk_size: int) -> None:
    """Prefill a drafter that reads tokens only with the positions below `width` that the target has in its cache."""
    for chunk in torch.arange(width, device=state.tokens.device).split(chunk_size):
        drafter.prefill(state, None, torch.where(chunk < state.cached[:, None], chunk, state.dummy_slot))
