"""Triton rotary position embedding; the references are in `rotary_reference`.

One kernel computes cosines and sines, with the functions of PyTorch's kernels. Another rotates query and key in one
launch, which may also store key and value. Every product and sum is rounded as in PyTorch, where each is a kernel of
its own, so results are the same bits.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from .float8 import magnitudes, scales_of
from .kv_cache import copy_heads
from .launch import Unspecialised, kernel, wait_for_inputs
from .types import RotaryKind

# Elements of a program, of one token and several heads.
_ELEMENTS, _ELEMENTS_OF_WARP = 1024, 512


@kernel
def _rotary_angles_kernel(
    frequencies_ptr,
    positions_ptr: Unspecialised,
    cos_ptr,
    sin_ptr,
    num_tokens: Unspecialised,
    positions_stride_b: Unspecialised,
    positions_stride_n: Unspecialised,
    scaling,
    ANGLES: tl.constexpr,
    REPEATS: tl.constexpr,
    LIBDEVICE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cosines and sines of one token.

    Grid: (B * n,). Reads a position and all `frequencies`; writes a row of `cos` and of `sin`. The interpreter has no
    LIBDEVICE; without it the last bits may differ.
    """
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    is_pair = pair < ANGLES
    frequency = tl.load(frequencies_ptr + pair, mask=is_pair, other=0.0).to(tl.float32)
    wait_for_inputs()
    row, column = token // num_tokens, token % num_tokens
    position = tl.load(positions_ptr + row * positions_stride_b + column * positions_stride_n)
    angle = position.to(tl.float32) * frequency
    cos = (libdevice.cos(angle) if LIBDEVICE else tl.cos(angle)) * scaling
    sin = (libdevice.sin(angle) if LIBDEVICE else tl.sin(angle)) * scaling
    cos = cos.to(cos_ptr.dtype.element_ty)
    sin = sin.to(sin_ptr.dtype.element_ty)
    size: tl.constexpr = ANGLES if REPEATS == "once" else 2 * ANGLES
    first = 2 * pair if REPEATS == "pairs" else pair
    tl.store(cos_ptr + token * size + first, cos, mask=is_pair)
    tl.store(sin_ptr + token * size + first, sin, mask=is_pair)
    if REPEATS != "once":
        second = first + (1 if REPEATS == "pairs" else ANGLES)
        tl.store(cos_ptr + token * size + second, cos, mask=is_pair)
        tl.store(sin_ptr + token * size + second, sin, mask=is_pair)


