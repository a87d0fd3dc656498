"""Triton writes to the static KV cache; the references are in `kv_cache_reference`.

One launch moves the slots of all buffers: a table has the address, strides and slot size of each, in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .float8 import magnitudes, scales_of
from .launch import Unspecialised, block_of_steps, kernel, wait_for_inputs

# Elements of the keys, and of the values, that a program copies.
_TILE = 2048
# Words of each slot that a program moves.
_WORDS = tl.constexpr(512)


@triton.jit
def copy_heads(
    target_ptr,
    scale_ptr,
    source_ptr,
    head,
    strides_h,
    source_stride_d,
    is_head,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Copy the heads `head` of one position in the dtype of the target, whose last dimension has unit stride; in float8
    with scales if `scale_ptr` is given. `strides_h`: strides between heads of the target, the scales and the source.
    """
    target_stride_h, scale_stride_h, source_stride_h = strides_h
    dim = tl.arange(0, DIM_BLOCK)
    mask = is_head[:, None] & (dim < DIM)[None, :]
    source = tl.load(
        source_ptr + head[:, None] * source_stride_h + dim[None, :] * source_stride_d, mask=mask, other=0.0
    )
    if scale_ptr is not None:
        source = source.to(tl.float32)
        scale, inverse = scales_of(tl.max(magnitudes(source), axis=1))
        tl.store(scale_ptr + head * scale_stride_h, scale.to(scale_ptr.dtype.element_ty), mask=is_head)
        source = source * inverse[:, None]
    target = target_ptr + head[:, None] * target_stride_h + dim[None, :]
    tl.store(target, source.to(target_ptr.dtype.element_ty), mask=mask)


@kernel
def _write_kv_kernel(
    keys_ptr,
    values_ptr,
    scales_ptr,
    key_states_ptr,
    value_states_ptr,
    positions_ptr: Unspecialised,
    keys_strides,
    values_strides,
    scales_strides,
    key_states_strides,
    value_states_strides,
    positions_stride_b: Unspecialised,
    positions_stride_n: Unspecialised,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """Write the key and the value of one query position, HEAD_BLOCK heads per program.

    Grid: (n, B, blocks of heads). Reads `positions[b, i]` and the program's heads of `key_states[b, :, i]` and
    `value_states[b, :, i]`; writes them to `keys[b, slot]` and `values[b, slot]`, and scales to `scales[b, slot]`.
    """
    index = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK).to(tl.int64)
    is_head = head < KV_HEADS
    wait_for_inputs()
    slot = tl.load(positions_ptr + batch * positions_stride_b + index * positions_stride_n)
    key_scale_ptr, value_scale_ptr = scales_ptr, scales_ptr
    if scales_ptr is not None:
        key_scale_ptr += batch * scales_strides[0] + slot * scales_strides[1]
        value_scale_ptr = key_scale_ptr + 1
    copy_heads(
        keys_ptr + batch * keys_strides[0] + slot * keys_strides[1],
        key_scale_ptr,
        key_states_ptr + batch * key_states_strides[0] + index * key_states_strides[2],
        head,
        (keys_strides[2], scales_strides[2], key_states_strides[1]),
        key_states_strides[3],
        is_head,
        DIM,
        DIM_BLOCK,
    )
    copy_heads(
        values_ptr + batch * values_strides[0] + slot * values_strides[1],
        value_scale_ptr,
        value_states_ptr + batch * value_states_strides[0] + index * value_states_strides[2],
        head,
        (values_strides[2], scales_strides[2], value_states_strides[1]),
        value_states_strides[3],
        is_head,
        VALUE_DIM,
        VALUE_BLOCK,
    )


def write_kv(keys, values, key_states, value_states, positions, scales=None):
    """See `kv_cache_reference.write_kv`; equal bit for bit. One launch for keys and values; safe in a CUDA graph."""
    batch, kv_heads, num_states, dim = key_states.shape
    value_dim = value_states.shape[3]
    assert keys.stride(3) == values.stride(3) == 1
    assert keys.shape[2:] == (kv_heads, dim) and values.shape[2:] == (kv_heads, value_dim), "shapes must agree"
    assert value_states.shape[:3] == key_states.shape[:3] and positions.shape == (batch, num_states)
    dim_block, value_block = (triton.next_power_of_2(max(size, 1)) for size in (dim, value_dim))
    head_block = min(triton.next_power_of_2(kv_heads), max(1, _TILE // max(dim_block, value_block)))
    _write_kv_kernel[(num_states, batch, triton.cdiv(kv_heads, head_block))](
        keys,
        values,
        scales,
        key_states,
        value_states,
        positions,
        keys.stride()[:3],
        values.stride()[:3],
        (0, 0, 0) if scales is None else scales.stride()[:3],
        key_states.stride(),
        value_states.stride(),
        *positions.stride(),
        KV_HEADS=kv_heads,
        DIM=dim,
        VALUE_DIM=value_dim,
        HEAD_BLOCK=head_block,
        DIM_BLOCK=dim_block,
        VALUE_BLOCK=value_block,
    )


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
):
    """Move _WORDS words, of WORD bytes, of all slots of a path in one row of one buffer.

    Grid: (buffers, B, tiles). Reads a row of `table` `[buffers, 4]` and of `path`, an element of `lengths` and
    `committed`, and the program's words of the path's slots; writes these words to the slots after the root's.
    """
    row = tl.program_id(1).to(tl.int64)
    step = tl.arange(0, STEPS)
    word = tl.program_id(2) * _WORDS + tl.arange(0, _WORDS)
    entry_ptr = table_ptr + tl.program_id(0).to(tl.int64) * 4
    address = tl.load(entry_ptr)
    row_stride = tl.load(entry_ptr + 1)
    slot_stride = tl.load(entry_ptr + 2)
    size = tl.load(entry_ptr + 3)
    wait_for_inputs()
    committed = tl.load(committed_ptr + row)
    root = tl.load(lengths_ptr + row) - committed - 1
    node = tl.load(path_ptr + row * path_stride + step, mask=step < num_steps, other=0)
    is_moved = (step < committed) & (step < num_steps) & (node != step)
    if tl.max(is_moved.to(tl.int32), axis=0) == 0:
        return
    mask = is_moved[:, None] & (word < size // WORD)[None, :]
    # Offsets in words; the table has bytes.
    if WORD == 4:
        row_ptr = (address + row * row_stride).to(tl.pointer_type(tl.int32))
    else:
        row_ptr = (address + row * row_stride).to(tl.pointer_type(tl.int8))
    source = (root + node) * (slot_stride // WORD)
    target = (root + step) * (slot_stride // WORD)
    values = tl.load(row_ptr + source[:, None] + word[None, :], mask=mask, other=0)
    # A slot may be the source of one move and the target of another, so all are read before any is written.
    tl.debug_barrier()
    tl.store(row_ptr + target[:, None] + word[None, :], values, mask=mask)


class SlotTable(NamedTuple):
    """Addresses of the slots of buffers, for `move_slots`.

    Attributes:
        entries: `[buffers, 4]` int64 on the buffers' device: address, row stride, slot stride and slot size, in bytes.
        word: number of bytes that are moved at once, 1 or 4.
        tiles: number of programs for the largest slot.
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
        return cls(on_device, word, triton.cdiv(largest // word, _WORDS.value))


def move_slots(table: SlotTable, path: torch.Tensor, lengths: torch.Tensor, committed: torch.Tensor) -> None:
    """See `kv_cache_reference.move_slots`; equal. One launch; the table must be made before a capture."""
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
    )
