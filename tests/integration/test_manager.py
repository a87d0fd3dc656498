"""Managers with a drafter: every request says what it says alone, whenever it comes and whatever runs beside it."""

import asyncio
import copy
import functools
import inspect
import queue
import random
import threading
import time

import bulk
import pytest
import torch
from adapters import with_adapters
from aliasing_pages import use_aliasing_pages
from case_counts import cases, num_cases
from graph_stand_ins import replay_on_cpu, tape_on_cpu
from hypothesis import given, settings
from hypothesis import strategies as st
from model_state import traces
from oracle import RANDOM_DRAFTERS, copy_of, random_eagle3
from targets import STATIC_FAMILIES, STOCK_FAMILY, build_target, set_policy, tiny_target
from transformers import ContinuousBatchingConfig, GenerationConfig, StopStringCriteria
from transformers.generation import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.generation.continuous_batching.utils import WorkloadHints
from word_tokenizer import word_tokenizer

from hf_specdec import NoDrafter, SuffixDrafter
from hf_specdec.calls.request import Request
from hf_specdec.engine import continuous, session_prefill
from hf_specdec.engine.continuous import ContinuousRunner
from hf_specdec.engine.lease import SessionLease
from hf_specdec.engine.run import Run
from hf_specdec.graphs import buckets
from hf_specdec.memory import virtual_memory
from hf_specdec.memory.virtual_memory import allocating
from hf_specdec.serving import manager_requests, manager_thread
from hf_specdec.serving.manager import SpeculativeBatchingManager
from hf_specdec.serving.manager_queue import RequestQueue

END, NEW = list(range(3, 96, 8)), 12
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": END}


prompts = functools.partial(bulk.prompts_of, (5, 1, 9, 20, 3, 3, 7, 30, 2, 1, 4, 13))


def alone(index, family="llama", new=NEW, end=tuple(END)):
    """What `generate()` without a drafter says to a prompt."""
    return bulk.alone(family, tuple(prompts()[index]), new, end)


def manager_of(target, drafter, rows=4, hints=None, config=None, **options):
    config = {"max_requests_per_batch": rows, **(config or {})}
    return target.init_continuous_batching(
        None, ContinuousBatchingConfig(**config), hints, assistant_model=drafter, **{**GREEDY, **options}
    )


@pytest.fixture
def running():
    """Makes managers that run, and stops them."""
    made = []

    def run(*args, **options):
        made.append(manager_of(*args, **options))
        made[-1].start()
        return made[-1]

    yield run
    for one in made:
        if one.is_running():
            one.stop(hard_stop=True)


def texts_of(manager, names):
    results = [manager.get_result(name, timeout=60) for name in names]
    assert all(one.status == RequestStatus.FINISHED and one.error is None for one in results)
    return [one.generated_tokens for one in results]


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "suffix", "none"])
def test_requests_that_come_one_after_the_other(running, kind):
    target = tiny_target("llama")
    manager = running(target, {**RANDOM_DRAFTERS, "none": NoDrafter, "suffix": SuffixDrafter}[kind](target))
    names = []
    for prompt in prompts():
        names.append(manager.add_request(prompt))
        time.sleep(0.004)
    assert names[:2] == ["req_0", "req_1"]
    assert texts_of(manager, names) == [alone(index) for index in range(len(prompts()))]


def test_runs_draw_nothing_from_the_global_generator(running):
    target = tiny_target("llama")
    state = torch.get_rng_state()
    manager = running(target, NoDrafter(target), config={"per_request_processors": True, "seed": 3})
    texts_of(manager, [manager.add_request(prompts()[0], do_sample=True, temperature=1.3) for _ in range(2)])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("family", cases(STATIC_FAMILIES, ["gemma3", "qwen3-next"]))
def test_every_family_of_targets(running, family):
    target = tiny_target(family)
    manager = running(target, random_eagle3(target), rows=16)
    names = [manager.add_request(prompts()[0])]
    time.sleep(0.02)
    names += manager.add_requests(prompts()[1:])
    assert texts_of(manager, names) == [alone(index, family) for index in range(len(prompts()))]


@settings(deadline=None, max_examples=num_cases(40, 8))
@given(st.data())
def test_random_schedules(data):
    """Arrivals and cancellations at any time, limits and end tokens of any kind, any number of rows."""
    target = tiny_target("llama")
    drafter = copy_of(target, noise=0.01)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager_thread, "LINGER", data.draw(st.sampled_from([0.0, 0.02, 1.0])))
        patch.setattr(buckets, "ROWS_TO_FEWER", data.draw(st.integers(2, 4)))
        patch.setattr(buckets, "PACKED_TOKENS", data.draw(st.sampled_from([(2048, 32), (3, 2)])))
        manager = manager_of(target, drafter, rows=data.draw(st.integers(1, 8)))
        manager.start()
        try:
            asked, cancelled = {}, set()
            for _ in range(data.draw(st.integers(1, 14))):
                action = data.draw(st.sampled_from(["add", "add", "add", "wait", "cancel"]))
                if action == "add":
                    case = data.draw(
                        st.tuples(st.integers(0, 11), st.integers(1, 14), st.sampled_from([tuple(END), (), (7,)]))
                    )
                    index, new, end = case
                    streaming = data.draw(st.booleans())
                    name = manager.add_request(
                        prompts()[index], max_new_tokens=new, eos_token_id=list(end) or -1, streaming=streaming
                    )
                    asked[name] = case
                elif action == "wait":
                    time.sleep(data.draw(st.sampled_from([0.001, 0.03])))
                elif asked:
                    name = data.draw(st.sampled_from(sorted(asked)))
                    manager.cancel_request(name)
                    cancelled.add(name)
            for name, (index, new, end) in asked.items():
                *parts, last = list(manager.request_id_iter(name))
                expected = alone(index, new=new, end=end)
                for part in (*parts, last):
                    assert part.generated_tokens == expected[: len(part.generated_tokens)]
                if last.error is None:
                    assert last.generated_tokens == expected and last.status == RequestStatus.FINISHED
                else:
                    assert name in cancelled and last.error == f"The request {name} was cancelled."
                    assert last.status == RequestStatus.FAILED
        finally:
            manager.stop(timeout=60)
    assert not manager.is_running() and not manager._queue.active and manager._queue.has_no_results


