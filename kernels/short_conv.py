"""Triton causal depthwise convolution over positions; the reference is `short_conv_reference.short_conv`."""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import Unspecialised, kernel, wait_for_inputs
from .ring import find_block

CHANNEL_BLOCK = tl.constexpr(64)
# Columns that are convolved at a time: few in rounds, more in prompts.
_COLUMN_BLOCKS = (8, 32)


@kernel
def _short_conv_kernel(
    inputs_ptr,
    ring_ptr,
    positions_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    inputs_strides,
    positions_stride_b: Unspecialised,
    positions_stride_n: Unspecialised,
    num_columns: Unspecialised,
    dummy: Unspecialised,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    SILU: tl.constexpr,
):
    """CHANNEL_BLOCK channels of one row, COLUMN_BLOCK columns at a time.

    Grid: (blocks of C, B). Reads the row's positions and the program's channels of the inputs, and of the ring at the
    W - 1 positions before the block; writes these channels of `out`, and then the last Rc live columns of the inputs to
    the ring.
    """
    batch = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * CHANNEL_BLOCK + tl.arange(0, CHANNEL_BLOCK)
    is_channel = channel < CHANNELS
    wait_for_inputs()
    positions_ptr += batch * positions_stride_b
    begin, first, count = find_block(positions_ptr, positions_stride_n, num_columns, dummy, COLUMN_BLOCK)
    end = begin + count
    inputs_ptr += batch * inputs_strides[0]
    ring_ptr += batch * (RING * CHANNELS)
    out_ptr += batch * num_columns * CHANNELS

    for start in range(0, num_columns, COLUMN_BLOCK):
        column = start + tl.arange(0, COLUMN_BLOCK)
        is_live = (column >= begin) & (column < end)
        total = tl.zeros([COLUMN_BLOCK, CHANNEL_BLOCK], tl.float32)
        for tap in tl.static_range(WIDTH):
            source = column - (WIDTH - 1 - tap)
            position = first + source - begin
            is_new = is_live & (source >= begin)
            new = tl.load(
                inputs_ptr + source.to(tl.int64)[:, None] * inputs_strides[1] + channel[None, :],
                mask=is_new[:, None] & is_channel[None, :],
                other=0.0,
            )
            is_old = is_live & (source < begin) & (position >= 0)
            old = tl.load(
                ring_ptr + (position % RING)[:, None] * CHANNELS + channel[None, :],
                mask=is_old[:, None] & is_channel[None, :],
                other=0.0,
            )
            weight = tl.load(weight_ptr + channel * WIDTH + tap, mask=is_channel, other=0.0).to(tl.float32)
            total += tl.where(is_new[:, None], new, old).to(tl.float32) * weight[None, :]
        if bias_ptr is not None:
            total += tl.load(bias_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
        if SILU:
            total = total * tl.sigmoid(total)
        total = tl.where(is_live[:, None], total, 0.0)
        tl.store(
            out_ptr + column.to(tl.int64)[:, None] * CHANNELS + channel[None, :],
            total.to(out_ptr.dtype.element_ty),
            mask=(column < num_columns)[:, None] & is_channel[None, :],
        )

    # A long block writes ring slots that its first columns read.
    tl.debug_barrier()
    for start in range(tl.maximum(begin, end - RING), end, COLUMN_BLOCK):
        column = start + tl.arange(0, COLUMN_BLOCK)
        position = first + column - begin
        mask = (column < end)[:, None] & is_channel[None, :]
        new = tl.load(
            inputs_ptr + column.to(tl.int64)[:, None] * inputs_strides[1] + channel[None, :], mask=mask, other=0.0
        )
        tl.store(ring_ptr + (position % RING)[:, None] * CHANNELS + channel[None, :], new, mask=mask)


def short_conv(inputs, ring, positions, dummy, weight, bias, silu):
    """See `short_conv_reference.short_conv`; sums in float32. One launch, which depends only on shapes and strides."""
    batch, num_columns, channels = inputs.shape
    assert ring.dtype == inputs.dtype and ring.shape[::2] == (batch, channels) and ring.is_contiguous()
    assert weight.shape[0] == channels and weight.is_contiguous(), "the weight must be contiguous"
    assert bias is None or bias.is_contiguous(), "the bias must be contiguous"
    if inputs.stride(2) != 1:
        inputs = inputs.contiguous()
    out = inputs.new_empty(inputs.shape)
    few, many = _COLUMN_BLOCKS
    column_block = few if num_columns <= few else many
    _short_conv_kernel[(triton.cdiv(channels, CHANNEL_BLOCK.value), batch)](
        inputs,
        ring,
        positions,
        weight,
        bias,
        out,
        inputs.stride()[:2],
        *positions.stride(),
        num_columns,
        dummy,
        CHANNELS=channels,
        WIDTH=weight.shape[1],
        RING=ring.shape[1],
        COLUMN_BLOCK=column_block,
        SILU=silu,
        num_warps=4 if column_block == many else 2,
    )
    return out
