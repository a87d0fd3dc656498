"""Triton rotary position embedding of query and key in one launch; the reference is `rotary_reference.rotary`.

Shapes: query, key and results `[B, heads, n, D]`, cosines and sines `[B or 1, n, R]` or `[B or 1, n, R / 2]`. For pair
(x1, x2) of a head, with cosines (c1, c2) and sines (s1, s2) of its token:

    result = (x1 c1 - x2 s1, x2 c2 + x1 s2)

Every product and sum is rounded as PyTorch rounds it when each is a kernel of its own, so the result is the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .dependent_launch import dependent_launch, wait_for_inputs
from .types import RotaryKind

# Elements of a program, of one token and several heads.
_ELEMENTS, _ELEMENTS_OF_WARP = 1024, 512


@triton.jit
def _place(pair, second: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Index of the first or second element of pairs."""
    return 2 * pair + second if INTERLEAVED else pair + second * PAIRS


@triton.jit
def _rotate_heads(
    states_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    first_head,
    num_heads,
    stride_h,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    INPUTS_INTERLEAVED: tl.constexpr,
    OUTPUTS_INTERLEAVED: tl.constexpr,
    SHARED_ANGLES: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """HEADS heads of one token, from `first_head` on."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    head = first_head + tl.arange(0, HEADS)
    is_head = (head < num_heads)[:, None]
    states_ptr += head.to(tl.int64)[:, None] * stride_h
    out_ptr += head[:, None] * (2 * PAIRS + REST)
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
    tl.store(out_ptr + _place(pair, 0, PAIRS, OUTPUTS_INTERLEAVED)[None, :], (x1c1 - x2s1).to(dtype), mask=mask)
    tl.store(out_ptr + _place(pair, 1, PAIRS, OUTPUTS_INTERLEAVED)[None, :], (x2c2 + x1s2).to(dtype), mask=mask)
    if REST > 0:
        rest = tl.arange(0, REST_BLOCK)
        mask = is_head & (rest < REST)[None, :]
        kept = tl.load(states_ptr + (2 * PAIRS + rest)[None, :], mask=mask, other=0.0)
        tl.store(out_ptr + (2 * PAIRS + rest)[None, :], kept, mask=mask)


# do_not_specialize: else Triton compiles variants for values that are 1 or divisible by 16, which are no faster.
@triton.jit(do_not_specialize=["num_tokens", "first_heads", "second_heads"])
def _rotary_kernel(
    cos_ptr,
    sin_ptr,
    first_ptr,
    first_out_ptr,
    second_ptr,
    second_out_ptr,
    num_tokens,
    first_heads,
    second_heads,
    cos_stride_b,
    cos_stride_n,
    sin_stride_b,
    sin_stride_n,
    first_stride_b,
    first_stride_h,
    first_stride_n,
    second_stride_b,
    second_stride_h,
    second_stride_n,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    INPUTS_INTERLEAVED: tl.constexpr,
    OUTPUTS_INTERLEAVED: tl.constexpr,
    SHARED_ANGLES: tl.constexpr,
    ROUNDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """HEADS heads of one token: of the query, or in later blocks of the key.

    Grid: (B * n, blocks of query heads and then of key heads). Reads the program's heads, and the cosines and sines of
    its token; writes these heads of the result, `[B, n, heads, D]`.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row, column = token // num_tokens, token % num_tokens
    cos_ptr += row * cos_stride_b + column * cos_stride_n
    sin_ptr += row * sin_stride_b + column * sin_stride_n
    size: tl.constexpr = 2 * PAIRS + REST
    first_blocks = tl.cdiv(first_heads, HEADS)
    wait_for_inputs(PDL)
    if block < first_blocks:
        _rotate_heads(
            first_ptr + row * first_stride_b + column * first_stride_n,
            first_out_ptr + token * first_heads * size,
            cos_ptr,
            sin_ptr,
            block * HEADS,
            first_heads,
            first_stride_h,
            PAIRS,
            REST,
            HEADS,
            PAIR_BLOCK,
            REST_BLOCK,
            INPUTS_INTERLEAVED,
            OUTPUTS_INTERLEAVED,
            SHARED_ANGLES,
            ROUNDED,
        )
    else:
        _rotate_heads(
            second_ptr + row * second_stride_b + column * second_stride_n,
            second_out_ptr + token * second_heads * size,
            cos_ptr,
            sin_ptr,
            (block - first_blocks) * HEADS,
            second_heads,
            second_stride_h,
            PAIRS,
            REST,
            HEADS,
            PAIR_BLOCK,
            REST_BLOCK,
            INPUTS_INTERLEAVED,
            OUTPUTS_INTERLEAVED,
            SHARED_ANGLES,
            ROUNDED,
        )


@functools.cache
def _sizes(most_heads: int, pairs: int, rest: int) -> tuple[int, int, int, int]:
    """Heads of a program, powers of two for `pairs` and for the `rest` of a head, and warps."""
    block = triton.next_power_of_2(pairs)
    heads = min(triton.next_power_of_2(most_heads), max(1, _ELEMENTS // (2 * block)))
    rest_block = triton.next_power_of_2(max(rest, 1))
    return heads, block, rest_block, max(1, 2 * heads * block // _ELEMENTS_OF_WARP)


def rotary(
    cos: torch.Tensor, sin: torch.Tensor, states: Sequence[torch.Tensor], kind: RotaryKind
) -> list[torch.Tensor]:
    """See `rotary_reference.rotary`; of one or two tensors. One launch that depends on shapes and strides only.

    Results have the memory of `[B, n, heads, D]`.
    """
    assert 1 <= len(states) <= 2, "one or two tensors are rotated"
    assert kind.shared_angles or not kind.half_angles, "half as many angles as elements are shared"
    batch, _, num_tokens, size = states[0].shape
    pairs = cos.shape[-1] if kind.half_angles else cos.shape[-1] // 2
    assert cos.shape == sin.shape and cos.shape[0] in (1, batch) and 2 * pairs <= size and cos.shape[1] == num_tokens
    assert all(one.shape[::2] == (batch, num_tokens) and one.shape[3] == size for one in states)
    assert len({one.dtype for one in states}) == 1, "query and key must have the same dtype"
    states = [one if one.stride(3) == 1 else one.contiguous() for one in states]
    cos, sin = (one if one.stride(2) == 1 else one.contiguous() for one in (cos, sin))
    outputs = [
        torch.empty(batch, num_tokens, one.shape[1], size, dtype=one.dtype, device=one.device).transpose(1, 2)
        for one in states
    ]
    first, second = states[0], states[-1]
    rest = size - 2 * pairs
    heads, block, rest_block, num_warps = _sizes(max(one.shape[1] for one in states), pairs, rest)
    num_blocks = sum(-(-one.shape[1] // heads) for one in states)
    if batch * num_tokens == 0:
        return outputs
    _rotary_kernel[(batch * num_tokens, num_blocks)](
        cos,
        sin,
        first,
        outputs[0],
        second,
        outputs[-1],
        num_tokens,
        first.shape[1],
        second.shape[1],
        *(0 if len(one) == 1 and axis == 0 else one.stride(axis) for one in (cos, sin) for axis in (0, 1)),
        *first.stride()[:3],
        *second.stride()[:3],
        PAIRS=pairs,
        REST=rest,
        HEADS=heads,
        PAIR_BLOCK=block,
        REST_BLOCK=rest_block,
        INPUTS_INTERLEAVED=kind.inputs_interleaved,
        OUTPUTS_INTERLEAVED=kind.outputs_interleaved,
        SHARED_ANGLES=kind.shared_angles,
        ROUNDED=kind.rounded,
        num_warps=num_warps,
        # Products that are added are not fused with the sum, which would leave out a rounding.
        enable_fp_fusion=False,
        **dependent_launch(first.device),
    )
    return outputs
