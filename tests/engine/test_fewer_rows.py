"""The end of continuous batching: requests move to fewer rows, and say what they would have said."""

import functools

import bulk
import pytest
import torch
from case_counts import cases, num_cases
from graph_stand_ins import replay_on_cpu, tape_on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import RANDOM_DRAFTERS, copy_of
from sampled_calls import drafter_of
from targets import tiny_target
from varying_drafts import vary_drafts

from hf_specdec import NoDrafter
from hf_specdec.engine import continuous
from hf_specdec.engine.continuous import ContinuousRunner
from hf_specdec.graphs import buckets
from hf_specdec.memory.virtual_memory import RowMemory

LENGTHS = (5, 1, 9, 20, 3, 3, 7, 30, 2, 1, 4, 13)
END, NEW = list(range(3, 96, 7)), 40
KINDS = {**RANDOM_DRAFTERS, "noisy-copy": functools.partial(copy_of, noise=0.01), "none": NoDrafter}


def alone():
    """What `generate()` without a drafter says to each prompt."""
    return bulk.all_alone("llama", bulk.prompts_of(LENGTHS), NEW, END)


def in_rows(drafter, rows, **options):
    options = {"max_new_tokens": NEW, "eos_token_id": END, **options}
    return bulk.in_rows(tiny_target("llama"), drafter, bulk.prompts_of(LENGTHS), rows, **options)


@pytest.fixture
def moves(monkeypatch):
    """Numbers of rows that requests have moved to, with how many."""
    made, move = [], ContinuousRunner.move

    def noting(self, rows, *args):
        count = move(self, rows, *args)
        made.append((None if count is None else self.num_rows, len(rows)))
        return count

    monkeypatch.setattr(ContinuousRunner, "move", noting)
    return made


@pytest.mark.parametrize("kind", cases(list(KINDS), ["eagle3", "dspark", "pard2", "mtp", "noisy-copy", "none"]))
def test_every_family_moves_to_every_size(moves, kind):
    drafter = KINDS[kind](tiny_target("llama"))
    options = {} if kind == "none" else {"num_assistant_tokens": 1}
    for rows, sizes in cases([(16, (4, 1)), (4, (1,))], [(16, (4, 1))]):
        moves.clear()
        assert in_rows(drafter, rows, **options) == alone()
        # The last two requests may end in the same round.
        found = tuple(size for size, _ in moves)
        assert found and found == sizes[: len(found)] and all(count <= size for size, count in moves)
        assert kind != "none" or found == sizes
        counts = drafter.stats.rows
        assert [one.committed for one in counts] == [len(text) - 1 for text in alone()]


@settings(deadline=None, max_examples=num_cases(40, 6))
@given(st.data())
def test_any_factor_and_any_numbers_of_drafts(data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "ROWS_TO_FEWER", data.draw(st.integers(2, 5)))
        vary_drafts(patch, data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6)))
        kind = data.draw(st.sampled_from(["noisy-copy", "mtp-by-target", "eagle3"]))
        drafter = KINDS[kind](tiny_target("llama")).configure(4)
        assert in_rows(drafter, data.draw(st.integers(2, 16))) == alone()


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_request_with_a_seed_says_and_accepts_what_it_does_alone(moves, kind):
    drafter = drafter_of(tiny_target("llama"), kind, "soft")
    options = {"do_sample": True, "temperature": 1.5, "top_k": 40, "seeds": list(range(len(LENGTHS)))}
    texts = in_rows(drafter, 16, **options)
    counts = drafter.stats.rows
    assert moves and moves[0][0] == 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "ROWS_TO_FEWER", 100)
        assert in_rows(drafter, 16, **options) == texts and drafter.stats.rows == counts


@pytest.mark.parametrize("stand_in", cases([replay_on_cpu, tape_on_cpu], [tape_on_cpu]), ids=lambda one: one.__name__)
def test_captured_rounds(monkeypatch, moves, stand_in):
    """Both sessions are kept, and the next call captures nothing."""
    captures = stand_in(monkeypatch)
    monkeypatch.setattr(buckets, "FEWEST_CAPTURED_ROWS", 4)
    monkeypatch.setattr(ContinuousRunner, "_is_worth_moving", lambda *args: True)
    drafter = RANDOM_DRAFTERS["eagle3"](tiny_target("llama")).configure(3, compile_rounds=False)
    counts = []
    for _ in range(2):
        assert in_rows(drafter, 16) == alone()
        counts.append(captures.count)
    assert counts[0] == counts[1] and [size for size, _ in moves] == [4, 4]
    assert {len(session.state.lengths) for _, session in drafter.sessions._idle} >= {16, 4}


def test_memory_of_rows_that_were_left(monkeypatch, moves):
    """It stays until it is short; then the graphs stay."""
    captures, committed, put = replay_on_cpu(monkeypatch), [], RowMemory._put
    monkeypatch.setattr(buckets, "FEWEST_CAPTURED_ROWS", 4)
    monkeypatch.setattr(ContinuousRunner, "_is_worth_moving", lambda *args: True)
    monkeypatch.setattr(RowMemory, "_put", lambda self, *args: (committed.append(args), put(self, *args))[1])
    drafter = RANDOM_DRAFTERS["eagle3"](tiny_target("llama")).configure(3, compile_rounds=False)
    assert in_rows(drafter, 16) == alone() and committed and [size for size, _ in moves] == [4]
    pool, count = drafter.sessions, captures.count
    committed.clear()
    assert in_rows(drafter, 16) == alone() and len(moves) == 2 and not committed
    kept = len(pool)
    assert pool.free_rows() and not pool.free_rows() and len(pool) == kept
    assert in_rows(drafter, 16) == alone() and len(moves) == 3 and committed and captures.count == count


def test_graphs_are_captured_when_they_are_worth_it(monkeypatch, moves):
    """Not in a short call; after many of them, or in a long one."""
    replay_on_cpu(monkeypatch)
    monkeypatch.setattr(buckets, "FEWEST_CAPTURED_ROWS", 4)
    drafter = RANDOM_DRAFTERS["eagle3"](tiny_target("llama")).configure(3)
    with monkeypatch.context() as patch:
        patch.setattr(ContinuousRunner, "_is_worth_moving", lambda *args: False)
        in_rows(drafter, 16)
    session = max((one for _, one in drafter.sessions._idle), key=lambda one: len(one.rounds))
    session.capture_seconds = 1e6
    moves.clear()
    assert in_rows(drafter, 16) == alone() and moves == []
    session.round_times.total = 1e10
    assert in_rows(drafter, 16) == alone() and [size for size, _ in moves] == [4]
    session.round_times.total = 0.0
    assert in_rows(drafter, 16) == alone() and len(moves) == 2, "the session is there"


def test_rows_stay_where_there_is_no_memory_for_others(monkeypatch, moves):
    take, drafter = continuous.SessionLease.take, RANDOM_DRAFTERS["eagle3"](tiny_target("llama"))

    def short_of_memory(self):
        if self.shape.batch == 4:
            raise torch.OutOfMemoryError("out of memory, in a test")
        return take(self)

    monkeypatch.setattr(continuous.SessionLease, "take", short_of_memory)
    assert in_rows(drafter, 16) == alone()
    assert [size for size, _ in moves] == [None]
