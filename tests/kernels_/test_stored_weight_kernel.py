"""Linear layers whose weights are stored as numbers of few bits: Triton against float64, and what it may not read.

On a machine without a GPU the kernel runs in Triton's interpreter.
"""

import pytest
import torch
from case_counts import cases
from interpreter import same_bits
from stored_weights import DEVICE, KINDS, stored_weight
from targets import set_policy

from hf_specdec import ops
from hf_specdec.kernels import experts_reference, linear_reference, linear_stored, stored_weight_reference
from hf_specdec.kernels.experts import expert_linear, plan_experts
from hf_specdec.kernels.gated_activation import gated_activation
from hf_specdec.kernels.linear import linear
from hf_specdec.kernels.linear_tiles import choose_stored_tiles, choose_wide_stored_tiles
from hf_specdec.kernels.stored_weight import look_up, rounded_inputs
from hf_specdec.kernels.stored_weight_reference import CODES, dequantise
from hf_specdec.kernels.types import LinearTiles

DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
EPSILON = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPE = (4096, 1024) if DEVICE == "cuda" else (72, 256)
# Of each format one, with scales of blocks, of rows and of scales, and zero points.
FEW = ["e4m3 blocks", "int8 groups", "int4 zero points", "nvfp4", "nf4 twice"]


def tiles_for(weight):
    """What `choose_stored_tiles` returns for it, each once; without a GPU also for float32, and not all."""
    sizes = [(8, 2), (16, 2), (32, 2), (33, 2)] if DEVICE == "cuda" else [(8, 2), (16, 2), (8, 4), (33, 4)]
    return list(dict.fromkeys(choose_stored_tiles(rows, weight, itemsize) for rows, itemsize in sizes))


