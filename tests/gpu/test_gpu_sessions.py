"""On a GPU: validity of captured rounds; calls on several streams and devices."""

import copy
import gc
import json
import threading
import weakref

import pytest
import torch
from adapters import with_adapters
from decoding_modes import MODES
from oracle import RANDOM_DRAFTERS, copy_of
from targets import NUM_LAYERS, padded_prompts, set_policy, tiny_target

from hf_specdec.engine import lease, sessions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

LENGTHS = [9, 1, 5]

# The first one's drafts are partly accepted: of four 1.4 in greedy decoding, 1.8 in sampling.
KINDS = {"noisy copy": lambda target: copy_of(target, noise=0.02), **RANDOM_DRAFTERS}


def target_on(device, num_layers=NUM_LAYERS):
    return copy.deepcopy(tiny_target("llama", num_layers=num_layers)).to(device)


def drafter_of(target, kind="noisy copy", is_compiled=False):
    return KINDS[kind](target).configure(compile_rounds=is_compiled)


def generate(target, drafter=None, lengths=LENGTHS, seed=0, mode="greedy", device=None, **options):
    """Tokens that `target` generates for prompts on `device`, or its own."""
    if drafter is not None:
        options |= {"assistant_model": drafter, "num_assistant_tokens": 4}
        options |= {"seeds": 5} if MODES[mode]["do_sample"] else {}
    prompts = {name: tensor.to(device or target.device) for name, tensor in padded_prompts(lengths, seed=seed).items()}
    return target.generate(**prompts, **{"max_new_tokens": 24, **MODES[mode], **options}).tolist()


def check(target, drafter):
    """Captured rounds generate what plain `generate()` generates; it is returned."""
    generated = generate(target, drafter)
    assert generated == generate(target)
    assert drafter.stats.execution.startswith("captured in one graph")
    return str(generated)


@pytest.fixture
def captures(monkeypatch):
    """Rounds that were captured, as weak references."""
    made = []
    capture_round = lease.capture_round

    def noting(*args):
        captured = capture_round(*args)
        made.append(weakref.ref(captured))
        return captured

    monkeypatch.setattr(lease, "capture_round", noting)
    return made


@pytest.mark.parametrize("is_compiled", [False, True])
def test_adapters_switched_between_calls(captures, is_compiled):
    target = target_on("cuda", num_layers=3)
    drafter = drafter_of(target, is_compiled=is_compiled)
    adapted = with_adapters(target)
    first = {"a": check(target, drafter)}
    adapted.set_adapter("b")
    first["b"] = check(target, drafter)
    adapted.set_adapter("a")
    assert check(target, drafter) == first["a"] and len(captures) == 1
    with adapted.disable_adapter():
        first["off"] = check(target, drafter)
        assert 1.2 < drafter.stats.acceptance_length < 4.5
    assert check(target, drafter) == first["a"] and len(captures) == 1
    assert len(set(first.values())) == 3, "adapters change nothing, so nothing was shown"
    names = {"adapter_names": ["b", "__base__", "a"]}
    alone = [json.loads(first[name])[row] for row, name in enumerate(("b", "off", "a"))]
    prompts = {name: tensor.to("cuda") for name, tensor in padded_prompts(LENGTHS).items()}
    options = {**prompts, **MODES["greedy"], "max_new_tokens": 24, **names}
    mixed = adapted.generate(**options, assistant_model=drafter, num_assistant_tokens=4).tolist()
    assert mixed == alone == adapted.generate(**options).tolist() and len(captures) == 1
    adapted.merge_adapter()
    check(target, drafter)
    adapted.unmerge_adapter()
    adapted.delete_adapter("b")
    check(target, drafter)


