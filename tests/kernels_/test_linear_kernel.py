"""The linear layer for a few rows: Triton against its reference, the same bits for any number of rows, and its use.

On a machine without a GPU the kernel runs in Triton's interpreter.
"""

import itertools
from contextlib import nullcontext

import pytest
import torch
from interpreter import same_bits
from lossless import PROMPTS
from oracle import random_eagle3
from targets import padded_prompts, set_policy, tiny_target

from hf_specdec import ops
from hf_specdec.kernels import linear_descriptors, linear_reference
from hf_specdec.kernels.gated_activation import gated_activation
from hf_specdec.kernels.gated_activation_reference import ACTIVATIONS
from hf_specdec.kernels.linear import linear
from hf_specdec.kernels.linear_tiles import (
    FEWEST_ROWS,
    MAX_GATED_ROWS,
    MAX_ROWS,
    choose_descriptor_tiles,
    choose_gated_tiles,
    choose_invariant_tiles,
    choose_tiles,
)
from hf_specdec.kernels.types import LinearTiles
from hf_specdec.op_choice import capturing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
EPSILON = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# All that `choose_tiles` and `choose_invariant_tiles` can return, and smaller ones for the interpreter.
GPU_TILES = [
    (16, 16, 512, 2, 4),
    (16, 32, 256, 4, 6),
    (16, 64, 128, 4, 6),
    (16, 128, 64, 4, 6),
    (32, 64, 128, 4, 5),
    (32, 64, 128, 4, 6),
    (32, 128, 64, 4, 6),
    (64, 64, 128, 4, 5),
    (64, 128, 128, 4, 4),
    (64, 128, 128, 8, 4),
    (128, 64, 128, 4, 4),
    (128, 128, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (16, 64, 128, 4, 4),
    (32, 64, 128, 4, 4),
    (64, 128, 64, 4, 4),
    (128, 128, 64, 8, 4),
    (256, 128, 64, 8, 3),
]
# Tiles of gate and up with their activation for more than `MAX_ROWS` rows.
GATED_TILES = [(128, 128, 64, 8, 3), (128, 64, 128, 4, 4), (64, 64, 128, 4, 5)]
# All that `choose_descriptor_tiles` can return.
DESCRIPTOR_TILES = [
    (64, 32, 256, 4, 4),
    (64, 64, 128, 4, 6),
    (64, 128, 128, 4, 4),
    (128, 32, 128, 4, 5),
    (128, 64, 64, 4, 8),
    (128, 128, 64, 8, 4),
    (128, 256, 64, 8, 3),
]
TILES = [LinearTiles(*sizes) for sizes in (GPU_TILES if DEVICE == "cuda" else [(16, 16, 64, 1, 1), (32, 64, 32, 1, 1)])]
SHAPES = [(64, 64), (40, 136), (200, 72)] if DEVICE == "cpu" else [(256, 1024), (392, 5000), (4096, 576), (1000, 8192)]


def example(rows, size_out, size_in, dtype, has_bias=True):
    generator = torch.Generator().manual_seed(rows)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(DEVICE, dtype)  # noqa: E731
    return draw(rows, size_in), draw(size_out, size_in), draw(size_out) if has_bias else None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tiles", TILES)
def test_equals_the_sum_in_float64(tiles, shape, dtype):
    for rows in (1, 7, MAX_ROWS):
        for has_bias in (False, True):
            inputs, weight, bias = example(rows, *shape, dtype, has_bias)
            expected = linear_reference.linear(
                *(part if part is None else part.double() for part in (inputs, weight, bias))
            )
            # Sums have an error of about the square root of their length, results one of rounding.
            scale = shape[1] ** 0.5
            found = linear(inputs, weight, bias, tiles).double()
            torch.testing.assert_close(found, expected, rtol=EPSILON[dtype], atol=scale * 2e-6 + EPSILON[dtype])
            torch.testing.assert_close(
                linear_reference.linear(inputs, weight, bias).double(),
                expected,
                rtol=EPSILON[dtype],
                atol=scale * 2e-6 + EPSILON[dtype],
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tiles", "activation"),
    [*((tiles, "silu") for tiles in TILES), *((TILES[0], name) for name in ACTIVATIONS if name != "silu")],
)
def test_gate_and_up_with_their_activation(tiles, activation, dtype):
    """The bits of the layer and of its activation one after the other; parts of tiles, and rows among NaN."""
    most = MAX_GATED_ROWS if DEVICE == "cuda" else 20
    for (size_out, size_in), (rows, has_bias) in itertools.product(SHAPES[:2], ((1, True), (7, False), (most, True))):
        inputs, weight, bias = example(rows, size_out + 2 * (rows == 7), size_in, dtype, has_bias)
        weight = weight / size_in**0.5
        found = linear(inputs, weight, bias, tiles, activation)
        expected = linear_reference.linear(
            *(part if part is None else part.double() for part in (inputs, weight, bias)), activation
        )
        torch.testing.assert_close(found.double(), expected, rtol=4 * EPSILON[dtype], atol=4 * EPSILON[dtype])
        halves = linear(inputs, weight, bias, tiles).chunk(2, dim=-1)
        assert same_bits(found, gated_activation(*halves, activation))
        within_nan = torch.full((rows + 2, size_in + 16), float("nan"), device=DEVICE, dtype=dtype)
        within_nan[1:-1, 8:-8] = inputs
        assert torch.equal(linear(within_nan[1:-1, 8:-8], weight, bias, tiles, activation), found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_on_neither_rows_nor_tiles(dtype):
    inputs, weight, bias = example(300, *SHAPES[-1], dtype)
    expected = linear(inputs[:1], weight, bias, TILES[0])
    for tiles in TILES:
        for rows in (1, 2, 16, 17, MAX_ROWS, 300):
            # On a CPU numpy's matmul, by which the interpreter computes, adds in another order for other tiles.
            if DEVICE == "cuda" or (tiles == TILES[0] and rows <= 16):
                assert torch.equal(linear(inputs[:rows], weight, bias, tiles)[:1], expected), (tiles, rows)


@pytest.mark.parametrize("size", [64, 1000])
def test_many_rows(size):
    """More blocks of rows than are grouped, and a part of one; layers of few features, whose rows are not aligned."""
    inputs, weight, bias = example(9 * 16 * (1 + 15 * (DEVICE == "cuda")) + 5, 72, size + 1, DTYPES[0])
    tiles = choose_invariant_tiles(len(inputs), 72, size + 1, inputs.itemsize) if DEVICE == "cuda" else TILES[0]
    found = linear(inputs, weight, bias, tiles).double()
    expected = linear_reference.linear(inputs.double(), weight.double(), bias.double())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=EPSILON[DTYPES[0]] * size**0.5)


@pytest.mark.parametrize("dtype", [torch.float16] + [torch.bfloat16] * (DEVICE == "cuda"))
@pytest.mark.parametrize("has_bias", [False, True])
def test_many_rows_by_descriptors(has_bias, dtype):
    """Parts of tiles of rows, features and depth; on a GPU the bits of the other kernel."""
    rows, size_out, size_in = (1024, 712, 1096) if DEVICE == "cuda" else (64, 88, 40)
    inputs, weight, bias = example(rows, size_out, size_in, dtype, has_bias)
    if not linear_descriptors.takes(inputs, weight):
        pytest.skip("needs a GPU of Hopper or later")
    sizes = DESCRIPTOR_TILES if DEVICE == "cuda" else [(32, 32, 32, 4, 2)]
    expected = linear(inputs, weight, bias, TILES[0])
    between = torch.full((rows + 8, size_in), float("nan"), device=DEVICE, dtype=dtype)
    for tiles, missing in itertools.product(sizes, (0, 7)):  # rows that fill tiles, and rows that do not
        between[: rows - missing] = inputs[: rows - missing]
        between[rows - missing :] = float("nan")
        found = linear_descriptors.linear(between[: rows - missing], weight, bias, LinearTiles(*tiles))
        if DEVICE == "cuda":
            assert torch.equal(found, expected[: rows - missing])
        torch.testing.assert_close(
            found, expected[: rows - missing], rtol=EPSILON[dtype], atol=EPSILON[dtype] * size_in**0.5
        )
    assert not linear_descriptors.takes(inputs[:, 1:], weight[:, 1:])
    assert not linear_descriptors.takes(inputs, weight[:-1])


@pytest.mark.parametrize("tiles", TILES)
def test_reads_nothing_beside_its_operands(tiles):
    """Rows of larger tensors, between NaN."""
    inputs, weight, bias = example(5, *SHAPES[1], DTYPES[0])
    wide_inputs, wide_weight, wide_bias = (
        torch.full([size + 16 for size in part.shape], float("nan"), device=DEVICE, dtype=part.dtype)
        for part in (inputs, weight, bias)
    )
    views = [wide_inputs[8:-8, 8:-8], wide_weight[8:-8, 8:-8], wide_bias[8:-8]]
    for view, part in zip(views, (inputs, weight, bias), strict=True):
        view.copy_(part)
    assert torch.equal(linear(*views, tiles), linear(inputs, weight, bias, tiles))


def test_tiles():
    assert choose_tiles(1, 4096, 14336) != choose_tiles(1, 6144, 4096)
    assert choose_tiles(MAX_ROWS, 6144, 4096) is not None
    for rows, size_out, size_in in (
        (0, 512, 512),
        (MAX_ROWS + 1, 512, 512),
        (1, 512, 1028 - 1),
        (33, 512, 4096),
        (1, 64, 512),
        (1, 512, 64),
    ):
        assert choose_tiles(rows, size_out, size_in) is None


def test_small_layers_of_many_rows():
    """Beyond `MAX_ROWS` only where rows fill the tiles and all of them run at once, and only in captured rounds."""
    whole = (64, 32, 256, 4, 4)
    for rows, size_out in ((64, 576), (128, 960), (192, 960), (256, 1024), (128, 2048)):
        assert choose_descriptor_tiles(rows, size_out, None) == whole
    for rows, size_out in ((48, 576), (96, 960), (320, 576), (256, 2048), (128, 4096)):
        assert choose_descriptor_tiles(rows, size_out, None) is None
    # Parts of tiles are loaded by pointers: `linear` is faster.
    assert choose_descriptor_tiles(48, 576, choose_tiles(48, 576, 576)) is None
    assert choose_descriptor_tiles(48, 4096, choose_tiles(48, 4096, 4096)) == whole


@pytest.mark.parametrize("is_captured", [False, True])
def test_host_bound_passes_keep_cublas(is_captured, monkeypatch):
    monkeypatch.setattr(ops, "_is_16_bit", lambda inputs: True)
    inputs, weight = torch.zeros(128, 576, dtype=torch.bfloat16), torch.zeros(576, 576, dtype=torch.bfloat16)
    with capturing() if is_captured else nullcontext():
        assert ops.has_fast_linear(inputs, weight) == is_captured
        assert not ops.has_fast_linear(inputs, weight[:16]), "a router"
        assert not ops.has_fast_linear(inputs, weight[:570]), "results that descriptors do not take"
        with monkeypatch.context() as patches:
            patches.setattr(linear_descriptors, "_has_descriptors", lambda device: False)
            assert not ops.has_fast_linear(inputs, weight), "before Hopper"
    assert ops.has_fast_linear(inputs[:48], weight)


def test_invariant_tiles():
    """For layers of any size and any number of rows: those that are faster for few rows, larger ones for many."""
    assert choose_invariant_tiles(1, 6144, 4096, 2) == choose_tiles(1, 6144, 4096)
    rows = [choose_invariant_tiles(rows, 6144, 4096, 2).rows for rows in (1, 20, 40, 200, 8192)]
    assert rows == sorted(rows) and rows[-1] == 256
    for tiles in (choose_invariant_tiles(rows, 8, 5, itemsize) for rows in (1, 17, 5000) for itemsize in (2, 4)):
        assert tiles.rows >= FEWEST_ROWS


def test_tiles_are_those_that_are_tested():
    """Of every number of rows and of layers of all kinds."""
    sizes = [256, 576, 960, 1536, 2944, 4096, 6144, 8192, 14336, 28672, 32000, 128256]
    found, by_descriptors = set(), set()
    for rows, size_out, size_in in itertools.product((1, 5, 16, 17, 32, 33, 64, 65, 128, 200, 9000), sizes, sizes):
        tiles = choose_invariant_tiles(rows, size_out, size_in, 2)
        found.add(tuple(tiles))
        by_descriptors.add(tuple(choose_descriptor_tiles(rows, size_out, tiles) or DESCRIPTOR_TILES[0]))
        few, gated = choose_tiles(rows, size_out, size_in), choose_gated_tiles(rows, size_out, size_in)
        assert few in (None, tiles), "batch-invariant calls use the tiles of others, where those have some"
        if few is not None and few[:2] == (64, 128):
            assert gated == (64, 128, 128, 8, 4)
        else:
            assert gated in ((few,) if rows <= MAX_ROWS or rows > MAX_GATED_ROWS else (None, *GATED_TILES))
    assert found | {(64, 128, 128, 8, 4)} == set(GPU_TILES) and by_descriptors == set(DESCRIPTOR_TILES)


@torch.no_grad()
def test_layers_of_target_and_drafter_run_it(monkeypatch):
    """With the choice replaced by one that takes float32 and small layers."""
    set_policy(monkeypatch, "cpu", few_row_linear=True, fused_linear=True, transposed_linear=False)
    target = tiny_target("llama")
    drafter = random_eagle3(target)
    inputs = padded_prompts(PROMPTS[3])
    shapes, original = [], ops.linear
    for name in ("has_fast_linear", "has_gated_linear"):
        monkeypatch.setattr(ops, name, lambda inputs, _: len(inputs) <= MAX_ROWS)
    monkeypatch.setattr(ops, "linear", lambda *args: shapes.append(tuple(args[1].shape)) or original(*args))
    expected = target.generate(**inputs, do_sample=False, max_new_tokens=8)
    assert not shapes
    assert torch.equal(target.generate(**inputs, do_sample=False, max_new_tokens=8, assistant_model=drafter), expected)
    config = target.config
    assert (2 * config.intermediate_size, config.hidden_size) in shapes  # gate and up
    assert (config.hidden_size, config.intermediate_size) in shapes  # down
    assert (config.vocab_size, config.hidden_size) in shapes  # the head
    assert (config.hidden_size, 3 * config.hidden_size) in shapes  # the drafter's projection of hidden states


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_replays_in_a_graph():
    inputs, weight, bias = example(4, 4096, 1024, torch.bfloat16)
    ops.linear(inputs, weight, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = ops.linear(inputs, weight, bias)
        out = ops.linear(hidden.relu()[:, :1024].contiguous(), weight, bias)
    for seed in range(3):
        inputs.copy_(example(4 + seed, 4096, 1024, torch.bfloat16)[0][:4])
        graph.replay()
        again = ops.linear(inputs, weight, bias)
        assert torch.equal(hidden, again)
        assert torch.equal(out, ops.linear(again.relu()[:, :1024].contiguous(), weight, bias))
