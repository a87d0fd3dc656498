"""Numbers of stored weights inside of Triton kernels, as floating point; the formulas are those of
`stored_weight_reference`.

Conversions of Triton go through float32, one element at a time. On GPUs weights for products in bfloat16 are widened
by integer instructions and one exact multiplication instead, a pair at a time:

    e4m3    exponent and fraction are moved to their places in bfloat16, and the difference of biases is 2^120
    int8    128 + the low seven bits is a number of bfloat16, less 128 or, by the sign, 256
    4 bits  128 + the number is one of bfloat16, less 128 + its zero point

NaN of e4m3 is no number that a weight has, and read as 480.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .dependent_launch import wait_for_inputs

# Parts of a sum, of which each is a warp's: they are added at the end, in their order.
SPLITS = tl.constexpr(4)
# What the kernels call the formats of `StoredWeight.values`.
FORMATS = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8", torch.uint8: "int4"}

_E4M3 = tl.constexpr("""{
.reg .b32 t0, t1, u0, u1;
prmt.b32 t0, $2, 0, 0x1404;
prmt.b32 t1, $2, 0, 0x3424;
shr.u32 u0, t0, 4;
shr.u32 u1, t1, 4;
and.b32 u0, u0, 0x07f007f0;
and.b32 u1, u1, 0x07f007f0;
lop3.b32 t0, t0, 0x80008000, u0, 0xEA;
lop3.b32 t1, t1, 0x80008000, u1, 0xEA;
mov.b32 u0, 0x7B807B80;
mov.b32 u1, 0x80008000;
fma.rn.bf16x2 $0, t0, u0, u1;
fma.rn.bf16x2 $1, t1, u0, u1;
}""")

_INT8 = tl.constexpr("""{
.reg .b32 t0, t1, u0, u1, m;
prmt.b32 t0, $2, 0, 0x4140;
prmt.b32 t1, $2, 0, 0x4342;
mov.b32 m, 0x43004300;
lop3.b32 u0, t0, 0x00800080, m, 0xEA;
lop3.b32 u1, t1, 0x00800080, m, 0xEA;
lop3.b32 t0, t0, 0x007f007f, m, 0xEA;
lop3.b32 t1, t1, 0x007f007f, m, 0xEA;
mov.b32 m, 0xBF80BF80;
fma.rn.bf16x2 $0, u0, m, t0;
fma.rn.bf16x2 $1, u1, m, t1;
}""")

_INT4 = tl.constexpr("""{
.reg .b32 l, h, m, n;
and.b32 l, $4, 0x0f0f0f0f;
shr.u32 h, $4, 4;
and.b32 h, h, 0x0f0f0f0f;
mov.b32 m, 0x43434343;
mov.b32 n, 0xBF80BF80;
prmt.b32 $0, l, m, 0x4140;
prmt.b32 $1, l, m, 0x4342;
prmt.b32 $2, h, m, 0x4140;
prmt.b32 $3, h, m, 0x4342;
fma.rn.bf16x2 $0, $5, n, $0;
fma.rn.bf16x2 $1, $6, n, $1;
fma.rn.bf16x2 $2, $5, n, $2;
fma.rn.bf16x2 $3, $6, n, $3;
}""")


@triton.jit
def rows_of_fragments(FEATURES: tl.constexpr):
    """Split and feature of each row of a tile `[SPLITS * FEATURES]` that is loaded, for `in_fragments`: `SPLITS` warps
    have 8 adjacent rows each, and then the next 8 of each.
    """
    index = tl.arange(0, SPLITS * FEATURES)
    return index // 8 % SPLITS, index // (8 * SPLITS) * 8 + index % 8


@triton.jit
def in_fragments(values):
    """A tile of a weight, whose rows are `rows_of_fragments`, as the operand `[SPLITS, FEATURES, m]` of products: every
    warp has a split, and every thread keeps what it has loaded, which is adjacent. The columns are then in the order of
    `as_fragments`, since thread t of four has columns 4 t to 4 t + 3 of every 16.
    """
    FEATURES: tl.constexpr = values.shape[0] // SPLITS
    COLUMNS: tl.constexpr = values.shape[1]
    parts = tl.reshape(values, [FEATURES // 8, SPLITS, 8, 4, COLUMNS // 16, 4])
    return tl.reshape(tl.permute(parts, (1, 0, 2, 4, 3, 5)), [SPLITS, FEATURES, COLUMNS])


@triton.jit
def as_fragments(inputs):
    """Inputs `[SPLITS * n, m]` as the other operand `[SPLITS, m, n]`."""
    ROWS: tl.constexpr = inputs.shape[0] // SPLITS
    COLUMNS: tl.constexpr = inputs.shape[1]
    parts = tl.permute(tl.reshape(inputs, [SPLITS, ROWS, 4, COLUMNS // 16, 4]), (0, 3, 2, 4, 1))
    return tl.reshape(parts, [SPLITS, COLUMNS, ROWS])


@triton.jit
def add_splits(sums):
    """`[SPLITS, n, m]` added one after the other."""
    parts = tl.reshape(tl.permute(sums, (1, 2, 0)), [sums.shape[1], sums.shape[2], 2, 2])
    even, odd = tl.split(parts)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first + second + third + fourth


@triton.jit
def widen_bytes(stored, FORMAT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Numbers of 8 bits, in uint8, as DTYPE; FORMAT is "e4m3" or "int8"."""
    if ASM:
        return tl.inline_asm_elementwise(
            _E4M3 if FORMAT == "e4m3" else _INT8, "=r,=r,r", [stored], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    elif FORMAT == "e4m3":
        bits = stored.to(tl.int32)
        bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(DTYPE)  # 2^120
    else:
        return stored.to(tl.int8, bitcast=True).to(tl.float32).to(DTYPE)


@triton.jit
def widen_halves(stored, zeros, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Numbers of 4 bits, the low and the high ones of uint8 `[n, m]`, less `zeros` `[n]` in float32, as DTYPE."""
    if ASM:
        bias = tl.broadcast_to((zeros + 128).to(tl.bfloat16)[:, None], stored.shape)
        return tl.inline_asm_elementwise(
            _INT4, "=&r,=&r,=&r,=&r,r,r,r", [stored, bias], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low = (stored & 0xF).to(tl.float32) - zeros[:, None]
        high = (stored >> 4).to(tl.float32) - zeros[:, None]
        return low.to(DTYPE), high.to(DTYPE)


@triton.jit
def round_inputs(inputs, ASM: tl.constexpr):
    """Rows `[n, m]` as numbers of e4m3 in their dtype, and their scales `[n]` in float32."""
    scale = tl.maximum(tl.max(tl.abs(inputs.to(tl.float32)), axis=1) / 448, 1e-12)
    rounded = (inputs.to(tl.float32) / scale[:, None]).to(tl.float8e4nv)
    return widen_bytes(rounded.to(tl.uint8, bitcast=True), "e4m3", inputs.dtype, ASM), scale


@triton.jit
def stored_sums(
    weight_ptr,
    scales_ptr,
    zeros_ptr,
    inputs_ptr,
    own_feature,
    other_half,
    first,
    last,
    num_rows,
    size_in,
    inputs_stride,
    weight_stride,
    scales_stride,
    FORMAT: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    ROUNDS_INPUTS: tl.constexpr,
    ASM: tl.constexpr,
    IS_EVEN: tl.constexpr,
    HALVES: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sums `[FEATURES, ROWS]` of the products of a layer whose weight is stored.

    Args:
        weight_ptr, inputs_ptr: of the first feature and row.
        own_feature: `[FEATURES]`, each one less `first`.
        other_half, first, last: features of each of the HALVES, the first of the program, and the last of a half.
        GROUP_SIZE: None where a scale is for all inputs.
        IS_EVEN: whether `SPLITS * DEPTH` divides the input features.
    """
    PER_BYTE: tl.constexpr = 2 if FORMAT == "int4" else 1
    split_size = tl.cdiv(size_in, SPLITS * DEPTH) * DEPTH
    split, index = rows_of_fragments(FEATURES)
    feature = tl.minimum(first + index // HALVES, last) - first + index % HALVES * other_half
    stored_depth, depth = tl.arange(0, DEPTH // PER_BYTE), tl.arange(0, DEPTH)
    stored_split = split * (split_size // PER_BYTE)
    weight = weight_ptr + feature.to(tl.int64)[:, None] * weight_stride + stored_split[:, None] + stored_depth[None, :]
    zeros_at = (first + feature) // SCALE_ROWS * scales_stride
    scales = scales_ptr + (first + own_feature) // SCALE_ROWS * scales_stride
    if GROUP_SIZE is None:  # ahead of the inputs: no load is outstanding at the end
        scale = tl.load(scales).to(tl.float32)
    wait_for_inputs(PDL)

    row = tl.arange(0, SPLITS * ROWS)
    row_split, is_row = row // ROWS * split_size, (row % ROWS < num_rows)[:, None]
    inputs = inputs_ptr + (row % ROWS)[:, None] * inputs_stride + row_split[:, None] + depth[None, :]
    group_start = tl.arange(0, SPLITS) * split_size
    zeros = tl.full([SPLITS * FEATURES], 8, tl.float32)
    if zeros_ptr is not None and GROUP_SIZE is None:
        zeros = tl.load(zeros_ptr + zeros_at).to(tl.float32)
    total = tl.zeros([SPLITS, FEATURES, ROWS], tl.float32)
    for start in range(0, split_size, DEPTH):
        if IS_EVEN:
            w = tl.load(weight + start // PER_BYTE)
            x = tl.load(inputs + start, mask=is_row, other=0.0)
        else:
            is_stored = stored_depth[None, :] < ((size_in - start) // PER_BYTE - stored_split)[:, None]
            w = tl.load(weight + start // PER_BYTE, mask=is_stored, other=0)
            x = tl.load(
                inputs + start, mask=is_row & (depth[None, :] < (size_in - start - row_split)[:, None]), other=0.0
            )
        if ROUNDS_INPUTS:
            x, x_scale = round_inputs(x, ASM)
        product = total if GROUP_SIZE is None else tl.zeros_like(total)
        if FORMAT == "int4":
            if zeros_ptr is not None and GROUP_SIZE is not None:
                group = tl.minimum(split * split_size + start, size_in - 1) // GROUP_SIZE
                zeros = tl.load(zeros_ptr + zeros_at + group).to(tl.float32)
            low, high = widen_halves(w, zeros, x.dtype, ASM)
            x_low, x_high = tl.split(tl.reshape(x, [SPLITS * ROWS, DEPTH // 2, 2]))
            product = tl.dot(in_fragments(low), as_fragments(x_low), product, input_precision="ieee")
            product = tl.dot(in_fragments(high), as_fragments(x_high), product, input_precision="ieee")
        else:
            w = widen_bytes(w, FORMAT, x.dtype, ASM)
            product = tl.dot(in_fragments(w), as_fragments(x), product, input_precision="ieee")
        if ROUNDS_INPUTS:
            product *= tl.reshape(x_scale, [SPLITS, 1, ROWS])
        if GROUP_SIZE is None:
            total = product
        else:
            group = tl.minimum(group_start + start, size_in - 1) // GROUP_SIZE
            total += product * tl.load(scales[None, :] + group[:, None]).to(tl.float32)[:, :, None]
    total = add_splits(total)
    if GROUP_SIZE is None:
        total *= scale[:, None]
    return total
