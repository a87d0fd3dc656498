"""Calls inside and outside of `torch.inference_mode()`: the same outputs, and models that can still be trained."""

import copy
import itertools
from contextlib import nullcontext
from functools import partial

import lossless
import pytest
import torch
from case_counts import cases, num_cases
from graph_stand_ins import replay_on_cpu
from oracle import RANDOM_DRAFTERS, random_eagle3
from targets import padded_prompts, set_policy, tiny_target
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_specdec.drafters import DFlashDrafter
from hf_specdec.modules.hidden_states import AuxHiddenStateRecorder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODES = {"greedy": {"do_sample": False}, "sampling": {"do_sample": True, "temperature": 1.2, "seeds": 3}}
ENGINES = ["static", "stock", "captured"]
greedy = partial(lossless.greedy, max_new_tokens=num_cases(16, 8))
MODES["ngrams"] = {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}


@pytest.fixture(params=ENGINES)
def engine(request, monkeypatch):
    set_policy(monkeypatch, DEVICE, fused_linear=True)
    if request.param == "captured" and DEVICE == "cpu":
        replay_on_cpu(monkeypatch)
        set_policy(monkeypatch, "cpu", transposed_linear=False)
    return request.param


def fresh(family="llama"):
    target = copy.deepcopy(tiny_target(family)).to(DEVICE)
    return target, {name: tensor.to(DEVICE) for name, tensor in padded_prompts([9]).items()}


def configured(drafter, engine):
    return drafter.configure(engine="stock" if engine == "stock" else "auto", compile_rounds=False)


def mode(is_inference):
    return torch.inference_mode() if is_inference else nullcontext()


def train(model, loss):
    """A step of an optimiser that reaches every parameter."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()
    model.zero_grad()


@pytest.mark.parametrize(
    "order", cases(list(itertools.product([True, False], repeat=2)), [(True, False), (False, True)]), ids=str
)
def test_calls_in_any_order(engine, order):
    target, inputs = fresh()
    drafter = configured(random_eagle3(target), engine)
    for options in MODES.values():
        plain = {"max_new_tokens": 12, **options}
        expected = None if "seeds" in options else target.generate(**inputs, **plain)
        for is_inference in order:
            with mode(is_inference):
                out = target.generate(**inputs, assistant_model=drafter, num_assistant_tokens=3, **plain)
            expected = out if expected is None else expected
            assert torch.equal(out, expected)
    assert not any(tensor.is_inference() for tensor in (*target.state_dict().values(), *drafter.state_dict().values()))
    train(target, lambda: target(**inputs, labels=inputs["input_ids"]).loss)
    changed = greedy(target, inputs)
    with mode(order[0]):
        assert torch.equal(greedy(target, inputs, drafter, 3), changed)


@pytest.mark.parametrize(
    ("engine", "kind"),
    cases(
        every := list(itertools.product(ENGINES, RANDOM_DRAFTERS)),
        [
            one
            for one in every
            if one[1] in ("eagle3", "draft-model") or (one[0] == "captured" and one[1] in ("pard2", "dspark", "mtp"))
        ],
    ),
    indirect=["engine"],
)
def test_drafters_bound_in_inference_mode_can_be_trained(engine, kind):
    target, inputs = fresh()
    drafter = configured(RANDOM_DRAFTERS[kind](target), engine)
    with torch.inference_mode():
        drafter.bind(target)
        generated = greedy(target, inputs, drafter, 3)
    assert torch.equal(greedy(target, inputs, drafter, 3), generated)
    with (
        torch.no_grad(),
        AuxHiddenStateRecorder(target, drafter.aux_hidden_state_layer_ids, drafter.reads_last_hidden_state) as recorder,
    ):
        target(**inputs)
        aux_hidden_states = recorder.aux_hidden_states

    def loss():
        if isinstance(drafter, DFlashDrafter):  # it drafts from blocks, not from its own drafts
            return sum(logits.logsumexp(-1).sum() for logits in drafter(inputs["input_ids"], aux_hidden_states, 2))
        read = drafter.unroll(inputs["input_ids"], aux_hidden_states, 2)
        return sum((output @ drafter.head_weight.t()).logsumexp(-1).sum() for output in read)

    optimizer = torch.optim.SGD(drafter.parameters(), lr=0.01)
    loss().backward()
    assert any(parameter.grad is not None for parameter in drafter.parameters())
    optimizer.step()
    with torch.inference_mode():
        assert torch.equal(greedy(target, inputs, drafter, 3), generated)


class Noted:
    """Has a tensor of the mode that it was made in, which it changes in place; knows in which modes it did."""

    def __init__(self):
        self.count = torch.zeros((), device=DEVICE)
        self.modes = set()

    def note(self):
        self.count += 1
        self.modes.add(torch.is_inference_mode_enabled())


class Processor(Noted, LogitsProcessor):
    def __call__(self, input_ids, scores):
        self.note()
        return scores - scores.softmax(-1) * (input_ids[:, -1:] % 3)


class Criterion(Noted, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        self.note()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Streamer(Noted, BaseStreamer):
    def put(self, value):
        self.note()

    def end(self):
        self.note()


@pytest.mark.core_for(is_inference=[True])
@pytest.mark.parametrize("is_inference", [True, False])
def test_callbacks_run_in_the_mode_of_the_caller(engine, is_inference):
    target, inputs = fresh()
    drafter = configured(random_eagle3(target), engine)

    def generated(**options):
        with mode(is_inference):
            handed = Processor(), Criterion(), Streamer()
            rules = {
                "logits_processor": LogitsProcessorList([handed[0]]),
                "stopping_criteria": StoppingCriteriaList([handed[1]]),
                "streamer": handed[2],
            }
            out = target.generate(**inputs, do_sample=False, max_new_tokens=12, **rules, **options)
        assert all(one.modes == {is_inference} for one in handed)
        return out

    assert torch.equal(generated(assistant_model=drafter, num_assistant_tokens=3), generated())


def test_a_target_that_was_made_in_inference_mode(engine):
    with torch.inference_mode():
        target, inputs = fresh()
    drafter = configured(random_eagle3(target), engine)
    with torch.inference_mode():
        plain = greedy(target, inputs)
        assert torch.equal(greedy(target, inputs, drafter, 3), plain)
    assert torch.equal(greedy(target, inputs, drafter, 3), plain)
