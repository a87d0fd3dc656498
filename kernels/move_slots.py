"""Triton move of the nodes of an accepted path; the reference is `move_slots_reference.move_slots`.

Shapes: buffers `[B, slots, heads, width]`, path `[B, D + 1]`, lengths and committed `[B]`. With the root's slot
r = lengths[b] - committed[b] - 1, for 0 < j < committed[b]:

    buffer[b, r + j] = buffer[b, r + path[b, j]]

for all buffers in one launch: a table has the address of each, its strides and how much a slot holds, in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .launch import Unspecialised, block_of_steps, dependent_launch, kernel, wait_for_inputs

# Words of a slot that a program moves.
TILE = tl.constexpr(512)


@kernel
def _move_slots_kernel(
    table_ptr,
    path_ptr,
    lengths_ptr,
    committed_ptr,
    path_stride: Unspecialised,
    num_steps: Unspecialised,
    WORD: tl.constexpr,
    STEPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Move TILE words, of WORD bytes, of all slots of a path in one row of one buffer.

    Grid: (buffers, B, tiles). Reads a row of `table` `[buffers, 4]` and of `path`, an element of `lengths` and
    `committed`, and the program's words of the path's slots; writes these words of the slots after the root's.
    """
    row = tl.program_id(1).to(tl.int64)
    step = tl.arange(0, STEPS)
    word = tl.program_id(2) * TILE + tl.arange(0, TILE)
    entry_ptr = table_ptr + tl.program_id(0).to(tl.int64) * 4
    address = tl.load(entry_ptr)
    row_stride = tl.load(entry_ptr + 1)
    slot_stride = tl.load(entry_ptr + 2)
    size = tl.load(entry_ptr + 3)
    wait_for_inputs(PDL)
    committed = tl.load(committed_ptr + row)
    root = tl.load(lengths_ptr + row) - committed - 1
    node = tl.load(path_ptr + row * path_stride + step, mask=step < num_steps, other=0)
    is_moved = (step < committed) & (step < num_steps) & (node != step)
    if tl.max(is_moved.to(tl.int32), axis=0) == 0:
        return
    mask = is_moved[:, None] & (word < size // WORD)[None, :]
    # In words; the table is in bytes.
    if WORD == 4:
        row_ptr = (address + row * row_stride).to(tl.pointer_type(tl.int32))
    else:
        row_ptr = (address + row * row_stride).to(tl.pointer_type(tl.int8))
    source = (root + node) * (slot_stride // WORD)
    target = (root + step) * (slot_stride // WORD)
    values = tl.load(row_ptr + source[:, None] + word[None, :], mask=mask, other=0)
    # A slot may be one's source and another's target: all are read before one is written.
    tl.debug_barrier()
    tl.store(row_ptr + target[:, None] + word[None, :], values, mask=mask)


class SlotTable(NamedTuple):
    """Where the slots of some buffers are, and what follows of it for a launch.

    Attributes:
        entries: `[buffers, 4]` int64 on their device: address, strides of rows and slots, and size of a slot, in bytes.
        word: bytes that are moved at once.
        tiles: programs for the largest slot.
    """

    entries: torch.Tensor
    word: int
    tiles: int

    @classmethod
    def of(cls, buffers: Sequence[torch.Tensor]) -> SlotTable:
        assert all(one[0, 0].is_contiguous() for one in buffers), "a slot must be one piece of memory"
        entries = [
            (one.data_ptr(), *(stride * one.itemsize for stride in one.stride()[:2]), one[0, 0].numel() * one.itemsize)
            for one in buffers
        ]
        word = 1 if any(number % 4 for entry in entries for number in entry) else 4
        largest = max(size for *_, size in entries)
        on_device = torch.tensor(entries, dtype=torch.int64, device=buffers[0].device)
        return cls(on_device, word, triton.cdiv(largest // word, TILE.value))


def move_slots(table: SlotTable, path: torch.Tensor, lengths: torch.Tensor, committed: torch.Tensor) -> None:
    """See `move_slots_reference.move_slots`; equal. One launch; the table of the buffers is made before a capture."""
    assert path.stride(1) == 1 and lengths.is_contiguous() and committed.is_contiguous()
    _move_slots_kernel[(len(table.entries), len(path), table.tiles)](
        table.entries,
        path,
        lengths,
        committed,
        path.stride(0),
        path.shape[1],
        WORD=table.word,
        STEPS=block_of_steps(path.shape[1]),
        num_warps=8,
        **dependent_launch(path.device),
    )
