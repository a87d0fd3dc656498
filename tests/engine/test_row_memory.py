"""Rows have memory for the texts that they hold; short of it, requests wait, and say what they would have said."""

import copy
import enum
import functools
import gc
import itertools
import random
import re
from collections import deque
from types import SimpleNamespace
from typing import NamedTuple

import bulk
import pytest
import torch
from aliasing_pages import use_aliasing_pages
from bulk import prompts_of
from case_counts import cases, num_cases
from graph_stand_ins import replay_on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import RANDOM_DRAFTERS, SELDOM, copy_of
from sampled_calls import drafter_of
from targets import set_policy, tiny_target
from torch._inductor.utils import run_and_get_code
from transformers import ContinuousBatchingConfig
from varying_drafts import vary_drafts

from hf_specdec import NoDrafter, SuffixDrafter, ops
from hf_specdec.calls.request import Arrived, ContinuousBatching, Request
from hf_specdec.engine import lease, run
from hf_specdec.engine.prefix_cache import Prefix
from hf_specdec.engine.run import Run, _Launched
from hf_specdec.engine.runner import Runner
from hf_specdec.graphs import buckets
from hf_specdec.host.generation import prepared_config
from hf_specdec.integration.continuous import call_of
from hf_specdec.integration.dispatch import generate_continuously
from hf_specdec.memory import virtual_memory, virtual_pages
from hf_specdec.memory.fence import Fence
from hf_specdec.memory.virtual_memory import RowMemory, committed_bytes
from hf_specdec.state import RoundShape
from hf_specdec.stats import Counters

CPU = torch.device("cpu")
END, NEW = list(range(3, 96, 7)), 40
KINDS = {
    **RANDOM_DRAFTERS,
    "noisy-copy": functools.partial(copy_of, noise=0.02),
    "none": NoDrafter,
    "suffix": SuffixDrafter,
}


@pytest.fixture(autouse=True, scope="module")
def all_memory_is_given_back():
    gc.collect()
    before = committed_bytes(CPU)
    yield
    gc.collect()
    assert committed_bytes(CPU) == before


@pytest.fixture
def rooms(monkeypatch):
    """Requests that have lost their rows, or would have."""
    made, preempt = [], Run.preempt
    monkeypatch.setattr(Run, "preempt", lambda self: (made.append(self), preempt(self)))
    return made


BEGINNING = list(range(10, 60))


def alone(family, prompt, new=NEW, end=tuple(END)):
    return bulk.alone(family, prompt, new, end)


def in_rows(drafter, prompts, rows, family="llama", **options):
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": END, "assistant_model": drafter, **options}
    config = ContinuousBatchingConfig(max_requests_per_batch=rows)
    results = tiny_target(family).generate_batch(prompts, None, config, **options)
    return [one.generated_tokens for one in results.values()], [one.error for one in results.values()]


def test_memory_of_rows(monkeypatch):
    memory = RowMemory(3, 640, 1000, CPU)
    assert memory.token_bytes == 1024 and memory.capacity == 636 and memory.committed == 0
    keys, values = memory.view(0, torch.float32, 2, 8), memory.view(64, torch.bfloat16, 4, 16)
    assert keys.shape == (3, 640, 2, 8) and keys.flatten(0, 1).data_ptr() == keys.data_ptr()
    memory.commit(1, 200)
    assert memory.committed_slots[1] == 256 and memory.committed_slots[0] == 4 and memory.committed == 256 * 1024
    keys[1, 199], values[1, 199], values[2, -1] = 1.0, 2.0, 3.0
    assert keys[1, 190:].sum() == 16 and values[1, 190:].sum() == 128 and values[2, -1].sum() == 192
    set_policy(monkeypatch, "cpu", cache_bytes=committed_bytes(CPU) + 200 * 1024)
    with pytest.raises(torch.OutOfMemoryError, match=r"needs 262144 bytes more .* of 204800"):
        memory.commit(2, 200)
    assert memory.committed_slots[2] == 0
    memory.commit(2, 100)
    memory.trim(1, 130)
    assert memory.committed_slots[1] == 256, "a piece is given back as a whole"
    memory.trim(1)
    assert memory.committed_slots[1] == 0 and keys[1].sum() == 0 and values[2, -1].sum() == 192
    memory.commit(0, memory.capacity - 500)
    memory.free()
    assert memory.committed == 0
    del memory
    keys[2, 5] = 1.0
    assert keys[2].sum() == 16


