"""A drafter that learns from the passes that a trainer makes of its target."""

import pytest
import torch
from graph_stand_ins import replay_on_cpu
from oracle import RANDOM_DRAFTERS, random_eagle3
from targets import new_target
from torch import nn

from hf_specdec import NoDrafter
from hf_specdec.drafters.attachment import attachment_of
from hf_specdec.hosting import equivalence
from hf_specdec.training.learner import DrafterLearner
from hf_specdec.trl import DrafterCallback

NEW = 24


class Training:
    """Steps of a trainer on a few prompts, padded before: a rollout, a pass with gradients, an optimizer's step."""

    def __init__(self, family="eagle3", dtype=torch.float32, **settings):
        self.target = new_target("llama", num_layers=4).to(dtype)
        self.drafter = RANDOM_DRAFTERS[family](self.target).to(dtype)
        self.drafter.bind(self.target)
        self.drafter.num_assistant_tokens = 3
        self.attachment = self.drafter.attach(self.target)
        self.learner = DrafterLearner(self.drafter, self.target, learning_rate=5e-3, **settings)
        self.optimizer = torch.optim.AdamW(self.target.parameters(), lr=1e-5)
        self.prompts = torch.randint(3, 16, (8, 6), generator=torch.Generator().manual_seed(0))
        self.mask = torch.ones_like(self.prompts)
        self.mask[:3, :2] = 0

    def step(self):
        self.target.train()
        options = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0}
        ids = self.target.generate(self.prompts, attention_mask=self.mask, **options)
        mask = torch.cat([self.mask, torch.ones_like(ids[:, 6:])], dim=1)
        with torch.no_grad():  # such as of a reference: nothing is learned from it
            self.target(ids, attention_mask=mask)
        logits = self.target(ids, attention_mask=mask, logits_to_keep=NEW + 1).logits
        (logits.float().square().mean() * 1e-3).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.drafter.stats.acceptance_length


@pytest.mark.parametrize(
    ("family", "dtype", "source"),
    [
        ("eagle3", "bfloat16", "trainer"),
        ("mtp", "float32", "trainer"),
        ("dflash", "float32", "trainer"),
        ("eagle3", "float32", "rollouts"),
    ],
)
def test_acceptance_grows_without_a_capture(monkeypatch, family, dtype, source):
    replay, checks, lengths = replay_on_cpu(monkeypatch), [], []
    difference = equivalence._difference
    monkeypatch.setattr(equivalence, "_difference", lambda *args: (checks.append(1), difference(*args))[1])
    dtype = getattr(torch, dtype)
    training = Training(family, dtype, source=source)
    with training.learner as learner:
        for step in range(12):
            lengths.append(training.step())
            learner.step()
            if step == 2:
                captures, num_checks = replay.count, len(checks)
    assert sum(lengths[-3:]) / 3 > lengths[0] + 0.06, lengths
    assert captures > 0 and (replay.count, len(checks)) == (captures, num_checks)
    assert training.drafter.stats.execution.startswith("captured") and learner.skipped == 0
    assert training.drafter.dtype == dtype
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in training.target.modules())
    metrics = learner.metrics()
    assert metrics["loss"][0] > 0 and learner.metrics() == {}


