"""Captured and replayed rounds and prefills generate the same; on a CPU with a stand-in for the CUDA graph."""

import copy
import gc
import itertools
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from case_counts import cases, num_cases
from graph_stand_ins import Replay, replay_on_cpu, show_all_slots, tape_on_cpu
from lossless import MAX_NEW_TOKENS, PROMPTS, continuations
from oracle import RANDOM_DRAFTERS, OracleDrafter, copy_of, random_eagle3, random_mtp
from targets import PAD, padded_prompts, set_policy, tiny_target
from torch.utils._python_dispatch import TorchDispatchMode
from varying_drafts import vary_drafts

from hf_specdec import SuffixDrafter
from hf_specdec.bench.synthetic import scripted_acceptance
from hf_specdec.drafters.none import NoDrafter
from hf_specdec.engine import capture as engine_capture
from hf_specdec.engine import hosted_target, lease, sessions
from hf_specdec.graphs import buckets, cuda_graphs
from hf_specdec.kernels.types import Proposal
from hf_specdec.modules.hidden_states import modules_of
from hf_specdec.patching import experts


@pytest.fixture
def capture(monkeypatch):
    return replay_on_cpu(monkeypatch)


OPTIONS = {
    "greedy": {"do_sample": False},
    "end of sequence": {"do_sample": False, "eos_token_id": [7, 11, 13], "pad_token_id": PAD},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "ngrams": {"do_sample": False, "no_repeat_ngram_size": 2},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 20},
}


@pytest.mark.parametrize(
    ("kind", "batch", "option"),
    cases(
        every := [
            (*one, option) for one in (("oracle", 1), ("noisy copy", 1), ("noisy copy", 3)) for option in OPTIONS
        ],
        [one for one in every if one[1] == 3 or one == ("oracle", 1, "end of sequence") or one[1:] == (1, "sampling")],
    ),
)
def test_captured_rounds_generate_the_same(monkeypatch, option, kind, batch):
    """Drafts are often accepted; `test_replayed_calls_generate_what_eager_calls_generate` has every family."""
    target = tiny_target("llama")
    inputs = padded_prompts(PROMPTS[batch])
    options = {"max_new_tokens": MAX_NEW_TOKENS, "num_assistant_tokens": 3, **OPTIONS[option]}
    if kind == "oracle":
        greedy_options = OPTIONS["greedy" if option == "sampling" else option]
        free = target.generate(**inputs, **greedy_options, max_new_tokens=MAX_NEW_TOKENS)
        drafter = OracleDrafter(target, continuations(inputs, free), PROMPTS[batch], 0.7)
    else:
        drafter = copy_of(target, noise=0.02)
    outputs, rows = [], []
    for replayed in (False, True):
        if replayed:
            replay_on_cpu(monkeypatch)
        torch.manual_seed(11)
        outputs.append(target.generate(**inputs, **options, assistant_model=drafter))
        rows.append(drafter.stats.rows)
    assert drafter.stats.execution.startswith("captured in")
    assert torch.equal(*outputs) and rows[0] == rows[1]
    assert option == "sampling" or any(sum(row.accepted_per_position) for row in rows[0])


def test_sessions_are_reused_and_freed(capture):
    target = tiny_target("llama")
    drafter = copy_of(target)
    plain, again = [], []
    for lengths in ([9, 4, 1], [3, 8, 5], [2, 2, 6, 4]):
        inputs = padded_prompts(lengths, seed=len(lengths))
        options = {"do_sample": False, "max_new_tokens": MAX_NEW_TOKENS}
        plain.append(target.generate(**inputs, **options))
        again.append(target.generate(**inputs, **options, assistant_model=drafter))
        assert drafter.stats.acceptance_length > 4
    assert all(torch.equal(*pair) for pair in zip(plain, again, strict=True))
    assert capture.count == 2 and len(drafter.sessions) == 1
    drafter.release()
    assert len(drafter.sessions) == 0


