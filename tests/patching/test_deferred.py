"""Tensors that are computed when something reads them, and what computes them together with their reader."""

import contextlib
import copy

import pytest
import torch
from lossless import greedy
from oracle import random_eagle3
from targets import padded_prompts, set_policy, tiny_target
from torch.nn import functional as F
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from hf_specdec import NoDrafter, ops
from hf_specdec.drafters.layers import rotate
from hf_specdec.drafters.shared_weights import embed
from hf_specdec.kernels.types import AnglesKind, NormKind, RotaryKind
from hf_specdec.modules import deferred
from hf_specdec.modules.deferred import Deferred, Rotation, normed, plain, residual_stream, store_kv
from hf_specdec.modules.patch import engine
from hf_specdec.patching.layer_kernels import layer_kernels, norms_side_by_side
from hf_specdec.patching.layer_probes import Angles, Probes
from hf_specdec.patching.rotary_functions import rotary_functions

LLAMA = NormKind(cast_first=True)


@pytest.fixture(autouse=True)
def policy(monkeypatch):
    set_policy(monkeypatch, "cpu", layer_kernels=True, transposed_linear=False)


@pytest.fixture
def calls(monkeypatch):
    """The ops that were run, in order."""
    names = []

    def noted(module, name):
        run = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: names.append(name) or run(*args))

    for name in ("rms_norm", "add_rms_norm", "joined_norms", "rotary", "rotate_and_store", "rotary_angles"):
        noted(ops, name)
    noted(ops, "gated_activation")
    noted(deferred.ops, "write_kv")
    noted(deferred.ops, "gather_rows")
    noted(torch, "add")
    return names


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@torch.no_grad()
def test_a_norm_computes_the_sum_that_it_reads(calls):
    states, more, weight = draw(2, 3, 16), draw(2, 3, 16, seed=1), draw(16, seed=2)
    with engine():
        total = residual_stream(states) + more
        assert type(total) is Deferred and total.value is None and total.shape == (2, 3, 16) and not calls
        found = normed(total, weight, 1e-6, LLAMA)
        assert calls == ["add_rms_norm"] and type(found) is torch.Tensor
        assert torch.equal(plain(total), states + more) and type(plain(total)) is torch.Tensor
        assert torch.equal(found, ops.rms_norm(states + more, weight, 1e-6, LLAMA))
        calls.clear()
        normed(total, weight, 1e-6, LLAMA)  # is computed
        assert calls == ["rms_norm"]
        again = more + total  # another sum of the stream
        assert type(again) is Deferred and again.value is None
        assert torch.equal(again.sum(), (states + more + more).sum())


@torch.no_grad()
@pytest.mark.parametrize(
    "read",
    [
        lambda total: total * 2,
        lambda total: torch.cat([total, total], dim=-1),
        lambda total: total[:, -1:],
        lambda total: total.view(6, 16),
        lambda total: F.linear(total, torch.eye(16)),
        lambda total: F.linear(input=total, weight=torch.eye(16)),
        lambda total: torch.zeros(2, 3, 16).copy_(total),
        lambda total: total.to(torch.float64),
        lambda total: total.mul_(3),
        lambda total: torch.stack((total, total.transpose(0, 1).transpose(0, 1))),
        lambda total: torch.ops.aten.mul.Tensor(total, 2.0),
        lambda total: total + 1,
        lambda total: 1 + total,
        lambda total: total - total,
        lambda total: torch.add(total, total, alpha=2),
        lambda total: total + torch.ones(16),
        lambda total: total + torch.ones(2, 3, 16, dtype=torch.float64),
        lambda total: torch.tensor(total.tolist()),
        lambda total: torch.tensor([total.data_ptr() != 0, total.is_contiguous(), *total.stride()]),
        lambda total: copy.deepcopy(total),
    ],
)
def test_whatever_else_reads_a_sum_finds_it(read):
    states, more = draw(2, 3, 16), draw(2, 3, 16, seed=1)
    expected = read(states + more)
    with engine():
        total = residual_stream(states) + more
        found = read(total)
        assert type(found) is torch.Tensor and torch.equal(found, expected)
        assert total.value is not None


