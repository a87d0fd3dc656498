"""Attention over the ragged cache, and the writes to it: Triton against its references, and guarantees of both.

On a machine without a GPU the kernels run in Triton's interpreter.
"""

from itertools import pairwise, product
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from case_counts import cases, num_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec.cache.key_layers import attention_layers
from hf_specdec.cache.ragged_cache import RaggedCache
from hf_specdec.kernels import attention_reference, kv_cache_reference
from hf_specdec.kernels.attention import attention
from hf_specdec.kernels.attention_splits import choose_splits
from hf_specdec.kernels.kv_cache import write_kv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32] + [torch.float16, torch.bfloat16] * (DEVICE == "cuda")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
NAN = float("nan")

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


@pytest.fixture(autouse=True, scope="module")
def poisoned_allocations():
    """Outputs and workspaces begin as NaN, so that what a kernel leaves out is seen."""
    new_empty = torch.Tensor.new_empty

    def new_poisoned(self, *size, **kwargs):
        out = new_empty(self, *size, **kwargs)
        return out.fill_(NAN) if out.is_floating_point() else out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", new_poisoned)
        yield


class Case(NamedTuple):
    """A call of `attention`; each row's queries end at the slot in `lasts`, those named in `padding` are padding."""

    lasts: list[int]
    slots: int
    num_queries: int = 1
    kv_heads: int = 1
    groups: int = 1
    dim: int = 16
    value_dim: int | None = None
    padding: tuple[tuple[int, int], ...] = ()
    options: tuple[str, ...] = ()
    window: int = 7
    starts: tuple[int, ...] | None = None
    ends: tuple[tuple[int, ...], ...] | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def keywords(self) -> dict[str, Any]:
        heads = self.kv_heads * self.groups
        every = {"window": self.window, "chunk": self.window}
        every |= {"sinks": torch.linspace(-1.0, 1.0, heads, device=DEVICE), "softcap": 5.0}
        every["starts"] = None if self.starts is None else torch.tensor(self.starts, device=DEVICE)
        every["ends"] = None if self.ends is None else torch.tensor(self.ends, device=DEVICE)
        return {"scaling": self.dim**-0.5} | {name: every[name] for name in self.options}

    def positions(self) -> torch.Tensor:
        positions = torch.tensor(self.lasts)[:, None] - self.num_queries + 1 + torch.arange(self.num_queries)
        for row, column in self.padding:
            positions[row, column] = self.slots - 1
        return positions.to(DEVICE)

    def inputs(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        batch, heads, value_dim = len(self.lasts), self.kv_heads * self.groups, self.value_dim or self.dim
        # As transformers and the cache hand them over: [B, n, heads, D], seen as [B, heads, n, D].
        return [
            torch.randn(batch, *size, generator=generator).to(DEVICE, self.dtype).transpose(1, 2)
            for size in (
                (self.num_queries, heads, self.dim),
                (self.slots, self.kv_heads, self.dim),
                (self.slots, self.kv_heads, value_dim),
            )
        ]


def check(case: Case, num_splits: int | None = None) -> None:
    query, key, value = case.inputs()
    positions = case.positions()
    is_live = positions < case.slots - 1
    if "starts" in case.options:
        is_live &= positions >= case.keywords["starts"][:, None]
    expected = attention_reference.attention(query.double(), key.double(), value.double(), positions, **case.keywords)
    assert expected.isfinite().all()
    lasts = case.keywords["ends"] if "ends" in case.options else positions
    for row, here in enumerate(is_live):  # what no live query of the row may see is poison
        live = positions[row][here].tolist()
        first = max(0, min(live) - case.window + 1) if live and "window" in case.options else 0
        if live and "chunk" in case.options:
            first = min(live) // case.window * case.window
        first = max(first, case.starts[row]) if "starts" in case.options else first
        for states in (key, value):
            states[row, :, :first] = NAN
            states[row, :, max(lasts[row][here].tolist(), default=-1) + 1 :] = NAN
    got = attention(query, key, value, positions, **case.keywords, num_programs=num_splits)
    assert got.shape == expected.shape and got.dtype == case.dtype
    assert (got[~is_live] == 0.0).all()
    if is_live.any():
        error = (got[is_live].double() - expected[is_live]).norm() / expected[is_live].norm()
        assert error < TOLERANCES[case.dtype]


OPTIONS = [(), ("window",), ("chunk",), ("sinks",), ("softcap",), ("window", "sinks", "softcap")]


@every_dtype
@pytest.mark.parametrize(
    ("num_queries", "num_splits", "options"),
    cases(
        every := list(product([1, 3], [1, 2, 7], OPTIONS)),
        [one for one in every if one[:2] == ((1, 7) if one[2] in (("window",), ("softcap",), OPTIONS[-1]) else (3, 1))],
    ),
    ids=str,
)
def test_equals_reference(dtype, num_queries, options, num_splits):
    slots = 290
    lasts, padding = [num_queries - 1, 77, slots - 2], ((1, num_queries - 1),)
    case = Case(lasts, slots, num_queries, 2, 2, 24, padding=padding, options=options, dtype=dtype)
    check(case, num_splits)
    if "window" in options:
        check(case._replace(window=150), num_splits)
    if "chunk" in options:  # beside what is above: of which the queries are the end, the beginning, or both
        for size in (2, 76, 77, 78, 144, 289):
            check(case._replace(window=size), num_splits)


@pytest.mark.parametrize(
    ("options", "num_splits"),
    cases(
        every := list(product([("chunk", "starts", "sinks"), ("chunk", "ends", "softcap")], [1, 3])),
        [every[0], every[3]],
    ),
    ids=str,
)
def test_chunks_of_rows_with_starts_and_ends(options, num_splits):
    """Chunks are counted from slot 0, whatever the start of a row, and by the query, not by its end."""
    ends = ((3, 3, 3, 3), (81, 81, 79, 80), (259, 261, 262, 262))
    case = Case([3, 80, 262], 290, 4, 2, 2, 24, padding=((1, 3),), options=options, starts=(0, 70, 260), ends=ends)
    for size in (1, 7, 79, 100):
        check(case._replace(window=size), num_splits)


@every_dtype
@pytest.mark.parametrize(
    ("options", "num_splits"),
    cases(
        every := list(product([("ends",), ("ends", "window"), ("ends", "starts", "sinks", "softcap")], [1, 2, 7])),
        [one for one in every if one[1] == (1 if "window" in one[0] else 7)],
    ),
    ids=str,
)
def test_queries_of_a_block_see_later_slots(dtype, options, num_splits):
    """To the end of their block, to another end of each, or no further than themselves; windows count back from the
    query, not from its end. In the second row the block is shorter, in the third one query stands before the start."""
    slots = 290
    ends = ((3, 3, 3, 3), (79, 78, 79, 7), (250, 261, 262, 262))
    case = Case([3, 80, 262], slots, 4, 2, 2, 24, padding=((1, 3),), options=options, ends=ends, dtype=dtype)
    case = case._replace(starts=(0, 70, 260))
    check(case, num_splits)
    if "window" in options:
        check(case._replace(window=2), num_splits)
        check(case._replace(window=150), num_splits)


def test_ends_at_the_positions_change_nothing():
    case = Case([5, 40], 64, 3, 2, 2, 16, padding=((0, 2),), options=("window",))
    (query, key, value), positions = case.inputs(), case.positions()
    for function in (attention, attention_reference.attention):
        plain = function(query, key, value, positions, **case.keywords)
        assert torch.equal(function(query, key, value, positions, **case.keywords, ends=positions), plain)


@every_dtype
@pytest.mark.parametrize(
    ("options", "num_splits"),
    cases(
        every := list(product([("starts",), ("starts", "window"), ("starts", "sinks", "softcap")], [1, 2, 7])),
        [one for one in every if one[1] == (1 if "window" in one[0] else 7)],
    ),
    ids=str,
)
def test_slots_before_the_start_of_a_row_are_not_read(dtype, options, num_splits):
    """Starts before, inside and behind the queries; those before their row's start are padding."""
    slots = 290
    case = Case([40, 77, 150, slots - 2, 6], slots, 3, 2, 2, 24, options=options, dtype=dtype)
    check(case._replace(starts=(0, 76, 33, 250, 20)), num_splits)
    check(case._replace(starts=(40, 77, 149, slots - 2, 5), window=150), num_splits)


@every_dtype
@pytest.mark.parametrize(
    ("options", "num_splits"),
    cases(
        every := list(product([(), ("window",), ("sinks", "softcap")], [1, 3])),
        [one for one in every if one[1] == (3 if "window" in one[0] else 1)],
    ),
    ids=str,
)
def test_packed_prompts(dtype, options, num_splits):
    """Prompts packed in one row, each with a start of its own, equal to prompts in rows of their own."""
    slots, generator = 90, torch.Generator().manual_seed(0)
    # Row, first and last position: chunks in any order of rows, one query long and longer than a block of queries.
    packed = [(2, 0, 40), (0, 88, 88), (4, 3, 3), (3, 30, 35), (1, 0, 0), (5, 60, 75)]
    kv_heads, groups, dim = 2, 3, 24
    key, value = (torch.randn(6, slots, kv_heads, dim, generator=generator).to(DEVICE, dtype) for _ in range(2))
    rows = torch.tensor([row for row, first, last in packed for _ in range(first, last + 1)], device=DEVICE)
    own = torch.tensor([at for _, first, last in packed for at in range(first, last + 1)], device=DEVICE)
    query = torch.randn(1, len(rows), kv_heads * groups, dim, generator=generator).to(DEVICE, dtype).transpose(1, 2)
    starts, positions = rows * slots, rows * slots + own
    positions[[5, 60]], starts[7] = 6 * slots - 1, positions[7] + 2  # padding
    is_live = torch.ones(len(rows), dtype=torch.bool)
    is_live[[5, 7, 60]] = False
    keywords = Case([0], slots, kv_heads=kv_heads, groups=groups, dim=dim, options=options).keywords
    expected = torch.cat(
        [
            attention_reference.attention(
                query[:, :, place : place + 1].double(),
                key[row : row + 1].double().transpose(1, 2),
                value[row : row + 1].double().transpose(1, 2),
                at[None, None],
                **keywords,
            )
            for place, (row, at) in enumerate(zip(rows, own, strict=True))
        ],
        dim=1,
    )[0]
    for states in (key, value):  # what no query may see
        for row, _, last in packed:
            states[row, last + 1 :] = NAN
    flat = [states.view(1, -1, kv_heads, dim).transpose(1, 2) for states in (key, value)]
    for run in (attention, attention_reference.attention):
        extra = {"num_programs": num_splits} if run is attention else {}
        given = [one.nan_to_num() if extra == {} else one for one in flat]
        got = run(query, *given, positions[None], **keywords, starts=starts[None], **extra)[0]
        assert (got[~is_live] == 0.0).all()
        error = (got[is_live].double() - expected[is_live]).norm() / expected[is_live].norm()
        assert error < TOLERANCES[dtype]


@pytest.mark.parametrize(
    "options", [{}, {"num_programs": 3}, {"fixed_splits": True}], ids=["one split", "splits", "fixed splits"]
)
def test_a_prompt_of_nan_leaves_those_packed_with_it_alone(options):
    generator, lengths, slots = torch.Generator().manual_seed(0), [5, 7, 20], 32
    states = [torch.randn(1, 2, 3 * slots + 1, 16, generator=generator).to(DEVICE) for _ in range(2)]
    starts = torch.cat([torch.full((n,), row * slots) for row, n in enumerate(lengths)])[None].to(DEVICE)
    positions = torch.cat([row * slots + torch.arange(n) for row, n in enumerate(lengths)])[None].to(DEVICE)
    query = torch.randn(1, 4, sum(lengths), 16, generator=generator).to(DEVICE)
    expected = attention(query, *states, positions, 0.25, starts=starts, **options)
    for one in states:
        one[:, :, slots : 2 * slots] = NAN
    found = attention(query, *states, positions, 0.25, starts=starts, **options)
    is_nan = (starts[0] == slots).cpu()
    assert found[0, is_nan].isnan().all() and torch.equal(found[0, ~is_nan], expected[0, ~is_nan])


@every_dtype
@pytest.mark.parametrize(
    ("dim", "value_dim"),
    cases(
        [(16, 16), (24, 24), (64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (16, 40)],
        [(16, 16), (80, 80), (128, 128), (256, 256), (192, 128), (16, 40)],
    ),
)
@pytest.mark.parametrize("num_splits", cases([1, 3], [3]))
def test_head_sizes(dtype, dim, value_dim, num_splits):
    check(Case([20, 148], 150, 5, 1, 4, dim, value_dim, padding=((0, 4),), dtype=dtype), num_splits)


@pytest.mark.parametrize("options", [(), ("window", "sinks")], ids=str)
def test_prompts(options):
    """As in prefill: hundreds of queries, rows of which begin or end with padding."""
    padding = tuple((0, column) for column in range(250, 300)) + tuple((1, column) for column in range(30))
    check(Case([299, 310], 320, 300, 1, 3, 16, padding=padding, options=options))


@every_dtype
@pytest.mark.parametrize(
    ("num_queries", "kv_heads", "groups", "dim"), [(64, 1, 8, 16), (7, 2, 12, 16), (5, 1, 17, 200)]
)
@pytest.mark.parametrize(
    ("options", "num_splits"),
    cases(list(product([(), ("window", "sinks")], [1, 2])), [((), 2), (("window", "sinks"), 1)]),
    ids=str,
)
def test_more_rows_of_a_key_head_than_one_program_takes(dtype, num_queries, kv_heads, groups, dim, options, num_splits):
    check(Case([128], 130, num_queries, kv_heads, groups, dim, options=options, dtype=dtype), num_splits)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_program_reads_up_to_its_own_last_query(num_splits):
    num_queries, groups, slots, dim = 64, 8, 130, 16
    query = torch.ones(1, groups, num_queries, dim, device=DEVICE)
    key, value = torch.ones(2, 1, 1, slots, dim, device=DEVICE)
    value[:, :, num_queries // 2 :] = NAN  # Even a weight of 0 would let it through.
    positions = torch.arange(num_queries, device=DEVICE)[None]
    got = attention(query, key, value, positions, scaling=dim**-0.5, num_programs=num_splits)
    assert (got[:, : num_queries // 2] == 1.0).all()


@pytest.mark.parametrize(
    ("options", "num_splits"),
    cases(
        every := list(product([(), ("window",), ("sinks",), ("softcap",)], [1, 3])),
        [one for one in every if (one[1] == 1) == (one[0] in (("window",), ("softcap",)))],
    ),
    ids=str,
)
def test_rows_without_a_live_query_read_nothing(options, num_splits):
    padding = ((0, 0), (0, 1), (2, 0), (2, 1))
    check(Case([60, 60, 60], 70, 2, 1, 2, padding=padding, options=options), num_splits)
    check(Case([60], 70, 2, 1, 2, padding=padding[:2], options=options), num_splits)


def draw_case(random: Random) -> Case:
    num_queries, kv_heads = random.choice([1, 2, 3, 5, 8, 17]), random.randint(1, 3)
    slots = random.randint(num_queries + 1, num_cases(400, 200))
    lasts = [random.choice([num_queries - 1, slots - 2, random.randint(num_queries - 1, slots - 2)]) for _ in range(2)]
    return Case(
        lasts,
        slots,
        num_queries,
        kv_heads,
        groups=random.randint(1, 16 if kv_heads == 1 else 4),
        dim=random.choice([16, 24, 64, 80]),
        value_dim=random.choice([None, 16, 48]),
        padding=tuple((row, column) for row in range(2) for column in range(num_queries) if random.random() < 0.2),
        options=tuple(
            name for name in (random.choice(["window", "chunk"]), "sinks", "softcap") if random.random() < 0.4
        ),
        window=random.choice([1, 7, 100, random.randint(1, 400)]),
        seed=random.randrange(1000),
    )


@settings(max_examples=num_cases(30, 10), deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([None, 1, 2, 3, 8, 33]))
def test_random_cases(random, num_splits):
    check(draw_case(random), num_splits)


def test_number_of_splits():
    """At least 48 slots each, and no more programs than a GPU balances; more slots never get fewer, more rows more."""
    reaches, every = (1, 63, 64, 200, 512, 1024, 2048, 4096, 131072), (1, 8, 24, 64, 256, 1024)
    chosen = {(one, reach): choose_splits(one, 4 * one, reach, 132) for one in every for reach in reaches}
    for (num_programs, reach), splits in chosen.items():
        assert 1 <= splits <= min(max(1, reach // 48), 128) and splits.bit_count() == 1
        assert splits == 1 or (splits - 0.5) * num_programs <= 4 * 132
    assert all(chosen[one, few] <= chosen[one, many] for one in every for few, many in pairwise(reaches))
    assert all(chosen[few, reach] >= chosen[many, reach] for reach in reaches for few, many in pairwise(every))
    # Fastest on an H200 of 1, 2, 4 and 8, for 8 key heads.
    assert [chosen[8 * batch, 512] for batch in (1, 8, 32)] == [8, 2, 1]
    assert chosen[8, 2048] == 8 and chosen[256, 2048] == 2
    # Of trees on an H100, for 8 key heads and programs of 64 queries of 4 query heads.
    trees = {(n, batch): 8 * batch * -(-4 * n // 64) for n in (16, 32) for batch in (1, 8)}
    fastest = {(16, 384): (4, 1), (32, 1100): (8, 1), (16, 4200): (16, 2), (32, 4200): (8, 1)}
    for (n, slots), splits in fastest.items():
        found = [choose_splits(trees[n, batch], 32 * n * batch, slots, 132) for batch in (1, 8)]
        assert tuple(found) == splits


@pytest.mark.parametrize(
    "options", [{}, {"window": 3}, {"chunk": 3}, {"softcap": 5.0}, {"window": 3, "softcap": 5.0}], ids=str
)
def test_reference_is_finite_for_padding_queries(options):
    query, key, value = torch.randn(3, 1, 2, 8, 16)
    positions = torch.tensor([[0, 1, 2, 6, 7, 8, 11, 1000]])
    assert attention_reference.attention(query, key, value, positions, scaling=0.25, **options).isfinite().all()


@pytest.mark.parametrize("attend", [attention_reference.attention, attention], ids=["torch", "triton"])
def test_cache_views_serve_every_live_query(attend):
    """Whatever bound the host has, a query at the last live slot is not taken for a padding column."""
    slots, num_queries, dim = 40, 3, 16
    for live in (3, 17, slots - 1, slots, slots + 5):
        last = min(live, slots - 1) - 1
        cache = RaggedCache(attention_layers(1), slots, torch.tensor([last + 1, 2], device=DEVICE))
        positions = torch.tensor([[last - 2, last - 1, last], [0, 1, slots - 1]], device=DEVICE)
        cache.advance(positions, live)
        query, key, value = torch.randn(3, 2, 2, num_queries, dim, device=DEVICE)
        keys, values = cache.update(key, value, 0)
        layer = cache.layers[0]
        whole = attention_reference.attention(
            query, layer.keys.transpose(1, 2), layer.values.transpose(1, 2), positions, scaling=0.25
        )
        got = attend(query, keys, values, positions, scaling=0.25)
        is_live = positions < slots - 1
        torch.testing.assert_close(got[is_live], whole[is_live])
        assert got.isfinite().all()


def draw_states(batch, num_states, kv_heads, dim, value_dim, dtype):
    """New states as projections give them: values a slice of a wider output."""
    key_states = torch.randn(batch, num_states, kv_heads, dim).to(DEVICE, dtype).transpose(1, 2)
    wide = torch.randn(batch, num_states, kv_heads, dim + value_dim).to(DEVICE, dtype).transpose(1, 2)
    return key_states, wide[..., dim:]


@pytest.mark.parametrize(
    ("kv_heads", "dim", "value_dim"), [(1, 16, 16), (8, 128, 128), (3, 24, 40), (40, 192, 128), (5, 80, 80), (1, 16, 0)]
)
@pytest.mark.parametrize(
    ("num_states", "cache_dtype"),
    cases(list(product([1, 9], [torch.float32, torch.float16])), [(1, torch.float16), (9, torch.float32)]),
)
def test_written_keys_and_values_equal_the_reference(kv_heads, dim, value_dim, num_states, cache_dtype):
    torch.manual_seed(0)
    batch, slots = 3, 30
    states = draw_states(batch, num_states, kv_heads, dim, value_dim, torch.float32)
    positions = torch.stack([torch.randperm(slots)[:num_states] for _ in range(batch)]).to(DEVICE)
    caches = [
        [torch.full((batch, slots, kv_heads, size), NAN, dtype=cache_dtype, device=DEVICE) for size in (dim, value_dim)]
        for _ in range(2)
    ]
    for write, cache in zip((kv_cache_reference.write_kv, write_kv), caches, strict=True):
        write(*cache, *states, positions)
    for expected, got in zip(*caches, strict=True):
        assert torch.equal(expected.nan_to_num(nan=7.0), got.nan_to_num(nan=7.0))


@pytest.mark.parametrize("write", [kv_cache_reference.write_kv, write_kv], ids=["torch", "triton"])
def test_writes_to_the_dummy_slot_touch_no_other_slot(write):
    batch, slots, kv_heads, dim = 2, 10, 2, 16
    states = draw_states(batch, 6, kv_heads, dim, dim, torch.float32)
    cache = [torch.full((batch, slots, kv_heads, dim), NAN, device=DEVICE) for _ in range(2)]
    positions = torch.tensor([[9, 9, 3, 9, 4, 9], [9] * 6], device=DEVICE)
    write(*cache, *states, positions)
    for buffer, source in zip(cache, states, strict=True):
        assert torch.equal(buffer[0, 3], source[0, :, 2]) and torch.equal(buffer[0, 4], source[0, :, 4])
        written = buffer.isfinite().all(dim=(2, 3))
        assert written.nonzero().tolist() == [[0, 3], [0, 4], [0, 9], [1, 9]]
        assert (~buffer.isnan()).sum() == 4 * kv_heads * dim


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("options", [(), ("window", "sinks", "softcap")], ids=str)
@pytest.mark.parametrize("batch", [1, 40])
def test_a_graph_replays_with_other_positions(options, batch):
    """One capture serves every length: writing and attending, with one split and with many."""
    slots, num_queries, kv_heads, groups, dim = 2000, 4, 8, 4, 64
    case = Case([num_queries - 1] * batch, slots, num_queries, kv_heads, groups, dim, options=options, window=600)
    case = case._replace(dtype=torch.bfloat16)
    query, key, value = case.inputs()
    keys, values = key.transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous()
    states = [buffer[:, :num_queries].transpose(1, 2).clone() for buffer in (keys, values)]
    positions, keywords = case.positions(), case.keywords

    def write_and_attend():
        write_kv(keys, values, *states, positions)
        return attention(query, keys.transpose(1, 2), values.transpose(1, 2), positions, **keywords)

    write_and_attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = write_and_attend()
    random = Random(0)
    for _ in range(5):
        lasts = [random.randint(num_queries - 1, slots - 2) for _ in range(batch)]
        positions.copy_(case._replace(lasts=lasts, padding=((0, 3),)).positions())
        for new in states:
            new.normal_()
        graph.replay()
        is_live = positions < slots - 1
        expected = attention_reference.attention(
            query.double(), keys.transpose(1, 2).double(), values.transpose(1, 2).double(), positions, **keywords
        )
        error = (out[is_live].double() - expected[is_live]).norm() / expected[is_live].norm()
        assert error < TOLERANCES[torch.bfloat16] and (out[~is_live] == 0.0).all()


def random_tree(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Parents `[count]` of the nodes of a tree, -1 of the root, and words of their ancestors `[count, W]`."""
    parents = [-1] + [int(torch.randint(max(0, node - 9), node, (), generator=generator)) for node in range(1, count)]
    bits: list[int] = []
    for node, parent in enumerate(parents):
        bits.append(1 << node | (bits[parent] if node else 0))
    words = [[(one >> 64 * word & (1 << 64) - 1) for word in range(-(-count // 64))] for one in bits]
    signed = [[word - (1 << 64) if word >> 63 else word for word in one] for one in words]
    return torch.tensor(parents), torch.tensor(signed)


@every_dtype
@pytest.mark.parametrize(
    ("count", "options", "num_splits"),
    cases(
        every := list(product([1, 9, 64, 128], [(), ("window",), ("starts", "sinks", "softcap")], [1, 3])),
        [one for one in every if one[2] == (1 if "window" in one[1] else 3) and (one[0] in (9, 128)) == bool(one[1])],
    ),
    ids=str,
)
def test_nodes_of_a_tree(dtype, count, options, num_splits):
    """Each node sees the text and its ancestors: as if they alone were the row, at the slots of their positions."""
    slots, window, roots = 290, 130, [0, 77, 290 - count - 1, 289]
    case = Case(roots, slots, count, 2, 2, 24, options=options, window=window, starts=(0, 70, 100, 0), dtype=dtype)
    query, key, value = case.inputs()
    generator = torch.Generator().manual_seed(count)
    trees = [random_tree(count, generator) for _ in roots]
    ancestors = torch.stack([words for _, words in trees]).to(DEVICE)
    positions = torch.full((len(roots), count), slots - 1)
    expected = torch.zeros(len(roots), count, 4, 24, dtype=torch.float64, device=DEVICE)
    for row, (root, (parents, _)) in enumerate(zip(roots, trees, strict=True)):
        for node in range(count if root < slots - 1 else 0):
            path = [node]
            while parents[path[-1]] >= 0:
                path.append(int(parents[path[-1]]))
            positions[row, node] = root + len(path) - 1
            seen = [*range(root), *(root + one for one in reversed(path)), slots - 1]
            own = [states[row : row + 1, :, seen].double() for states in (key, value)]
            at = positions[row, node].view(1, 1).to(DEVICE)
            keywords = case.keywords | ({"starts": case.keywords["starts"][row, None]} if "starts" in options else {})
            one = attention_reference.attention(query[row : row + 1, :, node, None].double(), *own, at, **keywords)
            expected[row, node] = one[0, 0]
    if count > 5:
        positions[1, 5] = slots - 1  # padding among the nodes, which none has as its ancestor
        ancestors[1] &= ~torch.tensor([1 << 5] + [0] * (ancestors.shape[2] - 1), device=DEVICE)
        keep = torch.tensor([not trees[1][1][node, 0] >> 5 & 1 for node in range(count)], device=DEVICE)
    positions = positions.to(DEVICE)
    is_live = positions < slots - 1
    if count > 5:
        is_live[1] &= keep
    double = [one.double() for one in (query, key, value)]
    reference = attention_reference.attention(*double, positions, **case.keywords, ancestors=ancestors)
    assert torch.allclose(reference[is_live], expected[is_live], rtol=1e-5, atol=1e-6)  # softmax in float32
    for row, root in enumerate(roots):
        for states in (key, value):
            states[row, :, root + count if root < slots - 1 else 0 :] = NAN
            if "starts" in options:
                states[row, :, : case.starts[row]] = NAN
            if "window" in options:
                states[row, :, : max(root - window + 1, 0)] = NAN
    got = attention(query, key, value, positions, **case.keywords, ancestors=ancestors, num_programs=num_splits)
    assert (got[positions == slots - 1] == 0.0).all()
    error = (got[is_live].double() - expected[is_live]).norm() / expected[is_live].norm()
    assert error < TOLERANCES[dtype]


@pytest.mark.parametrize(
    ("roots", "count", "options", "num_splits", "dtype"),
    [
        ([253, 61, 339], 9, (), 1, torch.float32),
        ([253, 61, 339], 9, ("starts", "sinks"), 3, torch.bfloat16),
        ([253, 339], 66, ("window",), 3, torch.float32),
    ],
    ids=str,
)
def test_fixed_splits_give_a_node_the_bits_that_its_text_gives(roots, count, options, num_splits, dtype):
    """Where nodes end a block of slots, and a split; the last row is finished."""
    slots, starts = 340, (0, 7, 0)[: len(roots)]
    case = Case(roots, slots, count, 1, 2, 24, options=options, window=130, starts=starts, dtype=dtype)
    query, key, value = case.inputs()
    generator = torch.Generator().manual_seed(count)
    trees = [random_tree(count, generator) for _ in roots]
    ancestors = torch.stack([words for _, words in trees]).to(DEVICE)
    paths = [[[node] for node in range(count)] for _ in roots]
    for row, (parents, _) in enumerate(trees):
        for path in paths[row]:
            while parents[path[0]] >= 0:
                path.insert(0, int(parents[path[0]]))
    steps = torch.tensor([[len(path) - 1 for path in of_row] for of_row in paths])
    positions = (torch.tensor(roots)[:, None] + steps).clamp(max=slots - 1).to(DEVICE)
    keywords = case.keywords | {"num_programs": num_splits, "fixed_splits": True}
    found = attention(query, key, value, positions, **keywords, ancestors=ancestors)
    assert (found[-1] == 0.0).all()
    for row in range(len(roots) - 1):
        for node in (0, int(steps[row].argmax()), count - 1):
            path, root = paths[row][node], roots[row]
            own = [states[row : row + 1].clone() for states in (key, value)]
            for states in own:
                states[0, :, root : root + len(path)] = states[0, :, [root + one for one in path]]
            starts = {"starts": case.keywords["starts"][row, None]} if "starts" in options else {}
            # All queries, of which those of the path see its keys: numpy's bits depend on the place of a row.
            expected = attention(query[row : row + 1], *own, positions[row : row + 1], **keywords | starts)
            assert torch.equal(found[row, path], expected[0, path])


def test_a_chain_is_a_tree_in_which_each_parent_is_the_node_before():
    case = Case([5, 40], 64, 3, 2, 2, 16, padding=((0, 2),), options=("window",))
    (query, key, value), positions = case.inputs(), case.positions()
    ancestors = torch.tensor([[1], [3], [7]], device=DEVICE).expand(2, 3, 1)
    for function in (attention, attention_reference.attention):
        plain = function(query, key, value, positions, **case.keywords)
        found = function(query, key, value, positions, **case.keywords, ancestors=ancestors)
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [(), ("window",), ("sinks", "softcap")], ids=str)
def test_nodes_before_the_first_slot(options):
    """They are padding, and the others are as if these were not there: here a chain, of which 2 of 6 are."""
    case = Case([0, 30], 64, 4, 2, 2, 16, options=options, window=9)
    (query, key, value), positions = case.inputs(), case.positions()
    expected = attention_reference.attention(query, key, value, positions, **case.keywords)
    query = torch.cat([query[:, :, :2], query], dim=2)
    positions = torch.cat([positions[:, :1] - 2, positions[:, :1] - 1, positions], dim=1)
    ancestors = (2 ** torch.arange(1, 7, device=DEVICE) - 1)[:, None].expand(2, 6, 1)
    for function in (attention, attention_reference.attention):
        found = function(query, key, value, positions, **case.keywords, ancestors=ancestors)
        torch.testing.assert_close(found[:, 2:], expected, rtol=1e-5, atol=1e-6)
        assert (found[0, :2] == 0.0).all() and (found[1, :2] != 0.0).any()
