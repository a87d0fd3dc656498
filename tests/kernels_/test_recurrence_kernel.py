"""Recurrence over blocks of drafts: Triton against the reference, that against a plain loop over the final text.

On a machine without a GPU the kernel runs in Triton's interpreter. Rings begin as NaN, and so are the inputs of columns
that are no tokens: only what was written may be read.
"""

import itertools
from collections.abc import Iterable
from random import Random
from typing import NamedTuple

import pytest
import torch
from case_counts import cases, num_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_rounds import DUMMY, Round, drafting_rounds, verification_rounds

from hf_specdec import ops
from hf_specdec.kernels import recurrence_reference
from hf_specdec.kernels.recurrence import choose_value_block, recurrence
from hf_specdec.kernels.types import RecurrenceRing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")
# Of outputs; states and updates are float32 whatever the inputs are.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
STATE_TOLERANCE = 1e-5


class Form(NamedTuple):
    """A kind of layer, and its sizes."""

    delta: bool = False
    normalize: bool = False
    decay: str = "head"
    has_beta: bool = True
    heads: int = 2
    key_heads: int = 1
    dim: int = 8
    value_dim: int = 12

    @property
    def keywords(self) -> dict[str, bool | float]:
        return {"delta": self.delta, "normalize": self.normalize, "scale": self.dim**-0.5}

    def draw(self, batch: int, num_columns: int, dtype: torch.dtype, generator: torch.Generator) -> list[torch.Tensor]:
        """Query, key, value, decay and beta; half of the decays are small."""

        def randn(*size: int) -> torch.Tensor:
            return torch.randn(batch, num_columns, *size, generator=generator)

        query, key = randn(2, self.key_heads, self.dim).unbind(2)
        last = {"head": (), "key": (self.dim,), "rates": (self.value_dim,)}[self.decay]
        decay = randn(self.heads, *last).abs() * torch.rand(batch, num_columns, self.heads, *last).round() * 0.3
        inputs = [query, key, randn(self.heads, self.value_dim)]
        beta = [randn(self.heads).sigmoid().to(DEVICE, dtype)] if self.has_beta else [None]
        decay = decay if self.decay == "rates" else -decay
        wide = torch.promote_types(dtype, torch.float32)
        return [*(part.to(DEVICE, dtype) for part in inputs), decay.to(DEVICE, wide), *beta]

    def rates(self, dtype: torch.dtype) -> torch.Tensor | None:
        if self.decay != "rates":
            return None
        size = (self.heads, self.dim, self.value_dim)
        return -torch.rand(size, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)