def inputs_for(rows, size_in, dtype):
    return torch.randn(rows, size_in, generator=torch.Generator().manual_seed(rows)).to(DEVICE, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_sum_in_float64(kind, dtype):
    weight = stored_weight(kind, *SHAPE)
    bias = torch.randn(SHAPE[0], device=DEVICE, dtype=dtype)
    exact = dequantise(weight, torch.float64)
    for rows in cases((1, 5, 32), (1, 32)):
        inputs = inputs_for(rows, SHAPE[1], dtype)
        expected = inputs.double() @ exact.T + bias.double()
        atol = EPSILON[dtype] * expected.abs().max().item()
        torch.testing.assert_close(linear_reference.linear(inputs, weight, bias).double(), expected, rtol=0, atol=atol)
        for tiles in tiles_for(weight):
            torch.testing.assert_close(linear(inputs, weight, bias, tiles).double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", KINDS)
def test_wide_tiles(kind):
    """Parts of tiles of rows and of features, between NaN, with the sum in one part and in several."""
    weight = stored_weight(kind, *SHAPE)
    exact, bias = dequantise(weight, torch.float64), torch.randn(SHAPE[0], device=DEVICE, dtype=DTYPES[-1])
    for rows in cases((17, 33, 64, 128, 200), (17, 33)):
        tiles, num_parts = choose_wide_stored_tiles(rows, weight)
        between = torch.full((rows + 9, SHAPE[1]), float("nan"), device=DEVICE, dtype=DTYPES[-1])
        inputs = between[5 : rows + 5]
        inputs.copy_(inputs_for(rows, SHAPE[1], DTYPES[-1]))
        expected = inputs.double() @ exact.T
        atol = EPSILON[DTYPES[-1]] * expected.abs().max().item()
        for parts, added in ((num_parts, None), (1 if num_parts > 1 else 2, bias)):
            found = linear_stored.linear(inputs, weight, added, tiles, parts).double()
            sums = expected if added is None else expected + added.double()
            torch.testing.assert_close(found, sums, rtol=0, atol=atol)


def test_which_products_have_wide_tiles():
    weight = stored_weight("e4m3 rows", 512, 256)
    assert [choose_wide_stored_tiles(rows, weight) is not None for rows in (16, 17, 256, 257)] == [
        False,
        True,
        True,
        False,
    ]
    assert choose_wide_stored_tiles(64, stored_weight("e4m3 rows", 512, 192)) is None
    assert choose_wide_stored_tiles(64, stored_weight("int4 zero points", 512, 256)) == (
        LinearTiles(64, 64, 64, 4, 3),
        4,
    )


@pytest.mark.parametrize("kind", cases(list(KINDS), FEW))
def test_bits_do_not_depend_on_rows(kind):
    weight = stored_weight(kind, *SHAPE)
    inputs = inputs_for(40, SHAPE[1], DTYPES[-1])
    expected = linear(inputs[3:4], weight, None, tiles_for(weight)[0])
    for tiles in tiles_for(weight):
        for rows in (5, 16) if DEVICE == "cpu" else (5, 16, 33, 40):
            if DEVICE == "cuda" or tiles == tiles_for(weight)[0]:  # as in test_linear_kernel
                assert torch.equal(linear(inputs[:rows], weight, None, tiles)[3:4], expected), (tiles, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_of_a_weight_are_equally_deep(kind):
    """The order of a sum depends on the depth, also among 16 inputs."""
    for size_out, size_in in ((64, 320), (16384, 256)):
        weight = stored_weight(kind, size_out, size_in)
        for itemsize in (2, 4):
            tiles = (choose_stored_tiles(rows, weight, itemsize) for rows in (1, 8, 9, 16, 17, 32, 33, 64, 5000))
            assert len({one.depth for one in tiles}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_is_widened_exactly(kind):
    """By unit vectors, one after the other: each result is one number of the weight times its scale."""
    weight = stored_weight(kind, 64, 256)
    identity = torch.eye(256, device=DEVICE, dtype=torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    tiles = tiles_for(weight)[0 if DEVICE == "cuda" else -1]  # the largest ones, of which the interpreter runs fewer
    found = linear(identity, weight, None, tiles)
    expected = dequantise(weight, torch.float32).T.to(identity.dtype)
    torch.testing.assert_close(found, expected, rtol=1e-2 if DEVICE == "cuda" else 1e-6, atol=0)


@pytest.mark.parametrize("kind", cases(list(KINDS), FEW))
def test_gate_and_up_with_their_activation(kind):
    weight = stored_weight(kind, *SHAPE)
    inputs = inputs_for(7, SHAPE[1], DTYPES[0]) / SHAPE[1] ** 0.5
    for tiles in tiles_for(weight):
        halves = linear(inputs, weight, None, tiles).chunk(2, dim=-1)
        assert same_bits(linear(inputs, weight, None, tiles, "silu"), gated_activation(*halves, "silu"))


@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("kind", ["e4m3 rows", "int8 rows", "e4m3 blocks"])
def test_inputs_are_rounded_before_the_product(kind, rows, monkeypatch):
    """In few rows and in many, and by itself in one of many, with an activation and without."""
    set_policy(monkeypatch, DEVICE, triton=True)
    weight = stored_weight(kind, *SHAPE)
    rounding = weight._replace(rounds_inputs=True)
    for dtype in DTYPES:
        inputs = inputs_for(rows, SHAPE[1], dtype)
        rounded = stored_weight_reference.rounded_inputs(inputs, weight)
        sizes = (rounded.double().abs().amax(1) - inputs.double().abs().amax(1)).abs() / inputs.double().abs().amax(1)
        assert not torch.equal(rounded, inputs) and sizes.max() < 0.01
        expected = ops.linear(rounded, weight)
        assert torch.equal(ops.linear(inputs, rounding), expected)
        assert torch.equal(ops.linear(inputs[2:3], rounding), ops.linear(rounded[2:3], weight))
        gated = ops.linear(rounded, weight, None, "silu")
        assert torch.equal(ops.linear(inputs, rounding, None, "silu"), gated)
        exact = rounded.double() @ dequantise(weight, torch.float64).T
        atol = EPSILON[dtype] * exact.abs().max().item()
        torch.testing.assert_close(linear_reference.linear(inputs, rounding).double(), exact, rtol=0, atol=atol)
        torch.testing.assert_close(expected.double(), exact, rtol=0, atol=atol)


@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("kind", ["int4 zero points", "int8 rows"])
def test_inputs_in_an_order(kind, rows, monkeypatch):
    """Columns are for other inputs than the first, the second and so on."""
    set_policy(monkeypatch, DEVICE, triton=True)
    weight = stored_weight(kind, *SHAPE)
    order = torch.randperm(SHAPE[1], generator=torch.Generator().manual_seed(1)).to(DEVICE)
    ordered = weight._replace(order=order)
    assert torch.equal(dequantise(ordered, torch.float32)[:, order], dequantise(weight, torch.float32))
    inputs = inputs_for(rows, SHAPE[1], DTYPES[-1])
    for activation in (None, "silu"):
        expected = ops.linear(inputs[:, order].contiguous(), weight, None, activation)
        assert torch.equal(ops.linear(inputs, ordered, None, activation), expected)
        assert not torch.allclose(ops.linear(inputs, weight, None, activation), expected)
        found = linear_reference.linear(inputs, ordered, None, activation)
        torch.testing.assert_close(found, expected, rtol=0, atol=2 * EPSILON[DTYPES[-1]] * expected.abs().max().item())


@pytest.mark.parametrize("kind", ["e4m3 rows", "int8 rows", "e4m3 blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda"))
def test_rounded_inputs(kind, dtype):
    """The bits of the reference, for numbers of all sizes, groups of zeros, parts of groups, rows between NaN."""
    for size_in in (64, 320, 4096):
        weight = stored_weight(kind, 8, size_in)
        inputs = inputs_for(6, size_in, torch.float32) * torch.logspace(-4, 1, 6, device=DEVICE)[:, None]
        inputs[:, ::3] /= 300  # below the least normal number of e4m3
        inputs[2, 40:170], inputs[3] = 0, torch.arange(size_in, device=DEVICE) / 2  # halves between two numbers
        between = torch.full((8, size_in + 32), float("nan"), device=DEVICE, dtype=dtype)
        view = between[1:-1, 16:-16]
        view.copy_(inputs)
        expected = stored_weight_reference.rounded_inputs(view, weight)
        found = rounded_inputs(view, weight)
        assert found.dtype == dtype and torch.equal(found, expected) and not torch.equal(found, view)
        assert torch.equal(rounded_inputs(view.reshape(2, 3, -1), weight), expected.view(2, 3, -1))


@pytest.mark.parametrize("kind", KINDS)
def test_reads_nothing_beside_its_operands(kind):
    """Weights, scales and zero points between others, of which a part of a block or group is the last."""
    size_out, size_in = 200, 320
    weight = stored_weight(kind, size_out, size_in)
    inputs = inputs_for(5, size_in, DTYPES[0])

    def within(part, poison):
        if part is None:
            return None
        raw = part.view(torch.uint8) if part.itemsize == 1 else part
        wide = torch.full([size + 32 for size in part.shape], poison, dtype=raw.dtype, device=DEVICE)
        wide[16:-16, 16:-16] = raw
        return wide.view(part.dtype)[16:-16, 16:-16]

    views = weight._replace(values=within(weight.values, 0x7E))
    if weight.scale_codes is None:
        views = views._replace(scales=within(weight.scales, float("nan") if weight.scales.itemsize > 1 else 0x7F))
    if weight.zeros is not None:
        scales = torch.full_like(weight.scales, float("nan")).repeat(2, 2)
        zeros = torch.full_like(weight.zeros, 255).repeat(2, 2)
        rows, columns = weight.scales.shape
        scales[:rows, :columns], zeros[:rows, :columns] = weight.scales, weight.zeros
        views = views._replace(scales=scales[:rows, :columns], zeros=zeros[:rows, :columns])
    wide_inputs = torch.full((7, size_in + 32), float("nan"), device=DEVICE, dtype=inputs.dtype)
    wide_inputs[1:-1, 16:-16] = inputs
    for tiles in tiles_for(weight):
        found = linear(wide_inputs[1:-1, 16:-16], views, None, tiles)
        assert torch.equal(found, linear(inputs, weight, None, tiles)) and found.isfinite().all()


@pytest.mark.parametrize("kind", ["mxfp4", "int4 groups of 32", "int8 rows", "e4m3 blocks", "e4m3 blocks, e8m0"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(kind, dtype):
    """In float64, for tokens with a bias and for pairs without; bits do not depend on how many there are."""
    num_experts, (size_out, size_in) = 5, (72, 160)
    weight = stored_weight(kind, (num_experts, size_out), size_in)
    exact, ids = dequantise(weight, torch.float64), torch.tensor([[0, 3], [3, 7], [3, 1]] * 4, device=DEVICE)
    assert exact.shape == weight.shape == (num_experts, size_out, size_in)
    bias = torch.randn(num_experts, size_out, device=DEVICE, dtype=dtype)
    for of_pairs in (False, True):
        inputs = inputs_for(ids.numel() if of_pairs else len(ids), size_in, dtype)
        rows = inputs if of_pairs else inputs.repeat_interleave(2, 0)
        is_expert = ids.flatten() < num_experts
        chosen = ids.flatten().clamp(max=num_experts - 1)
        expected = torch.einsum("pi,poi->po", rows.double(), exact[chosen]) + (not of_pairs) * bias[chosen].double()
        expected, found = expected * is_expert[:, None], []
        for block in (8, 16, 32):
            plan = plan_experts(ids, num_experts, block)
            given = inputs, weight, None if of_pairs else bias, plan, block, False
            outs = [product(*given) for product in (expert_linear, experts_reference.expert_linear)]
            atol = EPSILON[dtype] * expected.abs().max().item()
            for out in outs:
                torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)
            few = inputs[: 2 * (1 + of_pairs)], weight, None if of_pairs else bias
            found += [outs[0][:4], expert_linear(*few, plan_experts(ids[:2], num_experts, block), block, False)]
            assert torch.equal(*found[-2:])
        assert DEVICE == "cpu" or all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("kind", ["e4m3 blocks", "e4m3 blocks, e8m0"])
def test_inputs_of_experts_are_rounded_before_the_product(kind, monkeypatch):
    """Those of tokens once, and those of pairs."""
    set_policy(monkeypatch, DEVICE, triton=True)
    weight = stored_weight(kind, (3, 72), 160)
    exact, ids = dequantise(weight, torch.float64), torch.tensor([[0, 2], [2, 1], [1, 0]], device=DEVICE)
    plan = ops.plan_experts(ids, 3, 8)
    for dtype in DTYPES:
        for per_input in (1, 2):
            inputs = inputs_for(6 // per_input, 160, dtype)
            rounded = stored_weight_reference.rounded_inputs(inputs, weight)
            found = ops.expert_linear(inputs, weight._replace(rounds_inputs=True), None, plan, 8, False)
            assert torch.equal(found, ops.expert_linear(rounded, weight, None, plan, 8, False))
            rows = rounded.repeat_interleave(per_input, 0).double()
            expected = torch.einsum("pi,poi->po", rows, exact[ids.flatten()])
            atol = EPSILON[dtype] * expected.abs().max().item()
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=atol)


def run_ptx(program, argument):
    """The registers $0 to $3 that a program of `look_up` leaves for an argument $4."""
    values = {"$4": argument}

    def value(name):
        return values[name] if name in values else int(name, 0)

    for line in program.splitlines()[2:-1]:
        operation, into, *names = line.partition(";")[0].replace(",", "").split()
        given = [value(name) for name in names]
        if operation == "and.b32":
            result = given[0] & given[1]
        elif operation == "shl.b32":
            result = given[0] << given[1] & 0xFFFFFFFF
        elif operation == "shr.u32":
            result = given[0] >> given[1]
        elif operation == "prmt.b32":
            both, result = given[0] | given[1] << 32, 0
            for place in range(4):
                pick = given[2] >> 4 * place & 0xF
                byte = both >> 8 * (pick & 7) & 0xFF
                result |= ((0xFF if byte & 0x80 else 0) if pick & 8 else byte) << 8 * place
        elif operation == "lop3.b32":
            bits = [[one >> bit & 1 for one in given[:3]] for bit in range(32)]
            result = sum((given[3] >> (4 * a + 2 * b + c) & 1) << bit for bit, (a, b, c) in enumerate(bits))
        else:
            raise AssertionError(f"another operation: {line}")
        values[into] = result
    return [values[f"${index}"] for index in range(4)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codes", CODES)
def test_look_ups_of_a_gpu(codes, dtype):
    """What their PTX does, operation by operation, for every byte in every place."""
    table = torch.tensor(CODES[codes]).to(dtype).view(torch.int16).tolist()
    with torch.device("meta"):  # a default device, under which the package may be imported
        program = look_up(CODES[codes], dtype)
    for byte in range(256):
        stored = [byte, byte ^ 0x5A, 255 - byte, byte * 7 & 0xFF]
        found = run_ptx(program, int.from_bytes(bytes(stored), "little"))
        words = [table[one & 0xF] & 0xFFFF for one in stored] + [table[one >> 4] & 0xFFFF for one in stored]
        assert found == [words[index] | words[index + 1] << 16 for index in range(0, 8, 2)]
