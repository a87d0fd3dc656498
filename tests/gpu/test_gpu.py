"""On a GPU: captured rounds are eager rounds, outputs those of plain `generate()`, up to ties in bfloat16."""

import gc

import pytest
import torch
from chi_square import Cells, p_value
from decoding_modes import MODES
from oracle import RANDOM_DRAFTERS
from rule_blocks import LISTS, check_bits
from sampled_calls import MODES as DRAWS
from sampled_calls import drafter_of, sample
from shipped_drafters import DRAFTERS, chat_batches
from targets import STATIC_FAMILIES, on_gpu, padded_prompts, set_policy
from transformers.generation.logits_process import TemperatureLogitsWarper

from hf_specdec import AutoDrafter
from hf_specdec.engine.capture import capture_prefill, capture_round
from hf_specdec.engine.sessions import MAX_SESSIONS
from hf_specdec.graphs import buckets, cuda_graphs
from hf_specdec.ops import divide

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def prompts(lengths, seed=0):
    return {name: tensor.to("cuda") for name, tensor in padded_prompts(lengths, seed=seed).items()}


# Three rows are captured as four, one of them inert.
@pytest.mark.parametrize(("mode", "batch"), [*((mode, 3) for mode in MODES), ("greedy", 1), ("hot sampling", 8)])
@pytest.mark.parametrize("kind", RANDOM_DRAFTERS)
def test_replay_equals_eager(monkeypatch, kind, mode, batch):
    target = on_gpu("llama")
    inputs = prompts([9, 1, 5, 12, 3, 3, 8, 2][:batch], seed=batch)
    texts, rows = [], []
    for captures in (True, False):
        set_policy(monkeypatch, "cuda", cuda_graphs=captures)
        drafter = RANDOM_DRAFTERS[kind](target).configure(compile_rounds=False)
        for _ in range(2):
            torch.manual_seed(3)
            out = target.generate(
                **inputs, max_new_tokens=40, assistant_model=drafter, num_assistant_tokens=4, **MODES[mode]
            )
            texts.append(out)
            rows.append(drafter.stats.rows)
        assert len(drafter.sessions) == int(captures)
    assert all(torch.equal(text, texts[0]) for text in texts)
    assert all(row == rows[0] for row in rows)


@pytest.mark.parametrize("tree", [None, 12])
@pytest.mark.parametrize("kind", ["eagle3", "p-eagle"])
@pytest.mark.parametrize("mode", ["greedy", "penalty", "ngrams", "hot sampling"])
def test_scores_and_logprobs_of_replays_are_those_of_eager_rounds(monkeypatch, kind, mode, tree):
    target, inputs = on_gpu("llama"), prompts([9, 1, 5])
    options = {"max_new_tokens": 20, "return_dict_in_generate": True, "return_logprobs": "both", **MODES[mode]}
    both = {"output_scores": True, "output_logits": True}

    def generated(drafter, **kept):
        torch.manual_seed(3)
        return target.generate(**inputs, assistant_model=drafter, num_assistant_tokens=4, tree=tree, **options, **kept)

    set_policy(monkeypatch, "cuda", cuda_graphs=False)
    kept = generated(RANDOM_DRAFTERS[kind](target), **both)
    tokens = kept.sequences[:, inputs["input_ids"].shape[1] :]
    set_policy(monkeypatch, "cuda", cuda_graphs=True)
    drafter = RANDOM_DRAFTERS[kind](target).configure(compile_rounds=False)
    for one in (both, both, {}, {}):
        out = generated(drafter, **one)
        assert drafter.stats.execution.startswith("captured") and torch.equal(out.sequences, kept.sequences)
        for found, name in ((out.logprobs, "scores"), (out.raw_logprobs, "logits")):
            steps = torch.stack(getattr(kept, name), dim=1)
            expected = steps.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
            if one:
                # Captured rounds may add in another order.
                torch.testing.assert_close(torch.stack(getattr(out, name), dim=1), steps, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "eta_cutoff": 0.2, "seeds": [7]}])
