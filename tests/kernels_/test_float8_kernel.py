"""Keys and values as float8 with a scale for each head of each token: what is stored, and attention over it.

On a machine without a GPU the kernels run in Triton's interpreter.
"""

from itertools import product

import pytest
import torch
from case_counts import cases

from hf_specdec.kernels import attention_reference, kv_cache_reference, rotary_reference
from hf_specdec.kernels.attention import attention
from hf_specdec.kernels.float8_reference import FLOAT8, LEAST_SCALE, dequantise, quantise
from hf_specdec.kernels.kv_cache import write_kv
from hf_specdec.kernels.rotary import rotate_and_store
from hf_specdec.kernels.types import RotaryKind

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32] + [torch.float16, torch.bfloat16] * (DEVICE == "cuda")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
NAN = float("nan")

every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def heads_of_all_sizes(*shape, generator):
    """Heads whose elements are between 1e-12 and 1e4."""
    sizes = 10.0 ** torch.randint(-12, 5, (*shape[:-1], 1), generator=generator)
    return torch.randn(*shape, generator=generator) * sizes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quantised_heads(dtype):
    """Errors are at most half a step of e4m3; the largest element uses its range; stored again nothing changes."""
    states = heads_of_all_sizes(64, 3, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    stored, scales = quantise(states)
    assert stored.dtype == FLOAT8 and scales.dtype == dtype and scales.shape == states.shape[:-1]
    assert torch.equal(scales.double().log2() % 1, torch.zeros_like(scales).double()), "powers of two"
    exact = states.double()
    read = stored.double() * scales.double()[..., None]
    step = torch.maximum(exact.abs() * 2.0**-3, scales.double()[..., None] * 2.0**-8)
    assert ((read - exact).abs() <= step / 2).all()
    largest = (exact / scales.double()[..., None]).abs().amax(dim=-1)
    assert (largest <= 448).all() and ((largest > 224) | (scales == LEAST_SCALE)).all()
    again = dequantise(stored, scales)
    if dtype != torch.float16:  # which has no such small numbers
        assert torch.equal(again.double(), read)
    assert torch.equal(dequantise(*quantise(again)), again)


def test_heads_without_a_scale():
    states = torch.zeros(5, 16)
    states[1, 3], states[2, 4], states[3, 5], states[4] = NAN, float("inf"), float("-inf"), 448 * 2.0**-20
    stored, scales = quantise(states)
    assert scales[0] == LEAST_SCALE and (dequantise(stored, scales)[0] == 0).all()
    assert scales[1:4].isnan().all() and dequantise(stored, scales)[1:4].isnan().all()
    assert scales[4] == 2.0**-20 and torch.equal(dequantise(stored, scales)[4], states[4])
    assert [tuple(one.shape) for one in quantise(torch.ones(3, 0))] == [(3, 0), (3,)]


def buffers(batch, slots, heads, dim, value_dim, dtype):
    """Keys, values and scales, filled with what is not written."""
    found = [torch.full((batch, slots, heads, size), 1.0).to(DEVICE, FLOAT8) for size in (dim, value_dim)]
    return [*found, torch.full((batch, slots, heads, 2), 7.0, dtype=dtype, device=DEVICE)]


def same_bits(left, right):
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(left, right, strict=True))


@every_dtype
@pytest.mark.parametrize(
    ("kv_heads", "dim", "value_dim"), [(1, 16, 16), (8, 128, 128), (3, 24, 40), (5, 80, 80), (1, 16, 0)]
)
def test_written_heads_equal_the_reference(kv_heads, dim, value_dim, dtype):
    generator = torch.Generator().manual_seed(0)
    states = [
        heads_of_all_sizes(3, 9, kv_heads, size, generator=generator).to(DEVICE, dtype).transpose(1, 2)
        for size in (dim, value_dim)
    ]
    positions = torch.stack([torch.randperm(30, generator=generator)[:9] for _ in range(3)]).to(DEVICE)
    found = [buffers(3, 30, kv_heads, dim, value_dim, dtype) for _ in range(2)]
    for write, (keys, values, scales) in zip((kv_cache_reference.write_kv, write_kv), found, strict=True):
        write(keys, values, *states, positions, scales)
    assert same_bits(*found)
    keys, _, scales = found[0]
    expected, scale = quantise(states[0].transpose(1, 2))
    rows = torch.arange(3, device=DEVICE)[:, None]
    assert same_bits([keys[rows, positions], scales[..., 0][rows, positions]], [expected, scale])


KINDS = [
    (RotaryKind(), 24, 24),
    (RotaryKind(shared_angles=True, half_angles=True, rounded=False), 10, 24),
    (RotaryKind(inputs_interleaved=True, outputs_interleaved=True), 16, 16),
]


