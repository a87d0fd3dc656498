"""Training a drafter: data, masks, objective, checkpoints."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import targets
import torch
from safetensors.torch import load_file
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    dynamic_module_utils,
)
from transformers.generation import utils as generation_utils

import hf_specdec
from hf_specdec import AutoDrafter, NoDrafter
from hf_specdec.config import DraftModelConfig, Eagle3Config, MtpConfig, PEagleConfig, mtp_block_settings
from hf_specdec.drafters import (
    DraftModelDrafter,
    Eagle3Drafter,
    MtpDrafter,
    PEagleDrafter,
)
from hf_specdec.drafters.cached import CachedDrafter
from hf_specdec.drafters.unrolled import UnrolledAttention, _ChainAttention, explicit_chain_attention
from hf_specdec.kernels.types import Columns
from hf_specdec.modules.hidden_states import AuxHiddenStateRecorder
from hf_specdec.prompt_sources import load_prompts
from hf_specdec.stats import RowStats
from hf_specdec.training import objective

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import evaluate_drafter  # noqa: E402
import train_drafter  # noqa: E402
from training import card, composed_prompts, data, drafters, long_prompts, prompts, repetition, writing  # noqa: E402

VOCAB, STOP, MASK = 61, 2, 60
FAMILIES = ["eagle3", "p-eagle", "pard", "mtp"]
BLOCK_FAMILIES = ["dflash", "dspark"]
ROWS = 24  # of data
IN_PARALLEL = ("p-eagle", "pard", "pard2", *BLOCK_FAMILIES)
OPTIONS = {
    "eagle3": ["--draft-vocab-size", "48"],
    "p-eagle": ["--draft-vocab-size", "48", "--mask-token-id", str(MASK), "--layers", "1"],
    "pard": ["--mask-token-id", str(MASK), "--layers", "1"],
    "pard2": ["--mask-token-id", str(MASK), "--layers", "1"],
    "mtp": ["--layers", "2", "--intermediate-size", "40"],
    "dflash": ["--draft-vocab-size", "48", "--mask-token-id", str(MASK), "--layers", "1", "--anchors", "6"],
}
OPTIONS["dspark"] = [*OPTIONS["dflash"], "--markov-rank", "8"]
OPTIONS["dflash"] += ["--optimizer", "adamw"]


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


def tiny_drafter(target: LlamaForCausalLM, family: str = "eagle3", **kwargs) -> CachedDrafter:
    torch.manual_seed(1)
    if family == "pard":
        model = {**target.config.to_dict(), "num_hidden_layers": 2}
        drafter = DraftModelDrafter(
            DraftModelConfig(model=model, vocab_size=VOCAB, parallel_drafting=True, mask_token_id=MASK, **kwargs)
        )
        drafter.bind(target)
        return drafter
    if family == "mtp":
        block = mtp_block_settings(target.config, kwargs.pop("num_modules", 2))
        drafter = MtpDrafter(MtpConfig.for_target(target.config, block, **kwargs))
        drafter.bind(target)
        return drafter
    ids = list(range(0, VOCAB, 2))
    config_class, drafter_class = Eagle3Config, Eagle3Drafter
    if family == "p-eagle":
        config_class, drafter_class = PEagleConfig, PEagleDrafter
        kwargs["mask_token_id"] = MASK
    config = config_class(
        vocab_size=VOCAB,
        draft_vocab_size=len(ids),
        hidden_size=32,
        target_hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        aux_hidden_state_layer_ids=[1, 2, 3],
        own_embedding=False,
        own_head=False,
        **kwargs,
    )
    drafter = drafter_class(config)
    drafter.d2t.copy_(torch.tensor(ids) - torch.arange(len(ids)))
    if family == "p-eagle":
        drafter.mask_hidden.data.normal_()
    drafter.bind(target)
    return drafter


def read_hidden_states(target: LlamaForCausalLM, drafter: CachedDrafter, tokens: torch.Tensor) -> torch.Tensor | None:
    with AuxHiddenStateRecorder(
        target, drafter.aux_hidden_state_layer_ids, drafter.reads_last_hidden_state
    ) as recorder:
        target(tokens)
        return recorder.aux_hidden_states


@functools.cache
def tiny_documents(seed: int) -> list[list[int]]:
    """Prompts of 4 tokens, and what the target of `seed` answers: greedily to every other one."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(3, VOCAB, (ROWS, 4), generator=generator).tolist()
    seeds, temperatures = [*range(100, 100 + ROWS)], [0.0, 1.0] * (ROWS // 2)
    with torch.random.fork_rng():  # weights that a test draws do not depend on whether this is the first one
        target = tiny_target(seed)
        answers = writing.generate(target, NoDrafter(target), starts, temperatures, 16, [STOP], 0.0, seeds, ROWS)
    return [start + answer for start, answer in zip(starts, answers, strict=True)]


def write_tiny_data(folder: Path, seed: int = 0) -> Path:
    documents = tiny_documents(seed)
    tensors = {
        "tokens": torch.tensor([token for document in documents for token in document]).int(),
        "lengths": torch.tensor([len(document) for document in documents], dtype=torch.int32),
        "prompt_lengths": torch.full((ROWS,), 4, dtype=torch.int32),
    }
    folder.mkdir()
    options = writing.WriteOptions(max_answer_tokens=16, answer_temperatures=(0.0, 1.0), min_p=0.0)
    about = {"counts": {"prompts": ROWS, "held_out_overlap": 0}, "options": vars(options)}
    metadata = {name: json.dumps(value) for name, value in about.items()}
    writing.save_file(tensors, folder / "shard-000-00000.safetensors", metadata=metadata)
    return folder


class TinyTokenizer:
    eos_token_id = STOP


def train(monkeypatch, target, folder: Path, out: Path, *more: str, family: str = "eagle3") -> list[dict]:
    monkeypatch.setattr(train_drafter, "load_target", lambda name, dtype, device: (target, TinyTokenizer()))
    monkeypatch.setattr(train_drafter, "write_own_data", lambda *args: None)
    arguments = ["--data", str(folder), "--out", str(out), "--family", family, "--num-steps", "3"]
    arguments += [*OPTIONS[family], "--tokens-per-batch", "128", "--held-out", "6", "--lr", "0.01", *more]
    train_drafter.main(arguments)
    return json.loads((out / "training.json").read_text())["curve"]


@pytest.mark.parametrize("family", [*FAMILIES, "pard2", *BLOCK_FAMILIES])
def test_training_lowers_the_loss_and_resumes_exactly(monkeypatch, tmp_path, family):
    target = tiny_target()
    folder = write_tiny_data(tmp_path / "data")
    shapes = ("--key-value-heads", "4", "--aux-layers", "2") if family == "dspark" else ()

    def run(name: str, *more: str) -> list[dict]:
        return train(monkeypatch, target, folder, tmp_path / name, "--save-every", "4", *more, *shapes, family=family)

    whole = run("whole", "--steps", "12")
    for first, last in zip(whole[0]["train"]["loss"], whole[-1]["train"]["loss"], strict=True):
        assert last < first

    real_schedule = train_drafter.schedule
    monkeypatch.setattr(train_drafter, "schedule", lambda share: real_schedule(share * 8 / 12))
    run("parts", "--steps", "8")
    monkeypatch.setattr(train_drafter, "schedule", real_schedule)
    parts = run("parts", "--steps", "12", "--resume")
    assert [point["step"] for point in parts] == [4, 8, 12]
    for a, b in zip(whole, parts, strict=True):
        assert (a["train"], a["held_out"]) == (b["train"], b["held_out"])

    one, other = (AutoDrafter.from_pretrained(tmp_path / name, target=target) for name in ("whole", "parts"))
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(tensor, other.state_dict()[name], rtol=0, atol=0)


KILLED = """
import os, sys
sys.path[:0] = {paths!r}
import pytest, small_models
from test_training import tiny_target, train
small_models.prepare()
for more in {more!r}:
    if (child := os.fork()) == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        train(pytest.MonkeyPatch(), tiny_target(), *map({path}, {folders!r}), *more, family={family!r})
        os._exit(1)
    print(child, flush=True)
    os.wait()
"""


def test_a_killed_run_resumes_to_the_same_curve(monkeypatch, tmp_path):
    """A process is killed somewhere, twice: at any place of a step, or while it writes a checkpoint.

    Both are forks of one, which has imported what they need.
    """
    family, more = "dspark", ("--replay-share", "0.5", "--survival-floor", "0.5", "--loss", "dspark")
    target, curve = tiny_target(), []
    folder = write_tiny_data(tmp_path / "data")
    steps = ("--steps", "20", "--save-every", "2")
    whole = train(monkeypatch, target, folder, tmp_path / "whole", *steps, *more, family=family)

    out = tmp_path / "killed"
    program = KILLED.format(
        paths=[str(Path(__file__).parent), str(Path(targets.__file__).parent)],
        path="__import__('pathlib').Path",
        folders=(str(folder), str(out)),
        more=[(*steps, *more, *resume) for resume in ((), ("--resume",))],
        family=family,
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for points in (2, 5):
        child = int(process.stdout.readline())
        while len(curve) < points:
            assert process.poll() is None, process.stderr.read().decode()[-2000:]
            time.sleep(0.002)
            with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
                curve = json.loads((out / "training.json").read_text())["curve"]
        time.sleep(random.Random(points).random() * 0.1)
        os.kill(child, signal.SIGKILL)
    process.communicate()
    assert len(curve) < len(whole)
    resumed = train(monkeypatch, target, folder, out, *steps, "--resume", *more, family=family)
    for a, b in zip(whole, resumed, strict=True):
        assert (a["step"], a["train"], a["held_out"]) == (b["step"], b["train"], b["held_out"])


def test_parts_of_a_run_go_on_where_the_one_before_ended(monkeypatch, tmp_path):
    """Parts that end by the clock, at any step, see the batches and learning rates of one long run."""
    target = tiny_target()
    folder = write_tiny_data(tmp_path / "data")
    steps = ("--steps", "30", "--save-every", "30")
    train(monkeypatch, target, folder, tmp_path / "whole", *steps)
    ends = [0]
    while ends[-1] < 30:
        curve = train(monkeypatch, target, folder, tmp_path / "parts", *steps, "--part-minutes", "0.002", "--resume")
        assert curve[-1]["step"] > ends[-1]
        ends.append(curve[-1]["step"])
    assert len(ends) > 3
    one, other = (AutoDrafter.from_pretrained(tmp_path / name, target=target) for name in ("whole", "parts"))
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(tensor, other.state_dict()[name], rtol=0, atol=0)


@pytest.mark.parametrize("family", [*FAMILIES, "pard2", *BLOCK_FAMILIES])
def test_trained_drafters_load_from_shards_and_draft_losslessly(monkeypatch, tmp_path, family):
    target, out = tiny_target(), tmp_path / "out"
    folder = write_tiny_data(tmp_path / "data")
    train(monkeypatch, target, folder, out, "--steps", "12", "--max-shard-size", "8KB", family=family)
    shards = list(out.glob("model-*.safetensors"))
    assert len(shards) > 1 and not (out / "model.safetensors").exists()
    text = (out / "README.md").read_text()
    assert "No weights" not in text and "0.0, 1.0, at most 16 tokens" in text and "Training began" not in text
    drafter = AutoDrafter.from_pretrained(out, target=target)
    assert drafter.config.parallel_drafting == (family in IN_PARALLEL)
    assert drafter.config.mask_token_id == (MASK if family in IN_PARALLEL else None)

    prompts = torch.arange(3, 51).view(16, 3)  # enough for some drafts of a drafter that has hardly learned anything
    inputs = {"input_ids": prompts, "max_new_tokens": 24, "do_sample": False}
    expected = target.generate(**inputs, pad_token_id=STOP)
    drafted = target.generate(**inputs, pad_token_id=STOP, assistant_model=drafter)
    assert torch.equal(drafted, expected)
    assert drafter.stats.acceptance_length > 1


@pytest.mark.parametrize("family", ["eagle3", "dspark"])
def test_weights_in_8_bits(monkeypatch, tmp_path, family):
    """They are those of 16 bits to half a step of their rows' scales, and load with or without shards."""
    target = tiny_target()
    folder = write_tiny_data(tmp_path / "data")
    loaded = []
    for bits, more in (("16", ()), ("8", ("--max-shard-size", "8KB"))):
        out = tmp_path / bits
        train(monkeypatch, target, folder, out, "--steps", "2", "--weight-bits", bits, *more, family=family)
        loaded.append(AutoDrafter.from_pretrained(out, target=target, dtype=torch.float32).state_dict())
        assert ("integers of 8 bits" in (out / "README.md").read_text()) == (bits == "8")
    stored = {name: one for path in out.glob("*.safetensors") for name, one in load_file(path).items()}
    assert len(list(out.glob("*.safetensors"))) > 1
    for name, weight in loaded[0].items():
        if weight.ndim == 2:
            step = weight.abs().amax(dim=1, keepdim=True) / 127
            assert stored[name].dtype == torch.int8
            assert ((weight - loaded[1][name]).abs() <= 0.51 * step + 2**-7 * weight.abs()).all()
        else:
            assert torch.equal(weight, loaded[1][name])


def test_card_of_a_folder_without_weights(monkeypatch, tmp_path):
    target, out = tiny_target(), tmp_path / "out"
    folder = write_tiny_data(tmp_path / "data")
    papers = {"p-eagle": "2602.01469", "pard": "2504.18583", "mtp": "2412.19437", "dspark": "2607.05147"}
    for family, named in papers.items():
        train(monkeypatch, target, folder, out / family, "--steps", "1", "--max-shard-size", "8KB", family=family)
        for file in (out / family).glob("model*.safetensors"):
            file.unlink()
        card.write_card(out / family)
        text = (out / family / "README.md").read_text()
        assert (
            f"arxiv.org/abs/{named}" in text
            and f"- {family}" in text
            and "No weights" in text
            and f"--family {family}" in text
        )


def test_saved_folder_is_ready_for_the_hub(monkeypatch, tmp_path):
    target = tiny_target()
    folder = write_tiny_data(tmp_path / "data")
    train(monkeypatch, target, folder, tmp_path / "out", "--steps", "1", "--repo-id", "someone/tiny")
    out = tmp_path / "out"
    assert "base_model:" in (out / "README.md").read_text()
    assert 'DEFAULT_DRAFTER = "someone/tiny"' in (out / "custom_generate" / "generate.py").read_text()
    assert (out / "custom_generate" / "requirements.txt").read_text() == "hf-specdec\n"
    report = json.loads((out / "training.json").read_text())
    assert "more prompts" not in (out / "README.md").read_text()
    report["arguments"] |= {"init_from": "runs/before", "greedy_share": 0.2, "round_floor": 0.3}
    assert "Chains" not in (out / "README.md").read_text()
    report["data"]["long_prompts"] = 1234
    (out / "training.json").write_text(json.dumps(report))
    card.write_card(out)
    text = (out / "README.md").read_text()
    assert "Training began\nwith the weights of `before`." in text and "distribution 20% was moved" in text
    assert "Chains\nthat greedy decoding would not begin weighed 0.3 of that." in text
    assert "1,234 more prompts\nare long, up to 4,096 tokens" in text
    assert "no data set was used. Prompts:" in text
    given = {**report["data"], "given_prompts": 5}
    sources = {**report["arguments"], "prompts": ["runs/chat.jsonl", "hub:someone/prompts"]}
    sentence = card.prompts_sentence(sources, given)
    assert sentence.startswith("The target answered 5 prompts of `chat.jsonl`, `hub:someone/prompts`, and ")
    assert "of its own" not in card.prompts_sentence(sources, {**given, "prompts": 0})
    (out / "remarks.md").write_text("Less than others have.\n")
    card.write_card(out)
    assert "section.\n\nLess than others have.\n\n## Training" in (out / "README.md").read_text()
    drafter = Eagle3Drafter.from_pretrained(out)
    drafter.bind(target)
    ids = drafter.target_ids
    assert len(ids) == 48 and STOP in ids and bool((ids.diff() > 0).all())


def test_shards_record_how_they_were_written(tmp_path):
    class Author:
        options = writing.WriteOptions(max_answer_tokens=7, prompts_per_round=2, prompts=("some.jsonl",))

        def write_shard(self, seed, given):
            answered.append(given)
            return {"tokens": torch.tensor([seed] * 5)}, {"prompts": seed}

    answered = []
    writing.write_data(tmp_path, Author(), 10, 60.0, process=0, log=lambda line: None, given=["a", "b", "c"])
    assert answered == [["a", "b"], ["c"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"shard-000-0000{n}.safetensors" for n in range(2)]
    assert data.shard_counts(tmp_path) == {"prompts": 0 + 1}
    written = data.written_options(tmp_path)
    lists = {"answer_temperatures": list(Author.options.answer_temperatures), "prompts": ["some.jsonl"]}
    assert written == {**vars(Author.options), **lists}


def test_custom_generate_runs_generate_with_the_drafter(monkeypatch, tmp_path):
    target, draft_model = tiny_target(), tiny_target(seed=1)
    folder = write_tiny_data(tmp_path / "data")
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


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_loss_is_close_to_float32(tmp_path, family):
    target = tiny_target()
    drafter = tiny_drafter(target, family)
    documents = data.Documents.load(write_tiny_data(tmp_path / "data"), 512)
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("window", [None, 7])
def test_chain_attention_of_the_last_slots_is_a_part_of_that_of_all(dtype, window):
    torch.manual_seed(0)
    length, first, steps = 23, 9, 3
    query, *others = [torch.randn(2, 4, length, 8, dtype=dtype, requires_grad=True) for _ in range(2 * steps + 1)]
    keys, values = others[:steps], others[steps:]
    whole, part = UnrolledAttention(), UnrolledAttention()
    for step in range(steps):
        cut = 0 if step == 0 else first
        expected = whole(0, query, keys[step], values[step], window)[:, first:]
        found = part(0, query[:, :, first:], keys[step][:, :, cut:], values[step][:, :, cut:], window)
        torch.testing.assert_close(found, expected)
        grad = torch.randn_like(found)
        inputs = [query, *keys[: step + 1], *values[: step + 1]]
        for a, b in zip(
            torch.autograd.grad(found, inputs, grad, retain_graph=True),
            torch.autograd.grad(expected, inputs, grad, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("family", "options"),
    [*((family, {}) for family in FAMILIES), ("eagle3", {"num_hidden_layers": 2}), ("mtp", {"chaining": "target"})],
)
def test_prompts_are_unrolled_only_as_far_as_they_are_read(family, options):
    target = tiny_target()
    drafter = tiny_drafter(target, family, **options)
    tokens = torch.randint(0, VOCAB, (3, 12), generator=torch.Generator().manual_seed(0))
    aux_hidden_states = read_hidden_states(target, drafter, tokens)
    rows, first = [3, 2, 2, 1], 5
    whole = drafter.unroll(tokens, aux_hidden_states, 4, rows)
    part = drafter.unroll(tokens, aux_hidden_states, 4, rows, first)
    for found, expected in zip(part, whole, strict=True):
        torch.testing.assert_close(found, expected[:, first:])
    names, parameters = zip(*drafter.named_parameters(), strict=True)
    grads = [
        torch.autograd.grad(
            sum(output.square().sum() for output in outputs), parameters, allow_unused=True, materialize_grads=True
        )
        for outputs in (part, [expected[:, first:] for expected in whole])
    ]
    for name, a, b in zip(names, *grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("options", [{}, {"num_hidden_layers": 2}, {"norm_output": True}, {"qk_norm": True}])
def test_unrolled_logits_equal_drafting_step_by_step(options):
    target = tiny_target()
    drafter = tiny_drafter(target, **options)
    tokens = torch.randint(0, VOCAB, (1, 12), generator=torch.Generator().manual_seed(0))
    aux_hidden_states = read_hidden_states(target, drafter, tokens)
    unrolled = drafter(tokens, aux_hidden_states, num_steps=4)
    for slot in range(8):
        hidden = drafter.combine_hidden_states(aux_hidden_states[:, : slot + 1])
        for step in range(4):
            end = slot + step + 1
            columns = Columns(tokens[:, 1 : end + 1], positions=torch.arange(end)[None], hidden=hidden)
            normed, feedback = drafter.run(columns, UnrolledAttention(), end)
            torch.testing.assert_close(unrolled[step][:, slot], drafter.logits(normed[:, -1]), rtol=1e-4, atol=1e-4)
            hidden = torch.cat([hidden, feedback[:, -1:]], dim=1)


def test_one_compiled_layer_serves_all(monkeypatch):
    """Compiling takes seconds a layer on a GPU."""
    target, counter, compiled = tiny_target(), CompileCounter(), {}
    tokens = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    anchors = torch.tensor([[2, 5], [3, 7]])
    for count in (2, 4):
        layers = ["--aux-layers", "3", "--layers", str(count), "--mask-token-id", str(MASK), "--steps", "1"]
        args = train_drafter.parse_arguments(["--family", "dflash", *layers])
        drafter = drafters.new_drafter(args, target, data.draft_vocabulary(torch.rand(VOCAB), 48, [STOP])[0], MASK)
        aux_hidden_states = read_hidden_states(target, drafter, tokens)
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
            expected = drafter.unroll_blocks(tokens, aux_hidden_states, anchors, 3)
            train_drafter.compile_layers(drafter)
            torch.testing.assert_close(drafter.unroll_blocks(tokens, aux_hidden_states, anchors, 3), expected)
        compiled[count] = counter.frame_count
    assert compiled[2] == compiled[4] > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_unrolled_masks_equal_one_pass_under_an_explicit_mask(dtype):
    target = tiny_target().to(dtype)
    drafter = tiny_drafter(target, "p-eagle", num_hidden_layers=2).to(dtype)
    length, steps = 11, 4
    tokens = torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(0))
    aux_hidden_states = read_hidden_states(target, drafter, tokens)

    # All slots of all depths side by side: anchors first, then every chain's first mask, its second one, ...
    depth = torch.arange(steps).repeat_interleave(length)
    anchor = torch.arange(length).repeat(steps)
    visible = torch.where(
        depth == 0, anchor[None, :] <= anchor[:, None], (anchor[None, :] == anchor[:, None]) & (depth <= depth[:, None])
    )

    def attend(layer_idx, query, key, value, window):
        key, value = key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1)
        scores = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).masked_fill(~visible, float("-inf"))
        return (scores.softmax(-1) @ value).transpose(1, 2)

    masks = torch.full((2, (steps - 1) * length), MASK)
    read = torch.cat([F.pad(tokens[:, 1:], (0, 1)), masks], dim=1)
    stand_in = drafter.combine_hidden_states(drafter.mask_hidden.expand(2, masks.shape[1], -1))
    hidden = torch.cat([drafter.combine_hidden_states(aux_hidden_states), stand_in], dim=1)
    columns = Columns(read, positions=(anchor + depth)[None], hidden=hidden)
    expected, _ = drafter.run(columns, attend, steps * length)
    unrolled = drafter.unroll(tokens, aux_hidden_states, steps)
    tolerance = 1e-10 if dtype is torch.float64 else 1e-4
    torch.testing.assert_close(torch.cat(unrolled, dim=1), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_unrolled_draft_model_equals_its_plain_forward_over_masks(dtype):
    target = tiny_target().to(dtype)
    drafter = tiny_drafter(target, "pard").to(dtype)
    plain = LlamaForCausalLM(LlamaConfig.from_dict(drafter.config.model)).to(dtype).eval()
    plain.load_state_dict(drafter.model.state_dict())
    tokens = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
    before = drafter.model.config._attn_implementation
    unrolled = drafter.unroll(tokens, None, 4)
    assert drafter.model.config._attn_implementation == before
    tolerance = 1e-10 if dtype is torch.float64 else 1e-4
    for slot in (0, 1, 5, 8, 11):
        read = torch.cat([tokens[:, : slot + 1], torch.full((2, 3), MASK)], dim=1)
        expected = plain(read).logits[:, slot:]
        logits = torch.stack([hidden[:, slot] @ drafter.head_weight.t() for hidden in unrolled], dim=1)
        torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("llama", {"num_modules": 1, "chaining": "modules"}, marks=pytest.mark.slow),
        ("llama", {"num_modules": 2, "norm_output": False}),
        ("llama", {"num_modules": 3, "zero_first_embedding": True}),
        ("llama", {"num_modules": 1, "chaining": "target"}),
        pytest.param("llama", {"num_modules": 2, "chaining": "target", "norm_output": False}, marks=pytest.mark.slow),
        ("llama", {"num_modules": 3, "chaining": "target"}),
        ("mistral", {}),
        pytest.param("mistral", {"chaining": "target"}, marks=pytest.mark.slow),
        ("gemma3", {}),
        ("qwen3-moe", {}),
        ("deepseek-v3", {}),
    ],
)
def test_unrolled_modules_equal_those_in_generate(monkeypatch, family, options):
    target = targets.tiny_target(family)
    drafter = tiny_drafter(target, "mtp", **options)
    num_drafts, prompt = 5, torch.tensor([[5, 6, 7]])
    inputs = {"input_ids": prompt, "do_sample": False, "max_new_tokens": 30}
    text = target.generate(**inputs)
    known, scored, first_wrong, draw = F.pad(text, (0, num_drafts)), {}, {}, drafter.draw

    def draw_text(state, logits, first):
        """Drafts of the text, but for the first, third or fifth of a round."""
        length = int(state.lengths)
        token, wrong = known[:, length + first, None], first_wrong.setdefault(length, len(first_wrong) % 3 * 2)
        if first <= wrong and length + first < text.shape[1]:
            scored[length, first] = logits[:, -1]
        return draw(state, logits, first)._replace(tokens=(token + 1) % targets.VOCAB if first == wrong else token)

    monkeypatch.setattr(drafter, "draw", draw_text)
    drafted = target.generate(**inputs, assistant_model=drafter, num_assistant_tokens=num_drafts)
    assert torch.equal(drafted, text)
    unrolled = drafter.unroll(text, read_hidden_states(target, drafter, text), num_drafts)
    assert {step for _, step in scored} == set(range(num_drafts)) and len({length for length, _ in scored}) > 6
    for (length, step), logits in scored.items():
        expected = unrolled[step][:, length - 2] @ drafter.head_weight.t()
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_training_modules_with_own_heads_is_refused():
    target = tiny_target()
    with pytest.raises(ValueError, match="each of its 2 modules has a head of its own"):
        _ = tiny_drafter(target, "mtp", own_head=True).head_weight
    drafter = tiny_drafter(target, "mtp", own_head=True, num_modules=1)
    assert drafter.head_weight is drafter.frames[0].lm_head.weight


def test_draft_models_that_cannot_be_unrolled_are_refused():
    target = tiny_target()
    drafter = tiny_drafter(target, "pard")
    tokens = torch.tensor([[5, 6, 7]])
    drafter.model.get_decoder().layers[1].self_attn.scaling = 0.1
    with pytest.raises(ValueError, match=r"LlamaAttention cannot be unrolled .* scores scaled by"):
        drafter.unroll(tokens, None, 2)
    drafter.model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="its logits have final_logit_softcapping"):
        _ = drafter.head_weight


