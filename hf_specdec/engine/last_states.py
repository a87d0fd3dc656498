"""Recurrent states of finished texts: those of the last token but one, as plain `generate()` leaves them.

A state has the tokens in it that were certain before the last round; those that the round accepted are in rings. Of
rows that ended before others it lacks what plain `generate()` runs of these meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cache.ragged_cache import RaggedCache
from ..row_buffers import upload
from ..state import DecodeState
from .target import Target


def positions_of_states(cache: RaggedCache, count: int) -> list[int]:
    """The positions of the recurrent states of the first `count` rows; the device is waited for."""
    return cache.recurrence.next_base[:count].tolist()


def replay_states(cache: RaggedCache, ends: Sequence[int]) -> bool:
    """Bring the recurrent states of the first rows to the positions `ends`, up to which the target has run all tokens.

    Returns:
        whether that was done: not with tokens in the states that the text does not have, as those after a stop string,
        nor if what rings hold does not suffice.
    """
    bases = positions_of_states(cache, len(ends))
    if any(base > end for base, end in zip(bases, ends, strict=True)):
        return False
    if bases == list(ends):
        return True
    if not all(layer.can_replay for layer in cache.layers):
        return False
    cache.replay(upload(ends, cache.recurrence.base))
    return True


def run_to_ends(
    state: DecodeState, target: Target, texts: Sequence[torch.Tensor], ends: Sequence[int], chunk_size: int
) -> None:
    """Run the tokens of finished texts that recurrent states lack; afterwards these are of the positions `ends`.

    Args:
        state: of the texts, in its first rows; no round follows.
        texts: at least `[ends[row]]` int64 tokens of each, read from the position of its state on.
        ends: of each row, none before the position of its state.
        chunk_size: most columns of a pass.
    """
    count, bases = len(ends), positions_of_states(state.cache, len(ends))
    width = max(end - base for base, end in zip(bases, ends, strict=True))
    first, last = upload(bases, state.lengths)[:, None], upload(ends, state.lengths)[:, None]
    state.lengths[:count] = last[:, 0]  # all of them are certain
    state.live = max(ends)
    tokens = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True).to(state.tokens)
    for columns in torch.arange(width, device=first.device).split(chunk_size):
        slots = torch.full((len(state.lengths), len(columns)), state.dummy_slot, device=first.device)
        positions = first + columns
        slots[:count] = torch.where(positions < last, positions, state.dummy_slot)
        given = torch.zeros_like(slots)
        given[:count] = tokens.gather(1, positions.clamp(max=tokens.shape[1] - 1))
        target(state, given, slots, 1)