def test_a_long_prompt_is_prefilled_between_rounds(running, monkeypatch):
    """Rounds between its chunks leave nothing in its row, and give other requests tokens meanwhile."""
    target, rounds, kept = tiny_target("llama"), [], []
    prefill_next, finish = ContinuousRunner.prefill_next, session_prefill.finish_prefill
    run_round, count = SessionLease.run_round, []

    def counted(runner):
        rounds.append(len(count))
        return prefill_next(runner)

    def counting(lease, drafted):
        count.append(drafted)
        return run_round(lease, drafted)

    def noting(state, packed, rows):
        finish(state, packed, rows)
        row = state.lengths == 60
        kept.extend(zip(state.aux_hidden_states[row, :2].clone(), state.prompt_logits[row].clone(), strict=True))

    monkeypatch.setattr(ContinuousRunner, "prefill_next", counted)
    monkeypatch.setattr(SessionLease, "run_round", counting)
    monkeypatch.setattr(session_prefill, "finish_prefill", noting)
    long = torch.randint(3, 90, (1, 60), generator=torch.Generator().manual_seed(1))
    expected = target.generate(long, max_new_tokens=8, do_sample=False, eos_token_id=END)[0, 60:].tolist()
    for sizes in ((2048,), (3,)):
        monkeypatch.setattr(buckets, "PACKED_TOKENS", sizes)
        rounds.clear()
        manager = running(target, random_eagle3(target), rows=4)
        first = manager.add_request(prompts()[0], max_new_tokens=200, eos_token_id=-1, streaming=True)
        next(manager.request_id_iter(first))
        name = manager.add_request(long[0].tolist(), max_new_tokens=8, eos_token_id=END)
        assert texts_of(manager, [name]) == [expected]
        manager.stop(hard_stop=True)
    assert len(set(rounds)) > 10 and len(kept) == 2
    assert kept[0][0].any(dim=1).all() and kept[0][1].argmax() == expected[0]
    torch.testing.assert_close(kept[0], kept[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["eagle3", "none"])
def test_prompts_that_arrive_together_enter_one_after_the_other(running, monkeypatch, kind):
    """A request has its first token as soon as its own prompt is complete, whatever chunk is the last of its group."""
    target, count, starts = tiny_target("llama"), [], {}
    drafter = {**RANDOM_DRAFTERS, "none": NoDrafter}[kind](target)
    run_round, add = SessionLease.run_round, Request.add

    def counting(lease, drafted):
        count.append(drafted)
        return run_round(lease, drafted)

    def noting(request, tokens, now):
        if tokens:
            starts.setdefault(len(request.prompt), len(count))
        return add(request, tokens, now)

    monkeypatch.setattr(SessionLease, "run_round", counting)
    monkeypatch.setattr(Request, "add", noting)
    monkeypatch.setattr(buckets, "PACKED_TOKENS", (8,))
    manager = running(target, drafter, rows=4)
    with manager.pause():
        names = [manager.add_request(prompts()[index], eos_token_id=-1) for index in (2, 3, 6, 0)]
    assert texts_of(manager, names) == [alone(index, end=(-1,)) for index in (2, 3, 6, 0)]
    # Chunks of 8 tokens, and a round after each once a row is occupied: the prompts end after 9, 29, 36 and 41 tokens.
    assert [starts[length] for length in (9, 20, 7, 5)] == [1, 3, 4, 5]


# Of methods that transformers' managers have, too.
OWN_PARAMETERS = {("warmup", "block")}


@pytest.mark.core
def test_methods_and_results_are_those_of_transformers(running):
    ours, theirs = SpeculativeBatchingManager, ContinuousBatchingManager
    for name, method in vars(theirs).items():
        if callable(method) and not name.startswith("_") and name != "switch_to_cb_friendly_attn":
            found = list(inspect.signature(getattr(ours, name)).parameters)
            expected = [one for one in inspect.signature(method).parameters if one not in ("kwargs", "args")]
            expected = ["options" if one == "logit_processor_kwargs" else one for one in expected]
            assert [one for one in found if (name, one) not in OWN_PARAMETERS] == expected, name
    target = tiny_target("llama")
    manager = running(target, random_eagle3(target), num_return_sequences=2, do_sample=True, top_k=1)
    assert manager.add_request(prompts()[0], "mine", record_timestamps=True, streaming=True) == "mine"
    for name in ("mine__child#0", "mine"):
        *parts, last = manager.request_id_iter(name)
        assert all(part.status == RequestStatus.DECODING and not part.is_finished() for part in parts)
        assert last.generated_tokens == alone(0) and last.prompt_ids == prompts()[0] and last.logprobs == []
        assert len(last.timestamps) == len(last.generated_tokens)
        assert 0 < last.created_time <= last.lifespan[0] <= last.timestamps[0] <= last.lifespan[1]
    assert manager.get_result("mine") is None and manager.get_result(timeout=0.01) is None


def test_new_ids_are_nobodys(running):
    target = tiny_target("llama")
    manager = running(target, NoDrafter(target))
    assert texts_of(manager, [manager.add_request(prompts()[1], "req_2")]) == [alone(1)]
    manager.add_request(prompts()[1], "req_0")
    while manager._queue.active:
        time.sleep(0.001)
    with manager.pause():
        manager.add_request(prompts()[1], "req_1")
        assert manager.add_requests([prompts()[0]] * 2) == ["req_2", "req_3"]


def test_many_results_are_found_at_once(running):
    compared = []

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other):
            compared.append(other)
            return str.__eq__(self, other)

    names = [Name(number) for number in range(60)]
    results = RequestQueue(ContinuousBatchingConfig())
    with results.changed:
        for text in ([1], [1, 2]):
            results.deliver([GenerationOutput(name, generated_tokens=text) for name in names])
    assert results.take_result(None, lambda: True, 0).request_id == names[0]
    for name in reversed(names):
        for text in [[1], [1, 2]][name == names[0] :]:
            assert results.take_result(name, lambda: True, 0).generated_tokens == text
    assert results.has_no_results and len(compared) < 10 * len(names)