@pytest.mark.parametrize("family", FAMILIES)
def test_fewer_rows_at_greater_depths(family):
    target = tiny_target()
    drafter = tiny_drafter(target, family)
    tokens = torch.randint(0, VOCAB, (5, 9), generator=torch.Generator().manual_seed(0))
    aux_hidden_states = read_hidden_states(target, drafter, tokens)
    whole, part = (
        drafter.unroll(tokens, aux_hidden_states, 4),
        drafter.unroll(tokens, aux_hidden_states, 4, rows=[5, 3, 3, 1]),
    )
    assert [len(hidden) for hidden in part] == [5, 3, 3, 1]
    for a, b in zip(part, whole, strict=True):
        torch.testing.assert_close(a, b[: len(a)])

    # The rows that end early get the gradients that they get on their own.
    names, parameters = zip(*drafter.named_parameters(), strict=True)
    loss = sum(hidden.square().sum() for hidden in part)
    alone = sum(b[: len(a)].square().sum() for a, b in zip(part, whole, strict=True))
    options = {"allow_unused": True, "materialize_grads": True}
    grads = torch.autograd.grad(loss, parameters, **options)
    for name, a, b in zip(names, grads, torch.autograd.grad(alone, parameters, **options), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert name != "mask_hidden" or bool(a.abs().sum() > 0)


def test_rows_of_a_depth():
    assert objective.leading_rows(10, 4, 1.0) == [10, 10, 10, 10]
    assert objective.leading_rows(10, 4, 0.5) == [10, 5, 3, 2]
    assert objective.leading_rows(1, 3, 0.1) == [1, 1, 1]


def test_pard2_begins_as_pard():
    target = tiny_target()
    tokens = torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
    outputs = []
    for family in ("pard", "pard2"):
        args = train_drafter.parse_arguments(["--family", family, "--layers", "2", "--steps", "1"])
        drafter = drafters.new_drafter(args, target, torch.zeros(VOCAB, dtype=torch.int64), MASK)
        outputs.append(drafter.unroll(tokens, read_hidden_states(target, drafter, tokens), 3))
    assert drafter.config.hidden_state_ids == [-1, -2, -3]
    for one, other in zip(*outputs, strict=True):
        torch.testing.assert_close(one, other)


def test_draft_models_are_initialised_from_layers_of_the_target():
    target = tiny_target()
    assert drafters.spread_layers(30, 4) == [0, 10, 19, 29]
    with pytest.raises(ValueError, match=r"--layers is 5; expected 1 to the target's 4"):
        drafters.spread_layers(4, 5)
    args = train_drafter.parse_arguments(["--family", "pard", "--layers", "4", "--steps", "1"])
    drafter = drafters.new_drafter(args, target, torch.zeros(VOCAB, dtype=torch.int64), MASK)
    tokens = torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
    (hidden,) = drafter.unroll(tokens, None, 1)
    torch.testing.assert_close(hidden @ drafter.head_weight.t(), target(tokens).logits)
    target.config.layer_types = ["sliding_attention", "full_attention"] * 2
    thinned = drafters.thinned_config(target, [0, 3])
    assert thinned["layer_types"] == ["sliding_attention", "full_attention"] and thinned["num_hidden_layers"] == 2


@pytest.mark.parametrize(
    ("family", "option"),
    [
        ("eagle3", "mask-token-id"),
        ("p-eagle", None),
        *[("pard", name) for name in ("draft-vocab-size", "intermediate-size", "init-from", "no-norm-output")],
        *[("dflash", name) for name in ("markov-rank", "depth-ratio", "round-floor", "fc-norm")],
        *[("mtp", name) for name in ("draft-vocab-size", "init-from", "fc-norm", "no-fc-norm", "mask-token-id")],
    ],
)
def test_options_of_other_families_are_refused(capsys, family, option):
    arguments = ["--family", family, "--steps", "1"]
    assert train_drafter.parse_arguments(arguments).layers == drafters.DEFAULTS[family]["layers"]
    if option is not None:
        with pytest.raises(SystemExit):
            train_drafter.parse_arguments([*arguments, f"--{option}", *([] if "norm" in option else ["3"])])
        message = capsys.readouterr().err
        assert f"--{option.removeprefix('no-')} is no option of {family}, only of " in message
        assert family not in message.rpartition("only of ")[2]


@pytest.mark.parametrize("count", ["0", "4"])
def test_modules_that_no_step_trains_are_refused(capsys, count):
    with pytest.raises(SystemExit):
        train_drafter.parse_arguments(["--family", "mtp", "--steps", "1", "--layers", count])
    error = capsys.readouterr().err
    assert f"--layers is {count}, but module k is trained at step k; expected 1 to --num-steps, 3" in error


@pytest.mark.parametrize("family", ["pard", "pard2"])
def test_language_models_are_not_stored_in_8_bits(capsys, family):
    with pytest.raises(SystemExit):
        train_drafter.parse_arguments(["--family", family, "--steps", "1", "--weight-bits", "8"])
    assert f"{family} is saved as a language model" in capsys.readouterr().err


@pytest.mark.parametrize("family", targets.STATIC_FAMILIES)
def test_new_modules_are_made_of_the_targets_layers(family):
    target = targets.tiny_target(family)
    args = train_drafter.parse_arguments(["--family", "mtp", "--steps", "1", "--no-norm-output"])
    drafter = drafters.new_drafter(args, target, None, None)
    kinds = [type(layer) for layer in (*drafter.decoder.layers, target.get_decoder().layers[-1])]
    assert kinds == kinds[:1] * 4 and not drafter.config.norm_output and drafter.num_assistant_tokens == 3
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(target.generate(**inputs, assistant_model=drafter), target.generate(**inputs))


def test_intermediate_size_of_new_modules():
    args = ["--family", "mtp", "--steps", "1", "--layers", "2", "--intermediate-size", "24"]
    args = train_drafter.parse_arguments(args)
    target = tiny_target()
    drafter = drafters.new_drafter(args, target, None, None)
    assert [layer.mlp.gate_proj.weight.shape for layer in drafter.decoder.layers] == [(24, 32)] * 2
    for frame in drafter.frames:
        torch.testing.assert_close(frame.final_norm.weight, target.model.norm.weight)
    with pytest.raises(ValueError, match="--intermediate-size is 24, but layers of qwen3_moe have no MLPs"):
        drafters.new_drafter(args, targets.tiny_target("qwen3-moe"), None, None)


def test_targets_whose_layers_cannot_be_those_of_modules_are_refused():
    args = train_drafter.parse_arguments(["--family", "mtp", "--steps", "1"])
    config = GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2)
    with pytest.raises(ValueError, match="Layers of model_type 'gpt2' cannot be those of MTP modules"):
        drafters.new_drafter(args, GPT2LMHeadModel(config), None, None)
    config = OPTConfig(vocab_size=VOCAB, hidden_size=16, word_embed_proj_dim=16, ffn_dim=16, num_attention_heads=2)
    with pytest.raises(ValueError, match="Layers of model_type 'opt' cannot be those of MTP modules: OPTModel has no"):
        drafters.new_drafter(args, OPTForCausalLM(config), None, None)


