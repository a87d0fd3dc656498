"""Continuous batching on a GPU: captured rounds, groups and rows of many sizes."""

import functools
import gc
import time

import pytest
import torch
from oracle import RANDOM_DRAFTERS, copy_of
from targets import on_gpu, tiny_target
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.utils import WorkloadHints
from varying_drafts import vary_drafts

from hf_specdec import NoDrafter, SuffixDrafter
from hf_specdec.engine import lease
from hf_specdec.engine.continuous import ContinuousRunner
from hf_specdec.graphs import buckets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

END, NEW = list(range(3, 96, 8)), 16
LENGTHS = [5, 1, 9, 20, 3, 3, 7, 30, 2, 1, 4, 13, 60, 2, 8, 11]
KINDS = {
    **RANDOM_DRAFTERS,
    "noisy-copy": functools.partial(copy_of, noise=0.02),
    "none": NoDrafter,
    "suffix": SuffixDrafter,
}


@functools.cache
def prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 90, (length,), generator=generator).tolist() for length in LENGTHS]


@functools.cache
def alone(family):
    """What `generate()` without a drafter says on a CPU."""
    target = tiny_target(family)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": END}
    return [target.generate(torch.tensor([one]), **options)[0, len(one) :].tolist() for one in prompts()]


def generate_batch(target, drafter, rows, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": END, **options}
    config = ContinuousBatchingConfig(max_requests_per_batch=rows)
    out = target.generate_batch(prompts(), None, config, assistant_model=drafter, **options)
    return [result.generated_tokens for result in out.values()]


@pytest.mark.parametrize("rows", [1, 6, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_identical_to_generation_alone(kind, rows):
    target = on_gpu("llama")
    drafter = KINDS[kind](target).configure(compile_rounds=False)
    for _ in range(2):
        assert generate_batch(target, drafter, rows) == alone("llama")
        assert drafter.stats.execution.startswith("captured in one graph")


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "deepseek-v3"])
def test_compiled_rounds(family):
    target = on_gpu(family)
    drafter = RANDOM_DRAFTERS["eagle3"](target).configure(compile_rounds=True)
    assert generate_batch(target, drafter, 4) == alone(family)
    assert drafter.stats.execution == "captured in one graph, compiled"


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "none"])
def test_any_number_of_drafts_in_each_round(monkeypatch, kind):
    """A graph for each number of drafts, and one of catching up for each block that was too wide."""
    asked = vary_drafts(monkeypatch, [3, 0, 0, 1, 4, 3, 1, 0])
    target = on_gpu("llama")
    drafter = KINDS[kind](target).configure(4, compile_rounds=False)
    for _ in range(2):
        assert generate_batch(target, drafter, 6) == alone("llama")
        assert drafter.stats.execution.startswith("captured in one graph")
    assert set(asked) == {0, 1, 3, 4} == set(drafter.stats.rounds_by_k)
    session = max((one for _, one in drafter.sessions._idle), key=lambda one: len(one.rounds))
    assert len(session.rounds) == 4 and len(session.catch_ups) == 3


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_any_number_of_drafts_in_compiled_rounds(monkeypatch, kind):
    vary_drafts(monkeypatch, [2, 0, 1])
    target = on_gpu("llama")
    drafter = KINDS[kind](target).configure(2, compile_rounds=True)
    assert generate_batch(target, drafter, 6) == alone("llama")
    assert drafter.stats.execution == "captured in one graph, compiled"


def test_numbers_of_drafts_by_time(monkeypatch):
    """All that are worth trying are tried where graphs cost nothing; the device's times are read."""
    monkeypatch.setattr(lease.SessionLease, "_price", lambda *args: 0.0)
    by_rows, round_times = {}, lease.round_times
    monkeypatch.setattr(lease, "round_times", lambda *args: by_rows.setdefault(args[2].batch, round_times(*args)))
    target = on_gpu("llama")
    drafter = copy_of(target).configure(compile_rounds=False)
    for _ in range(3):
        assert generate_batch(target, drafter, 6, max_new_tokens=120)[0][:NEW] == alone("llama")[0]
    session = max((one for _, one in drafter.sessions._idle), key=lambda one: len(one.rounds))
    times = by_rows[len(session.state.lengths)]
    assert len(session.rounds) > 1 and times.total > 0
    assert all(0 < times.milliseconds(count) < 1e3 for _, count, _ in session.rounds)


@pytest.mark.parametrize("kind", KINDS)
def test_requests_move_to_fewer_rows(monkeypatch, kind):
    monkeypatch.setattr(buckets, "FEWEST_CAPTURED_ROWS", 1)
    monkeypatch.setattr(buckets, "ROWS_TO_FEWER", 2)
    monkeypatch.setattr(ContinuousRunner, "_is_worth_moving", lambda *args: True)
    target = on_gpu("llama")
    drafter = KINDS[kind](target).configure(compile_rounds=False)
    for _ in range(2):
        assert generate_batch(target, drafter, 16) == alone("llama")
    rows = {len(session.state.lengths) for _, session in drafter.sessions._idle}
    assert 16 in rows and min(rows) < 16


