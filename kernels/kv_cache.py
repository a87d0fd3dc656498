"""Triton write of new keys and values to the static KV cache; the reference is `kv_cache_reference.write_kv`.

Shapes: cache `[B, slots, kv_heads, D]` for keys and `[B, slots, kv_heads, Dv]` for values, new states
`[B, kv_heads, n, D]` and `[B, kv_heads, n, Dv]`, positions `[B, n]`.

    keys[b, positions[b, i], h] = key_states[b, h, i],    values[b, positions[b, i], h] = value_states[b, h, i]

With scales `[B, slots, kv_heads, 2]` heads are stored as float8, see `float8_reference`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .float8 import magnitudes, scales_of
from .launch import Unspecialised, dependent_launch, kernel, wait_for_inputs

# Elements of the keys, and of the values, that one program copies.
_TILE = 2048


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
    """Copy the heads `head` of one position, cast to the dtype of the target, whose last dimension has unit stride: to
    float8 with their scales, if these are stored. `strides_h` are those of heads of the target, the scales, the source.
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
    PDL: tl.constexpr,
):
    """Write the key and the value of one query position, HEAD_BLOCK heads per program.

    Grid: (n, B, blocks of heads). Reads `positions[b, i]`, and of `key_states[b, :, i]` and `value_states[b, :, i]` the
    program's heads; writes them to `keys[b, slot]` and `values[b, slot]`, and their scales to `scales[b, slot]`.
    """
    index = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    head = tl.program_id(2) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK).to(tl.int64)
    is_head = head < KV_HEADS
    wait_for_inputs(PDL)
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
        **dependent_launch(keys.device),
    )
