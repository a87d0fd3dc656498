"""K is a round's own: whatever the numbers of drafts in a call's rounds, its text and the drafter's caches are right.

That drafts and caches are those of a recomputation is shown in tests/drafters.
"""

import functools
import itertools

import bulk
import pytest
import torch
from case_counts import cases, num_cases, tries_all
from graph_stand_ins import replay_on_cpu, tape_on_cpu
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from lossless import greedy
from oracle import RANDOM_DRAFTERS, SELDOM, copy_of
from targets import HYBRIDS, padded_prompts, tiny_target
from varying_drafts import vary_drafts

LENGTHS = (7, 1, 4, 12, 3, 9)
MOST, NEW = 5, 14
END = list(range(3, 96, 8))
KINDS = {**RANDOM_DRAFTERS, "noisy-copy": functools.partial(copy_of, noise=0.01), "copy": copy_of}
NUMBERS = st.lists(st.integers(0, MOST), min_size=1, max_size=8).filter(any)


def target():
    return tiny_target("llama")


@functools.cache
def drafter_of(kind):
    return KINDS[kind](target()).configure(MOST)


def alone():
    """What `generate()` without a drafter says to each prompt."""
    return bulk.all_alone("llama", bulk.prompts_of(LENGTHS), NEW, END)


def in_rows(drafter, rows=2):
    prompts = bulk.prompts_of(LENGTHS)
    return bulk.in_rows(target(), drafter, prompts, rows, max_new_tokens=NEW, eos_token_id=END)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in SELDOM])
def test_texts_are_those_of_plain_generation(kind):
    inputs = padded_prompts([5, 9, 1])
    plain = greedy(target(), inputs)

    @settings(deadline=None, derandomize=True, max_examples=30, phases=list(Phase) if tries_all else [Phase.explicit])
    @example([MOST, 0, 1, 3, 0, 2])
    @given(NUMBERS)
    def check(numbers):
        with pytest.MonkeyPatch.context() as patch:
            asked = vary_drafts(patch, numbers)
            assert torch.equal(greedy(target(), inputs, drafter_of(kind)), plain)
            assert set(asked) <= set(numbers)
            assert in_rows(drafter_of(kind)) == alone()

    check()


@pytest.mark.parametrize("family", cases(list(HYBRIDS), ["qwen3-next", "falcon-h1", "jamba", "lfm2"]))
def test_states_of_a_draft_model_stay_right(family, monkeypatch):
    """Tokens that it reads again, after a block that was too wide, are not in its recurrent states yet."""
    drafter, inputs = copy_of(tiny_target(family)), padded_prompts([5, 9, 1])
    asked = vary_drafts(monkeypatch, [5, 1, 0, 3, 0, 0, 5, 2])
    plain = greedy(tiny_target(family), inputs, max_new_tokens=24)
    assert torch.equal(greedy(tiny_target(family), inputs, drafter, MOST, max_new_tokens=24), plain)
    assert drafter.stats.accepted == drafter.stats.drafted > 0 and len(set(asked)) > 3


@settings(deadline=None, derandomize=True, max_examples=num_cases(60, 3))
@given(NUMBERS)
def test_a_drafter_that_is_always_right_stays_so(numbers):
    drafter = drafter_of("copy")
    with pytest.MonkeyPatch.context() as patch:
        vary_drafts(patch, numbers)
        greedy(target(), padded_prompts([5, 9, 1]), drafter)
        stats = drafter.stats
        assert stats.accepted == stats.drafted and stats.committed > stats.rounds
        assert in_rows(drafter) == alone()
    # Drafts after an end of sequence are verified, but not committed.
    for counts, text in zip(drafter.stats.rows, alone(), strict=True):
        assert counts.drafted - counts.accepted <= MOST and counts.committed == len(text) - 1


@pytest.mark.parametrize(
    ("kind", "stand_in"),
    cases(
        list(itertools.product(["eagle3", "pard", "mtp", "mtp-by-target"], [replay_on_cpu, tape_on_cpu])),
        [("pard", replay_on_cpu), ("eagle3", tape_on_cpu), ("mtp-by-target", tape_on_cpu)],
    ),
)
def test_captured_rounds(monkeypatch, kind, stand_in):
    """A graph of the round for each number of drafts; one of catching up for each block that was too wide."""
    captures = stand_in(monkeypatch)
    asked = vary_drafts(monkeypatch, [3, 0, 0, 1, 5, 3, 1, 0])
    drafter = KINDS[kind](target()).configure(MOST, compile_rounds=False)
    counts = []
    for _ in range(2):
        assert in_rows(drafter, rows=4) == alone()
        counts.append(captures.count)
    assert counts[0] == counts[1] and set(asked) == {0, 1, 3, 5}
    session = max((one for _, one in drafter.sessions._idle), key=lambda one: len(one.rounds))
    assert len(session.rounds) == 4 and len(session.catch_ups) == 3
    assert drafter.stats.execution.startswith("captured in one graph")
    inputs = padded_prompts([5, 9, 1])
    for processors in ({}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}):
        expected = greedy(target(), inputs, **processors)
        for _ in range(2):
            assert torch.equal(greedy(target(), inputs, drafter, **processors), expected)