def new_eagle(target, family, *options):
    args = train_drafter.parse_arguments(["--family", family, "--steps", "1", *options])
    d2t = torch.zeros(VOCAB, dtype=torch.int64)
    return drafters.new_drafter(args, target, d2t, MASK if family == "p-eagle" else None)


def test_init_from_a_trained_drafter():
    target = tiny_target()
    trained = new_eagle(target, "eagle3")
    input_ids = torch.randint(3, VOCAB - 1, (2, 9))
    aux_hidden_states = read_hidden_states(target, trained, input_ids)
    deeper = new_eagle(target, "p-eagle", "--layers", "3")
    assert not torch.allclose(deeper(input_ids, aux_hidden_states)[0], trained(input_ids, aux_hidden_states)[0])
    drafters.start_from(deeper, trained)
    assert torch.equal(deeper(input_ids, aux_hidden_states)[0], trained(input_ids, aux_hidden_states)[0])

    mlp = trained.layers[0].mlp
    for dead in (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight.T):
        dead.data[::3] = 0.0
    narrower = new_eagle(target, "p-eagle", "--layers", "2", "--intermediate-size", "32")
    drafters.start_from(narrower, trained)
    torch.testing.assert_close(narrower(input_ids, aux_hidden_states)[0], trained(input_ids, aux_hidden_states)[0])

    again = new_eagle(target, "p-eagle", "--layers", "3")
    deeper.mask_hidden.data.normal_()
    drafters.start_from(again, deeper)
    for found, expected in zip(
        again.unroll(input_ids, aux_hidden_states, 3), deeper.unroll(input_ids, aux_hidden_states, 3), strict=True
    ):
        assert torch.equal(found, expected)
    again.config.mask_token_id -= 1
    with pytest.raises(ValueError, match=f"trained with mask token {MASK}, but the new drafter has {MASK - 1};"):
        drafters.start_from(again, deeper)

    wider = new_eagle(target, "p-eagle", "--intermediate-size", "64")
    assert bool(wider.layers[0].mlp.gate_proj.weight[48:].any())
    drafters.start_from(wider, trained)
    assert bool(wider.layers[0].mlp.gate_proj.weight[48:].any())
    torch.testing.assert_close(wider(input_ids, aux_hidden_states)[0], trained(input_ids, aux_hidden_states)[0])
    with pytest.raises(ValueError, match=r"has nothing for fc_norm.0.weight, but the new drafter has \[32\]"):
        drafters.start_from(trained, new_eagle(target, "eagle3", "--no-fc-norm"))