def test_the_most_that_rows_have_held():
    before = committed_bytes(CPU)
    virtual_memory.reset_peak_committed_bytes(CPU)
    memory = RowMemory(2, 640, 1024, CPU)
    memory.commit(0, 600)
    most = before + memory.committed
    memory.trim(0)
    assert committed_bytes(CPU) < most == virtual_memory.peak_committed_bytes(CPU)
    memory.free()
    virtual_memory.reset_peak_committed_bytes(CPU)
    assert virtual_memory.peak_committed_bytes(CPU) == committed_bytes(CPU) == before


def test_rows_share_memory(monkeypatch):
    use_aliasing_pages(monkeypatch)
    monkeypatch.setattr(virtual_memory, "_MOST_PIECE", 4096)
    memory = RowMemory(4, 640, 1024, CPU)
    keys = memory.view(0, torch.float32, 2, 8)
    for row in (0, 1):
        memory.commit(row, 256)
        keys[row, :256] = torch.arange(256)[:, None, None].float()
    assert memory.committed == 508 * 1024 and not memory.can_share(0, 1, 7) and not memory.can_share(2, 1, 3)
    # The first slots of row 0 have memory of their own, which is not shared.
    assert memory.share(2, 1, 103) and memory.share(3, 0, 103)
    assert (memory.committed_slots[2], memory.committed_slots[3]) == (100, 100) and memory.committed == 512 * 1024
    assert torch.equal(keys[2, :100], keys[1, :100]) and torch.equal(keys[3, 4:100], keys[0, 4:100])
    assert memory.held([1]) == 156 * 1024 and memory.held([1, 2]) == 256 * 1024 and memory.held([2]) == 0
    memory.commit(2, 200)
    keys[2, 100:200] = -1.0
    assert memory.is_shared(1, 99) and not memory.is_shared(1, 100) and keys[1, 100:256].min() == 100
    assert memory.unshare(1, 128) == 128 and memory.committed_slots[1] == 256
    # A piece of which a part is kept becomes a copy.
    assert memory.unshare(1, 50) == 50 and memory.committed_slots[1] == 52 and not memory.is_shared(1, 50)
    assert memory.is_shared(1, 47) and memory.held([1]) == 4 * 1024 and torch.equal(keys[1, :50], keys[2, :50])
    keys[1, 50:52] = -2.0
    assert keys[2, 50:100].min() == 50
    with monkeypatch.context() as patch:  # no memory for a copy: what row 0 has of its own stays
        set_policy(patch, "cpu", cache_bytes=0)
        assert memory.unshare(0, 50) == 4 and memory.committed_slots[0] == 4 and keys[3, 99, 0, 0] == 99
    memory.trim(0)
    assert memory.share(0, 3, 50) and memory.committed_slots[0] == 48 and torch.equal(keys[0, 4:48], keys[3, 4:48])
    memory.free()
    assert memory.committed == 0


def test_addresses_that_there_are_not():
    with pytest.raises(torch.OutOfMemoryError, match=r"There are no addresses for 7[0-9]+ bytes"):
        RowMemory(1 << 10, 1 << 30, 1 << 16, CPU)


def test_a_row_that_is_refused_half_way_has_what_it_had(monkeypatch):
    monkeypatch.setattr(virtual_memory, "_MOST_PIECE", 4096)
    memory, put, calls = RowMemory(2, 640, 1024, CPU), virtual_pages.HostPages.put, itertools.count()
    memory.commit(1, 100)

    def fail(self, start, size):
        if next(calls) == 5:
            raise torch.OutOfMemoryError("out of memory, in a test")
        return put(self, start, size)

    monkeypatch.setattr(virtual_pages.HostPages, "put", fail)
    with pytest.raises(torch.OutOfMemoryError, match="in a test"):
        memory.commit(1, 600)
    assert memory.committed_slots[1] == 128 and memory.committed == 128 * 1024
    memory.commit(1, 600)
    assert memory.committed_slots[1] == 636
    memory.free()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in SELDOM])
