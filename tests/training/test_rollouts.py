"""Hidden states that calls keep of the texts that they generate: those of a pass of the target over each text."""

from collections import Counter

import pytest
import torch
from graph_stand_ins import replay_on_cpu, tape_on_cpu
from oracle import RANDOM_DRAFTERS
from targets import new_target
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_specdec.modules.hidden_states import AuxHiddenStateRecorder
from hf_specdec.training.rollouts import Rollouts

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 9, 10, 3], [4, 7, 9], [8, 3, 9, 5, 7], [8, 3, 9, 5, 7]]


def lockstep(target, drafter, new):
    width = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (width - len(one)) + one for one in PROMPTS])
    mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in PROMPTS])
    target.generate(ids, attention_mask=mask, assistant_model=drafter, do_sample=False, max_new_tokens=new)


def continuous(target, drafter, new):
    """More requests than rows, whose prompts begin alike."""
    config = GenerationConfig(do_sample=False, max_new_tokens=new, eos_token_id=-1, pad_token_id=0)
    rows = ContinuousBatchingConfig(max_requests_per_batch=2)
    options = {"generation_config": config, "continuous_batching_config": rows}
    target.generate_batch(PROMPTS, assistant_model=drafter, **options)


@pytest.mark.parametrize(
    ("family", "run", "options"),
    [
        ("eagle3", lockstep, {}),
        ("eagle3", continuous, {}),
        ("mtp", lockstep, {}),
        ("dflash", lockstep, {"tree": 6}),
    ],
)
def test_hidden_states_are_those_of_the_target(monkeypatch, family, run, options):
    replay_on_cpu(monkeypatch)
    target = new_target("llama")
    drafter = RANDOM_DRAFTERS[family](target)
    drafter.configure(num_assistant_tokens=3, **options)
    drafter.rollouts = ring = Rollouts(drafter.aux_hidden_state_layer_ids, 1000)
    run(target, drafter, 12)
    assert drafter.stats.execution.startswith("captured")
    texts = ring.take()
    assert sorted(one.tokens[: one.prompt_length].tolist() for one in texts) == sorted(PROMPTS)
    for one in texts:
        with torch.no_grad(), AuxHiddenStateRecorder(target, ring.layer_ids, last_hidden_state=True) as recorder:
            target(one.tokens[None, :-1])
            torch.testing.assert_close(one.hidden_states, recorder.aux_hidden_states[0], rtol=1e-4, atol=1e-4)
    assert ring.take() == []


def test_rounds_do_no_more_unless_they_are_asked(monkeypatch):
    tape = tape_on_cpu(monkeypatch)
    target = new_target("llama")
    drafter = RANDOM_DRAFTERS["eagle3"](target)

    def captured(ring):
        """How often each operation is in what a call captures."""
        tape.made.clear()
        drafter.rollouts = ring
        lockstep(target, drafter, 6)
        return Counter(str(function) for one in tape.made for function, *_ in one._operations)

    plain = captured(None)
    more = captured(ring := Rollouts(drafter.aux_hidden_state_layer_ids, 1000)) - plain
    assert plain and more["aten.index_put_.default"] == len(tape.made) and len(ring.take()) == len(PROMPTS)
    computing = [one for one in more if not any(word in one for word in ("view", "detach", "unsqueeze"))]
    assert sorted(computing) == ["aten.arange.default", "aten.cat.default", "aten.index_put_.default"]
    assert not captured(None), "graphs of before are used"


def test_the_ring_has_a_size():
    ring = Rollouts([], max_tokens=20)
    for number in range(4):
        ring.keep(torch.full((7, 2), number), torch.arange(5), [1, 2, 3])
    assert ring.dropped == 2 and [int(one.hidden_states[0, 0]) for one in ring.take()] == [2, 3]
    ring.keep(torch.zeros(29, 2), torch.arange(20), [1] * 10)
    assert ring.dropped == 3 and ring.take() == []