def test_a_confidence_head_is_added_to_a_trained_drafter(monkeypatch, tmp_path):
    """Trained alone, it learns how likely drafts are to be accepted, and nothing else changes."""
    target = tiny_target()
    folder = write_tiny_data(tmp_path / "data")
    train(monkeypatch, target, folder, tmp_path / "before", "--steps", "30", family="dspark")
    trained = AutoDrafter.from_pretrained(tmp_path / "before", target=target, dtype=torch.float32)
    trained.confidence_head, trained.config.confidence_head = None, False
    trained.save_pretrained(tmp_path / "without")
    more = (
        "--init-from",
        str(tmp_path / "without"),
        "--train-only",
        "confidence_head",
        "--steps",
        "60",
        "--lr",
        "0.05",
    )
    train(monkeypatch, target, folder, tmp_path / "after", *more, family="dspark")
    drafter = AutoDrafter.from_pretrained(tmp_path / "after", target=target, dtype=torch.float32)
    weights, before = drafter.state_dict(), trained.state_dict()
    assert weights.keys() - before.keys() == {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    for name, weight in before.items():
        torch.testing.assert_close(weights[name], weight.bfloat16().to(weight.dtype), rtol=1e-2, atol=1e-6)

    documents = data.Documents.load(folder, 512)
    lesson = objective.Teacher(target, drafter).read(documents.batch(torch.arange(len(documents))))
    anchors = torch.arange(4, 14)
    at = anchors[:, None] + torch.arange(3)
    normed = drafter.unroll_blocks(
        lesson.input_ids, lesson.aux_hidden_states, anchors.expand(len(documents), -1), at.shape[1]
    )
    before = lesson.input_ids[:, at]
    inputs, head = drafter.head_inputs(normed, before)
    probs = target(lesson.input_ids).logits[:, at][..., drafter.target_ids].softmax(-1)
    accepted = torch.minimum((inputs @ head.T).softmax(-1), probs).sum(-1)
    says = drafter.confidence(normed, before).sigmoid()
    assert abs(accepted.mean() - 0.5) > 0.1 and abs(says.mean() - accepted.mean()) < 0.05


def test_parts_to_train_that_a_drafter_lacks_are_refused(monkeypatch, tmp_path):
    folder = write_tiny_data(tmp_path / "data")
    with pytest.raises(ValueError, match="--train-only is confidence_head, but no parameter of a DFlashDrafter has"):
        more = ("--train-only", "confidence_head", "--steps", "1")
        train(monkeypatch, tiny_target(), folder, tmp_path / "out", *more, family="dflash")


@pytest.mark.parametrize("family", BLOCK_FAMILIES)
def test_block_drafters_go_on_from_trained_ones(monkeypatch, tmp_path, family):
    """From a folder of weights alone, on other data: with its draft vocabulary, if its weights are by draft token."""
    target = tiny_target()
    folder = write_tiny_data(tmp_path / "data")
    train(monkeypatch, target, folder, tmp_path / "before", "--steps", "30", family=family)
    trained = AutoDrafter.from_pretrained(tmp_path / "before", target=target, dtype=torch.float32)
    shutil.rmtree(tmp_path / "before" / "checkpoint")

    other = write_tiny_data(tmp_path / "other", seed=3)
    more = ("--init-from", str(tmp_path / "before"), "--steps", "1", "--lr", "0")
    train(monkeypatch, target, other, tmp_path / "after", *more, family=family)
    drafter = AutoDrafter.from_pretrained(tmp_path / "after", target=target, dtype=torch.float32)
    of_data = data.Documents.load(other, 512).answer_counts(VOCAB)
    d2t, _ = data.draft_vocabulary(of_data, 48, [STOP])
    assert not torch.equal(d2t, trained.d2t)
    assert torch.equal(drafter.d2t, trained.d2t if family == "dspark" else d2t)
    report = json.loads((tmp_path / "after" / "training.json").read_text())
    ids = drafter.d2t + torch.arange(48)
    assert report["coverage"] == pytest.approx(float(of_data[ids].sum() / of_data.sum()))
    for name, tensor in drafter.state_dict().items():
        assert name == "d2t" or torch.equal(tensor, trained.state_dict()[name])
    assert "Training began\nwith the weights of `before`." in (tmp_path / "after" / "README.md").read_text()

    with pytest.raises(ValueError, match=f"is a {type(trained).__name__}, but a Eagle3Drafter is to be trained"):
        drafters.start_from(new_eagle(target, "eagle3"), trained)
    if family == "dspark":
        drafter.d2t[0] += 1
        with pytest.raises(ValueError, match="Markov head for another draft vocabulary"):
            drafters.start_from(drafter, trained)


def test_mask_tokens_are_unused_special_tokens():
    class Entry:
        special = True

    counts = torch.tensor([3, 0, 0, 5, 0, 0])
    tokenizer = TinyTokenizer()
    assert drafters.choose_mask_token(counts, tokenizer) == 5
    tokenizer.added_tokens_decoder = {0: Entry(), 1: Entry(), STOP: Entry(), 3: Entry()}
    assert drafters.choose_mask_token(counts, tokenizer) == 1
    with pytest.raises(ValueError, match="--mask-token-id"):
        drafters.choose_mask_token(torch.ones(6), tokenizer)


def test_masks_of_a_batch():
    tokens = torch.tensor([10, 11, 12, 13, 14, 20, 21, 22, 23], dtype=torch.int32)
    documents = data.Documents(tokens, torch.tensor([5, 4]), torch.tensor([2, 1]), max_length=512)
    batch = documents.batch(torch.tensor([0, 1]))
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 14], [20, 21, 22, 23, 0]]
    # Row 0's answer is 12 13 14: the target's distributions at positions 2 and 3 are learnt; row 1's, at 1 and 2.
    assert batch.places.tolist() == [2, 3, 6, 7]
    assert batch.depths.tolist() == [0, 1, 0, 1]
    assert batch.places_before == [0, 2, 4] and batch.shortest_prompt == 1
    assert documents.answer_counts(32).nonzero()[:, 0].tolist() == [12, 13, 14, 21, 22, 23]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("floors", [(1.0, 1.0), (0.25, 1.0), (0.25, 0.5)])