def test_layers_of_every_family_are_in_memory(monkeypatch, kind):
    """The keys of target and drafter, of all of their caches."""
    found, place = [], lease.place_in_memory

    def noted(state, *args):
        place(state, *args)
        found.append([layer.keys for cache in state.caches for layer in cache.layers])

    monkeypatch.setattr("hf_specdec.engine.lease.place_in_memory", noted)
    prompts = prompts_of((5, 9, 1))
    texts, _ = in_rows(KINDS[kind](tiny_target("llama")), prompts, 2, max_new_tokens=8)
    assert texts == [alone("llama", tuple(one), 8) for one in prompts]
    (keys,) = found[:1]
    assert len({one.stride()[:2] for one in keys}) == 1 and len({one.data_ptr() for one in keys}) == len(keys)


@pytest.mark.parametrize("family", ["deepseek-v3", "gemma3", "qwen3-next"])
def test_layers_of_other_widths(family):
    drafter, prompts = RANDOM_DRAFTERS["eagle3"](tiny_target(family)), prompts_of((5, 9, 1, 20))
    texts, _ = in_rows(drafter, prompts, 2, family, max_new_tokens=8)
    assert texts == [alone(family, tuple(one), 8) for one in prompts]


@settings(deadline=None, max_examples=num_cases(60, 8))
@given(st.data())
def test_any_memory(data):
    """Requests of any lengths, which come and go at any time, in memory of any size, say what they say alone."""
    count = data.draw(st.integers(2, 9))
    lengths = tuple(data.draw(st.lists(st.sampled_from([1, 5, 17, 30, 70]), min_size=count, max_size=count)))
    begins = data.draw(st.lists(st.sampled_from([0, 25, 49, 50]), min_size=count, max_size=count))
    prompts = [BEGINNING[:begin] + one[: 70 - begin] for begin, one in zip(begins, prompts_of(lengths), strict=True)]
    kind = data.draw(st.sampled_from(["noisy-copy", "none", "eagle3", "mtp"]))
    cancelled = data.draw(st.sets(st.integers(0, count - 1), max_size=2))
    requests = [Request(0, torch.tensor(one), NEW, ends=frozenset(END), prompt_ids=one) for one in prompts]
    script = deque()
    left = list(range(count))
    while left:
        size = data.draw(st.integers(1, len(left)))
        script.append([requests[left.pop(0)] for _ in range(size)])
        script.extend([[]] * data.draw(st.integers(0, 3)))
    waits = {number: data.draw(st.integers(0, 12)) for number in cancelled}

    class Script:
        def __init__(self):
            self.step = -1

        def __call__(self, is_idle, leave_target):
            self.step += 1
            withdrawn = [(requests[number], "withdrawn") for number, step in waits.items() if step == self.step]
            is_open = bool(script) or self.step <= 12
            return Arrived(script.popleft() if script else (), withdrawn, is_open)

    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans()):
            use_aliasing_pages(patch)
            patch.setattr(virtual_memory, "_MOST_PIECE", 8192)
        patch.setattr(virtual_memory, "STEP_SLOTS", 8)
        patch.setattr("hf_specdec.engine.run.TOKENS_AHEAD", 8)
        drafter = KINDS[kind](tiny_target("llama"))
        # The longest text needs 110 tokens of at most 2 KB each.
        set_policy(patch, "cpu", cache_bytes=committed_bytes(CPU) + data.draw(st.integers(260, 1200)) * 1024)
        settings_ = ContinuousBatching(data.draw(st.integers(1, 6)), arrivals=Script(), longest=120)
        target = tiny_target("llama")
        options = {"max_new_tokens": 64, "eos_token_id": END, "pad_token_id": 0, "do_sample": False}
        config, _ = prepared_config(target, None, **options)
        call = call_of(target, drafter, config, [torch.zeros(1, dtype=torch.int64)])
        generate_continuously(*call, (), settings_)
        drafter.release()
    for number, (one, prompt) in enumerate(zip(requests, prompts, strict=True)):
        assert one.is_over and (one.error is None or number in cancelled), one.error
        expected = alone("llama", tuple(prompt))
        assert one.tokens == (expected if one.error is None else expected[: len(one.tokens)])


