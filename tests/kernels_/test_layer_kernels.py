"""Norms, rotary embeddings and gated activations: Triton against their references, and references against PyTorch.

On a machine without a GPU the kernels run in Triton's interpreter.
"""

import itertools

import pytest
import torch
from case_counts import cases
from torch import nn
from torch.nn import functional as F

from hf_specdec.kernels import (
    gated_activation_reference,
    gather_rows_reference,
    rms_norm_reference,
    rotary_reference,
)
from hf_specdec.kernels.gated_activation import gated_activation
from hf_specdec.kernels.gated_activation_reference import ACTIVATIONS
from hf_specdec.kernels.gather_rows import gather_rows, join_rows
from hf_specdec.kernels.rms_norm import add_rms_norm, joined_norms, rms_norm
from hf_specdec.kernels.rotary import rotary, rotary_angles, rotate_and_store
from hf_specdec.kernels.types import AnglesKind, ClampedGate, NormKind, RotaryKind

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes in numpy, which has no bfloat16.
DTYPES = [torch.float32, torch.bfloat16 if DEVICE == "cuda" else torch.float16]
EPSILON = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
NAN = float("nan")
NORMS = {
    "llama": NormKind(cast_first=True),
    "gpt-oss": NormKind(),
    "gemma": NormKind(offset=1.0),
    "cohere": NormKind(centered=True),
}
ROTARIES = {
    "halves": RotaryKind(),
    "gpt-oss": RotaryKind(shared_angles=True, half_angles=True),
    "glm": RotaryKind(inputs_interleaved=True, outputs_interleaved=True, shared_angles=True),
    "cohere": RotaryKind(inputs_interleaved=True, outputs_interleaved=True, rounded=False),
    "deepseek": RotaryKind(inputs_interleaved=True, shared_angles=True),
}


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def within_nan(values, margin=16):
    """A view of the values, with NaN in front of, behind and between its rows."""
    wide = torch.full([size + 2 * margin for size in values.shape], NAN, device=values.device, dtype=values.dtype)
    view = wide[tuple(slice(margin, -margin) for _ in values.shape)]
    view.copy_(values)
    return view


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that kernels are to write is NaN before."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(NAN))


def assert_rounded(found, expected, dtype):
    """Equal but for roundings of float32, which may change the rounding to `dtype`."""
    torch.testing.assert_close(found.double(), expected.double(), rtol=EPSILON[dtype], atol=EPSILON[dtype] / 4)