def test_counts_and_loss_of_the_objective_by_hand(family, floors):
    target = tiny_target()
    drafter = tiny_drafter(target, family)
    # Greedy text but for one token, and a drafter that is often right: some chains live on and some end.
    tokens = target.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=13, min_new_tokens=13, do_sample=False).int()
    tokens[0, 9] = 4
    if family == "pard":
        drafter = drafters.new_drafter(
            train_drafter.parse_arguments(["--family", "pard", "--layers", "4", "--steps", "1"]), target, None, MASK
        )
    documents = data.Documents(tokens[0], torch.tensor([16]), torch.tensor([3]), max_length=512)
    batch = documents.batch(torch.tensor([0]))
    lesson = objective.Teacher(target, drafter).read(batch)
    steps, decay = 3, 0.5
    survival_floor, round_floor = floors
    made = objective.DraftObjective(drafter, steps, decay, survival_floor=survival_floor, round_floor=round_floor)
    loss, counts = made(lesson)

    ids = torch.arange(VOCAB) if drafter.target_ids is None else drafter.target_ids
    logits = target(batch.input_ids).logits[0]
    best = logits.argmax(-1)
    drafts = [
        hidden @ drafter.head_weight.t() for hidden in drafter.unroll(batch.input_ids, lesson.aux_hidden_states, steps)
    ]

    def is_hit(start: int, step: int) -> bool:
        return int(ids[drafts[step][0, start - drafter.shift].argmax()] == best[start + step])

    def is_alive(start: int, step: int) -> bool:
        return all(is_hit(start, s) and tokens[0, start + s + 1] == best[start + s] for s in range(step))

    def num_accepted(start: int) -> int:
        there = [step for step in range(steps) if start + step <= 14]
        return sum(is_alive(start, step) and is_hit(start, step) for step in there)

    rounds = [3]  # the places that rounds of greedy decoding begin at
    while (following := rounds[-1] + num_accepted(rounds[-1]) + 1) <= 14:
        rounds.append(following)
    assert family != "pard" or len(rounds) < 12
    expected_loss = 0.0
    for step in range(steps):
        losses, weights, existing, hits, reached, accepted, in_rounds = [], [], 0, 0, 0, 0, 0
        for start in range(3, 15 - step):
            draft, place = drafts[step][0, start - drafter.shift], start + step
            existing += 1
            hits += is_hit(start, step)
            alive = is_alive(start, step)
            reached += alive
            accepted += alive and is_hit(start, step)
            in_rounds += alive and is_hit(start, step) and start in rounds
            if best[place] in ids:
                weights.append((1.0 if alive else survival_floor) * (1.0 if start in rounds else round_floor))
                losses.append(-weights[-1] * (logits[place, ids].softmax(-1) * draft.log_softmax(-1)).sum())
        mean = sum(losses) / max(sum(weights), 1)
        expected_loss = expected_loss + decay**step / sum(decay**s for s in range(steps)) * mean
        assert counts[step, 1:].tolist() == [
            sum(weights), existing, hits, reached, accepted, in_rounds, len(rounds)
        ]  # fmt: skip
        assert family != "pard" or step != 1 or 0 < reached < existing
    torch.testing.assert_close(loss, torch.as_tensor(expected_loss))
    found = objective.summarize(counts)
    committed = sum(min(start + num_accepted(start), 14) - start + 1 for start in rounds)
    if all(start + num_accepted(start) <= 14 for start in rounds):
        assert found["round_length"] == pytest.approx(committed / len(rounds), abs=1e-3)

    trained = dict(drafter.named_parameters())
    grads = torch.autograd.grad(loss, list(trained.values()), retain_graph=True)
    expected = torch.autograd.grad(expected_loss, list(trained.values()))
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_rounds_begin_behind_what_the_round_before_commits():
    rng = random.Random(0)
    for _ in range(20):
        lengths = [rng.randrange(12) for _ in range(rng.randrange(1, 6))]
        drafted = [rng.randrange(5) for _ in range(sum(lengths))]
        expected, begin = [False] * len(drafted), 0
        for length in lengths:
            place = begin
            while place < begin + length:
                expected[place] = True
                place += drafted[place] + 1
            begin += length
        before = np.cumsum([0, *lengths]).tolist()
        assert objective.round_starts(torch.tensor(drafted).long(), before).tolist() == expected