@pytest.mark.parametrize(("family", "has_memory"), [("gemma3", True), ("deepseek-v3", False)])
def test_keys_that_are_read_by_more_than_attention_are_in_no_row_memory(monkeypatch, family, has_memory):
    """DeepSeek-V3 computes keys and values anew from what all slots hold."""
    placed = []
    place = lease.place_in_memory
    monkeypatch.setattr(lease, "place_in_memory", lambda *args: (placed.append(args), place(*args)))
    prompts = prompts_of((5, 9))
    texts, _ = in_rows(RANDOM_DRAFTERS["eagle3"](tiny_target(family)), prompts, 2, family, max_new_tokens=8)
    assert texts == [alone(family, tuple(one), 8) for one in prompts] and bool(placed) == has_memory


def test_where_keys_are_is_looked_up_once(monkeypatch):
    """As long as target and drafter are the same: weights of another dtype make other keys."""
    target, layouts, find_layout = copy.deepcopy(tiny_target("llama")), [], lease.find_layout
    drafter = NoDrafter(target)
    monkeypatch.setattr(lease, "find_layout", lambda *args: layouts.append(find_layout(*args)) or layouts[-1])
    for dtype, calls in ((torch.float32, 2), (torch.bfloat16, 2)):
        target.to(dtype)
        for _ in range(calls):
            options = {"max_new_tokens": 3, "do_sample": False, "assistant_model": drafter}
            results = target.generate_batch([[5, 6, 7], [8, 9]], None, ContinuousBatchingConfig(), **options)
            assert [len(one.generated_tokens) for one in results.values()] == [3, 3]
    wide, narrow = (one.token_bytes for one in layouts)
    assert wide == 2 * narrow


@pytest.mark.parametrize("kind", cases(["noisy-copy", "eagle3", "mtp", "none"], ["noisy-copy", "mtp"]))
def test_texts_that_begin_alike_share_memory(monkeypatch, kind):
    """Texts are the same, nothing that is shared is written, and rows hold less than without sharing."""
    most, share = [], Runner.share

    def checked(runner: Runner, prefixes: list[Prefix]) -> list[Prefix]:
        found = share(runner, prefixes)
        assert not any(runner.memory.is_shared(one.row, one.length) for one in found), "a prefill writes shared memory"
        return found

    monkeypatch.setattr(Runner, "share", checked)
    for is_shared in (False, True):
        monkeypatch.setattr(virtual_memory, "STEP_SLOTS", 8)
        monkeypatch.setattr(virtual_memory, "_MOST_PIECE", 4096)
        pages = use_aliasing_pages(monkeypatch)
        monkeypatch.setattr(pages, "can_alias", is_shared)
        drafter = KINDS[kind](tiny_target("llama"))
        beginning = prompts_of((300,))[0]
        prompts = [beginning[:length] + one for length in (300, 280, 290, 296) for one in prompts_of((1, 3, 30))]
        virtual_memory.reset_peak_committed_bytes(CPU)
        before = committed_bytes(CPU)
        for _ in range(2):  # the second call finds rows that have shared memory
            texts, errors = in_rows(drafter, prompts, 4, max_new_tokens=16)
            assert errors == [None] * 12 and texts == [alone("llama", tuple(one), 16) for one in prompts]
        most.append(virtual_memory.peak_committed_bytes(CPU) - before)
        assert bool(pages.num_aliased) == is_shared
        drafter.release()
        gc.collect()
        assert committed_bytes(CPU) == before
    assert most[1] < 0.8 * most[0]


@pytest.mark.parametrize(("kind", "limits"), [("noisy-copy", (350, 150)), ("mtp", (133, 80))])
def test_requests_that_have_lost_their_rows_come_back(monkeypatch, rooms, kind, limits):
    monkeypatch.setattr(virtual_memory, "STEP_SLOTS", 16)
    monkeypatch.setattr("hf_specdec.engine.run.TOKENS_AHEAD", 8)
    prompts = prompts_of((5, 60, 9, 30, 17, 70))
    expected = [alone("llama", tuple(one), NEW, (500,)) for one in prompts]
    drafter, found = KINDS[kind](tiny_target("llama")), []
    for limit in (None, *limits):
        set_policy(monkeypatch, "cpu", cache_bytes=limit and committed_bytes(CPU) + limit * 1024)
        rooms.clear()
        texts, errors = in_rows(drafter, prompts, 4, eos_token_id=500)
        assert texts == expected and errors == [None] * 6
        assert [one.committed for one in drafter.stats.rows] <= [NEW - 1] * 6
        found.append(len(rooms))
    assert found[0] == 0 < found[-1]


