"""A family that another package registers: loaded as published, inspected, and timed, without a change of this one."""

from __future__ import annotations

import json

import pytest
import torch
from dialects import Spec, tiny_target
from safetensors.torch import save_file
from targets import padded_prompts
from toy_family import BigramDrafter
from word_tokenizer import word_tokenizer

from hf_specdec import AutoDrafter
from hf_specdec.cli import main
from hf_specdec.drafters.registry import registered_drafters

SPEC = Spec()
K = 3


@pytest.fixture(scope="module")
def target():
    return tiny_target(SPEC, dtype=torch.float32)


@pytest.fixture
def folder(target, tmp_path):
    """A checkpoint of the family, counted on a text of the target."""
    torch.manual_seed(0)
    text = target.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=60, do_sample=False)[0]
    counts = torch.zeros(SPEC.vocab_size, SPEC.vocab_size)
    counts.index_put_((text[:-1], text[1:]), torch.ones(len(text) - 1), accumulate=True)
    (tmp_path / "published").mkdir()
    config = {"bigram": {"tokens": SPEC.vocab_size, "chain": K}}
    (tmp_path / "published" / "config.json").write_text(json.dumps(config))
    save_file({"counts": counts}, tmp_path / "published" / "model.safetensors")
    target.save_pretrained(tmp_path / "target")
    return tmp_path / "published"


@pytest.mark.core
@pytest.mark.parametrize("engine", ["static", "stock"])
def test_generates_what_the_target_does(engine, target, folder, tmp_path):
    drafter = AutoDrafter.from_pretrained(folder, target, engine=engine)
    assert type(drafter) is BigramDrafter is registered_drafters()["toy_bigram"]
    inputs = padded_prompts([5, 9] if engine == "static" else [5])
    plain = target.generate(**inputs, max_new_tokens=30, do_sample=False)
    assert torch.equal(target.generate(**inputs, assistant_model=drafter, max_new_tokens=30, do_sample=False), plain)
    assert drafter.stats.engine.startswith(engine) and drafter.stats.drafted > 0
    drafter.save_pretrained(tmp_path / "saved")
    again = AutoDrafter.from_pretrained(tmp_path / "saved", target)
    assert torch.equal(again.table.weight, drafter.table.weight) and again.num_assistant_tokens == K


def test_drafts_from_its_table(target, folder):
    """It has counted the text that is generated, so that most drafts are accepted."""
    drafter = AutoDrafter.from_pretrained(folder, target)
    prompt = torch.tensor([[3, 4, 5]])
    target.generate(prompt, assistant_model=drafter, max_new_tokens=40, do_sample=False)
    assert drafter.stats.acceptance_length > 1.5


def test_is_held_to_the_same_checks(target, folder, tmp_path):
    with pytest.raises(ValueError, match="is a drafter of the family bigram: it takes no `causal=`"):
        AutoDrafter.from_pretrained(folder, target, causal=True)
    save_file({"others": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing tensors: table\.weight; unexpected tensors: others"):
        AutoDrafter.from_pretrained(folder, target)


def test_inspect(folder, tmp_path, capsys):
    assert main(["inspect", str(folder), "--target", str(tmp_path / "target")]) == 0
    out = capsys.readouterr().out
    for part in (
        "bigram (toys)",
        "3 draft tokens a round",
        "chain        3",
        "counts  F32 [128, 128]",
        "(llama): fits",
    ):
        assert part in out, out


@pytest.mark.parametrize("random", [False, True])
def test_bench(random, folder, tmp_path):
    if random:  # config.json is all that is needed
        (folder / "model.safetensors").unlink()
    tokenizer = word_tokenizer()
    tokenizer.pad_token = "a"
    tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "abcde"}))
    options = ["--device", "cpu", "--max-new-tokens", "8", "--runs", "1", "--baselines", "engine", "-k", str(K)]
    options += (
        ["--random-weights", "--prompt-length", "5"] if random else ["--prompts", str(tmp_path / "prompts.jsonl")]
    )
    options += ["--output", str(tmp_path / "out.json"), "--drafter", str(folder)]
    assert main(["bench", "--target", str(tmp_path / "target"), *options]) == 0
    (case,) = [one for one in json.loads((tmp_path / "out.json").read_text())["cases"] if one["name"] != "engine"]
    assert case["error"] is None and case["k"] == K and case["bytes_per_round"] > 0
