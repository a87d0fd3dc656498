"""Random numbers: seeds of rows, generators, and what samples do not depend on."""

from itertools import product

import pytest
import torch
from case_counts import cases
from graph_stand_ins import replay_on_cpu
from lossless import PROMPTS
from oracle import RANDOM_DRAFTERS
from sampled_calls import MODES, drafter_of, sample
from targets import padded_prompts, set_policy, tiny_target
from transformers import LogitsProcessorList, set_seed
from transformers.generation.logits_process import TemperatureLogitsWarper

from hf_specdec.calls.call import DRAFT_PROBS_TEMPERATURE
from hf_specdec.sampling.logits import RowTemperature

modes = pytest.mark.parametrize("mode", MODES)


@pytest.mark.parametrize(
    ("kind", "mode"),
    cases([*product(["eagle3", "pard"], MODES)], [*product(["eagle3"], MODES), ("pard", "block")]),
)
def test_a_row_generates_the_same_alone_in_a_batch_and_captured(kind, mode, monkeypatch):
    """Rows with seeds and temperatures of their own: alone, with others, and replayed in a bucket of 8."""
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[8], seed=8)
    seeds, temperatures = torch.arange(8) * 7 + 2**40, torch.linspace(0.7, 1.6, 8)
    width = inputs["input_ids"].shape[1]

    def texts_of(rows):
        longest = max(PROMPTS[8][row] for row in rows)
        some = {name: values[rows, width - longest :] for name, values in inputs.items()}
        return sample(
            target,
            some,
            drafter_of(target, kind, mode),
            seeds=seeds[rows],
            logits_processor=LogitsProcessorList([RowTemperature(temperatures[rows])]),
        )

    together = texts_of(list(range(8)))
    assert len(set(map(tuple, together.tolist()))) == 8
    for rows in ([5], [6, 1, 3]):
        assert torch.equal(texts_of(rows), together[rows])
    replay_on_cpu(monkeypatch)
    for rows in ([5], [6, 1, 3, 7, 4]):
        assert torch.equal(texts_of(rows), together[rows])


def test_replayed_rounds_serve_rows_of_any_temperature(monkeypatch):
    """One captured round serves calls whose rows have other temperatures and seeds."""
    target, inputs = tiny_target("llama"), padded_prompts([5, 9])
    calls = [([0.6, 1.4], [1, 2]), ([1.5, 1.1], [1, 2]), ([0.6, 1.4], [3, 4])]

    def texts():
        drafter = drafter_of(target, "draft-model", "soft")
        return [
            sample(
                target,
                inputs,
                drafter,
                seeds=seeds,
                logits_processor=LogitsProcessorList([RowTemperature(temperatures)]),
            )
            for temperatures, seeds in calls
        ]

    eager = texts()
    capture = replay_on_cpu(monkeypatch)
    assert all(torch.equal(*pair) for pair in zip(texts(), eager, strict=True))
    assert capture.count == 2  # a prefill and a round
    assert not torch.equal(eager[0], eager[1]) and not torch.equal(eager[0], eager[2])


@pytest.mark.parametrize(
    ("options", "graphs_of_a_round"), [({}, 1), ({"repetition_penalty": 1.2}, 1), ({"no_repeat_ngram_size": 2}, 2)]
)
def test_calls_of_any_temperature_share_a_round(options, graphs_of_a_round, monkeypatch):
    target, inputs = tiny_target("llama"), padded_prompts([5, 9])

    def texts():
        drafter = drafter_of(target, "draft-model", "soft")
        found = [
            sample(target, inputs, drafter, seeds=3, temperature=temperature, **options)
            for temperature in (0.6, 1.5, 0.6)
        ]
        return found, len(drafter.sessions)

    eager, _ = texts()
    capture = replay_on_cpu(monkeypatch)
    replayed, num_sessions = texts()
    assert all(torch.equal(*pair) for pair in zip(replayed, eager, strict=True))
    assert (capture.count, num_sessions) == (1 + graphs_of_a_round, 1)
    assert torch.equal(eager[0], eager[2]) and not torch.equal(eager[0], eager[1])