def test_a_queue_is_counted_when_it_may_be_full(running, monkeypatch):
    started, asked = Request.has_started.fget, []
    noting = property(lambda self: asked.append(self) or started(self))
    monkeypatch.setattr(Request, "has_started", noting)
    monkeypatch.setattr(manager_thread, "SECONDS_TO_WAIT", 0.0)
    target = tiny_target("llama")
    manager = running(target, NoDrafter(target), config={"max_queue_size": 40})
    with manager.pause():
        names = [manager.add_request(prompts()[1], max_new_tokens=1) for _ in range(40)]
        assert len(asked) <= 40
        with pytest.raises(queue.Full):
            manager.add_request(prompts()[1])
        for name in reversed(names):
            manager.cancel_request(name)
        manager.add_request(prompts()[1])


@pytest.mark.core
def test_context_manager():
    target = tiny_target("llama")
    before = traces(target)
    with target.continuous_batching_context_manager(
        GenerationConfig(**GREEDY), assistant_model=random_eagle3(target), persistent_manager=True
    ) as manager:
        assert manager.is_running() and manager.warmed_up
        manager.add_requests(prompts(), streaming=True)
        done = {}
        for result in manager:
            if result.is_finished():
                done[result.request_id] = result.generated_tokens
            if len(done) == len(prompts()):
                break
    assert [done[f"req_{index}"] for index in range(len(prompts()))] == [alone(i) for i in range(len(prompts()))]
    assert not manager.is_running() and traces(target) == before


def test_threads_that_add_and_wait(running):
    target = tiny_target("llama")
    manager = running(target, copy_of(target, noise=0.01), rows=8)
    failures = []

    def ask(first):
        for index in range(first, first + 12):
            name = manager.add_request(prompts()[index % 12])
            if manager.get_result(name, timeout=60).generated_tokens != alone(index % 12):
                failures.append(name)

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not failures and not manager._queue.active


def test_other_calls_run_between_rounds(running):
    """With the same drafter, with another and without, while requests go on."""
    target = copy.deepcopy(tiny_target("llama"))
    drafter = copy_of(target, noise=0.01)
    manager = running(target, drafter)
    names = [manager.add_request(prompts()[3], max_new_tokens=150, eos_token_id=-1) for _ in range(2)]
    prompt = torch.tensor([prompts()[0]])
    for other in (drafter, random_eagle3(target), None, drafter):
        out = target.generate(prompt, assistant_model=other, **GREEDY)
        assert out[0, prompt.shape[1] :].tolist() == alone(0)
        assert manager._queue.active, "it did not wait for the requests"
    assert texts_of(manager, names) == [alone(3, new=150, end=())] * 2


@pytest.mark.core
def test_pause(running):
    target = tiny_target("llama")
    drafter, before = copy_of(target, noise=0.01), traces(target)
    manager = running(target, drafter)
    with manager.pause():
        name = manager.add_request(prompts()[0], max_new_tokens=60, eos_token_id=-1, streaming=True)
        assert manager.get_result(name, timeout=0.05) is None, "nothing begins"
    first = manager.get_result(name, timeout=60)
    with manager.pause():
        while manager.get_result(name, timeout=0) is not None:
            pass
        assert manager.get_result(name, timeout=0.05) is None, "no round runs"
        assert traces(target) == before, "others find the target as it was"
        out = target.generate(torch.tensor([prompts()[1]]), assistant_model=drafter, **GREEDY)
        assert out[0, 1:].tolist() == alone(1)
        with pytest.raises(RuntimeError, match=r"stop\(\) was called within pause\(\)"):
            manager.stop()
    *_, last = manager.request_id_iter(name)
    assert last.generated_tokens == alone(0, new=60, end=()) and len(first.generated_tokens) < 60
    manager.stop()
    with pytest.raises(RuntimeError, match="the manager does not run"), manager.pause():
        pass


def _say_it_all_louder(target, adapted):
    with torch.no_grad():
        target.model.layers[1].mlp.down_proj.weight.mul_(3.0)


CHANGES = {
    "weights": _say_it_all_louder,
    "adapter": lambda target, adapted: adapted.set_adapter("b"),
    "dtype": lambda target, adapted: target.double(),
}


@pytest.mark.core_for(is_captured=[True])
@pytest.mark.parametrize(("is_captured", "changes"), [(False, list(CHANGES)), (True, ["adapter"])])
def test_a_target_that_is_changed_while_no_round_runs(running, monkeypatch, is_captured, changes):
    """Tokens after a change are those of the target as it is, of requests that had begun, too."""
    target = copy.deepcopy(tiny_target("llama"))
    adapted = with_adapters(target)
    if is_captured:
        tape_on_cpu(monkeypatch)
    drafter = random_eagle3(target).configure(3, compile_rounds=False)
    manager = running(target, drafter, eos_token_id=None)
    prompt = torch.randint(3, 90, (70,), generator=torch.Generator().manual_seed(3)).tolist()

    def plain(text, new=NEW):
        options = {"max_new_tokens": new, "do_sample": False}
        return target.generate(torch.tensor([text]), **options)[0, len(text) :].tolist()

    for name in changes:
        before = plain(prompt)
        assert texts_of(manager, [manager.add_request(prompt)]) == [before]
        CHANGES[name](target, adapted)  # idle, without pause()
        after = plain(prompt)
        assert texts_of(manager, [manager.add_request(prompt)]) == [after], name
        assert name == "dtype" or after != before, "it changes nothing, so nothing was shown"
    target.float()
    adapted.set_adapter("a")
    for name in changes:
        begun = manager.add_request(prompt, max_new_tokens=30, streaming=True)
        cancelled = manager.add_request(prompt, max_new_tokens=30, streaming=True)
        said = manager.get_result(begun, timeout=60)
        with manager.pause():
            while (later := manager.get_result(begun, timeout=0)) is not None:
                said = later
            CHANGES[name](target, adapted)
            manager.cancel_request(cancelled)
            added = manager.add_request(prompt)
        *_, last = manager.request_id_iter(begun)
        count = len(said.generated_tokens)
        assert last.generated_tokens[:count] == said.generated_tokens and 0 < count < 30
        assert last.generated_tokens[count:] == plain(prompt + said.generated_tokens, 30 - count), name
        assert texts_of(manager, [added]) == [plain(prompt)], name
        *_, last = manager.request_id_iter(cancelled)
        assert last.error == f"The request {cancelled} was cancelled."
    with manager.pause():
        added = manager.add_request(prompt)
        target.train()
    assert "is in training mode" in manager.get_result(added, timeout=60).error