def test_what_is_learned_from():
    """The tokens of answers in passes with gradients, without padding, up to a number of tokens."""
    training = Training(max_tokens=100)
    with training.learner as learner:
        training.step()
        (one,) = learner._passes
        assert one.input_ids.shape == (100 // (6 + NEW), 6 + NEW)
        assert one.lengths[:, 0].tolist() == [4 + NEW] * 3 and one.prompt_lengths[:, 0].tolist() == [4] * 3
        assert torch.equal(one.input_ids[:, :4], training.prompts[:3, 2:])
        ids = one.input_ids[:, : 4 + NEW]
        learner._passes.clear()
        with training.learner._target.get_decoder().register_forward_pre_hook(lambda *_: None):
            training.target(ids, labels=ids.where(torch.arange(4 + NEW) >= 9, -100)).loss.backward()
        (one,) = learner._passes
        assert one.prompt_lengths[:, 0].tolist() == [9] * 3
        plain = training.target.get_decoder()(ids, output_hidden_states=True)
        torch.testing.assert_close(one.hidden, plain.last_hidden_state.detach())
        first, *_ = training.drafter.aux_hidden_state_layer_ids
        found = one.aux_hidden_states[..., : one.hidden.shape[-1]]
        torch.testing.assert_close(found, plain.hidden_states[first].detach())
        learner._passes.clear()
        training.target(inputs_embeds=training.target.get_input_embeddings()(ids))
        training.target(ids, position_ids=torch.arange(4 + NEW).remainder(10)[None])
        assert learner.skipped == 2 and not learner._passes
        padding = torch.arange(4 + NEW)[None] < torch.tensor([[0], [3], [5]])
        for is_padding in (padding, padding.flip(1)):  # which trainers give the position 1
            positions = (~is_padding).cumsum(dim=1).sub(1).masked_fill(is_padding, 1)
            training.target(ids, attention_mask=(~is_padding).long(), position_ids=positions)
            assert learner._passes.pop().lengths[:, 0].tolist() == [4 + NEW, 1 + NEW, NEW - 1]
        assert learner.skipped == 2
        training.target.get_decoder().layers[1].register_forward_hook(fails := Fails())
        with pytest.raises(RuntimeError, match="fails"):
            training.target(ids)
        assert learner._running is None and not learner._passes and fails.was_called


@pytest.mark.parametrize("family", ["eagle3", "dflash", "mtp"])
def test_the_target_gets_no_gradients_of_the_drafter(family):
    """Nor does one that a trainer accumulates change."""
    target = new_target("llama", num_layers=4).train()
    own = {} if family == "mtp" else {"own_embedding": False, "own_head": False, "draft_vocab_size": 96}
    drafter = RANDOM_DRAFTERS[family](target, **own)
    ids = torch.randint(3, 16, (2, 12), generator=torch.Generator().manual_seed(0))
    with DrafterLearner(drafter, target) as learner:
        target(ids, labels=ids).loss.backward()
        before = {name: one.grad.clone() for name, one in target.named_parameters()}
        learner.step()
        assert learner.metrics() and all(torch.equal(one.grad, before[n]) for n, one in target.named_parameters())
        target.zero_grad()
        target(ids, labels=ids)
        learner.step()
    assert all(one.grad is None for one in target.parameters())


@pytest.mark.parametrize("source", ["trainer", "rollouts"])
def test_learners_do_not_take_from_each_other(source):
    target = new_target("llama", num_layers=4)
    drafter = random_eagle3(target)
    prompt = torch.tensor([[3, 4, 5]])
    with DrafterLearner(drafter, target, source="rollouts") as first:
        with DrafterLearner(drafter, target) as other:
            target.generate(prompt, assistant_model=drafter, max_new_tokens=8, do_sample=False)
            other.step()
            assert other.metrics() == {}
        first.step()
        assert first.metrics()
    learner = DrafterLearner(drafter, target, source=source)
    with learner, pytest.raises(ValueError, match=f"learns from {source} already"):
        learner.__enter__()
    with learner:
        pass
    assert drafter.rollouts is None
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in target.modules())


@pytest.mark.parametrize("source", ["trainer", "rollouts"])
def test_a_training_after_one_that_an_error_has_ended(source):
    target = new_target("llama", num_layers=4)
    callback = DrafterCallback(drafter := random_eagle3(target), learning={"source": source})
    for _ in range(2):
        callback.on_train_begin(None, None, None, model=target)
    assert sum(len(one._forward_hooks) for one in target.modules()) == (source == "trainer")
    assert attachment_of(target) is callback.attachment
    callback.on_train_end(None, None, None)
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in target.modules())
    assert attachment_of(target) is None and drafter.rollouts is None


def test_a_training_that_cannot_begin_attaches_nothing():
    target = new_target("llama", num_layers=4)
    callback = DrafterCallback(RANDOM_DRAFTERS["domino"](target), learning=True)
    with pytest.raises(ValueError, match="cannot learn"):
        callback.on_train_begin(None, None, None, model=target)
    assert attachment_of(target) is None


class Fails:
    was_called = False

    def __call__(self, *_):
        self.was_called = True
        raise RuntimeError("fails")


def test_a_step_without_numbers_is_left_out():
    """A pass of a target that has diverged, and one after it."""
    training = Training()
    before = {name: one.clone() for name, one in training.drafter.state_dict().items()}
    with training.learner as learner:
        training.step()
        learner._passes[0].aux_hidden_states[0, 0] = float("nan")
        learner.step()
        assert learner.skipped == 1
        assert all(torch.equal(one, before[name]) for name, one in training.drafter.state_dict().items())
        training.step()
        learner.step()
    assert learner.skipped == 1 and all(one.isfinite().all() for one in training.drafter.state_dict().values())
    assert any(not torch.equal(one, before[name]) for name, one in training.drafter.state_dict().items())


def test_drafters_that_cannot_learn():
    target = new_target("llama")
    for make in (NoDrafter, RANDOM_DRAFTERS["domino"]):
        with pytest.raises(ValueError, match="cannot learn: it does not implement"):
            DrafterLearner(make(target), target)
    with pytest.raises(ValueError, match="bound to another target"):
        DrafterLearner(random_eagle3(target), new_target("llama"))
    with pytest.raises(ValueError, match="no transformers model inside"):
        DrafterLearner(random_eagle3(target), nn.Linear(2, 2))
    for name, value, expected in (
        ("num_steps", 0, "an int of at least 1"),
        ("max_tokens", "8k", "an int of at least 1"),
        ("temperature", -1.0, "a finite number above 0"),
        ("step_decay", 0, "a finite number above 0"),
    ):
        with pytest.raises(ValueError, match=f"{name} is {value!r}; expected {expected}"):
            DrafterLearner(random_eagle3(target), target, **{name: value})
    with pytest.raises(ValueError, match="str has no transformers model inside; expected one that generates"):
        DrafterLearner(random_eagle3(target), "org/target")
    with pytest.raises(ValueError, match=r"str cannot learn: .*; expected EAGLE-3"):
        DrafterLearner("org/drafter", target)
