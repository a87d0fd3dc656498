"""Targets whose weights are not ordinary tensors in one place: quantised, offloaded, spread over devices."""

import copy

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from lossless import PROMPTS, greedy
from oracle import random_dspark, random_eagle3
from targets import NUM_LAYERS, padded_prompts, set_policy, tiny_target
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from hf_specdec import AutoDrafter
from hf_specdec.modules.hidden_states import device_of_last_layer
from hf_specdec.modules.signature import Fingerprint, Signature
from hf_specdec.patching.fused_linear import fused_linears
from hf_specdec.patching.linear import patched_linear


class RoundedWeight(torch.Tensor):
    """A quantised weight as libraries make them: a subclass that knows a few functions and not that it is a matrix."""

    @staticmethod
    def __new__(cls, values, scales):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scales.dtype, device=values.device)

    def __init__(self, values, scales):
        self.values, self.scales = values, scales

    @classmethod
    def of(cls, weight):
        scales = weight.abs().amax(dim=1, keepdim=True) / 127
        return cls((weight / scales).round().to(torch.int8), scales)

    def dequantize(self):
        return self.values.to(self.scales.dtype) * self.scales

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (F.linear, F.embedding):
            args = [arg.dequantize() if isinstance(arg, cls) else arg for arg in args]
            return function(*args, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args, kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scales)
        raise NotImplementedError(f"{function} of a quantised weight")


def quantised(kind):
    """A target with rounded weights: all tensor subclasses, or layers of a class of their own."""
    target = copy.deepcopy(tiny_target("llama"))
    for module in target.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight = nn.Parameter(RoundedWeight.of(module.weight.detach()), requires_grad=False)
            if kind == "layers" and isinstance(module, nn.Linear):
                module.__class__ = type("RoundedLinear", (nn.Linear,), {})
    return target


def fingerprint_of(target, drafter):
    return Fingerprint.of(target.device, Signature(target, drafter))


@pytest.mark.core
@pytest.mark.parametrize("kind", ["tensors", "layers"])
def test_quantised_target(kind, monkeypatch):
    set_policy(monkeypatch, "cpu", fused_linear=True)
    target, inputs = quantised(kind), padded_prompts(PROMPTS[3])
    with patched_linear(target), fused_linears(target):
        assert all("forward" not in vars(module) for module in target.modules())
    plain = greedy(target, inputs)
    assert not torch.equal(plain, greedy(tiny_target("llama"), inputs))
    for own in (True, False):
        drafter = random_eagle3(target, own_embedding=own, own_head=own)
        assert torch.equal(greedy(target, inputs, drafter, 3), plain) and drafter.stats.engine == "static"
    assert torch.equal(greedy(target, inputs, random_dspark(target), 3), plain)
    before = fingerprint_of(target, drafter)
    assert fingerprint_of(target, drafter) == before
    weights = {"embedding": target.model.embed_tokens.weight, "head": target.lm_head.weight}
    assert all(type(shared.weight) is torch.Tensor for shared in drafter._shared_weights.values())
    assert torch.equal(drafter._shared_weights["embedding"].weight, weights["embedding"].dequantize())
    assert torch.equal(drafter._shared_weights["head"].weight, weights["head"].dequantize()[drafter.target_ids])
    assert all(isinstance(weight, RoundedWeight) for weight in weights.values()), "the target has changed"
    target.lm_head.weight = nn.Parameter(RoundedWeight.of(weights["head"].dequantize()), requires_grad=False)
    assert fingerprint_of(target, drafter) != before


@pytest.mark.core
def test_ordinary_weights_are_shared_without_a_copy():
    target = tiny_target("llama")
    drafter = random_eagle3(target, own_embedding=False, own_head=False, draft_vocab_size=96)
    weights = {"embedding": target.model.embed_tokens.weight, "head": target.lm_head.weight}
    for what, weight in weights.items():
        shared = drafter._shared_weights[what].weight
        assert shared.data_ptr() == weight.data_ptr() and not shared.requires_grad and weight.requires_grad


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, and two drafters for it that borrow its embedding."""
    root = tmp_path_factory.mktemp("placement")
    target = tiny_target("llama")
    target.save_pretrained(root / "target")
    random_eagle3(target, own_embedding=False).save_pretrained(root / "drafter")
    random_dspark(target).save_pretrained(root / "blocks")
    return root


NAMES = [
    "model.embed_tokens",
    "model.norm",
    "model.rotary_emb",
    "lm_head",
    *(f"model.layers.{n}" for n in range(NUM_LAYERS)),
]
PLACES = {
    "one device": ({"": "cpu"}, "static", "fit"),
    "a layer on disk": (dict.fromkeys(NAMES, "cpu") | {"model.layers.0": "disk"}, "stock", "spread over 2 devices"),
    "the last layer on disk": (
        dict.fromkeys(NAMES, "cpu") | {f"model.layers.{NUM_LAYERS - 1}": "disk"},
        "stock",
        "spread over 2",
    ),
}


@pytest.mark.core_for(place=["the last layer on disk"])
@pytest.mark.parametrize("place", PLACES)
def test_device_maps(folders, tmp_path, place):
    device_map, engine, reason = PLACES[place]
    options = {"device_map": device_map, "dtype": torch.float32, "offload_folder": str(tmp_path)}
    target = AutoModelForCausalLM.from_pretrained(folders / "target", **options).eval()
    inputs = padded_prompts(PROMPTS[1])
    for name in ("blocks", "drafter"):
        drafter = AutoDrafter.from_pretrained(folders / name, target=target)
        assert torch.equal(greedy(target, inputs, drafter, 3), greedy(tiny_target("llama"), inputs))
        assert drafter.stats.engine == engine and reason in drafter.stats.reason
    assert drafter.device == device_of_last_layer(target) == torch.device("cpu")


@pytest.mark.core
def test_a_drafter_goes_where_the_last_layer_computes():
    target = copy.deepcopy(tiny_target("llama"))
    assert device_of_last_layer(target) == torch.device("cpu")
    add_hook_to_module(target.model.layers[0], AlignDevicesHook(execution_device=torch.device("cuda", 0)))
    assert device_of_last_layer(target) == torch.device("cpu")
    add_hook_to_module(target.model.layers[-1].self_attn, AlignDevicesHook(execution_device=torch.device("cuda", 1)))
    assert device_of_last_layer(target) == torch.device("cuda", 1)


class RoundedInputs(nn.Module):
    """A linear layer on inputs that are rounded by one scale for all tokens, as those of `quantize_dynamic`."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, inputs):
        scale = inputs.abs().amax() / 40
        return self.linear((inputs / scale).round() * scale)


def test_activations_quantised_over_all_tokens(caplog):
    """Of which plain `generate()`, too, says other things of a row in a batch."""
    target = copy.deepcopy(tiny_target("llama"))
    target.model.layers[1].mlp.down_proj = RoundedInputs(target.model.layers[1].mlp.down_proj)
    greedy(target, padded_prompts(PROMPTS[1]), random_eagle3(target), 3)
    assert "logits of a row are others in a batch than alone (by" in caplog.text