FORMS = {
    "gated DeltaNet": Form(delta=True, normalize=True),
    "KDA": Form(delta=True, normalize=True, decay="key"),
    "Mamba2": Form(),
    "Mamba1": Form(decay="rates", has_beta=False, heads=1, value_dim=40),
    "lightning attention": Form(has_beta=False, key_heads=2),
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


class Memory:
    """State and ring of a layer, that of the ring NaN."""

    def __init__(self, form: Form, batch: int, ring_size: int, key_dtype: torch.dtype, dtype: torch.dtype) -> None:
        last = {"head": (), "key": (form.dim,), "rates": (form.value_dim,)}[form.decay]

        def blank(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.full((batch, ring_size, *size), NAN, dtype=dtype, device=DEVICE)

        self.state = torch.zeros(batch, form.heads, form.dim, form.value_dim, dtype=dtype, device=DEVICE)
        self.ring = RecurrenceRing(
            blank(form.key_heads, form.dim, dtype=key_dtype),
            blank(form.heads, form.value_dim),
            blank(form.heads, *last),
        )
        self.rates = form.rates(dtype)
        self.form, self.dtype = form, dtype

    def run(self, run, inputs: list[torch.Tensor], blocks: Round, dummy: int = DUMMY) -> torch.Tensor:
        base, certain, positions = (part.to(DEVICE) for part in (blocks.base, blocks.certain, blocks.positions))
        return run(
            *inputs,
            self.state,
            self.ring,
            base,
            certain,
            positions,
            dummy,
            **self.form.keywords,
            rates=self.rates,
        )

    def run_reference(self, inputs: list[torch.Tensor], blocks: Round) -> torch.Tensor:
        inputs = [part if part is None else part.to(self.dtype) for part in inputs]
        return self.run(recurrence_reference.recurrence, inputs, blocks)


class Text:
    """Inputs of the final texts of a batch, and the inputs of its rounds."""

    def __init__(self, form: Form, batch: int, num_positions: int, dtype: torch.dtype, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.form, self.batch, self.dtype = form, batch, dtype
        self.inputs = form.draw(batch, num_positions, dtype, self.generator)

    def inputs_of(self, blocks: Round) -> list[torch.Tensor]:
        """True inputs in true columns, others in other live columns, and NaN in the rest."""
        positions, is_true = blocks.positions.to(DEVICE), blocks.is_true.to(DEVICE)
        rows = torch.arange(self.batch, device=DEVICE)[:, None]
        found = []
        for true, wrong in zip(
            self.inputs, self.form.draw(self.batch, positions.shape[1], self.dtype, self.generator), strict=True
        ):
            if true is None:
                found.append(None)
                continue
            size = (*positions.shape, *[1] * (true.dim() - 2))
            chosen = torch.where(is_true.reshape(size), true[rows, positions.clamp(max=true.shape[1] - 1)], wrong)
            found.append(chosen.masked_fill((positions >= DUMMY).reshape(size), NAN))
        return found

    def run_plainly(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs `[B, T, H, V]` and states `[B, T + 1, H, K, V]` of the definition, token by token."""
        form, (query, key, value, decay, beta) = self.form, self.inputs
        rates = form.rates(self.dtype)
        if form.normalize:
            query, key = (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + 1e-6) for part in (query, key))
        groups = form.heads // form.key_heads
        query, key = (part.repeat_interleave(groups, 2) for part in (query * form.keywords["scale"], key))
        state = torch.zeros(self.batch, form.heads, form.dim, form.value_dim, dtype=self.dtype, device=DEVICE)
        outputs, states = [], [state]
        for token in range(query.shape[1]):
            here = decay[:, token]
            if rates is not None:
                here = here[:, :, None] * rates
            if form.decay == "head":
                here = here[..., None]
            state = state * (here if form.decay == "rates" else here[..., None]).exp()
            update = value[:, token]
            if form.delta:
                update = update - (state * key[:, token, :, :, None]).sum(2)
            if beta is not None:
                update = update * beta[:, token, :, None]
            state = state + key[:, token, :, :, None] * update[:, :, None]
            outputs.append((state * query[:, token, :, :, None]).sum(2))
            states.append(state)
        return torch.stack(outputs, 1), torch.stack(states, 1)


def ring_size_for(num_drafts: int, lag: int = 0) -> int:
    return 1 << (2 * (num_drafts + lag)).bit_length()


def errors_against_text(
    run, form: Form, rounds: Iterable[Round], ring_size: int, dtype: torch.dtype = torch.float32, disturb_at: int = -1
) -> tuple[float, float]:
    """Largest differences of outputs in true columns, and of states, from those of the plain loop over the text.

    They are relative to the largest output and state of the text, where these are above 1.

    Before round `disturb_at` one element of the state changes by 1e-3.
    """
    rounds = list(rounds)
    length = 1 + max(int(blocks.positions.masked_fill(~blocks.is_true, 0).max()) for blocks in rounds)
    batch = len(rounds[0].base)
    text = Text(form, batch, length, dtype)
    outputs, states = text.run_plainly()
    memory = Memory(form, batch, ring_size, dtype, dtype)
    rows = torch.arange(batch, device=DEVICE)
    of_outputs, of_states = [0.0], []
    for index, blocks in enumerate(rounds):
        if index == disturb_at:
            memory.state[0, 0, 0, 0] += 1e-3
        out = memory.run(run, text.inputs_of(blocks), blocks)
        positions, is_true = blocks.positions.to(DEVICE), blocks.is_true.to(DEVICE)
        assert (out[positions >= DUMMY] == 0.0).all()
        if is_true.any():
            expected = outputs[rows[:, None], positions.clamp(max=length - 1)]
            of_outputs.append(float((out - expected)[is_true].abs().nan_to_num(NAN, 1e30).max()))
        of_states.append(float((memory.state - states[rows, blocks.next_base.to(DEVICE)]).abs().max()))
    scales = [max(float(values.abs().max()), 1.0) for values in (outputs, states)]
    return tuple(max(found, key=poisoned) / scale for found, scale in zip((of_outputs, of_states), scales, strict=True))


def poisoned(error: float) -> float:
    """NaN counts as the largest of errors."""
    return float("inf") if error != error else error


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, in float64; NaN must be in the same places."""
    assert torch.equal(got.isnan(), expected.isnan())
    got, expected = got.double().nan_to_num(), expected.double().nan_to_num()
    return float((got - expected).norm() / expected.norm().clamp(min=1e-6))


def compare_with_reference(
    form: Form,
    rounds: Iterable[Round],
    ring_size: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    move=None,
    run=recurrence,
) -> None:
    """The kernel, or another `run`, against the reference in float64, call by call: outputs, states and rings."""
    rounds = list(rounds)
    batch = len(rounds[0].base)
    text = Text(form, batch, 1 + max(int(blocks.next_base.max()) for blocks in rounds) + 64, dtype, seed)
    memory = Memory(form, batch, ring_size, dtype, torch.float32)
    expected_memory = Memory(form, batch, ring_size, torch.float64, torch.float64)
    expected_memory.rates = None if memory.rates is None else memory.rates.double()
    for blocks in rounds:
        inputs = text.inputs_of(blocks)
        expected = expected_memory.run_reference(inputs, blocks)
        got = memory.run(run, inputs if move is None else move(inputs), blocks)
        assert got.dtype == dtype and got.shape == expected.shape
        assert (got[blocks.positions.to(DEVICE) >= DUMMY] == 0.0).all()
        assert difference(got, expected) < TOLERANCES[dtype]
        assert difference(memory.state, expected_memory.state) < STATE_TOLERANCE
        for name, part, wanted in zip(RecurrenceRing._fields, memory.ring, expected_memory.ring, strict=True):
            if name == "updates":
                assert difference(part, wanted) < STATE_TOLERANCE
            else:
                assert torch.equal(part.double().nan_to_num(7.0), wanted.nan_to_num(7.0)), name


@every_form
@pytest.mark.parametrize(
    ("num_drafts", "dtype", "lag"),
    cases(
        every := list(itertools.product([0, 1, 3, 7], [torch.float32, torch.float64], [0, 5])),
        [one for one in every if one[1] == torch.float32 and (one[2] or one[0] == 3)] + [(3, torch.float64, 5)],
    ),
)
def test_reference_equals_the_plain_loop(form, num_drafts, dtype, lag):
    """Bit for bit on a CPU, whatever was rejected before."""
    rounds = verification_rounds(num_drafts, 25, [1, 4, 9, 20], lag, seed=num_drafts)
    errors = errors_against_text(recurrence_reference.recurrence, form, rounds, ring_size_for(num_drafts, lag), dtype)
    assert errors == (0.0, 0.0) if DEVICE == "cpu" else max(errors) < (2e-6 if dtype == torch.float32 else 1e-12)


@every_form
def test_reference_keeps_states_in_float32(form):
    """Also what it reads of the ring, where its inputs are in bfloat16."""
    rounds = verification_rounds(3, 12, [1, 4, 9], 0, seed=3)
    reference = recurrence_reference.recurrence
    compare_with_reference(form, rounds, ring_size_for(3, 0), torch.bfloat16, run=reference)


@every_form
@pytest.mark.parametrize("num_drafts", cases([0, 1, 3, 7], [0, 3]))
@pytest.mark.parametrize("lag", cases([0, 5], [0]))
def test_kernel_follows_the_plain_loop(form, num_drafts, lag):
    rounds = verification_rounds(num_drafts, num_cases(25, 4), cases([1, 4, 9], [1, 4]), lag, seed=num_drafts)
    assert max(errors_against_text(recurrence, form, rounds, ring_size_for(num_drafts, lag))) < 2e-6


@pytest.mark.parametrize("run", [recurrence_reference.recurrence, recurrence], ids=["torch", "triton"])
@pytest.mark.parametrize("num_drafts", [1, 4])
def test_passes_of_a_draft_model(run, num_drafts):
    """Each further draft is a pass of its own that stores nothing; kept drafts are passed again."""
    rounds = drafting_rounds(num_drafts, num_cases(12, 3), cases([1, 4, 9], [1, 4]))
    assert max(errors_against_text(run, FORMS["gated DeltaNet"], rounds, ring_size_for(num_drafts))) < 2e-6


@pytest.mark.parametrize("run", [recurrence_reference.recurrence, recurrence], ids=["torch", "triton"])
@pytest.mark.parametrize("chunk", [None, 7])
def test_prompts(run, chunk):
    """More columns than the ring has slots, and than the kernel looks at in one step; whole and in passes."""
    form = FORMS["gated DeltaNet"]._replace(heads=1, key_heads=1)
    rounds = verification_rounds(3, 2, [70, 90], chunk=chunk)
    assert max(errors_against_text(run, form, rounds, ring_size_for(3))) < 2e-6


@pytest.mark.skipif(DEVICE == "cpu", reason="takes long in Triton's interpreter")
@every_form
def test_long_prompts(form):
    compare_with_reference(form, verification_rounds(3, 4, [256, 200, 300, 1]), ring_size_for(3))


@every_form
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("num_drafts", cases([0, 1, 3, 7], [3]))
def test_kernel_equals_reference(form, dtype, num_drafts):
    rounds = verification_rounds(num_drafts, num_cases(20, 2), cases([3, 1, 8], [3, 1]), num_cases(3, 1), seed=1)
    compare_with_reference(form, rounds, ring_size_for(num_drafts, 3), dtype)


LARGE = [
    Form(delta=True, normalize=True, heads=4, key_heads=2, dim=128, value_dim=128),
    Form(delta=True, normalize=True, decay="key", heads=2, key_heads=2, dim=128, value_dim=128),
    Form(heads=4, key_heads=1, dim=128, value_dim=64),
    Form(heads=2, key_heads=2, dim=256, value_dim=256),
    Form(decay="rates", has_beta=False, heads=1, dim=16, value_dim=1000),
]
SMALL = [
    Form(delta=True, normalize=True, heads=1, dim=128, value_dim=32),
    Form(heads=6, key_heads=2, dim=24, value_dim=40),
    Form(delta=True, heads=3, key_heads=3, dim=1, value_dim=1),
    Form(delta=True, normalize=True, has_beta=False, decay="key", heads=3, dim=65, value_dim=33),
    Form(decay="rates", heads=2, dim=5, value_dim=70),
]


@pytest.mark.parametrize(
    "form",
    cases(LARGE + SMALL, SMALL),
    ids=lambda form: f"{form.decay}, {form.heads} of {form.key_heads}, {form.dim} x {form.value_dim}",
)
@pytest.mark.parametrize("dtype", cases(list(TOLERANCES), [torch.bfloat16]))
def test_sizes(form, dtype):
    compare_with_reference(form, verification_rounds(3, num_cases(10, 1), [2, 3]), ring_size_for(3), dtype)


def draw_form(random: Random) -> Form:
    key_heads = random.randint(1, 3)
    return Form(
        delta=random.random() < 0.5,
        normalize=random.random() < 0.5,
        decay=random.choice(["head", "key", "rates"]),
        has_beta=random.random() < 0.7,
        heads=key_heads * random.randint(1, 3),
        key_heads=key_heads,
        dim=random.choice([1, 3, 16, 24]),
        value_dim=random.choice([1, 7, 16, 70]),
    )


@settings(max_examples=num_cases(60, 4), deadline=None, derandomize=True)
@given(st.randoms(use_true_random=False))
def test_random_cases(random):
    form, num_drafts, lag = draw_form(random), random.randint(0, 4), random.choice([0, 0, 2])
    lengths = [random.randint(1, num_cases(12, 6)) for _ in range(random.randint(1, num_cases(3, 2)))]
    rounds = verification_rounds(
        num_drafts, num_cases(4, 2), lengths, lag, random.choice([None, 5]), seed=random.randrange(1000)
    )
    compare_with_reference(form, rounds, ring_size_for(num_drafts, lag), seed=random.randrange(1000))


@every_form
def test_a_replayed_token_changes_the_state_as_in_its_block(form):
    """Outputs and final states with replays are those without, where each pass is one certain token."""
    num_tokens = 9
    text = Text(form, 1, num_tokens, torch.float32)
    results = []
    for width, lag in ((1, 0), (3, 2)):
        memory, outputs, base = Memory(form, 1, 8, torch.float32, torch.float32), [], 0
        for first in range(0, num_tokens, width):
            positions = torch.arange(first, first + width)[None]
            certain = first + width - (lag if first + width < num_tokens else 0)
            blocks = Round(positions, positions >= 0, torch.tensor([certain]), torch.tensor([base]), None)
            outputs.append(memory.run(recurrence, text.inputs_of(blocks), blocks))
            base = max(base, certain)
        results.append((torch.cat(outputs, dim=1), memory.state))
    for got, expected in zip(*results, strict=True):
        if DEVICE == "cpu":
            assert torch.equal(got, expected)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("run", [recurrence_reference.recurrence, recurrence], ids=["torch", "triton"])
def test_disturbances_are_seen(run):
    """Negative controls: a ring whose slots are used again too early, and one element of a state."""
    for form in cases([FORMS["gated DeltaNet"], FORMS["Mamba2"], FORMS["Mamba1"]], [FORMS["gated DeltaNet"]]):
        rounds = list(verification_rounds(3, 4, [4, 2], seed=2))
        assert max(errors_against_text(run, form, rounds, 8)) < 2e-6
        assert max(errors_against_text(run, form, rounds, 2), key=poisoned) > 1e-2
        assert max(errors_against_text(run, form, rounds, 8, disturb_at=2)) > 2e-5


@pytest.mark.parametrize("run", [recurrence_reference.recurrence, recurrence], ids=["torch", "triton"])
@every_form
def test_rows_without_a_token_change_nothing(run, form):
    """Even where their states are NaN, and base and certain anything."""
    memory = Memory(form, 2, 4, torch.float32, torch.float32)
    memory.state.fill_(NAN)
    positions = torch.full((2, 3), DUMMY)
    positions[1] += 7
    blocks = Round(positions, positions < 0, torch.tensor([9, DUMMY]), torch.tensor([3, 4000]), None)
    out = memory.run(run, Text(form, 2, 1, torch.float32).inputs_of(blocks), blocks)
    assert (out == 0.0).all()
    assert all(part.isnan().all() for part in (memory.state, *memory.ring))


@pytest.mark.parametrize("run", [recurrence_reference.recurrence, recurrence], ids=["torch", "triton"])
def test_only_uncertain_tokens_are_written_to_the_ring(run):
    form = FORMS["gated DeltaNet"]
    memory = Memory(form, 3, 8, torch.float32, torch.float32)
    positions = torch.tensor([[4, 5, 6, 7], [0, 1, 2, DUMMY], [DUMMY, 17, 18, 19]])
    certain, base = torch.tensor([5, 9, 17]), torch.tensor([4, 0, 17])
    blocks = Round(positions, positions < DUMMY, certain, base, None)
    memory.run(run, Text(form, 3, 20, torch.float32).inputs_of(blocks), blocks)
    for part in memory.ring:
        written = (~part.isnan()).reshape(3, 8, -1)
        assert torch.equal(written.any(2), written.all(2))
        assert [row.nonzero().flatten().tolist() for row in written.all(2)] == [[5, 6, 7], [], [1, 2, 3]]


@every_form
def test_views(form):
    """Inputs as projections, splits and transpositions give them."""

    def move(inputs: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        moved = []
        for index, part in enumerate(inputs):
            if part is None:
                moved.append(None)
            elif index % 2:
                moved.append(part.movedim(1, -1).contiguous().movedim(-1, 1))
            else:
                wide = torch.full((*part.shape[:-1], 2 * part.shape[-1] + 3), NAN, dtype=part.dtype, device=DEVICE)
                moved.append(wide[..., 3 : 3 + part.shape[-1]].copy_(part))
        assert not any(part.is_contiguous() for part in moved if part is not None and part.numel() > 40)
        return moved

    compare_with_reference(form, verification_rounds(2, 3, [2, 5]), ring_size_for(2), move=move)


def test_views_of_positions():
    """One row of positions for the batch, and bounds that are columns of a table."""
    form, batch = FORMS["KDA"], 3
    text = Text(form, batch, 4, torch.float32)
    positions = torch.arange(4).expand(batch, -1)
    table = torch.tensor([[0, 2], [0, 3], [0, 4]])
    blocks = Round(positions, positions >= 0, table[:, 1], table[:, 0], None)
    memories = [Memory(form, batch, 8, torch.float32, torch.float32) for _ in range(2)]
    inputs = text.inputs_of(blocks)
    out = memories[0].run(recurrence, inputs, blocks)
    expected = memories[1].run_reference(inputs, blocks)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(memories[0].state, memories[1].state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("field", ["state", "keys", "updates", "decays"])
def test_kernel_refuses_states_in_another_layout(field):
    form = FORMS["gated DeltaNet"]
    memory = Memory(form, 2, 8, torch.float32, torch.float32)
    if field == "state":
        memory.state = memory.state.transpose(2, 3).contiguous().transpose(2, 3)
    else:
        part = getattr(memory.ring, field)
        memory.ring = memory.ring._replace(**{field: part.transpose(0, 1).contiguous().transpose(0, 1)})
    positions = torch.tensor([[0], [0]])
    blocks = Round(positions, positions >= 0, torch.tensor([1, 1]), torch.tensor([0, 0]), None)
    with pytest.raises(AssertionError, match="contiguous"):
        memory.run(recurrence, Text(form, 2, 1, torch.float32).inputs_of(blocks), blocks)


@pytest.mark.parametrize("dim", [1, 16, 24, 64, 128, 256])
@pytest.mark.parametrize("value_dim", [1, 40, 64, 128, 256, 8192])
def test_a_program_keeps_its_tile_in_registers(dim, value_dim):
    block = choose_value_block(dim, value_dim)
    assert block & (block - 1) == 0 and 1 <= block <= 64 and block * dim <= 2048


@pytest.mark.parametrize("name", ["KDA", "Mamba1"])
def test_compiled_calls_equal_eager_ones(name):
    """As `torch.compile` traces a pass: the reference on a CPU, the op on a GPU."""
    torch._dynamo.reset()
    _, *rounds = verification_rounds(2, 12, [2, 4])
    rounds = [blocks for blocks in rounds if blocks.positions.shape[1] == 3]
    assert len(rounds) > 2
    text = Text(FORMS[name], 2, 60, torch.float32)
    eager, compiled = (Memory(FORMS[name], 2, 8, torch.float32, torch.float32) for _ in range(2))
    for memory in (eager, compiled):  # rounds are left out, so the ring is read where it was not written
        for part in memory.ring:
            part.fill_(0.5)

    def run(*inputs, delta, normalize, scale, rates=None):
        return ops.recurrence(*inputs, delta, normalize, scale, rates) * 2

    run_compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for blocks in rounds:
        inputs = text.inputs_of(blocks)
        with torch.inference_mode():
            assert torch.equal(compiled.run(run_compiled, inputs, blocks), eager.run(run, inputs, blocks))
        assert torch.equal(compiled.state, eager.state)
        assert all(torch.equal(got, expected) for got, expected in zip(compiled.ring, eager.ring, strict=True))


def test_the_op_says_what_it_writes():
    form = FORMS["Mamba1"]
    memory = Memory(form, 2, 4, torch.float32, torch.float32)
    for part in memory.ring:
        part.zero_()
    inputs = Text(form, 2, 3, torch.float32).inputs
    numbers = [torch.tensor(values, device=DEVICE) for values in ([0, 0], [1, 3], [[0, 1, 2], [0, 1, 2]])]
    torch.library.opcheck(
        torch.ops.hf_specdec.recurrence.default,
        (*inputs, memory.state, *memory.ring, *numbers, DUMMY, False, False, 1.0, memory.rates),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
@every_form
def test_cuda_graph_replays_with_changed_inputs(form):
    num_drafts, lengths = 3, [9, 1, 5]
    _, *rounds = verification_rounds(num_drafts, 30, lengths, lag=2)
    rounds = [blocks for blocks in rounds if blocks.positions.shape[1] == num_drafts + 1]
    assert len(rounds) > 5
    text = Text(form, len(lengths), 200, torch.bfloat16)
    memories = [Memory(form, len(lengths), 16, torch.bfloat16, torch.float32) for _ in range(2)]
    inputs = text.inputs_of(rounds[0])
    bounds = [part.to(DEVICE) for part in (rounds[0].base, rounds[0].certain, rounds[0].positions)]
    options = [form.keywords[name] for name in ("delta", "normalize", "scale")]

    def run():
        return ops.recurrence(*inputs, memories[0].state, memories[0].ring, *bounds, DUMMY, *options, memories[0].rates)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for memory in memories:
        memory.state.normal_(generator=torch.Generator(DEVICE).manual_seed(0))
        for part in memory.ring:
            part.fill_(0.5)
    for blocks in rounds:
        for buffer, values in zip(inputs, text.inputs_of(blocks), strict=True):
            if buffer is not None:
                buffer.copy_(values)
        for buffer, values in zip(bounds, (blocks.base, blocks.certain, blocks.positions), strict=True):
            buffer.copy_(values)
        graph.replay()
        expected = memories[1].run(recurrence, inputs, blocks)
        assert torch.equal(out, expected)
        for got, wanted in zip(
            (memories[0].state, *memories[0].ring), (memories[1].state, *memories[1].ring), strict=True
        ):
            assert torch.equal(got, wanted)