def test_waiting_costs_no_time(running, monkeypatch):
    monkeypatch.setattr(manager_thread, "LINGER", 0.1)
    target = tiny_target("llama")
    before = traces(target)
    manager = running(target, random_eagle3(target))
    texts_of(manager, [manager.add_request(prompts()[0])])
    spent = time.process_time()
    time.sleep(0.4)
    assert time.process_time() - spent < 0.1
    assert traces(target) == before, "when nothing comes, the target is as it was"
    assert texts_of(manager, [manager.add_request(prompts()[1])]) == [alone(1)]


@pytest.mark.parametrize("is_hard", [False, True])
def test_stop_in_the_middle(is_hard):
    target = copy.deepcopy(tiny_target("llama"))
    before = traces(target)
    manager = manager_of(target, copy_of(target, noise=0.01), rows=2)
    manager.start()
    options = {"max_new_tokens": 100, "eos_token_id": -1}
    names = [manager.add_request(prompts()[index], **options, streaming=index == 0) for index in range(4)]
    assert manager.get_result(names[0], timeout=60) is not None, "it has begun"
    manager.stop(hard_stop=is_hard)
    assert not manager.is_running() and traces(target) == before
    for index, name in enumerate(names):
        *_, last = iter(lambda name=name: manager.get_result(name), None)
        expected = alone(index, new=100, end=())
        assert last.generated_tokens == expected[: len(last.generated_tokens)]
        assert (last.error is None) == (last.generated_tokens == expected)
        if is_hard:
            assert last.error == "The manager was stopped before the request had ended."
    manager.start()
    assert texts_of(manager, [manager.add_request(prompts()[0])]) == [alone(0)]
    manager.stop()


