"""Linear layers whose weights are stored as numbers of few bits: Triton against float64, and what it may not read.

On a machine without a GPU the kernel runs in Triton's interpreter.
"""

import pytest
import torch
from interpreter import same_bits
from targets import set_policy

from hf_specdec import ops
from hf_specdec.kernels import linear_reference
from hf_specdec.kernels.gated_activation import gated_activation
from hf_specdec.kernels.linear import linear
from hf_specdec.kernels.linear_tiles import choose_stored_tiles
from hf_specdec.kernels.stored_weight_reference import dequantise, round_inputs
from hf_specdec.kernels.types import StoredWeight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
EPSILON = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPE = (4096, 1024) if DEVICE == "cuda" else (72, 256)
# Format, rows and inputs of a scale (None: all of them), whether there are zero points, whether inputs are rounded.
KINDS = {
    "e4m3 rows": (torch.float8_e4m3fn, 1, None, False, False),
    "e4m3 tensor": (torch.float8_e4m3fn, None, None, False, False),
    "e4m3 blocks": (torch.float8_e4m3fn, 128, 128, False, False),
    "e4m3 blocks and inputs": (torch.float8_e4m3fn, 128, 128, False, True),
    "int8 rows": (torch.int8, 1, None, False, False),
    "int8 groups": (torch.int8, 1, 32, False, False),
    "int4 groups": (torch.uint8, 1, 128, False, False),
    "int4 groups of 32": (torch.uint8, 1, 32, False, False),
    "int4 zero points": (torch.uint8, 1, 64, True, False),
    "int4 rows": (torch.uint8, 1, None, False, False),
    "int4 rows with zero points": (torch.uint8, 1, None, True, False),
}


def stored_weight(kind, size_out, size_in, seed=0):
    """A random weight of a kind, of which all numbers occur."""
    dtype, rows, group, has_zeros, rounds_inputs = KINDS[kind]
    generator = torch.Generator().manual_seed(seed)
    rows, group = rows or size_out, group or size_in
    values = torch.randint(0, 256, (size_out, size_in // (2 if dtype == torch.uint8 else 1)), generator=generator)
    values = values.to(torch.uint8)
    if dtype == torch.float8_e4m3fn:  # without NaN
        values = torch.where(values & 0x7F == 0x7F, 0x3C, values)
    blocks = (-(-size_out // rows), -(-size_in // group))
    scales = torch.rand(blocks, generator=generator) / (200 if dtype != torch.uint8 else 10)
    zeros = torch.randint(0, 16, blocks, generator=generator).to(torch.uint8).to(DEVICE) if has_zeros else None
    return StoredWeight(values.view(dtype).to(DEVICE), scales.to(DEVICE), zeros, rows, group, rounds_inputs)


def tiles_for(weight):
    """All that `choose_stored_tiles` can return for it."""
    return [choose_stored_tiles(rows, weight) for rows in (8, 16, 32, 33)]


def inputs_for(rows, size_in, dtype):
    return torch.randn(rows, size_in, generator=torch.Generator().manual_seed(rows)).to(DEVICE, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_sum_in_float64(kind, dtype):
    weight = stored_weight(kind, *SHAPE)
    bias = torch.randn(SHAPE[0], device=DEVICE, dtype=dtype)
    exact = dequantise(weight, torch.float64)
    for rows in (1, 5, 32):
        inputs = inputs_for(rows, SHAPE[1], dtype)
        expected = inputs.double() if not weight.rounds_inputs else round_inputs(inputs, weight).double()
        expected = expected @ exact.T + bias.double()
        atol = EPSILON[dtype] * expected.abs().max().item()
        torch.testing.assert_close(linear_reference.linear(inputs, weight, bias).double(), expected, rtol=0, atol=atol)
        for tiles in tiles_for(weight):
            torch.testing.assert_close(linear(inputs, weight, bias, tiles).double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_rows(kind):
    weight = stored_weight(kind, *SHAPE)
    inputs = inputs_for(40, SHAPE[1], DTYPES[-1])
    expected = linear(inputs[3:4], weight, None, tiles_for(weight)[0])
    for tiles in tiles_for(weight):
        for rows in (5, 16) if DEVICE == "cpu" else (5, 16, 33, 40):
            if DEVICE == "cuda" or tiles == tiles_for(weight)[0]:  # as in test_linear_kernel
                assert torch.equal(linear(inputs[:rows], weight, None, tiles)[3:4], expected), (tiles, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_is_widened_exactly(kind):
    """By unit vectors, one after the other: each result is one number of the weight times its scale."""
    weight = stored_weight(kind, 64, 256)
    identity = torch.eye(256, device=DEVICE, dtype=torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    found = linear(identity, weight._replace(rounds_inputs=False), None, tiles_for(weight)[0])
    expected = dequantise(weight, torch.float32).T.to(identity.dtype)
    torch.testing.assert_close(found, expected, rtol=1e-2 if DEVICE == "cuda" else 1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_gate_and_up_with_their_activation(kind):
    weight = stored_weight(kind, *SHAPE)
    weight = weight._replace(scales=weight.scales / SHAPE[1] ** 0.5)
    inputs = inputs_for(7, SHAPE[1], DTYPES[0])
    for tiles in tiles_for(weight):
        halves = linear(inputs, weight, None, tiles).chunk(2, dim=-1)
        assert same_bits(linear(inputs, weight, None, tiles, "silu"), gated_activation(*halves, "silu"))


@pytest.mark.parametrize("kind", ["e4m3 rows", "int8 rows"])
def test_inputs_are_rounded_by_the_largest_of_a_row(kind, monkeypatch):
    set_policy(monkeypatch, DEVICE, triton=True)
    weight = stored_weight(kind, *SHAPE)._replace(rounds_inputs=True)
    for dtype in DTYPES:
        inputs = inputs_for(5, SHAPE[1], dtype)
        rounded = round_inputs(inputs, weight).to(dtype)
        sizes = (rounded.double().abs().amax(1) - inputs.double().abs().amax(1)).abs() / inputs.double().abs().amax(1)
        assert not torch.equal(rounded, inputs) and sizes.max() < 0.01
        expected = ops.linear(rounded, weight._replace(rounds_inputs=False))
        assert torch.equal(ops.linear(inputs, weight), expected)
        assert torch.equal(ops.linear(inputs[2:3], weight), expected[2:3])
        gated = gated_activation(*expected.chunk(2, dim=-1), "silu")
        assert same_bits(ops.gated_linear(inputs, weight, None, "silu"), gated)


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

    views = weight._replace(values=within(weight.values, 0x7E), scales=within(weight.scales, float("nan")))
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
