"""Prefill: target and drafter process the prompts; the drafter leaves out their last tokens.

Where target and drafter store keys and values only, prompts of several rows are packed in one row, without padding.
Elsewhere each prompt has its own row, left-padded. `prefill_chunk` runs eagerly and captured; nothing in it reads a
device value on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..calls.first_pass import FirstPass
from ..calls.prompts import PromptSpan
from ..drafters.base import Drafter
from ..modules.hidden_states import joined
from ..state import DecodeState, upload
from .target import Target

# `PromptBuffers.starts` of rows without positions to prefill.
_NOWHERE = -(2**31)


class PromptBuffers:
    """Inputs of a prefill on `state`, and the hidden states that it leaves at the last tokens of the prompts.

    Attributes:
        num_done: `[]` int64, steps done so far. A step is a column of padded rows, or a token of packed ones.
        starts: `[B]` int64, for each row the position that step 0 runs, or would run if counted back; `_NOWHERE` for
            rows without positions to prefill.
        packed: the state with its rows as one row, if prompts are packed. None if each prompt has its own row; then all
            rows end at the same step.
        slots: `[tokens]` int64, slots of `packed` to prefill, followed by dummy slots.
        hidden_states: `[B, state.first_block_width, width]`, the target's auxiliary hidden states at the last tokens of
            the prompts, 0 where the prefill has not run them; None before the first prefill, and for a drafter that
            reads none.
    """

    def __init__(self, state: DecodeState):
        self.num_done, self.starts = state.lengths.new_zeros(()), torch.empty_like(state.lengths)
        self.packed: DecodeState | None = None
        self.slots: torch.Tensor | None = None
        self.hidden_states: torch.Tensor | None = None

    def pack(self, state: DecodeState, drafter: Drafter) -> None:
        """Let the prompts of `state`, with the memory of `drafter`, be packed."""
        batch = len(state.tokens)
        self.packed = state.as_one_row(drafter.as_one_row(state.memory, batch))
        self.slots = self.starts.new_empty(batch * state.slots + 1)

    def fill(self, spans: Sequence[PromptSpan], steps: int, goes_on: bool = False) -> None:
        """Set the positions to prefill. `steps` is their number in padded rows.

        With `goes_on`, earlier positions of the same prompts have been run, and their hidden states stay.
        """
        starts, first = [_NOWHERE] * len(self.starts), 0
        for span in spans:
            starts[span.row] = span.end - steps if self.packed is None else span.begin - first
            first += span.end - span.begin
        self.starts.copy_(upload(starts, self.starts))
        self.num_done.zero_()
        if self.hidden_states is not None and spans and not goes_on:
            self.hidden_states.zero_()
        if self.packed is not None:
            self.slots.fill_(self.packed.dummy_slot)
            parts = [torch.arange(one.begin, one.end, device="cpu") + one.row * self.packed.row_slots for one in spans]
            if parts:
                slots = torch.cat(parts)
                self.slots[: len(slots)] = upload(slots, self.slots)


def prefill_chunk(
    state: DecodeState, target: Target | FirstPass, drafter: Drafter, columns: int, prompts: PromptBuffers
) -> None:
    """Prefill target and drafter with the next positions of the prompts; the drafter leaves out their last tokens.

    `finish_prefill` comes after the last chunk. Prefilling the same positions again changes nothing.

    Args:
        state: holds the prompts. Positions below `state.cached` are in the target's cache already and are left out.
        columns: steps to run: tokens of all rows together if packed; else columns of each row, which are padding before
            its first position.
    """
    packed = prompts.packed
    view, (slots, drafted) = _slots_of(state, prompts, columns)
    # The column of this chunk that holds the last token of each prompt, if it is in the chunk.
    last = state.lengths - 1 - prompts.starts - prompts.num_done
    logits_to_keep = 1 if packed is None else last.clamp(0, columns - 1)
    logits, parts = target(view, view.tokens.gather(1, slots), slots, logits_to_keep)
    aux_hidden_states = joined(parts)
    drafter.prefill(view, aux_hidden_states, drafted)
    is_here = (last >= 0) & (last < columns)
    logits = logits[:, -1] if packed is None else logits[0]
    if state.prompt_logits is None:
        state.prompt_logits = torch.zeros_like(logits)
    state.prompt_logits.copy_(torch.where(is_here[:, None], logits, state.prompt_logits))
    if aux_hidden_states is not None:
        _keep_hidden_states(state, prompts, aux_hidden_states, last)
    prompts.num_done += columns


def _slots_of(
    state: DecodeState, prompts: PromptBuffers, columns: int
) -> tuple[DecodeState, tuple[torch.Tensor, torch.Tensor]]:
    """The state that a chunk runs on, and its slots `[1 or B, columns]` int64: for the target and for the drafter."""
    steps, packed = prompts.num_done + torch.arange(columns, device=prompts.starts.device), prompts.packed
    if packed is not None:
        slots = prompts.slots[steps.clamp(max=len(prompts.slots) - 1)][None]
        is_drafted = slots % state.slots < state.lengths[slots // state.slots] - 1
        return packed, (slots, torch.where(is_drafted, slots, packed.dummy_slot))
    positions = prompts.starts[:, None] + steps
    slots = torch.where(positions >= state.cached[:, None], positions, state.dummy_slot)
    return state, (slots, torch.where(slots < state.lengths[:, None] - 1, slots, state.dummy_slot))


def _keep_hidden_states(state: DecodeState, prompts: PromptBuffers, hidden: torch.Tensor, last: torch.Tensor) -> None:
    """Keep hidden states at the prompts' last tokens, which are in columns `last` `[B]` of the chunk, or outside it."""
    width, columns = state.first_block_width, hidden.shape[1]
    if prompts.hidden_states is None:
        prompts.hidden_states = hidden.new_zeros(len(last), width, hidden.shape[-1])
    back = torch.arange(1 - width, 1, device=last.device)
    at = last[:, None] + back
    # In a packed row, the tokens before a prompt's first position to run are those of another prompt.
    is_run = (state.lengths - 1)[:, None] + back >= state.cached[:, None]
    is_here = is_run & (at >= 0) & (at < columns)
    rows = torch.zeros_like(at) if prompts.packed is not None else torch.arange(len(at), device=at.device)[:, None]
    here = hidden[rows, at.clamp(0, columns - 1)]
    prompts.hidden_states.copy_(torch.where(is_here[..., None], here, prompts.hidden_states))


