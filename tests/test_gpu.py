"""On a GPU: captured rounds are eager rounds, outputs those of plain `generate()`, up to ties in bfloat16."""

import copy

import pytest
import torch
from oracle import RANDOM_DRAFTERS
from targets import PAD, STATIC_FAMILIES, padded_prompts, tiny_target
from test_smollm2 import DRAFTERS, chat_batches

from hf_specdec import AutoDrafter, graphs
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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", RANDOM_DRAFTERS)
@pytest.mark.parametrize("batch", [1, 3, 8])
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


@pytest.mark.parametrize("family", STATIC_FAMILIES)
@pytest.mark.parametrize("mode", ["greedy", "penalty", "hot sampling"])
@pytest.mark.parametrize("kind", RANDOM_DRAFTERS)
def test_compiled_rounds_say_the_same(kind, mode, family):
    if family != "llama" and (kind, mode) != ("eagle3", "greedy"):
        pytest.skip("one drafter is enough")
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
    norm.forward = lambda hidden: forward(hidden) if hidden.sum().item() < 1e30 else hidden
    drafter = RANDOM_DRAFTERS["eagle3"](target)
    options = {**prompts([9, 4]), "do_sample": False, "max_new_tokens": 12}
    out = target.generate(**options, assistant_model=drafter)
    assert drafter.stats.execution == "eager: a round cannot be captured"
    assert "cannot be captured and runs eagerly" in caplog.text
    assert torch.equal(out, target.generate(**options))


def test_many_calls_leave_no_memory_behind():
    target = on_gpu("llama")
    drafter = RANDOM_DRAFTERS["eagle3"](target).configure(compile_rounds=False)
    generator = torch.Generator().manual_seed(0)
    used = []
    for _ in range(200):
        batch, length, new, num = (int(torch.randint(1, top, (1,), generator=generator)) for top in (9, 40, 60, 6))
        inputs = prompts([length] * batch)
        target.generate(
            **inputs, do_sample=False, max_new_tokens=new, assistant_model=drafter, num_assistant_tokens=num
        )
        used.append(torch.cuda.memory_reserved())
    assert len(drafter.sessions) <= MAX_SESSIONS
    assert max(used[150:]) <= max(used[:150])
    drafter.release()
    assert len(drafter.sessions) == 0


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
