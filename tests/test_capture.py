"""Rounds that are captured and replayed over kept buffers: same texts; on a CPU with a stand-in for the CUDA graph."""

import copy

import pytest
import torch
from contract import MAX_NEW_TOKENS, PROMPTS, continuations
from oracle import RANDOM_DRAFTERS, OracleDrafter, copy_of, random_eagle3, random_mtp, random_peagle
from targets import PAD, padded_prompts, tiny_target

from hf_specdec import fusing, graphs, ops
from hf_specdec.drafters.none import NoDrafter


def in_place(result, new):
    """Copy the tensors of `new` into those of `result`, as a replay overwrites what was captured."""
    if isinstance(result, torch.Tensor):
        result.copy_(new)
    elif isinstance(result, tuple):
        for pair in zip(result, new, strict=True):
            in_place(*pair)


class Replay:
    """Runs a function again and again, with its results in one place."""

    count = 0

    def __init__(self, function):
        type(self).count += 1
        for _ in range(graphs.WARM_UPS):
            function()
        self._function = function
        self.result = function()

    def __call__(self):
        in_place(self.result, self._function())
        return self.result


@pytest.fixture
def capture(monkeypatch):
    monkeypatch.setitem(graphs.CAPTURE, "cpu", Replay)
    monkeypatch.setattr(Replay, "count", 0)
    return Replay


def drafters(target, inputs, free):
    yield OracleDrafter(target, continuations(inputs, free), inputs["attention_mask"].sum(1).tolist(), 0.7)
    yield random_eagle3(target)
    yield random_peagle(target)
    yield copy_of(target)
    yield random_mtp(target)
    yield random_mtp(target, chaining="target")


OPTIONS = {
    "greedy": {"do_sample": False},
    "end of sequence": {"do_sample": False, "eos_token_id": [7, 11, 13], "pad_token_id": PAD},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 20},
}


@pytest.mark.core
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("batch", [1, 3])
def test_captured_rounds_say_the_same(monkeypatch, option, batch):
    target = tiny_target("llama")
    inputs = padded_prompts(PROMPTS[batch])
    free = target.generate(**inputs, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    for which in range(6):
        texts, rows = [], []
        for replayed in (False, True):
            if replayed:
                monkeypatch.setitem(graphs.CAPTURE, "cpu", Replay)
            drafter = list(drafters(target, inputs, free))[which]
            if isinstance(drafter, OracleDrafter) and replayed and batch == 3:
                continue  # it knows the rows of the batch only, not those that fill up a bucket
            torch.manual_seed(11)
            texts.append(
                target.generate(
                    **inputs,
                    max_new_tokens=MAX_NEW_TOKENS,
                    assistant_model=drafter,
                    num_assistant_tokens=3,
                    **OPTIONS[option],
                )
            )
            rows.append(drafter.stats.rows)
            monkeypatch.delitem(graphs.CAPTURE, "cpu", raising=False)
        assert all(torch.equal(text, texts[0]) for text in texts)
        assert all(row == rows[0] for row in rows)


@pytest.mark.core
def test_sessions_are_used_again_and_freed(capture):
    target = tiny_target("llama")
    drafter = copy_of(target)
    plain, again = [], []
    for lengths in ([9, 4, 1], [3, 12, 5], [2, 2, 6, 7]):
        inputs = padded_prompts(lengths, seed=len(lengths))
        options = {"do_sample": False, "max_new_tokens": MAX_NEW_TOKENS}
        plain.append(target.generate(**inputs, **options))
        again.append(target.generate(**inputs, **options, assistant_model=drafter))
        assert drafter.stats.acceptance_length > 4
    assert all(torch.equal(*pair) for pair in zip(plain, again, strict=True))
    assert capture.count == 1 and len(drafter.sessions) == 1
    drafter.release()
    assert len(drafter.sessions) == 0


@pytest.mark.core
def test_what_cannot_be_replayed_is_not_captured(capture):
    target = tiny_target("llama")
    drafter = copy_of(target)
    options = {"do_sample": False, "max_new_tokens": 6, "assistant_model": drafter}
    target.generate(**padded_prompts([5]), **options, return_dict_in_generate=True, output_scores=True)
    handle = target.model.layers[0].register_forward_hook(lambda module, args, output: None)
    target.generate(**padded_prompts([5]), **options)
    handle.remove()
    assert capture.count == 0 and len(drafter.sessions) == 0


@pytest.mark.core
def test_hooks_that_hidden_states_leave_behind_are_no_obstacle(capture, monkeypatch):
    monkeypatch.setitem(graphs.COMPILERS, "cpu", "eager")
    target = copy.deepcopy(tiny_target("llama"))
    inputs = padded_prompts([5])
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=6)
    target(**inputs, output_hidden_states=True)
    assert any(module._forward_hooks for module in target.modules())
    drafter = copy_of(target)
    out = target.generate(**inputs, do_sample=False, max_new_tokens=6, assistant_model=drafter)
    assert torch.equal(out, plain)
    assert drafter.stats.execution == "captured in one graph, compiled"