@pytest.mark.parametrize("family", BLOCK_FAMILIES)
@pytest.mark.parametrize(("floor", "loss_name"), [(1.0, "cross-entropy"), (0.25, "dspark")])
def test_counts_and_loss_of_blocks_by_hand(monkeypatch, family, floor, loss_name):
    """Each block on its own, after the text up to it."""
    target, steps, decay = tiny_target(), 3, 0.5
    options = [*OPTIONS[family], "--num-steps", str(steps), "--anchors", "20", "--steps", "1"]
    args = train_drafter.parse_arguments(["--family", family, *options])
    d2t, _ = data.draft_vocabulary(torch.rand(VOCAB), 48, [STOP])
    drafter = drafters.new_drafter(args, target, d2t, MASK).eval()
    if family == "dspark":
        drafter.markov_head.markov_w2.weight.data.normal_()
    tokens = target.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=13, min_new_tokens=13, do_sample=False).int()
    tokens[0, 9] = 4
    texts = [tokens[0], tokens[0, :11]]  # of other lengths, so that one is padded
    lengths = torch.tensor([len(text) for text in texts])
    documents = data.Documents(torch.cat(texts), lengths, torch.tensor([3, 2]), max_length=512)
    batch = documents.batch(torch.tensor([0, 1]))
    lesson = objective.Teacher(target, drafter).read(batch)
    practice = objective.BlockObjective(drafter, steps, decay, num_anchors=20)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=0.01)
    for _ in range(15):  # so that it is often right
        optimizer.zero_grad()
        practice(lesson)[0].backward()
        optimizer.step()
    whole = objective.BlockObjective(drafter, steps, decay, floor, loss_name, num_anchors=20)
    loss, counts = whole.eval()(lesson)

    ids, sums = drafter.target_ids, [[[], [], 0, 0, 0, 0] for _ in range(steps)]
    following: list[list[int]] = []
    for text, prompt_length in zip(texts, (3, 2), strict=True):
        text = text.long()
        following.append([])
        logits = target(text[None]).logits[0]
        best = logits.argmax(-1)
        for anchor in range(prompt_length, len(text) - 1):
            states = read_hidden_states(target, drafter, text[None])
            normed = drafter.unroll_blocks(text[None], states, torch.tensor([[anchor]]), steps)[0, 0]
            alive, begin = True, None
            for step in range(min(steps, len(text) - 1 - anchor)):
                place = anchor + step
                draft = drafter.logits(normed[step])
                if family == "dspark":
                    head = drafter.markov_head
                    draft = draft + head.markov_w2(head.features(text[place], normed[step], None)[0])
                losses, weights, *numbers = sums[step]
                hit = int(ids[draft.argmax()] == best[place])
                if best[place] in ids:
                    probs = logits[place, ids].softmax(-1)
                    one = -(probs * draft.log_softmax(-1)).sum()
                    if loss_name == "dspark":
                        one = 0.1 * one + 0.9 * (draft.softmax(-1) - probs).abs().sum()
                    if family == "dspark":
                        read = torch.cat([normed[step], head.markov_w1(text[place])]).detach()
                        accepted = 1 - (draft.softmax(-1) - probs).abs().sum().detach() / 2
                        says = drafter.confidence_head.proj(read).sigmoid()[0]
                        one = one - accepted * says.log() - (1 - accepted) * (1 - says).log()
                    weights.append(1.0 if alive else floor)
                    losses.append(weights[-1] * one)
                added = (1, hit, int(alive), int(alive and hit))
                sums[step][2:] = [number + more for number, more in zip(numbers, added, strict=True)]
                alive = bool(alive and hit and text[place + 1] == best[place])
                begin = place + 1 + alive if alive or begin is None else begin
            following[-1].append(begin if begin < len(text) - 1 else anchor)
    expected_loss = 0.0
    for step, (losses, weights, *numbers) in enumerate(sums):
        assert counts[step, 1:].tolist() == pytest.approx([sum(weights), *numbers])
        weight = decay**step / sum(decay**s for s in range(steps))
        expected_loss = expected_loss + weight * sum(losses) / max(sum(weights), 1)
    torch.testing.assert_close(loss, torch.as_tensor(expected_loss))
    assert 0 < sums[1][4] < sums[1][2]  # some chains live on

    trained = dict(drafter.named_parameters())
    grads = torch.autograd.grad(loss, list(trained.values()), retain_graph=True)
    expected = torch.autograd.grad(expected_loss, list(trained.values()))
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)

    seen, compare = [], whole._compare
    monkeypatch.setattr(whole, "_compare", lambda *args: seen.append(args[2:]) or compare(*args))
    whole.replay_share = 1.0
    whole(lesson)  # as it is measured
    whole.train()(lesson)
    replayed, is_anchor, _ = seen[-1]
    assert len(seen) == 3
    assert [sorted(row[there].tolist()) for row, there in zip(replayed, is_anchor, strict=True)] == [
        sorted(row) for row in following
    ]
    assert any(
        begin - anchor > 1
        for row, start in zip(following, (3, 2), strict=True)
        for anchor, begin in enumerate(row, start)
    )

    whole.replay_share, whole.short_share = 0.0, 1.0
    lengths = []
    for _ in range(12):
        loss, counts = whole(lesson)
        lengths.append(seen[-1][-1])
        assert loss.isfinite() and counts.shape == (steps, 6)
        assert counts[: lengths[-1], 2].all() and not counts[lengths[-1] :].any()
    assert {*lengths} == {*range(1, steps)}
    whole.eval()(lesson)
    assert seen[-1][-1] == steps


