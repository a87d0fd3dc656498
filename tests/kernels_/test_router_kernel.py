"""The choice of experts by a router."""

import itertools

import pytest
import torch

from hf_specdec.kernels import router_reference
from hf_specdec.kernels.router import choose_experts
from hf_specdec.kernels.types import RouterKind

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [(1, 2, 1), (5, 32, 4), (3, 128, 8), (2, 300, 6), (2, 5, 5)]
KINDS = [
    RouterKind("softmax"),
    RouterKind("softmax", True),
    RouterKind("sigmoid", True, 1e-20, 2.5),
    RouterKind("chosen", scaling=0.5),
]


def exact(logits, correction, top_k, kind):
    """In float64, by sorting."""
    scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "chosen": logits}[kind.scores]
    choice = scores if correction is None else scores + correction
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, experts)
    if kind.scores == "chosen":
        weights = weights.softmax(-1)
    if kind.normalises:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * kind.scaling, experts


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("is_corrected", [False, True])
@pytest.mark.parametrize(("tokens", "num_experts", "top_k"), CASES)
def test_choices(tokens, num_experts, top_k, is_corrected, kind):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(tokens, 2 * num_experts, generator=generator).to(DEVICE)
    correction = 0.3 * torch.randn(num_experts, generator=generator).to(DEVICE) if is_corrected else None
    given = wide[:, ::2], wide[:, :num_experts].bfloat16()
    for logits, dtype in itertools.product(given, (torch.float32, torch.float16)):
        expected = exact(logits.double(), None if correction is None else correction.double(), top_k, kind)
        for function in (choose_experts, router_reference.choose_experts):
            weights, experts = function(logits, correction, top_k, dtype, kind)
            assert weights.dtype == dtype and torch.equal(experts, expected[1])
            tolerance = 2e-6 if dtype == torch.float32 else 1e-3
            torch.testing.assert_close(weights.double(), expected[0], rtol=tolerance, atol=1e-7)


def test_of_equal_scores_the_first_is_chosen():
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 2.0, 0.0, 1.0]], device=DEVICE)
    for kind, function in itertools.product(KINDS, (choose_experts, router_reference.choose_experts)):
        assert function(logits, None, 5, torch.float32, kind)[1].tolist() == [[1, 3, 4, 0, 2]]
        experts = function(torch.zeros(3, 6, device=DEVICE), None, 6, torch.float32, kind)[1]
        assert experts.tolist() == [[0, 1, 2, 3, 4, 5]] * 3


def test_no_expert_is_beyond_the_last_one():
    """Neither for logits of minus infinity nor for none that is a number."""
    for value in (float("-inf"), float("nan")):
        logits = torch.full((2, 5), value, device=DEVICE)
        experts = choose_experts(logits, None, 3, torch.float32, KINDS[2])[1]
        assert int(experts.min()) >= 0 and int(experts.max()) < 8, "numbers beyond add nothing, and are never read"
    logits = torch.tensor([[0.5, float("-inf"), 0.25, float("-inf"), float("-inf")]], device=DEVICE)
    assert choose_experts(logits, None, 2, torch.float32, KINDS[1])[1].tolist() == [[0, 2]]
