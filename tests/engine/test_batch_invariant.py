"""`batch_invariant`: what runs in its place gives the same texts, and what is not known to be invariant is refused.

The kernels need a GPU; here their references run in their places. Bits are compared in `tests/gpu`.
"""

import copy

import pytest
import torch
from case_counts import cases
from lossless import PROMPTS, greedy
from oracle import RANDOM_DRAFTERS, random_eagle3
from targets import build_target, padded_prompts, set_policy, tiny_target
from torch import nn

from hf_specdec import NoDrafter, ops
from hf_specdec.hosting.equivalence import why_not_batch_invariant
from hf_specdec.modules.patch import engine, user_code
from hf_specdec.patching.batch_invariance import batch_invariant

OTHERS = ["gpt2", "olmo2", "cohere2", "phi3", "glm4_moe", "llama4_text"]
PROMPT = padded_prompts(PROMPTS[3])


@pytest.fixture
def supported(monkeypatch):
    """A CPU counts as a device that has the kernels."""
    set_policy(monkeypatch, "cpu", batch_invariant=True, layer_kernels=True)
    monkeypatch.setattr("hf_specdec.hosting.eligibility.why_not_batch_invariant", lambda model: None)


@pytest.mark.usefixtures("supported")
@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "qwen3-moe", "deepseek-v3"])
def test_targets_generate_the_same(family):
    target = tiny_target(family)
    drafter = NoDrafter(target, batch_invariant=True)
    assert torch.equal(greedy(target, PROMPT, drafter, 6), greedy(target, PROMPT, None, 8))
    assert drafter.stats.batch_invariant and "batch-invariant" in drafter.stats.execution
    assert not ops.is_batch_invariant() and torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.usefixtures("supported")
@pytest.mark.parametrize("model_type", cases(OTHERS, ["gpt2", "cohere2", "llama4_text"]))
def test_other_kinds_of_layers_generate_the_same(model_type):
    """Weights that are not transposed, layer norms, shared experts, chunks."""
    target = build_target(model_type)
    drafter = NoDrafter(target, batch_invariant=True)
    assert torch.equal(greedy(target, PROMPT, drafter, 6), greedy(target, PROMPT, None, 6))


@pytest.mark.usefixtures("supported")
@pytest.mark.core_for(kind=["eagle3"])
@pytest.mark.parametrize("kind", cases(list(RANDOM_DRAFTERS), ["eagle3", "draft-model", "dflash", "mtp"]))
def test_drafters_generate_the_same(kind):
    target = tiny_target("llama")
    drafter = RANDOM_DRAFTERS[kind](target)
    draws = {"do_sample": True, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "max_new_tokens": 5}
    texts = []
    for is_invariant in (False, True):
        drafter.configure(batch_invariant=is_invariant)
        texts.append(
            (greedy(target, PROMPT, drafter, 8), target.generate(**PROMPT, assistant_model=drafter, seeds=1, **draws))
        )
        assert drafter.stats.batch_invariant == is_invariant
    assert all(torch.equal(*pair) for pair in zip(*texts, strict=True))


@pytest.mark.usefixtures("supported")
@pytest.mark.parametrize("kind", cases(["eagle3", "mtp", "p-eagle", "domino", "dspine"], ["mtp", "domino"]))
def test_trees_generate_what_calls_without_drafts_do(kind):
    """Greedy, and drawn with seeds."""
    target = tiny_target("llama")
    draws = {"do_sample": True, "temperature": 1.5, "top_k": 20, "max_new_tokens": 5, "seeds": [3, 4, 5]}
    texts = []
    for drafter in (NoDrafter(target), RANDOM_DRAFTERS[kind](target).configure(4, tree=12)):
        drafter.configure(batch_invariant=True)
        texts.append((greedy(target, PROMPT, drafter, 8), target.generate(**PROMPT, assistant_model=drafter, **draws)))
    assert all(torch.equal(*pair) for pair in zip(*texts, strict=True))
    assert drafter.stats.tree == 12 and drafter.stats.batch_invariant


def test_bits_are_compared_when_a_target_first_runs(monkeypatch):
    """References for a CPU promise no bits: an outcome is either, but it is found, kept, and named."""
    set_policy(monkeypatch, "cpu", batch_invariant=True)
    target, outcomes = tiny_target("llama"), [None, "50% of the logits have other bits"]
    assert why_not_batch_invariant(target) == why_not_batch_invariant(target)
    for outcome in outcomes:
        monkeypatch.setattr("hf_specdec.modules.signature._facts", {})
        monkeypatch.setattr("hf_specdec.hosting.equivalence._compare_bits", lambda model, outcome=outcome: outcome)
        drafter = NoDrafter(target, batch_invariant=True)
        if outcome is None:
            greedy(target, PROMPT, drafter, 2)
        else:
            assert outcome in refused(target, drafter)


def refused(target, drafter, **options):
    with pytest.raises(ValueError, match="batch_invariant=True") as error:
        target.generate(**PROMPT, assistant_model=drafter, max_new_tokens=3, **options)
    assert torch._C._len_torch_dispatch_stack() == 0 and not ops.is_batch_invariant()
    return str(error.value)


