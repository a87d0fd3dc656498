"""Attention in splits at fixed places: against its reference, and the same bits however queries are divided.

On a machine without a GPU the kernels run in Triton's interpreter.
"""

import functools
from itertools import product

import pytest
import torch
from case_counts import cases
from interpreter import same_bits

from hf_specdec.kernels import attention as attention_kernel
from hf_specdec.kernels import attention_reference, attention_splits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32] + [torch.float16, torch.bfloat16] * (DEVICE == "cuda")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DIMS = [16, 24] + [64, 128, 256] * (DEVICE == "cuda")
NAN = float("nan")
attention = functools.partial(attention_kernel.attention, fixed_splits=True)
HEADS, KV_HEADS, SLOTS = 4, 2, 290
OPTIONS = [(), ("window",), ("chunk",), ("sinks", "softcap"), ("window", "sinks")]


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    """Several splits in few slots, of several blocks; outputs and workspaces begin as NaN."""
    monkeypatch.setattr(attention_splits, "SPLIT", 64)
    new_empty = torch.Tensor.new_empty

    def new_poisoned(self, *size, **keys):
        out = new_empty(self, *size, **keys)
        return out.fill_(NAN) if out.is_floating_point() else out

    monkeypatch.setattr(torch.Tensor, "new_empty", new_poisoned)


def example(lasts, num_queries, dim=16, dtype=torch.float32, slots=SLOTS):
    """Queries of rows that end at `lasts`, all keys and values, and the positions."""
    generator = torch.Generator().manual_seed(dim)
    sizes = ((num_queries, HEADS), (slots, KV_HEADS), (slots, KV_HEADS))
    states = [torch.randn(len(lasts), *size, dim, generator=generator) for size in sizes]
    positions = torch.tensor(lasts)[:, None] - num_queries + 1 + torch.arange(num_queries)
    return [one.to(DEVICE, dtype).transpose(1, 2) for one in states], positions.to(DEVICE)


def keywords(options, window=70):
    every = {"window": window, "chunk": window, "softcap": 5.0}
    every["sinks"] = torch.linspace(-1.0, 1.0, HEADS, device=DEVICE)
    return {"scaling": 0.25, **{name: every[name] for name in options}}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dim", "options"),
    cases(list(product(DIMS, OPTIONS)), [(24, ()), (16, ("chunk",)), (16, ("window", "sinks")), (16, OPTIONS[3])]),
)
def test_equals_reference_whatever_is_shared(options, dim, dtype):
    (query, key, value), positions = example([2, 150, 285], 3, dim, dtype)
    positions[1, 2] = SLOTS - 1  # padding
    given = keywords(options)
    expected = attention_reference.attention(query.double(), key.double(), value.double(), positions, **given)
    for row, last in enumerate([2, 149, 285]):  # no query sees what is after its position
        key[row, :, last + 1 :] = value[row, :, last + 1 :] = NAN
    results = [attention(query, key, value, positions, **given, num_programs=count) for count in (1, 2, 4)]
    assert all(torch.equal(result, results[0]) for result in results)
    assert (results[0].double() - expected).norm() / expected.norm() < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS[:1] + DIMS[2:])
@pytest.mark.parametrize("options", cases([one for one in OPTIONS if "chunk" not in one], [(), ("window", "sinks")]))
def test_bits_of_a_query_do_not_depend_on_others(options, dim, dtype):
    """A prompt that is packed with others, its end in a round of a batch, and each of its queries alone."""
    lengths, given = [90, 3, 201], keywords(options)
    (query, key, value), _ = example([SLOTS - 1] * 3, SLOTS, dim, dtype)
    rows = torch.tensor([row for row, length in enumerate(lengths) for _ in range(length)], device=DEVICE)
    slots = torch.cat([torch.arange(length) for length in lengths]).to(DEVICE)
    packed = attention(
        query[rows, :, slots].transpose(0, 1)[None],
        *(one.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2) for one in (key, value)),
        (rows * SLOTS + slots)[None],
        **given,
        starts=(rows * SLOTS)[None],
    )[0].split(lengths)
    ends = torch.tensor(lengths, device=DEVICE)
    for count, programs in ((1, 3), (3, 1)):
        positions = ends[:, None] - count + torch.arange(count, device=DEVICE)
        last = query.gather(2, positions[:, None, :, None].expand(-1, HEADS, -1, dim))
        found = attention(last, key, value, positions, **given, num_programs=programs)
        assert all(same_bits(one, whole[-count:]) for one, whole in zip(found, packed, strict=True))
    # With as many slots as are live, as eager chunks of a prefill have.
    positions = torch.arange(40, 90, device=DEVICE)[None]
    alone = attention(query[:1, :, 40:90], key[:1, :, :91], value[:1, :, :91], positions, **given)
    assert same_bits(alone[0], packed[0][40:])


@pytest.mark.parametrize("num_programs", [1, 3])
def test_starts_and_ends_of_rows(num_programs):
    (query, key, value), positions = example([9, 100, 262], 4)
    starts, ends = torch.tensor([8, 70, 0], device=DEVICE), positions[:, -1:].expand(-1, 4).contiguous()
    given = keywords(()) | {"starts": starts, "ends": ends}
    expected = attention_reference.attention(query.double(), key.double(), value.double(), positions, **given)
    found = attention(query, key, value, positions, **given, num_programs=num_programs)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert (found[0, :2] == 0).all()  # before the start of their row


@pytest.mark.parametrize("num_programs", [1, 2])
def test_a_window_is_counted_in_whole_blocks_from_the_start(num_programs):
    """A row from slot 37 on gives the bits of the same row from slot 0 on."""
    shift, given = 37, keywords(("window",), window=50)
    (query, key, value), positions = example([200], 2)
    expected = attention(query, key, value, positions, **given, num_programs=num_programs)
    later = [torch.nn.functional.pad(one, (0, 0, shift, 0), value=NAN) for one in (key, value)]
    starts = torch.tensor([shift], device=DEVICE)
    found = attention(query, *later, positions + shift, **given, starts=starts, num_programs=num_programs)
    assert torch.equal(found, expected)