@pytest.mark.core
def test_moved_weights_are_captured_anew(capture):
    target = tiny_target("llama")
    drafter = copy_of(target)
    options = {"do_sample": False, "max_new_tokens": 6, "assistant_model": drafter}
    target.generate(**padded_prompts([5]), **options)
    head = drafter.model.lm_head
    head.weight = torch.nn.Parameter(head.weight.clone())
    target.generate(**padded_prompts([5]), **options)
    assert capture.count == 2


@pytest.mark.core
def test_a_session_left_by_an_error_is_dropped(capture, monkeypatch):
    target = tiny_target("llama")
    drafter = copy_of(target)
    options = {"do_sample": False, "max_new_tokens": 6, "assistant_model": drafter}
    target.generate(**padded_prompts([5]), **options)
    monkeypatch.setattr(drafter, "prefill", None)
    with pytest.raises(TypeError):
        target.generate(**padded_prompts([5]), **options)
    assert len(drafter.sessions) == 0


@pytest.mark.parametrize(("kind", "option"), [("eagle3", "greedy"), ("pard", "sampling"), ("mtp", "end of sequence")])
def test_a_round_as_on_a_gpu(monkeypatch, kind, option):
    """Kernels (in the interpreter), fused products, one graph of the compiler's, replayed: what a GPU runs."""
    target = tiny_target("llama")
    inputs = padded_prompts([5, 1])
    options = {"max_new_tokens": 5, "num_assistant_tokens": 3, "seeds": 5, **OPTIONS[option]}
    expected = target.generate(**inputs, **options, assistant_model=RANDOM_DRAFTERS[kind](target))

    monkeypatch.setattr(ops, "TRITON_DEVICES", {"cpu"})
    monkeypatch.setattr(ops, "_NARROW_ROWS", 0)
    monkeypatch.setattr(fusing, "FUSED_DEVICES", {"cpu"})
    monkeypatch.setitem(graphs.CAPTURE, "cpu", Replay)
    monkeypatch.setitem(graphs.COMPILERS, "cpu", "aot_eager")
    drafter = RANDOM_DRAFTERS[kind](target)
    assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter), expected)
    assert drafter.stats.execution == "captured in one graph, compiled"


@pytest.mark.core
def test_what_cannot_be_compiled_is_captured_all_the_same(capture, monkeypatch, caplog):
    monkeypatch.setitem(graphs.COMPILERS, "cpu", "aot_eager")
    target = tiny_target("llama")
    forward = target.model.norm.forward
    monkeypatch.setattr(target.model.norm, "forward", torch._dynamo.disable(lambda hidden: forward(hidden)))
    drafter = copy_of(target)
    options = {**padded_prompts([5, 2]), "do_sample": False, "max_new_tokens": 6}
    assert torch.equal(target.generate(**options, assistant_model=drafter), target.generate(**options))
    assert drafter.stats.execution == "captured in one graph, not compiled"
    assert "torch.compile cannot compile a round" in caplog.text
    drafter.configure(compile_rounds=False)
    caplog.clear()
    assert torch.equal(target.generate(**options, assistant_model=drafter), target.generate(**options))
    assert "torch.compile" not in caplog.text