def norms(widths):
    """Parameters of a test: each two of width, kind and dtype together, or all three."""
    return pytest.mark.parametrize(
        ("width", "kind", "dtype"),
        cases(
            every := list(itertools.product(widths, NORMS, DTYPES)),
            [one for at, one in enumerate(every) if (at + at // 2 + at // 8) % 2 == 0],
        ),
    )


@norms([1, 8, 100, 576] if DEVICE == "cpu" else [100, 4096, 16384])
def test_norm(kind, width, dtype, poisoned):
    inputs, weight = draw(5, 3, width, dtype=dtype), draw(width, dtype=dtype, seed=1)
    inputs[0, 0] *= 1e-3  # of the size of epsilon
    for some in (weight, None):
        expected = rms_norm_reference.rms_norm(
            inputs.double(), some if some is None else some.double(), 1e-6, kind=NORMS[kind]
        )
        assert_rounded(rms_norm_reference.rms_norm(inputs, some, 1e-6, NORMS[kind]), expected, dtype)
        found = rms_norm(inputs, some, 1e-6, NORMS[kind])
        assert found.dtype == dtype
        assert_rounded(found, expected, dtype)


@norms([8, 100, 576] if DEVICE == "cpu" else [100, 4096, 16384])
def test_norm_of_a_sum(kind, width, dtype, poisoned):
    """The bits of a sum and of its norm by themselves; rows of any strides."""
    inputs, addend, weight = (draw(5, 3, width, dtype=dtype, seed=seed) for seed in range(3))
    weight = weight[0, 0].clone()
    views = [(inputs, addend), (within_nan(inputs), within_nan(addend))]
    views.append((within_nan(inputs)[:, -1:], addend[:, -1:]))
    for (first, second), some in itertools.product(views, (weight, None)):
        expected = rms_norm_reference.add_rms_norm(first, second, some, 1e-6, NORMS[kind])
        total, found = add_rms_norm(first, second, some, 1e-6, NORMS[kind])
        assert total.dtype == found.dtype == dtype and torch.equal(total, expected[0])
        assert torch.equal(found, rms_norm(total, some, 1e-6, NORMS[kind]))
        exact = rms_norm_reference.rms_norm(
            total.double(), some if some is None else some.double(), 1e-6, kind=NORMS[kind]
        )
        assert_rounded(found, exact, dtype)
        assert_rounded(expected[1], exact, dtype)


@norms([8, 100, 576] if DEVICE == "cpu" else [100, 4096, 16384])
def test_joined_norms(kind, width, dtype, poisoned):
    """The bits of the norms by themselves; of rows of any strides, and of rows of a table."""
    table, states = draw(9, width, dtype=dtype), draw(5, 3, width, dtype=dtype, seed=1)
    weights = [draw(width, dtype=dtype, seed=seed) for seed in (2, 3)]
    index = (torch.arange(15, device=DEVICE) * 4 % 9).view(5, 3)
    views = [(states, None), (within_nan(states), None), (table, index), (table, index.t().contiguous().t())]
    # Each view is once the first and once the second; states and rows of a table are beside each other in every way.
    pairs = cases(list(itertools.product(range(4), repeat=2)), [(one, (one + 1) % 4) for one in range(4)])
    for (first, at), (second, others) in ((views[one], views[other]) for one, other in pairs):
        arguments = first, second, at, others, *weights, 1e-6, NORMS[kind]
        found = joined_norms(*arguments)
        assert found.shape == (5, 3, 2 * width) and found.dtype == dtype
        assert_rounded(found, rms_norm_reference.joined_norms(*arguments), dtype)
        rows = [one if where is None else one[where] for one, where in ((first, at), (second, others))]
        alone = [rms_norm(one, weight, 1e-6, NORMS[kind]) for one, weight in zip(rows, weights, strict=True)]
        assert torch.equal(found, torch.cat(alone, dim=-1))
    assert joined_norms(table, states[:, :0], index[:, :0], None, *weights, 1e-6, NORMS[kind]).shape == (
        5,
        0,
        2 * width,
    )


def test_norms_are_those_of_torch():
    inputs, weight = draw(7, 48), draw(48, seed=1)
    torch.testing.assert_close(rms_norm(inputs, weight, 1e-5, NormKind()), F.rms_norm(inputs, (48,), weight, 1e-5))
    found = rms_norm(inputs, weight, 1e-5, NormKind(centered=True))
    torch.testing.assert_close(found, F.layer_norm(inputs, (48,), weight, None, 1e-5))


@pytest.mark.parametrize("width", [100, 128])
def test_bits_of_a_norm_depend_on_neither_rows_nor_strides(width):
    inputs, weight, kind = draw(40, width), draw(width, seed=1), NORMS["gpt-oss"]
    expected = rms_norm(inputs, weight, 1e-6, kind)
    odd = torch.full((40, width + 1), NAN, device=DEVICE)[:, 1:]
    odd.copy_(inputs)
    views = {
        "one at a time": torch.cat([rms_norm(row[None], weight, 1e-6, kind) for row in inputs]),
        "few": torch.cat([rms_norm(inputs[:3], weight, 1e-6, kind), rms_norm(inputs[3:], weight, 1e-6, kind)]),
        "between others": rms_norm(within_nan(inputs), weight, 1e-6, kind),
        "not aligned": rms_norm(odd, weight, 1e-6, kind),
        "a weight that is not aligned": rms_norm(inputs, within_nan(weight, 1), 1e-6, kind),
        "heads": rms_norm(within_nan(inputs.view(2, 5, 4, width)), weight, 1e-6, kind).view(40, width),
        "transposed heads": rms_norm(
            inputs.view(5, 8, width).transpose(0, 1).contiguous().transpose(0, 1), weight, 1e-6, kind
        ).reshape(40, width),
        "last columns": rms_norm(inputs.view(5, 8, width)[:, -3:], weight, 1e-6, kind),
    }
    assert torch.equal(views.pop("last columns"), expected.view(5, 8, width)[:, -3:])
    for name, found in views.items():
        assert torch.equal(found, expected), name


def test_norm_of_no_rows():
    assert rms_norm(draw(0, 8), None, 1e-6, NormKind()).shape == (0, 8)


def rotary_example(kind, dtype, heads=(4, 2), batch=2, columns=3, pairs=6, rest=0, angle_rows=2, angle_dtype=None):
    states = [draw(batch, columns, count, 2 * pairs + rest, dtype=dtype, seed=count) for count in heads]
    size = pairs if kind.half_angles else 2 * pairs
    cos, sin = (draw(angle_rows, columns, size, dtype=angle_dtype or dtype, seed=seed) for seed in (7, 8))
    return cos, sin, [one.transpose(1, 2) for one in states]


rotaries = pytest.mark.parametrize(
    ("kind", "dtype"),
    cases(
        every := list(itertools.product(ROTARIES, DTYPES)),
        [one for one in every if one[1] == torch.float32 or one[0] in ("halves", "cohere")],
    ),
)


@rotaries
def test_rotary_equals_its_reference_bit_for_bit(kind, dtype, poisoned):
    kind = ROTARIES[kind]
    examples = [
        rotary_example(kind, dtype),
        rotary_example(kind, dtype, heads=(5,), rest=20, angle_rows=1),
        rotary_example(kind, dtype, heads=(9, 1), pairs=128, rest=3, columns=1),
        rotary_example(kind._replace(rounded=False), dtype, columns=2, angle_dtype=torch.float32),
    ]
    for index, (cos, sin, states) in enumerate(examples):
        one = kind._replace(rounded=False) if index == 3 else kind
        found = rotary(cos, sin, states, one)
        expected = rotary_reference.rotary(cos, sin, states, one)
        for a, b, given in zip(found, expected, states, strict=True):
            assert a.dtype == b.dtype == dtype and a.shape == given.shape
            assert torch.equal(a, b), index
        if index == 1:
            views = rotary(within_nan(cos), within_nan(sin), [within_nan(given) for given in states], one)
            assert all(torch.equal(a, b) for a, b in zip(views, expected, strict=True))


@rotaries
def test_rotated_keys_are_stored(kind, dtype, poisoned):
    """Bit for bit, in the slots of the positions and nowhere else, with values of another width, of any strides."""
    kind = ROTARIES[kind]
    for heads, rest, columns in (((4, 2), 0, 3), ((9, 1), 20, 1), ((2,), 3, 2), ((5,), 0, 4)):
        cos, sin, states = rotary_example(kind, dtype, heads=heads, rest=rest, columns=columns)
        size, value_size = states[0].shape[-1], 7 + rest
        value = draw(2, columns, heads[-1], 2 * value_size, dtype=dtype, seed=5)[..., ::2].transpose(1, 2)
        positions = torch.stack([torch.arange(3, 3 + columns), torch.arange(columns).flip(0)]).to(DEVICE)
        caches = [draw(2, 9, heads[-1], one, dtype=dtype, seed=6) for one in (size, value_size)]
        runs = []
        for run in (rotary_reference.rotate_and_store, rotate_and_store):
            keys, values = (within_nan(one) for one in caches)
            runs.append((run(cos, sin, states, kind, keys, values, value, positions), keys, values))
        (query, keys, values), (found_query, found_keys, found_values) = runs
        assert len(query) == len(found_query) == len(heads) - 1
        assert all(torch.equal(*pair) for pair in zip(query, found_query, strict=True))
        assert torch.equal(keys, found_keys) and torch.equal(values, found_values)
        rows = torch.arange(2, device=DEVICE)[:, None]
        assert torch.equal(keys[rows, positions], rotary(cos, sin, states, kind)[-1].transpose(1, 2))
        untouched = torch.ones(2, 9, dtype=torch.bool, device=DEVICE)
        untouched[rows, positions] = False
        assert torch.equal(keys[untouched], caches[0][untouched])
        views = [within_nan(one) for one in states]
        again = [within_nan(one) for one in caches]
        found = rotate_and_store(cos, sin, views, kind, *again, within_nan(value), positions)
        assert all(torch.equal(*pair) for pair in zip((*found, *again), (*query, keys, values), strict=True))


@pytest.mark.parametrize("repeats", ["halves", "pairs", "once"])
@pytest.mark.parametrize("scaling", [1.0, 0.83])
def test_angles(repeats, scaling, poisoned):
    frequencies = 10000.0 ** -torch.linspace(0, 1, 12, device=DEVICE)
    positions = torch.tensor([[0, 1, 7, 500], [4000, 2, 131071, 3]], device=DEVICE)
    kind = AnglesKind(repeats, scaling)
    angles = (positions[..., None].float() * frequencies).double()
    if repeats != "once":
        angles = torch.cat([angles] * 2, -1) if repeats == "halves" else angles.repeat_interleave(2, -1)
    for dtype, given in itertools.product((torch.float32, DTYPES[1]), (positions, within_integers(positions))):
        found = rotary_angles(frequencies, given, dtype, kind)
        expected = rotary_reference.rotary_angles(frequencies, given, dtype, kind)
        for one, right, exact in zip(found, expected, (angles.cos(), angles.sin()), strict=True):
            assert one.dtype == right.dtype == dtype and one.is_contiguous()
            assert DEVICE == "cpu" or torch.equal(one, right)
            for computed in (one, right):
                torch.testing.assert_close(computed.double(), scaling * exact, rtol=0, atol=EPSILON[dtype])


def within_integers(values):
    """A view of the values with others around."""
    wide = torch.full([size + 2 for size in values.shape], -99, device=values.device)
    wide[1:-1, 1:-1] = values
    return wide[1:-1, 1:-1]


def test_rotary_turns_pairs():
    """Against complex numbers."""
    cos, sin, (states,) = rotary_example(RotaryKind(), torch.float32, heads=(3,))
    angles = draw(2, 3, 6, seed=9).double()
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    first, second = states.double().chunk(2, -1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None]
    (found,) = rotary(cos.float(), sin.float(), [states], RotaryKind())
    torch.testing.assert_close(found.double(), torch.cat([turned.real, turned.imag], -1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activation(activation, dtype, poisoned):
    for rows, width in itertools.product((1, 3), (7, 1030)):
        gate, up = draw(rows, 2, 2 * width, dtype=dtype).chunk(2, -1)
        gate = 3 * gate
        expected = gated_activation_reference.gated_activation(gate.double(), up.double(), activation)
        found = gated_activation(gate, up, activation)
        torch.testing.assert_close(found.double(), expected, rtol=EPSILON[dtype], atol=EPSILON[dtype])
        assert torch.equal(gated_activation(within_nan(gate), within_nan(up), activation), found)
        if DEVICE == "cuda" and dtype != torch.float32 and activation != "gelu":  # see tests/gpu
            assert torch.equal(found, gated_activation_reference.gated_activation(gate, up, activation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("clamped", [ClampedGate(1.5), ClampedGate(7.0, 1.702, 1.0)])
def test_clamped_gates(clamped, is_interleaved, dtype, poisoned):
    """Of halves of a row, and of even and odd columns."""
    for rows, width in itertools.product((1, 3), (7, 1030)):
        both = 4 * draw(rows, 2, 2 * width, dtype=dtype)
        both[..., 1] = float("nan")

        def halves(both):
            return (both[..., ::2], both[..., 1::2]) if is_interleaved else both.chunk(2, -1)

        expected = gated_activation_reference.gated_activation(*halves(both.double()), "silu", clamped)
        found = gated_activation(*halves(both), "silu", clamped)
        # Four operations are rounded.
        torch.testing.assert_close(
            found.double(), expected, rtol=4 * EPSILON[dtype], atol=4 * EPSILON[dtype], equal_nan=True
        )
        reference = gated_activation_reference.gated_activation(*halves(both), "silu", clamped)
        assert (found != reference)[~found.isnan()].double().mean() < (1.0 if dtype == torch.float32 else 0.01)


def test_activations_are_those_of_torch():
    values = draw(100)
    modules = {"silu": nn.SiLU(), "gelu": nn.GELU(), "gelu_tanh": nn.GELU(approximate="tanh"), "relu": nn.ReLU()}
    assert modules.keys() == ACTIVATIONS.keys()
    for name, module in modules.items():
        torch.testing.assert_close(gated_activation(values, torch.ones_like(values), name), module(values))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 3])
def test_gathered_rows(batch, dtype, poisoned):
    table, fill = draw(batch, 6, 2100, dtype=dtype), draw(2100, dtype=dtype, seed=1)
    index = torch.tensor([[0, -1, 5, 2], [5, 5, -1, 3], [1, -1, -1, 4]], device=DEVICE)
    for given, some in itertools.product((index, within_integers(index)), (fill, None)):
        found = gather_rows(within_nan(table), given, some)
        assert torch.equal(found, gather_rows_reference.gather_rows(table, given, some))
        for row, column in itertools.product(range(3), range(4)):
            at = index[row, column].item()
            expected = table[row % batch, at] if at >= 0 else (torch.zeros_like(fill) if some is None else fill)
            assert torch.equal(found[row, column], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_parts", [1, 3])
def test_join_rows(num_parts, dtype):
    """Rows of parts of any strides; columns after them are left as they are."""
    parts = [draw(2, 7, 40, dtype=dtype, seed=seed) for seed in range(num_parts)]
    parts[0] = within_nan(parts[0])
    index = torch.tensor([[0, 6, 3], [2, 2, 5]], device=DEVICE)
    for at in (None, index, index.t().contiguous().t()):
        outs = [torch.full((2, 9, 40 * num_parts), 7.0, device=DEVICE, dtype=dtype) for _ in range(2)]
        join_rows(outs[0], parts, at)
        gather_rows_reference.join_rows(outs[1], parts, at)
        assert torch.equal(*outs)
        count = 7 if at is None else 3
        rows = [one if at is None else one[torch.arange(2, device=DEVICE)[:, None], at] for one in parts]
        assert torch.equal(outs[0][:, :count], torch.cat(rows, dim=-1)) and bool((outs[0][:, count:] == 7).all())
