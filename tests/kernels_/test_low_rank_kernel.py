"""Low-rank updates of adapters that rows have: Triton against the reference in float64, and what is not read.

On a machine without a GPU the kernel runs in Triton's interpreter.
"""

import pytest
import torch
from interpreter import same_bits

from hf_specdec.kernels import low_rank, low_rank_reference
from hf_specdec.kernels.gated_activation import gated_activation
from hf_specdec.kernels.linear import linear
from hf_specdec.kernels.types import LinearTiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32]
EPSILON = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# Output features of the layers of a group, input features, ranks of adapters.
SHAPES = [([40], 72, [3]), ([70, 24, 24], 300, [4, 0, 17]), ([130, 130], 500, [8, 1]), ([2100], 40, [5])]
if DEVICE == "cuda":
    SHAPES += [([4096, 1024, 1024], 4096, [16] * 8), ([4096], 14336, [16, 64]), ([14336] * 2, 4096, [16] * 3)]


def low_rank_places(*group):
    return low_rank_reference.low_rank_places(*group).to(DEVICE)


def example(rows, sizes, size_in, ranks, dtype, weights=None):
    generator = torch.Generator().manual_seed(rows)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(DEVICE)  # noqa: E731
    down = [draw(rank, size_in).to(weights or dtype) / size_in**0.5 for _ in sizes for rank in ranks]
    up = [draw(size, rank).to(weights or dtype) for size in sizes for rank in ranks]
    places = low_rank_places(down, up)
    scales = torch.rand(len(down), generator=generator).to(DEVICE) + 0.5
    # Of no adapter, of one, of several.
    adapters = torch.randint(0, 1 << len(ranks), (rows,), generator=generator).to(DEVICE)
    out, inputs = draw(rows, sum(sizes)).to(dtype), draw(rows, size_in).to(dtype)
    return out, inputs, adapters, down, up, places, scales, sizes


def in_float64(out, inputs, adapters, down, up, places, scales, sizes):
    out = out.double()
    down, up = ([one.double() for one in weights] for weights in (down, up))
    low_rank_reference.add_low_rank(out, inputs.double(), adapters, down, up, None, scales, sizes)
    return out


