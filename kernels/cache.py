"""Triton write of new keys and values to the ragged cache; defined by `reference.write_kv`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Elements that a program writes of the keys, and of the values.
_TILE = 2048


@triton.jit
def _copy(
    target_ptr,
    source_ptr,
    head,
    target_stride_h,
    source_stride_h,
    source_stride_d,
    is_head,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    dim = tl.arange(0, DIM_BLOCK)
    mask = is_head[:, None] & (dim < DIM)[None, :]
    source = tl.load(source_ptr + head[:, None] * source_stride_h + dim[None, :] * source_stride_d, mask=mask)
    target = target_ptr + head[:, None] * target_stride_h + dim[None, :]
    tl.store(target, source.to(target_ptr.dtype.element_ty), mask=mask)


# Triton would build anew for those of the arguments so named that are 1 or divisible by 16, to no gain.
@triton.jit(do_not_specialize=["positions_stride_b", "positions_stride_n"])
def _write_kv_kernel(
    keys_ptr,
    values_ptr,
    key_states_ptr,
    value_states_ptr,
    positions_ptr,
    keys_stride_b,
    keys_stride_s,
    keys_stride_h,
    values_stride_b,
    values_stride_s,
    values_stride_h,
    key_states_stride_b,
    key_states_stride_h,
    key_states_stride_n,
    key_states_stride_d,
    value_states_stride_b,
    value_states_stride_h,
    value_states_stride_n,
    value_states_stride_d,
    positions_stride_b,
    positions_stride_n,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    step = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK).to(tl.int64)
    is_head = head < KV_HEADS
    slot = tl.load(positions_ptr + batch * positions_stride_b + step * positions_stride_n)
    _copy(
        keys_ptr + batch * keys_stride_b + slot * keys_stride_s,
        key_states_ptr + batch * key_states_stride_b + step * key_states_stride_n,
        head,
        keys_stride_h,
        key_states_stride_h,
        key_states_stride_d,
        is_head,
        DIM,
        DIM_BLOCK,
    )
    _copy(
        values_ptr + batch * values_stride_b + slot * values_stride_s,
        value_states_ptr + batch * value_states_stride_b + step * value_states_stride_n,
        head,
        values_stride_h,
        value_states_stride_h,
        value_states_stride_d,
        is_head,
        VALUE_DIM,
        VALUE_BLOCK,
    )


def write_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """See `reference.write_kv`, bit for bit. One launch for both; a CUDA graph can hold it."""
    batch, kv_heads, num_states, dim = key_states.shape
    value_dim = value_states.shape[3]
    assert keys.stride(3) == values.stride(3) == 1
    assert keys.shape[2:] == (kv_heads, dim) and values.shape[2:] == (kv_heads, value_dim), "shapes must agree"
    assert value_states.shape[:3] == key_states.shape[:3] and positions.shape == (batch, num_states)
    dim_block, value_block = (triton.next_power_of_2(size) for size in (dim, value_dim))
    head_block = min(triton.next_power_of_2(kv_heads), max(1, _TILE // max(dim_block, value_block)))
    _write_kv_kernel[(num_states, batch, triton.cdiv(kv_heads, head_block))](
        keys,
        values,
        key_states,
        value_states,
        positions,
        *keys.stride()[:3],
        *values.stride()[:3],
        *key_states.stride(),
        *value_states.stride(),
        *positions.stride(),
        KV_HEADS=kv_heads,
        DIM=dim,
        VALUE_DIM=value_dim,
        HEAD_BLOCK=head_block,
        DIM_BLOCK=dim_block,
        VALUE_BLOCK=value_block,
    )