def test_processes_that_share_a_target_compile_alike(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function, options, **settings: asked.append(options))
    for same_everywhere in (False, True):
        graphs.compiled(lambda: None, "inductor", same_everywhere)
    alone, together = asked
    assert alone["combo_kernels"] and "deterministic" not in alone
    assert together.get("deterministic", False) == ("deterministic" in torch._inductor.list_options())


def refuse(function):
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.core
def test_what_cannot_be_captured_runs_eagerly(monkeypatch, caplog):
    monkeypatch.setitem(graphs.CAPTURE, "cpu", refuse)
    target = tiny_target("llama")
    drafter = random_eagle3(target)
    options = {**padded_prompts([5, 2]), "do_sample": False, "max_new_tokens": 6}
    for _ in range(2):
        assert torch.equal(target.generate(**options, assistant_model=drafter), target.generate(**options))
        assert drafter.stats.execution == "eager: a round cannot be captured"
    assert caplog.text.count("cannot be captured and runs eagerly: operation not permitted") == 1


@pytest.mark.core
@pytest.mark.parametrize("kind", RANDOM_DRAFTERS)
def test_nothing_of_an_earlier_call_is_seen(monkeypatch, kind):
    """Prompts of one token leave drafters that look a token back without anything to draft from."""
    monkeypatch.setitem(graphs.CAPTURE, "cpu", refuse)  # buffers are kept all the same
    target = tiny_target("llama")
    inputs = padded_prompts([9, 1, 5])
    drafter = RANDOM_DRAFTERS[kind](target)
    options = {"do_sample": True, "temperature": 1.3, "max_new_tokens": 2 * MAX_NEW_TOKENS, "num_assistant_tokens": 4}
    texts, drafted = [], []
    for seed in (3, 4, 3):
        torch.manual_seed(seed)
        texts.append(target.generate(**inputs, **options, assistant_model=drafter))
        drafted.append(drafter.stats.rows)
    assert len(drafter.sessions) == 1
    assert torch.equal(texts[0], texts[2]) and drafted[0] == drafted[2]
    assert not torch.equal(texts[0], texts[1])


@pytest.mark.core
def test_what_is_kept_makes_room_for_a_call(monkeypatch):
    monkeypatch.setitem(graphs.CAPTURE, "cpu", refuse)
    target = tiny_target("llama")
    drafter = copy_of(target)
    short, long = padded_prompts([5]), padded_prompts([600])
    options = {"do_sample": False, "max_new_tokens": 6}
    expected = target.generate(**long, **options)
    target.generate(**short, **options, assistant_model=drafter)
    assert len(drafter.sessions) == 1
    prefill, failures = drafter.prefill, []

    def scarce(*args):
        if len(drafter.sessions) or failures == ["for good"]:
            failures.append("out of memory")
            raise torch.OutOfMemoryError("CUDA out of memory.")
        prefill(*args)

    monkeypatch.setattr(drafter, "prefill", scarce)
    assert torch.equal(target.generate(**long, **options, assistant_model=drafter), expected)
    assert failures == ["out of memory"] and len(drafter.sessions) == 1
    drafter.release()
    failures[:] = ["for good"]
    with pytest.raises(torch.OutOfMemoryError):
        target.generate(**short, **options, assistant_model=drafter)


@pytest.mark.core
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_experts_compute_without_the_host_while_a_round_is_captured(family):
    target = copy.deepcopy(tiny_target(family))

    def implementation():
        return target.config.get_text_config()._experts_implementation

    for name in ("eager", "grouped_mm", "batched_mm"):
        target.set_experts_implementation(name)
        with graphs.experts_without_host(target, NoDrafter(target)):
            assert implementation() == "batched_mm"  # the host is not asked about products in float32 either
        assert implementation() == name
    target.to(torch.bfloat16)
    target.model.norm.float()  # other weights do not matter
    target.set_experts_implementation("eager")
    with pytest.raises(KeyError), graphs.experts_without_host(target):
        assert implementation() == "grouped_mm"
        raise KeyError
    assert implementation() == "eager"