def updated(function, out, *args):
    out = out.clone()
    function(out, *args)
    return out


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [(one, None) for one in DTYPES] + [(one, torch.float32) for one in DTYPES if one != torch.float32],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_sum_in_float64(shape, dtype, weights):
    for rows in (1, 7, 40, 70):
        args = example(rows, *shape, dtype, weights)
        expected = in_float64(*args)
        scale = args[5].shape[0] * max(shape[2]) ** 0.5
        for function in (low_rank.add_low_rank, low_rank_reference.add_low_rank):
            found = updated(function, *args).double()
            torch.testing.assert_close(found, expected, rtol=EPSILON[dtype], atol=scale * 2e-6 + 4 * EPSILON[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_other_rows(shape, dtype):
    """Nor on how many there are: one part of the sum is a program's own, or all are."""
    args = example(70, *shape, dtype)
    expected = updated(low_rank.add_low_rank, *args)
    out, inputs, adapters, *others = args
    for rows in (slice(1), slice(5, 12), slice(30, 70)):
        found = updated(low_rank.add_low_rank, out[rows], inputs[rows], adapters[rows], *others)
        assert torch.equal(found, expected[rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_adapters_of_other_rows(dtype):
    """Nor on their ranks."""
    sizes, size_in, ranks = [70, 64], 600, [16, 32, 3, 5, 8, 9]
    out, inputs, _, down, up, _, scales, _ = example(9, sizes, size_in, ranks, dtype)
    adapters = torch.tensor([1, 2, 4, 8, 16, 32, 1, 2, 0], device=DEVICE)
    found = updated(low_rank.add_low_rank, out, inputs, adapters, down, up, low_rank_places(down, up), scales, sizes)
    for number in range(len(ranks)):
        rows = (adapters == 1 << number).nonzero()[:, 0]
        own = slice(number, None, len(ranks))
        group = down[own], up[own], low_rank_places(down[own], up[own]), scales[own].contiguous(), sizes
        alone = updated(low_rank.add_low_rank, out[rows], inputs[rows], torch.ones_like(rows), *group)
        assert torch.equal(found[rows], alone)


TILES = [LinearTiles(16, 32, 64, 4, 3), LinearTiles(32, 64, 32, 4, 4)]


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [([70, 24, 24], 300, [4, 0, 17]), ([130, 130], 500, [16]), ([40], 72, [3] * 6)], ids=str
)
def test_product_with_updates_has_the_bits_of_updates_after_it(shape, dtype, tiles, activation):
    """Also of tiles with features of two layers, of rows without adapters, and of rows beyond a tile."""
    if activation is not None and len(shape[0]) != 2:
        pytest.skip("gate and up are two layers")
    generator = torch.Generator().manual_seed(5)
    for rows in (1, 9, 40):
        args = example(rows, *shape, dtype)
        size_out, size_in = args[0].shape[1], args[1].shape[1]
        weight = (torch.randn(size_out, size_in, generator=generator) / size_in**0.5).to(DEVICE, dtype)
        bias = torch.randn(size_out, generator=generator).to(DEVICE, dtype)
        after = linear(args[1], weight, bias, tiles)
        low_rank.add_low_rank(after, *args[1:])
        if activation is not None:
            after = gated_activation(*after.chunk(2, dim=-1), activation)
        found = low_rank.adapted_linear(args[1], weight, bias, activation, *args[2:], tiles)
        assert same_bits(found, after)
        expected = low_rank_reference.adapted_linear(args[1], weight, bias, activation, *args[2:])
        torch.testing.assert_close(found, expected, rtol=4 * EPSILON[dtype], atol=1e-4 + 32 * EPSILON[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_of_an_adapter_reaches_its_rows_only(dtype):
    """And rows around those that are given are neither read nor written."""
    sizes, size_in, ranks = SHAPES[1]
    out, inputs, _, down, up, places, scales, _ = example(20, sizes, size_in, ranks, dtype)
    adapters = torch.tensor([1, 4, 0, 5] * 5, device=DEVICE)
    clean = updated(low_rank.add_low_rank, out, inputs, adapters, down, up, places, scales, sizes)
    assert not torch.equal(clean, out) and torch.equal(clean[2::4], out[2::4])
    for one in (*down[2::3], *up[2::3]):
        one.fill_(float("nan"))
    within_nan = torch.full((22, sum(sizes) + 16), float("nan"), device=DEVICE, dtype=dtype)
    within_nan[1:-1, 8:-8] = out
    given = torch.full((22, size_in + 16), float("nan"), device=DEVICE, dtype=dtype)
    given[1:-1, 8:-8] = inputs
    low_rank.add_low_rank(within_nan[1:-1, 8:-8], given[1:-1, 8:-8], adapters, down, up, places, scales, sizes)
    found = within_nan[1:-1, 8:-8]
    assert torch.equal(found[::4], clean[::4]) and torch.equal(found[2::4], clean[2::4])
    assert found[1::2].isnan().all()
    within_nan[1:-1, 8:-8] = float("nan")
    assert within_nan.isnan().all()
    weight = torch.zeros(sum(sizes), size_in, device=DEVICE, dtype=dtype)
    group = adapters, down, up, places, scales, sizes
    found = low_rank.adapted_linear(given[1:-1, 8:-8], weight, None, None, *group, TILES[0])
    assert (found[2::4] == 0).all() and found[1::2].isnan().all() and not found[::4].isnan().any()


def test_weights_are_read_where_they_are():
    """Changed in place, as by an optimizer, they count at once; those of adapters that no row has are not read."""
    out, inputs, adapters, down, up, places, scales, sizes = example(6, [40], 72, [3, 5], torch.float32)
    adapters.fill_(1)
    before = updated(low_rank.add_low_rank, out, inputs, adapters, down, up, places, scales, sizes)
    up[0].mul_(2)
    places[1, :2] = 0  # no address
    after = updated(low_rank.add_low_rank, out, inputs, adapters, down, up, places, scales, sizes)
    torch.testing.assert_close(after - out, 2 * (before - out), rtol=1e-5, atol=1e-5)
