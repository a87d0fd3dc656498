"""Triton linear layer with a `StoredWeight`, for many rows; the reference is `linear_reference.linear`.

`linear` widens a weight once for every 32 rows. This kernel widens a tile once for up to 128 rows, as the first
operand, in registers, of products of four warps together (wgmma). Each sum is cut into PARTS of the input features, one
for a program, so that narrow layers have enough programs. `_add_parts_kernel` adds the parts in order. The bits differ
from those of `linear`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Unspecialised, has_pdl, kernel, wait_for_inputs
from .linear import GROUP, request_lines
from .stored_weight import load_scales, numbers_per_byte, stored_arguments, widen_bytes, widen_halves
from .types import LinearTiles, StoredWeight

# Results of a program of `_add_parts_kernel`.
_RESULTS = tl.constexpr(1024)
_FEW_ROWS = tl.constexpr(32)


@kernel
def _linear_kernel(
    inputs_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows: Unspecialised,
    size_out,
    size_in,
    inputs_stride,
    weight_stride,
    scales_stride,
    parts,
    FORM: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """FEATURES output features of ROWS rows, or a part of their sums.

    Grid: (blocks of output features, blocks of rows, PARTS). Reads the program's rows of `inputs` and `weight`; writes
    their `out`, or with PARTS > 1 float32 sums without the bias to `out` `[PARTS, n, out]`. `parts` and FORM are those
    of `stored_sums`.
    """
    zeros_ptr, outer_ptr, codes_ptr = parts[1], parts[2], parts[3]
    FORMAT: tl.constexpr = FORM[0]
    SCALES: tl.constexpr = FORM[1]
    SCALE_ROWS: tl.constexpr = FORM[2]
    GROUP_SIZE: tl.constexpr = FORM[3]
    ASM: tl.constexpr = FORM[4]
    row_block, feature_block = tl.swizzle2d(
        tl.program_id(1), tl.program_id(0), tl.num_programs(1), tl.num_programs(0), GROUP
    )
    PER_BYTE: tl.constexpr = numbers_per_byte(FORM)
    SCALES_NUMBERS: tl.constexpr = GROUP_SIZE is not None and GROUP_SIZE < DEPTH
    # With few rows the product of a tile takes less time than one that goes on with the sums, and the scales are cheap.
    SCALES_PRODUCTS: tl.constexpr = ROWS <= _FEW_ROWS if GROUP_SIZE is None else GROUP_SIZE >= DEPTH
    part = tl.program_id(2)
    feature = feature_block * FEATURES + tl.arange(0, FEATURES)
    own_feature = tl.minimum(feature, size_out - 1)
    row = row_block * ROWS + tl.arange(0, ROWS)
    depth, stored_depth = tl.arange(0, DEPTH), tl.arange(0, DEPTH // PER_BYTE)
    weight = weight_ptr + own_feature.to(tl.int64)[:, None] * weight_stride + stored_depth[None, :]
    part_size = tl.cdiv(size_in, PARTS * DEPTH) * DEPTH
    if has_pdl():
        first = feature_block * FEATURES
        first_row = weight_ptr + first.to(tl.int64) * weight_stride + part * part_size // PER_BYTE
        request_lines(first_row, weight_stride, size_out - first, 128, FEATURES)
    scales_at = own_feature // SCALE_ROWS * scales_stride
    zeros = tl.full([FEATURES], 8, tl.float32)
    if GROUP_SIZE is None:
        scale = load_scales(parts, scales_at, None, SCALES)
        if zeros_ptr is not None:
            zeros = tl.load(zeros_ptr + scales_at).to(tl.float32)
    wait_for_inputs()

    is_row = (row < num_rows)[:, None]
    inputs = inputs_ptr + row.to(tl.int64)[:, None] * inputs_stride + depth[None, :]
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    for start in range(part * part_size, tl.minimum((part + 1) * part_size, size_in), DEPTH):
        w = tl.load(weight + start // PER_BYTE)
        x = tl.load(inputs + start, mask=is_row, other=0.0)
        if PER_BYTE == 1:
            w = widen_bytes(w, FORMAT, x.dtype, ASM, 2)
        else:
            if zeros_ptr is not None and GROUP_SIZE is not None:
                zeros = tl.load(zeros_ptr + scales_at + start // GROUP_SIZE).to(tl.float32)
            w = tl.reshape(tl.join(*widen_halves(w, zeros, FORMAT, x.dtype, ASM, 1)), [FEATURES, DEPTH])
        if SCALES_NUMBERS:
            at = scales_at[:, None] + start // GROUP_SIZE + tl.arange(0, DEPTH // GROUP_SIZE)[None, :]
            numbers = load_scales(parts, at, None, SCALES).to(x.dtype)
            spread: tl.constexpr = [FEATURES, DEPTH // GROUP_SIZE, GROUP_SIZE]
            w *= tl.reshape(tl.broadcast_to(numbers[:, :, None], spread), [FEATURES, DEPTH])
        if SCALES_PRODUCTS:
            if GROUP_SIZE is not None:
                scale = load_scales(parts, scales_at + start // GROUP_SIZE, None, SCALES)
            total += tl.dot(w, tl.trans(x), input_precision="ieee") * scale[:, None]
        else:
            total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
    if GROUP_SIZE is None and not SCALES_PRODUCTS:
        total *= scale[:, None]
    if outer_ptr is not None and codes_ptr is None:
        total *= 1.0 / tl.load(outer_ptr).to(tl.float32)
    if PARTS == 1 and bias_ptr is not None:
        total += tl.load(bias_ptr + own_feature).to(tl.float32)[:, None]
    out = out_ptr + (part * num_rows + row).to(tl.int64)[:, None] * size_out + feature[None, :]
    tl.store(out, tl.trans(total).to(out_ptr.dtype.element_ty), mask=is_row & (feature < size_out)[None, :])


@kernel
def _add_parts_kernel(sums_ptr, bias_ptr, out_ptr, num_rows: Unspecialised, size_out, PARTS: tl.constexpr):
    """Results from the parts of sums `[PARTS, n, out]`: the total plus the bias.

    Grid: (blocks of _RESULTS results,). Reads the program's `sums` of all parts; writes its `out`.
    """
    index = tl.program_id(0).to(tl.int64) * _RESULTS + tl.arange(0, _RESULTS)
    size = num_rows.to(tl.int64) * size_out
    is_own = index < size
    wait_for_inputs()
    total = tl.zeros([_RESULTS], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(sums_ptr + part * size + index, mask=is_own, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + index % size_out).to(tl.float32)
    tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), mask=is_own)


def linear(
    inputs: torch.Tensor, weight: StoredWeight, bias: torch.Tensor | None, tiles: LinearTiles, num_parts: int
) -> torch.Tensor:
    """See `linear_reference.linear`; sums have `num_parts` parts. One launch or two, by shapes and strides only.

    A tile's depth must divide the input features. It must also divide the weight's group, or the group divides it and
    there are no zero points. Inputs must not need rounding.
    """
    (num_rows, size_in), size_out = inputs.shape, weight.shape[0]
    assert weight.shape[1] == size_in and inputs.stride(1) == 1, "rows must have unit stride"
    assert size_in % tiles.depth == 0 and num_parts <= size_in // tiles.depth, "tiles must divide the input features"
    assert weight.group % tiles.depth == 0 or (tiles.depth % weight.group == 0 and weight.zeros is None)
    assert bias is None or bias.is_contiguous()
    out = inputs.new_empty(num_rows, size_out)
    sums = out if num_parts == 1 else inputs.new_empty(num_parts, num_rows, size_out, dtype=torch.float32)
    _linear_kernel[(triton.cdiv(size_out, tiles.features), triton.cdiv(num_rows, tiles.rows), num_parts)](
        inputs,
        weight.values.view(torch.uint8),
        bias,
        sums,
        num_rows,
        size_out,
        size_in,
        inputs.stride(0),
        weight.values.stride(0),
        weight.scales.stride(0),
        **stored_arguments(inputs, weight, min(tiles.depth, weight.group)),
        PARTS=num_parts,
        **tiles.options,
    )
    if num_parts > 1:
        _add_parts_kernel[(triton.cdiv(num_rows * size_out, _RESULTS.value),)](
            sums,
            bias,
            out,
            num_rows,
            size_out,
            PARTS=num_parts,
            num_warps=4,
        )
    return out
