"""Block drafters that learn from states whose channels are of very different sizes."""

import copy

import pytest
import torch
from oracle import RANDOM_DRAFTERS
from targets import new_target
from training.channels import channel_sizes, divide_channels, folded_weights

from hf_specdec.training.objective import Batch, BlockObjective, Teacher

LARGE = 7  # a channel of the residual stream


def target_with_a_large_channel():
    target = new_target("llama")
    target.get_input_embeddings().weight.data[:, LARGE] += 300
    return target


def batch_of(target, count=8, length=20):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, target.config.vocab_size, (count, length), generator=generator)
    return Batch.of(ids, torch.full((count, 1), length), torch.full((count, 1), 2))


def states_of(outputs):
    yield outputs.aux_hidden_states.flatten(0, 1)[outputs.places]


def learn(drafter, target, steps):
    outputs = Teacher(target, drafter).read(batch_of(target))
    divide_channels(drafter, states_of(outputs), is_trained=False)
    objective = BlockObjective(drafter, 2, 0.8, num_anchors=8).train()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(steps):
        loss, _ = objective(outputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("family", ["dflash", "dspark"])
def test_saved_drafters_draft_as_in_training(family):
    target = target_with_a_large_channel()
    drafter = RANDOM_DRAFTERS[family](target)
    drafter.bind(target)
    fresh, names = copy.deepcopy(drafter.config), set(drafter.state_dict())
    learn(drafter, target, 3)
    divisors = drafter.fc.parametrizations.weight[0].divisors
    assert divisors.max() > 50 * divisors.median()

    saved = type(drafter)(fresh)
    saved.load_state_dict(folded_weights(drafter))
    saved.bind(target)
    assert set(saved.state_dict()) == names
    outputs = Teacher(target, drafter).read(batch_of(target))
    drafts = [one(outputs.input_ids, outputs.aux_hidden_states, 2) for one in (drafter, saved)]
    for ours, theirs in zip(*drafts, strict=True):
        torch.testing.assert_close(ours[:, :-1], theirs[:, :-1], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trained_drafters_begin_as_they_are(dtype):
    target = target_with_a_large_channel()
    drafter = RANDOM_DRAFTERS["dflash"](target).to(dtype)
    drafter.bind(target)
    before = copy.deepcopy(drafter.state_dict())
    divide_channels(drafter, states_of(Teacher(target, drafter).read(batch_of(target))), is_trained=True)
    after = folded_weights(drafter)
    assert after.keys() == before.keys() and all(torch.equal(after[name], one) for name, one in before.items())
    assert not torch.equal(drafter.fc.parametrizations.weight.original, before["fc.weight"])


def test_sizes_are_powers_of_two_near_the_rms():
    states = torch.randn(400, 5, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [0.3, 1.0, 500.0, 0.0, 1e-9]
    )
    sizes = channel_sizes([states[:100], states[100:].bfloat16()])
    assert sizes.tolist() == [0.25, 1.0, 512.0, 1.0, 2.0**-12]
    assert torch.equal(sizes.log2(), sizes.log2().round())
    assert channel_sizes([torch.zeros(3, 2)]).tolist() == [1.0, 1.0]


def test_other_drafters_are_left_as_they_are():
    target = new_target("llama")
    drafter = RANDOM_DRAFTERS["eagle3"](target)
    divide_channels(drafter, iter(()), is_trained=False)
    assert folded_weights(drafter).keys() == drafter.state_dict().keys()
