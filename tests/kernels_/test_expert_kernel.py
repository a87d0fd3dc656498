"""Matmuls of a mixture of experts: Triton against its references, those against transformers, and their use.

On a machine without a GPU the kernels run in Triton's interpreter.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch
from case_counts import cases
from lossless import PROMPTS, greedy
from oracle import random_eagle3
from targets import padded_prompts, set_policy, tiny_target
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from hf_specdec import ops
from hf_specdec.kernels import experts_reference
from hf_specdec.kernels.experts import expert_linear, plan_experts, sum_experts
from hf_specdec.modules.patch import engine
from hf_specdec.patching import experts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32] + [torch.float16, torch.bfloat16] * (DEVICE == "cuda")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

both = pytest.mark.parametrize("plan", [experts_reference.plan_experts, plan_experts], ids=["torch", "triton"])
CASES = [(1, 1, 1, 16), (4, 1, 2, 16), (5, 7, 5, 16), (128, 4, 8, 16), (3, 50, 2, 16), (40, 33, 6, 16), (2, 200, 1, 64)]
every_case = pytest.mark.parametrize(("num_experts", "tokens", "chosen", "rows"), CASES)


def choose(num_experts, tokens, chosen, seed=0, nobody=False):
    """Experts of every token, none twice, `[tokens, chosen]`; with `nobody` also numbers beyond the experts."""
    generator = torch.Generator().manual_seed(seed)
    numbers = num_experts + 3 * nobody
    ids = [torch.randperm(max(numbers, chosen), generator=generator)[:chosen] for _ in range(tokens)]
    return torch.stack(ids).to(DEVICE)


@both
@every_case
@pytest.mark.parametrize("nobody", [False, True])
def test_expert_plan(plan, num_experts, tokens, chosen, rows, nobody):
    ids = choose(num_experts, tokens, chosen, nobody=nobody)
    pairs, owners, firsts, lasts = plan(ids, num_experts, rows).tolist()
    flat = [min(expert, num_experts) for expert in ids.flatten().tolist()]
    assert pairs == sorted(range(len(flat)), key=lambda pair: flat[pair])
    expected = []
    for expert in range(num_experts + 1):
        places = [place for place, pair in enumerate(pairs) if flat[pair] == expert]
        for start in range(0, len(places), rows):
            block = places[start : start + rows]
            expected.append((expert, block[0], block[-1] + 1))
    found = list(zip(owners, firsts, lasts, strict=True))
    assert found == expected + [(-1, len(flat), len(flat))] * (len(flat) - len(expected))


def test_plans_are_equal():
    for seed in range(20 if DEVICE == "cpu" else 300):
        draw = torch.Generator().manual_seed(seed)
        num_experts, tokens = (int(torch.randint(1, most, (), generator=draw)) for most in (70, 60))
        ids = torch.randint(0, num_experts + 2, (tokens, 3), generator=draw).to(DEVICE)
        rows = [16, 32, 64][seed % 3]
        assert torch.equal(plan_experts(ids, num_experts, rows), experts_reference.plan_experts(ids, num_experts, rows))


@pytest.mark.parametrize(
    ("num_experts", "tokens", "chosen", "rows", "is_transposed"),
    cases(
        every := [(*one, is_transposed) for is_transposed in (False, True) for one in CASES],
        [one for one in every if one[-1] == (CASES.index(one[:-1]) % 2 == 1)],
    ),
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_expert_matmuls(num_experts, tokens, chosen, rows, is_transposed, dtype):
    """Of tokens with bias and pairs of nobody, and of pairs without, by weights that are parts of others."""
    torch.manual_seed(0)
    ids = choose(num_experts, tokens, chosen, nobody=True)
    plan = plan_experts(ids, num_experts, rows)
    size_in, size_out = 72, 88
    shape = (num_experts, size_in, size_out) if is_transposed else (num_experts, size_out, size_in)
    whole = torch.randn(num_experts, shape[1] + 8, shape[2] + 16, device=DEVICE).to(dtype)
    weight = whole[:, 8:, :-16]
    bias = torch.randn(num_experts, size_out, device=DEVICE).to(dtype)
    for of_pairs in (False, True):
        inputs = torch.randn(tokens * (chosen if of_pairs else 1), size_in, device=DEVICE).to(dtype)
        expected = torch.zeros(ids.numel(), size_out, dtype=torch.float64, device=DEVICE)
        for pair, expert in enumerate(ids.flatten().tolist()):
            if expert < num_experts:
                matrix = weight[expert].double()
                row = inputs[pair if of_pairs else pair // chosen].double()
                expected[pair] = row @ (matrix if is_transposed else matrix.T) + bias[expert] * (not of_pairs)
        for product in (expert_linear, experts_reference.expert_linear):
            out = product(inputs, weight, None if of_pairs else bias, plan, rows, is_transposed)
            assert out.dtype == dtype and out.shape == expected.shape
            assert (out.double() - expected).abs().max() <= TOLERANCES[dtype] * max(1, expected.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_weights", [torch.float32, None])
@pytest.mark.parametrize(("tokens", "chosen", "width"), [(1, 1, 7), (3, 4, 600), (70, 8, 96)])
def test_weighted_sums(tokens, chosen, width, of_weights, dtype):
    torch.manual_seed(0)
    outputs = torch.randn(tokens * chosen, width, device=DEVICE).to(dtype)
    weights = torch.rand(chosen, tokens, device=DEVICE).to(of_weights or dtype).T
    found, expected = sum_experts(outputs, weights), experts_reference.sum_experts(outputs, weights)
    exact = (outputs.double().view(tokens, chosen, width) * weights.double()[..., None]).sum(1)
    for one in (found, expected):
        assert one.shape == exact.shape and one.dtype == torch.promote_types(dtype, weights.dtype)
        assert (one.double() - exact).abs().max() <= TOLERANCES[one.dtype] * max(1, exact.abs().max())


def experts_class(**kind):
    """A class of experts that transformers dispatches, with the weight layout of `kind`."""

    @use_experts_implementation(**kind)
    class Experts(nn.Module):
        def __init__(self, config):
            super().__init__()
            hidden, inner, self.num_experts = 48, 40, 6
            first, width = ("gate_up_proj", 2 * inner) if kind.get("has_gate", True) else ("up_proj", inner)
            for name, size_in, size_out in ((first, hidden, width), ("down_proj", inner, hidden)):
                shape = (size_in, size_out) if kind.get("is_transposed") else (size_out, size_in)
                setattr(self, name, nn.Parameter(torch.randn(self.num_experts, *shape) / 7))
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(self.num_experts, size_out)))
            self.act_fn = nn.SiLU()
            self.post_expert_norm = nn.LayerNorm(hidden)

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise AssertionError("transformers' loop is not what is asked for")

    return Experts


KINDS = [
    {},
    {"is_transposed": True},
    {"has_bias": True},
    {"is_transposed": True, "has_bias": True, "is_concatenated": False},
    {"has_gate": False},
    {"has_post_expert_norm": True},
]


@pytest.mark.core_for(through=["reference"])
@pytest.mark.parametrize("through", ["reference", "kernels"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: ", ".join(kind) or "plain")
@torch.no_grad()
def test_experts_equal_those_of_transformers(monkeypatch, kind, through):
    known = inspect.signature(use_experts_implementation).parameters
    if not kind.keys() <= known.keys():
        pytest.skip("this transformers has no such experts")
    if through == "kernels":
        set_policy(monkeypatch, DEVICE, triton=True)
    torch.manual_seed(0)
    config = SimpleNamespace(_experts_implementation="batched_mm")
    module = experts_class(**kind)(config).to(DEVICE)
    for tokens in (1, 5, 70):  # 70 tokens are blocks of more rows
        inputs = torch.randn(tokens, 48, device=DEVICE)
        ids, weights = choose(6, tokens, 2), torch.rand(tokens, 2, device=DEVICE)
        config._experts_implementation = "batched_mm"
        expected = module(inputs, ids, weights)
        config._experts_implementation = experts.EXPERTS_NAME
        with engine():
            found = module(inputs, ids, weights)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_many_tokens_in_bfloat16_use_grouped_matmul(monkeypatch):
    asked = []
    monkeypatch.setitem(
        ALL_EXPERTS_FUNCTIONS._global_mapping,
        "grouped_mm",
        lambda module, inputs, *rest: asked.append(inputs) or inputs,
    )
    module = experts_class()(SimpleNamespace(_experts_implementation=experts.EXPERTS_NAME)).to(torch.bfloat16)
    for tokens, is_left in ((3 * experts.MAX_TOKENS_OF_KERNEL, False), (3 * experts.MAX_TOKENS_OF_KERNEL + 1, True)):
        asked.clear()
        with engine():
            module(torch.randn(tokens, 48).bfloat16(), choose(6, tokens, 2).cpu(), torch.rand(tokens, 2))
        assert bool(asked) == is_left


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_targets_generate_the_same_with_either_implementation(monkeypatch, family):
    """Rounds whose experts compute by ours, and by what transformers takes where they are not hosted."""
    target, calls = tiny_target(family), []
    product = ops.expert_linear
    monkeypatch.setattr(ops, "expert_linear", lambda *args: calls.append(args) or product(*args))
    plain = greedy(target, padded_prompts(PROMPTS[3]), None, 3)
    assert not calls
    assert torch.equal(greedy(target, padded_prompts(PROMPTS[3]), random_eagle3(target), 3), plain)
    assert calls
