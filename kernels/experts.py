"""Triton products of a mixture of experts; defined by `reference.plan_experts` and `reference.expert_linear`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Pairs, and blocks, that a program of the plan is for, and pairs that it compares them with at once.
_OWN = 16
_CHUNK = 128


# Triton would build anew for those of the arguments so named that are 1 or divisible by 16, to no gain.
@triton.jit(do_not_specialize=["num_pairs", "num_experts", "rows"])
def _plan_kernel(
    ids_ptr,
    plan_ptr,
    num_pairs,
    num_experts,
    rows,
    OWN: tl.constexpr,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    is_own = own < num_pairs
    own_id = tl.minimum(tl.load(ids_ptr + own, mask=is_own, other=0), num_experts).to(tl.int32)
    rank = tl.zeros([OWN], tl.int32)
    counts = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        other = start + tl.arange(0, CHUNK)
        other_id = tl.minimum(tl.load(ids_ptr + other, mask=other < num_pairs, other=0), num_experts).to(tl.int32)
        other_id = tl.where(other < num_pairs, other_id, EXPERTS - 1)
        counts += tl.histogram(other_id, EXPERTS)
        is_before = (other_id[None, :] < own_id[:, None]) | (
            (other_id[None, :] == own_id[:, None]) & (other[None, :] < own[:, None])
        )
        rank += tl.sum(is_before.to(tl.int32), axis=1)
    tl.store(plan_ptr + rank, own, mask=is_own)

    # From here on `own` numbers blocks. Each is of the first expert whose blocks do not all come before it.
    expert = tl.arange(0, EXPERTS)
    counts = tl.where(expert <= num_experts, counts, 0)
    blocks = (counts + rows - 1) // rows
    last_pair = tl.cumsum(counts, 0)
    last_block = tl.cumsum(blocks, 0)
    owner = tl.sum((last_block[None, :] <= own[:, None]).to(tl.int32), axis=1)
    is_owner = expert[None, :] == owner[:, None]
    last = tl.sum(tl.where(is_owner, last_pair[None, :], 0), axis=1)
    first_of_owner = last - tl.sum(tl.where(is_owner, counts[None, :], 0), axis=1)
    block_of_owner = own - tl.sum(tl.where(is_owner, (last_block - blocks)[None, :], 0), axis=1)
    is_block = owner < EXPERTS
    first = tl.where(is_block, first_of_owner + block_of_owner * rows, num_pairs)
    plan_ptr += num_pairs
    tl.store(plan_ptr + own, tl.where(is_block, owner, -1), mask=is_own)
    plan_ptr += num_pairs
    tl.store(plan_ptr + own, first, mask=is_own)
    plan_ptr += num_pairs
    tl.store(plan_ptr + own, tl.where(is_block, tl.minimum(first + rows, last), num_pairs), mask=is_own)


def _choose_tiles(rows: int, itemsize: int) -> tuple[int, int, int, int]:
    """Columns and summands of a block's products that a program takes at a time, its warps and stages.

    One H200, bfloat16, 16 rows, up and down of gpt-oss shapes, one token: 34 and 20 us; with 32 columns 47 and 21, with
    16 by 256 summands 60 and 39. 64 rows, both, 1024 tokens: 675 us; with 64 columns 808, with 32 rows 995.
    """
    columns, summands = (64, 128) if rows <= 16 else (128, 64)
    return columns, summands * 2 // itemsize, 4, 3


@triton.jit(do_not_specialize=["num_pairs", "shared_by"])
def _expert_linear_kernel(
    inputs_ptr,
    weight_ptr,
    bias_ptr,
    plan_ptr,
    out_ptr,
    num_pairs,
    shared_by,
    weight_stride_e,
    weight_stride_o,
    weight_stride_i,
    bias_stride,
    NUM_EXPERTS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    IN_BLOCK: tl.constexpr,
):
    block = tl.program_id(1)
    expert = tl.load(plan_ptr + num_pairs + block)
    if expert < 0:
        return
    first = tl.load(plan_ptr + 2 * num_pairs + block)
    last = tl.load(plan_ptr + 3 * num_pairs + block)
    place = first + tl.arange(0, ROWS)
    is_row = place < last
    pair = tl.load(plan_ptr + place, mask=is_row, other=0)
    column = tl.program_id(0) * OUT_BLOCK + tl.arange(0, OUT_BLOCK)
    is_column = column < OUT
    total = tl.zeros([ROWS, OUT_BLOCK], tl.float32)
    if expert < NUM_EXPERTS:
        part = tl.arange(0, IN_BLOCK)
        inputs = inputs_ptr + (pair // shared_by)[:, None].to(tl.int64) * IN + part[None, :]
        weight = weight_ptr + expert.to(tl.int64) * weight_stride_e
        weight += column[None, :].to(tl.int64) * weight_stride_o + part[:, None].to(tl.int64) * weight_stride_i
        for start in range(0, IN, IN_BLOCK):
            is_part = part < IN - start
            x = tl.load(inputs, mask=is_row[:, None] & is_part[None, :], other=0.0)
            w = tl.load(weight, mask=is_part[:, None] & is_column[None, :], other=0.0)
            total = tl.dot(x, w, total, input_precision="ieee")
            inputs += IN_BLOCK
            weight += IN_BLOCK * weight_stride_i
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert * bias_stride + column, mask=is_column, other=0.0)
            total += bias.to(tl.float32)[None, :]
    out = out_ptr + pair[:, None].to(tl.int64) * OUT + column[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def plan_experts(expert_ids: torch.Tensor, num_experts: int, rows: int) -> torch.Tensor:
    """See `reference.plan_experts`, bit for bit. One launch; a CUDA graph can hold it."""
    ids = expert_ids.reshape(-1)
    num_pairs = len(ids)
    plan = torch.empty(4, num_pairs, dtype=torch.int32, device=ids.device)
    _plan_kernel[(triton.cdiv(num_pairs, _OWN),)](
        ids,
        plan,
        num_pairs,
        num_experts,
        rows,
        OWN=_OWN,
        CHUNK=_CHUNK,
        EXPERTS=triton.next_power_of_2(num_experts + 2),
    )
    return plan


def expert_linear(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    plan: torch.Tensor,
    rows: int,
    is_transposed: bool,
) -> torch.Tensor:
    """See `reference.expert_linear`; sums are in float32. One launch; a CUDA graph can hold it."""
    num_pairs, num_experts = plan.shape[1], len(weight)
    size_out, size_in = weight.shape[:0:-1] if is_transposed else weight.shape[1:]
    assert inputs.shape[1] == size_in and num_pairs % len(inputs) == 0, "shapes must agree"
    assert bias is None or (bias.shape == (num_experts, size_out) and bias.stride(1) == 1)
    inputs = inputs.contiguous()
    out = inputs.new_empty(num_pairs, size_out)
    out_block, in_block, num_warps, num_stages = _choose_tiles(rows, inputs.itemsize)
    stride_e, stride_o, stride_i = weight.mT.stride() if is_transposed else weight.stride()
    num_blocks = min(num_pairs, num_experts + 1 + num_pairs // rows)
    _expert_linear_kernel[(triton.cdiv(size_out, out_block), num_blocks)](
        inputs,
        weight,
        bias,
        plan,
        out,
        num_pairs,
        num_pairs // len(inputs),
        stride_e,
        stride_o,
        stride_i,
        0 if bias is None else bias.stride(0),
        NUM_EXPERTS=num_experts,
        IN=size_in,
        OUT=size_out,
        HAS_BIAS=bias is not None,
        ROWS=rows,
        OUT_BLOCK=out_block,
        IN_BLOCK=in_block,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out
