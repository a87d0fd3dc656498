"""Weights that are written into a drafter between calls."""

import copy
import threading

import pytest
import torch
from graph_stand_ins import replay_on_cpu
from oracle import RANDOM_DRAFTERS, random_eagle3
from targets import new_target, padded_prompts

from hf_specdec.hosting import equivalence
from hf_specdec.modules.locks import lock_of

INPUTS = padded_prompts([9, 5, 3])
DRAWN = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 12, "seeds": [1, 2, 3], "num_assistant_tokens": 3}


def drafts(target, drafter):
    """Drawn texts, and how many drafts were accepted: other drafters have others by the same random numbers."""
    text = target.generate(**INPUTS, **DRAWN, assistant_model=drafter)
    return text.tolist(), [(row.accepted, row.rounds) for row in drafter.stats.rows]


@pytest.mark.core_for(family=["p-eagle"])
@pytest.mark.parametrize("family", ["eagle3", "p-eagle", "mtp", "dflash"])
def test_calls_draft_with_them_and_capture_nothing(monkeypatch, family):
    target = new_target("llama")
    drafter, other = RANDOM_DRAFTERS[family](target), RANDOM_DRAFTERS[family](target)
    generator = torch.Generator().manual_seed(1)
    for one in other.parameters():
        one.data += 0.05 * torch.randn(one.shape, generator=generator)
    other.bind(target)
    expected, checks = drafts(target, other), []
    replay = replay_on_cpu(monkeypatch)
    difference = equivalence._difference
    monkeypatch.setattr(equivalence, "_difference", lambda *args: (checks.append(1), difference(*args))[1])
    before = drafts(target, drafter)
    drafts(target, drafter)
    captures, places = replay.count, [one.data_ptr() for one in drafter.parameters()]
    checks.clear()
    drafter.load_weights({name: one.double() for name, one in other.state_dict().items()})
    assert drafts(target, drafter) == expected != before
    assert captures > 0 and replay.count == captures and not checks
    assert [one.data_ptr() for one in drafter.parameters()] == places
    assert all(torch.equal(one, other.state_dict()[name]) for name, one in drafter.state_dict().items())


@pytest.mark.core
def test_weights_that_do_not_fit_change_nothing():
    target = new_target("llama")
    drafter = random_eagle3(target)
    before = copy.deepcopy(drafter.state_dict())
    wanted = {name: one + 1 for name, one in before.items()}
    right = next(name for name, one in before.items() if one.is_floating_point())
    for wrong, words in (
        ({"layers.0.nothing": torch.zeros(2)}, "layers.0.nothing is none of its weights"),
        ({right: before[right][:1]}, rf"{right} is \[1.*\], expected \[{before[right].shape[0]}"),
        ({"d2t": before["d2t"] + 1}, "d2t differs, which is fixed"),
        ({right: wanted[right].to("meta")}, f"{right} is no tensor of real numbers in memory"),
        ({right: wanted[right] + 1j}, f"{right} is no tensor of real numbers in memory"),
        ({right: wanted[right].tolist()}, f"{right} is no tensor of real numbers in memory"),
    ):
        with pytest.raises(ValueError, match=words):
            others = {name: one for name, one in wanted.items() if name not in ("d2t", right)}
            drafter.load_weights(others | wrong)
        assert all(torch.equal(one, before[name]) for name, one in drafter.state_dict().items())
    for wrong in (None, [right]):
        with pytest.raises(ValueError, match=r"weights is .*; expected Mapping"):
            drafter.load_weights(wrong)
    drafter.load_weights({"d2t": before["d2t"], right: wanted[right]})
    assert torch.equal(drafter.state_dict()[right], wanted[right])


def test_they_wait_for_a_call_of_another_thread():
    target = new_target("llama")
    drafter = random_eagle3(target)
    weights = {name: one + 1 for name, one in drafter.named_parameters()}
    before = copy.deepcopy(drafter.state_dict())
    thread = threading.Thread(target=drafter.load_weights, args=(weights,))
    with lock_of(target):
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert all(torch.equal(one, before[name]) for name, one in drafter.state_dict().items())
    thread.join()
    assert all(torch.equal(drafter.state_dict()[name], one) for name, one in weights.items())


def test_a_running_manager_lets_them_in():
    target = new_target("llama")
    drafter = random_eagle3(target)
    prompt, new = [3, 4, 5, 6], 150
    plain = target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=new)[0, 4:].tolist()
    with target.continuous_batching_context_manager(assistant_model=drafter, block=True) as manager:
        name = manager.add_request(prompt, max_new_tokens=new, streaming=True)
        for number, result in enumerate(manager.request_id_iter(name)):
            if number < 3:
                assert not result.is_finished()
                drafter.load_weights({key: one * 1.01 for key, one in drafter.named_parameters()})
        assert result.generated_tokens == plain
