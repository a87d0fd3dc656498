"""Training a drafter: data, masks, objective, checkpoints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, dynamic_module_utils
from transformers.generation import utils as generation_utils

import hf_specdec
from hf_specdec.config import Eagle3Config
from hf_specdec.drafters import Eagle3Drafter
from hf_specdec.drafters.unrolled import UnrolledAttention, _ChainAttention, explicit_chain_attention
from hf_specdec.taps import TapRecorder

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import train_drafter  # noqa: E402
from training import data, objective, prompts, repetition  # noqa: E402

VOCAB, STOP = 61, 2


def tiny_target(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=STOP,
        pad_token_id=STOP,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def tiny_drafter(target: LlamaForCausalLM, ids: list[int] | None = None, **kwargs) -> Eagle3Drafter:
    ids = ids or list(range(0, VOCAB, 2))
    torch.manual_seed(1)
    config = Eagle3Config(
        vocab_size=VOCAB,
        draft_vocab_size=len(ids),
        hidden_size=32,
        target_hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        taps=[1, 2, 3],
        own_embedding=False,
        own_head=False,
        **kwargs,
    )
    drafter = Eagle3Drafter(config)
    drafter.d2t.copy_(torch.tensor(ids) - torch.arange(len(ids)))
    drafter.bind(target)
    return drafter


def write_tiny_data(target: LlamaForCausalLM, folder: Path, rows: int = 24) -> Path:
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(3, VOCAB, (rows, 4), generator=generator).tolist()
    answers = data.generate(target, starts, [0.0, 1.0] * (rows // 2), 16, [STOP], 0.0, generator)
    documents = [start + answer for start, answer in zip(starts, answers, strict=True)]
    tensors = {
        "tokens": torch.tensor([token for document in documents for token in document]).int(),
        "lengths": torch.tensor([len(document) for document in documents], dtype=torch.int32),
        "prompt_lengths": torch.full((rows,), 4, dtype=torch.int32),
    }
    folder.mkdir()
    counts = json.dumps({"prompts": rows, "held_out_overlap": 0})
    data.save_file(tensors, folder / "shard-000-00000.safetensors", metadata={"counts": counts})
    return folder


class TinyTokenizer:
    eos_token_id = STOP


def train(monkeypatch, target, folder: Path, out: Path, *more: str) -> list[dict]:
    monkeypatch.setattr(train_drafter, "load_target", lambda name, dtype, device: (target, TinyTokenizer()))
    monkeypatch.setattr(train_drafter, "write_own_data", lambda *args: None)
    arguments = ["--data", str(folder), "--out", str(out), "--draft-vocab-size", "48", "--num-steps", "3"]
    arguments += ["--tokens-per-batch", "128", "--held-out", "6", "--lr", "0.01", *more]
    train_drafter.main(arguments)
    return json.loads((out / "training.json").read_text())["curve"]


def test_training_lowers_the_loss_and_resumes_exactly(monkeypatch, tmp_path):
    target = tiny_target()
    folder = write_tiny_data(target, tmp_path / "data")
    whole = train(monkeypatch, target, folder, tmp_path / "whole", "--steps", "12", "--save-every", "4")
    assert whole[-1]["train"]["loss"][0] < whole[0]["train"]["loss"][0]

    real_schedule = train_drafter.schedule
    monkeypatch.setattr(train_drafter, "schedule", lambda share: real_schedule(share * 8 / 12))
    train(monkeypatch, target, folder, tmp_path / "parts", "--steps", "8", "--save-every", "4")
    monkeypatch.setattr(train_drafter, "schedule", real_schedule)
    parts = train(monkeypatch, target, folder, tmp_path / "parts", "--steps", "12", "--save-every", "4", "--resume")
    assert [point["step"] for point in parts] == [4, 8, 12]
    for a, b in zip(whole, parts, strict=True):
        assert (a["train"], a["held_out"]) == (b["train"], b["held_out"])

    one, other = (Eagle3Drafter.from_pretrained(tmp_path / name) for name in ("whole", "parts"))
    assert one.dtype is torch.bfloat16
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(tensor, other.state_dict()[name], rtol=0, atol=0)


def test_saved_folder_is_ready_for_the_hub(monkeypatch, tmp_path):
    target = tiny_target()
    folder = write_tiny_data(target, tmp_path / "data")
    train(monkeypatch, target, folder, tmp_path / "out", "--steps", "1", "--repo-id", "someone/tiny")
    out = tmp_path / "out"
    assert "base_model:" in (out / "README.md").read_text()
    assert 'DEFAULT_DRAFTER = "someone/tiny"' in (out / "custom_generate" / "generate.py").read_text()
    assert (out / "custom_generate" / "requirements.txt").read_text() == "hf-specdec\n"
    drafter = Eagle3Drafter.from_pretrained(out)
    drafter.bind(target)
    ids = drafter.target_ids
    assert len(ids) == 48 and STOP in ids and bool((ids.diff() > 0).all())


def test_custom_generate_runs_generate_with_the_drafter(monkeypatch, tmp_path):
    target, draft_model = tiny_target(), tiny_target(seed=1)
    folder = write_tiny_data(target, tmp_path / "data")
    out = tmp_path / "out"
    train(monkeypatch, target, folder, out, "--steps", "1", "--repo-id", "someone/tiny")
    loads = []

    class Loader:
        @staticmethod
        def from_pretrained(name, target):
            loads.append(name)
            return draft_model

    monkeypatch.setattr(hf_specdec, "AutoDrafter", Loader, raising=False)
    monkeypatch.setattr(generation_utils, "check_python_requirements", lambda *args, **kwargs: None)
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 8, "do_sample": False, "pad_token_id": STOP}
    expected = target.generate(**inputs)
    custom = {"custom_generate": str(out), "trust_remote_code": True}
    for kwargs in ({}, {}, {"drafter": "elsewhere"}):
        assert torch.equal(target.generate(**inputs, **custom, **kwargs), expected)
    assert loads == ["someone/tiny", "elsewhere"]
    with pytest.raises(ValueError, match="pass `drafter=`"):
        target.generate(**inputs, **custom, assistant_model=draft_model)


def test_bfloat16_loss_is_close_to_float32(tmp_path):
    target = tiny_target()
    drafter = tiny_drafter(target)
    documents = data.Documents.load(write_tiny_data(target, tmp_path / "data"), 512)
    lesson = objective.Teacher(target, drafter).read(documents.batch(torch.arange(8)))
    plain = objective.DraftObjective(drafter, 4, 0.9)
    loss, _ = plain(lesson)
    with torch.autocast("cpu", torch.bfloat16):
        half, _ = plain(lesson)
    torch.testing.assert_close(half, loss, rtol=0.02, atol=0.0)
    half.backward()
    assert all(parameter.grad.isfinite().all() for parameter in drafter.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("steps", [2, 4])
def test_fused_chain_attention_equals_the_definition(dtype, steps):
    torch.manual_seed(0)
    tensors = [torch.randn(2, 3, 37, 16, dtype=dtype, requires_grad=True) for _ in range(2 * steps + 1)]
    query, keys, values = tensors[0], tensors[1 : steps + 1], tensors[steps + 1 :]
    grad = torch.randn(2, 3, 37, 16, dtype=dtype)
    fused = _ChainAttention.apply(query, *keys, *values)
    explicit = explicit_chain_attention(query, keys, values)
    torch.testing.assert_close(fused, explicit)
    for a, b in zip(
        torch.autograd.grad(fused, tensors, grad), torch.autograd.grad(explicit, tensors, grad), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_unrolled_attention_equals_a_loop_over_slots():
    torch.manual_seed(0)
    attend, keys, values = UnrolledAttention(), [], []
    for step in range(3):
        query, key, value = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
        keys.append(key.repeat_interleave(2, 1))
        values.append(value.repeat_interleave(2, 1))
        out = attend(0, query, key, value, None)
        for slot in range(9):
            seen = torch.cat([keys[0][:, :, : slot + 1], *(key[:, :, slot, None] for key in keys[1:])], dim=2)
            read = torch.cat([values[0][:, :, : slot + 1], *(value[:, :, slot, None] for value in values[1:])], dim=2)
            expected = F.scaled_dot_product_attention(query[:, :, slot, None], seen, read)
            torch.testing.assert_close(out[:, slot], expected[:, :, 0])
        assert step + 1 == len(keys)


@pytest.mark.parametrize("options", [{}, {"num_hidden_layers": 2}, {"norm_output": True}, {"qk_norm": True}])
def test_unrolled_logits_equal_drafting_step_by_step(options):
    target = tiny_target()
    drafter = tiny_drafter(target, **options)
    tokens = torch.randint(0, VOCAB, (1, 12), generator=torch.Generator().manual_seed(0))
    with TapRecorder(target, drafter.tap_boundaries) as recorder:
        target(tokens)
        taps = recorder.taps
    unrolled = drafter(tokens, taps, num_steps=4)
    for slot in range(8):
        hidden = drafter.combine(taps[:, : slot + 1])
        for step in range(4):
            end = slot + step + 1
            positions = torch.arange(end)[None]
            normed, feedback = drafter.run(tokens[:, 1 : end + 1], hidden, positions, UnrolledAttention())
            torch.testing.assert_close(unrolled[step][:, slot], drafter.logits(normed[:, -1]), rtol=1e-4, atol=1e-4)
            hidden = torch.cat([hidden, feedback[:, -1:]], dim=1)


def test_masks_of_a_batch():
    tokens = torch.tensor([10, 11, 12, 13, 14, 20, 21, 22, 23], dtype=torch.int32)
    documents = data.Documents(tokens, torch.tensor([5, 4]), torch.tensor([2, 1]), max_length=512)
    batch = documents.batch(torch.tensor([0, 1]))
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 14], [20, 21, 22, 23, 0]]
    # Row 0's answer is 12 13 14: the target's distributions at positions 2 and 3 are learnt; row 1's, at 1 and 2.
    assert batch.places.tolist() == [2, 3, 6, 7]
    assert batch.depths.tolist() == [0, 1, 0, 1]
    assert documents.answer_counts(32).nonzero()[:, 0].tolist() == [12, 13, 14, 21, 22, 23]


def test_counts_and_loss_of_the_objective_by_hand():
    target = tiny_target()
    drafter = tiny_drafter(target)
    tokens = torch.randint(3, VOCAB, (1, 10), generator=torch.Generator().manual_seed(3)).int()
    documents = data.Documents(tokens[0], torch.tensor([10]), torch.tensor([3]), max_length=512)
    batch = documents.batch(torch.tensor([0]))
    lesson = objective.Teacher(target, drafter).read(batch)
    steps, decay = 3, 0.5
    loss, counts = objective.DraftObjective(drafter, steps, decay)(lesson)

    ids = drafter.target_ids
    logits = target(batch.input_ids).logits[0]
    best = logits.argmax(-1)
    drafts = drafter(batch.input_ids, lesson.taps, steps)
    expected_loss, alive = 0.0, [True] * 10
    for step in range(steps):
        losses, existing, hits, reached, accepted = [], 0, 0, 0, 0
        for slot in range(2, 10):
            place = slot + 1 + step
            if place > 8:
                continue
            draft = drafts[step][0, slot]
            existing += 1
            hit = int(ids[draft.argmax()] == best[place])
            hits += hit
            reached += alive[slot]
            accepted += alive[slot] and hit
            alive[slot] = bool(alive[slot] and hit and tokens[0, place + 1] == best[place])
            if best[place] in ids:
                losses.append(-(logits[place, ids].softmax(-1) * draft.log_softmax(-1)).sum())
        mean = sum(losses) / max(len(losses), 1)
        expected_loss = expected_loss + decay**step / sum(decay**s for s in range(steps)) * mean
        assert counts[step, 1:].tolist() == [len(losses), existing, hits, reached, accepted]
    torch.testing.assert_close(loss, torch.as_tensor(expected_loss))

    trained = dict(drafter.named_parameters())
    grads = torch.autograd.grad(loss, list(trained.values()), retain_graph=True)
    expected = torch.autograd.grad(expected_loss, list(trained.values()))
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_generate_equals_greedy_generate_for_ragged_prompts():
    target = tiny_target()
    rows = [[5, 6, 7], [8, 9, 10, 11, 12], [13]]
    written = data.generate(target, rows, [0.0] * 3, 40, [STOP], 0.05, torch.Generator())
    for row, tokens in zip(rows, written, strict=True):
        expected = target.generate(torch.tensor([row]), max_new_tokens=40, do_sample=False, pad_token_id=STOP)
        assert tokens == expected[0, len(row) :].tolist()


def test_draft_vocabulary():
    counts = torch.tensor([0, 9, 0, 5, 7, 1])
    d2t, coverage = data.draft_vocabulary(counts, 3, always=[2])
    assert (d2t + torch.arange(3)).tolist() == [1, 2, 4]
    assert coverage == pytest.approx(16 / 22)


def test_epochs_hold_every_document_once():
    lengths = torch.randint(1, 50, (200,), generator=torch.Generator().manual_seed(0))
    documents = data.Documents(torch.zeros(int(lengths.sum()), dtype=torch.int32), lengths, lengths // 2, 512)
    batches = documents.epoch(torch.arange(200), tokens_per_batch=256, seed=1)
    assert torch.cat(batches).sort().values.tolist() == list(range(200))
    assert all(len(batch) * int(lengths[batch].max()) <= 256 for batch in batches)
    again = documents.epoch(torch.arange(200), tokens_per_batch=256, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(batches, again, strict=True))


def test_degenerate_texts():
    words = np.arange(100)
    assert not repetition.is_degenerate(words)
    assert not repetition.is_degenerate(np.array([]))
    assert repetition.is_degenerate(np.concatenate([words, np.tile([1, 2, 3], 4)]))
    assert not repetition.is_degenerate(np.concatenate([words, np.tile([1, 2, 3], 3)]))
    assert repetition.is_degenerate(np.concatenate([words, np.tile(np.arange(20), 4)]))
    counting = np.concatenate([[200 + index, *range(12)] for index in range(8)])
    assert repetition.loop_at_end(counting, 16, 4) is None
    assert repetition.is_degenerate(counting)


def test_loops_are_cut_after_their_second_turn():
    assert repetition.trimmed_length(np.concatenate([np.arange(30), np.tile([90, 91], 9)])) == 34
    assert repetition.trimmed_length(np.arange(30)) == 30


def test_held_out_prompts_are_refused():
    held_out = ["Explain why the sky turns red at sunset."]
    checked = prompts.PromptFilter(held_out)
    assert not checked.accepts("explain why the sky turns red at sunset")
    assert not checked.accepts("Explain why the sky turns red at sunset, please, in simple words")
    assert checked.accepts("Explain why the sea is blue at noon and black at night.")
    assert not checked.accepts("Explain why the sea is blue at noon and black at night.")
    assert checked.refused == {"held_out_overlap": 2, "repeated": 1}


def test_committed_prompts_are_many_and_different():
    for name, least in (("chat", 100), ("code", 80)):
        texts = [line["prompt"] for line in prompts.load_prompts(EXAMPLES / "prompts" / f"{name}.jsonl")]
        assert len({" ".join(prompts.normalized_words(text)) for text in texts}) == len(texts) >= least