@pytest.mark.core
def test_rounds_that_cannot_be_replayed_are_not_captured(capture):
    target = tiny_target("llama")
    drafter = copy_of(target)
    options = {"do_sample": False, "max_new_tokens": 6, "assistant_model": drafter}
    target.generate(**padded_prompts([5]), **options, return_dict_in_generate=True, output_hidden_states=True)
    handle = target.model.layers[0].register_forward_hook(lambda module, args, output: None)
    target.generate(**padded_prompts([5]), **options)
    handle.remove()
    assert capture.count == 0 and len(drafter.sessions) == 0


def test_hooks_left_by_output_hidden_states_do_not_prevent_capture(capture, monkeypatch):
    set_policy(monkeypatch, "cpu", compiler="eager")
    show_all_slots(monkeypatch)
    target = copy.deepcopy(tiny_target("llama", num_layers=1))
    inputs = padded_prompts([5])
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=3)
    target(**inputs, output_hidden_states=True)
    assert any(module._forward_hooks for module in target.modules())
    drafter = copy_of(target).configure(num_assistant_tokens=1, compile_rounds=True)
    out = target.generate(**inputs, do_sample=False, max_new_tokens=3, assistant_model=drafter)
    assert torch.equal(out, plain)
    assert drafter.stats.execution == "captured in one graph, compiled"


def test_moved_weights_are_captured_again(capture):
    target = tiny_target("llama")
    drafter = copy_of(target)
    options = {"do_sample": False, "max_new_tokens": 6, "assistant_model": drafter}
    target.generate(**padded_prompts([5]), **options)
    head = drafter.model.lm_head
    head.weight = torch.nn.Parameter(head.weight.clone())
    target.generate(**padded_prompts([5]), **options)
    assert capture.count == 4


def test_session_of_a_failed_call_is_dropped(capture, monkeypatch):
    target = tiny_target("llama")
    drafter = copy_of(target)
    options = {"do_sample": False, "max_new_tokens": 6, "assistant_model": drafter}
    target.generate(**padded_prompts([5]), **options)
    monkeypatch.setattr(type(drafter), "prefill", None)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        target.generate(**padded_prompts([5]), **options)
    assert len(drafter.sessions) == 0


@pytest.mark.parametrize(
    ("kind", "option", "num_layers", "settings"),
    [
        ("eagle3", "end of sequence", 1, {"aux_hidden_state_layer_ids": [0, 1]}),
        ("eagle3", "tree", 1, {"aux_hidden_state_layer_ids": [0, 1]}),
        ("pard", "sampling", 1, {"num_hidden_layers": 1}),
    ],
)
def test_round_with_the_gpu_policy(monkeypatch, kind, option, num_layers, settings):
    """Kernels (in the interpreter), fused linears, one compiled graph, replayed: what a GPU runs, with every drafter in
    tests/gpu/test_gpu.py."""
    target = copy.deepcopy(tiny_target("llama", num_layers=num_layers))
    inputs = padded_prompts([5, 1])
    own = {"do_sample": False, "tree": 3} if option == "tree" else OPTIONS[option]
    options = {"max_new_tokens": 3, "num_assistant_tokens": 2, "seeds": 5, **own}
    expected = target.generate(**inputs, **options, assistant_model=RANDOM_DRAFTERS[kind](target, **settings))

    set_policy(monkeypatch, "cpu", triton=True)
    set_policy(monkeypatch, "cpu", transposed_linear=False)
    set_policy(monkeypatch, "cpu", fused_linear=True, layer_kernels=kind == "eagle3")
    replay_on_cpu(monkeypatch)
    set_policy(monkeypatch, "cpu", compiler="aot_eager")
    drafter = RANDOM_DRAFTERS[kind](target, **settings).configure(compile_rounds=True)
    assert torch.equal(target.generate(**inputs, **options, assistant_model=drafter), expected)
    assert drafter.stats.execution == "captured in one graph, compiled"
    attention = target.model.layers[0].self_attn
    query, key = attention.q_proj.weight, attention.k_proj.weight
    assert query.data_ptr() + query.nbytes == key.data_ptr(), "linears were not fused"