def test_replays_read_the_processors_of_the_call_that_captured(monkeypatch, options):
    """Their tensors live on, although the call has ended and its memory is used by others."""
    target, prompt, texts = on_gpu("llama"), torch.tensor([[9, 4, 9]], device="cuda"), []
    first = target.generate(prompt, do_sample=False, max_new_tokens=24)[0, 3:].tolist()
    options = {"suppress_tokens": sorted(set(first))[:3], "max_new_tokens": 24, "top_k": 0, **options}
    for captures in (True, False):
        set_policy(monkeypatch, "cuda", cuda_graphs=captures)
        drafter = RANDOM_DRAFTERS["eagle3"](target).configure(compile_rounds=False)
        for _ in range(3):
            texts.append(target.generate(prompt, assistant_model=drafter, **options).tolist())
            gc.collect()
            others = [torch.full((size,), 17, device="cuda") for size in (1, 2, 3, 4) for _ in range(200)]
            del others
    assert all(text == texts[-1] for text in texts)


@pytest.mark.parametrize("mode", ["greedy", "penalty", "ngrams", "hot sampling"])
@pytest.mark.parametrize("kind", RANDOM_DRAFTERS)
def test_replayed_prefills_equal_eager_ones(monkeypatch, kind, mode):
    """Prompts of several lengths in one session, in one bucket and in others; the longest are not captured."""
    monkeypatch.setattr(buckets, "MOST_CAPTURED_TOKENS", 256)
    target, widths = on_gpu("llama"), []
    lengths = [[9, 1, 5], [17, 3, 1], [1, 1, 1], [40, 2, 30], [300, 200, 9], [12, 33, 8], [9, 1, 5]]
    if mode == "ngrams":
        lengths[2] = [1, 2, 1]  # prompts without padding have another session, whose rounds include the rule

    def counted(session, hosted, width):
        widths.append(width)
        return capture_prefill(session, hosted, width)

    monkeypatch.setattr("hf_specdec.engine.session_prefill.capture_prefill", counted)
    generated = []
    for captures in (True, False):
        set_policy(monkeypatch, "cuda", cuda_graphs=captures)
        drafter = RANDOM_DRAFTERS[kind](target).configure(compile_rounds=False)
        for seed, some in enumerate(lengths):
            torch.manual_seed(seed)
            out = target.generate(
                **prompts(some, seed=seed),
                max_new_tokens=24,
                assistant_model=drafter,
                num_assistant_tokens=4,
                **MODES[mode],
            )
            generated.append((out.tolist(), drafter.stats.rows))
        assert len(drafter.sessions) == int(captures)
    assert generated[: len(lengths)] == generated[len(lengths) :]
    # Tokens of all prompts; or columns, if those of several rows are not packed in one.
    assert widths == ([16, 32, 128, 64] if drafter.packs_prompts else [16, 32, 64])


@pytest.mark.parametrize("family", STATIC_FAMILIES)
@pytest.mark.parametrize("kind", RANDOM_DRAFTERS)
def test_greedy_is_identical_in_float32(family, kind):
    target = on_gpu(family)
    drafter = RANDOM_DRAFTERS[kind](target).configure(compile_rounds=False)
    for lengths in ([9], [1, 12, 5]):
        inputs = prompts(lengths)
        plain = target.generate(**inputs, do_sample=False, max_new_tokens=24)
        for num_draft_tokens in (1, 4, 16):
            out = target.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=24,
                assistant_model=drafter,
                num_assistant_tokens=num_draft_tokens,
            )
            assert torch.equal(out, plain), (lengths, num_draft_tokens)
            assert drafter.stats.execution == "captured in one graph, not compiled"


# Compiling takes the better part of a minute: all drafters on one target, all targets and modes with one drafter.
@pytest.mark.parametrize(
    ("kind", "mode", "family"),
    [
        *((kind, "hot sampling", "llama") for kind in RANDOM_DRAFTERS),
        *(("eagle3", "greedy", family) for family in STATIC_FAMILIES),
        ("eagle3", "penalty", "llama"),
        ("eagle3", "ngrams", "llama"),
    ],
)
def test_compiled_rounds_generate_the_same(kind, mode, family):
    target = on_gpu(family)
    inputs = prompts([9, 1, 5])
    texts = []
    for is_compiled in (False, True):
        drafter = RANDOM_DRAFTERS[kind](target).configure(compile_rounds=is_compiled)
        torch.manual_seed(3)
        texts.append(
            target.generate(**inputs, max_new_tokens=24, assistant_model=drafter, num_assistant_tokens=4, **MODES[mode])
        )
        assert drafter.stats.execution.endswith(", compiled" if is_compiled else "not compiled")
    assert torch.equal(*texts)