def test_weights_that_change_in_place_are_replayed(captures):
    target = target_on("cuda")
    drafter = drafter_of(target)
    generated = [check(target, drafter)]
    assert 1.2 < drafter.stats.acceptance_length < 4.5
    optimizer = torch.optim.SGD(target.parameters(), lr=0.01)
    for _ in range(2):
        target.train()
        inputs = padded_prompts([12])["input_ids"].to("cuda")
        target(inputs, labels=inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        target.eval()
        generated.append(check(target, drafter))
    assert len(set(generated)) > 1 and len(captures) == 1


def test_autocast_weights_are_cast_again(captures):
    """What autocast keeps of a weight is gone when it ends, and is not the weight's once that has changed."""
    target = target_on("cuda")
    drafter = drafter_of(target)

    def cast():
        with torch.autocast("cuda", torch.bfloat16):
            return generate(target, drafter)

    generated = cast()
    junk = [torch.full_like(parameter, 7.0) for parameter in target.parameters() for _ in range(4)]
    assert cast() == generated
    with torch.no_grad():
        target.lm_head.weight.copy_(target.lm_head.weight.flip(0))
    changed = cast()
    assert changed != generated and len(captures) == 1
    del junk
    drafter.release()
    assert cast() == changed
    check(target, drafter)


def test_rounds_are_not_replayed_in_another_matmul_precision(captures):
    target = target_on("cuda")
    drafter = drafter_of(target)
    check(target, drafter)
    settings = torch.backends.cuda.matmul
    before = settings.allow_bf16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = False
    try:
        check(target, drafter)
    finally:
        settings.allow_bf16_reduced_precision_reduction = before
    assert len(captures) == 2


@pytest.mark.parametrize("kind", ["noisy copy", "eagle3"])
def test_sessions_are_reused_on_another_stream(kind):
    """While the round that a call left behind is still running, which would commit its tokens to the next one's rows.

    A round takes 20 ms or more, most of which it sleeps before it commits. Tokens on the host do not wait for it.
    """
    target = target_on("cuda")
    drafter = drafter_of(target, kind)
    expected = [generate(target, lengths=lengths, seed=seed) for seed, lengths in enumerate(([9, 1, 5], [3, 12, 4]))]
    head, forward = target.lm_head, target.lm_head.forward

    def slowly(hidden):
        torch.cuda._sleep(40_000_000)
        return forward(hidden)

    head.forward = slowly
    streams, were_busy = [torch.cuda.Stream() for _ in range(2)], []
    for _ in range(3):
        for seed, (lengths, stream) in enumerate(zip(([9, 1, 5], [3, 12, 4]), streams, strict=True)):
            with torch.cuda.stream(stream):
                generated = generate(target, drafter, lengths, seed, device="cpu")
            were_busy.append(not stream.query())
            assert generated == expected[seed]
    assert any(were_busy), "no round was left behind, so nothing was shown"
    assert len(drafter.sessions) == 1 and drafter.stats.execution.startswith("captured in one graph")
    with torch.cuda.stream(streams[0]):
        generate(target, drafter, device="cpu")
    drafter.release()  # The round that was left behind has ended when its memory is given to others.
    assert streams[0].query()


def test_captured_rounds_keep_no_scores_and_are_bounded(captures):
    """Another `min_p` is another round; of each only what is read stays in memory."""
    target = copy.deepcopy(tiny_target("llama", num_layers=3))
    target.resize_token_embeddings(64_000)
    target = target.to("cuda")
    drafter = drafter_of(target, "draft-model")
    batch, num_drafts, allocated = 8, 7, []

    def call(min_p):
        options = {"do_sample": True, "min_p": min_p, "top_k": 0, "seeds": 3, "max_new_tokens": 4}
        prompts = {name: tensor.to("cuda") for name, tensor in padded_prompts([5] * batch).items()}
        target.generate(**prompts, **options, assistant_model=drafter, num_assistant_tokens=num_drafts)
        gc.collect()
        allocated.append(torch.cuda.memory_allocated())

    for number in range(2 * sessions.MAX_CAPTURES):
        call(0.1 + 0.01 * number)
    scores = batch * (num_drafts + 1) * 64_000 * 4
    assert max(allocated[1:]) - allocated[0] < scores / 4, [size - allocated[0] for size in allocated]
    assert len(captures) == 2 * sessions.MAX_CAPTURES
    assert sum(captured() is not None for captured in captures) == sessions.MAX_CAPTURES


def in_threads(*functions):
    """Run `functions` at once; their results, or the first error."""
    results = [None] * len(functions)
    barrier = threading.Barrier(len(functions))

    def run(index):
        barrier.wait()
        try:
            results[index] = functions[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def generate_often(target, drafter, mode):
    generated = [
        generate(target, drafter, lengths, seed, mode) for seed, lengths in enumerate(([9, 1], [5], [30, 2], [7, 7]))
    ]
    return generated, drafter.stats.execution


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("mode", ["greedy", "hot sampling"])
def test_two_targets_in_two_threads(mode, is_compiled):
    """Which capture on one device at the same time."""
    pairs = [(target, drafter_of(target, is_compiled=is_compiled)) for target in (target_on("cuda"), target_on("cuda"))]
    alone = target_on("cuda")
    expected = generate_often(alone, drafter_of(alone, is_compiled=is_compiled), mode)
    assert expected[1].startswith("captured in one graph")
    for generated in in_threads(*(lambda pair=pair: generate_often(*pair, mode) for pair in pairs)):
        assert generated == expected


@two_gpus
@pytest.mark.parametrize("mode", ["greedy", "penalty", "ngrams", "hot sampling"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_target_on_another_device_than_the_current_one(monkeypatch, kind, mode):
    """Eagerly and captured; nothing of it is on the current device."""
    here, there = target_on("cuda:0"), target_on("cuda:1")
    expected = generate(here, drafter_of(here, kind), mode=mode)
    if mode != "hot sampling":
        assert expected == generate(here, mode=mode)
    torch.cuda.synchronize(0)
    torch.cuda.reset_peak_memory_stats(0)
    before = torch.cuda.memory_allocated(0)
    for captures in (True, False):
        set_policy(monkeypatch, "cuda", cuda_graphs=captures)
        drafter = drafter_of(there, kind)
        for _ in range(2):
            assert generate(there, drafter, mode=mode) == expected
        assert drafter.stats.execution.startswith("captured" if captures else "eager")
    assert torch.cuda.max_memory_allocated(0) == before
    assert torch.cuda.current_device() == 0


@two_gpus
@pytest.mark.parametrize("engine", ["static", "stock"])
@pytest.mark.parametrize("mode", ["greedy", "hot sampling"])
def test_engines_on_another_device_than_the_current_one(mode, engine):
    here, there = target_on("cuda:0"), target_on("cuda:1")
    generated = []
    for target in (here, there):
        drafter = drafter_of(target).configure(engine=engine)
        generated.append(generate(target, drafter, [9], mode=mode))
        assert drafter.stats.engine == engine
    assert generated[0] == generated[1]


@two_gpus
@pytest.mark.parametrize("kind", ["noisy copy", "eagle3", "pard"])
def test_compiled_rounds_on_two_devices(kind):
    """One after the other, again and again."""
    targets = [target_on(f"cuda:{index}", num_layers=3) for index in range(2)]
    expected = generate(targets[0])
    drafters = [drafter_of(target, kind, is_compiled=True) for target in targets]
    for _ in range(3):
        for target, drafter in zip(targets, drafters, strict=True):
            assert generate(target, drafter) == expected
            assert drafter.stats.execution == "captured in one graph, compiled"


@two_gpus
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("mode", ["greedy", "hot sampling"])
def test_two_devices_in_two_threads(mode, is_compiled):
    targets = [target_on(f"cuda:{index}") for index in range(2)]
    alone = target_on("cuda:0")
    expected = generate_often(alone, drafter_of(alone, is_compiled=is_compiled), mode)
    pairs = [(target, drafter_of(target, is_compiled=is_compiled)) for target in targets]
    for generated in in_threads(*(lambda pair=pair: generate_often(*pair, mode) for pair in pairs)):
        assert generated == expected


@two_gpus
def test_kernels_run_on_the_device_of_their_tensors():
    from hf_specdec import ops
    from hf_specdec.kernels import verification_reference

    scores = torch.randn(3, 5, 96, device="cuda:1")
    drafts = scores[:, :-1].argmax(-1)
    drafts[1, 2] = 3
    assert torch.cuda.current_device() == 0
    arguments = scores, drafts, None, None, None, torch.zeros(3, dtype=torch.int64, device="cuda:1"), 4
    expected = verification_reference.verify_tree(*arguments)
    for found, right in zip(ops.verify_tree(*arguments), expected, strict=True):
        assert torch.equal(found, right)
    assert torch.equal(ops.best_draft(scores), scores.argmax(-1))