def test_random_anchors_are_different_places_of_the_answers():
    target = tiny_target()
    args = train_drafter.parse_arguments(["--family", "dflash", *OPTIONS["dflash"], "--steps", "1"])
    drafter = drafters.new_drafter(args, target, torch.zeros(48, dtype=torch.int64), MASK)
    choose = objective.BlockObjective(drafter, 3, 0.5)._choose
    is_place = torch.zeros(2, 9, dtype=torch.bool)
    is_place[0, 2:8] = is_place[1, 5:7] = True
    seen = set()
    for _ in range(20):
        anchors, is_anchor = choose(is_place, 4)
        assert is_anchor.sum(dim=1).tolist() == [4, 2] and bool(is_place.gather(1, anchors)[is_anchor].all())
        assert all(len(set(row)) == 4 for row in anchors.tolist())
        seen.add(tuple(anchors[0].sort().values.tolist()))
    assert len(seen) > 1


def test_texts_are_those_of_generate_each_at_its_temperature(monkeypatch):
    target = tiny_target()
    # Settings of the target that writing does not take over.
    monkeypatch.setattr(target.generation_config, "repetition_penalty", 1.5)
    rows = [[5, 6, 7], [8, 9, 10, 11, 12], [13], [5, 6, 7], [5, 6, 7]]
    temperatures = [0.0, 0.0, 0.0, 1.0, 1e-4]

    def write(seeds, min_p=0.0):
        return writing.generate(target, NoDrafter(target), rows, temperatures, 16, [STOP], min_p, seeds, 2)

    written = write([*range(5)])
    for row, tokens in zip(rows[:3], written[:3], strict=True):
        inputs = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": STOP, "repetition_penalty": 1.0}
        assert tokens == target.generate(torch.tensor([row]), **inputs)[0, len(row) :].tolist()
    assert written[3] != written[0] == written[4]
    assert write([*range(5)]) == written != write([*range(5, 10)])
    assert write([*range(5)], min_p=1.0)[3] == written[0]  # only the most likely token is left
    failed = {"req_0": types.SimpleNamespace(error="There is no memory.", generated_tokens=[3])}
    monkeypatch.setattr(target, "generate_batch", lambda *args, **kwargs: failed)
    with pytest.raises(RuntimeError, match=r"A prompt of 1 tokens is not continued: There is no memory\."):
        writing.generate(target, NoDrafter(target), [[13]], [0.0], 8, [STOP], 0.0, [0], 2)


def test_labels_can_be_moved_to_the_likeliest_token(tmp_path):
    target = tiny_target()
    drafter = tiny_drafter(target)
    batch = data.Documents.load(write_tiny_data(tmp_path / "data"), 512).batch(torch.arange(4))
    plain, moved = (objective.Teacher(target, drafter, share).read(batch).probs for share in (0.0, 0.25))
    expected = 0.75 * plain + 0.25 * F.one_hot(plain.argmax(dim=-1), plain.shape[1])
    torch.testing.assert_close(moved, expected)


def test_long_prompts_have_about_the_length_asked_for():
    words = [f"w{index}" for index in range(40)]
    passages = [
        long_prompts.Passage(" ".join(words), list(range(40)), f"prompt {number}" if number % 3 else None)
        for number in range(30)
    ]
    passages += [long_prompts.Passage("```code```", list(range(10)), "write code"), long_prompts.Passage("", [], "no")]
    rng = random.Random(0)
    maker = long_prompts.LongPrompts(passages, lambda tokens: " ".join(words[token] for token in tokens), rng)
    made = [maker.turns(100) for _ in range(60)]
    assert {len(turns) % 2 for turns in made} == {1}
    chats = [turns for turns in made if len(turns) > 1]
    assert 5 < len(chats) < 30 and all("w0" in turns[1] or "code" in turns[1] for turns in chats)
    for turns in made:
        count = sum(text.count(" w") + text.startswith("w") for text in turns) + 10 * str(turns).count("```") // 2
        assert 75 <= count <= 101
    instructions = set(long_prompts.entries(long_prompts.ABOUT_TEXTS))
    assert any(turns[0].split("\n\n")[0] in instructions for turns in made)
    assert any(turns[0].split("\n\n")[-1] in instructions for turns in made)
    assert any("Use the text to answer: prompt" in turns[0] for turns in made)
    (only,) = long_prompts.LongPrompts([passages[0]], lambda tokens: "w", rng).turns(100)
    assert "w0" in only


