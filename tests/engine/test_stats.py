"""The statistics of a call, against a recomputation and by hand; which engine ran, and why."""

import copy
import logging
from itertools import product

import accelerate
import pytest
import torch
from case_counts import cases
from lossless import PROMPTS, continuations
from oracle import RANDOM_DRAFTERS, OracleDrafter, copy_of, random_eagle3
from targets import PAD, STOCK_FAMILY, padded_prompts, tiny_target
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_specdec import SpeculationStats
from hf_specdec.stats import Counters, RowStats

MAX_NEW_TOKENS = 14


def simulate(answers, truth, num_draft_tokens, budget, first=0, reserve=0, once=False):
    """Counts of one row: what happens when `answers` are verified against `truth`, block by block.

    Args:
        first: tokens generated before the first block.
        reserve: tokens of what is left that are never drafted.
        once: stop after one block.
    """
    counts = RowStats(0, [0] * num_draft_tokens, [0] * num_draft_tokens, 0)
    generated = first
    while generated < budget:
        room = budget - generated
        num_drafted = min(num_draft_tokens, room - reserve)
        matches = 0
        while matches < num_drafted and answers[generated + matches] == truth[generated + matches]:
            matches += 1
        committed = min(matches + 1, room)
        for position in range(num_draft_tokens):
            counts.drafted_per_position[position] += position < num_drafted
            counts.accepted_per_position[position] += position < min(matches, committed)
        counts.rounds += 1
        counts.committed += committed
        generated += committed
        if once:
            break
    return counts


def total(rows):
    def columns(name):
        return [sum(values) for values in zip(*(getattr(row, name) for row in rows), strict=True)]

    return RowStats(
        sum(row.rounds for row in rows),
        columns("drafted_per_position"),
        columns("accepted_per_position"),
        sum(row.committed for row in rows),
    )


@pytest.mark.parametrize(
    ("accuracy", "num_draft_tokens"),
    cases(list(product([0.0, 0.6, 1.0], [1, 3, 5])), [(0.0, 3), (0.6, 1), (0.6, 5), (1.0, 3)]),
)
def test_counts_of_the_static_engine(accuracy, num_draft_tokens):
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[3])
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    truth = continuations(inputs, plain)
    drafter = OracleDrafter(target, truth, PROMPTS[3], accuracy)
    assert drafter.stats is None
    out = target.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        assistant_model=drafter,
        num_assistant_tokens=num_draft_tokens,
        return_dict_in_generate=True,
    )
    stats = drafter.stats
    assert isinstance(stats, SpeculationStats) and out.speculation is stats
    rows = [
        simulate(answers, text, num_draft_tokens, MAX_NEW_TOKENS, first=1)
        for answers, text in zip(drafter._answers.tolist(), truth.tolist(), strict=True)
    ]
    assert stats.rows == rows
    assert RowStats(stats.rounds, stats.drafted_per_position, stats.accepted_per_position, stats.committed) == total(
        rows
    )
    assert stats.num_rounds == max(row.rounds for row in rows)
    assert stats.committed == 3 * (MAX_NEW_TOKENS - 1)
    assert stats.acceptance_length == pytest.approx(stats.committed / stats.rounds)
    assert stats.accepted == sum(row.accepted for row in stats.rows) <= stats.drafted
    assert stats.num_assistant_tokens == num_draft_tokens and not stats.draft_probs
    assert stats.engine == "static" and stats.reason
    assert stats.seconds > 0
    assert stats.milliseconds_per_round == pytest.approx(1000 * stats.seconds / stats.num_rounds)
    if accuracy == 0.0:
        assert stats.accepted == 0 and stats.acceptance_length == 1.0
    if accuracy == 1.0:
        assert stats.acceptance_per_position == [1.0] * num_draft_tokens


