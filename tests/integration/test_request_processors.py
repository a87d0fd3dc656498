"""Requests of managers and of `generate_batch()` have all logits processors of plain `generate()`."""

import copy
import functools

import pytest
import torch
from case_counts import cases, tries_all
from graph_stand_ins import replay_on_cpu
from oracle import RANDOM_DRAFTERS, random_eagle3
from processor_settings import SETTINGS, WARPERS
from targets import tiny_target
from transformers import ContinuousBatchingConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.continuous_batching.requests import RequestStatus

from hf_specdec import NoDrafter
from hf_specdec.engine.capture import CapturedRound
from hf_specdec.integration.request_processors import PROCESSOR_OPTIONS
from hf_specdec.sampling import processors
from hf_specdec.sampling.logits import PenaltyLogitsProcessor

END, NEW = [7, 23, 12, 57, 83], 14
PROMPTS = [[5, 6, 7], [9] * 8, [4], [33, 34, 33, 34, 33], list(range(40, 60)), [88, 5]]


def test_every_setting_is_tried():
    assert set(SETTINGS) == set(PROCESSOR_OPTIONS)


@functools.cache
def target_of(family="llama"):
    return tiny_target(family)


def alone(target, prompt, new=NEW, **options):
    """What plain `generate()` says."""
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": END, **options}
    return target.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def running(target, drafter, rows=3, per_request=True, **options):
    config = ContinuousBatchingConfig(max_requests_per_batch=rows, per_request_processors=per_request)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": END, **options}
    return target.continuous_batching_context_manager(
        continuous_batching_config=config, assistant_model=drafter, **options
    )


def texts_of(manager, names):
    results = [manager.get_result(name, timeout=60) for name in names]
    assert all(one.status == RequestStatus.FINISHED and one.error is None for one in results), results
    return [one.generated_tokens for one in results]


@functools.cache
def all_settings():
    """Requests: number of the prompt, settings. Of each setting one whose greedy text it changes, if there is one."""
    target, found = target_of(), []
    for turn, (name, value) in enumerate(SETTINGS.items()):
        number = turn % len(PROMPTS)
        if name not in WARPERS:
            turns = ((number + one) % len(PROMPTS) for one in range(len(PROMPTS)))
            number = next(one for one in turns if alone(target, PROMPTS[one], **{name: value}) != expected_of()[one])
        found += [(number, {name: value}), (turn % len(PROMPTS), {})][: 2 - turn % 2]
    together = {"repetition_penalty": 1.3, "min_new_tokens": 6, "suppress_tokens": [9]}
    return [*found, *((number, together) for number in range(0, len(PROMPTS), 2))]


@functools.cache
def expected_of(family="llama", with_settings=False):
    """Texts of the prompts; or of all settings."""
    asked = all_settings() if with_settings else [(number, {}) for number in range(len(PROMPTS))]
    return [alone(target_of(family), PROMPTS[number], **options) for number, options in asked]


class Raises(LogitsProcessor):
    """Fails at a call, the first of which is for the first token."""

    def __init__(self, call):
        self.calls_left = call

    def __call__(self, input_ids, scores):
        self.calls_left -= 1
        if self.calls_left == 0:
            raise ZeroDivisionError("of the caller")
        return scores