def test_sampled_requests_are_those_of_generate_alone():
    target = on_gpu("llama")
    drafter = KINDS["noisy-copy"](target).configure(3, compile_rounds=False)
    options = {"do_sample": True, "temperature": 1.3, "top_k": 40}
    texts = generate_batch(target, drafter, 4, seeds=list(range(len(LENGTHS))), **options)
    for seed, (prompt, text) in enumerate(zip(prompts(), texts, strict=True)):
        given = torch.tensor([prompt], device="cuda")
        options |= {"max_new_tokens": NEW, "eos_token_id": END}
        out = target.generate(given, assistant_model=drafter, seeds=[seed], **options)
        assert out[0, len(prompt) :].tolist() == text


def test_rows_that_do_not_fit_into_memory_become_fewer(monkeypatch):
    """Buffers of 16 rows and of 8 are refused, as if memory did not suffice."""
    target, rows = on_gpu("llama"), []
    drafter = KINDS["eagle3"](target).configure(compile_rounds=False)
    capture_round = lease.capture_round

    def short_of_memory(session, *args):
        rows.append(len(session.state.lengths))
        if rows[-1] > 4:
            raise torch.OutOfMemoryError("out of memory, in a test")
        return capture_round(session, *args)

    monkeypatch.setattr(lease, "capture_round", short_of_memory)
    assert generate_batch(target, drafter, None, num_assistant_tokens=5) == alone("llama")
    assert rows == [16, 8, 4]


def test_many_calls_leak_no_memory():
    target = on_gpu("llama")
    drafter = KINDS["eagle3"](target).configure(compile_rounds=False)
    used = []
    for _ in range(6):
        generate_batch(target, drafter, 4, num_assistant_tokens=5)
        gc.collect()  # also of tensors of other tests, which are freed sooner or later
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[2] == used[-1]
    drafter.release()
    assert torch.cuda.memory_allocated() < used[-1]


def manager_of(target, drafter, rows=16, config=None, **options):
    config = ContinuousBatchingConfig(max_requests_per_batch=rows, **(config or {}))
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": END, **options}
    return target.continuous_batching_context_manager(
        continuous_batching_config=config,
        workload_hints=WorkloadHints(100, NEW),
        assistant_model=drafter,
        **options,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_arrive(monkeypatch, kind):
    """After the warmup nothing is captured; other calls run between rounds."""
    target = on_gpu("llama")
    drafter = KINDS[kind](target).configure(compile_rounds=False)
    if kind != "none":
        drafter.num_assistant_tokens = 3
    captured, capture_round = [], lease.capture_round
    monkeypatch.setattr(lease, "capture_round", lambda *args: captured.append(args) or capture_round(*args))
    with manager_of(target, drafter) as manager:
        count = len(captured)
        names = []
        for prompt in prompts():
            names.append(manager.add_request(prompt))
            time.sleep(0.003)
        assert [manager.get_result(name, timeout=60).generated_tokens for name in names] == alone("llama")
        assert len(captured) == count >= 1
        long = manager.add_request(prompts()[0], max_new_tokens=300, eos_token_id=-1)
        given = torch.tensor([prompts()[3]], device="cuda")
        options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": END}
        for other in (drafter, None):
            out = target.generate(given, assistant_model=other, **options)
            assert out[0, given.shape[1] :].tolist() == alone("llama")[3]
        assert len(manager.get_result(long, timeout=60).generated_tokens) == 300


def test_requests_with_their_own_sampling():
    target = on_gpu("llama")
    drafter = KINDS["noisy-copy"](target).configure(3, draft_probs=True, compile_rounds=False)
    every = [
        {},
        {"do_sample": True, "temperature": 1.4},
        {"do_sample": True, "top_k": 6},
        {"do_sample": True, "top_p": 0.7},
    ]
    with manager_of(target, drafter, config={"per_request_processors": True}) as manager:
        names = [
            manager.add_request(prompt, seed=number, **every[number % 4]) for number, prompt in enumerate(prompts())
        ]
        texts = [manager.get_result(name, timeout=60).generated_tokens for name in names]
    for number, (prompt, text) in enumerate(zip(prompts(), texts, strict=True)):
        if not every[number % 4]:
            assert text == alone("llama")[number]
            continue
        options = {"max_new_tokens": NEW, "eos_token_id": END, "seeds": [number], **every[number % 4]}
        out = target.generate(torch.tensor([prompt], device="cuda"), assistant_model=drafter, **options)
        assert out[0, len(prompt) :].tolist() == text, options


def test_stop_frees_the_memory():
    target = on_gpu("llama")
    drafter = KINDS["eagle3"](target).configure(compile_rounds=False)
    with manager_of(target, drafter) as manager:
        manager.get_result(manager.add_request(prompts()[0]), timeout=60)
    assert len(drafter.sessions) == 0