def test_rules_of_requests_that_come_back(monkeypatch, rooms):
    """A minimum of new tokens counts from the end of the prompt, and a penalty the whole text, as before."""
    monkeypatch.setattr(virtual_memory, "STEP_SLOTS", 16)
    monkeypatch.setattr("hf_specdec.engine.run.TOKENS_AHEAD", 8)
    target, prompts = tiny_target("llama"), prompts_of((5, 60, 9, 30, 17, 70))
    options = {"repetition_penalty": 1.3, "min_new_tokens": NEW - 2, "eos_token_id": END}
    expected = [
        target.generate(torch.tensor([one]), max_new_tokens=NEW, do_sample=False, **options)[0, len(one) :].tolist()
        for one in prompts
    ]
    set_policy(monkeypatch, "cpu", cache_bytes=committed_bytes(CPU) + 60 * 1024)
    texts, errors = in_rows(NoDrafter(target), prompts, 4, **options)
    assert texts == expected and errors == [None] * 6 and rooms


def test_a_text_that_does_not_fit_alone_is_the_only_one_that_fails(monkeypatch):
    monkeypatch.setattr(virtual_memory, "STEP_SLOTS", 16)
    set_policy(monkeypatch, "cpu", cache_bytes=committed_bytes(CPU) + 50 * 1024)
    prompts = prompts_of((5, 200, 9, 2))
    texts, errors = in_rows(NoDrafter(tiny_target("llama")), prompts, 4)
    assert [error is None for error in errors] == [True, False, True, True]
    assert "no memory for a sequence of 200 tokens or more, even alone. Pass a shorter prompt" in errors[1]
    expected = [alone("llama", tuple(one)) for one in prompts]
    assert [texts[row] for row in (0, 2, 3)] == [expected[row] for row in (0, 2, 3)]


@pytest.mark.parametrize(("kind", "kilobytes"), cases([("eagle3", 80), ("mtp", 120), ("none", 60)], [("mtp", 120)]))
def test_sampled_requests_with_seeds_do_not_depend_on_memory(monkeypatch, rooms, kind, kilobytes):
    """They say, and accept, what they would have, without memory of their own, with enough of it, and short of it."""
    target = tiny_target("llama")
    drafter = NoDrafter(target) if kind == "none" else drafter_of(target, kind, "soft")
    prompts, found = prompts_of((5, 60, 9, 30, 17)), []
    monkeypatch.setattr(virtual_memory, "STEP_SLOTS", 16)
    monkeypatch.setattr("hf_specdec.engine.run.TOKENS_AHEAD", 1)
    options = {"do_sample": True, "temperature": 1.4, "top_k": 40, "seeds": [1, 2, 3, 4, 5], "eos_token_id": 500}
    for changes in ({"virtual_memory": False}, {"virtual_memory": True}, {"cache_bytes": kilobytes * 1024}):
        set_policy(monkeypatch, "cpu", **changes)
        texts, errors = in_rows(drafter, prompts, 4, **options)
        found.append((texts, drafter.stats.rows))
        assert errors == [None] * 5
    assert found[0] == found[1] == found[2] and rooms


def test_captured_rounds_of_longer_texts(monkeypatch):
    """A round is captured again for longer texts, and for shorter ones the longer one runs if there is no other."""
    replay_on_cpu(monkeypatch)
    monkeypatch.setattr(buckets, "FEWEST_SPAN", 16)
    monkeypatch.setattr(buckets, "SPAN_STEP", 4)
    drafter = RANDOM_DRAFTERS["eagle3"](tiny_target("llama")).configure(3, compile_rounds=False)
    for lengths, spans in (((5, 2), {64}), ((5, 100, 2), {64, 256}), ((5, 2), {64, 256})):
        prompts = prompts_of(lengths)
        assert in_rows(drafter, prompts, 2)[0] == [alone("llama", tuple(one)) for one in prompts]
        assert {key[-1] for _, session in drafter.sessions._idle for key in session.rounds} >= spans
    drafter.release()


