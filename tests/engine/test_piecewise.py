"""Graphs that are compiled in pieces."""

import copy

import pytest
import torch
from targets import set_policy, tiny_target
from transformers import AutoModelForCausalLM

from hf_specdec import ops
from hf_specdec.graphs import piecewise
from hf_specdec.graphs.piecewise import piecewise_backend

ROWS, WIDTH = 3, 16
POSITIONS = torch.arange(ROWS)[None]


def counted(compiler, counts):
    """`compiler`, which adds to the last of `counts`."""

    def compile_one(*args, **kwargs):
        counts[-1] += 1
        return compiler(*args, **kwargs)

    return compile_one


@pytest.fixture
def kernels_on_cpu(monkeypatch):
    set_policy(monkeypatch, "cpu", triton=True)


def attend(states, window=None):
    heads = states.view(1, ROWS, 1, WIDTH).transpose(1, 2)
    return ops.attention(heads, heads, heads, POSITIONS, 0.25, window=window).reshape(ROWS, WIDTH)


def compiled_and_eager(function, *inputs):
    """How many pieces were compiled; that the result is that of running `function`, which may write to its inputs."""
    counts = [0]
    backend = piecewise_backend(counted(torch._dynamo.lookup_backend("aot_eager"), counts))
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
    with torch.no_grad():
        expected_inputs = copy.deepcopy(inputs)
        expected = function(*expected_inputs)
        for _ in range(2):
            read = copy.deepcopy(inputs)
            assert torch.equal(compiled(*read), expected)
            assert all(torch.equal(*pair) for pair in zip(read, expected_inputs, strict=True))
    return counts[0]


def weights(count):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(WIDTH, WIDTH, generator=generator) / 4 for _ in range(count)]


@pytest.mark.parametrize("layers", [2, 5])
def test_equal_graph_pieces_are_compiled_once(kernels_on_cpu, layers):
    def function(states, *matrices):
        for matrix in matrices:
            states = states + attend(torch.tanh(states @ matrix))
        return states

    # The first attention has nothing before it to add to, the last nothing after it to compute.
    assert compiled_and_eager(function, torch.ones(ROWS, WIDTH), *weights(layers)) == 3


@pytest.mark.parametrize("layers", [2, 5])
def test_attention_of_modeling_files_is_in_pieces_too(kernels_on_cpu, layers):
    """It is not an operator of the project; the writes of the keys and values that it reads are."""

    def function(states, *matrices):
        for matrix in matrices:
            keys = states.new_zeros(1, ROWS, 1, WIDTH)
            heads = (states @ matrix).view(1, 1, ROWS, WIDTH)
            ops.write_kv(keys, keys, heads, heads, POSITIONS)
            read = keys[0, :, 0]
            states = states + torch.softmax(states @ read.t(), dim=-1) @ read
        return states

    # The first write has no attention before it, the last attention no write after it.
    assert compiled_and_eager(function, torch.ones(ROWS, WIDTH), *weights(layers)) == 3


def test_pieces_that_differ_in_a_constant_or_layout_are_not_equal(kernels_on_cpu):
    def function(states, *matrices):
        for index, matrix in enumerate(matrices):
            states = states + attend(states @ matrix, window=2 if index % 2 else None)
        return states

    states, matrices = torch.ones(ROWS, WIDTH), weights(6)
    assert compiled_and_eager(function, states, *matrices) == 4
    matrices[4] = matrices[4].t()
    assert compiled_and_eager(function, states, *matrices) == 5


@pytest.mark.parametrize("shared", [False, True])
def test_pieces_whose_inputs_share_memory_are_not_equal(kernels_on_cpu, shared):
    """Two pieces write to one buffer and read another; or the second reads what it has just written."""

    def function(states, one, two, three, four):
        read = three.view(WIDTH, ROWS).view(ROWS, WIDTH) if shared else four.view(WIDTH, ROWS).view(ROWS, WIDTH)
        states = attend(states)
        for written, other in ((one, two), (three, read)):
            written.add_(states)
            states = attend(states * other)
        return states

    buffers = [torch.full((ROWS, WIDTH), float(value)) for value in range(4)]
    assert compiled_and_eager(function, torch.ones(ROWS, WIDTH), *buffers) == 3 + shared


@pytest.mark.parametrize(("family", "expected"), [("llama", 3), ("gpt-oss", 4)])
def test_number_of_compilations_does_not_grow_with_depth(monkeypatch, family, expected):
    """Every other layer of gpt-oss has a window."""
    monkeypatch.setattr(piecewise, "_ATTENTION", str(torch.nn.functional.softmax))
    for layers in (3, 4):
        config = copy.deepcopy(tiny_target(family).config)
        config.num_hidden_layers, config.layer_types = layers, None
        target = AutoModelForCausalLM.from_config(type(config)(**config.to_dict()), attn_implementation="eager").eval()
        ids = torch.arange(6)[None] + 3
        counts = [0]
        backend = piecewise_backend(counted(torch._dynamo.lookup_backend("aot_eager"), counts))
        run = torch.compile(target, backend=backend, fullgraph=True, dynamic=False)
        with torch.no_grad():
            assert torch.equal(run(ids, use_cache=False).logits, target(ids, use_cache=False).logits)
        assert counts == [expected]
