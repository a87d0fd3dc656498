"""Causal depthwise convolution over blocks of drafts: Triton and its reference against a convolution of the whole text.

On a machine without a GPU the kernel runs in Triton's interpreter. Rings begin as NaN, and so are the inputs of columns
that are no tokens: only what was written may be read.
"""

from collections.abc import Iterable
from itertools import product
from random import Random

import pytest
import torch
from case_counts import cases, num_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_rounds import DUMMY, Round, drafting_rounds, verification_rounds
from torch.nn.functional import conv1d, pad, silu

from hf_specdec import ops
from hf_specdec.kernels import short_conv_reference
from hf_specdec.kernels.short_conv import short_conv

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

both = pytest.mark.parametrize(
    "run", [pytest.param(short_conv_reference.short_conv, id="torch"), pytest.param(short_conv, id="triton")]
)


def ring_size_for(width: int, num_drafts: int) -> int:
    return 1 << (width + 2 * num_drafts).bit_length()


def as_given(inputs: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "transposed":
        return inputs.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "slice":
        wide = torch.full((*inputs.shape[:2], inputs.shape[2] + 5), NAN, dtype=inputs.dtype, device=inputs.device)
        return wide[..., 3:-2].copy_(inputs)
    return inputs


def largest_error(
    run,
    rounds: Iterable[Round],
    ring_size: int,
    width: int,
    channels: int = 5,
    has_bias: bool = True,
    has_silu: bool = True,
    dtype: torch.dtype = torch.float32,
    layout: str = "contiguous",
) -> float:
    """Relative error of the outputs of true columns, of float64 over the whole text; infinite where one is NaN."""
    rounds = list(rounds)
    batch, length = (
        len(rounds[0].base),
        1 + max(int(part.positions.masked_fill(~part.is_true, 0).max()) for part in rounds),
    )
    generator = torch.Generator().manual_seed(0)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(DEVICE, dtype)

    text, weight, bias = randn(batch, length, channels), randn(channels, width), randn(channels) if has_bias else None
    expected = conv1d(
        pad(text.double().transpose(1, 2), (width - 1, 0)),
        weight.double()[:, None],
        None if bias is None else bias.double(),
        groups=channels,
    ).transpose(1, 2)
    expected = silu(expected) if has_silu else expected
    ring = torch.full((batch, ring_size, channels), NAN, dtype=dtype, device=DEVICE)
    rows, worst = torch.arange(batch, device=DEVICE)[:, None], 0.0
    for blocks in rounds:
        positions, is_true = blocks.positions.to(DEVICE), blocks.is_true.to(DEVICE)
        here = positions.clamp(max=length - 1)
        inputs = torch.where(is_true[..., None], text[rows, here], randn(*positions.shape, channels))
        inputs.masked_fill_((positions >= DUMMY)[..., None], NAN)
        out = run(as_given(inputs, layout), ring, positions, DUMMY, weight, bias, has_silu)
        assert out.dtype == dtype and out.shape == inputs.shape
        assert (out[positions >= DUMMY] == 0.0).all()
        if is_true.any():
            error = (out.double() - expected[rows, here])[is_true].norm() / expected[rows, here][is_true].norm()
            worst = max(worst, float(error.nan_to_num(float("inf"))))
    return worst


@both
@pytest.mark.parametrize(
    ("width", "num_drafts", "has_bias"),
    cases(
        every := list(product([2, 3, 4, 8], [0, 1, 3, 7], [True, False])),
        [one for one in every if one[1] in (0, 3) and one[2] == ((one[0] in (2, 8)) == (one[1] == 0))],
    ),
)
def test_equals_the_convolution_of_the_text(run, width, num_drafts, has_bias):
    rounds = verification_rounds(num_drafts, num_cases(25, 8), [1, 2, 9, 30], seed=width)
    size = ring_size_for(width, num_drafts)
    assert largest_error(run, rounds, size, width, has_bias=has_bias, has_silu=not has_bias) < 1e-5


@both
@pytest.mark.parametrize(
    ("dtype", "layout"),
    cases(
        every := list(product(TOLERANCES, ["contiguous", "transposed", "slice"])),
        [one for one in every if one[0] == torch.float32 or one[1] == "transposed"],
    ),
)
def test_types_and_layouts(run, dtype, layout):
    if run is short_conv and dtype == torch.float64:
        run = ops.short_conv  # the reference
    rounds = verification_rounds(3, num_cases(20, 5), [1, 12])
    assert largest_error(run, rounds, 16, width=4, channels=70, dtype=dtype, layout=layout) < TOLERANCES[dtype]


@both
@pytest.mark.parametrize("chunk", [None, 1, 2, 40])
def test_prompts_longer_than_the_ring(run, chunk):
    for width in cases((2, 4), (4,)):
        rounds = verification_rounds(3, 4, [130, 1, 41, 77] if chunk in (None, 40) else [13, 1, 4, 8], chunk=chunk)
        assert largest_error(run, rounds, ring_size_for(width, 3), width) < 1e-5


@both
def test_passes_of_a_draft_model(run):
    assert largest_error(run, drafting_rounds(4, num_cases(12, 5), [1, 4, 9]), ring_size_for(4, 4), 4) < 1e-5


@settings(max_examples=num_cases(100, 8), deadline=None, derandomize=True)
@given(st.randoms(use_true_random=False))
def test_random_cases(random: Random):
    width, num_drafts = random.randint(1, 8), random.randint(0, 6)
    lengths = [random.randint(1, 40) for _ in range(random.randint(1, 3))]
    rounds = verification_rounds(num_drafts, 5, lengths, chunk=random.choice([None, 9]), seed=random.randrange(1000))
    settings = {
        "channels": random.choice([1, 3, 64, 129]),
        "has_bias": random.random() < 0.5,
        "has_silu": random.random() < 0.5,
        "layout": random.choice(["contiguous", "transposed", "slice"]),
    }
    assert largest_error(short_conv, rounds, ring_size_for(width, num_drafts), width, **settings) < 1e-5


@both
def test_a_ring_that_is_too_small_is_seen(run):
    """Negative control: with 3 drafts of which none is accepted, 7 slots hold the 3 inputs before a block, 4 do not."""
    for size, is_right in ((8, True), (4, False)):
        error = largest_error(run, verification_rounds(3, 10, [4, 9], seed=3), size, width=4)
        assert (error < 1e-5) == is_right


@both
def test_rows_without_a_token_change_nothing(run):
    ring = torch.full((2, 8, 3), NAN, device=DEVICE)
    positions = torch.full((2, 4), DUMMY, device=DEVICE)
    positions[1] += 3
    inputs, weight = torch.full((2, 4, 3), NAN, device=DEVICE), torch.ones(3, 4, device=DEVICE)
    assert (run(inputs, ring, positions, DUMMY, weight, None, False) == 0.0).all()
    assert ring.isnan().all()


@both
@pytest.mark.parametrize("num_columns", [1, 3, 8, 9, 50])
def test_the_ring_holds_the_last_inputs(run, num_columns):
    size, first = 8, 5
    ring = torch.full((1, size, 2), -1.0, device=DEVICE)
    positions = torch.tensor([[DUMMY, *range(first, first + num_columns), DUMMY]], device=DEVICE)
    inputs = positions[..., None].expand(-1, -1, 2).float().contiguous()
    run(inputs, ring, positions, DUMMY, torch.ones(2, 3, device=DEVICE), None, False)
    expected = [-1.0] * size
    for position in range(first, first + num_columns):
        expected[position % size] = float(position)
    assert ring[0, :, 0].tolist() == ring[0, :, 1].tolist() == expected


def test_kernel_refuses_rings_in_another_layout():
    inputs, weight = torch.zeros(2, 1, 4, device=DEVICE), torch.zeros(4, 3, device=DEVICE)
    positions = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(AssertionError):
        short_conv(inputs, torch.zeros(2, 4, 8, device=DEVICE).transpose(1, 2), positions, DUMMY, weight, None, True)
    with pytest.raises(AssertionError, match="weight"):
        ring = torch.zeros(2, 8, 4, device=DEVICE)
        short_conv(inputs, ring, positions, DUMMY, torch.zeros(3, 4, device=DEVICE).t(), None, True)


def test_compiled_calls_equal_eager_ones():
    torch._dynamo.reset()
    weight, bias = torch.randn(6, 4, device=DEVICE), torch.randn(6, device=DEVICE)
    rings = torch.zeros(2, 2, 16, 6, device=DEVICE)

    def run(*inputs):
        return ops.short_conv(*inputs, weight, bias, True) * 2

    run_compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for blocks in verification_rounds(3, 12, [2, 4]):
        if blocks.positions.shape[1] == 4:
            positions, inputs = blocks.positions.to(DEVICE), torch.randn(2, 4, 6, device=DEVICE)
            with torch.inference_mode():
                outs = [
                    run_(inputs, ring, positions, DUMMY) for run_, ring in zip((run, run_compiled), rings, strict=True)
                ]
            assert torch.equal(*outs) and torch.equal(*rings)
    assert rings.any()


def test_the_op_says_what_it_writes():
    inputs, ring, weight = torch.randn(2, 3, 6), torch.zeros(2, 8, 6), torch.randn(6, 4)
    inputs, ring, weight = (part.to(DEVICE) for part in (inputs, ring, weight))
    positions = torch.arange(3, device=DEVICE).repeat(2, 1)
    torch.library.opcheck(
        torch.ops.hf_specdec.short_conv.default,
        (inputs, ring, positions, DUMMY, weight, None, True),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
def test_cuda_graph_replays_with_changed_inputs():
    channels, weight = 100, torch.randn(100, 4, device=DEVICE)
    rings = torch.zeros(2, 3, 16, channels, device=DEVICE)
    inputs = torch.randn(3, 4, channels, device=DEVICE)
    positions = torch.zeros(3, 4, dtype=torch.int64, device=DEVICE)

    def run():
        return ops.short_conv(inputs, rings[0], positions, DUMMY, weight, None, True)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    rings.zero_()
    for blocks in verification_rounds(3, 40, [5, 1, 9]):
        if blocks.positions.shape[1] == 4:
            positions.copy_(blocks.positions)
            inputs.normal_()
            graph.replay()
            assert torch.equal(out, short_conv(inputs, rings[1], positions, DUMMY, weight, None, True))
            assert torch.equal(*rings)
    assert rings.any()