def test_rows_that_end_count_their_tokens():
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[3])
    free = target.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    new = free[:, inputs["input_ids"].shape[1] :].tolist()
    ends = [new[0][1], new[1][6]]
    expected = [next((at + 1 for at, token in enumerate(row) if token in ends), MAX_NEW_TOKENS) for row in new]
    assert len(set(expected)) > 1
    drafter = OracleDrafter(target, continuations(inputs, free), PROMPTS[3], accuracy=1.0)
    target.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=ends,
        pad_token_id=PAD,
        assistant_model=drafter,
        num_assistant_tokens=4,
    )
    assert [row.committed for row in drafter.stats.rows] == [count - 1 for count in expected]
    assert [row.rounds for row in drafter.stats.rows] == [-(-(count - 1) // 5) for count in expected]
    assert drafter.stats.num_rounds == -(-(max(expected) - 1) // 5)


class FirstRowEnds(StoppingCriteria):
    """The first row ends with its second token."""

    def __init__(self, prompt_columns):
        self.prompt_columns = prompt_columns

    def __call__(self, input_ids, scores, **kwargs):
        return (torch.arange(len(input_ids)) == 0) & (input_ids.shape[1] == self.prompt_columns + 2)


def test_a_row_ended_by_a_criterion_is_in_no_more_rounds():
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[3])
    free = target.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    drafter = OracleDrafter(target, continuations(inputs, free), PROMPTS[3], accuracy=0.6)
    unused = next(token for token in range(96) if token not in free)
    target.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        eos_token_id=unused,
        pad_token_id=PAD,
        stopping_criteria=StoppingCriteriaList([FirstRowEnds(inputs["input_ids"].shape[1])]),
        assistant_model=drafter,
        num_assistant_tokens=2,
    )
    assert drafter.stats.rows[0].rounds == 1 and drafter.stats.num_rounds > 2


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
def test_counts_of_the_stock_engine(accuracy):
    """Its first token comes out of the prompt's pass; a draft that would reach the limit is left to the target."""
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[1])
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    truth = continuations(inputs, plain)
    drafter = OracleDrafter(target, truth, PROMPTS[1], accuracy).configure(engine="stock", num_assistant_tokens=3)
    target.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS, assistant_model=drafter)
    (row,) = drafter.stats.rows
    expected = simulate(drafter._answers[0].tolist(), truth[0].tolist(), 3, MAX_NEW_TOKENS, first=1, reserve=1)
    assert row == expected and row.committed == MAX_NEW_TOKENS - 1
    assert drafter.stats.num_rounds == row.rounds
    assert drafter.stats.reason == "forced by engine='stock'" and drafter.stats.seconds > 0


@pytest.mark.parametrize("engine", ["static", "stock"])
def test_a_call_of_one_token_has_statistics(engine):
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[1])
    drafter = random_eagle3(target).configure(engine=engine)
    out = target.generate(**inputs, max_new_tokens=1, assistant_model=drafter, return_dict_in_generate=True)
    assert out.speculation.engine == engine and out.speculation.reason
    assert out.speculation.rounds == out.speculation.num_rounds == 0
    assert str(out.speculation)


@pytest.mark.parametrize(
    ("kind", "budget"),
    cases(
        list(product(["p-eagle", "dflash", "pard", "copy"], [5, MAX_NEW_TOKENS, 30])),
        [("p-eagle", 5), ("dflash", MAX_NEW_TOKENS), ("pard", 5), ("copy", 5), ("copy", 30)],
    ),
)
def test_more_drafts_than_remaining_tokens(kind, budget, monkeypatch):
    """With K = 16 most blocks reach past the end; what lies there was never drafted."""
    target, inputs = tiny_target("llama"), padded_prompts(PROMPTS[3])
    options = {"do_sample": False, "max_new_tokens": budget}
    truth = target.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :].tolist()
    drafter = copy_of(target, noise=0.1) if kind == "copy" else RANDOM_DRAFTERS[kind](target)
    propose, seen = drafter.propose, []

    def watched(state, *args):
        seen.append((state.lengths.tolist(), propose(state, *args)))
        return seen[-1][1]

    monkeypatch.setattr(drafter, "propose", watched)
    target.generate(**inputs, **options, assistant_model=drafter, num_assistant_tokens=16)
    for row, prompt_length in enumerate(PROMPTS[3]):
        expected = RowStats(0, [0] * 16, [0] * 16, 0)
        blocks = [(lengths[row] - prompt_length, proposal.tokens[row].tolist()) for lengths, proposal in seen]
        for generated, drafts in blocks:
            block = simulate([0] * generated + drafts, truth[row] + [-1] * 17, 16, budget, first=generated, once=True)
            expected = total([expected, block])
            if generated + block.committed == budget:
                break
        assert drafter.stats.rows[row] == expected
    rows = drafter.stats.rows
    assert all(row.drafted_per_position[budget - 1 :] == [0] * max(17 - budget, 0) for row in rows)
    assert sum(row.committed for row in rows) == 3 * (budget - 1)


def test_counters_by_hand():
    counters = Counters(batch=3, num_draft_tokens=2)
    # Row 0 accepts all, row 1 is cut after its one accepted draft, row 2 takes no part.
    counters.count([(0, 2, 3, 2), (1, 1, 1, 1)])
    counters.count([(0, 0, 1, 2)])
    stats = counters.summary(num_assistant_tokens=2, engine="static", reason="why", num_rounds=2, seconds=0.5)
    assert stats.rows == [
        RowStats(2, [2, 2], [1, 1], 4),
        RowStats(1, [1, 0], [1, 0], 1),
        RowStats(0, [0, 0], [0, 0], 0),
    ]
    assert (stats.rounds, stats.drafted, stats.accepted, stats.committed) == (3, 5, 3, 5)
    assert stats.acceptance_length == pytest.approx(5 / 3)
    assert stats.acceptance_per_position == pytest.approx([2 / 3, 1 / 2])
    assert stats.rows[2].acceptance_length == 0.0 and stats.rows[2].acceptance_per_position == [0.0, 0.0]
    assert stats.milliseconds_per_round == 250.0


