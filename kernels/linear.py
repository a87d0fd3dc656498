"""Triton linear layer, also for gate and up of a gated MLP; the reference is `linear_reference.linear`.

With few rows the layer takes the time of reading its weight. The weight is the first operand of the products, so that
tiles have many output features and few rows. One program adds all products of an output in float32, with k ascending.
Every tile size has this order, so the bits of a row's result do not depend on the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .gated_activation import activate
from .launch import Unspecialised, has_pdl, kernel, start_next, wait_for_inputs
from .low_rank_tile import find_first_up, load_first_up, updated
from .stored_weight import DEPTHS, SPLITS, numbers_per_byte, size_of_split, stored_arguments, stored_sums
from .types import LinearTiles, StoredWeight

# Blocks of rows in a group of the swizzle: programs that start together share blocks in the L2 cache.
GROUP = tl.constexpr(8)
# Most programs of a kernel that run at once, three on each multiprocessor of an H100 or H200.
_MOST_AT_ONCE = tl.constexpr(3 * 132)
# 128-byte lines of each row of the weight that a program prefetches before the kernel before it has ended.
_LINES = tl.constexpr(4)


@triton.jit
def request_line(at):
    """Fetch the 128-byte lines at the addresses `at` into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def request_lines(first_row_ptr, stride_bytes, rows, apart, ROWS: tl.constexpr):
    """Fetch _LINES lines of up to ROWS rows of the weight into the L2 cache: the first one of each row, and others
    every `apart` bytes after it."""
    index = tl.arange(0, ROWS * _LINES)
    row = tl.minimum(index // _LINES, rows - 1)
    request_line(first_row_ptr.to(tl.int64) + row.to(tl.int64) * stride_bytes + index % _LINES * apart)


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
    updates,
    KIND: tl.constexpr,
    FORM: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIBDEVICE: tl.constexpr,
):
    """FEATURES output features of ROWS rows; with ACTIVATION FEATURES / 2 from each half of the weight.

    Grid: (blocks of output features, blocks of rows). Reads the program's rows of `inputs` and `weight`; writes their
    `out`. IS_EVEN: whether DEPTH divides the input features.
    """
    row_block, feature_block = tl.swizzle2d(
        tl.program_id(1), tl.program_id(0), tl.num_programs(1), tl.num_programs(0), GROUP
    )
    IS_GATED: tl.constexpr = ACTIVATION is not None
    PARTS: tl.constexpr = 2 if IS_GATED else 1
    OWN: tl.constexpr = FEATURES // PARTS
    size_out = size_out // PARTS
    first = feature_block * OWN
    # With ACTIVATION each feature of the gate is followed by its feature of the other half.
    index = tl.arange(0, FEATURES)
    feature = first + index // PARTS
    row = tl.arange(0, ROWS)
    first_row = (row_block * ROWS).to(tl.int64)
    depth = tl.arange(0, DEPTH)
    is_row = row < num_rows - row_block * ROWS
    weight_ptr += first.to(tl.int64) * weight_stride
    if has_pdl():
        stride_bytes = weight_stride * (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
        # The sums of a stored weight begin at several places at once.
        apart = 128 if FORM is None else size_of_split(size_in) // numbers_per_byte(FORM)
        request_lines(weight_ptr, stride_bytes, size_out - first, apart, OWN)
        if IS_GATED:
            other_half = weight_ptr + size_out.to(tl.int64) * weight_stride
            request_lines(other_half, stride_bytes, size_out - first, apart, OWN)
    starts_next = tl.num_programs(0) * tl.num_programs(1) <= _MOST_AT_ONCE
    # Features beyond the last one repeat it and are not written.
    last = tl.minimum(first + OWN, size_out) - 1
    feature = tl.minimum(feature, last)
    own_feature = (feature - first + index % PARTS * size_out).to(tl.int64)
    if FORM is None:
        if KIND is None:
            wait_for_inputs(starts_next)
        else:
            # The kernel before this one has let it start after its inputs were complete.
            adapters_ptr, places_ptr, narrow_ptr, count, scales_ptr = updates
            bits = tl.load(adapters_ptr + first_row + row, mask=is_row, other=0)
            is_other = index % PARTS > 0
            found = find_first_up(places_ptr, first, is_other, IS_GATED, KIND)
        weight = weight_ptr + own_feature[:, None] * weight_stride + depth[None, :]
        inputs = inputs_ptr + first_row * inputs_stride + row[:, None] * inputs_stride + depth[None, :]
        total = tl.zeros([FEATURES, ROWS], tl.float32)
        for start in range(0, size_in, DEPTH):
            if IS_EVEN:
                w = tl.load(weight + start)
                x = tl.load(inputs + start, mask=is_row[:, None], other=0.0)
            else:
                is_depth = (depth < size_in - start)[None, :]
                w = tl.load(weight + start, mask=is_depth, other=0.0)
                x = tl.load(inputs + start, mask=is_row[:, None] & is_depth, other=0.0)
            total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
    else:
        split_row = tl.arange(0, SPLITS * ROWS) % ROWS
        total = stored_sums(
            weight_ptr,
            parts,
            inputs_ptr + first_row * inputs_stride + split_row * inputs_stride,
            split_row < num_rows - row_block * ROWS,
            own_feature,
            (size_out, first, size_out - 1),
            size_in,
            (weight_stride, scales_stride),
            FORM,
            (PARTS, FEATURES, DEPTH),
            IS_EVEN,
            starts_next,
        )
    if KIND is not None:
        up = load_first_up(found, bits, first, feature, is_other, KIND)
        wait_for_inputs(starts_next)
    start_next()
    if bias_ptr is not None:
        total += tl.load(bias_ptr + first + own_feature).to(tl.float32)[:, None]
    result = total.to(out_ptr.dtype.element_ty)
    if KIND is not None:
        result = updated(
            result,
            up,
            places_ptr,
            (narrow_ptr, num_rows, count, scales_ptr),
            first_row + row,
            bits,
            first,
            last,
            feature,
            is_other,
            IS_GATED,
            KIND,
        )
    if IS_GATED:
        gate, other = tl.split(tl.trans(tl.reshape(result, [OWN, PARTS, ROWS]), 0, 2, 1))
        gate = activate(gate.to(tl.float32), ACTIVATION, LIBDEVICE).to(result.dtype)
        result = (gate.to(tl.float32) * other.to(tl.float32)).to(result.dtype)
    column = first + tl.arange(0, OWN)
    out = out_ptr + first_row * size_out + row[:, None] * size_out + column[None, :]
    tl.store(out, tl.trans(result), mask=is_row[:, None] & (column < size_out)[None, :])


def linear(
    inputs: torch.Tensor,
    weight: torch.Tensor | StoredWeight,
    bias: torch.Tensor | None,
    tiles: LinearTiles,
    activation: str | None = None,
    updates: tuple | None = None,
    kind: tuple | None = None,
) -> torch.Tensor:
    """See `linear_reference.linear`; `tiles` are the tiles. One launch, which depends only on shapes and strides.

    `updates` and `kind` are `low_rank`'s, which adds updates to the outputs before the activation.

    The weight may be a slice of the rows of a larger weight. If a stored weight has scales for groups of inputs, a
    tile's depth must divide the group, or scales have 8 bits and the group divides the depth.
    """
    num_rows, size_in = inputs.shape
    size_out = weight.shape[0]
    stored = weight if isinstance(weight, StoredWeight) else None
    values = weight if stored is None else stored.values
    assert weight.shape[1] == size_in and inputs.stride(1) == values.stride(1) == 1, "rows must have unit stride"
    assert bias is None or bias.is_contiguous()
    assert stored is not None or inputs.dtype == values.dtype
    if stored is not None:
        assert tiles.num_warps == SPLITS.value, "each warp has a split"
        assert DEPTHS.value % tiles.depth == 0, "the depth must divide `DEPTHS`"
    assert activation is None or size_out % 2 == 0, "gate and up must have as many features each"
    out = inputs.new_empty(num_rows, size_out if activation is None else size_out // 2)
    _linear_kernel[(triton.cdiv(size_out, tiles.features), triton.cdiv(num_rows, tiles.rows))](
        inputs,
        values if stored is None else values.view(torch.uint8),
        bias,
        out,
        num_rows,
        size_out,
        size_in,
        inputs.stride(0),
        values.stride(0),
        0 if stored is None else stored.scales.stride(0),
        **stored_arguments(inputs, stored, tiles.depth),
        updates=updates,
        KIND=kind,
        IS_EVEN=size_in % (tiles.depth if stored is None else SPLITS.value * DEPTHS.value) == 0,
        **tiles.options,
        ACTIVATION=activation,
        LIBDEVICE=inputs.is_cuda,
        enable_fp_fusion=True,  # as `gated_activation`
    )
    return out