def rotary_angles(frequencies, positions, dtype, kind):
    """See `rotary_reference.rotary_angles`. One launch, which depends only on shapes and strides."""
    assert frequencies.is_contiguous(), "frequencies must be contiguous"
    batch, num_tokens = positions.shape
    count = len(frequencies)
    size = count if kind.repeats == "once" else 2 * count
    cos, sin = (torch.empty(batch, num_tokens, size, dtype=dtype, device=positions.device) for _ in range(2))
    if cos.numel() == 0:
        return cos, sin
    block = triton.next_power_of_2(count)
    _rotary_angles_kernel[(batch * num_tokens,)](
        frequencies,
        positions,
        cos,
        sin,
        num_tokens,
        *positions.stride(),
        float(kind.scaling),
        ANGLES=count,
        REPEATS=kind.repeats,
        LIBDEVICE=positions.is_cuda,
        BLOCK=block,
        num_warps=max(1, min(4, block // 32)),
        # The product must be rounded before the functions reduce it.
        enable_fp_fusion=False,
    )
    return cos, sin


@triton.jit
def _place(pair, second: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Index of the first or second element of pairs."""
    return 2 * pair + second if INTERLEAVED else pair + second * PAIRS


@triton.jit
def _rotate_heads(
    states_ptr,
    out_ptr,
    scale_ptr,
    angles,
    first_head,
    num_heads,
    strides_h,
    SIZES,
    KIND,
):
    """Rotate HEADS heads of one token from `first_head` on; the results are float8 with scales if `scale_ptr` is given.

    `strides_h`: strides between heads of the states, the result and the scales. SIZES: numbers of pairs and of elements
    after them, HEADS, and powers of two for the first two. KIND: flags of `RotaryKind`.
    """
    cos_ptr, sin_ptr = angles
    stride_h, out_stride_h, scale_stride_h = strides_h
    # Not unpacked: Triton 3.9 makes tensors of the constants of an unpacked tuple.
    PAIRS: tl.constexpr = SIZES[0]
    REST: tl.constexpr = SIZES[1]
    HEADS: tl.constexpr = SIZES[2]
    PAIR_BLOCK: tl.constexpr = SIZES[3]
    REST_BLOCK: tl.constexpr = SIZES[4]
    INPUTS_INTERLEAVED: tl.constexpr = KIND[0]
    OUTPUTS_INTERLEAVED: tl.constexpr = KIND[1]
    SHARED_ANGLES: tl.constexpr = KIND[2]
    ROUNDED: tl.constexpr = KIND[3]
    dtype: tl.constexpr = states_ptr.dtype.element_ty
    out_dtype: tl.constexpr = out_ptr.dtype.element_ty
    head = first_head + tl.arange(0, HEADS)
    is_head = (head < num_heads)[:, None]
    states_ptr += head.to(tl.int64)[:, None] * stride_h
    out_ptr += head.to(tl.int64)[:, None] * out_stride_h
    pair = tl.arange(0, PAIR_BLOCK)
    is_pair = pair < PAIRS
    mask = is_head & is_pair[None, :]
    first = _place(pair, 0, PAIRS, INPUTS_INTERLEAVED)
    second = _place(pair, 1, PAIRS, INPUTS_INTERLEAVED)
    x1 = tl.load(states_ptr + first[None, :], mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(states_ptr + second[None, :], mask=mask, other=0.0).to(tl.float32)
    at1 = pair if SHARED_ANGLES else first
    at2 = pair if SHARED_ANGLES else second
    c1 = tl.load(cos_ptr + at1, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    c2 = tl.load(cos_ptr + at2, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    s1 = tl.load(sin_ptr + at1, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    s2 = tl.load(sin_ptr + at2, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    x1c1 = x1 * c1
    x2s1 = x2 * s1
    x2c2 = x2 * c2
    x1s2 = x1 * s2
    if ROUNDED:
        x1c1 = x1c1.to(dtype).to(tl.float32)
        x2s1 = x2s1.to(dtype).to(tl.float32)
        x2c2 = x2c2.to(dtype).to(tl.float32)
        x1s2 = x1s2.to(dtype).to(tl.float32)
    first_out = (x1c1 - x2s1).to(dtype)
    second_out = (x2c2 + x1s2).to(dtype)
    if REST > 0:
        rest = tl.arange(0, REST_BLOCK)
        is_rest = is_head & (rest < REST)[None, :]
        kept = tl.load(states_ptr + (2 * PAIRS + rest)[None, :], mask=is_rest, other=0.0)
    if scale_ptr is not None:
        first_out, second_out = first_out.to(tl.float32), second_out.to(tl.float32)
        largest = tl.max(tl.maximum(magnitudes(first_out), magnitudes(second_out)), axis=1)
        if REST > 0:
            kept = kept.to(tl.float32)
            largest = tl.maximum(largest, tl.max(magnitudes(kept), axis=1))
        scale, inverse = scales_of(largest)
        scale_ptr += head.to(tl.int64) * scale_stride_h
        tl.store(scale_ptr, scale.to(scale_ptr.dtype.element_ty), mask=head < num_heads)
        first_out, second_out = first_out * inverse[:, None], second_out * inverse[:, None]
        if REST > 0:
            kept *= inverse[:, None]
    tl.store(out_ptr + _place(pair, 0, PAIRS, OUTPUTS_INTERLEAVED)[None, :], first_out.to(out_dtype), mask=mask)
    tl.store(out_ptr + _place(pair, 1, PAIRS, OUTPUTS_INTERLEAVED)[None, :], second_out.to(out_dtype), mask=mask)
    if REST > 0:
        tl.store(out_ptr + (2 * PAIRS + rest)[None, :], kept.to(out_dtype), mask=is_rest)


@kernel
def _rotary_kernel(
    angles,
    first,
    second,
    num_tokens: Unspecialised,
    first_heads: Unspecialised,
    second_heads: Unspecialised,
    angles_strides,
    first_strides,
    second_strides,
    second_out_stride_b: Unspecialised,
    second_out_strides_sh,
    value_ptr,
    values_ptr,
    positions_ptr: Unspecialised,
    scales_ptr,
    value_stride_b: Unspecialised,
    value_stride_h,
    value_stride_n: Unspecialised,
    value_stride_d,
    values_stride_b: Unspecialised,
    values_strides_sh,
    scales_stride_b: Unspecialised,
    scales_strides_sh,
    positions_stride_b: Unspecialised,
    positions_stride_n: Unspecialised,
    STORES: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SIZES: tl.constexpr,
    KIND: tl.constexpr,
):
    """HEADS heads of one token: of the query, then of the key, then of the value, by the block.

    `angles` are cosines and sines; `first` and `second` are states and results of query and key.

    Grid: (B * n, blocks of query heads, key heads and, with STORES, value heads). Reads the program's heads and the
    cosines and sines of its token; writes the heads of the result, `[B, n, heads, D]`. With STORES heads of key and
    value go to the slot `positions[b, i]` of the caches `second_out` and `values`, and scales to that of `scales`.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row, column = token // num_tokens, token % num_tokens
    cos_ptr = angles[0] + row * angles_strides[0][0] + column * angles_strides[0][1]
    sin_ptr = angles[1] + row * angles_strides[1][0] + column * angles_strides[1][1]
    own_angles = cos_ptr, sin_ptr
    HEADS: tl.constexpr = SIZES[2]
    size: tl.constexpr = 2 * SIZES[0] + SIZES[1]
    first_blocks = tl.cdiv(first_heads, HEADS)
    second_blocks = tl.cdiv(second_heads, HEADS)
    wait_for_inputs()
    slot = tl.load(positions_ptr + row * positions_stride_b + column * positions_stride_n) if STORES else column
    scale_ptr = scales_ptr
    if scales_ptr is not None:
        scale_ptr += row * scales_stride_b + slot * scales_strides_sh[0]
    if block < first_blocks:
        _rotate_heads(
            first[0] + row * first_strides[0] + column * first_strides[2],
            first[1] + token * first_heads * size,
            None,
            own_angles,
            block * HEADS,
            first_heads,
            (first_strides[1], size, 0),
            SIZES,
            KIND,
        )
    elif block < first_blocks + second_blocks:
        _rotate_heads(
            second[0] + row * second_strides[0] + column * second_strides[2],
            second[1] + row * second_out_stride_b + slot * second_out_strides_sh[0],
            scale_ptr,
            own_angles,
            (block - first_blocks) * HEADS,
            second_heads,
            (second_strides[1], second_out_strides_sh[1], scales_strides_sh[1]),
            SIZES,
            KIND,
        )
    elif STORES:
        head = ((block - first_blocks - second_blocks) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
        copy_heads(
            values_ptr + row * values_stride_b + slot * values_strides_sh[0],
            None if scale_ptr is None else scale_ptr + 1,
            value_ptr + row * value_stride_b + column * value_stride_n,
            head,
            (values_strides_sh[1], scales_strides_sh[1], value_stride_h),
            value_stride_d,
            head < second_heads,
            VALUE_SIZE,
            VALUE_BLOCK,
        )


@functools.cache
def _sizes(most_heads: int, pairs: int, rest: int) -> tuple[int, int, int, int]:
    """Heads of a program, powers of two for `pairs` and for the `rest` of a head, and warps of a program."""
    block = triton.next_power_of_2(pairs)
    heads = min(triton.next_power_of_2(most_heads), max(1, _ELEMENTS // (2 * block)))
    rest_block = triton.next_power_of_2(max(rest, 1))
    return heads, block, rest_block, max(1, 2 * heads * block // _ELEMENTS_OF_WARP)


def rotary(cos, sin, states, kind):
    """See `rotary_reference.rotary`, for one or two tensors. One launch, which depends only on shapes and strides.

    Results have the memory layout of `[B, n, heads, D]`.
    """
    assert 1 <= len(states) <= 2, "one or two tensors are rotated"
    outputs = [_empty_like(one) for one in states]
    first, *second = [(one, out.transpose(1, 2)) for one, out in zip(states, outputs, strict=True)]
    _launch(cos, sin, first, second[0] if second else None, kind, None)
    return outputs


def rotate_and_store(cos, sin, states, kind, keys, values, value_states, positions, scales=None):
    """See `rotary_reference.rotate_and_store`; equal bit for bit. One launch; safe in a CUDA graph."""
    *query, key = states
    assert len(query) <= 1 and value_states.shape[:3] == key.shape[:3] and positions.shape == key.shape[::2]
    is_same = keys.dtype == key.dtype and values.dtype == value_states.dtype
    assert is_same or scales is not None, "states are stored as they are, or with scales"
    assert keys.stride(3) == values.stride(3) == 1 and keys.shape[2:] == (key.shape[1], key.shape[3])
    assert values.shape[2:] == value_states.shape[1::2], "shapes must agree"
    outputs = [_empty_like(one) for one in query]
    first = (query[0], outputs[0].transpose(1, 2)) if query else None
    _launch(cos, sin, first, (key, keys), kind, (value_states, values, positions, scales))
    return outputs


def _empty_like(states: torch.Tensor) -> torch.Tensor:
    """`[B, heads, n, D]` with the memory layout of `[B, n, heads, D]`."""
    batch, heads, columns, size = states.shape
    return torch.empty(batch, columns, heads, size, dtype=states.dtype, device=states.device).transpose(1, 2)


def _launch(
    cos: torch.Tensor,
    sin: torch.Tensor,
    first: tuple[torch.Tensor, torch.Tensor] | None,
    second: tuple[torch.Tensor, torch.Tensor] | None,
    kind: RotaryKind,
    stored: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None] | None,
) -> None:
    """Launch the kernel for `first` and `second`, pairs of states `[B, heads, n, D]` and result; either may be None.

    A result is `[B, n, heads, D]`, contiguous. With `stored` the second result is a cache; `stored` has new values
    `[B, heads, n, Dv]`, their cache, the positions in both caches, and scales or None.
    """
    assert kind.shared_angles or not kind.half_angles, "half as many angles as elements are shared"
    given = [one[0] for one in (first, second) if one is not None]
    batch, _, num_tokens, size = given[0].shape
    pairs = cos.shape[-1] if kind.half_angles else cos.shape[-1] // 2
    assert cos.shape == sin.shape and cos.shape[0] in (1, batch) and 2 * pairs <= size and cos.shape[1] == num_tokens
    assert all(one.shape[::2] == (batch, num_tokens) and one.shape[3] == size for one in given)
    assert len({one.dtype for one in given}) == 1, "query and key must have the same dtype"
    if batch * num_tokens == 0:
        return
    cos, sin = (one if one.stride(2) == 1 else one.contiguous() for one in (cos, sin))
    heads_of = [0 if one is None else one[0].shape[1] for one in (first, second)]
    (first, first_out), (second, second_out) = (
        (one[0] if one[0].stride(3) == 1 else one[0].contiguous(), one[1])
        for one in (first or second, second or first)  # nothing is read of the one without heads
    )
    value, values, positions, scales = stored or (None, None, None, None)
    value_size = 1 if value is None else value.shape[3]
    rest = size - 2 * pairs
    heads, block, rest_block, num_warps = _sizes(max(heads_of), pairs, rest)
    num_blocks = sum(-(-count // heads) for count in (*heads_of, heads_of[1] if stored else 0))
    _rotary_kernel[(batch * num_tokens, num_blocks)](
        (cos, sin),
        (first, first_out),
        (second, second_out),
        num_tokens,
        *heads_of,
        tuple((0 if len(one) == 1 else one.stride(0), one.stride(1)) for one in (cos, sin)),
        first.stride()[:3],
        second.stride()[:3],
        second_out.stride(0),
        second_out.stride()[1:3],
        value,
        values,
        positions,
        scales,
        *((0, 0, 0, 0) if value is None else value.stride()),
        *((0, (0, 0)) if values is None else (values.stride(0), values.stride()[1:3])),
        *((0, (0, 0)) if scales is None else (scales.stride(0), scales.stride()[1:3])),
        *((0, 0) if positions is None else positions.stride()),
        STORES=stored is not None,
        VALUE_SIZE=value_size,
        VALUE_BLOCK=triton.next_power_of_2(value_size),
        SIZES=(pairs, rest, heads, block, rest_block),
        KIND=(kind.inputs_interleaved, kind.outputs_interleaved, kind.shared_angles, kind.rounded),
        num_warps=num_warps,
        # Products and sums are not fused, because that would omit a rounding.
        enable_fp_fusion=False,
    )
