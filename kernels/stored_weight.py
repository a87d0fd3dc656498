"""Stored weights as floating point inside Triton kernels; the formulas are in `stored_weight_reference`.

Triton's conversions go through float32, one element at a time. On NVIDIA GPUs weights for bfloat16 products are widened
in pairs instead, by integer instructions and one exact multiplication:

    e4m3    exponent and fraction move to their places in bfloat16; a factor of 2^120 is the difference of biases
    int8    128 + the low seven bits is a bfloat16 number; 128, or 256 for negative numbers, is subtracted
    4 bits  128 + the number is a bfloat16 number; 128 + the zero point is subtracted
    codes   byte permutations look up both bytes of a code, also for float16: see `look_up`

Weights have no NaN of e4m3; it is read as 480. Inputs are rounded in float32, by integer operations and additions that
every GPU has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import kernel, wait_for_inputs
from .linear_tiles import MOST_STORED_DEPTH
from .stored_weight_reference import CODES, LARGEST, LEAST_SCALE
from .types import SCALES_OF_OUTER, StoredWeight

# Parts of a sum, one for each warp; they are added at the end, in order.
SPLITS = tl.constexpr(4)
# All depths of tiles divide it.
DEPTHS = tl.constexpr(MOST_STORED_DEPTH)
# Names in the kernels of the formats of `StoredWeight.values` without codes, and of scales whose dtype Triton cannot
# load as floating point.
FORMATS = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8", torch.uint8: "int4"}
_SCALES = {torch.float8_e4m3fn: "e4m3", torch.float8_e8m0fnu: "e8m0", torch.uint8: "codes"}
_SCALES_OF_OUTER = tl.constexpr(SCALES_OF_OUTER)
# Inputs of a program of `_round_kernel`, if a group is smaller.
_INPUTS = 2048
_LEAST = tl.constexpr(LEAST_SCALE)


def _widen_bytes(of_pair: str, pack: int) -> tl.constexpr:
    """PTX that widens `pack` adjacent bytes. `of_pair` widens two of them in t: two halves, each a byte with its sign
    repeated above it."""
    lines = ["mov.b32 w, $2;" if pack == 4 else "cvt.u32.u16 w, $1;"]
    for pair, selected in enumerate((0x9180, 0xB3A2)[: pack // 2]):
        lines += [f"prmt.b32 t, w, 0, {selected:#x};", of_pair, f"mov.b32 ${pair}, t;"]
    return tl.constexpr("{\n.reg .b32 t, u, v, w;\n" + "\n".join(lines) + "\n}")


_E4M3_OF_PAIR = """shl.b32 t, t, 4;
and.b32 t, t, 0x87f087f0;
mov.b32 u, 0x7B807B80;
mov.b32 v, 0x80008000;
fma.rn.bf16x2 t, t, u, v;"""

_INT8_OF_PAIR = """mov.b32 v, 0x43004300;
lop3.b32 u, t, 0x00800080, v, 0xEA;
lop3.b32 t, t, 0x007f007f, v, 0xEA;
mov.b32 v, 0xBF80BF80;
fma.rn.bf16x2 t, u, v, t;"""

_E4M3_2, _E4M3_4 = _widen_bytes(_E4M3_OF_PAIR, 2), _widen_bytes(_E4M3_OF_PAIR, 4)
_INT8_2, _INT8_4 = _widen_bytes(_INT8_OF_PAIR, 2), _widen_bytes(_INT8_OF_PAIR, 4)

_INT4_4 = tl.constexpr("""{
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

_INT4_1 = tl.constexpr("""{
.reg .b32 t;
shl.b32 t, $2, 12;
or.b32 t, t, $2;
lop3.b32 t, t, 0x000f000f, 0x43004300, 0xEA;
mov.b32 {$0, $1}, t;
}""")


def look_up(codes: tuple[float, ...], dtype: torch.dtype) -> str:
    """PTX that maps the 4-bit numbers of 4 bytes to 16-bit codes: low numbers to $0 and $1, high ones to $2 and $3.

    A byte permutation picks 4 of 8 bytes by 3 bits each: the first, or the second, bytes of the codes of 4 numbers, as
    if these were below 8 or were above. The fourth bits, spread to bytes, select between the two. If the codes from 8
    on are those below 8 with the other sign, the fourth bit only sets the sign.
    """
    parts = torch.tensor(codes, dtype=dtype, device="cpu").view(torch.uint8).view(2, 2, 4, 2).permute(3, 0, 1, 2)
    words = [[[int.from_bytes(bytes(word), "little") for word in half] for half in one] for one in parts.tolist()]
    (low, others_low), (high, others_high) = words
    is_symmetric = low == others_low and [one | 0x80808080 for one in high] == others_high
    lines = [".reg .b32 t, u, s, m, p, q, r;", "and.b32 t, $4, 0x77777777;", "shl.b32 u, $4, 4;"]
    for index, fourth_bits in enumerate((0xD9C8, 0xFBEA)):
        lines += [f"shr.u32 s, t, {16 * index};", f"prmt.b32 m, u, $4, {fourth_bits:#x};"]
        for name, (half, others) in {"p": (low, others_low), "q": (high, others_high)}.items():
            lines.append(f"prmt.b32 {name}, {half[0]:#x}, {half[1]:#x}, s;")
            if not is_symmetric:
                lines.append(f"prmt.b32 r, {others[0]:#x}, {others[1]:#x}, s;")
                lines.append(f"lop3.b32 {name}, {name}, r, m, 0xD8;")  # r where m, else what it is
        if is_symmetric:
            lines.append("lop3.b32 q, q, m, 0x80808080, 0xF8;")  # q | (m & 0x80...)
        lines += [f"prmt.b32 ${index}, p, q, 0x6240;", f"prmt.b32 ${2 + index}, p, q, 0x7351;"]
    return "{\n" + "\n".join(lines) + "\n}"


_E2M1, _NF4 = tl.constexpr(CODES["e2m1"]), tl.constexpr(CODES["nf4"])
_E2M1_BFLOAT16 = tl.constexpr(look_up(CODES["e2m1"], torch.bfloat16))
_E2M1_FLOAT16 = tl.constexpr(look_up(CODES["e2m1"], torch.float16))
_NF4_BFLOAT16 = tl.constexpr(look_up(CODES["nf4"], torch.bfloat16))
_NF4_FLOAT16 = tl.constexpr(look_up(CODES["nf4"], torch.float16))


@triton.constexpr_function
def numbers_per_byte(form) -> int:
    """1 or 2, by the FORM of `stored_sums`."""
    return 1 if form[0] in ("int8", "e4m3") else 2


@triton.jit
def size_of_split(size_in):
    """Input features of each of SPLITS parts of a sum, whatever the tiles: a multiple of `DEPTHS`."""
    return tl.cdiv(size_in, SPLITS * DEPTHS) * DEPTHS


@triton.jit
def rows_of_fragments(FEATURES: tl.constexpr):
    """Split and feature of each row of a loaded tile `[SPLITS * FEATURES]`, for `in_fragments`: each of SPLITS warps
    has 8 adjacent rows, then each has the next 8."""
    index = tl.arange(0, SPLITS * FEATURES)
    return index // 8 % SPLITS, index // (8 * SPLITS) * 8 + index % 8


@triton.jit
def in_fragments(values):
    """A weight's tile with rows `rows_of_fragments` as the operand `[SPLITS, FEATURES, m]` of products. Every warp has
    a split, and every thread keeps the adjacent columns that it has loaded. Thread t of four has columns 4 t to 4 t + 3
    of every 16, so the columns are in the order of `as_fragments`."""
    FEATURES: tl.constexpr = values.shape[0] // SPLITS
    COLUMNS: tl.constexpr = values.shape[1]
    parts = tl.reshape(values, [FEATURES // 8, SPLITS, 8, 4, COLUMNS // 16, 4])
    return tl.reshape(tl.permute(parts, (1, 0, 2, 4, 3, 5)), [SPLITS, FEATURES, COLUMNS])


@triton.jit
def as_fragments(inputs):
    """Inputs `[SPLITS * n, m]` as the other operand `[SPLITS, m, n]`, for `in_fragments`."""
    ROWS: tl.constexpr = inputs.shape[0] // SPLITS
    COLUMNS: tl.constexpr = inputs.shape[1]
    parts = tl.permute(tl.reshape(inputs, [SPLITS, ROWS, 4, COLUMNS // 16, 4]), (0, 3, 2, 4, 1))
    return tl.reshape(parts, [SPLITS, COLUMNS, ROWS])


@triton.jit
def add_splits(sums):
    """The sum of `[SPLITS, n, m]` over splits, in order."""
    parts = tl.reshape(tl.permute(sums, (1, 2, 0)), [sums.shape[1], sums.shape[2], 2, 2])
    even, odd = tl.split(parts)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first + second + third + fourth


@triton.jit
def widen_bytes(stored, FORMAT: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr, PACK: tl.constexpr):
    """8-bit numbers, stored as uint8, in `dtype`; FORMAT is "e4m3" or "int8". Each thread should have PACK adjacent
    ones, 2 or 4."""
    if ASM and dtype == tl.bfloat16:
        if PACK == 2:
            return tl.inline_asm_elementwise(
                _E4M3_2 if FORMAT == "e4m3" else _INT8_2, "=r,h", [stored], dtype=tl.bfloat16, is_pure=True, pack=2
            )
        else:
            return tl.inline_asm_elementwise(
                _E4M3_4 if FORMAT == "e4m3" else _INT8_4, "=&r,=r,r", [stored], dtype=tl.bfloat16, is_pure=True, pack=4
            )
    elif FORMAT == "e4m3":
        bits = stored.to(tl.int32)
        bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)  # 2^120
    else:
        return stored.to(tl.int8, bitcast=True).to(tl.float32).to(dtype)


@triton.jit
def widen_halves(stored, zeros, FORMAT: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr, PACK: tl.constexpr):
    """4-bit numbers in `dtype`, the first and the second ones of uint8 `[n, m]`: integers minus `zeros` `[n]` in
    float32, or codes of FORMAT. Each thread should have PACK adjacent bytes, 1 or 4; codes always take 4."""
    if FORMAT == "int4" and ASM and dtype == tl.bfloat16 and PACK == 1:
        low, high = tl.inline_asm_elementwise(
            _INT4_1, "=h,=h,r", [stored], dtype=(tl.int16, tl.int16), is_pure=True, pack=1
        )
        bias = (zeros + 128).to(tl.bfloat16)[:, None]
        return low.to(dtype, bitcast=True) - bias, high.to(dtype, bitcast=True) - bias
    elif FORMAT == "int4" and ASM and dtype == tl.bfloat16:
        bias = tl.broadcast_to((zeros + 128).to(tl.bfloat16)[:, None], stored.shape)
        return tl.inline_asm_elementwise(
            _INT4_4, "=&r,=&r,=&r,=&r,r,r,r", [stored, bias], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    elif FORMAT == "int4":
        low = (stored & 0xF).to(tl.float32) - zeros[:, None]
        high = (stored >> 4).to(tl.float32) - zeros[:, None]
        return low.to(dtype), high.to(dtype)
    else:
        return codes_of_halves(stored, FORMAT, dtype, ASM)


@triton.jit
def codes_of_halves(stored, FORMAT: tl.constexpr, dtype: tl.constexpr, ASM: tl.constexpr):
    """`widen_halves` for codes."""
    if ASM and dtype != tl.float32:
        if FORMAT == "nf4":
            LOOK_UP: tl.constexpr = _NF4_BFLOAT16 if dtype == tl.bfloat16 else _NF4_FLOAT16
        else:
            LOOK_UP: tl.constexpr = _E2M1_BFLOAT16 if dtype == tl.bfloat16 else _E2M1_FLOAT16
        low, high = tl.inline_asm_elementwise(
            LOOK_UP, "=&r,=&r,=&r,=&r,r", [stored], dtype=(tl.int16, tl.int16), is_pure=True, pack=4
        )
        low, high = low.to(dtype, bitcast=True), high.to(dtype, bitcast=True)
    else:
        low = code_of(stored & 0xF, FORMAT).to(dtype)
        high = code_of(stored >> 4, FORMAT).to(dtype)
    if FORMAT == "nf4":
        return high, low
    else:
        return low, high


@triton.jit
def code_of(number, FORMAT: tl.constexpr):
    """The float32 code of `number`, which is 0 to 15."""
    CODES: tl.constexpr = _NF4 if FORMAT == "nf4" else _E2M1
    code = tl.zeros(number.shape, tl.float32)
    for index in tl.static_range(16):
        code = tl.where(number == index, CODES[index], code)
    return code


@triton.jit
def load_scales(parts, at, mask, SCALES: tl.constexpr):
    """Float32 scales at `at`, from `parts` of `stored_sums`, without the outer scale of a whole weight."""
    scales_ptr, _, outer_ptr, codes_ptr, shift_ptr = parts
    scale = tl.load(scales_ptr + at) if mask is None else tl.load(scales_ptr + at, mask=mask, other=0)
    if SCALES == "e4m3":
        scale = widen_bytes(scale, "e4m3", tl.float32, False, 4)
    elif SCALES == "e8m0":
        bits = scale.to(tl.int32)
        scale = tl.maximum(bits << 23, 0x400000).to(tl.float32, bitcast=True)  # 0 is 2^-127
    elif SCALES == "codes":
        scale = tl.load(codes_ptr + scale) * tl.load(outer_ptr + at // _SCALES_OF_OUTER) + tl.load(shift_ptr)
    return scale.to(tl.float32)


def stored_arguments(inputs: torch.Tensor, weight: StoredWeight | None, depth: int) -> dict[str, tuple | None]:
    """`parts` and FORM of `stored_sums` for a layer's inputs and stored weight, in tiles of `depth`; None if plain."""
    if weight is None:
        return {"parts": None, "FORM": None}
    values, scales, size_in = weight.values, weight.scales, weight.shape[-1]
    is_grouped = weight.group < size_in
    assert values.dtype in FORMATS and values.stride(-1) == 1, "rows must have unit stride"
    assert not weight.rounds_inputs, "`rounded_inputs` rounds inputs before"
    assert weight.order is None, "inputs are put in order before"
    assert not is_grouped or weight.group % depth == 0 or (depth % weight.group == 0 and scales.itemsize == 1)
    assert scales.stride(-1) == 1 or scales.shape[-1] == 1
    assert weight.zeros is None or weight.zeros.stride() == scales.stride()
    assert weight.scale_codes is None or scales.is_contiguous(), "outer scales are counted row by row"
    group, kind = weight.group if is_grouped else None, _SCALES.get(scales.dtype)
    has_asm = inputs.is_cuda and torch.version.hip is None
    scales = scales if kind is None else scales.view(torch.uint8)
    return {
        "parts": (scales, weight.zeros, weight.outer, weight.scale_codes, weight.shift),
        "FORM": (weight.codes or FORMATS[values.dtype], kind, weight.rows, group, has_asm),
    }


@triton.jit
def stored_sums(
    weight_ptr,
    parts,
    inputs,
    is_row,
    own_feature,
    places,
    size_in,
    strides,
    FORM,
    SIZES,
    IS_EVEN: tl.constexpr,
    starts_next=None,
):
    """Sums `[FEATURES, ROWS]` of the products of a layer with a stored weight.

    Args:
        weight_ptr: pointer to the program's first feature.
        parts: pointers to scales, zeros, outer scales, codes of scales, and shift.
        inputs, is_row: `[SPLITS * ROWS]`, pointers to rows and whether the rows exist, repeated for each split.
        own_feature: `[FEATURES]`, feature numbers minus `first`.
        places: the number of features of each of HALVES, the program's `first` feature, and the last one of a half.
        strides: strides between features, of the weight and of the scales.
        FORM: format of numbers, format of scales, features of a scale, inputs of a scale (GROUP_SIZE), and whether
            PTX can be used. GROUP_SIZE is None if a scale is for all inputs. Scales multiply the numbers if it is less
            than DEPTH, else the products.
        SIZES: HALVES, FEATURES and DEPTH.
        IS_EVEN: whether `SPLITS * DEPTHS` divides the input features.
        starts_next: see `wait_for_inputs`; None if the caller has waited.
    """
    zeros_ptr, outer_ptr, codes_ptr = parts[1], parts[2], parts[3]
    other_half, first, last = places
    weight_stride, scales_stride = strides
    FORMAT: tl.constexpr = FORM[0]
    SCALES: tl.constexpr = FORM[1]
    SCALE_ROWS: tl.constexpr = FORM[2]
    GROUP_SIZE: tl.constexpr = FORM[3]
    ASM: tl.constexpr = FORM[4]
    HALVES: tl.constexpr = SIZES[0]
    FEATURES: tl.constexpr = SIZES[1]
    DEPTH: tl.constexpr = SIZES[2]
    ROWS: tl.constexpr = is_row.shape[0] // SPLITS
    PER_BYTE: tl.constexpr = numbers_per_byte(FORM)
    SCALES_NUMBERS: tl.constexpr = GROUP_SIZE is not None and GROUP_SIZE < DEPTH
    SCALES_PRODUCTS: tl.constexpr = GROUP_SIZE is not None and GROUP_SIZE >= DEPTH
    split_size = size_of_split(size_in)
    split, index = rows_of_fragments(FEATURES)
    feature = tl.minimum(first + index // HALVES, last) - first + index % HALVES * other_half
    stored_depth, depth = tl.arange(0, DEPTH // PER_BYTE), tl.arange(0, DEPTH)
    stored_split = split * (split_size // PER_BYTE)
    weight = weight_ptr + feature.to(tl.int64)[:, None] * weight_stride + stored_split[:, None] + stored_depth[None, :]
    blocks_at = (first + feature) // SCALE_ROWS * scales_stride
    scales_at = (first + own_feature) // SCALE_ROWS * scales_stride
    if GROUP_SIZE is None:  # before the inputs, so that no load is outstanding at the end
        scale = load_scales(parts, scales_at, None, SCALES)
    if starts_next is not None:
        wait_for_inputs(starts_next)

    row_split, is_row = tl.arange(0, SPLITS * ROWS) // ROWS * split_size, is_row[:, None]
    inputs = inputs[:, None] + row_split[:, None] + depth[None, :]
    group_start = tl.arange(0, SPLITS) * split_size
    zeros = tl.full([SPLITS * FEATURES], 8, tl.float32)
    if zeros_ptr is not None and GROUP_SIZE is None:
        zeros = tl.load(zeros_ptr + blocks_at).to(tl.float32)
    total = tl.zeros([SPLITS, FEATURES, ROWS], tl.float32)
    for start in range(0, split_size, DEPTH):
        if IS_EVEN:
            w = tl.load(weight + start // PER_BYTE)
            x = tl.load(inputs + start, mask=is_row, other=0.0)
        else:
            is_stored = stored_depth[None, :] < ((size_in - start) // PER_BYTE - stored_split)[:, None]
            w = tl.load(weight + start // PER_BYTE, mask=is_stored, other=0)
            is_input = depth[None, :] < (size_in - start - row_split)[:, None]
            x = tl.load(inputs + start, mask=is_row & is_input, other=0.0)
        product = tl.zeros_like(total) if SCALES_PRODUCTS else total
        if PER_BYTE == 2:
            if zeros_ptr is not None and GROUP_SIZE is not None:
                group = tl.minimum(split * split_size + start, size_in - 1) // GROUP_SIZE
                zeros = tl.load(zeros_ptr + blocks_at + group).to(tl.float32)
            low, high = widen_halves(w, zeros, FORMAT, x.dtype, ASM, 4)
            if SCALES_NUMBERS:
                group = (split * split_size + start)[:, None] // GROUP_SIZE + tl.arange(0, DEPTH // GROUP_SIZE)[None, :]
                is_group = None if IS_EVEN else group * GROUP_SIZE < size_in
                numbers = load_scales(parts, blocks_at[:, None] + group, is_group, SCALES).to(x.dtype)
                spread: tl.constexpr = [SPLITS * FEATURES, DEPTH // GROUP_SIZE, GROUP_SIZE // 2]
                numbers = tl.reshape(tl.broadcast_to(numbers[:, :, None], spread), low.shape)
                low *= numbers
                high *= numbers
            x_low, x_high = tl.split(tl.reshape(x, [SPLITS * ROWS, DEPTH // 2, 2]))
            product = tl.dot(in_fragments(low), as_fragments(x_low), product, input_precision="ieee")
            product = tl.dot(in_fragments(high), as_fragments(x_high), product, input_precision="ieee")
        else:
            w = widen_bytes(w, FORMAT, x.dtype, ASM, 4)
            product = tl.dot(in_fragments(w), as_fragments(x), product, input_precision="ieee")
        if SCALES_PRODUCTS:
            group = tl.minimum(group_start + start, size_in - 1) // GROUP_SIZE
            at = scales_at[None, :] + group[:, None]
            product *= load_scales(parts, at, None, SCALES)[:, :, None]
            total += product
        else:
            total = product
    total = add_splits(total)
    if GROUP_SIZE is None:
        total *= scale[:, None]
    if outer_ptr is not None and codes_ptr is None:
        total *= 1.0 / tl.load(outer_ptr).to(tl.float32)
    return total


@triton.jit
def _to_int8(values):
    """float32 rounded to integers -128 to 127, half to even."""
    rounded = (values + 12582912.0) - 12582912.0  # 1.5 * 2^23, where the distance of numbers is 1
    return tl.where(rounded > 127.0, 127.0, rounded)


@triton.jit
def _to_e4m3(values):
    """float32 of magnitude up to 448, rounded to e4m3 numbers, half to even."""
    bits = values.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (values + 24576.0) - 24576.0  # 1.5 * 2^14, where the distance of numbers is 2^-9
    return tl.where(tl.abs(values) < 0.015625, small, normal)


@kernel
def _round_kernel(
    inputs_ptr,
    out_ptr,
    size_in,
    inputs_stride,
    group,
    LARGEST: tl.constexpr,
    IS_INT8: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """GROUPS groups of one row.

    Grid: (rows, blocks of groups). Reads the program's elements of `inputs`; writes those of `out`.
    """
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    index = tl.arange(0, BLOCK)
    column = number[:, None] * group + index[None, :]
    is_column = (index < group)[None, :] & (column < size_in)
    wait_for_inputs()
    inputs = tl.load(inputs_ptr + row * inputs_stride + column, mask=is_column, other=0.0)
    values = inputs.to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(values), axis=1), LARGEST), _LEAST)[:, None]
    values = tl.div_rn(values, tl.broadcast_to(scale, values.shape))
    rounded = _to_int8(values) if IS_INT8 else _to_e4m3(values)
    tl.store(out_ptr + row * size_in + column, (rounded * scale).to(inputs.dtype), mask=is_column)


def rounded_inputs(inputs, weight):
    """See `stored_weight_reference.rounded_inputs`. One launch, which depends only on shapes and strides."""
    size_in = inputs.shape[-1]
    rows = inputs.reshape(-1, size_in)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty(rows.shape, dtype=inputs.dtype, device=inputs.device)
    if out.numel() == 0:
        return out.view(inputs.shape)
    group = min(weight.group, size_in)
    block = triton.next_power_of_2(group)
    groups = max(_INPUTS // block, 1)
    _round_kernel[(len(rows), triton.cdiv(triton.cdiv(size_in, group), groups))](
        rows,
        out,
        size_in,
        rows.stride(0),
        group,
        LARGEST=float(LARGEST[weight.values.dtype]),
        IS_INT8=weight.values.dtype == torch.int8,
        GROUPS=groups,
        BLOCK=block,
        num_warps=4 if block <= 4096 else 8 if block <= 16384 else 16,
        enable_fp_fusion=False,
    )
    return out.view(inputs.shape)