def test_rounds_that_cannot_be_compiled_are_captured_uncompiled(capture, monkeypatch, caplog):
    set_policy(monkeypatch, "cpu", compiler="aot_eager")
    show_all_slots(monkeypatch)
    target = tiny_target("llama", num_layers=1)
    forward = target.model.norm.forward
    monkeypatch.setattr(target.model.norm, "forward", torch._dynamo.disable(lambda hidden: forward(hidden)))
    drafter = copy_of(target).configure(compile_rounds=True)
    options = {**padded_prompts([5, 2]), "do_sample": False, "max_new_tokens": 6}
    assert torch.equal(target.generate(**options, assistant_model=drafter), target.generate(**options))
    assert drafter.stats.execution == "captured in one graph, not compiled"
    assert "torch.compile cannot compile a round" in caplog.text
    drafter.configure(compile_rounds=False)
    caplog.clear()
    assert torch.equal(target.generate(**options, assistant_model=drafter), target.generate(**options))
    assert "torch.compile" not in caplog.text


def test_ranks_of_a_split_target_compile_the_same(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function, options, **settings: asked.append(options))
    for same_everywhere in (False, True):
        cuda_graphs.compiled(lambda: None, "inductor", same_everywhere)
    alone, together = asked
    assert "deterministic" not in alone and set(alone) <= set(torch._inductor.list_options())
    assert together.get("deterministic", False) == ("deterministic" in torch._inductor.list_options())


def refuse(function, memory):
    raise RuntimeError("operation not permitted when stream is capturing")


def test_failed_capture_runs_eagerly(monkeypatch, caplog):
    set_policy(monkeypatch, "cpu", cuda_graphs=True)
    monkeypatch.setattr(cuda_graphs, "CudaGraph", refuse)
    target = tiny_target("llama")
    drafter = random_eagle3(target)
    options = {**padded_prompts([5, 2]), "do_sample": False, "max_new_tokens": 6}
    for _ in range(2):
        assert torch.equal(target.generate(**options, assistant_model=drafter), target.generate(**options))
        assert drafter.stats.execution == "eager: a round cannot be captured"
    assert caplog.text.count("cannot be captured and runs eagerly: operation not permitted") == 1


@pytest.mark.parametrize("kind", cases(list(RANDOM_DRAFTERS), ["p-eagle", "draft-model", "mtp", "dspark"]))
def test_results_do_not_depend_on_earlier_calls(monkeypatch, kind):
    """Prompts of one token leave drafters that look a token back without anything to draft from."""
    set_policy(monkeypatch, "cpu", cuda_graphs=True)
    monkeypatch.setattr(cuda_graphs, "CudaGraph", refuse)  # buffers are kept all the same
    target = tiny_target("llama")
    inputs = padded_prompts([9, 1, 5])
    drafter = RANDOM_DRAFTERS[kind](target)
    options = {"do_sample": True, "temperature": 1.3, "max_new_tokens": 6, "num_assistant_tokens": 4}
    texts, drafted = [], []
    for seed in (3, 4, 3):
        torch.manual_seed(seed)
        texts.append(target.generate(**inputs, **options, assistant_model=drafter))
        drafted.append(drafter.stats.rows)
    assert len(drafter.sessions) == 1
    assert torch.equal(texts[0], texts[2]) and drafted[0] == drafted[2]
    assert not torch.equal(texts[0], texts[1])


@pytest.mark.parametrize("kind", cases(list(RANDOM_DRAFTERS), ["mtp", "dspark"]))
def test_a_round_that_is_captured_after_the_prefill_changes_no_drafts(capture, kind):
    """A session has its prefills, but no round for the settings of a call."""
    target, prompts = tiny_target("llama"), padded_prompts(PROMPTS[3])
    options = {"max_new_tokens": 8, "num_assistant_tokens": 2, "seeds": [1, 2, 3], "return_dict_in_generate": True}

    def accepted(drafter, **settings):
        out = target.generate(**prompts, **options, do_sample=True, assistant_model=drafter, **settings)
        return out.sequences.tolist(), out.speculation.rows

    hot = {"temperature": 1.5}
    alone = accepted(RANDOM_DRAFTERS[kind](target), **hot)
    drafter = RANDOM_DRAFTERS[kind](target)
    accepted(drafter, min_p=0.1)
    count = capture.count
    assert accepted(drafter, **hot) == alone and capture.count == count + 1


