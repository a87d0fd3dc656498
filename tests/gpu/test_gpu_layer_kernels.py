"""On a GPU: norms, rotary embeddings and gated activations against transformers' own modules and functions, as bits."""

import pytest
import torch
from targets import on_gpu, padded_prompts, set_policy
from torch.nn import functional as F
from transformers.models.cohere import modeling_cohere
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.glm4 import modeling_glm4
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from hf_specdec import NoDrafter, ops
from hf_specdec.kernels.rms_norm import rms_norm
from hf_specdec.kernels.types import NormKind, RotaryKind
from hf_specdec.patching.layer_probes import Probes
from hf_specdec.patching.rotary_functions import _kind_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROTARIES = {
    "llama": modeling_llama.apply_rotary_pos_emb,
    "gpt-oss": modeling_gpt_oss.apply_rotary_pos_emb,
    "glm": modeling_glm4.apply_rotary_pos_emb,
    "cohere": modeling_cohere.apply_rotary_pos_emb,
    "deepseek": modeling_deepseek_v3.apply_rotary_pos_emb_interleave,
}
NORMS = {
    "llama": modeling_llama.LlamaRMSNorm,
    "gemma": modeling_gemma3.Gemma3RMSNorm,
    "gpt-oss": modeling_gpt_oss.GptOssRMSNorm,
    "cohere": modeling_cohere.CohereLayerNorm,
}


def draw(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_gated_activations_of_all_gates_are_the_bits_of_pytorch(activation, dtype):
    gate = torch.arange(2**16, device="cuda").to(torch.uint16).view(dtype)
    gate = gate[gate.isfinite()]
    for up in (torch.ones_like(gate), draw(len(gate), dtype=dtype)):
        found = ops.gated_activation(gate[None], up[None], activation)[0]
        expected = ops.ACTIVATIONS[activation](gate) * up
        is_right = (found == expected) | (found.isnan() & expected.isnan())
        if activation == "gelu":
            # The last bit of erf in float32 may differ, and much of 1 + erf is cancelled; then two roundings follow.
            limits = torch.finfo(dtype)
            bound = 2**-23 * (gate.float() * up.float()).abs() + 2 * limits.eps * expected.float().abs()
            bound += limits.tiny * limits.eps * (1 + up.float().abs())
            is_right |= (found.float() - expected.float()).abs() <= bound
        wrong = ~is_right
        assert not wrong.any(), (int(wrong.sum()), gate[wrong][:5], found[wrong][:5], expected[wrong][:5])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ROTARIES)
def test_rotary_embeddings_are_the_bits_of_transformers(name, dtype):
    function = ROTARIES[name]
    for batch, columns, angle_rows in ((1, 4, 1), (3, 5, 3), (1, 300, 1)):
        fused = draw(batch, columns, 48 * 128, dtype=dtype)
        query, key, _ = (
            part.view(batch, columns, -1, 128).transpose(1, 2) for part in fused.split([4096, 1024, 1024], -1)
        )
        angles = 64 if name in ("gpt-oss", "glm") else 128  # of GLM half of each head is rotated
        cos, sin = draw(2, angle_rows, columns, angles, dtype=dtype, seed=1)
        kind = _kind_of(function, 0, 2, dtype, dtype, 128, angles, ())
        expected = function(query, key, cos, sin)
        for found, right in zip(ops.rotary(cos, sin, [query, key], kind), expected, strict=True):
            assert torch.equal(found, right)


@pytest.mark.parametrize("width", [64, 1000, 4096])
@pytest.mark.parametrize("name", NORMS)
def test_norms_are_those_of_transformers(name, width):
    module = NORMS[name](width).to("cuda", torch.bfloat16)
    with torch.no_grad():
        module.weight += draw(width, seed=1) / 3
        inputs = draw(500, width)
        norm = Probes().norm(module)
        found = ops.rms_norm(inputs, module.weight, norm.eps, norm.kind)
        expected = module(inputs)
    assert (found == expected).float().mean() > 0.999  # the sum of a row has another order
    torch.testing.assert_close(found, expected, rtol=8e-3, atol=1e-6)


@pytest.mark.parametrize("width", [64, 100, 128, 4096, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_of_a_norm_depend_on_its_row_only(width, dtype):
    norm = Probes().norm(modeling_llama.LlamaRMSNorm(width))
    inputs, weight = draw(4096, width, dtype=dtype), draw(width, dtype=dtype, seed=1)
    expected = rms_norm(inputs, weight, *norm)
    wide = draw(4096, width + 24, dtype=dtype, seed=2)
    for start in (16, 3):  # aligned or not
        view = wide[:, start : start + width]
        view.copy_(inputs)
        assert torch.equal(rms_norm(view, weight, *norm), expected), start
    for rows in (1, 2, 3, 17, 128):
        assert torch.equal(rms_norm(inputs[:rows], weight, *norm), expected[:rows]), rows
        assert torch.equal(rms_norm(inputs[-rows:], weight, *norm), expected[-rows:]), rows
    heads = rms_norm(inputs.view(64, 64, width)[:, 7:20], weight, *norm)
    assert torch.equal(heads, expected.view(64, 64, width)[:, 7:20])


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss"])
def test_texts_are_the_same_with_and_without(monkeypatch, family):
    target = on_gpu(family)
    inputs = {name: tensor.to("cuda") for name, tensor in padded_prompts([9, 4]).items()}
    runs, run = [], ops.rms_norm
    monkeypatch.setattr(ops, "rms_norm", lambda *args: runs.append(1) or run(*args))
    texts = [target.generate(**inputs, do_sample=False, max_new_tokens=24)]
    for uses in (True, False):
        set_policy(monkeypatch, "cuda", layer_kernels=uses)
        drafter = NoDrafter(target).configure(compile_rounds=False)
        runs.clear()
        texts += [target.generate(**inputs, do_sample=False, max_new_tokens=24, assistant_model=drafter) for _ in "12"]
        assert drafter.stats.execution == "captured in one graph, not compiled"
        assert bool(runs) == uses
    assert all(torch.equal(text, texts[0]) for text in texts)


def test_ops_in_compiled_code():
    """As a mode that fixes the order of sums in compiled rounds, too, needs them: shapes and strides of fakes."""
    inputs, weight = draw(1, 3, 4096), draw(4096, seed=1)
    cos, sin = draw(2, 1, 3, 128, seed=2)
    kind, rotary = NormKind(cast_first=True), RotaryKind()

    def layer(inputs):
        hidden = ops.rms_norm(inputs + 1, weight, 1e-6, kind)
        states = hidden.view(1, 3, 32, 128).transpose(1, 2)
        query, key = ops.rotary(cos, sin, [states, states[:, :8]], rotary)
        return ops.gated_activation(query.transpose(1, 2).reshape(1, 3, -1), F.relu(hidden), "silu"), key

    expected = layer(inputs)
    found = torch.compile(layer, fullgraph=True)(inputs)
    for a, b in zip(found, expected, strict=True):
        assert a.stride() == b.stride() and torch.equal(a, b)
    for op, args in (
        ("rms_norm", (inputs, weight, 1e-6, *kind)),
        ("rotary", (cos, sin, [inputs.view(1, 3, 32, 128).transpose(1, 2)] * 2, *rotary)),
        ("gated_activation", (inputs, inputs, "gelu")),
    ):
        torch.library.opcheck(
            getattr(torch.ops.hf_specdec, op).default, args, test_utils=("test_schema", "test_faketensor")
        )