def test_counters_tell_acceptance_of_equal_rows_once():
    """Chains by outcome, with the number of rows; trees row by row."""
    calls = []
    counters = Counters(3, 2, lambda *args, times=1: calls.append((*args, times)))
    counters.count([(0, 2, 3, 2), (1, 0, 1, 2), (2, 2, 3, 2)])
    assert calls == [(2, 2, 2), (0, 2, 1)]
    counters.count([(0, 1, 2, 2), (1, 1, 2, 2)], [[0, 3], [1, 2]], 5)
    assert calls[2:] == [(1, 2, [0, 3], 5, 1), (1, 2, [1, 2], 5, 1)]


def test_statistics_can_be_printed():
    stats = SpeculationStats(
        3, [3, 2], [2, 1], 6, num_assistant_tokens=2, engine="stock", reason="why", num_rounds=3, seconds=0.03
    )
    text = str(stats)
    for part in ("stock", "why", "6 tokens", "3 rounds", "2.00", "0.67 0.50", "10.0 ms"):
        assert part in text, (part, text)
    assert str(SpeculationStats(0, [], [], 0))


# ---- which engine, and why


def greedy(target, inputs, **options):
    return target.generate(**inputs, do_sample=False, max_new_tokens=12, **options)


def test_engine_is_chosen_and_can_be_forced():
    inputs = padded_prompts(PROMPTS[1])
    for family, by_itself in (("llama", "static"), ("qwen3-next", "static"), (STOCK_FAMILY, "stock")):
        target = tiny_target(family)
        drafter = random_eagle3(target)
        greedy(target, inputs, assistant_model=drafter)
        assert drafter.stats.engine == by_itself and "forced" not in drafter.stats.reason
        greedy(target, inputs, assistant_model=drafter.configure(engine="stock"))
        assert drafter.stats.engine == "stock" and "forced" in drafter.stats.reason
    assert "RoPE (longrope)" in str(forced_static_error(tiny_target(STOCK_FAMILY), inputs))
    drafter = random_eagle3(tiny_target("llama")).configure(engine="static")
    greedy(tiny_target("llama"), inputs, assistant_model=drafter)
    assert drafter.stats.reason == "forced by engine='static'"


def forced_static_error(target, inputs):
    drafter = random_eagle3(target).configure(engine="static")
    with pytest.raises(ValueError, match=r'engine="static" was forced, but .*; use engine="auto" or "stock"') as error:
        greedy(target, inputs, assistant_model=drafter)
    return error.value


def under_hooks(kind):
    """A copy of a target that accelerate runs: its parts placed one by one, or one of its layers offloaded."""
    target = copy.deepcopy(tiny_target("llama"))
    if kind == "dispatched":
        names = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
        names += [f"model.layers.{index}" for index in range(target.config.num_hidden_layers)]
        return accelerate.dispatch_model(target, dict.fromkeys(names, "cpu"), force_hooks=True)
    accelerate.cpu_offload(target.model.layers[1], execution_device=torch.device("cpu"))
    assert target.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    return target


@pytest.mark.parametrize("kind", ["dispatched", "offloaded"])
def test_target_under_accelerate_hooks_runs_on_the_stock_engine(kind):
    target, inputs = under_hooks(kind), padded_prompts(PROMPTS[3])
    plain = greedy(tiny_target("llama"), inputs)
    assert torch.equal(greedy(target, inputs), plain)
    for drafter in (random_eagle3(target), OracleDrafter(target, continuations(inputs, plain), PROMPTS[3], 0.6)):
        assert torch.equal(greedy(target, inputs, assistant_model=drafter), plain)
        assert drafter.stats.engine == "stock" and "accelerate hooks" in drafter.stats.reason
    assert "accelerate hooks" in str(forced_static_error(target, inputs))


def test_target_spread_over_devices_runs_on_the_stock_engine():
    """The map of a spread target, written by hand, as there is one device here."""
    target, inputs = copy.deepcopy(tiny_target("llama")), padded_prompts(PROMPTS[1])
    target.hf_device_map = {"model.embed_tokens": 0, "model.layers": 0, "model.norm": 1, "lm_head": 1}
    drafter = random_eagle3(target)
    assert torch.equal(greedy(target, inputs, assistant_model=drafter), greedy(tiny_target("llama"), inputs))
    assert drafter.stats.engine == "stock" and "2 devices" in drafter.stats.reason


def test_reason_is_logged_once(caplog):
    target = tiny_target("llama")
    logging.Logger.info_once.cache_clear()
    with caplog.at_level("INFO", logger="hf_specdec"):
        for _ in range(2):
            greedy(target, padded_prompts(PROMPTS[1]), assistant_model=random_eagle3(target))
    assert sum("static engine" in record.getMessage() for record in caplog.records) == 1
