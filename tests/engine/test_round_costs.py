"""What rounds cost, on disk: what is written, what is read, and what calls make of it."""

import itertools
import json
import logging
import multiprocessing
import os
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from graph_stand_ins import Replay, replay_on_cpu
from lossless import greedy
from oracle import RANDOM_DRAFTERS, copy_of
from targets import padded_prompts, tiny_target

from hf_specdec import NoDrafter
from hf_specdec.auto_k import round_costs
from hf_specdec.auto_k.auto_drafts import (
    Acceptance,
    AutoDrafts,
    ExpectedCosts,
    Pass,
    RoundTimes,
    Workload,
    best_rate,
    is_better_alone,
)
from hf_specdec.auto_k.round_costs import CostTable, table_folder
from hf_specdec.engine import alone, capture
from hf_specdec.state import RoundShape, Shape

SHAPE = Shape(
    batch=256, slots=64, num_draft_tokens=7, is_sampling=False, draft_probs=False, num_ends=8, verification="token"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(round_costs.FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def run_rounds(table, milliseconds, shape=SHAPE):
    times = table.times(shape)
    for count, one in milliseconds.items():
        for _ in range(3):
            times.add(RoundShape(count), one, True)


def of_chains(milliseconds):
    return {RoundShape(count): one for count, one in milliseconds.items()}


def test_times_are_kept(tmp_path):
    table = CostTable("a target", tmp_path / "new")
    run_rounds(table, {0: 18.5, 3: 40.0})
    run_rounds(table, {0: 5.0}, SHAPE._replace(batch=8))
    table.save()
    again = CostTable("a target", tmp_path / "new")
    times = again.times(SHAPE)
    assert (
        times.milliseconds(RoundShape(0)) == 18.5
        and times.milliseconds(RoundShape(3)) == 40.0
        and RoundShape(7) not in times
    )
    assert times.total == 3 * 58.5 and again.times(SHAPE) is times
    assert again.times(SHAPE._replace(batch=8)).milliseconds(RoundShape(0)) == 5.0
    for other in (SHAPE._replace(batch=4), SHAPE._replace(is_sampling=True)):
        assert RoundShape(0) not in again.times(other)
    assert RoundShape(0) not in CostTable("another target", tmp_path / "new").times(SHAPE)


def test_what_a_process_has_not_run_is_left(tmp_path):
    one, other = (CostTable("a target", tmp_path) for _ in range(2))
    one.times(SHAPE), other.times(SHAPE)
    run_rounds(one, {0: 10.0})
    one.save()
    run_rounds(other, {1: 15.0})
    other.save()
    times = CostTable("a target", tmp_path).times(SHAPE)
    assert (times.milliseconds(RoundShape(0)), times.milliseconds(RoundShape(1)), times.total) == (10.0, 15.0, 75.0)


def test_short_calls_read_no_file(monkeypatch, tmp_path):
    reads, read = [], CostTable._read
    monkeypatch.setattr(CostTable, "_read", lambda table: reads.append(table) or read(table))
    table = CostTable("a target", tmp_path)
    run_rounds(table, {0: 1.0})
    reads.clear()
    for _ in range(5):
        table.save()
        run_rounds(table, {3: 60.0})
    assert len(reads) == 1, "180 ms of rounds after each"
    run_rounds(table, {3: 60.0})
    table.save()
    assert len(reads) == 2, "1,080 ms"
    assert CostTable("a target", tmp_path).times(SHAPE).milliseconds(RoundShape(3)) == 60.0


def test_small_news_are_not_written(tmp_path):
    table = CostTable("a target", tmp_path)
    run_rounds(table, dict.fromkeys(range(8), 1000.0))
    table.save()
    (file,) = tmp_path.iterdir()
    before = file.read_text()
    run_rounds(table, {0: 1001.0})
    table.save()
    assert file.read_text() == before
    run_rounds(table, dict.fromkeys(range(4), 2000.0))
    run_rounds(table, dict.fromkeys(range(4), 2000.0))
    table.save()
    assert CostTable("a target", tmp_path).times(SHAPE).milliseconds(RoundShape(0)) == 2000.0
    assert CostTable("a target", tmp_path).times(SHAPE).total == table.times(SHAPE).total


def damaged(text):
    found = json.loads(text)
    ((name, entry),) = found["rounds"].items()
    cases = {
        "empty": "",
        "cut off": text[: len(text) // 2],
        "a list": "[]",
        "no rounds": json.dumps({"identity": found["identity"]}),
        "another target": json.dumps({**found, "identity": "another"}),
        "bytes": "\x00\x01",
    }
    for wrong in (-1.0, 0.0, "fast", None, float("nan"), float("inf")):
        entry = {**entry, "milliseconds": {"0": wrong}}
        cases[f"a time of {wrong}"] = json.dumps({**found, "rounds": {name: entry}})
    cases["a K that is no number"] = json.dumps({**found, "rounds": {name: {"total": 1.0, "milliseconds": {"x": 1.0}}}})
    return cases


def test_damaged_files_count_as_none(tmp_path, caplog):
    table = CostTable("a target", tmp_path)
    run_rounds(table, {0: 10.0})
    table.save()
    (file,) = tmp_path.iterdir()
    for what, text in damaged(file.read_text()).items():
        file.write_text(text)
        again = CostTable("a target", tmp_path)
        assert RoundShape(0) not in again.times(SHAPE), what
        run_rounds(again, {0: 12.0})
        again.save()
        assert CostTable("a target", tmp_path).times(SHAPE).milliseconds(RoundShape(0)) == 12.0, what
    assert not caplog.records


def test_a_folder_that_cannot_be_written(tmp_path, caplog):
    """Said once; calls go on with what they measure."""
    (tmp_path / "file").write_text("")
    logging.Logger.warning_once.cache_clear()
    table = CostTable("a target", tmp_path / "file")
    run_rounds(table, {0: 10.0})
    table.save()
    table.save()
    assert table.times(SHAPE).milliseconds(RoundShape(0)) == 10.0
    assert len(caplog.records) == 1 and round_costs.FOLDER_VARIABLE in caplog.text


def write_often(rows, folder):
    for number in range(60):
        table = CostTable("a target", folder)
        run_rounds(table, {0: float(rows)}, SHAPE._replace(batch=rows))
        run_rounds(table, {number % 8: float(number + 1)})
        table.save()
        known = CostTable("a target", folder).times(SHAPE._replace(batch=rows))
        assert RoundShape(0) not in known or known.milliseconds(RoundShape(0)) == rows


def test_two_processes_at_once(tmp_path):
    fork = multiprocessing.get_context("fork")  # which need not import anything again
    processes = [fork.Process(target=write_often, args=(rows, tmp_path)) for rows in (1, 2)]
    for one in processes:
        one.start()
    for one in processes:
        one.join()
    assert [one.exitcode for one in processes] == [0, 0]
    (file,) = tmp_path.iterdir()
    rounds = json.loads(file.read_text())["rounds"]
    assert any(name.startswith(("1 rows", "2 rows")) for name in rounds)
    times = CostTable("a target", tmp_path).times(SHAPE)
    assert all(1 <= times.milliseconds(RoundShape(count)) <= 60 for count in range(8) if RoundShape(count) in times)
    assert RoundShape(0) in times


def test_where_it_is_kept(monkeypatch, tmp_path):
    monkeypatch.setenv(round_costs.FOLDER_VARIABLE, "off")
    assert table_folder() is None
    monkeypatch.setenv(round_costs.FOLDER_VARIABLE, str(tmp_path))
    assert table_folder() == tmp_path
    monkeypatch.delenv(round_costs.FOLDER_VARIABLE)
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert table_folder() == tmp_path / ".triton" / "cache" / "hf_specdec"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    assert table_folder() == tmp_path / "kernels" / "hf_specdec"


def test_calls_begin_with_the_best_that_is_known():
    """256 rows of an 8B target: K = 0 is faster than all others, and no other is tried."""
    times = RoundTimes(of_chains({0: 18.4, 1: 34.0, 2: 46.0, 3: 57.0, 5: 84.0, 7: 110.0}))
    none, one = RoundShape(0), RoundShape(1)
    drafts = AutoDrafts(RoundShape(7), one, Acceptance(), times, lambda drafted: 400.0)
    assert drafts.current == none and {drafts.next(lambda: 128) for _ in range(100)} == {none}
    captured = AutoDrafts(RoundShape(7), one, Acceptance(), times, lambda drafted: 400.0 * (drafted != one))
    assert captured.current == one, "what is captured, until another is worth its capture"
    assert captured.next(lambda: 2.0) == one and captured.next(lambda: 1000.0) == none


def test_a_call_without_the_drafter():
    accepted, alone = Acceptance(), RoundTimes()
    times = RoundTimes(of_chains({0: 141.0, 1: 195.0, 3: 282.0}))

    def is_alone(*prices, tokens=100):
        return is_better_alone(RoundShape(7), RoundShape(3), accepted, times, alone, Workload(tokens), *prices)

    for _ in range(500):
        accepted.observe(0, 3)
    assert is_alone(), "expected to be 10 % faster than K = 0"
    # Beside rounds, a call with the drafter has more to do: 10 %.
    estimated = 100 * 0.9 * 141.0 * (1 - 0.9 / 1.1)
    assert is_alone(0.49 * estimated) and not is_alone(0.51 * estimated), "by an estimate"
    alone.add(RoundShape(0), 128.0, True)
    alone.total = 0.0
    share = 1 - 128 / 141 / 1.1
    saved = 100 * 128.0 * share
    assert is_alone(0.98 * saved) and not is_alone(1.02 * saved), "not worth a capture"
    assert is_alone(0.98 * 4000 * share, tokens=1) and not is_alone(1.02 * 4000 * share, tokens=1), "a short call"
    times.total = alone.total = 100 * 128.0
    assert is_alone(1.02 * saved), "worth it in further calls"
    times.alone = saved / 0.01
    assert is_alone(0.0, 10.0), "with it there would be captures, too"
    times.alone += 10.0 / 0.01
    assert not is_alone(0.0, 10.0), "now and then one with it"
    assert is_alone(0.0, 10.0)
    for _ in range(5000):
        accepted.observe(3, 3)
    assert not is_alone()


def test_what_calls_have_reached_decides():
    """Rounds with drafts give 15 % more tokens a millisecond; what whole calls for the same work reach may be less."""
    accepted, times, alone = Acceptance(), RoundTimes(of_chains({3: 2.0})), RoundTimes(of_chains({0: 1.0}))
    for _ in range(2000):
        accepted.observe(3, 3), accepted.observe(1, 3), accepted.observe(0, 3), accepted.observe(1, 3)
    promised = accepted.expected_tokens(RoundShape(3)) / 2.0
    assert 1.10 < promised < 1.15, "of the share that was found a little more"
    work, other = Workload(256, 256, 40), Workload(16, 64, 40)

    def is_alone(work):
        return is_better_alone(RoundShape(3), RoundShape(3), accepted, times, alone, work)

    assert not is_alone(work) and not is_alone(other)
    times.reach(work, 0.7)
    assert is_alone(work) and not is_alone(other), "tried without the drafter, for this work"
    alone.reach(work, 0.7)
    assert not is_alone(work), "a call without it loses as much"
    for reached in (0.9, 0.9):
        alone.reach(Workload(250, 250, 42), reached)
    assert is_alone(work), "for nearly the same work"
    times.reach(work, 0.02), times.reach(work, 0.85), times.reach(work, 0.85)
    assert not is_alone(work), "one call that was held up says little"
    for _ in range(3):
        times.reach(other, 0.1), alone.reach(other, 0.9)
    assert is_alone(other)
    for _ in range(5000):
        accepted.observe(3, 3)
    assert not is_alone(other), "whatever calls have reached"


@pytest.mark.core
@pytest.mark.parametrize("is_bulk", [False, True])
def test_calls_note_what_they_reach(folder, is_bulk, monkeypatch):
    """Committed tokens over those that rounds promise in the time; not of a call that has captured."""
    replay_on_cpu(monkeypatch)
    target, decisions, noted = tiny_target("llama"), [], []
    drafter = RANDOM_DRAFTERS["eagle3"](target)
    monkeypatch.setattr(alone, "is_better_alone", lambda *_: decisions[-1])
    reach = RoundTimes.reach
    monkeypatch.setattr(RoundTimes, "reach", lambda self, *args: noted.append((self, *args)) or reach(self, *args))
    options = {"assistant_model": drafter, "num_assistant_tokens": "auto", "do_sample": False, "max_new_tokens": 24}
    inputs = padded_prompts([5, 5])
    for is_alone in (False, True):
        decisions.append(is_alone)
        for number in range(20):
            before = len(noted)
            if is_bulk:
                target.generate_batch(inputs["input_ids"].tolist(), **options)
            else:
                target.generate(**inputs, **options)
            assert len(noted) - before == (not drafter.stats.captures)
            if number >= 3 and not drafter.stats.captures:  # times decide which call captures another K
                break
        assert not drafter.stats.captures
        (times, work, share), stats = noted[-1], drafter.stats
        if is_alone:
            tokens_a_ms = 1 / times.milliseconds(RoundShape(0))
        else:
            tokens_a_ms = best_rate(RoundShape(7), drafter.sessions.acceptances[False], times)
        assert share == pytest.approx(stats.committed / (2 * 1e3 * stats.seconds * tokens_a_ms))
        assert work.kind == Workload(24, 24, 5).kind and times.reached(work) > 0
    assert len({id(times) for times, *_ in noted}) == 2
    count = len(noted)
    target.generate(**inputs, **options | {"max_new_tokens": 1})
    assert len(noted) == count, "a call without rounds says nothing"


@pytest.mark.usefixtures("shapes_decide")
def test_a_call_of_which_nothing_is_known():
    """It begins with what the shapes suggest; a drafter that was never tried is, once what it may save is worth it."""
    accepted, times, alone = Acceptance(), RoundTimes(), RoundTimes()
    times.expected = ExpectedCosts(256, torch.device("cuda"), Pass(14e9, 14e9, 32), {})
    first = times.expected.first(7)

    def is_alone(*prices, first=first):
        return is_better_alone(RoundShape(7), first, accepted, times, alone, Workload(100), *prices)

    assert first == RoundShape(0) and is_alone() and not is_alone(first=RoundShape(1))
    alone.add(RoundShape(0), 10.0, True)
    # An estimate in favour of drafts; of the share of those accepted it knows nothing.
    alone.total = 3e3
    assert is_alone(0.0, 600.0)
    alone.total = 1e5
    assert not is_alone(0.0, 600.0)
    times.add(RoundShape(1), 16.6, True)
    for number in range(2000):
        accepted.observe(int(number % 20 < 13), 1)
    assert is_alone(0.0, 0.0), "as many tokens a millisecond"
    times.add(RoundShape(1), 12.0, True), times.add(RoundShape(1), 12.0, True)
    assert not is_alone(0.0, 0.0)


def measured(folder):
    (file,) = folder.iterdir()
    return json.loads(file.read_text())


@pytest.mark.core
@pytest.mark.parametrize("is_bulk", [False, True])
def test_calls_write_and_read_times(folder, is_bulk):
    target = tiny_target("llama")
    drafter, inputs = copy_of(target), padded_prompts([5, 9])
    options = {"max_new_tokens": 60, "do_sample": False}

    def call():
        if is_bulk:
            return target.generate_batch([[5, 6], [7, 8, 9]], None, None, assistant_model=drafter, **options)
        return greedy(target, inputs, drafter, "auto", max_new_tokens=60)

    call()
    identity = json.loads(measured(folder)["identity"])
    assert identity["versions"]["torch"] == metadata.version("torch") and identity["device"].startswith(
        target.device.type
    )
    (name,) = measured(folder)["rounds"]
    known = measured(folder)["rounds"][name]["milliseconds"]
    assert "rows, greedy" in name and len(known) > 0
    # As if another process had found out that drafts do not pay.
    found = measured(folder)
    found["rounds"][name]["milliseconds"] = {str(count): 1e3 * (count + 1) ** 2 for count in (0, 1, 2, 3, 5, 7)}
    (file,) = folder.iterdir()
    file.write_text(json.dumps(found))
    round_costs.table_of.cache_clear()
    drafter.release()
    call()
    assert next(iter(drafter.stats.rounds_by_k)) == 0


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("is_bulk", [False, True])
def test_texts_without_the_drafter(folder, monkeypatch, is_bulk, is_captured):
    """Texts are those of `NoDrafter`, and the drafter's statistics say that it had no part in them."""
    target = tiny_target("llama")
    drafter, inputs = RANDOM_DRAFTERS["eagle3"](target), padded_prompts([5, 9, 1])
    prompts = [
        row[mask.bool()].tolist() for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    plain = greedy(target, inputs, max_new_tokens=40)
    asked = []

    def times(table, shape):
        asked.append(shape)
        is_alone = NoDrafter.__name__ in table._identity
        return RoundTimes(of_chains({0: 8.0} if is_alone else {0: 10.0, 1: 50.0, 3: 90.0}))

    def call(num_drafts):
        options = {
            "assistant_model": drafter,
            "num_assistant_tokens": num_drafts,
            "max_new_tokens": 40,
            "do_sample": False,
        }
        if is_bulk:
            out = target.generate_batch(prompts, None, None, **options)
            return torch.tensor([one.generated_tokens for one in out.values()])
        out = target.generate(**inputs, **options, return_dict_in_generate=True)
        assert out.speculation is drafter.stats
        return out.sequences[:, inputs["input_ids"].shape[1] :]

    monkeypatch.setattr(CostTable, "times", times)
    observed = []
    monkeypatch.setattr(type(drafter), "observe", lambda self, prompt, tokens: observed.append([*prompt, *tokens]))
    replay = replay_on_cpu(monkeypatch) if is_captured else None
    expected = plain[:, inputs["input_ids"].shape[1] :]
    for _ in range(2):
        assert torch.equal(call("auto"), expected) and asked
        assert drafter.stats.num_assistant_tokens == 0 and drafter.stats.drafted == 0
        assert (
            drafter.stats.reason
            == "the target and the call fit; without the drafter, whose drafts are not expected to pay for so many rows"
        )
        assert {*drafter.stats.rounds_by_k} == {0} and len(drafter.stats.rows) == 3
    texts = [[*prompt, *row] for prompt, row in zip(prompts, expected.tolist(), strict=True)]
    assert sorted(observed) == sorted(2 * texts), "a drafter that drafts from texts has those of these calls, too"
    assert torch.equal(call(3), expected)
    assert drafter.stats.num_assistant_tokens == 3
    if is_captured:
        # Both kinds of calls keep theirs in one pool.
        before = replay.count
        call("auto")
        call(3)
        assert replay.count == before and len(drafter.sessions) >= 2
    drafter.release()
    assert drafter.sessions.substitute is None and not len(drafter.sessions)


def test_what_captures_cost_counts_for_calls_without_the_drafter(monkeypatch, folder):
    """A call is run without its drafter once that has saved what the captures of the drafter's session took."""
    target = tiny_target("llama")
    drafter, prompts = RANDOM_DRAFTERS["eagle3"](target), [[5, 6, 7], [9] * 5, [4], [6, 6]]
    replay_on_cpu(monkeypatch)
    kept = RoundTimes(of_chains({0: 10.0, 1: 50.0, 3: 90.0}))
    tables = {True: RoundTimes(of_chains({0: 8.0})), False: kept}
    monkeypatch.setattr(CostTable, "times", lambda table, shape: tables[NoDrafter.__name__ in table._identity])
    monkeypatch.setattr(RoundTimes, "add", lambda *args: None)  # those of this machine
    options = {"assistant_model": drafter, "max_new_tokens": 20, "do_sample": False}

    def is_alone():
        target.generate_batch(prompts, None, None, num_assistant_tokens="auto", **options)
        return drafter.stats.num_assistant_tokens == 0

    target.generate_batch(prompts, None, None, num_assistant_tokens=7, **options)
    (session,) = drafter.sessions.of_rows(4, has_drafts=True)
    session.capture_seconds = 60.0
    assert not is_alone()
    (session,) = drafter.sessions.of_rows(4, has_drafts=True)
    session.capture_seconds = 60.0
    kept.total = 5 * 60e3 * (1 + len(session.prefills)) * 1.1
    assert is_alone()
    kept.total = kept.alone = 0.0
    assert is_alone(), "captures that are there cost nothing"


def test_building_kernels_is_part_of_a_price(monkeypatch, folder):
    """A call with the drafter for the first time is expected to take as long to capture as one without it did."""
    target, clock = tiny_target("llama"), [0.0]

    class Slow(Replay):
        def __init__(self, *args):
            super().__init__(*args)
            clock[0] += 10.0 if Slow.count == 1 else 1.0

    monkeypatch.setattr(capture, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    replay_on_cpu(monkeypatch, Slow)
    monkeypatch.setattr(Slow, "count", 0)
    drafter, prices = RANDOM_DRAFTERS["eagle3"](target), []
    monkeypatch.setattr(alone, "is_better_alone", lambda *args: prices.append(args[-2:]) or True)
    for _ in range(2):
        target.generate_batch([[5, 6, 7], [9] * 5], None, None, assistant_model=drafter, max_new_tokens=9)
    (session,) = drafter.sessions.of_rows(2, has_drafts=False)
    assert Slow.count > 1 and prices == [(0.0, 0.0), (0.0, 1e3 * clock[0])]
    assert session.seconds_a_capture == clock[0] / Slow.count


@pytest.mark.usefixtures("shapes_decide")
def test_a_late_try_never_costs_a_call():
    """256 rows of an 8B target, with and without kernels to build, and in calls that go on for long."""
    for captures, num_calls, least in ((10e3, 60, 0.999), (1e3, 40, 0.999), (1e3, 400, 0.0)):
        calls = Calls(captures)
        spent = [calls.run() for _ in range(num_calls)][2:]
        best = calls.tokens * calls.MILLISECONDS_ALONE
        assert best / max(spent) >= least and best * len(spent) / sum(spent) > 0.98, (captures, num_calls)
    assert calls.chosen[0] == 1, "a call with the drafter is for what was expected to pay"
    at = calls.is_alone.index(False)
    assert all(calls.is_alone[at + 1 : at + 4]), "the next one has to be earned"


class Calls:
    """Calls of a process, one after the other; captures of a session take `captures` milliseconds."""

    MILLISECONDS_ALONE, MILLISECONDS = 10.3, {0: 10.9, 1: 16.2, 2: 23.9, 3: 30.6, 5: 44.0, 7: 57.0}
    SHARES = (0.65, 0.43, 0.27, 0.17, 0.11, 0.07, 0.045)  # of rounds that accept the draft of a position

    def __init__(self, captures, tokens=191):
        self.accepted, self.times, self.alone, self.tokens = Acceptance(), RoundTimes(), RoundTimes(), tokens
        self.times.expected = ExpectedCosts(256, torch.device("cuda"), Pass(14e9, 14e9, 32), {})
        self._captures, self._captured, self.chosen, self.is_alone = captures, set(), [], []

    def run(self):
        """Milliseconds of a call, but for its prefill."""
        prices = [self._captures * (one not in self._captured and bool(self._captured)) for one in ("alone", "with")]
        first, most = self.times.expected.first(7), RoundShape(7)
        is_alone = is_better_alone(most, first, self.accepted, self.times, self.alone, Workload(self.tokens), *prices)
        self.is_alone.append(is_alone)
        total = self._capture("alone" if is_alone else "with", self._captures)
        if is_alone:
            for _ in range(self.tokens):
                self.alone.add(RoundShape(0), self.MILLISECONDS_ALONE, True)
            self.times.alone += self.tokens * self.MILLISECONDS_ALONE
            return total + self.tokens * self.MILLISECONDS_ALONE
        price, left, last = self._captures / 3, float(self.tokens), None
        drafts = AutoDrafts(most, first, self.accepted, self.times, lambda one: price * (one not in self._captured))
        self._captured.add(drafts.current)
        while left > 0:
            drafted = drafts.next(lambda left=left: left)
            total += self._capture(drafted, price) + self.MILLISECONDS[drafted.num_drafts]
            bounds = (1.0, *self.SHARES[: drafted.num_drafts], 0.0)
            for accepted, (before, after) in enumerate(itertools.pairwise(bounds)):
                self.accepted.observe(accepted, drafted.num_drafts, times=round(256 * (before - after)))
            drafts.ran(drafted, self.MILLISECONDS[drafted.num_drafts], drafted == last)
            left, last = left - sum(bounds), drafted
            self.chosen.append(drafted.num_drafts)
        return total

    def _capture(self, what, milliseconds):
        is_captured = what in self._captured
        self._captured.add(what)
        return milliseconds * (not is_captured)


def test_fixed_numbers_of_drafts_measure_nothing(folder):
    target = tiny_target("llama")
    greedy(target, padded_prompts([5]), copy_of(target), 3, max_new_tokens=20)
    assert not os.listdir(folder)