def finish_prefill(state: DecodeState, prompts: PromptBuffers, rows: torch.Tensor | slice) -> None:
    """After the last chunk: set the auxiliary hidden states of `rows` to those at the last tokens of the prompts.

    Rounds of other rows, between the chunks, may have overwritten these. Then the first new token can be committed.
    """
    kept = prompts.hidden_states
    if kept is not None:
        if state.aux_hidden_states is None:
            state.aux_hidden_states = kept.new_zeros(len(kept), state.most_draft_tokens + 1, kept.shape[-1])
        state.aux_hidden_states[rows, : kept.shape[1]] = kept[rows]


def prefill_drafter(state: DecodeState, drafter: Drafter, width: int, chunk_size: int) -> None:
    """Prefill a drafter that reads tokens only with the positions below `width` that the target's cache holds."""
    for chunk in torch.arange(width, device=state.tokens.device).split(chunk_size):
        drafter.prefill(state, None, torch.where(chunk < state.cached[:, None], chunk, state.dummy_slot))


def run_to_ends(
    state: DecodeState, target: Target, texts: Sequence[torch.Tensor], ends: Sequence[int], chunk_size: int
) -> None:
    """Run the tokens that recurrent states lack of finished texts, up to the positions `ends`.

    A state includes the tokens that were certain before the last round; drafts that the round accepted are in rings. A
    row that ended early lacks the padding tokens that plain `generate()` runs until the others have ended.

    Args:
        texts: at least `[ends[row]]` int64 tokens of each of the first rows; no row's state is beyond its end.
        chunk_size: most columns of a pass.
    """
    count, bases = len(ends), state.cache.state_positions(len(ends))
    width = max(end - base for base, end in zip(bases, ends, strict=True))
    first, last = upload(bases, state.lengths)[:, None], upload(ends, state.lengths)[:, None]
    state.lengths[:count] = last[:, 0]  # all of these tokens are certain
    state.live = max(ends)
    tokens = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True).to(state.tokens)
    for columns in torch.arange(width, device=first.device).split(chunk_size):
        slots = torch.full((len(state.lengths), len(columns)), state.dummy_slot, device=first.device)
        positions = first + columns
        slots[:count] = torch.where(positions < last, positions, state.dummy_slot)
        given = torch.zeros_like(slots)
        given[:count] = tokens.gather(1, positions.clamp(max=tokens.shape[1] - 1))
        target(state, given, slots, 1)
