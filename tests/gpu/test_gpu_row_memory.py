"""Memory behind the rows of continuous batching on a GPU: the driver, shortage, graphs across commits."""

import functools
import gc
import threading

import pytest
import torch
from oracle import RANDOM_DRAFTERS, copy_of
from targets import on_gpu, set_policy, tiny_target
from transformers import ContinuousBatchingConfig, LlamaConfig, LlamaForCausalLM

from hf_specdec import NoDrafter, ops
from hf_specdec.engine.run import Run
from hf_specdec.memory.virtual_memory import RowMemory, committed_bytes, slot_unit
from hf_specdec.memory.virtual_pages import driver_can

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and driver_can(torch.device("cuda:0"))),
        reason="needs a CUDA device with virtual memory management, and cuda.bindings",
    ),
]

driver = pytest.importorskip("cuda.bindings.driver")
DEVICE = torch.device("cuda:0")
END = list(range(3, 96, 31))


@pytest.fixture(autouse=True)
def uses_virtual_memory(monkeypatch):
    set_policy(monkeypatch, "cuda", virtual_memory=True)


def new_memory(rows=4, token_bytes=65536, slots=None):
    return RowMemory(rows, slots or 8 * slot_unit(DEVICE), token_bytes, DEVICE)


def test_rows_get_memory_and_give_it_back():
    """16 GiB of it, since other processes on the GPU may take and give back some, too."""
    gc.collect()
    torch.cuda.empty_cache()
    free, counted = torch.cuda.mem_get_info(DEVICE)[0], committed_bytes(DEVICE)
    memory = new_memory(rows=64, token_bytes=1 << 20)
    view = memory.view(512, torch.bfloat16, 4, 64)
    assert view.shape == (64, 8 * slot_unit(DEVICE), 4, 64)
    memory.commit(5, 16000)
    assert memory.committed_slots[5] >= 16000 and committed_bytes(DEVICE) - counted == memory.committed >= 16000 << 20
    assert free - torch.cuda.mem_get_info(DEVICE)[0] > 12 << 30
    assert bool((view[5, :5000] == 0).all())
    view[5, :16000] = 1
    assert bool((view[5, :16000] == 1).all()) and bool((view[5, -1] == view[6, -1]).all())
    memory.trim(5, 1000)
    assert 1000 <= memory.committed_slots[5] < 3000
    assert bool((view[5, :1000] == 1).all())
    memory.commit(5, 5000)
    assert bool((view[5, 3000:5000] == 0).all()), "new memory is zero"
    memory.free()
    assert committed_bytes(DEVICE) == counted and free - torch.cuda.mem_get_info(DEVICE)[0] < 4 << 30


def test_memory_stays_as_long_as_a_view(monkeypatch):
    memory = new_memory()
    view = memory.view(0, torch.float32, 2, 16)
    memory.commit(1, 10)
    del memory
    gc.collect()
    view[1, :10] = 2.0
    assert view[1, :10].sum().item() == 640


def test_shortage_leaves_a_row_as_it_was(monkeypatch):
    memory = new_memory()
    memory.commit(2, 100)
    before = memory.committed
    set_policy(monkeypatch, "cuda", cache_bytes=committed_bytes(DEVICE) + (64 << 20))
    with pytest.raises(torch.OutOfMemoryError, match="bytes more for keys and values"):
        memory.commit(2, 8000)
    assert memory.committed == before and memory.committed_slots[2] >= 100


def test_shortage_within_a_commit_waits_for_the_device(monkeypatch):
    """Another process takes what there was between two pieces; the first of them are still to be zeroed."""
    memory = new_memory()
    memory.commit(2, 100)
    before, create, calls = memory.committed, driver.cuMemCreate, []

    def failing(*args):
        calls.append(args)
        return create(*args) if len(calls) < 4 else (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)

    monkeypatch.setattr(driver, "cuMemCreate", failing)
    torch.cuda._sleep(10**8)
    with pytest.raises(torch.OutOfMemoryError, match="driver has no memory left"):
        memory.commit(2, 8000)
    torch.cuda.synchronize()
    assert len(calls) == 4 and memory.committed == before and memory.committed_slots[2] >= 100


def test_rows_share_memory():
    memory = new_memory(rows=3, token_bytes=1 << 20)
    view = memory.view(0, torch.float32, 2, 16)
    for row in (0, 1):
        memory.commit(row, 256)
        view[row, :256] = torch.arange(256.0, device=DEVICE)[:, None, None] + 1000 * row
    held = memory.committed
    assert memory.share(2, 1, 200) and memory.committed == held and 180 < memory.committed_slots[2] <= 200
    last = memory.committed_slots[2]
    assert torch.equal(view[2, :last], view[1, :last])
    memory.commit(2, 256)
    view[2, last:256] = -1.0
    assert view[1, last:256].min() > 0
    memory.trim(1)
    assert bool((view[2, :last, 0, 0] == torch.arange(1000.0, 1000 + last, device=DEVICE)).all())
    memory.trim(2)
    assert memory.share(1, 0, 200) and bool((view[1, 10:190] == view[0, 10:190]).all())
    # The piece that is to be written from slot 101 on becomes a copy, in which others' slots do not change.
    assert memory.unshare(1, 101) == 101 and not memory.is_shared(1, 101)
    view[1, 101 : memory.committed_slots[1]] = -1.0
    assert torch.equal(view[1, 10:101], view[0, 10:101]) and view[0, 101:256].min() > 0
    memory.free()
    assert memory.committed == 0