def test_nothing_waits_elsewhere():
    """With gradients, and outside of an engine."""
    states = draw(2, 16)
    with engine():
        assert type(residual_stream(states)) is torch.Tensor
    with torch.no_grad():
        assert type(residual_stream(states)) is torch.Tensor
        with engine():
            stream = residual_stream(states)
            assert residual_stream(stream) is stream
            assert type(residual_stream(states.double())) is torch.Tensor
        assert type(stream + states) is torch.Tensor


@torch.no_grad()
@pytest.mark.parametrize("kinds", [(LLAMA, LLAMA), (LLAMA, NormKind())])
@pytest.mark.parametrize("is_read_before", [False, True])
def test_norms_side_by_side_read_rows_of_a_table(calls, kinds, is_read_before):
    """The op computes both and looks the rows up, if the norms are alike and nothing has read the rows."""
    norms = [{LLAMA: modeling_llama.LlamaRMSNorm, NormKind(): torch.nn.RMSNorm}[kind](16, eps=1e-6) for kind in kinds]
    for seed, norm in enumerate(norms):
        norm.weight.copy_(draw(16, seed=seed))
    table, states, index = torch.nn.Parameter(draw(9, 16)), draw(2, 3, 16, seed=1), torch.tensor([[1, 8, 0], [3, 3, 2]])
    expected = torch.cat([norms[0](table[index]), norms[1](states)], dim=-1)
    with layer_kernels(torch.nn.ModuleList(norms)), engine():
        calls.clear()
        rows = embed(index, table, torch.float32)
        assert type(rows) is Deferred and rows.shape == (2, 3, 16) and not calls
        if is_read_before:
            assert torch.equal(plain(rows), table[index])
        found = norms_side_by_side(norms[0], rows, norms[1], states)
    torch.testing.assert_close(found, expected)
    one = ["joined_norms"] if kinds[0] == kinds[1] else ["rms_norm", "rms_norm"]
    assert sorted(calls) == ["gather_rows"] * (is_read_before or len(one) == 2) + one


def rotary_inputs(dtype=torch.float32):
    cos, sin = draw(2, 3, 8, seed=1, dtype=dtype), draw(2, 3, 8, seed=2, dtype=dtype)
    query, key, value = (draw(2, heads, 3, 8, seed=heads, dtype=dtype) for heads in (4, 2, 2))
    return cos, sin, query, key, value


@torch.no_grad()
@pytest.mark.parametrize("read_first", ["nothing", "query", "key"])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
def test_what_stores_a_key_rotates_it(calls, read_first, cache_dtype):
    cos, sin, query, key, value = rotary_inputs()
    positions = torch.tensor([[4, 0, 2], [1, 2, 3]])
    expected_query, expected_key = ops.rotary(cos, sin, [query, key], RotaryKind())
    buffers = [torch.zeros(2, 6, 2, 8, dtype=cache_dtype) for _ in range(4)]
    deferred.ops.write_kv(*buffers[:2], expected_key, value, positions, None)
    calls.clear()
    found = Rotation(cos, sin, [query, key], RotaryKind()).results()
    if read_first != "nothing":
        read = plain(found[read_first == "key"])
        assert torch.equal(read, expected_key if read_first == "key" else expected_query)
    store_kv(*buffers[2:], found[1], value, positions)
    assert torch.equal(buffers[0], buffers[2]) and torch.equal(buffers[1], buffers[3])
    is_one = read_first == "nothing" and cache_dtype == torch.float32
    assert calls == (["rotate_and_store"] if is_one else ["rotary", "write_kv"])
    assert torch.equal(found[0] + 0, expected_query) and torch.equal(found[1] + 0, expected_key)


