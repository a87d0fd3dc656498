"""On a GPU: captured rounds are eager rounds, outputs those of plain `generate()`, up to ties in bfloat16."""

import copy
import gc

import pytest
import torch
from oracle import RANDOM_DRAFTERS
from targets import PAD, STATIC_FAMILIES, padded_prompts, tiny_target
from test_smollm2 import DRAFTERS, chat_batches

from hf_specdec import AutoDrafter, graphs
from hf_specdec.decoding import capture_round
from hf_specdec.sessions import MAX_SESSIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


MODES = {
    "greedy": {"do_sample": False},
    "end of sequence": {"do_sample": False, "eos_token_id": [7, 11, 13], "pad_token_id": PAD},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "cold sampling": {"do_sample": True, "temperature": 0.7, "top_p": 0.9},
    "hot sampling": {"do_sample": True, "temperature": 1.3, "top_k": 20},
}


def on_gpu(family):
    return copy.deepcopy(tiny_target(family)).to("cuda")


def prompts(lengths, seed=0):
    return {name: tensor.to("cuda") for name, tensor in padded_prompts(lengths, seed=seed).items()}


# Three rows are captured as four, one of them inert.
@pytest.mark.parametrize(("mode", "batch"), [*((mode, 3) for mode in MODES), ("greedy", 1), ("hot sampling", 8)])
@pytest.mark.parametrize("kind", RANDOM_DRAFTERS)
def test_replay_equals_eager(monkeypatch, kind, mode, batch):
    target = on_gpu("llama")
    inputs = prompts([9, 1, 5, 12, 3, 3, 8, 2][:batch], seed=batch)
    texts, rows = [], []
    for capture in (graphs.CAPTURE, {}):
        monkeypatch.setattr("hf_specdec.decoding.CAPTURE", capture)
        drafter = RANDOM_DRAFTERS[kind](target).configure(compile_rounds=False)
        for _ in range(2):
            torch.manual_seed(3)
            out = target.generate(
                **inputs, max_new_tokens=40, assistant_model=drafter, num_assistant_tokens=4, **MODES[mode]
            )
            texts.append(out)
            rows.append(drafter.stats.rows)
        assert len(drafter.sessions) == len(capture)
    assert all(torch.equal(text, texts[0]) for text in texts)
    assert all(row == rows[0] for row in rows)


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
    ],
)
def test_compiled_rounds_say_the_same(kind, mode, family):
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


def test_what_reads_the_host_runs_eagerly(caplog):
    target = on_gpu("llama")
    norm = target.model.norm
    forward = norm.forward
    norm.forward = lambda hidden: forward(hidden) if hidden.sum().item() is not None else hidden
    drafter = RANDOM_DRAFTERS["eagle3"](target)
    options = {**prompts([9, 4]), "do_sample": False, "max_new_tokens": 12}
    out = target.generate(**options, assistant_model=drafter)
    assert drafter.stats.execution == "eager: a round cannot be captured"
    assert "cannot be captured and runs eagerly" in caplog.text
    assert torch.equal(out, target.generate(**options))


def test_many_calls_leave_no_memory_behind(monkeypatch):
    """A thousand calls of random shapes, in which rounds are captured, replayed and given up again and again."""
    target = on_gpu("llama")
    drafter = RANDOM_DRAFTERS["eagle3"](target).configure(compile_rounds=False)
    generator = torch.Generator().manual_seed(0)
    reserved, allocated, captured = [], [], []

    def counted(*args):
        captured.append(len(reserved))
        return capture_round(*args)

    monkeypatch.setattr("hf_specdec.decoding.capture_round", counted)
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
@pytest.mark.parametrize("batch_size", [1, 8])
def test_bfloat16_outputs_differ_only_at_ties(batch_size):
    from smollm2 import load_smollm2

    model, tokenizer = load_smollm2(dtype=torch.bfloat16, device="cuda")
    judge, _ = load_smollm2(dtype=torch.float32, device="cuda")
    drafter = AutoDrafter.from_pretrained(DRAFTERS[0], target=model, num_assistant_tokens=5)
    identical = total = 0
    for inputs in chat_batches(tokenizer, num_prompts=40, batch_size=batch_size):
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