def test_out_of_memory_frees_idle_sessions(monkeypatch):
    set_policy(monkeypatch, "cpu", cuda_graphs=True)
    monkeypatch.setattr(cuda_graphs, "CudaGraph", refuse)
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


def generate(target, drafter, batches, **options):
    """What `target` generates for batches of prompts, one call each, and the statistics of the drafts."""
    generated = []
    for seed, lengths in enumerate(batches):
        out = target.generate(
            **padded_prompts(lengths, seed=seed),
            **{"max_new_tokens": 8, "num_assistant_tokens": 3, "seeds": seed, "do_sample": False, **options},
            assistant_model=drafter,
        )
        generated.append((out.tolist(), drafter.stats.rows))
    return generated


aten = torch.ops.aten
HOST_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.masked_select.default, aten.nonzero.default}


class NoHostReads(TorchDispatchMode):
    """Context in which nothing waits for a value or a shape that is known on the device only."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function not in HOST_READS, f"{function} reads on the host"
        if function in (aten.index.Tensor, aten.index_put_.default):
            assert all(index is None or index.dtype == torch.int64 for index in args[1]), "indices found by the host"
        return function(*args, **kwargs or {})


def test_reads_of_the_host_are_noticed():
    with pytest.raises(AssertionError, match="reads on the host"), NoHostReads():
        torch.arange(3).sum().item()
    with pytest.raises(AssertionError, match="found by the host"), NoHostReads():
        torch.arange(3)[torch.arange(3) > 1]


def watched(function, memory):
    with NoHostReads():
        return Replay(function, memory)


# What is drafted, and so every family, matters to rounds that sample; rounds in two graphs, of processors that read
# texts, differ by nothing that a drafter does.
MAKERS = {**RANDOM_DRAFTERS, "suffix": SuffixDrafter, "none": NoDrafter}
REPLAYED = cases(
    every := list(itertools.product(MAKERS, OPTIONS)),
    [
        (kind, option)
        for kind, option in every
        if kind == "eagle3"
        or (option == "sampling" and kind != "p-eagle-sequential")
        or (kind, option) in (("none", "ngrams"), ("mtp-by-target", "ngrams"))
    ],
)


@pytest.mark.parametrize(("kind", "option"), REPLAYED)
def test_replayed_calls_generate_what_eager_calls_generate(kind, option, monkeypatch):
    """Prompts of one bucket of lengths, in a batch that is filled up with an inert row unless the host reads texts;
    what is captured reads nothing on the host."""
    target = tiny_target("llama")
    # With n-grams the host reads texts of prompts that have padding.
    batches = [[9, 1, 5], [1, 2, 1] if option == "ngrams" else [1, 1, 1], [3, 9, 4]][: num_cases(3, 2)]
    options = {"max_new_tokens": 6, **OPTIONS[option]}
    eager = generate(target, MAKERS[kind](target), batches, **options)
    capture, drafter = replay_on_cpu(monkeypatch, watched), MAKERS[kind](target)
    assert generate(target, drafter, batches, **options) == eager
    assert drafter.stats.execution.startswith("captured in")
    assert (capture.count, capture.hostings, len(drafter.sessions)) == (3 if option == "ngrams" else 2, 1, 1)


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "mtp-by-target"])
def test_rounds_with_fewer_drafts_are_captured_after_ones_with_more(kind, monkeypatch):
    """Warm-ups read a block as wide as their own, and change nothing that the drafter remembers.

    Accepted drafts of random drafters become text, so texts are equal only if all drafts are.
    """
    target, inputs, texts = tiny_target("llama"), padded_prompts([7, 4, 9]), []
    options = {"do_sample": False, "max_new_tokens": 24}
    vary_drafts(monkeypatch, [5, 1, 5, 0, 3, 5, 2])
    for replayed in (False, True):
        if replayed:
            replay_on_cpu(monkeypatch)
        drafter = RANDOM_DRAFTERS[kind](target).configure(5)
        with scripted_acceptance([0.9, 0.85, 0.8, 0.75, 0.7], target.device):
            texts += [target.generate(**inputs, **options, assistant_model=drafter).tolist() for _ in range(2)]
    assert texts[0] == texts[2] and texts[1] == texts[3]
    assert drafter.stats.acceptance_length > 2
    assert drafter.stats.execution.startswith("captured in")


def test_graphs_of_a_session_share_a_memory_pool(monkeypatch):
    memories = []

    def noting(function, memory):
        memories.append(memory)
        return Replay(function, memory)

    replay_on_cpu(monkeypatch, noting)
    target = tiny_target("llama")
    drafter = random_eagle3(target)
    generate(target, drafter, [[9, 1], [17, 30]])
    generate(target, drafter, [[9, 1]], no_repeat_ngram_size=2)
    generate(target, drafter, [[9]])
    first, *_, last = memories
    assert [memory is first for memory in memories] == 5 * [True] + 2 * [False] and memories[-2] is last


def test_prefill_is_captured_per_length_bucket_up_to_a_limit(capture, monkeypatch):
    monkeypatch.setattr(buckets, "MOST_CAPTURED_TOKENS", 32)
    target = tiny_target("llama")
    drafter = copy_of(target)

    def call(length, **settings):
        options = {**padded_prompts([length], seed=length), "do_sample": False, "max_new_tokens": 6}
        plain = target.generate(**options)
        assert torch.equal(target.generate(**options, **settings, assistant_model=drafter), plain)
        return capture.count, capture.hostings

    assert [call(length) for length in (5, 32, 16, 17)] == [(2, 1), (3, 2), (3, 2), (3, 2)]
    assert call(33) == call(16) == (3, 3)  # too long: as it comes, every time, and the round is replayed all the same
    assert call(16, prefill_chunk_size=7) == (3, 4)
    assert len(drafter.sessions) == 1


def test_widths_of_captured_prefills():
    widths = {columns: buckets.captured_width(columns, 1, 4096) for columns in (0, 17, 1024, 1025, 1281, 2048, 2049)}
    assert widths == {0: 16, 17: 32, 1024: 1024, 1025: 1280, 1281: 1536, 2048: 2048, 2049: None}
    assert [buckets.captured_width(600, rows, 1024) for rows in (1, 2, 3)] == [1024, 1024, None]
    assert buckets.captured_width(600, 1, 1000) is None


def test_the_prefill_of_calls_for_one_token_is_captured(capture):
    """They have no rounds; a later call for more has, and replays the same prefill."""
    target = tiny_target("llama")
    drafter = copy_of(target)
    for seed, new, captures in ((0, 1, 1), (1, 1, 1), (2, 6, 2)):
        options = {**padded_prompts([9, 4], seed=seed), "do_sample": False, "max_new_tokens": new}
        assert torch.equal(target.generate(**options, assistant_model=drafter), target.generate(**options))
        assert capture.count == captures
    assert capture.hostings == 2 and len(drafter.sessions) == 1


def test_failed_prefill_capture_runs_eagerly(monkeypatch, caplog):
    """Nothing is left of what the attempt did to the state: drafts that are all right would be wrong once."""
    target, batches = tiny_target("llama"), [[9, 1, 5], [3, 9, 4]]
    drafter = copy_of(target)
    eager = generate(target, drafter, batches)
    assert drafter.stats.accepted == drafter.stats.drafted > 0

    def picky(function, memory):
        if Replay.count == 0:
            return Replay(function, memory)
        propose = drafter.propose
        drafter.propose = lambda *args: Proposal(propose(*args).tokens.fill_(2), None)
        function()
        del drafter.propose
        refuse(function, memory)

    capture = replay_on_cpu(monkeypatch, picky)
    refused = "cannot be captured and runs eagerly: operation not permitted"
    assert generate(target, drafter, batches) == eager
    assert caplog.text.count(f"The prefill of LlamaForCausalLM {refused}") == caplog.text.count(refused) == 1
    assert drafter.stats.execution.startswith("captured in one graph")
    assert (capture.count, capture.hostings) == (1, 2)


def test_prefill_frees_memory_it_needs(monkeypatch):
    target = tiny_target("llama")
    drafter = copy_of(target)
    failures, made, alive = [], [], []

    def noting(state):
        alive.append([session() is not None for session in made])
        session = sessions.Session(state)
        made.append(weakref.ref(session))
        return session

    def scarce(function, memory):
        if Replay.count >= 3 and len(drafter.sessions):
            failures.append("out of memory")
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return Replay(function, memory)

    capture = replay_on_cpu(monkeypatch, scarce)
    monkeypatch.setattr(lease, "Session", noting)
    generate(target, drafter, [[5]])
    options = {**padded_prompts([600]), "do_sample": False, "max_new_tokens": 6}
    plain = target.generate(**options)
    assert torch.equal(target.generate(**options, assistant_model=drafter), plain)
    assert failures == ["out of memory"] and len(drafter.sessions) == 1
    assert not alive[-1][-1], "what the first try allocated is freed before the second one"
    assert capture.count == 5  # both prefills, both rounds, the second of which was captured twice
    assert torch.equal(target.generate(**options, assistant_model=drafter), plain)
    assert capture.count == 5 and len(drafter.sessions) == 1  # the session of the second try serves the next call


def test_weights_that_a_call_moves_are_captured_once(capture, monkeypatch):
    set_policy(monkeypatch, "cpu", fused_linear=True)
    set_policy(monkeypatch, "cpu", transposed_linear=False)
    target = copy.deepcopy(tiny_target("llama"))
    weight = target.model.layers[0].self_attn.k_proj.weight
    before = weight.data_ptr()
    drafter, batches = random_eagle3(target), [[9, 1, 5], [3, 9, 4]]
    replayed = generate(target, drafter, batches)
    assert weight.data_ptr() != before
    assert (capture.count, capture.hostings, len(drafter.sessions)) == (2, 1, 1)
    set_policy(monkeypatch, "cpu", cuda_graphs=False)
    assert generate(target, random_eagle3(target), batches) == replayed


def test_replaced_weights_are_read(capture):
    target = copy.deepcopy(tiny_target("llama"))
    drafter = random_eagle3(target)
    generated = []
    for _ in range(2):
        generated.append(generate(target, drafter, [[9, 1, 5]]))
        plain = target.generate(**padded_prompts([9, 1, 5]), do_sample=False, max_new_tokens=8)
        assert generated[-1][0][0] == plain.tolist()
        norm = target.model.layers[0].input_layernorm
        norm.weight = torch.nn.Parameter(norm.weight + torch.arange(len(norm.weight)) % 3)
    assert generated[0] != generated[1] and capture.count == 4


@pytest.mark.core
@pytest.mark.parametrize(("dtype", "captures"), [(torch.float32, 2), (torch.float64, 1)])
def test_prefills_that_would_copy_experts_are_not_captured(capture, dtype, captures):
    """Those of experts that ours are not for, such as quantised ones; float64 stands for them."""
    target, batches = copy.deepcopy(tiny_target("qwen3-moe")).to(dtype), [[9, 1, 5], [3, 9, 4]]
    target.set_experts_implementation("eager")
    drafter = random_eagle3(target).to(dtype)
    for seed, (text, _) in enumerate(generate(target, drafter, batches)):
        plain = target.generate(**padded_prompts(batches[seed], seed=seed), do_sample=False, max_new_tokens=8)
        assert text == plain.tolist()
    assert capture.count == captures
    assert experts.copies_experts(target, drafter) == (dtype == torch.float64)
    assert not experts.copies_experts(tiny_target("llama"), drafter.float())


def test_modules_are_listed_once():
    target = tiny_target("deepseek-v3")
    drafter = random_mtp(tiny_target("llama"))
    drafter.frames.append(drafter.frames[0])
    found = modules_of(target, drafter, target)
    assert len(found) == len(set(found)) and set(found) == {*target.modules(), *drafter.modules()}


TENSORS_OF_PROCESSORS = {"do_sample": True, "suppress_tokens": [4, 7], "eta_cutoff": 0.1}


@pytest.mark.core_for(kind=["eagle3"], family=["gpt-oss"])
@pytest.mark.parametrize(
    ("kind", "family"),
    [("eagle3", "gpt-oss"), ("mtp", "llama"), ("none", "qwen3-next"), ("none", "deepseek-v3")],
)
def test_what_graphs_read_lives_as_long_as_they_do(monkeypatch, kind, family):
    """A graph keeps no tensor: those of processors are of the call that captured it, others of modules or patches."""
    tape = tape_on_cpu(monkeypatch)
    target = copy.deepcopy(tiny_target(family))
    drafter = RANDOM_DRAFTERS.get(kind, NoDrafter)(target)
    for options in ({"do_sample": False}, TENSORS_OF_PROCESSORS):
        target.generate(**padded_prompts([5, 3]), max_new_tokens=6, assistant_model=drafter, **options)
        assert drafter.stats.execution.startswith("captured in one graph")
    assert len(tape.made) > 2 and all(graph._reads for graph in tape.made)
    for graph in tape.made:
        graph.forget()
    gc.collect()
    assert not [name for graph in tape.made for name in graph.dangling()]
    sessions.sessions_of(drafter).clear()
    gc.collect()
    assert all(graph.dangling() for graph in tape.made), "their own buffers are freed with the session"


def test_later_passes_of_modules_see_all_of_longer_texts(monkeypatch):
    """A captured round reads what rows have grown to, also in the caches of modules that run more than once in it."""
    target, options = tiny_target("llama"), {"num_assistant_tokens": 4, "max_new_tokens": 24, **OPTIONS["sampling"]}
    found = []
    for is_captured in (False, True):
        if is_captured:
            tape_on_cpu(monkeypatch)
        drafter = random_mtp(target).configure(draft_probs=True)
        torch.manual_seed(3)
        out = target.generate(**padded_prompts([5, 3]), assistant_model=drafter, **options)
        assert drafter.stats.execution.startswith("captured") == is_captured
        found.append((out.tolist(), drafter.stats.rows))
    assert found[0] == found[1]


@pytest.mark.core
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_experts_implementation_of_a_patched_target(family):
    target = copy.deepcopy(tiny_target(family))
    drafter = NoDrafter(target)

    def implementations():
        """While the target is hosted, and while a round of it is captured."""
        with hosted_target.patched_target(target, drafter, keep_hidden_states=False):
            found = [target.config.get_text_config()._experts_implementation]
            with experts.capturable_experts(target, drafter):
                return [*found, target.config.get_text_config()._experts_implementation]

    choices = {"eager": "hf_specdec", "grouped_mm": "hf_specdec", "batched_mm": "batched_mm"}
    for dtype in (torch.float32, torch.bfloat16):
        target.to(dtype)
        for before, found in choices.items():
            target.set_experts_implementation(before)
            assert implementations() == [found, found]
            assert target.config.get_text_config()._experts_implementation == before
    target.double()
    target.set_experts_implementation("grouped_mm")
    assert implementations() == ["grouped_mm", "hf_specdec_batched"], "another experts implementation was replaced"
    with pytest.raises(KeyError), experts.triton_experts(target.float()):
        raise KeyError
    assert target.config.get_text_config()._experts_implementation == "grouped_mm"


def test_an_error_before_a_capture_is_left_to_the_capture(monkeypatch):
    """Operations without a form for captures, as some libraries' experts, end neither the call nor its state."""
    monkeypatch.setattr(engine_capture, "capturable_experts", lambda *_: nullcontext())

    def block_width_after(error, raised):
        state = SimpleNamespace(idle=nullcontext, block_width=4)
        monkeypatch.setattr(engine_capture, "run_round", Mock(side_effect=error))
        with raised:
            engine_capture.run_once(SimpleNamespace(state=state), Mock(), SimpleNamespace(key=None))
        return state.block_width

    assert block_width_after(NotImplementedError("no such form"), nullcontext()) == 1
    out_of_memory = torch.OutOfMemoryError("no memory")
    assert block_width_after(out_of_memory, pytest.raises(torch.OutOfMemoryError)) == 1