@pytest.mark.core_for(captures=[False])
@pytest.mark.parametrize("captures", [False, True])
def test_a_request_whose_processors_fail_ends_alone(monkeypatch, captures):
    if captures:
        replay_on_cpu(monkeypatch)
    target, prompt = target_of(), PROMPTS[4]
    with running(target, random_eagle3(target), rows=2) as manager:
        names, failing = [], []
        for number, call in enumerate((1, 6, 12)):
            failing.append(manager.add_request(prompt, logits_processor=[Raises(call)], eos_token_id=-1))
            names.append(manager.add_request(PROMPTS[number]))
        assert texts_of(manager, names) == expected_of()[:3]
        whole = alone(target, prompt, eos_token_id=None)
        for name in failing:
            result = manager.get_result(name, timeout=60)
            assert (result.status, result.error) == (RequestStatus.FAILED, "ZeroDivisionError: of the caller")
            assert (
                len(result.generated_tokens) < NEW and result.generated_tokens == whole[: len(result.generated_tokens)]
            )
        assert texts_of(manager, [manager.add_request(prompt, eos_token_id=-1)]) == [whole]
    with pytest.raises(ZeroDivisionError, match="of the caller"):
        target.generate_batch(
            [prompt], assistant_model=manager.drafter, logits_processor=[Raises(3)], do_sample=False, max_new_tokens=NEW
        )


@pytest.mark.core_for(captures=[False])
@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize(
    ("family", "kind"), cases([("llama", "eagle3"), ("qwen3-next", "mtp"), ("gemma3", "pard")], [("llama", "eagle3")])
)
def test_requests_have_settings_of_their_own(monkeypatch, family, kind, captures):
    """Beside requests that have none, in rows that they take from each other."""
    if captures:
        replay_on_cpu(monkeypatch)
    target = target_of(family)
    drafter = RANDOM_DRAFTERS[kind](target)
    with running(target, drafter) as manager:
        names = [manager.add_request(PROMPTS[number], **options) for number, options in all_settings()]
        texts = texts_of(manager, names)
    assert texts == expected_of(family, with_settings=True)


def test_sampled_requests_have_settings_of_their_own():
    target = target_of()
    sampled = {"do_sample": True, "temperature": 0.9, "top_k": 30, "top_p": 0.95}
    drafter = random_eagle3(target).configure(num_assistant_tokens=2)
    every = all_settings()
    for draft_probs in (True, False):
        asked = every if tries_all else [one for one in every if one[1]][draft_probs::2]
        drafter.draft_probs = draft_probs
        with running(target, drafter) as manager:
            names = [manager.add_request(PROMPTS[one], seed=7, **sampled, **options) for one, options in asked]
            texts = texts_of(manager, names)
        reference = random_eagle3(target).configure(num_assistant_tokens=2)
        reference.draft_probs = draft_probs
        for (number, options), text in zip(asked, texts, strict=True):
            prompt = PROMPTS[number]
            out = target.generate(
                torch.tensor([prompt]), assistant_model=reference, seeds=[7], max_new_tokens=NEW, eos_token_id=END,
                **sampled, **options,
            )  # fmt: skip
            assert text == out[0, len(prompt) :].tolist(), options


@pytest.mark.core_for(name=["min_new_tokens"])
@pytest.mark.parametrize("name", cases(list(SETTINGS), ["repetition_penalty", "min_new_tokens", "forced_eos_token_id"]))
def test_settings_of_all_requests(name):
    """Of a manager that is made with them, of one whose model has them in its own settings, and of bulk calls."""
    target, options, lengths = target_of(), {name: SETTINGS[name]}, (14, 5, 9, 14, 3, 6)
    expected = [alone(target, prompt, new=new, **options) for prompt, new in zip(PROMPTS, lengths, strict=True)]
    for per_request in (False, True):
        with running(target, random_eagle3(target), per_request=per_request, **options) as manager:
            names = [manager.add_request(one, max_new_tokens=new) for one, new in zip(PROMPTS, lengths, strict=True)]
            assert texts_of(manager, names) == expected
    owner = copy.deepcopy(target)
    setattr(owner.generation_config, name, SETTINGS[name])
    expected = [alone(owner, prompt) for prompt in PROMPTS]
    with running(owner, random_eagle3(owner)) as manager:
        assert texts_of(manager, [manager.add_request(prompt) for prompt in PROMPTS]) == expected
    for model, own in ((owner, {}), (target, options)):
        out = model.generate_batch(
            PROMPTS, None, ContinuousBatchingConfig(max_requests_per_batch=2), assistant_model=random_eagle3(model),
            max_new_tokens=NEW, do_sample=False, eos_token_id=END, **own,
        )  # fmt: skip
        assert [one.generated_tokens for one in out.values()] == expected