def test_times_of_captures_are_not_times_of_rounds(monkeypatch):
    """Where a text outgrows the graph of its rounds, the next round of the same drafts is not typical."""
    replay_on_cpu(monkeypatch)
    monkeypatch.setattr(buckets, "FEWEST_SPAN", 16)
    drafter = RANDOM_DRAFTERS["eagle3"](tiny_target("llama")).configure(3, compile_rounds=False)
    vary_drafts(monkeypatch, [2])
    events, capture_round, launched = [], lease.capture_round, run._Launched
    monkeypatch.setattr(lease, "capture_round", lambda *args: events.append("capture") or capture_round(*args))
    monkeypatch.setattr(run, "_Launched", lambda *args: events.extend(args[3:4]) or launched(*args))
    in_rows(drafter, prompts_of((5, 4)), 2, max_new_tokens=80, eos_token_id=None)
    drafter.release()
    after = [then for now, then in itertools.pairwise(events) if now == "capture"]
    assert after[-1] is False and len(after) > 2 and events.count(True) > 4, events


class Reported(NamedTuple):
    """The result of a round."""

    tokens: list
    accepted: list
    committed: list
    rejected: None = None
    logprobs = {}

    def read(self):
        return self


class SimulatedRows(Runner):
    """A `Runner` without a model, which knows what every slot of every row holds."""

    prefix_margin = 1
    target = SimpleNamespace(is_captured=False, num_captures=0, unpatch=lambda: None)

    def __init__(self, rows, slots):
        self.memory = RowMemory(rows, slots, 64, CPU)
        self.state = SimpleNamespace(tokens=torch.zeros(rows), most_nodes=0)
        self.session = SimpleNamespace(fence=Fence(CPU))
        self.held = [[] for _ in range(rows)]
        self.num_rows, self.capacity = rows, self.memory.capacity
        self.finished = set(range(rows))

    def give_back(self, lengths):
        super().give_back(lengths)
        for row, length in lengths.items():
            self.held[row] = self.held[row][:length]

    def free_others(self):
        return False

    def observe(self, row, request):
        pass

    def finish(self, rows):
        self.finished.update(rows)

    def prefill(self, prefixes, requests, running):
        for prefix, request in zip(prefixes, requests, strict=True):
            text = request.text.tolist()[: request.num_prefilled]
            assert self.held[prefix.source][: prefix.length] == text[: prefix.length]
            assert self.memory.committed_slots[prefix.row] >= len(text)
            assert self.memory.committed_slots[prefix.source] >= prefix.length
            assert not self.memory.is_shared(prefix.row, prefix.length)
        for prefix, request in zip(prefixes, requests, strict=True):
            self.held[prefix.row] = request.text.tolist()[: request.num_prefilled]
            self.finished.discard(prefix.row)

    def prefill_next(self):
        rows = self.num_rows
        return rows, Reported([[7]] * rows, [0] * rows, [1] * rows)


def test_equal_prompts_take_rows_that_share_memory():
    """What such a row held before is copied by nobody, so no request has to wait."""
    entered = []

    class Place(SimulatedRows):
        merges_equal = True

        def prefill(self, prefixes, requests, running):
            entered.extend(requests)

    requests = [Request(index, torch.tensor([5, 6, 7]), 4, prompt_ids=[5, 6, 7]) for index in range(2)]
    place = Place(2, 1024)
    place.memory.is_shared = lambda row, length: True
    rows = Run(place, Arrived(requests, is_open=False), Counters(2, 1), ContinuousBatching())
    rows.admit()
    assert [one.index for one in entered] == [0, 1] and not any(one.is_over for one in requests)