class ChatTokenizer(TinyTokenizer):
    """Words that are numbers, in turns between two tokens."""

    chat_template = "turns"

    def apply_chat_template(self, chat, tokenize, add_generation_prompt):
        turns = "".join(f" 50 {turn['content']} {STOP}" for turn in chat)
        return turns + (" 51" if add_generation_prompt else "")

    def __call__(self, text, add_special_tokens):
        ids = [int(word) for word in re.findall(r"\d+", text)]
        return type("Encoding", (), {"input_ids": [token % VOCAB for token in ids]})

    def decode(self, tokens, skip_special_tokens=True):
        return " ".join(str(token) for token in tokens if token != STOP)


def test_shards_hold_short_and_long_documents(monkeypatch):
    target, longest = tiny_target(), []

    def generate(model, drafter, rows, temperatures, max_new_tokens, stop_ids, min_p, seeds, max_rows):
        longest.append(max(map(len, rows)))
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        new = [torch.randint(3, 50, (max_new_tokens - 1,), generator=generator).tolist() for generator in generators]
        return [[*tokens, STOP] for tokens in new]

    monkeypatch.setattr(writing, "generate", generate)
    options = writing.WriteOptions(20, 16, 8, 30, composed_share=0.25, long_share=0.5, max_document_tokens=600)
    writer = writing.Writer(target, ChatTokenizer(), options, prompts.PromptFilter([]))
    shard, counts = writer.write_shard(3)
    assert counts["prompts"] == 20 and counts["composed_prompts"] == 5 and counts["unfinished"] == 0
    assert len(shard["lengths"]) == 20 + counts["long_prompts"] > 30
    assert shard["lengths"].sum() == len(shard["tokens"]) and max(longest) > 200
    assert (shard["lengths"] - shard["prompt_lengths"]).tolist() == [30] * len(shard["lengths"])
    assert bool((shard["lengths"] <= 600).all()) and int((shard["prompt_lengths"] > 60).sum()) > 10
    starts = shard["lengths"].cumsum(0) - shard["lengths"]
    assert set(shard["tokens"][starts].tolist()) == {50}
    assert set(shard["tokens"][starts + shard["prompt_lengths"] - 1].tolist()) == {51}

    writer.filter = prompts.PromptFilter(["A prompt that is measured"])
    given = ["Name two rivers", "A prompt that is measured", "7 " * 700, "Name two rivers", "Name a city"]
    shard, counts = writer.write_shard(3, given)
    assert shard["prompt_lengths"][:2].tolist() == [len(writer.format.prompt(given[index])) for index in (0, 4)]
    assert counts.pop("long_prompts") == len(shard["lengths"]) - 2 > 0
    expected = {"prompts": 0, "composed_prompts": 0, "given_prompts": 2, "too_long": 1, "held_out_overlap": 1}
    assert counts == {**expected, "repeated": 1, "unfinished": 0, "degenerate": 0}

    monkeypatch.setattr(ChatTokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="The tokenizer of the target has no chat template"):
        writing.ChatFormat(ChatTokenizer(), target)
    writer.options.long_share = 0.0
    assert writer.write_shard(4)[1]["long_prompts"] == 0


def test_composed_prompts_are_whole_and_new():
    rng = random.Random(0)
    texts = [composed_prompts.composed_prompt(rng) for _ in range(2000)]
    assert not any(re.search(r"[{}]", text) for text in texts) and len(set(texts)) > 1600
    measured = (EXAMPLES / "prompts").glob("*.jsonl")
    held_out = prompts.PromptFilter(text for path in measured for text in load_prompts(path))
    assert sum(map(held_out.is_held_out, texts)) < 0.02 * len(texts)


def test_no_shard_is_begun_that_would_end_too_late(monkeypatch, tmp_path):
    clock = [0.0]
    monkeypatch.setattr(writing.time, "monotonic", lambda: clock[0])

    class Author:
        options = writing.WriteOptions()

        def write_shard(self, seed, given):
            clock[0] += 30
            return {"tokens": torch.zeros(5)}, {}

    writing.write_data(tmp_path, Author(), 1e9, 100.0, process=0, log=lambda line: None)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--composed-share", "1.5"], "--composed-share is 1.5; expected a share of the prompts"),
        (["--long-share", "1"], "--long-share is 1.0; expected a share of the documents"),
        (["--max-document-tokens", "700"], "--max-document-tokens is 700; expected at least twice"),
    ],
)
def test_options_of_long_documents_are_checked(capsys, options, message):
    with pytest.raises(SystemExit):
        train_drafter.parse_arguments(["--steps", "1", *options])
    assert message in capsys.readouterr().err


def test_documents_whose_answers_are_cut_off_are_not_trained_on():
    lengths, prompt_lengths = torch.tensor([9, 9, 9, 9]), torch.tensor([2, 8, 6, 5])
    documents = data.Documents(torch.zeros(36, dtype=torch.int32), lengths, prompt_lengths, max_length=7)
    train, held_out = documents.split(1, seed=0)
    assert sorted([*train.tolist(), *held_out.tolist()]) == [0, 3] and len(held_out) == 1


def test_acceptance_by_the_length_of_the_prompt(tmp_path):
    stats = [RowStats(10, [10, 10], [accepted, 0], 10 + accepted) for accepted in (2, 4, 6)]
    texts = [
        evaluate_drafter.Text(length, is_degenerate, row)
        for length, is_degenerate, row in zip((256, 1001, 1999), (False, True, False), stats, strict=True)
    ]
    shapes = [evaluate_drafter.Shape(*one) for one in ((2,), (3,), (3, 8))]
    results = evaluate_drafter.summarize_lengths(dict.fromkeys(shapes, texts))
    assert list(results) == ["up to 256", "1001 to 2000"] and results["1001 to 2000"]["degenerate"] == 1
    assert results["1001 to 2000"]["by_k"]["3"]["all"]["acceptance_length"] == 1.5
    assert results["1001 to 2000"]["by_k"]["3"]["without_repetition"]["acceptance_length"] == 1.6
    table = card.lengths_table(results)
    header = "| prompt | prompts | K = 2 | K = 3 | K = 3, tree of 8 |\n|---|---|---|---|---|\n"
    assert f"{header}| up to 256 | 1 | 1.20 | 1.20 | 1.20 |" in table
    report = {"max_new_tokens": 8, "dtype": "float32", "degenerate_rule": "loop", "prompts": {}}
    (tmp_path / "acceptance.json").write_text(json.dumps({**report, "prompt_lengths": results}))
    assert table in card.acceptance_section(tmp_path / "acceptance.json")


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
    for batch in batches:
        answers = int(lengths[batch].max() - documents.prompt_lengths[batch].min())
        assert len(batch) * (answers + data.PROMPT_COST * int(documents.prompt_lengths[batch].min())) <= 256
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
    for name, least in (("chat", 100), ("code", 80), ("long", 40)):
        texts = load_prompts(EXAMPLES / "prompts" / f"{name}.jsonl")
        assert len({" ".join(prompts.normalized_words(text)) for text in texts}) == len(texts) >= least


def test_an_estimate_before_training(monkeypatch, tmp_path, capsys):
    target, out = tiny_target(), tmp_path / "out"
    folder = write_tiny_data(tmp_path / "data")
    with pytest.raises(FileNotFoundError):  # nothing is trained
        train(monkeypatch, target, folder, out, "--steps", "12", "--estimate", family="dspark")
    (line,) = [one for one in capsys.readouterr().out.splitlines() if one.startswith("estimate: ")]
    found = json.loads(line.removeprefix("estimate: "))
    documents = data.Documents.load(folder, 512)
    of_epoch = len(documents.epoch(documents.split(6, 0)[0], 128, 0))
    assert found["steps"] == 12 and 0 < found["target_share"] < 1 and found["seconds"] > 0
    assert found["epochs"] == pytest.approx(12 / of_epoch, rel=0.01)
    assert found["minutes"] == pytest.approx(12 * found["seconds"] / 60, rel=0.02)
    assert found["states_gb"] == pytest.approx(2 * 32 * len(documents.tokens) / 1e9, rel=0.01)  # one layer's
    assert not out.exists()