class Alternating(LogitsProcessor):
    """Even tokens after odd ones; fails on a text in which that is not so."""

    def __init__(self, begin):
        self.begin = begin

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0] == 1
        new = input_ids[0, self.begin :]
        assert (new[1:] % 2 != new[:-1] % 2).all(), "a text that no generation comes to"
        parity = (int(input_ids[0, -1]) + 1) % 2
        return scores.masked_fill(torch.arange(scores.shape[1]) % 2 != parity, float("-inf"))


@pytest.mark.core
def test_processors_of_the_caller():
    """Also such as fail on texts that `generate()` would not show them."""
    target = target_of()
    processors = [LogitsProcessorList([Alternating(len(prompt) - 1)]) for prompt in PROMPTS]
    expected = [alone(target, prompt, logits_processor=one) for prompt, one in zip(PROMPTS, processors, strict=True)]
    with running(target, random_eagle3(target)) as manager:
        names = [
            manager.add_request(prompt, logits_processor=one) for prompt, one in zip(PROMPTS, processors, strict=True)
        ]
        assert texts_of(manager, names) == expected

    def allowed(row, tokens):
        return [(int(tokens[-1]) * 3 + row + step) % 96 for step in range(4)]

    out = target.generate_batch(
        PROMPTS, assistant_model=random_eagle3(target), max_new_tokens=NEW, do_sample=False, eos_token_id=END,
        prefix_allowed_tokens_fn=allowed,
    )  # fmt: skip
    expected = [
        alone(target, prompt, prefix_allowed_tokens_fn=lambda _, tokens, row=row: allowed(row, tokens))
        for row, prompt in enumerate(PROMPTS)
    ]
    assert [one.generated_tokens for one in out.values()] == expected


@pytest.mark.core
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"repetition_penalty": -1.0}, "penalty"),
        ({"repetition_penalty": "much"}, "penalty"),
        ({"no_repeat_ngram_size": 1.5}, "ngram_size"),
        ({"guidance_scale": 2.0}, "guidance_scale cannot be set for a request"),
        ({"num_beams": 3}, "num_beams cannot be set for a request"),
        ({"logits_processor": 3}, "logits_processor is a int; expected a LogitsProcessorList"),
    ],
)
def test_what_no_request_can_have_is_refused(options, words):
    target = target_of()
    with running(target, NoDrafter(target)) as manager:
        with pytest.raises(ValueError, match=words):
            manager.add_request([5, 6], **options)
        assert texts_of(manager, [manager.add_request([5, 6])]) == [alone(target, [5, 6])]


@pytest.mark.core
def test_settings_that_cannot_be_run_are_refused_not_dropped():
    target = target_of()
    for per_request in (True, False):
        with pytest.raises(ValueError, match="UnbatchedClassifierFreeGuidanceLogitsProcessor keeps state"):
            running(target, NoDrafter(target), per_request=per_request, guidance_scale=1.5)
    words = "repetition_penalty was set for a request, but the manager samples all"
    with running(target, NoDrafter(target), per_request=False) as manager, pytest.raises(ValueError, match=words):
        manager.add_request([5, 6], repetition_penalty=1.2)


def test_rounds_are_captured_whole_where_no_row_reads_its_text(monkeypatch):
    """One that does makes those beside it run in two halves only as long as it runs."""
    replay_on_cpu(monkeypatch)
    target, halves = target_of(), []
    run = CapturedRound.__call__

    def noted(self, process):
        halves.append(self.execution.startswith("captured in two graphs"))
        return run(self, process)

    monkeypatch.setattr(CapturedRound, "__call__", noted)
    with running(target, random_eagle3(target), rows=2) as manager:
        for options in ({}, {"no_repeat_ngram_size": 1}, {}):
            name = manager.add_request(PROMPTS[1], **options)
            assert texts_of(manager, [name]) == [alone(target, PROMPTS[1], **options)]
            assert halves and set(halves) == {bool(options)}
            halves.clear()