@every_dtype
@pytest.mark.parametrize(("kind", "rotated", "dim"), KINDS, ids=str)
def test_rotated_heads_equal_the_reference(kind, rotated, dim, dtype):
    """Of heads that are rotated in part, too; queries are not rounded."""
    generator, batch, columns, slots = torch.Generator().manual_seed(1), 2, 3, 20
    query, key, value = (
        heads_of_all_sizes(batch, columns, heads, size, generator=generator).to(DEVICE, dtype).transpose(1, 2)
        for heads, size in ((6, dim), (3, dim), (3, 40))
    )
    cos, sin = (torch.randn(batch, columns, rotated, generator=generator).to(DEVICE, dtype) for _ in range(2))
    positions = torch.tensor([[4, 9, 0], [19, 1, 7]], device=DEVICE)
    found = [buffers(batch, slots, 3, dim, 40, dtype) for _ in range(2)]
    queries = [
        store(cos, sin, [query, key], kind, keys, values, value, positions, scales)[0]
        for store, (keys, values, scales) in zip(
            (rotary_reference.rotate_and_store, rotate_and_store), found, strict=True
        )
    ]
    assert same_bits(*found) and torch.equal(*queries)


SPLITS = {"one": {"num_programs": 1}, "five": {"num_programs": 5}, "fixed": {"fixed_splits": True}}
OPTIONS = [(), ("window",), ("chunk",), ("sinks",), ("softcap",), ("starts",), ("ends",)]


def example(dtype, num_queries=3, slots=290, kv_heads=2, groups=2, dim=24):
    """Queries, stored keys and values, and what they are in float64, for rows that end at some slots."""
    generator, batch = torch.Generator().manual_seed(2), 3
    sizes = (num_queries, kv_heads * groups), (slots, kv_heads), (slots, kv_heads)
    query, key, value = (torch.randn(batch, *size, dim, generator=generator).to(DEVICE, dtype) for size in sizes)
    keys, values, scales = buffers(batch, slots, kv_heads, dim, dim, dtype)
    for states in (key, value):  # heads of different sizes
        states *= 2.0 ** torch.randint(-3, 3, (*states.shape[:-1], 1), generator=generator).to(states)
    every = torch.arange(slots, device=DEVICE).expand(batch, -1)
    kv_cache_reference.write_kv(keys, values, key.transpose(1, 2), value.transpose(1, 2), every, scales)
    lasts = torch.tensor([num_queries - 1, 77, slots - 2])[:, None]
    positions = (lasts - num_queries + 1 + torch.arange(num_queries)).to(DEVICE)
    stored = [one.transpose(1, 2) for one in (keys, values, scales)]
    exact = [dequantise(one, stored[2][..., index].double()) for index, one in enumerate(stored[:2])]
    return query.transpose(1, 2), stored, exact, positions


def keywords(options, positions):
    every = {"window": 70, "chunk": 70, "softcap": 5.0, "sinks": torch.linspace(-1.0, 1.0, 4, device=DEVICE)}
    every |= {
        "starts": (positions[:, 0] - 40).clamp(min=0),
        "ends": positions[:, -1:].expand_as(positions).contiguous(),
    }
    return {"scaling": 0.2, **{name: every[name] for name in options}}


@every_dtype
@pytest.mark.parametrize(("options", "splits"), cases(every := list(product(OPTIONS, SPLITS)), every[::4]), ids=str)
def test_attention_over_stored_heads(options, splits, dtype):
    """Kernel and reference against attention in float64 over what is stored; slots that nobody sees are not read."""
    query, (keys, values, scales), exact, positions = example(dtype)
    options = keywords(options, positions)
    expected = attention_reference.attention(query.double(), *exact, positions, **options)
    # The weights of values are rounded to the dtype, too.
    largest = max(float(expected.abs().max()), 2.0)
    close = {"atol": TOLERANCES[dtype] * largest / 2, "rtol": TOLERANCES[dtype]}
    plain = attention_reference.attention(query, keys, values, positions, **options, scales=scales)
    torch.testing.assert_close(plain.double(), expected, **close)
    for row, last in enumerate(positions[:, -1].tolist()):
        scales[row, :, last + 1 :] = NAN
    found = attention(query, keys, values, positions, **options, scales=scales, **SPLITS[splits])
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, **close)


@every_dtype
@pytest.mark.parametrize("splits", SPLITS)
def test_packed_prompts(splits, dtype):
    """As prompts packed in one row, with a start for each query."""
    query, stored, exact, positions = example(dtype)
    slots = stored[0].shape[2]
    expected = attention_reference.attention(query.double(), *exact, positions, 0.2).flatten(0, 1)
    flat = [one.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2) for one in stored]
    starts = (torch.arange(3, device=DEVICE) * slots)[:, None].expand_as(positions)
    packed = query.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2)
    at = (positions + starts).flatten()[None], starts.flatten()[None].contiguous()
    for run, options in ((attention, SPLITS[splits]), (attention_reference.attention, {})):
        found = run(packed, *flat[:2], at[0], 0.2, starts=at[1], scales=flat[2], **options)[0]
        torch.testing.assert_close(found.double(), expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_a_head_that_is_not_finite_is_seen():
    """By the queries that see its slot, and by no others: as without float8."""
    query, (keys, values, scales), _, positions = example(torch.float32)
    for index in (0, 1):
        broken = scales.clone()
        broken[1, 0, 76, index] = NAN
        for run in (attention, attention_reference.attention):
            found = run(query, keys, values, positions, 0.2, scales=broken)
            assert (
                found[1, 1:, :2].isnan().all() and found[[0, 2]].isfinite().all() and found[1, :, 2:].isfinite().all()
            )
