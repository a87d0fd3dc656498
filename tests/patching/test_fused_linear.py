"""Fused linears: the same results from the same memory, and no visible change of the model."""

import copy

import pytest
import torch
from targets import NUM_LAYERS, STATIC_FAMILIES, padded_prompts, set_policy, tiny_target
from torch import nn
from transformers import AutoModelForCausalLM

from hf_specdec.modules.patch import engine
from hf_specdec.patching.fused_linear import fused_linears


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    set_policy(monkeypatch, "cpu", fused_linear=True)


def projections(model):
    return [module for name, module in model.named_modules() if name.endswith(("_proj", "_proj.base"))]


@pytest.mark.core
@pytest.mark.parametrize("family", STATIC_FAMILIES)
def test_fused_logits_are_equal(family):
    model = copy.deepcopy(tiny_target(family))
    inputs = padded_prompts([7, 7])
    with torch.no_grad():
        expected = model(**inputs).logits
        for _ in range(2):
            with fused_linears(model), engine():
                found = model(**inputs).logits
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-5, atol=1e-4)
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.core
def test_one_matmul_a_group_and_one_copy_of_the_weights(monkeypatch):
    model = copy.deepcopy(tiny_target("llama"))
    layer = model.model.layers[0]
    parameters = [layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight]
    before = [parameter.detach().clone() for parameter in parameters]
    calls = []
    set_policy(monkeypatch, "cpu", fused_linear=True, transposed_linear=False)
    original = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: calls.append(args[1].shape[0]) or original(*args))
    with torch.no_grad(), fused_linears(model), engine():
        model(**padded_prompts([5]))
    heads, key_heads, dim, inner, layers = 4, 2, 8, 64, NUM_LAYERS
    assert calls.count((heads + 2 * key_heads) * dim) == layers and calls.count(2 * inner) == layers
    assert key_heads * dim not in calls  # neither keys nor values by themselves
    now = [layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight]
    assert all(one is other for one, other in zip(parameters, now, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(before, now, strict=True))
    addresses = [parameter.data_ptr() for parameter in now]
    assert addresses == [addresses[0], addresses[0] + now[0].nbytes, addresses[1] + now[1].nbytes]
    assert all(parameter.untyped_storage().data_ptr() == parameter.data_ptr() for parameter in now)
    assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in now)
    with fused_linears(layer):
        assert [parameter.data_ptr() for parameter in now] == addresses


@pytest.mark.core
def test_fused_model_saves_trains_and_converts_as_before(tmp_path):
    model = copy.deepcopy(tiny_target("qwen3"))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with fused_linears(model):
        pass
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())
    inputs = padded_prompts([5])
    model(**inputs).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.to(torch.float64)
    with torch.no_grad():
        plain = model(**inputs).logits
        with fused_linears(model), engine():
            torch.testing.assert_close(model(**inputs).logits, plain)


@pytest.mark.core
def test_unsupported_layers_are_not_fused():
    class Adapter(nn.Linear):
        pass

    model = copy.deepcopy(tiny_target("llama", num_layers=3))
    first, second, third = (layer.self_attn for layer in model.model.layers[:3])
    first.k_proj = Adapter(32, 16, bias=False)
    second.v_proj.register_forward_hook(lambda module, args, output: output)
    third.q_proj.weight.data = third.q_proj.weight.data.double()
    addresses = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    with fused_linears(first, second, third):
        assert all("forward" not in vars(module) for module in projections(model))
    assert addresses == {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}


@pytest.mark.core
def test_modules_that_call_their_layers_in_another_order():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 4) for _ in range(3))

        def forward(self, x):
            return self.k_proj(x) + self.q_proj(x) * self.v_proj(x + 1)

    torch.manual_seed(0)
    odd, x = Odd(), torch.randn(3, 8)
    expected = odd(x)
    with fused_linears(odd), engine():
        for _ in range(2):
            torch.testing.assert_close(odd(x), expected)
