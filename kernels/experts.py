"""Triton linear layers of a mixture of experts; the references are in `experts_reference`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Unspecialised, kernel, wait_for_inputs
from .linear_tiles import choose_stored_tiles
from .stored_weight import DEPTHS, SPLITS, stored_arguments, stored_sums
from .types import StoredWeight

# Pairs, and also blocks, of a program of the plan, and pairs that it compares them with at a time.
PAIR_BLOCK, CHUNK = tl.constexpr(16), tl.constexpr(128)
# Columns of a program of the weighted sum.
SUM_BLOCK = 512


@kernel
def _plan_kernel(
    ids_ptr,
    plan_ptr,
    num_pairs: Unspecialised,
    num_experts: Unspecialised,
    rows: Unspecialised,
    EXPERTS: tl.constexpr,
):
    """Compute PAIR_BLOCK columns of the plan.

    Grid: (blocks of PAIR_BLOCK pairs,). Reads all of `ids` `[num_pairs]`; writes its pairs to `plan[0]` at their sorted
    indices, and `plan[1:, j]` for the blocks j with the same indices as its pairs; `plan` is `[4, num_pairs]`.

    The sorted index of a pair is the number of pairs with a smaller expert, or with the same expert and a smaller
    index. With c[e] pairs of expert e, block j is of the first expert e with sum_{e' <= e} ceil(c[e'] / rows) > j.
    """
    index = tl.program_id(0) * PAIR_BLOCK + tl.arange(0, PAIR_BLOCK)
    is_index = index < num_pairs
    wait_for_inputs()
    expert_id = tl.minimum(tl.load(ids_ptr + index, mask=is_index, other=0), num_experts).to(tl.int32)
    sorted_index = tl.zeros([PAIR_BLOCK], tl.int32)
    counts = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        other = start + tl.arange(0, CHUNK)
        other_id = tl.minimum(tl.load(ids_ptr + other, mask=other < num_pairs, other=0), num_experts).to(tl.int32)
        other_id = tl.where(other < num_pairs, other_id, EXPERTS - 1)
        counts += tl.histogram(other_id, EXPERTS)
        is_before = (other_id[None, :] < expert_id[:, None]) | (
            (other_id[None, :] == expert_id[:, None]) & (other[None, :] < index[:, None])
        )
        sorted_index += tl.sum(is_before.to(tl.int32), axis=1)
    tl.store(plan_ptr + sorted_index, index, mask=is_index)

    # From here on, `index` is the index of a block.
    expert = tl.arange(0, EXPERTS)
    counts = tl.where(expert <= num_experts, counts, 0)
    blocks = (counts + rows - 1) // rows
    last_pair = tl.cumsum(counts, 0)
    last_block = tl.cumsum(blocks, 0)
    block_expert = tl.sum((last_block[None, :] <= index[:, None]).to(tl.int32), axis=1)
    is_expert = expert[None, :] == block_expert[:, None]
    last = tl.sum(tl.where(is_expert, last_pair[None, :], 0), axis=1)
    first_of_expert = last - tl.sum(tl.where(is_expert, counts[None, :], 0), axis=1)
    block_of_expert = index - tl.sum(tl.where(is_expert, (last_block - blocks)[None, :], 0), axis=1)
    is_block = block_expert < EXPERTS
    first = tl.where(is_block, first_of_expert + block_of_expert * rows, num_pairs)
    plan_ptr += num_pairs
    tl.store(plan_ptr + index, tl.where(is_block, block_expert, -1), mask=is_index)
    plan_ptr += num_pairs
    tl.store(plan_ptr + index, first, mask=is_index)
    plan_ptr += num_pairs
    tl.store(plan_ptr + index, tl.where(is_block, tl.minimum(first + rows, last), num_pairs), mask=is_index)


def _choose_tiles(rows: int, itemsize: int) -> tuple[int, int, int, int]:
    """Output columns, input features at a time, warps and pipeline stages of a program.

    Measured on one H200 in bfloat16 with shapes of gpt-oss. One token, 16 rows, up and down projection: 34 and 20 us;
    with 32 columns 47 and 21, with 16 columns and 256 features 60 and 39. 1024 tokens, 64 rows, both projections
    together: 675 us; with 64 columns 808, with 32 rows 995.
    """
    columns, features = (64, 128) if rows <= 16 else (128, 64)
    return columns, features * 2 // itemsize, 4, 3


@kernel
def _expert_linear_kernel(
    inputs_ptr,
    weight_ptr,
    bias_ptr,
    plan_ptr,
    out_ptr,
    num_pairs: Unspecialised,
    pairs_per_input: Unspecialised,
    weight_strides,
    bias_stride,
    scales_strides,
    parts,
    FORM: tl.constexpr,
    IS_EVEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    IN_BLOCK: tl.constexpr,
):
    """OUT_BLOCK output columns of one block of the plan, accumulated in float32.

    Grid: (blocks of output columns, blocks of the plan). Reads the block's pairs from `plan`, their `inputs`, and the
    program's columns of the weight and bias of the block's expert; writes `out[pair, column]`, 0 for pairs without an
    expert. Programs after the last block return at once.
    """
    block = tl.program_id(1)
    wait_for_inputs()
    expert = tl.load(plan_ptr + num_pairs + block)
    if expert < 0:
        return
    first = tl.load(plan_ptr + 2 * num_pairs + block)
    end = tl.load(plan_ptr + 3 * num_pairs + block)
    sorted_index = first + tl.arange(0, ROWS)
    is_row = sorted_index < end
    pair = tl.load(plan_ptr + sorted_index, mask=is_row, other=0)
    column = tl.program_id(0) * OUT_BLOCK + tl.arange(0, OUT_BLOCK)
    is_column = column < OUT
    total = tl.zeros([ROWS, OUT_BLOCK], tl.float32)
    if expert < NUM_EXPERTS:
        if FORM is None:
            feature = tl.arange(0, IN_BLOCK)
            inputs = inputs_ptr + (pair // pairs_per_input)[:, None].to(tl.int64) * IN + feature[None, :]
            weight = weight_ptr + expert.to(tl.int64) * weight_strides[0]
            weight += (
                column[None, :].to(tl.int64) * weight_strides[1] + feature[:, None].to(tl.int64) * weight_strides[2]
            )
            for start in range(0, IN, IN_BLOCK):
                is_feature = feature < IN - start
                x = tl.load(inputs, mask=is_row[:, None] & is_feature[None, :], other=0.0)
                w = tl.load(weight, mask=is_feature[:, None] & is_column[None, :], other=0.0)
                total = tl.dot(x, w, total, input_precision="ieee")
                inputs += IN_BLOCK
                weight += IN_BLOCK * weight_strides[2]
        else:
            split_row = tl.arange(0, SPLITS * ROWS) % ROWS
            is_split_row = split_row < end - first
            split_pair = tl.load(plan_ptr + first + split_row, mask=is_split_row, other=0)
            first_column = tl.program_id(0) * OUT_BLOCK
            sums = stored_sums(
                weight_ptr + expert.to(tl.int64) * weight_strides[0] + first_column.to(tl.int64) * weight_strides[1],
                (parts[0] + expert.to(tl.int64) * scales_strides[0], parts[1], parts[2], parts[3], parts[4]),
                inputs_ptr + (split_pair // pairs_per_input).to(tl.int64) * IN,
                is_split_row,
                tl.minimum(column, OUT - 1) - first_column,
                (0, first_column, OUT - 1),
                IN,
                (weight_strides[1], scales_strides[1]),
                FORM,
                (1, OUT_BLOCK, IN_BLOCK),
                IS_EVEN,
            )
            total = tl.trans(sums)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + expert * bias_stride + column, mask=is_column, other=0.0)
            total += bias.to(tl.float32)[None, :]
    out = out_ptr + pair[:, None].to(tl.int64) * OUT + column[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@kernel
def _sum_kernel(outputs_ptr, weights_ptr, out_ptr, width: Unspecialised, K: tl.constexpr, BLOCK: tl.constexpr):
    """out[token] = sum over k of outputs[token * K + k] * weights[token, k]; products are rounded to the dtype of out.

    Grid: (tokens, blocks of H).
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < width
    wait_for_inputs()
    dtype = out_ptr.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for pair in tl.static_range(K):
        row = token * K + pair
        x = tl.load(outputs_ptr + row * width + column, mask=is_column, other=0.0).to(tl.float32)
        total += (x * tl.load(weights_ptr + row).to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(out_ptr + token * width + column, total.to(dtype), mask=is_column)


def sum_experts(outputs, weights):
    """See `experts_reference.sum_experts`; the pairs of a token are summed in their order. One launch."""
    dtype, width = torch.promote_types(outputs.dtype, weights.dtype), outputs.shape[1]
    num_tokens, top_k = weights.shape
    assert len(outputs) == num_tokens * top_k, "shapes must agree"
    out = outputs.new_empty(num_tokens, width, dtype=dtype)
    _sum_kernel[(num_tokens, triton.cdiv(width, SUM_BLOCK))](
        outputs.contiguous(),
        weights.contiguous(),
        out,
        width,
        K=top_k,
        BLOCK=SUM_BLOCK,
        num_warps=4,
    )
    return out


def plan_experts(expert_ids, num_experts, rows):
    """See `experts_reference.plan_experts`; equal bit for bit. One launch; safe in a CUDA graph."""
    ids = expert_ids.reshape(-1)
    num_pairs = len(ids)
    plan = torch.empty(4, num_pairs, dtype=torch.int32, device=ids.device)
    _plan_kernel[(triton.cdiv(num_pairs, PAIR_BLOCK.value),)](
        ids,
        plan,
        num_pairs,
        num_experts,
        rows,
        EXPERTS=triton.next_power_of_2(num_experts + 2),
    )
    return plan


def expert_linear(inputs, weight, bias, plan, rows, is_transposed):
    """See `experts_reference.expert_linear`; accumulates in float32. One launch; safe in a CUDA graph."""
    stored = weight if isinstance(weight, StoredWeight) else None
    values = weight if stored is None else stored.values.view(torch.uint8)
    num_pairs, num_experts = plan.shape[1], len(values)
    size_out, size_in = weight.shape[:0:-1] if is_transposed else weight.shape[1:]
    assert stored is None or (stored.zeros is stored.outer is None and not is_transposed)
    assert inputs.shape[1] == size_in and num_pairs % len(inputs) == 0, "shapes must agree"
    assert bias is None or (bias.shape == (num_experts, size_out) and bias.stride(1) == 1)
    inputs = inputs.contiguous()
    out = inputs.new_empty(num_pairs, size_out)
    if stored is None:
        out_block, in_block, num_warps, num_stages = _choose_tiles(rows, inputs.itemsize)
    else:
        _, out_block, in_block, num_warps, num_stages = choose_stored_tiles(rows, stored, inputs.itemsize)
    num_blocks = min(num_pairs, num_experts + 1 + num_pairs // rows)
    _expert_linear_kernel[(triton.cdiv(size_out, out_block), num_blocks)](
        inputs,
        values,
        bias,
        plan,
        out,
        num_pairs,
        num_pairs // len(inputs),
        values.mT.stride() if is_transposed else values.stride(),
        0 if bias is None else bias.stride(0),
        (0, 0) if stored is None else stored.scales.stride()[:2],
        **stored_arguments(inputs, stored, in_block),
        IS_EVEN=size_in % (SPLITS.value * DEPTHS.value) == 0,
        NUM_EXPERTS=num_experts,
        IN=size_in,
        OUT=size_out,
        ROWS=rows,
        OUT_BLOCK=out_block,
        IN_BLOCK=in_block,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return out