def test_several_threads_start_and_stop_it(monkeypatch):
    made, failures = [], []

    class Slow(threading.Thread):
        def __init__(self, *args, name=None, **options):
            super().__init__(*args, name=name, **options)
            if name is not None:
                made.append(self)
                time.sleep(0.02)

    def at_once(call):
        def run():
            try:
                call()
            except BaseException as error:
                failures.append(error)

        threads = [Slow(target=run) for _ in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()

    monkeypatch.setattr(threading, "Thread", Slow)
    target = tiny_target("llama")
    manager = manager_of(target, NoDrafter(target))
    at_once(manager.start)
    at_once(manager.stop)
    assert not failures and len(made) == 1 and not manager.is_running()


@pytest.mark.core
def test_an_error_in_a_round_reaches_everybody(running, monkeypatch):
    target = copy.deepcopy(tiny_target("llama"))
    drafter = copy_of(target, noise=0.01)
    before = traces(target)
    manager = running(target, drafter, rows=2)
    launch, count = Run._launch, []

    def fail(self):
        count.append(1)
        if len(count) == 5:
            raise ZeroDivisionError("a round fails, in a test")
        launch(self)

    monkeypatch.setattr(Run, "_launch", fail)
    found = []

    def ask(index):
        name = manager.add_request(prompts()[index], max_new_tokens=100, eos_token_id=-1)
        found.append(manager.get_result(name))

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
    with manager.pause():  # so that all of them wait
        for one in threads:
            one.start()
        while len(manager._queue.active) < 4:
            time.sleep(0.001)
    for one in threads:
        one.join(60)
    assert [one.error for one in found] == ["ZeroDivisionError: a round fails, in a test"] * 4
    assert all(one.status == RequestStatus.FAILED for one in found)
    manager._rounds.thread.join()
    assert isinstance(manager.background_thread_status.fatal_error, ZeroDivisionError)
    with pytest.raises(RuntimeError, match="The manager has ended by an error and takes no more") as refused:
        manager.add_request(prompts()[0])
    assert isinstance(refused.value.__cause__, ZeroDivisionError)
    assert manager.get_result() is None and traces(target) == before
    monkeypatch.undo()
    manager.stop()
    manager.start()
    assert texts_of(manager, [manager.add_request(prompts()[0])]) == [alone(0)]


@pytest.mark.parametrize("grows", [False, True])
def test_rows_and_slots_grow_with_the_requests(running, monkeypatch, grows):
    """Where rows have memory of their own, there are slots for all texts from the start."""
    set_policy(monkeypatch, "cpu", virtual_memory=grows)
    made = []
    opened = ContinuousRunner._open
    monkeypatch.setattr(
        ContinuousRunner,
        "_open",
        lambda self, rows, longest, kept: made.append((rows, longest)) or opened(self, rows, longest, kept),
    )
    target = tiny_target("llama")
    manager = running(target, copy_of(target, noise=0.01), rows=16)
    first = manager.add_request(prompts()[1], max_new_tokens=120, eos_token_id=-1, streaming=True)
    manager.get_result(first, timeout=60)
    names = [manager.add_request(prompts()[index], max_new_tokens=20, eos_token_id=-1) for index in (0, 2)]
    long = manager.add_request([5] * 150, max_new_tokens=30, eos_token_id=-1)
    assert texts_of(manager, names) == [alone(index, new=20, end=()) for index in (0, 2)]
    assert len(manager.get_result(long, timeout=60).generated_tokens) == 30
    *_, last = manager.request_id_iter(first)
    assert last.generated_tokens == alone(1, new=120, end=())
    longest = [256, 256] if grows else [121, 180]
    assert made[0] == (1, longest[0]) and made[-1][0] in (4, 16) and made[-1][1] == longest[1]
    made.clear()
    manager.stop()
    hinted = running(target, NoDrafter(target), hints=WorkloadHints(max_prompt_length=50, max_generated_length=50))
    assert texts_of(hinted, [hinted.add_request(prompts()[0])]) == [alone(0)] and made == [(1, 256 if grows else 100)]


@pytest.mark.parametrize("is_later", [False, True])
def test_rows_that_have_shared_memory_get_other_texts(running, monkeypatch, is_later):
    """Rows move to a session that they have left, or that an earlier run has left, where rows share a beginning."""
    replay_on_cpu(monkeypatch)
    pages, sizes, move = use_aliasing_pages(monkeypatch), [], ContinuousRunner.move
    monkeypatch.setattr(manager_thread, "LINGER", 0.1)
    monkeypatch.setattr(virtual_memory, "STEP_SLOTS", 8)
    monkeypatch.setattr(virtual_memory, "_MOST_PIECE", 4096)
    monkeypatch.setattr(buckets, "ROWS_TO_FEWER", 2)
    monkeypatch.setattr(buckets, "FEWEST_CAPTURED_ROWS", 1)
    monkeypatch.setattr(ContinuousRunner, "_is_worth_moving", lambda *args: True)

    def noting(self, rows, *args):
        count = move(self, rows, *args)
        sizes.append((self.num_rows, len(rows)))
        return count

    monkeypatch.setattr(ContinuousRunner, "move", noting)
    target = tiny_target("llama")
    manager = running(target, NoDrafter(target), rows=16, eos_token_id=-1)
    beginning, *long = bulk.prompts_of((300, 290, 280, 270))
    with manager.pause():
        short = manager.add_requests([beginning + one for one in bulk.prompts_of(range(1, 10))], max_new_tokens=4)
        names = [] if is_later else manager.add_requests(long, max_new_tokens=200)
    assert [len(one) for one in texts_of(manager, short)] == [4] * 9 and pages.num_aliased
    if is_later:
        time.sleep(0.5)  # the run ends
        sizes.clear()
        names = manager.add_requests(long, max_new_tokens=200, streaming=True)
        for name in names:
            next(manager.request_id_iter(name))
    while not is_later and not sizes:
        time.sleep(0.001)
    others = manager.add_requests(prompts()[:12], max_new_tokens=20)
    found = [list(manager.request_id_iter(name))[-1].generated_tokens for name in names]
    assert found == [bulk.alone("llama", tuple(one), 200, ()) for one in long]
    assert texts_of(manager, others) == [alone(index, new=20, end=()) for index in range(12)]
    assert 16 in [size for size, _ in sizes]


@pytest.mark.parametrize("grows", [False, True])
def test_a_limit_beyond_all_memory_fails_alone(running, monkeypatch, grows):
    set_policy(monkeypatch, "cpu", virtual_memory=grows)
    target = tiny_target("llama")
    manager = running(target, NoDrafter(target))
    with manager.pause():
        name = manager.add_request(prompts()[0])
        for new in (10**10, 10**30):
            long = manager.add_request(prompts()[0], max_new_tokens=new)
            names = manager.add_requests(prompts()[1:3])
    assert f"no memory for a prompt of 5 tokens and {new} new ones" in manager.get_result(long, timeout=60).error
    assert texts_of(manager, [name, *names]) == [alone(index) for index in range(3)]


def test_torch_out_of_memory_on_a_cpu():
    cpu = torch.device("cpu")
    with pytest.raises(torch.OutOfMemoryError, match="can't allocate memory"), allocating(1, 100, cpu):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate too much")
    with pytest.raises(RuntimeError, match="another"), allocating(1, 100, cpu):
        raise RuntimeError("another")


@pytest.mark.parametrize("has_others", [False, True])
def test_a_request_too_long_for_memory_fails_alone(running, monkeypatch, has_others):
    set_policy(monkeypatch, "cpu", virtual_memory=False)
    take = continuous.SessionLease.take

    def short_of_memory(self):
        if self.shape.slots > 100:
            raise torch.OutOfMemoryError("out of memory, in a test")
        return take(self)

    monkeypatch.setattr(continuous.SessionLease, "take", short_of_memory)
    target = tiny_target("llama")
    manager = running(target, copy_of(target, noise=0.01))
    names = []
    if has_others:
        with manager.pause():
            names = [manager.add_request(prompts()[index]) for index in range(3)]
            long = manager.add_request(prompts()[3], max_new_tokens=100)
            names += [manager.add_request(prompts()[index]) for index in range(3, 6)]
    else:
        long = manager.add_request(prompts()[3], max_new_tokens=100)
    result = manager.get_result(long, timeout=60)
    assert "There is no memory for a prompt of 20 tokens and 100 new ones; expected fewer than 120" in result.error
    assert texts_of(manager, names) == [alone(index) for index in range(len(names))]
    assert texts_of(manager, [manager.add_request(prompts()[7])]) == [alone(7)]


@pytest.mark.core
def test_requests_without_positions_fail_alone(running):
    target = build_target("opt", max_position_embeddings=32, ffn_dim=48, word_embed_proj_dim=32)
    manager = running(target, NoDrafter(target), eos_token_id=None)
    names = manager.add_requests([[5] * 6, [5] * 40, [5] * 28])
    first, second, third = (manager.get_result(name, timeout=60) for name in names)
    assert first.error is None and len(first.generated_tokens) == NEW
    assert second.error.startswith("A prompt has 40 tokens, but OPTForCausalLM has 32 positions")
    assert third.error.startswith("The request has 28 tokens and has not ended after 5 new ones")


@pytest.mark.core_for(is_captured=[False])
@pytest.mark.parametrize("is_captured", [False, True])
def test_a_request_has_its_own_sampling(running, monkeypatch, is_captured):
    """Sampled with a seed or greedy, beside others, it says what it says alone."""
    target = copy.deepcopy(tiny_target("llama"))
    if is_captured:
        tape_on_cpu(monkeypatch)
    drafter = copy_of(target, noise=0.01).configure(3, draft_probs=True, compile_rounds=False)
    manager = running(target, drafter, rows=3, config={"per_request_processors": True})
    every = [
        {"do_sample": True, "temperature": 1.5, "seed": 3},
        {},
        {"do_sample": True, "temperature": 0.8, "top_k": 5, "seed": 4},
        {"do_sample": True, "top_k": 0, "top_p": 0.6, "seed": 5},
        {"do_sample": True, "temperature": 0.0},
        {"do_sample": True, "temperature": 2.0, "top_k": 20, "top_p": 0.9, "seed": 6},
    ]
    names = [manager.add_request(prompts()[index], **options) for index, options in enumerate(every)]
    for index, (text, options) in enumerate(zip(texts_of(manager, names), every, strict=True)):
        options, prompt = {**GREEDY, **options}, torch.tensor([prompts()[index]])
        if options.get("temperature") == 0.0 or not options["do_sample"]:
            assert text == alone(index)
            continue
        options["seeds"] = [options.pop("seed")]
        out = target.generate(prompt, assistant_model=drafter, **options)
        assert text == out[0, prompt.shape[1] :].tolist(), options
    options = {"do_sample": True, "seed": 9, "temperature": 1.5}
    name = manager.add_request(prompts()[0], **options, top_k=0)
    again = manager.add_request(prompts()[0], **options, top_k=2**70)  # as many as there are
    assert manager.get_result(name, timeout=60).generated_tokens == manager.get_result(again).generated_tokens


def test_a_managers_seed_repeats_its_texts(running):
    target = tiny_target("llama")
    texts = []
    for _ in range(2):
        manager = running(target, copy_of(target).configure(3), config={"seed": 5}, do_sample=True, temperature=1.5)
        texts.append(texts_of(manager, manager.add_requests(prompts()[:5])))
    assert texts[0] == texts[1] != [alone(index) for index in range(5)]


def test_stop_strings_are_looked_for_where_they_may_end(monkeypatch):
    """What ends a request is what transformers finds, and is made once for a set of strings."""
    tokenizer, reads = word_tokenizer(), []
    random.seed(0)
    texts = [[random.randrange(100) for _ in range(random.randrange(1, 9))] for _ in range(200)]
    for number in (3, 40):
        strings = [tokenizer.decode([number]), tokenizer.decode([number + 1, number + 2])]
        theirs, ours = StopStringCriteria(tokenizer, strings), manager_requests.StopStrings(tokenizer, strings)
        endings = [[number], [5, number], [number + 1, number + 2], [number + 2, number + 1], [9, number + 1]]
        found = [bool(ours(torch.tensor([text]), None).all()) for text in (*texts, *endings)]
        assert found == [bool(theirs(torch.tensor([text]), None).all()) for text in (*texts, *endings)]
        assert any(found) and not all(found)
    embedding = torch.nn.functional.embedding
    monkeypatch.setattr(torch.nn.functional, "embedding", lambda *args: reads.append(args) or embedding(*args))
    assert not ours(torch.tensor([[5, 60]]), None).any() and not reads
    target = tiny_target("llama")
    factory = manager_of(target, random_eagle3(target))._factory
    first, again = (factory._stop_strings(["a", "b"], tokenizer) for _ in range(2))
    assert again is first and factory._stop_strings("a", tokenizer) is not first


def test_stop_strings_of_a_request(running, monkeypatch):
    text, texts = Request.text.fget, []
    monkeypatch.setattr(Request, "text", property(lambda self: texts.append(self) or text(self)))
    target, tokenizer = tiny_target("llama"), word_tokenizer()
    manager = running(target, copy_of(target, noise=0.01))
    whole = alone(0, new=40, end=())
    word = tokenizer.decode([whole[10]])
    options = {"max_new_tokens": 40, "eos_token_id": -1}
    names = [
        manager.add_request(prompts()[0], stop_strings=[word], tokenizer=tokenizer, **options),
        manager.add_request(prompts()[0], **options),
    ]
    stopped, free = texts_of(manager, names)
    expected = target.generate(
        torch.tensor([prompts()[0]]),
        do_sample=False, max_new_tokens=40, stop_strings=[word], tokenizer=tokenizer,
    )  # fmt: skip
    assert stopped == expected[0, 5:].tolist() == whole[: len(stopped)] and len(stopped) < 40 and free == whole
    texts.clear()
    name = manager.add_request(prompts()[0], stop_strings=["none"], tokenizer=tokenizer, **options)
    none = manager.add_request(prompts()[0], stop_strings=[], tokenizer=tokenizer, **options)
    assert texts_of(manager, [name, none]) == [whole, whole]
    assert len(texts) < 10, "the text is not put together for every token"
    settings = running(target, manager.drafter, stop_strings=[word])  # as of a model that has some in its files
    name = settings.add_request(prompts()[0], tokenizer=tokenizer, **options)
    none = settings.add_request(prompts()[0], stop_strings=[], **options)
    assert texts_of(settings, [name, none]) == [stopped, whole]


WRONG = [
    ({"input_ids": []}, r"input_ids has shape \[0\]"),
    ({"input_ids": "text"}, "input_ids is 'text'; expected a list of token ids, as a tokenizer makes"),
    ({"input_ids": [96]}, "holds the token 96, but LlamaForCausalLM has tokens 0 to 95"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0; expected an int of at least 1"),
    ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; expected a token id or a list"),
    ({"eos_token_id": 2**63}, "eos_token_id is 9223372036854775808; expected a token id"),
    ({"request_id": [1]}, r"request_id is \[1\]; expected a str"),
    ({"stop_strings": 5}, "stop_strings is 5; expected str \\| list\\[str\\] \\| None"),
    ({"eos_token_id": list(range(17))}, "eos_token_id has 17 tokens; expected at most 16"),
    ({"seed": 0.5}, "seed is 0.5; expected an integer of 64 bits"),
    ({"stop_strings": "x"}, "stop_strings is 'x', but the request has no tokenizer"),
    ({"num_beams": 3}, "num_beams cannot be set for a request; expected some of seed"),
    ({"temperature": 0.3}, "temperature was set for a request, but the manager samples all requests alike"),
]
WRONG_SAMPLING = [
    ({"temperature": -1.0}, "temperature is -1.0; expected a number of at least 0"),
    ({"temperature": "hot"}, "temperature is 'hot'; expected a number of at least 0"),
    ({"top_p": "most"}, "top_p is 'most'; expected a number above 0"),
    ({"top_k": 1.5}, "top_k is 1.5; expected an int of at least 0"),
    ({"top_p": 0.0}, "top_p is 0.0; expected a number above 0"),
]


@pytest.mark.core
def test_wrong_requests_are_refused(running):
    target = tiny_target("llama")
    manager = running(target, random_eagle3(target))
    names = [manager.add_request(prompts()[3])]
    for options, words in WRONG:
        with pytest.raises(ValueError, match=words):
            manager.add_request(**{"input_ids": prompts()[0], **options})
    with pytest.raises(ValueError, match=r"inputs\[1\] has shape \[0\]"):
        manager.add_requests([[5], []])
    with pytest.raises(ValueError, match="The request twice is not over; expected another request_id"):
        for _ in range(2):
            names.append(manager.add_request(prompts()[2], "twice", max_new_tokens=100, eos_token_id=-1))
    with pytest.raises(ValueError, match=r"eos_token_id is tensor\(\[5\]\); expected a token id or a list"):
        manager_of(target, random_eagle3(target), eos_token_id=torch.tensor([5])).add_request(prompts()[0])
    sampling = manager_of(target, random_eagle3(target), config={"per_request_processors": True})
    for options, words in WRONG_SAMPLING:
        with pytest.raises(ValueError, match=words):
            sampling.add_request(prompts()[0], **options)
    assert texts_of(manager, names) == [alone(3), alone(2, new=100, end=())]


@pytest.mark.core
def test_what_is_not_supported_is_refused_at_once():
    target = tiny_target("llama")
    drafter = random_eagle3(target)
    wrong = [
        ({"nonsense": 3}, r"nonsense is no setting of a manager"),
        ({"num_beams": 2}, "works with greedy search and sampling"),
        ({"min_new_tokens": "x", "eos_token_id": None}, "min_new_tokens is 'x'; expected Real"),
        ({"min_p": "x"}, "min_p is 'x'; expected Real"),
        ({"hints": "x"}, r"workload_hints is 'x'; expected WorkloadHints \| None"),
        ({"max_new_tokens": None, "max_length": 9}, "max_length is 9, which counts"),
        ({"config": {"max_requests_per_batch": 0}}, "max_requests_per_batch is 0"),
        ({"config": {"max_requests_per_batch": "all"}}, "max_requests_per_batch is 'all'; expected an int"),
        ({"guidance_scale": 1.3}, "UnbatchedClassifierFreeGuidanceLogitsProcessor keeps state"),
    ]
    for options, words in wrong:
        with pytest.raises(ValueError, match=words):
            manager_of(target, drafter, **options)
    stock = tiny_target(STOCK_FAMILY)
    with pytest.raises(ValueError, match=r"runs on the static engine, but PhimoeForCausalLM .* runs on the stock"):
        manager_of(stock, random_eagle3(stock))


def test_a_full_queue(running, monkeypatch):
    target = tiny_target("llama")
    manager = running(target, copy_of(target, noise=0.01), rows=1, config={"max_queue_size": 2})
    monkeypatch.setattr(manager_thread, "SECONDS_TO_WAIT", 0.05)
    with manager.pause():
        names = [manager.add_request(prompts()[index]) for index in range(2)]
        with pytest.raises(queue.Full, match="2 requests wait, as many as may"):
            manager.add_request(prompts()[0])
        with pytest.raises(queue.Full, match="2 requests wait, as many as may"):
            manager.check_room()

        async def ask():
            start = time.perf_counter()
            with pytest.raises(queue.Full):
                manager.add_request(prompts()[0])
            return time.perf_counter() - start

        monkeypatch.setattr(manager_thread, "SECONDS_TO_WAIT", 10)
        assert asyncio.run(ask()) < 5, "an event loop is not held up"
    names.append(manager.add_request(prompts()[2]))  # waits for room
    assert texts_of(manager, names) == [alone(index) for index in range(3)]


@pytest.mark.core
def test_handlers_of_an_event_loop(running):
    target = tiny_target("llama")
    manager = running(target, copy_of(target, noise=0.01))

    async def ask(index, is_late):
        done, got = asyncio.get_running_loop().create_future(), []

        def handle(result):
            got.append(result)
            if result.is_finished():
                done.set_result(None)

        name = f"mine-{index}"
        if not is_late:
            manager.register_result_handler(name, handle)
        manager.add_request(prompts()[index], name, streaming=True)
        if is_late:
            await asyncio.sleep(0.2)
            manager.register_result_handler(name, handle)
        await asyncio.wait_for(done, 60)
        return [one.generated_tokens for one in got]

    async def ask_all():
        return await asyncio.gather(*(ask(index, index % 2 == 0) for index in range(6)))

    async def ask_wrongly():
        manager.register_result_handler("wrong", print)
        with pytest.raises(ValueError, match="max_new_tokens is 0"):
            manager.add_request(prompts()[0], "wrong", max_new_tokens=0)

    async def ask_beside_one_that_fails():
        loop, done, errors = asyncio.get_running_loop(), asyncio.Event(), []
        loop.set_exception_handler(lambda loop, context: errors.append(context))
        with manager.pause():
            manager.register_result_handler("bad", lambda result: {}[0])
            manager.register_result_handler("good", lambda result: done.set())
            manager._queue.add(
                [manager._factory.make(prompts()[1], name, 1, False, False, None, {})[0] for name in ("bad", "good")]
            )
        await asyncio.wait_for(done.wait(), 10)
        assert "handler of the request bad failed" in errors[0]["message"]

    asyncio.run(ask_wrongly())
    asyncio.run(ask_beside_one_that_fails())
    for index, texts in enumerate(asyncio.run(ask_all())):
        assert texts[-1] == alone(index) and texts == sorted(texts, key=len)
    assert manager._queue.has_no_results


def test_captured_rounds_and_warmup(monkeypatch, running):
    """After the warmup requests capture nothing, whatever number of them comes."""
    captures = replay_on_cpu(monkeypatch)
    monkeypatch.setattr(buckets, "FEWEST_CAPTURED_ROWS", 4)
    target = copy.deepcopy(tiny_target("llama"))
    drafter = random_eagle3(target).configure(3, compile_rounds=False)
    drafter.num_assistant_tokens = 3
    manager = running(target, drafter, rows=16, hints=WorkloadHints(200, 20))
    assert not manager.warmed_up
    manager.warmup()
    count = captures.count
    assert manager.warmed_up and count > 2
    first = manager.add_request(prompts()[0])
    assert texts_of(manager, [first]) == [alone(0)]
    names = [manager.add_request(prompt) for prompt in prompts()]
    assert texts_of(manager, names) == [alone(index) for index in range(12)]
    assert captures.count == count
    manager.stop()
    assert len(drafter.sessions) == 0, "stop() gives the memory back"


def test_warmup_while_there_are_no_requests(monkeypatch, running):
    """Requests are answered before all numbers of rows are captured; afterwards they capture nothing."""
    captures = replay_on_cpu(monkeypatch)
    monkeypatch.setattr(buckets, "FEWEST_CAPTURED_ROWS", 4)
    target = copy.deepcopy(tiny_target("llama"))
    manager = running(target, NoDrafter(target), rows=16, hints=WorkloadHints(200, 20))
    manager.stop()
    manager.warmup(block=False)
    assert captures.count == 0 and not manager.warmed_up
    groups = len(manager._rounds.warm_ups)
    first = manager.add_request(prompts()[0])
    manager.start()
    assert texts_of(manager, [first]) == [alone(0)]
    assert len(manager._rounds.warm_ups) == groups > 1, "requests go first"
    with manager.pause():
        assert not manager.warmed_up
    while not manager.warmed_up:
        assert manager.is_running()
        time.sleep(0.01)
    count = captures.count
    names = [manager.add_request(prompt) for prompt in prompts()]
    assert texts_of(manager, names) == [alone(index) for index in range(12)]
    assert captures.count == count
    manager.warmup(block=False)
    manager.stop()
    assert not manager.warmed_up, "stop() waits for requests only"


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_steps_of_fused_optimizers_are_seen(running, optimizer):
    """A prompt that is asked again after one is not answered from keys of before."""
    target = build_target("llama")
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": END}
    prompt = torch.arange(3, 60).tolist()
    manager = running(target, NoDrafter(target))
    before = texts_of(manager, [manager.add_request(prompt)])[0]
    for one in target.parameters():
        one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(one.numel()))
    optimizer(target.parameters(), lr=0.05, fused=True).step()
    after = texts_of(manager, [manager.add_request(prompt)])[0]
    assert after == target.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() != before


def test_all_sequences_of_a_prompt_are_cancelled(running):
    """By the name that `add_request` has returned; those that wait and those that run. One of them alone by its own."""
    target = tiny_target("llama")
    manager = running(target, NoDrafter(target), rows=2, num_return_sequences=4, do_sample=True, eos_token_id=-1)
    name = manager.add_request(prompts()[0], max_new_tokens=10_000)
    assert name == "req_0" and len(manager._queue.active) == 4
    while not any(one.tokens for one in manager._queue.active.values()):
        time.sleep(0.005)
    manager.cancel_request(f"{name}__child#1")
    assert manager.get_result(f"{name}__child#1", timeout=20).status == RequestStatus.FAILED
    assert len(manager._queue.active) == 3
    manager.cancel_request(name)
    for one in (name, f"{name}__child#0", f"{name}__child#2"):
        assert "was cancelled" in manager.get_result(one, timeout=20).error
    assert not manager._queue.active


def test_requests_that_do_not_fit_a_queue_leave_nothing_behind(running, monkeypatch):
    """None of them has an id that its caller knows."""
    monkeypatch.setattr(manager_thread, "SECONDS_TO_WAIT", 0.05)
    target = tiny_target("llama")
    manager = running(target, NoDrafter(target), rows=1, config={"max_queue_size": 2})
    first = manager.add_request([5, 6], max_new_tokens=10_000, eos_token_id=-1)
    while not any(one.tokens for one in manager._queue.active.values()):
        time.sleep(0.005)
    with pytest.raises(queue.Full, match="2 requests wait"):
        manager.add_requests(prompts()[:4], max_new_tokens=10_000, streaming=True)
    manager.cancel_request(first)
    assert manager.get_result(timeout=20).request_id == first
    while manager._queue.active:
        time.sleep(0.005)
    assert manager.get_result(timeout=0.05) is None and manager._queue.has_no_results
    assert texts_of(manager, [manager.add_request(prompts()[0])]) == [alone(0)]


@pytest.mark.core
def test_integers_of_numpy(running):
    import numpy

    target = tiny_target("llama")
    manager = running(target, NoDrafter(target), config={"per_request_processors": True})
    options = {"max_new_tokens": numpy.int64(NEW), "eos_token_id": list(map(numpy.int32, END))}
    name = manager.add_request(prompts()[0], seed=numpy.int64(3), top_k=numpy.int32(1), do_sample=True, **options)
    assert texts_of(manager, [name]) == [alone(0)]
    with pytest.raises(ValueError, match="max_new_tokens is True; expected an int of at least 1"):
        manager.add_request(prompts()[0], max_new_tokens=True)
    with pytest.raises(ValueError, match="max_queue_size is -1; expected an int of at least 0"):
        manager_of(target, NoDrafter(target), config={"max_queue_size": -1})


# Prompts are packed; they are not, since there is one row, or for recurrent layers.
@pytest.mark.core_for(family=["qwen3-next"])
@pytest.mark.parametrize(("family", "rows"), [("llama", 4), ("llama", 1), ("qwen3-next", 4)])
def test_long_prompts_end_between_chunks(running, monkeypatch, family, rows):
    """By `cancel_request` and by a hard stop; others that came with them, and later, say what they say alone."""
    monkeypatch.setattr(session_prefill, "EAGER_COLUMNS", 8)
    monkeypatch.setattr(buckets, "PACKED_TOKENS", (8,))
    # Columns of the passes over a prompt.
    run, run_chunk = [], session_prefill.SessionPrefill._run_chunk

    def slowly(self, columns):
        run.append(columns)
        time.sleep(0.003 * columns)
        return run_chunk(self, columns)

    target = tiny_target(family)
    manager = running(target, random_eagle3(target), rows=rows)
    first = manager.add_requests([prompts()[one] for one in (0, 2, 3)])
    assert texts_of(manager, first) == [alone(one, family) for one in (0, 2, 3)]
    monkeypatch.setattr(session_prefill.SessionPrefill, "_run_chunk", slowly)
    for ends in ("cancel", "stop"):
        run.clear()
        name = manager.add_request([5] * 200)
        while not run:
            time.sleep(0.001)
        if ends == "cancel":
            manager.cancel_request(name)
            assert "was cancelled" in manager.get_result(name, timeout=20).error
            assert sum(run) <= 24
            others = [manager.add_request(prompts()[one]) for one in (0, 3)]
            assert texts_of(manager, others) == [alone(0, family), alone(3, family)]
    manager.stop(hard_stop=True)
    assert sum(run) <= 24 and not manager.is_running()
    assert "stopped" in manager.get_result(name, timeout=1).error