def test_attention_reads_no_other_slots(monkeypatch):
    """Memory after the live slots holds NaN, or there is none; a graph is replayed across commits."""
    memory = new_memory(rows=3, token_bytes=2 * 2 * 4 * 64 * 2)
    keys, values = (memory.view(offset, torch.bfloat16, 4, 64) for offset in (1024, 1536))
    positions = torch.tensor([[40, 41], [100, 101], [7, 8]], device=DEVICE)
    for row in range(3):
        memory.commit(row, 128)
        keys[row, : memory.committed_slots[row]] = values[row, : memory.committed_slots[row]] = torch.nan
    query = torch.randn(3, 8, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    texts = torch.randn(2, 3, 600, 4, 64, device=DEVICE, dtype=torch.bfloat16)

    def attend():
        for span in (keys.shape[1], 1024):
            out = ops.attention(
                query, keys[:, :span].transpose(1, 2), values[:, :span].transpose(1, 2), positions, 0.125
            )
        return out

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for longer in (0, 400):
        if longer:
            memory.commit(1, 600)
            positions[1] += longer
        for row in range(3):
            end = int(positions[row, -1]) + 1
            keys[row, :end], values[row, :end] = texts[0, row, :end], texts[1, row, :end]
        graph.replay()
        with ops.references():
            expected = ops.attention(
                query, texts[0].transpose(1, 2).contiguous(), texts[1].transpose(1, 2).contiguous(), positions, 0.125
            )
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


@functools.cache
def prompts(lengths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 90, (length,), generator=generator).tolist() for length in lengths]


@functools.cache
def alone(lengths, new):
    target, options = tiny_target("llama"), {"max_new_tokens": new, "do_sample": False, "eos_token_id": END}
    return [target.generate(torch.tensor([one]), **options)[0, len(one) :].tolist() for one in prompts(lengths)]


def in_rows(target, drafter, lengths, rows, new):
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": END, "assistant_model": drafter}
    config = ContinuousBatchingConfig(max_requests_per_batch=rows)
    results = target.generate_batch(prompts(lengths), None, config, **options)
    return [one.generated_tokens for one in results.values()]


@pytest.mark.parametrize("kind", ["none", "eagle3", "copy"])
def test_requests_wait_for_memory(monkeypatch, kind):
    """Rows of a tiny target hold 2 MiB each: with memory for three of them, others lose their rows and come back."""
    makers = {"none": NoDrafter, "copy": functools.partial(copy_of, noise=0.02), **RANDOM_DRAFTERS}
    target = on_gpu("llama")
    drafter = makers[kind](target).configure(compile_rounds=False)
    lengths, waits, make_room = (5, 1, 9, 200, 3, 130, 7, 30), [], Run.preempt
    monkeypatch.setattr(Run, "preempt", lambda self: (waits.append(self), make_room(self)))
    assert in_rows(target, drafter, lengths, 8, 40) == alone(lengths, 40)
    assert not waits
    drafter.release()
    size = 2 << 20
    monkeypatch.setattr("hf_specdec.memory.virtual_memory.STEP_SLOTS", 1)
    for count in (8, 3, 1):
        set_policy(monkeypatch, "cuda", cache_bytes=committed_bytes(DEVICE) + count * size)
        assert in_rows(target, drafter, lengths, 8, 40) == alone(lengths, 40)
        drafter.release()


@pytest.mark.parametrize("is_compiled", [False, True])
def test_graphs_are_used_again_by_longer_texts(is_compiled):
    target = on_gpu("llama")
    drafter = copy_of(target, noise=0.02).configure(compile_rounds=is_compiled)
    for lengths in ((5, 9), (5, 200, 9, 2)):
        assert in_rows(target, drafter, lengths, 4, 40) == alone(lengths, 40)
    assert drafter.stats.execution.startswith("captured in one graph")


@pytest.mark.parametrize("is_compiled", [False, True])
def test_texts_that_begin_alike_share_memory(monkeypatch, is_compiled):
    """32 tokens of this target fill a page of 2 MiB."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8}
    config = LlamaConfig(**sizes, head_dim=128, num_hidden_layers=8, vocab_size=96, initializer_range=0.05)
    target = LlamaForCausalLM(config).to(DEVICE).eval()
    beginning = prompts((300,))[0]
    texts = [beginning[:length] + one for length in (300, 290, 300, 200) for one in prompts((1, 3, 30))]
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": END}
    expected = [target.generate(torch.tensor([one], device=DEVICE), **options)[0, len(one) :].tolist() for one in texts]
    shared = []
    monkeypatch.setattr(
        RowMemory, "share", lambda *args, share=RowMemory.share: shared.append(share(*args)) or shared[-1]
    )
    for drafter in (NoDrafter(target), RANDOM_DRAFTERS["eagle3"](target), copy_of(target, noise=0.02)):
        drafter.configure(compile_rounds=is_compiled)
        for _ in range(2):
            shared.clear()
            results = target.generate_batch(
                texts, None, ContinuousBatchingConfig(max_requests_per_batch=4), **options, assistant_model=drafter
            )
            assert [one.generated_tokens for one in results.values()] == expected
            # A row that shares stays with what it has of the next text, and is not to share again.
            assert len(shared) >= 3 and all(shared)
            assert sum(one.cached_tokens for one in drafter.stats.rows) > 9 * 190
        drafter.release()


def test_two_threads_have_rows_of_their_own():
    target, lengths, found = on_gpu("llama"), (5, 1, 9, 60, 3, 13), {}
    drafters = [copy_of(target, noise=0.02).configure(compile_rounds=False) for _ in range(2)]

    def run(number):
        with torch.cuda.stream(torch.cuda.Stream()):
            found[number] = in_rows(target, drafters[number], lengths, 4, 40)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: alone(lengths, 40), 1: alone(lengths, 40)}
