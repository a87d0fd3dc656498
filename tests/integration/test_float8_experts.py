"""Mixtures of experts in FP8 with scales of blocks, as transformers loads them: its `FP8Experts`, in memory as in the
file, computed by the project's kernels."""

import gc

import pytest
import torch
from float8_blocks import SIZES, load_float8, save_float8, without_kernels_of_the_hub
from graph_stand_ins import tape_on_cpu
from lossless import PROMPTS, greedy
from oracle import random_eagle3
from safetensors.torch import load_file
from targets import padded_prompts, set_policy
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear

from hf_specdec import NoDrafter, ops
from hf_specdec.kernels.stored_weight_reference import dequantise
from hf_specdec.kernels.types import StoredWeight
from hf_specdec.modules.patch import engine
from hf_specdec.modules.weights import PLAIN_WEIGHTS, may_round_inputs, stored_experts, weight_of
from hf_specdec.patching.experts import copies_experts, projections, triton_experts


@pytest.fixture(autouse=True)
def library_on_a_cpu(monkeypatch):
    without_kernels_of_the_hub(monkeypatch)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders by family, each made once."""
    folders = {}

    def folder(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            family, *scale_fmt = name.split(", ")
            save_float8(family, folders[name], *scale_fmt)
        return folders[name]

    return folder


def experts_of(target):
    return [one for one in target.modules() if isinstance(one, FP8Experts)]


every_family = pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3", "deepseek-v3, ue8m0"])


@every_family
def test_weights_are_read_without_a_copy(family, checkpoints):
    target = load_float8(checkpoints(family))
    assert len(experts_of(target)) == (2 if family == "qwen3-moe" else 1)
    assert all(weight_of(one) is not None for one in target.modules() if isinstance(one, FP8Linear))
    for module in experts_of(target):
        for name in projections(module):
            stored, values, scales = stored_experts(module, name), getattr(module, name), f"{name}_scale_inv"
            assert (
                stored.rounds_inputs
                and stored.values.data_ptr() == values.data_ptr()
                and stored.scales is getattr(module, scales)
            )
            assert stored.scales.dtype == (torch.float8_e8m0fnu if "ue8m0" in family else torch.float32)
            factors = stored.scales.float().repeat_interleave(128, 1).repeat_interleave(128, 2)
            assert torch.equal(dequantise(stored, torch.float32), values.float() * factors)
        assert may_round_inputs(module)
    assert not copies_experts(target)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("through", ["reference", "kernels"])
@torch.no_grad()
def test_experts_compute_what_the_library_does(through, implementation, checkpoints, monkeypatch):
    """In rounds and prompts, also for tokens without an expert; other code still gets its library's results."""
    target = load_float8(checkpoints("qwen3-moe"))
    target.set_experts_implementation(implementation)
    if through == "kernels":
        set_policy(monkeypatch, "cpu", triton=True)
    module, products, product = experts_of(target)[-1], [], ops.expert_linear
    module._is_expert_parallel = True
    monkeypatch.setattr(ops, "expert_linear", lambda *args: products.append(args[1]) or product(*args))
    for tokens in (1, 5, 40):
        inputs, weights = torch.randn(tokens, SIZES["hidden_size"]), torch.rand(tokens, 2)
        ids = torch.rand(tokens, 5 if tokens == 5 else 4).argsort(1)[:, :2]
        expected = module(inputs, ids, weights)
        with triton_experts(target):
            assert torch.equal(module(inputs, ids, weights), expected) and not products
            with engine():
                found = module(inputs, ids, weights)
        assert [type(one) for one in products] == [StoredWeight] * 2
        products.clear()
        torch.testing.assert_close(found, expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-5)


@pytest.mark.core_for(through=["graphs"])
@pytest.mark.parametrize("through", ["reference", "kernels", "graphs"])
@every_family
def test_texts(family, through, checkpoints, monkeypatch):
    target, inputs = load_float8(checkpoints(family)), padded_prompts(PROMPTS[3])
    new = {"max_new_tokens": 3 if through == "kernels" else 8}
    plain, products, product = greedy(target, inputs, **new), [], ops.expert_linear
    if through == "kernels":
        set_policy(monkeypatch, "cpu", triton=True)
    elif through == "graphs":
        tape_on_cpu(monkeypatch)
    monkeypatch.setattr(ops, "expert_linear", lambda *args: products.append(args[1]) or product(*args))
    for drafter in (random_eagle3(target), NoDrafter(target))[: 1 if through == "kernels" else 2]:
        assert torch.equal(greedy(target, inputs, drafter, **new), plain)
        assert drafter.stats.engine == "static"
        assert through != "graphs" or drafter.stats.execution.startswith("captured in one graph")
    assert products and {type(one) for one in products} == {StoredWeight}


@every_family
def test_batch_invariant_calls(family, checkpoints, monkeypatch):
    policy = {"batch_invariant": True, "layer_kernels": True, "few_row_linear": True, "fused_linear": True}
    set_policy(monkeypatch, "cpu", **policy)
    monkeypatch.setattr("hf_specdec.hosting.eligibility.why_not_batch_invariant", lambda model: None)
    target, inputs = load_float8(checkpoints(family)), padded_prompts(PROMPTS[3])
    drafter = random_eagle3(target).configure(batch_invariant=True)
    assert torch.equal(greedy(target, inputs, drafter, 3), greedy(target, inputs))
    assert drafter.stats.batch_invariant and drafter.stats.reason == "the target and the call fit"


@every_family
def test_no_dequantised_copy_appears(family, checkpoints):
    target = load_float8(checkpoints(family))
    shapes = {getattr(one, name).shape[-2:] for one in experts_of(target) for name in projections(one)}

    def wide():
        gc.collect()
        found = [one for one in gc.get_objects() if type(one) in PLAIN_WEIGHTS and one.shape[-2:] in shapes]
        return {one.data_ptr() for one in found if one.dim() in (2, 3) and one.is_floating_point() and one.itemsize > 1}

    drafter, before = random_eagle3(target), wide()
    greedy(target, padded_prompts(PROMPTS[1]), drafter, 3, max_new_tokens=4)
    assert wide() == before
    stored = load_file(checkpoints(family) / "model.safetensors")
    assert sum(one.nbytes for one in target.state_dict().values()) <= sum(one.nbytes for one in stored.values())


def with_wide_scales(target):
    for module in experts_of(target):
        module.down_proj_scale_inv.data = module.down_proj_scale_inv.data.double()


@pytest.mark.parametrize("change", [{"activation_scheme": "static"}, {"block_size": None}, "scales"])
def test_other_forms_are_left_to_the_library(change, checkpoints):
    target = load_float8(checkpoints("qwen3-moe"))
    module, implementation = experts_of(target)[0], target.config._experts_implementation
    if change == "scales":
        with_wide_scales(target)
    else:
        vars(module).update(change)
    assert copies_experts(target) and may_round_inputs(module)
    with triton_experts(target):
        assert target.config._experts_implementation == implementation


def test_captured_rounds_of_other_forms(checkpoints, monkeypatch):
    """By the library's product of every pair, which does not read on the host where an expert begins."""
    target, inputs = load_float8(checkpoints("qwen3-moe")), padded_prompts(PROMPTS[1])
    with_wide_scales(target)
    plain, drafter = greedy(target, inputs), random_eagle3(target)
    tape_on_cpu(monkeypatch)
    monkeypatch.delattr(ops, "expert_linear")
    assert torch.equal(greedy(target, inputs, drafter), plain)
    assert drafter.stats.execution.startswith("captured in one graph")
