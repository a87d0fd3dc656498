"""Input preparation of a drafter's first pass: the kernel against the reference, that against a loop, and guarantees.

On a machine without a GPU the kernel runs in Triton's interpreter. Under a memory checker run the tests that `-k
"(edge or rounds) and triton"` selects, with PYTORCH_NO_CUDA_MEMORY_CACHING=1: each of their tensors is an allocation of
its own and of its exact size then, so that a read or write beside it is seen.
"""

import itertools
from random import Random
from typing import NamedTuple

import pytest
import torch
from case_counts import cases, num_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec import ops
from hf_specdec.kernels import round_state_reference
from hf_specdec.kernels.round_state import prepare_inputs
from hf_specdec.kernels.types import DraftInputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MASK_TOKEN = 151_665
POISON = -0x7777777777777777
LEAST, MOST = -(2**63), 2**63 - 1

both = pytest.mark.parametrize(
    "prepare",
    [pytest.param(round_state_reference.prepare_inputs, id="torch"), pytest.param(prepare_inputs, id="triton")],
)
every_layout = pytest.mark.parametrize(("parallel", "shift"), list(itertools.product([False, True], [0, 1])))


class Row(NamedTuple):
    length: int
    committed: int
    limit: int
    finished: bool


class Case(NamedTuple):
    rows: list[Row]
    slots: int
    num_draft_tokens: int
    parallel: bool
    shift: int

    @property
    def num_kept(self) -> int:
        return self.num_draft_tokens + 1

    @property
    def num_masks(self) -> int:
        return self.num_draft_tokens - 1 if self.parallel else 0

    @property
    def width(self) -> int:
        return self.num_kept + self.num_masks

    @property
    def dummy_slot(self) -> int:
        return self.slots - 1

    @property
    def tokens(self) -> list[list[int]]:
        """A different token in every place."""
        return [[1_000_000 * (row + 1) + place for place in range(self.slots)] for row in range(len(self.rows))]

    def inputs(self) -> list[torch.Tensor]:
        return [torch.tensor(values) for values in (self.tokens, *zip(*self.rows, strict=True))]


def draw_case(random: Random, num_rows: int, num_draft_tokens: int, parallel: bool, shift: int, slots: int) -> Case:
    """A batch of rows anywhere between the extremes of the contract, often at them and now and then beyond."""
    num_kept, rows = num_draft_tokens + 1, []
    for _ in range(num_rows):
        limit = random.choice([random.randint(1, slots - 1), slots - 1])
        length = random.choice([random.randint(1, limit), random.randint(0, slots), 1, max(1, limit - 1), limit])
        within, beyond = random.randint(0, num_kept), random.choice([LEAST, -1, num_kept + 1, MOST])
        committed = random.choice([within, within, within, 0, num_kept, beyond])
        rows.append(Row(length, committed, limit, finished=random.random() < 0.15))
    return Case(rows, slots, num_draft_tokens, parallel, shift)


def draw_small_case(random: Random) -> Case:
    return draw_case(
        random,
        num_rows=random.randint(1, 9),
        num_draft_tokens=random.randint(1, 32),
        parallel=random.choice([False, True]),
        shift=random.choice([0, 1]),
        slots=random.randint(2, 100),
    )