@pytest.mark.usefixtures("supported")
@pytest.mark.parametrize(
    "options",
    [
        {"typical_p": 0.9},
        {"eta_cutoff": 1e-3, "epsilon_cutoff": 1e-3},
        {"top_h": 0.5},
        {"renormalize_logits": True, "min_p": 0.05},
        {"repetition_penalty": 1.2, "top_p": 0.8},
        {"no_repeat_ngram_size": 2, "top_p": 0.8},
    ],
    ids=lambda options: "-".join(options),
)
def test_drawn_texts_are_the_same(options):
    target = tiny_target("llama")
    drafter = random_eagle3(target)
    options = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 6, "seeds": 3} | options
    texts = [
        target.generate(**PROMPT, assistant_model=drafter.configure(batch_invariant=is_invariant), **options)
        for is_invariant in (False, True)
    ]
    assert torch.equal(*texts)


def test_a_device_without_the_kernels_is_refused():
    target = tiny_target("llama")
    assert "on a device of type cpu; expected a GPU" in refused(target, NoDrafter(target, batch_invariant=True))


@pytest.mark.usefixtures("supported")
def test_targets_and_calls_that_cannot_be_are_refused():
    target = tiny_target("qwen3-next")
    assert "has recurrent layers" in refused(target, NoDrafter(target, batch_invariant=True))
    target = build_target("bloom")
    assert "has attention of its own" in refused(target, NoDrafter(target, batch_invariant=True))
    target = copy.deepcopy(tiny_target("llama")).double()
    assert "is in torch.float64" in refused(target, NoDrafter(target, batch_invariant=True))
    target = tiny_target("llama")
    drafter = random_eagle3(target).configure(engine="stock", batch_invariant=True)
    assert "runs on the stock engine" in refused(target, drafter)
    with pytest.raises(ValueError, match="batch_invariant is 'yes'; expected True or False"):
        drafter.configure(batch_invariant="yes")


class Pooled(nn.Linear):
    """Computes something of which nobody knows in which order it is summed up."""

    def forward(self, inputs):
        return super().forward(inputs) + torch.linalg.vector_norm(inputs, dim=-1, keepdim=True)


@pytest.mark.usefixtures("supported")
def test_an_unknown_operation_is_refused_by_its_name_and_its_module():
    target = copy.deepcopy(tiny_target("llama"))
    layer = target.model.layers[1].mlp
    inner = layer.down_proj
    layer.down_proj = Pooled(inner.in_features, inner.out_features, bias=False)
    layer.down_proj.load_state_dict(inner.state_dict())
    message = refused(target, NoDrafter(target, batch_invariant=True))
    assert "Pooled calls aten.linalg_vector_norm" in message
    # Nothing is left behind: the same target generates as before.
    assert torch.equal(greedy(target, PROMPT, NoDrafter(target), 4), greedy(target, PROMPT, None, 4))


OPERATIONS = {
    "mm": lambda x: x @ x.T,
    "mm of columns": lambda x: x.T.contiguous().T @ x.T.contiguous(),
    "addmm": lambda x: torch.addmm(x[0, :5], x, x[:5].T),
    "addmm of a matrix": lambda x: torch.addmm(x[:, :5], x, x[:5].T),
    "bmm": lambda x: torch.bmm(x.view(2, 4, -1), x.view(2, 4, -1).mT),
    "outer products": lambda x: torch.bmm(x[:, :, None], x[:, None, :]),
    "linear": lambda x: nn.functional.linear(x.view(2, 4, -1), x, x[:, 0]),
    "sum": lambda x: x.sum(-1),
    "sum of two dimensions": lambda x: x.view(2, 4, -1).sum((0, 1), keepdim=True),
    "mean": lambda x: x.mean(0),
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(-1),
    "cumsum": lambda x: x.cumsum(0),
    "topk": lambda x: x.topk(3).values,
    "ties": lambda x: torch.zeros_like(x).topk(3).indices + 0.0,
    "layer_norm": lambda x: nn.functional.layer_norm(x, x.shape[1:], x[0], x[1]),
    "rms_norm": lambda x: nn.functional.rms_norm(x, x.shape[1:], x[0]),
    "logsumexp": lambda x: x.logsumexp(-1) + x.logsumexp((0, 1), keepdim=True)[0],
    "nansum": lambda x: torch.where(x > 0, x, float("nan")).nansum(-1),
    "sum of integers": lambda x: x.long().sum(0) + 0.0,
}


@torch.no_grad()
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_compute_what_they_do_elsewhere(name):
    inputs = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    expected = OPERATIONS[name](inputs)
    if name == "ties":
        expected = torch.arange(3.0).expand(8, 3)
    with engine(), batch_invariant():
        torch.testing.assert_close(OPERATIONS[name](inputs), expected)


def test_operations_of_the_caller_are_its_own():
    inputs = torch.randn(4, 4)
    with engine(), batch_invariant():
        with pytest.raises(ValueError, match=r"the engine calls aten\.linalg_vector_norm"):
            torch.linalg.vector_norm(inputs)
        with pytest.raises(ValueError, match=r"aten\.index_put"):
            inputs.index_put((torch.tensor([0, 0]),), torch.ones(2, 4), accumulate=True)
        with user_code():
            torch.linalg.vector_norm(inputs)