def test_thousands_of_requests_lose_nothing(monkeypatch):
    count = num_cases(10_000, 3_000)
    chance = random.Random(0)
    monkeypatch.setattr(virtual_memory, "STEP_SLOTS", 16)
    monkeypatch.setattr("hf_specdec.engine.run.TOKENS_AHEAD", 1)
    pages = use_aliasing_pages(monkeypatch)
    monkeypatch.setattr(virtual_memory, "_MOST_PIECE", 4096)
    place, ended = SimulatedRows(16, 1024), []
    limit = 1000 * 64
    set_policy(monkeypatch, "cpu", cache_bytes=committed_bytes(CPU) + limit)
    beginnings = [[chance.randrange(50) for _ in range(length)] for length in (40, 90, 200)]
    requests, arriving = [], deque()
    for _ in range(count):
        begin = chance.choice(beginnings)[: chance.randrange(201)] if chance.random() < 0.5 else []
        prompt = begin + [chance.randrange(50) for _ in range(1 + int(chance.expovariate(0.03)))]
        one = Request(0, torch.tensor(prompt[:500]), chance.randrange(1, 120), prompt_ids=prompt[:500])
        requests.append(one)
        arriving.append(one)

    class Script:
        def __call__(self, is_idle, leave_target):
            most = chance.choice([0, 0, 1, 3, 20]) if not is_idle else 1
            new = [arriving.popleft() for _ in range(min(most, len(arriving)))]
            there = list(rows._occupants.values()) if chance.random() < 0.01 else []
            return Arrived(new, [(one, "withdrawn") for one in there[:1]], bool(arriving))

    setting = ContinuousBatching(arrivals=Script(), on_finished=ended.append)
    rows = Run(place, Arrived(), Counters(1, 3), setting)
    waits = 0
    while True:
        rows.admit()
        rows._read_results(0)
        if rows.is_complete:
            break
        assert place.memory.committed <= limit
        if not rows.reserve(8):
            rows.preempt()
            waits += 1
            continue
        committed = [0] * 16
        for row, one in rows._occupants.items():
            committed[row] = min(chance.randrange(1, 5), one.left)
            assert row not in place.finished
            assert place.memory.committed_slots[row] >= min(one.length + 4, one.longest)
            assert len(place.held[row]) <= one.length
            place.held[row] = [*one.prompt_ids, *one.tokens]
        report = Reported([[7, 7, 7, 7]] * 16, [0] * 16, committed)
        rows._take(_Launched(dict(rows._occupants), report, drafted=RoundShape(3), start=0.0, end=0.0))
    assert len(ended) == len({id(one) for one in ended}) == count
    assert waits > num_cases(100, 30) and pages.num_aliased > num_cases(1000, 250)
    for one in requests:
        assert one.is_over and one.error in (None, "withdrawn")
        assert len(one.tokens) == one.remaining or one.error
    assert sorted(rows._free) == list(range(16)) and rows._tokens_waiting == 0
    place.give_back(dict.fromkeys(range(16), 0))
    assert place.memory.committed == 0


class Driver:
    """CUDA's virtual memory management, as far as it is called: it knows what is reserved, created and mapped."""

    class CUresult(enum.Enum):
        CUDA_SUCCESS, CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_INVALID_VALUE = 0, 2, 1

    class CUmemAllocationProp(SimpleNamespace):
        def __init__(self):
            super().__init__(location=SimpleNamespace())

    CUmemAccessDesc = SimpleNamespace
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def __init__(self):
        # `references` of handles: memory is there until the last one is released.
        self.reserved, self.sizes, self.mapped, self.references = {}, {}, {}, {}
        self.handles, self.failing = itertools.count(1), None

    def _result(self, name, *values):
        is_failing = self.failing == name
        return (self.CUresult.CUDA_ERROR_OUT_OF_MEMORY if is_failing else self.CUresult.CUDA_SUCCESS, *values)

    def cuMemGetAllocationGranularity(self, *_):
        return self._result("", 2 << 20)

    def cuMemAddressReserve(self, size, *_):
        self.reserved[1 << 40] = size
        return self._result("", 1 << 40)

    def cuMemAddressFree(self, base, size):
        assert self.reserved.pop(base) == size and not self.mapped
        return self._result("")

    def cuMemCreate(self, size, *_):
        if self.failing == "create":
            return self._result("create")
        handle = next(self.handles)
        self.sizes[handle], self.references[handle] = size, 1
        return self._result("", handle)

    def cuMemRetainAllocationHandle(self, at):
        handle = self.mapped[at][1]
        self.references[handle] += 1
        return self._result("", handle)

    def cuMemMap(self, at, size, offset, handle, flags):
        if self.failing != "map":
            assert self.sizes[handle] == size
            assert all(at + size <= other or other + length <= at for other, (length, _) in self.mapped.items())
            self.mapped[at] = (size, handle)
        return self._result("map")

    def cuMemSetAccess(self, at, size, *_):
        return self._result("access")

    def cuMemUnmap(self, at, size):
        assert self.mapped.pop(at)[0] == size
        return self._result("")

    def cuMemRelease(self, handle):
        self.references[handle] -= 1
        if not self.references[handle]:
            del self.sizes[handle], self.references[handle]
        return self._result("")