def bury(values: torch.Tensor, margin: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer of poison, and a view of it that holds `values`, `margin` elements from every side."""
    poison = True if values.dtype == torch.bool else POISON
    buffer = torch.full([size + 2 * margin for size in values.shape], poison, dtype=values.dtype, device=DEVICE)
    view = buffer[tuple(slice(margin, margin + size) for size in values.shape)]
    return buffer, view.copy_(values)


def run(prepare, case: Case, margin: int = 0, inputs: list[torch.Tensor] | None = None) -> torch.Tensor:
    """What `prepare` returns for the pass, `[4, B, W]`; also checks that it writes to nothing that it is given.

    With a margin the tokens are a view into a larger buffer; without one they are that buffer.
    """
    read = [bury(values, margin) for values in inputs or case.inputs()]
    before = [buffer.clone() for buffer, _ in read]
    out = prepare(*(view for _, view in read), case.width, case.num_masks, MASK_TOKEN, case.shift, 0)
    for (buffer, _), copy in zip(read, before, strict=True):
        assert torch.equal(buffer, copy)
    return torch.stack(out[:4]).cpu()


def plain(case: Case) -> torch.Tensor:
    """The docstring of `round_state_reference.prepare_inputs` as a loop over rows and columns."""
    out = []
    for tokens, row in zip(case.tokens, case.rows, strict=True):
        newest = row.length - 1 - case.shift
        num_kept = min(max(row.committed, 0), case.num_kept)
        columns = [None] * (case.num_kept - num_kept)
        for source in range(num_kept):
            columns.append((newest - num_kept + 1 + source, source))
        for step in range(case.num_masks):
            columns.append((newest + 1 + step, None))
        lines = []
        for column in columns:
            line = (0, case.dummy_slot, 0, -1)
            if column is not None and not row.finished:
                slot, source = column
                if slot >= 0 and slot + 1 + case.shift < row.limit:
                    is_mask = source is None
                    token = MASK_TOKEN if is_mask else tokens[slot + case.shift]
                    line = (token, slot, slot, -1 if is_mask else source)
            lines.append(line)
        out.append(lines)
    return torch.tensor(out).permute(2, 0, 1)


@settings(max_examples=3000 if DEVICE == "cuda" else num_cases(150, 60), deadline=None, derandomize=True)
@given(st.randoms(use_true_random=False))
def test_kernel_equals_reference(random):
    case, margin = draw_small_case(random), random.randint(0, 3)
    assert torch.equal(run(prepare_inputs, case, margin), run(round_state_reference.prepare_inputs, case, margin))


@settings(max_examples=num_cases(500, 200), deadline=None, derandomize=True)
@given(st.randoms(use_true_random=False))
def test_reference_equals_plain_loop(random):
    case, margin = draw_small_case(random), random.randint(0, 3)
    assert torch.equal(run(round_state_reference.prepare_inputs, case, margin), plain(case))


@every_layout
def test_many_rows(parallel, shift):
    random = Random(0)
    num_rows = 500 if DEVICE == "cuda" else num_cases(40, 20)
    for num_draft_tokens in cases(range(1, 33), (1, 2, 5, 8, 16, 31, 32)):
        slots = random.randint(2, 200)
        case = draw_case(random, num_rows, num_draft_tokens, parallel, shift, slots)
        expected = plain(case)
        for prepare in (round_state_reference.prepare_inputs, prepare_inputs):
            assert torch.equal(run(prepare, case, margin=num_draft_tokens % 4), expected)


@both
@every_layout
@pytest.mark.parametrize("num_draft_tokens", cases([1, 2, 32], [1, 32]))
def test_edge_rows(prepare, num_draft_tokens, parallel, shift):
    for slots in (2, 40):
        rows = [
            Row(length, committed, limit, finished)
            for limit in {1, slots - 1}
            for length in {1, 2, max(1, limit - 1), limit}
            for committed in (LEAST, 0, 1, num_draft_tokens + 1, MOST)
            for finished in (False, True)
        ]
        case = Case(rows, slots, num_draft_tokens, parallel, shift)
        assert torch.equal(run(prepare, case), plain(case))


@both
@every_layout
def test_only_committed_and_mask_tokens_reach_live_slots(prepare, parallel, shift):
    random = Random(1)
    for num_draft_tokens in (1, 3, 8, 32):
        case = draw_case(random, 20, num_draft_tokens, parallel, shift, slots=90)
        for row, (tokens, slots, positions, sources) in zip(
            case.rows, run(prepare, case).transpose(0, 1).tolist(), strict=True
        ):
            committed = min(max(row.committed, 0), case.num_kept)
            kept = range(row.length - shift - committed, row.length - shift)
            masks = range(row.length - shift, row.length - shift + case.num_masks)
            alive = [] if row.finished else range(0, row.limit - 1 - shift)
            live = [column for column, slot in enumerate(slots) if slot != case.dummy_slot]
            assert [slots[column] for column in live] == [slot for slot in (*kept, *masks) if slot in alive]
            assert all(positions[column] == slots[column] for column in live)
            for column in set(range(case.width)) - set(live):
                assert (tokens[column], positions[column], sources[column]) == (0, 0, -1)
            assert all(source < committed for source in sources)


@both
@pytest.mark.parametrize("shift", [0, 1])
def test_masks_stop_at_the_limit(prepare, shift):
    rows = [Row(40 - remaining, 4, 40, False) for remaining in range(12)]
    case = Case(rows, slots=41, num_draft_tokens=8, parallel=True, shift=shift)
    tokens, slots, _, _ = run(prepare, case)
    assert (tokens == MASK_TOKEN).sum(dim=1).tolist() == [max(0, min(remaining - 1, 7)) for remaining in range(12)]
    assert ((slots != case.dummy_slot) == (tokens != 0)).all()
    # The newest token takes part as long as another one can follow it.
    assert (slots[:, case.num_kept - 1] != case.dummy_slot).tolist() == [remaining > 0 for remaining in range(12)]


@both
@every_layout
def test_finished_rows_are_padding(prepare, parallel, shift):
    rows = [Row(length, committed, 30, True) for length in (2, 15, 29, 30) for committed in (0, 3, 6)]
    case = Case(rows, slots=31, num_draft_tokens=5, parallel=parallel, shift=shift)
    for values, padding in zip(run(prepare, case), (0, case.dummy_slot, 0, -1), strict=True):
        assert (values == padding).all()


@both
@pytest.mark.parametrize("shift", [0, 1])
def test_a_round_of_32_fits_twice_as_many_columns(prepare, shift):
    case = Case([Row(50, 33, 99, False)], slots=100, num_draft_tokens=32, parallel=True, shift=shift)
    out = DraftInputs(*run(prepare, case)[:, 0].tolist(), [], [])
    assert case.width == 64
    assert out.slots == out.positions == list(range(50 - shift - 33, 50 - shift + 31))
    assert out.tokens == case.tokens[0][50 - 33 : 50] + [MASK_TOKEN] * 31
    assert out.sources == list(range(33)) + [-1] * 31


@both
@every_layout
@pytest.mark.parametrize("num_draft_tokens", cases([1, 4, 9], [4, 9]))
def test_rounds_leave_committed_tokens_only(prepare, num_draft_tokens, parallel, shift):
    """A cache that is written by slot holds, after every round, the committed tokens of a row and no mask of the past.

    Its entries are (is it a mask, token, position).
    """
    random = Random(2)
    slots, batch, rejected = 60, 4, -5
    limits = [random.randint(30, slots - 1) for _ in range(batch)]
    lengths = [1, *(random.randint(2, 9) for _ in range(batch - 1))]
    finished = [False] * batch
    truth = Case([None] * batch, slots, num_draft_tokens, parallel, shift).tokens
    caches = [
        [(False, tokens[slot + shift], slot) if slot < length - shift else None for slot in range(slots)]
        for tokens, length in zip(truth, lengths, strict=True)
    ]
    while not all(finished):
        committed = [
            0 if finished[row] else min(random.randint(0, num_draft_tokens + 1), limits[row] - lengths[row])
            for row in range(batch)
        ]
        lengths = [length + count for length, count in zip(lengths, committed, strict=True)]
        finished = [finished[row] or lengths[row] == limits[row] or random.random() < 0.02 for row in range(batch)]
        rows = [Row(*values) for values in zip(lengths, committed, limits, finished, strict=True)]
        case = Case(rows, slots, num_draft_tokens, parallel, shift)
        inputs = case.inputs()
        for tokens, length in zip(inputs[0], lengths, strict=True):
            tokens[length:] = rejected
        out = run(prepare, case, inputs=inputs).transpose(0, 1).tolist()
        for row, tokens, cache, columns in zip(rows, truth, caches, out, strict=True):
            before = cache.copy()
            for column, (token, slot, position, source) in enumerate(zip(*columns, strict=True)):
                cache[slot] = (column >= case.num_kept, token, position)
                if source >= 0:  # Row i of the verified block stands i places after the last token of the round before.
                    assert slot == row.length - row.committed - shift + source
            if row.finished:
                assert cache[: case.dummy_slot] == before[: case.dummy_slot]
                continue
            num_live = row.length - shift
            assert cache[:num_live] == [(False, tokens[slot + shift], slot) for slot in range(num_live)]
            masks = range(num_live, max(num_live, min(num_live + case.num_masks, row.limit - 1 - shift)))
            assert [cache[slot] for slot in masks] == [(True, MASK_TOKEN, slot) for slot in masks]


@both
@every_layout
@pytest.mark.parametrize("has_offsets", [False, True])
def test_position_ids_and_places_of_steps(prepare, has_offsets, parallel, shift):
    """Offsets move the position ids of what is run; steps have the slots after the pass, up to the limit."""
    rows = [Row(40 - remaining, 4, 40, remaining == 7) for remaining in range(1, 13)]
    case = Case(rows, slots=41, num_draft_tokens=5, parallel=parallel, shift=shift)
    inputs, num_steps = [one.to(DEVICE) for one in case.inputs()], 9
    offsets = torch.arange(-3, 9, device=DEVICE) if has_offsets else None
    sizes = case.width, case.num_masks, MASK_TOKEN, shift
    without, found = prepare(*inputs, *sizes, 0, None), prepare(*inputs, *sizes, num_steps, offsets)
    assert all(torch.equal(found[at], without[at]) for at in (0, 1, 3)) and without.step_slots.shape == (0, 12, 1)
    moved = 0 if offsets is None else offsets[:, None]
    assert torch.equal(found.positions, torch.where(found.slots < case.dummy_slot, without.positions + moved, 0))
    assert found.step_slots.shape == found.step_positions.shape == (num_steps, 12, 1)
    for at, row in enumerate(rows):
        for step in range(num_steps):
            slot = row.length - shift + case.num_masks + step
            is_run = not row.finished and slot <= row.limit - 2
            position = slot + (0 if offsets is None else int(offsets[at]))
            assert found.step_slots[step, at, 0] == (slot if is_run else case.dummy_slot)
            assert found.step_positions[step, at, 0] == (position if is_run else 0)


def test_kernel_refuses_strided_rows():
    tokens = torch.zeros(2, 20, dtype=torch.int64, device=DEVICE)
    numbers = torch.ones(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(AssertionError, match="unit stride"):
        prepare_inputs(tokens[:, ::2], numbers, numbers, numbers, numbers > 1, 4, 0, MASK_TOKEN, 0, 0)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
@every_layout
def test_cuda_graph_replays_with_changed_inputs(parallel, shift):
    random = Random(3)

    def draw():
        return draw_case(random, num_rows=9, num_draft_tokens=6, parallel=parallel, shift=shift, slots=50)

    case = draw()
    inputs = [values.to(DEVICE) for values in case.inputs()]
    sizes = case.width, case.num_masks, MASK_TOKEN, shift, 3
    ops.prepare_inputs(*inputs, *sizes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.prepare_inputs(*inputs, *sizes)
    for _ in range(100):
        case = draw()
        for buffer, values in zip(inputs, case.inputs(), strict=True):
            buffer.copy_(values)
        for buffer in out:
            buffer.fill_(POISON)
        graph.replay()
        expected = round_state_reference.prepare_inputs(*inputs, *sizes)
        assert all(torch.equal(got, wanted) for got, wanted in zip(out, expected, strict=True))