@pytest.mark.parametrize("engine", ["static", "stock"])
def test_draft_probs_follow_a_temperature_threshold(engine):
    """Where nothing else was asked for; of rows with temperatures of their own the hottest decides."""
    target, inputs = tiny_target("llama"), padded_prompts([5])
    drafter = RANDOM_DRAFTERS["eagle3"](target).configure(engine=engine)
    coldest = DRAFT_PROBS_TEMPERATURE
    for temperature, is_drawn in ((coldest - 0.01, False), (coldest, True), (1.0, True)):
        sample(target, inputs, drafter, temperature=temperature)
        assert drafter.stats.draft_probs == is_drawn
    sample(target, inputs, drafter, do_sample=False, temperature=None, top_k=None)
    assert not drafter.stats.draft_probs
    rows = 2 if engine == "static" else 1
    for hottest, is_drawn in ((0.9, False), (1.1, True)):
        factors = LogitsProcessorList([RowTemperature([0.5, hottest][-rows:])])
        options = {"num_return_sequences": rows, "temperature": coldest, "logits_processor": factors}
        sample(target, inputs, drafter, **options)
        assert drafter.stats.draft_probs == is_drawn


def test_captured_temperatures_are_not_replayed_for_other_calls(monkeypatch):
    """A warper of the caller's takes the place of the one for `temperature=`, which the drafts are drawn at."""
    target, inputs = tiny_target("llama"), padded_prompts([5, 9])
    replay_on_cpu(monkeypatch)
    for replayed in (True, False):
        if not replayed:
            set_policy(monkeypatch, "cpu", cuda_graphs=False)
        drafter = drafter_of(target, "draft-model", "soft")
        found = [
            sample(
                target,
                inputs,
                drafter,
                seeds=3,
                temperature=1.2,
                logits_processor=LogitsProcessorList(map(TemperatureLogitsWarper, own)),
            )
            for own in ([0.3], [1.2], [2.5])
        ]
        if replayed:
            texts = found
    assert all(torch.equal(*pair) for pair in zip(texts, found, strict=True))
    assert len(set(map(str, texts))) == 3


@modes
def test_rows_of_one_prompt_differ(mode):
    target = tiny_target("llama")
    drafter = drafter_of(target, "eagle3", mode)
    out = sample(target, padded_prompts([5]), drafter, seeds=3, num_return_sequences=8, top_k=0, temperature=1.5)
    assert len(set(map(tuple, out.tolist()))) == 8
    assert len({tokens[0] for tokens in out.tolist()}) > 2


@modes
@pytest.mark.parametrize("engine", ["static", "stock"])
def test_seeds_and_generators_reproduce_a_run(engine, mode):
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[3 if engine == "static" else 1])
    drafter = drafter_of(target, "eagle3", mode, engine)
    set_seed(0)
    before = torch.get_rng_state()
    first = sample(target, inputs, drafter, seeds=11)
    assert torch.equal(sample(target, inputs, drafter, seeds=11), first)
    assert not torch.equal(sample(target, inputs, drafter, seeds=12), first)

    generator = torch.Generator().manual_seed(5)
    one, two = (sample(target, inputs, drafter, generator=generator) for _ in range(2))
    assert not torch.equal(one, two), "the generator did not advance"
    generator.manual_seed(5)
    assert torch.equal(sample(target, inputs, drafter, generator=generator), one)
    assert torch.equal(torch.get_rng_state(), before), "the global generator was touched"


def test_global_generator_advances_by_one_number_a_call():
    """However many rows there are and however the call goes."""
    target = tiny_target("llama")
    drafter = drafter_of(target, "eagle3", "soft")
    states = []
    for lengths, options in (([5], {}), ([5, 2, 7], {}), ([5], {"max_new_tokens": 3}), ([5], {"temperature": 0.3})):
        torch.manual_seed(3)
        sample(target, padded_prompts(lengths), drafter, **options)
        states.append(torch.get_rng_state())
    torch.manual_seed(3)
    torch.randint(0, 2**63 - 1, (1,))
    assert all(torch.equal(state, torch.get_rng_state()) for state in states)


@pytest.mark.parametrize("engine", ["static", "stock"])
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"seeds": [1, 2]}, r"seeds has shape \(2,\), but the call has 1 rows"),
        ({"seeds": 0.5}, "seeds is 0.5; expected integers"),
        ({"seeds": 1, "generator": torch.Generator()}, "Both seeds and generator were given"),
    ],
)
def test_invalid_seeds(options, match, engine):
    target = tiny_target("llama")
    drafter = drafter_of(target, "eagle3", "soft", engine)
    with pytest.raises(ValueError, match=match):
        sample(target, padded_prompts([5]), drafter, **options)


@pytest.mark.parametrize("name", ["seeds", "generator"])
def test_seed_arguments_without_a_drafter_are_refused_by_transformers(name):
    with pytest.raises(ValueError, match=name):
        tiny_target("llama").generate(**padded_prompts([5]), **{name: 3}, max_new_tokens=2)
