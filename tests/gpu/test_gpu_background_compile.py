"""On a GPU: rounds run as they are until another process has compiled them, and generate the same afterwards."""

import gc
import threading
import time
import weakref

import pytest
import torch
from decoding_modes import MODES
from oracle import RANDOM_DRAFTERS, copy_of
from targets import on_gpu, padded_prompts

from hf_specdec.engine import lease

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# The first one's drafts are partly accepted.
KINDS = {"noisy copy": lambda target: copy_of(target, noise=0.02), **RANDOM_DRAFTERS}
SECONDS = 200


def options_of(drafter, lengths=(9, 1, 5), **options):
    inputs = {name: tensor.to("cuda") for name, tensor in padded_prompts(list(lengths)).items()}
    return {**inputs, "assistant_model": drafter, "num_assistant_tokens": 4, "max_new_tokens": 24, **options}


def is_ready(drafter):
    rounds = [one for _, session in drafter.sessions._idle for one in session.rounds._captured.values()]
    return all(one._compilation is None or one.is_to_be_replaced for one in rounds)


def wait_until_ready(drafter):
    start = time.monotonic()
    while not is_ready(drafter):
        assert time.monotonic() - start < SECONDS, "nothing was compiled"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("kind", "mode", "family"),
    [
        ("noisy copy", "greedy", "llama"),
        ("eagle3", "hot sampling", "llama"),
        ("mtp", "greedy", "qwen3"),
        ("dspark", "greedy", "gpt-oss"),
    ],
)
def test_replaced_rounds_generate_the_same(kind, mode, family):
    target = on_gpu(family)
    drafter = KINDS[kind](target).configure(compile_rounds="background")
    options = options_of(drafter, **MODES[mode]) | ({"seeds": 5} if MODES[mode]["do_sample"] else {})
    expected = target.generate(**options)
    assert drafter.stats.execution == "captured in one graph, not compiled yet"
    wait_until_ready(drafter)
    for _ in range(3):
        assert torch.equal(target.generate(**options), expected)
        assert drafter.stats.execution == "captured in one graph, compiled"
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.equal(target.generate(**options), expected), "kernels of the graph were unloaded"


def test_rounds_are_replaced_while_a_call_runs_and_others_compute(monkeypatch):
    """Meanwhile another thread runs the target, and compiles a function of its own."""
    target, replaced, ended = on_gpu("llama"), threading.Event(), threading.Event()
    replace_round, errors = lease.replace_round, []

    def noting(*args):
        replace_round(*args)
        replaced.set()

    monkeypatch.setattr(lease, "replace_round", noting)
    drafter = copy_of(target, noise=0.02).configure(compile_rounds="background")
    options = options_of(drafter, lengths=[9], do_sample=False, max_new_tokens=60)
    expected = target.generate(**options)
    inputs = options["input_ids"]

    def compute():
        try:
            logits, double = target(inputs).logits, torch.compile(lambda tensor: tensor * 2 + 1)
            while not ended.is_set():
                assert torch.equal(target(inputs).logits, logits)
                assert torch.equal(double(inputs), inputs * 2 + 1)
        except BaseException as error:
            errors.append(error)

    other = threading.Thread(target=compute)
    other.start()
    try:
        start = time.monotonic()
        while not replaced.is_set() and time.monotonic() - start < SECONDS:
            assert torch.equal(target.generate(**options), expected)
        for _ in range(3):
            assert torch.equal(target.generate(**options), expected)
    finally:
        ended.set()
        other.join()
    assert not errors and drafter.stats.execution == "captured in one graph, compiled"


def test_compiled_rounds_keep_no_weights_alive():
    target = on_gpu("llama")
    drafter = copy_of(target).configure(compile_rounds="background")
    options = options_of(drafter, do_sample=False)
    target.generate(**options)
    wait_until_ready(drafter)
    target.generate(**options)
    assert drafter.stats.execution == "captured in one graph, compiled"
    weights = [weakref.ref(one) for one in (*target.parameters(), *drafter.parameters())]
    drafter.release()
    gc.collect()
    before = torch.cuda.memory_allocated()
    size = sum(one.nbytes for one in target.parameters()) + sum(one.nbytes for one in drafter.parameters())
    del target, drafter, options
    gc.collect()
    assert all(one() is None for one in weights)
    assert torch.cuda.memory_allocated() <= before - size * 0.9


def test_rows_that_come_and_go():
    """Continuous batching with K chosen round by round."""
    target = on_gpu("llama")
    drafter = copy_of(target, noise=0.02).configure("auto", compile_rounds="background")
    lengths = [9, 1, 5, 12, 3, 3, 8, 2]
    inputs = [row[mask.bool()].tolist() for row, mask in zip(*padded_prompts(lengths).values(), strict=True)]
    config = target.generation_config
    config.do_sample, config.max_new_tokens = False, 40
    texts = []
    for _ in range(2):
        outputs = target.generate_batch(inputs, config, assistant_model=drafter, progress_bar=False)
        texts.append([outputs[name].generated_tokens for name in sorted(outputs)])
        wait_until_ready(drafter)
    assert texts[0] == texts[1]