def test_temperature_division_equals_the_warpers_bit_for_bit():
    scores = 20 * torch.randn(64, 4096, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    for temperature in torch.linspace(0.05, 2.5, 50).tolist():
        out = divide(scores, torch.tensor(temperature, device="cuda"))
        assert torch.equal(out, TemperatureLogitsWarper(temperature)(None, scores))


@pytest.mark.parametrize("name", LISTS)
def test_rules_equal_the_processors_bit_for_bit(name):
    check_bits(name, "cuda")


@pytest.mark.parametrize("mode", DRAWS)
@pytest.mark.parametrize("kind", RANDOM_DRAFTERS)
def test_a_seed_generates_the_same_alone_in_a_batch_eager_and_captured(monkeypatch, kind, mode):
    target, lengths = on_gpu("llama"), [9, 1, 5, 12, 3, 3, 8, 2]
    inputs, seeds = prompts(lengths), torch.arange(8) * 7 + 2**40
    texts = []
    for captures in (True, False):
        set_policy(monkeypatch, "cuda", cuda_graphs=captures)
        drafter = drafter_of(target, kind, mode).configure(compile_rounds=False)
        for _ in range(2):
            texts.append(sample(target, inputs, drafter, seeds=seeds, temperature=1.2, top_k=0))
        assert drafter.stats.execution.startswith("captured in one graph" if captures else "eager")
        for row, length in enumerate(lengths):
            some = {name: tensor[row : row + 1, -length:] for name, tensor in inputs.items()}
            alone = sample(target, some, drafter, seeds=seeds[row : row + 1], temperature=1.2, top_k=0)
            assert torch.equal(alone[0], texts[0][row]), (row, captures)
    assert all(torch.equal(text, texts[0]) for text in texts)


@pytest.mark.parametrize("mode", DRAWS)
@pytest.mark.parametrize("kind", RANDOM_DRAFTERS)
def test_random_numbers_differ_by_round_replay_and_row(kind, mode):
    """A target to which all tokens are equally likely at every place: what is drawn twice is seen."""
    target = on_gpu("llama")
    target.lm_head.weight.data.zero_()
    drafter = drafter_of(target, kind, mode).configure(compile_rounds=False)
    options = {"top_k": 0, "max_new_tokens": 48, "num_return_sequences": 8}
    calls = [sample(target, prompts([5]), drafter, seeds=seed, **options) for seed in (1, 2)]
    assert drafter.stats.execution.startswith("captured in one graph") and len(drafter.sessions) == 1
    texts = torch.cat(calls).tolist()
    for index, text in enumerate(texts):
        assert len(set(text)) > 25  # 38 of 96 tokens are expected, and 4 if rounds drew the same
        for other in texts[:index]:
            assert sum(one == two for one, two in zip(text, other, strict=True)) < 10  # 0.5 are expected


@pytest.mark.smollm2
@pytest.mark.parametrize("verification", ["token", "block"])
def test_samples_have_the_distribution_of_a_real_target(verification):
    from smollm2 import load_smollm2

    model, tokenizer = load_smollm2(device="cuda")
    model.generation_config.eos_token_id = None
    drafter = AutoDrafter.from_pretrained(DRAFTERS[0], target=model, num_assistant_tokens=3, compile=False)
    drafter.configure(draft_probs=True, verification=verification)
    prompt = tokenizer("Once upon a time there was", return_tensors="pt").to("cuda")
    rows, calls = 512, 391
    cells = Cells(model, prompt["input_ids"], 3, least=20 / (rows * calls))
    options = {"max_new_tokens": 3, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "num_return_sequences": rows}
    counts = torch.zeros(len(cells.law), dtype=torch.int64)
    for seed in range(calls):
        counts += cells.count(sample(model, prompt, drafter, seeds=seed, **options))
        assert drafter.stats.draft_probs and drafter.stats.execution.startswith("captured in one graph")
    assert counts.sum() >= 200_000 and len(cells.law) > 500
    assert drafter.stats.acceptance_per_position[0] > 0.1, "hardly anything was accepted, so little was shown"
    found = p_value(counts, cells.law)
    print(f"{verification}: {counts.sum()} draws in {len(cells.law)} cells, p-value {found:.3f}")
    assert found > 1e-3


def test_rounds_that_read_the_host_run_eagerly(caplog):
    target = on_gpu("llama")
    norm = target.model.norm
    forward = norm.forward
    norm.forward = lambda hidden: forward(hidden) if hidden.sum().item() < 1e30 else hidden
    drafter = RANDOM_DRAFTERS["eagle3"](target)
    options = {**prompts([9, 4]), "do_sample": False, "max_new_tokens": 12}
    out = target.generate(**options, assistant_model=drafter)
    assert drafter.stats.execution == "eager: a round cannot be captured"
    assert "cannot be captured and runs eagerly" in caplog.text
    assert torch.equal(out, target.generate(**options))


def test_graphs_share_memory_until_a_capture_fails():
    memory, current = cuda_graphs.GraphPool(), torch.cuda.current_stream()
    buffer = torch.zeros(2**20, device="cuda")

    def of_its_own():
        return (buffer + 1).sqrt().sum()

    count = cuda_graphs.CudaGraph(lambda: buffer.add_(1), memory)
    others = [cuda_graphs.CudaGraph(of_its_own, memory) for _ in range(2)]
    pool = memory.owner.pool()
    with pytest.raises(RuntimeError):
        cuda_graphs.CudaGraph(lambda: of_its_own().item(), memory)
    assert memory.owner is None and torch.cuda.current_stream() == current
    others += [cuda_graphs.CudaGraph(of_its_own, memory) for _ in range(2)]
    assert memory.owner.pool() != pool
    for number in range(1, 4):
        count()
        assert [float(graph()) for graph in others] == [float(of_its_own())] * 4
        assert float(buffer[0]) == number + 2  # runs before the capture


def test_many_calls_leak_no_memory(monkeypatch):
    """A thousand calls of random shapes, in which rounds are captured, replayed and given up again and again."""
    target = on_gpu("llama")
    drafter = RANDOM_DRAFTERS["eagle3"](target).configure(compile_rounds=False)
    generator = torch.Generator().manual_seed(0)
    reserved, allocated, captured = [], [], []

    def counted(*args):
        captured.append(len(reserved))
        return capture_round(*args)

    monkeypatch.setattr("hf_specdec.engine.lease.capture_round", counted)
    for call in range(1000):
        batch, length, new = (int(torch.randint(1, top, (1,), generator=generator)) for top in (9, 40, 30))
        # Capturing is what takes time: batches of all sizes share a few captures before K changes and they are gone.
        options = {"max_new_tokens": new, "num_assistant_tokens": 1 + call // 25 % 5}
        target.generate(**prompts([length] * batch), do_sample=False, assistant_model=drafter, **options)
        reserved.append(torch.cuda.memory_reserved())
        assert len(drafter.sessions) <= MAX_SESSIONS
        if call % 500 == 499:
            drafter.release()
            assert len(drafter.sessions) == 0
            gc.collect()
            allocated.append(torch.cuda.memory_allocated())
    # A graph that stayed would hold at least a segment of the allocator's, of 2 MiB; a tensor a call is found at rest.
    assert sum(call >= 500 for call in captured) > 64
    assert max(reserved[500:]) - max(reserved[:500]) < 32 * 2**20
    assert allocated[1] - allocated[0] < 2**18


@pytest.mark.smollm2
@pytest.mark.parametrize(("batch_size", "num_prompts"), [(1, 12), (8, 40)])
def test_bfloat16_outputs_differ_only_at_ties(batch_size, num_prompts):
    from smollm2 import load_smollm2

    model, tokenizer = load_smollm2(dtype=torch.bfloat16, device="cuda")
    judge, _ = load_smollm2(dtype=torch.float32, device="cuda")
    drafter = AutoDrafter.from_pretrained(DRAFTERS[0], target=model, num_assistant_tokens=5)
    identical = total = 0
    for inputs in chat_batches(tokenizer, num_prompts=num_prompts, batch_size=batch_size):
        inputs = inputs.to("cuda")
        plain = model.generate(**inputs, do_sample=False, max_new_tokens=128)
        out = model.generate(**inputs, do_sample=False, max_new_tokens=128, assistant_model=drafter)
        width = min(plain.shape[1], out.shape[1])
        for row in range(len(out)):
            differences = (plain[row, :width] != out[row, :width]).nonzero()
            total += 1
            identical += len(differences) == 0
            if len(differences):
                at = int(differences[0])
                prefix = plain[row, :at][int((inputs["attention_mask"][row] == 0).sum()) :]
                with torch.no_grad():
                    logits = judge(prefix[None]).logits[0, -1]
                gap = (logits[plain[row, at]] - logits[out[row, at]]).abs()
                # A bfloat16 has 8 significant bits; logits come out of a product of many such roundings.
                assert gap <= 4 * 2.0**-8 * logits.abs().max(), (row, at, float(gap))
    print(f"batch {batch_size}: {identical} of {total} outputs identical")