def test_calls_of_the_driver(monkeypatch):
    """Everything that is created is released, also where a call fails half-way."""
    driver, device = Driver(), torch.device("cuda:0")
    monkeypatch.setattr(virtual_pages.importlib, "import_module", lambda name: driver)
    monkeypatch.setattr(virtual_pages, "_gpu_granularity", lambda device: 2 << 20)
    monkeypatch.setattr(virtual_pages.DevicePages, "zero", lambda *args: None)
    monkeypatch.setattr(virtual_memory, "available_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    memory = RowMemory(3, 8192, 1000, device)
    assert memory.token_bytes == 1024 and memory.capacity == 6144
    assert len(driver.mapped) == 4 and len(driver.sizes) == 2, "all rows share the memory of the dummy slot"
    memory.commit(1, 6000)
    memory.commit(0, 3000)
    assert sum(driver.sizes.values()) == (2 + 2 + 6 + 2) << 20 and memory.committed == 8 << 20
    before = dict(driver.mapped), dict(driver.sizes)
    for failing in ("create", "map", "access"):
        driver.failing = failing
        with pytest.raises(torch.OutOfMemoryError, match="The CUDA driver has no memory left"):
            memory.commit(2, 5000)
        assert (driver.mapped, driver.sizes) == before and memory.committed_slots[2] == 0
    driver.failing = "access"
    assert memory.can_share(2, 1, 6144) and not memory.share(2, 1, 6144)
    assert (driver.mapped, driver.sizes) == before
    driver.failing = None
    assert memory.share(2, 1, 6144) and sum(driver.sizes.values()) == 12 << 20 and memory.committed == 8 << 20
    memory.trim(1)
    assert sum(driver.sizes.values()) == 12 << 20
    memory.trim(2, 3000)
    assert memory.committed_slots[2] == 6144, "it came in one piece"
    memory.trim(2, 100)
    assert memory.committed_slots[2] == 2048 and sum(driver.sizes.values()) == 8 << 20
    memory.free()
    assert memory.committed == 0 and len(driver.mapped) == 4
    del memory
    gc.collect()
    assert not driver.mapped and not driver.sizes and not driver.reserved


@pytest.mark.slow  # a compiler of C++ runs
def test_compiled_functions_copy_no_rows(monkeypatch):
    """What a compiler makes of a round writes to the views themselves: a copy would read slots without memory."""
    set_policy(monkeypatch, "cpu", triton=True)
    memory, generator = RowMemory(2, 8192, 2048, CPU), torch.Generator().manual_seed(0)
    buffers = [memory.view(number * 256, torch.float32, 2, 32) for number in range(4)]
    assert len({one.untyped_storage().data_ptr() for one in buffers}) == 4
    query, states, weight = (
        torch.randn(*size, generator=generator) for size in ((2, 4, 3, 32), (2, 2, 3, 32), (32, 32))
    )
    positions = torch.tensor([[5, 6, 7], [30, 31, 32]])

    def layers():
        out = query
        for keys, values in zip(buffers[::2], buffers[1::2], strict=True):
            ops.write_kv(keys, values, states @ weight, states.relu(), positions, None)
            shown = (one[:, :1024].transpose(1, 2) for one in (keys, values))
            out = torch.tanh(ops.attention(out, *shown, positions, 0.125).transpose(1, 2) @ weight)
        return out

    with torch.no_grad():
        expected = layers()
        found, code = run_and_get_code(torch.compile(layers, fullgraph=True, dynamic=False))
    torch.testing.assert_close(found, expected)
    (source,) = code
    sizes = [re.findall(r"\d+", one) for one in re.findall(r"empty_strided_cpu\(\(([\d, ]+)\)", source)]
    assert sizes and max(torch.Size(map(int, one)).numel() for one in sizes) < 1024
    assert len(re.findall(r"write_kv\.default\(arg\d+_1, arg\d+_1, ", source)) == 2