class Penalty(PenaltyLogitsProcessor):
    """Of a class that is not known, so that the host calls it, one position after the other."""


def by_rules(prompt, kind=PenaltyLogitsProcessor):
    """Settings that are numbers of a row."""
    return [
        {"repetition_penalty": 1.4},
        {"min_length": 12},
        {"min_new_tokens": 9, "eos_token_id": [*END, 41]},
        {"logits_processor": LogitsProcessorList([kind(len(prompt), presence=1.2)])},
        {"logits_processor": LogitsProcessorList([kind(len(prompt), frequency=-0.8)])},
        {"repetition_penalty": 0.8, "min_new_tokens": 6, "logits_processor": [kind(len(prompt), 0.9, 0.4)]},
        {},
    ]


@pytest.mark.core
@pytest.mark.parametrize("settings", [{}, {"min_length": 10, "repetition_penalty": 1.2, "suppress_tokens": [9, 12]}])
def test_penalties_and_minimum_lengths_run_inside_captured_rounds(monkeypatch, settings):
    """Beside requests that have none, and with those of the manager, which they replace."""
    replay_on_cpu(monkeypatch)
    target, captured = target_of(), set()
    run = CapturedRound.__call__
    monkeypatch.setattr(
        CapturedRound, "__call__", lambda self, process: captured.add(self.execution) or run(self, process)
    )
    asked = [(prompt, options) for prompt in PROMPTS[:2] for options in by_rules(prompt)]
    expected = [alone(target, prompt, **settings | options) for prompt, options in asked]
    assert len({tuple(one) for one in expected}) >= len(asked) // 2
    with running(target, random_eagle3(target), **settings) as manager:
        names = [manager.add_request(prompt, **options) for prompt, options in asked]
        assert texts_of(manager, names) == expected
    assert len(captured) == 1 and "in one graph" in captured.pop()


def test_drawn_texts_with_penalties_are_those_of_processors_that_the_host_calls():
    target, prompt = target_of(), PROMPTS[3]
    sampled = {"do_sample": True, "temperature": 1.1, "top_k": 40, "seed": 5}
    texts = []
    for kind in (PenaltyLogitsProcessor, Penalty):
        with running(target, random_eagle3(target).configure(3)) as manager:
            names = [manager.add_request(prompt, **sampled, **options) for options in by_rules(prompt, kind)]
            texts.append(texts_of(manager, names))
    assert texts[0] == texts[1]


def test_rounds_without_rules_do_not_read_texts(monkeypatch):
    """Only as long as some row has rules are they applied; the rounds of both kinds are warmed up."""
    capture, target, applied = replay_on_cpu(monkeypatch), target_of(), []
    apply = processors.apply_rule
    monkeypatch.setattr(processors, "apply_rule", lambda *args: applied.append(1) or apply(*args))
    with running(target, random_eagle3(target), rows=2) as manager:
        count = capture.count
        for options in ({}, {"repetition_penalty": 1.4}, {"min_new_tokens": 9}, {}):
            with manager.pause():  # the last round may still run
                applied.clear()
            name = manager.add_request(PROMPTS[1], **options)
            assert texts_of(manager, [name]) == [alone(target, PROMPTS[1], **options)]
            assert bool(applied) == bool(options)
        assert capture.count == count


def test_a_manager_without_end_tokens_has_requests_with_minimum_lengths():
    target = target_of()
    with running(target, random_eagle3(target), per_request=False, eos_token_id=-1, min_new_tokens=9) as manager:
        found = texts_of(manager, [manager.add_request(prompt, eos_token_id=END) for prompt in PROMPTS])
    assert found == [alone(target, prompt, min_new_tokens=9) for prompt in PROMPTS] != expected_of()