@torch.no_grad()
@pytest.mark.parametrize("is_stored", [False, True])
def test_a_rotation_of_a_pass_with_fewer_queries(calls, is_stored):
    """The last columns of the query are rotated with all of the key."""
    cos, sin, query, key, value = rotary_inputs()
    expected = ops.rotary(cos, sin, [query, key], RotaryKind())
    calls.clear()
    with engine():
        last, whole = rotate(cos, sin, key, query, num_queries=2)
    assert type(last) is Deferred and last.shape == (2, 4, 2, 8)
    if is_stored:
        keys, values = torch.zeros(2, 6, 2, 8), torch.zeros(2, 6, 2, 8)
        store_kv(keys, values, whole, value, torch.tensor([[4, 0, 2], [1, 2, 3]]))
    assert torch.equal(plain(last), expected[0][:, :, -2:]) and torch.equal(plain(whole), expected[1])
    assert calls == (["rotate_and_store", "rotary"] if is_stored else ["rotary"])
    torch.testing.assert_close(rotate(cos, sin, key, query, num_queries=2), [expected[0][:, :, -2:], expected[1]])


@torch.no_grad()
def test_sums_and_rotations_of_whole_texts(calls):
    """In a layer of a target there are as few kernels as can be; a drafter's layer has no more."""
    target, inputs = copy.deepcopy(tiny_target("llama")), padded_prompts([9])
    plain_text = greedy(target, inputs, max_new_tokens=3)
    layers = len(target.model.layers)
    with layer_kernels(target), rotary_functions(target), engine():
        target(**inputs, use_cache=False)  # functions are probed in a first call of the process, with these ops
        calls.clear()
        target(**inputs, use_cache=False)
    assert calls.count("add_rms_norm") == 2 * layers and calls.count("rms_norm") == 1
    assert calls.count("rotary") == layers and calls.count("rotary_angles") == 1
    assert "add" not in calls and calls.count("gated_activation") == layers
    for make in (NoDrafter, random_eagle3):
        calls.clear()
        drafter = make(target)
        assert torch.equal(greedy(target, inputs, drafter, max_new_tokens=3), plain_text)
        assert "add" not in calls and "rotate_and_store" in calls
        assert make is NoDrafter or "joined_norms" in calls


def test_rotary_embeddings_are_told_by_what_they_compute():
    target = tiny_target("llama")
    found = Probes().angles(target.model.rotary_emb)
    assert found == {None: Angles("inv_freq", AnglesKind())}
    narrow = copy.deepcopy(target.model.rotary_emb).bfloat16()
    assert Probes().angles(narrow) == found
    scaled = copy.deepcopy(target.model.rotary_emb)
    scaled.attention_scaling = 1.25
    assert Probes().angles(scaled) == {None: Angles("inv_freq", AnglesKind(scaling=1.25))}
    oss = modeling_gpt_oss.GptOssRotaryEmbedding(tiny_target("gpt-oss").config)
    assert Probes().angles(oss)[None].kind.repeats == "once"
    gemma = modeling_gemma3.Gemma3RotaryEmbedding(tiny_target("gemma3").config)
    assert {name: one.buffer for name, one in Probes().angles(gemma).items()} == {
        name: f"{name}_inv_freq" for name in ("full_attention", "sliding_attention")
    }
    config = copy.deepcopy(target.config)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert Probes().angles(modeling_llama.LlamaRotaryEmbedding(config)) == {}
    assert not any(Probes().angles(module) for module in target.modules() if module is not target.model.rotary_emb)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
def test_angles_are_the_bits_of_the_modules(calls, name):
    target = copy.deepcopy(tiny_target(name))
    module, positions = target.model.rotary_emb, torch.tensor([[3, 4, 5000], [0, 1, 2]])
    types = [{"layer_type": one} for one in ("full_attention", "sliding_attention")] if name == "gemma3" else [{}]
    for dtype, options in [(dtype, options) for dtype in (torch.float32, torch.bfloat16) for options in types]:
        states = draw(2, 3, 8, dtype=dtype)
        expected = module(states, positions, **options)
        with layer_kernels(target), engine():
            found = module(states, position_ids=positions, **options)
            assert calls.pop() == "rotary_angles"
            calls.clear()
            # Sections of M-RoPE are not understood, nor by the module of some versions of transformers.
            with contextlib.suppress(RuntimeError):
                module(states, positions.expand(3, -1, -1), **options)
            assert not calls
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
