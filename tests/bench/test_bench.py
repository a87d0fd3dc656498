"""`hf-specdec bench`: consistent figures, scripted acceptance, error messages."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import blocks
import case_counts
import pard2_reference
import pytest
import torch
from dialects import (
    DIALECTS,
    PEAGLE,
    PEAGLE_DIALECTS,
    Spec,
    make_weights,
    tiny_target,
    write,
    write_draft_model,
)
from mtp import publish
from oracle import RANDOM_DRAFTERS
from targets import NUM_LAYERS, STOCK_FAMILY, VOCAB, padded_prompts
from targets import tiny_target as family_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_specdec import AutoDrafter, ops
from hf_specdec.auto_k.auto_drafts import CANDIDATES
from hf_specdec.bench.batches import random_batches, text_batches
from hf_specdec.bench.clock import busy_time
from hf_specdec.bench.command import measure_all
from hf_specdec.bench.measure import Bench, Case, count_tokens
from hf_specdec.bench.models import load_target, random_drafter
from hf_specdec.bench.synthetic import acceptance_rates, scripted_acceptance
from hf_specdec.bench.traffic import copy_bandwidth, round_bytes
from hf_specdec.cli import main
from hf_specdec.drafters.none import NoDrafter
from hf_specdec.engine import rounds
from hf_specdec.kernels.types import RandomStream
from hf_specdec.ops import verify_sampling
from hf_specdec.prompt_sources import PROMPTS, load_prompts, read_prompts

SPEC = Spec()
# Of the target that is measured: fewer than its drafters' checkpoints name, which read none of the others.
TARGET = replace(SPEC, target_layers=6)
FAMILIES = ("eagle3", "p-eagle", "pard", "draft-model")


@pytest.fixture(autouse=True)
def small_copies(monkeypatch):
    """The memory's bandwidth is no concern of these tests."""
    monkeypatch.setattr("hf_specdec.bench.traffic.COPY_BYTES", 2**20)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target with a tokenizer, a drafter of each family for it, and prompts."""
    root = tmp_path_factory.mktemp("bench")
    tiny_target(TARGET, dtype=torch.float32).save_pretrained(root / "target")
    words = {f"w{index}": index for index in range(SPEC.vocab_size - 1)} | {"<end>": SPEC.vocab_size - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    tokenizer.chat_template = "{% for message in messages %}w1 w2 {{ message['content'] }} w3{% endfor %}"
    tokenizer.save_pretrained(root / "target")
    write("speculators", root / "eagle3", SPEC, make_weights(SPEC))
    write("automodel", root / "p-eagle", PEAGLE, make_weights(PEAGLE))
    write_draft_model(root / "pard", pard_token=7)
    write_draft_model(root / "draft-model")
    prompts = [" ".join(f"w{5 + (3 * row + word) % 100}" for word in range(4 + 3 * row)) for row in range(3)]
    lines = [json.dumps({"prompt": prompt, "category": "words"}) for prompt in prompts]
    (root / "prompts.jsonl").write_text("\n".join(lines) + "\n\n")
    return root


def bench(folders, *arguments, target="target"):
    return main(["bench", "--target", str(folders / target), "--device", "cpu", *map(str, arguments)])


def test_every_family(folders, tmp_path, capsys):
    output = tmp_path / "new" / "figures.json"
    drafters = [folders / family for family in FAMILIES]
    options = ["--batch-size", 1, 3, "--max-new-tokens", 8, "--runs", 2, "--prompts", folders / "prompts.jsonl"]
    options += ["--limit", 2]
    assert bench(folders, "--drafter", *drafters, "-k", 3, *options, "--output", output) == 0
    printed = capsys.readouterr().out
    header = "batch case K same text accepted ms/round /engine /dynamic tokens/s speedup first ms"
    lines = printed.splitlines()
    assert lines[0].split() == f"{header} bandwidth per position".split()
    assert len(lines) == 1 + 2 * (3 + len(FAMILIES)) + 1

    report = json.loads(output.read_text())
    assert report["environment"]["torch"] and report["environment"]["dtype"] == "float32"
    assert report["arguments"]["max_new_tokens"] == 8 and report["copy_bandwidth"] > 0
    drift = report["drift"]
    assert drift["ratio"] > 0 and (drift["case"], drift["batch_size"]) == ("dynamic", 1)
    assert lines[-1].startswith("drift: ") and f"takes {drift['ratio']:.2f} times" in lines[-1]
    cases = {(case["name"].rpartition("/")[2], case["batch_size"]): case for case in report["cases"]}
    assert set(cases) == {(name, size) for name in ("dynamic", "static", "engine", *FAMILIES) for size in (1, 3)}
    for (name, size), case in cases.items():
        engine, dynamic = cases["engine", size], cases["dynamic", size]
        assert case["error"] is None
        # Two prompts, at batch 3 the first of them again; no row ends early.
        assert case["tokens"] == 8 * (2 if size == 1 else 3)
        time, speed = case["ms_per_round"], case["tokens_per_second"]
        assert len(time["runs"]) == len(speed["runs"]) == 2
        assert 0 < time["low"] <= time["median"] <= time["high"]
        assert case["round_over_engine"] == pytest.approx(time["median"] / engine["ms_per_round"]["median"])
        assert case["round_over_dynamic"] == pytest.approx(time["median"] / dynamic["ms_per_round"]["median"])
        assert case["speedup"] == pytest.approx(speed["median"] / dynamic["tokens_per_second"]["median"])
        share = case["bytes_per_round"] / (time["median"] / 1e3) / report["copy_bandwidth"]
        assert case["bandwidth_share"] == pytest.approx(share)
        assert case["peak_memory_bytes"] is None and case["gpu_ms_per_round"] is None
        assert case["same_texts"] == (None if name == "dynamic" else 1.0)
        if name in ("dynamic", "static"):
            assert case["k"] is None and case["acceptance_length"] is None and case["engine"] is None
            assert case["rounds"] == 7 * (2 if size == 1 else 1)  # the first token comes with the prompt
        else:
            k = case["k"]
            assert k == (0 if name == "engine" else 3) and case["engine"].startswith("static")
            assert 1 <= case["acceptance_length"] <= k + 1
            assert len(case["acceptance_per_position"]) == k
            assert case["acceptance_per_position"] == sorted(case["acceptance_per_position"], reverse=True)
            # Every round reads the target, and a drafter's is more than a step without one.
            assert case["bytes_per_round"] > engine["bytes_per_round"] or name == "engine"


@pytest.mark.core
def test_continuous_batching(folders, capsys):
    """All prompts in one call on fewer rows; the texts are those of batch after batch."""
    options = ["--continuous", "--batch-size", 2, "--max-new-tokens", 8, "--runs", 2, "-k", 3]
    options += ["--prompts", folders / "prompts.jsonl", "--baselines", "dynamic", "engine", "--json"]
    assert bench(folders, "--drafter", folders / "eagle3", *options) == 0
    report = json.loads(capsys.readouterr().out)
    cases = {case["name"].rpartition("/")[2]: case for case in report["cases"]}
    assert set(cases) == {"dynamic", "engine", "eagle3"}
    for name in ("engine", "eagle3"):
        case = cases[name]
        assert case["error"] is None and case["same_texts"] == 1.0 and case["tokens"] == cases["dynamic"]["tokens"]
        assert case["tokens_per_second"]["median"] > 0 and case["speedup"] > 0
        assert case["ms_per_round"] is case["ms_to_first_token"] is case["bandwidth_share"] is None
    # Three prompts, and the first of them again, take the two rows one after the other.
    assert cases["engine"]["rounds"] == 14 and cases["eagle3"]["acceptance_length"] >= 1
    assert bench(folders, *options, "--gpu-time") == 1
    assert "--gpu-time times rounds of one batch" in capsys.readouterr().err


def test_latencies_of_requests(folders, capsys):
    """By a manager, two at once; the texts are those of batch after batch."""
    options = ["--serve", "--batch-size", 2, "--max-new-tokens", 8, "--runs", 2, "-k", 3]
    options += ["--prompts", folders / "prompts.jsonl", "--baselines", "dynamic", "engine"]
    assert bench(folders, "--drafter", folders / "eagle3", *options, "--output", folders / "served.json") == 0
    assert "first ms p50 / p99" in capsys.readouterr().out
    report = json.loads((folders / "served.json").read_text())
    cases = {case["name"].rpartition("/")[2]: case for case in report["cases"]}
    for name in ("engine", "eagle3"):
        case = cases[name]
        assert case["error"] is None and case["same_texts"] == 1.0 and case["tokens"] == cases["dynamic"]["tokens"]
        for figure in ("request_to_first_token", "request_per_token", "request_gap"):
            assert 0 < case[figure]["median"] <= case[figure]["p99"], figure
    assert cases["dynamic"]["request_gap"] is None and cases["dynamic"]["ms_to_first_token"] is not None
    for others, words in (
        (["--gpu-time"], "drop it, or --serve"),
        (["--continuous"], "--continuous and --serve are two ways"),
    ):
        assert bench(folders, *options, *others) == 1
        assert words in capsys.readouterr().err


def test_synthetic_acceptance(folders, tmp_path):
    """From config.json alone: no weights, no tokenizer; and what was asked for is what comes out."""
    for name in ("target", *FAMILIES):
        (tmp_path / name).mkdir()
        shutil.copy(folders / name / "config.json", tmp_path / name)
    drafters = [tmp_path / family for family in FAMILIES]
    options = ["--random-weights", "--prompt-length", 5, "--batch-size", 32, "--max-new-tokens", 20, "--runs", 1]
    options += ["--baselines", "engine", "--output", tmp_path / "out.json"]
    asked, judge = 2.3, rounds.verify
    assert bench(tmp_path, "--drafter", *drafters, "-k", 4, *options, "--synthetic-acceptance", asked) == 0
    assert rounds.verify is judge
    rates = acceptance_rates([asked], 4)
    for case in json.loads((tmp_path / "out.json").read_text())["cases"]:
        assert case["error"] is None and case["tokens"] == 32 * 20
        if case["k"]:
            # Some 280 rounds of rows, with a standard deviation of 1.4; the last one of a row may be cut short.
            assert case["acceptance_length"] == pytest.approx(asked, abs=0.3)
            assert case["acceptance_per_position"] == pytest.approx(rates, abs=0.1)


@pytest.mark.parametrize("way", [None, "--continuous", "--serve"])
def test_trees(folders, tmp_path, capsys, way):
    """Crossed with K; as many drafts are accepted as of chains."""
    for name in ("target", "eagle3", "p-eagle"):
        (tmp_path / name).mkdir()
        shutil.copy(folders / name / "config.json", tmp_path / name)
    blocks.write("specforge", tmp_path / "specforge", blocks.DSPARK, blocks.make_weights(blocks.DSPARK))
    (tmp_path / "specforge" / "model.safetensors").unlink()
    drafters = ["p-eagle"] if way else ["eagle3", "specforge"]
    options = ["--random-weights", "--prompt-length", 5, "--batch-size", 24, "--max-new-tokens", 20, "--runs", 1]
    options += ["--baselines", "engine", "--drafter", *(tmp_path / name for name in drafters)]
    options += ["-k", 3, 4, "--tree", 0, 20] if way else ["-k", 4, "--tree", 3, 20]
    options += ["--synthetic-acceptance", asked := 2.3, "--output", tmp_path / "out.json", *([way] if way else [])]
    assert bench(tmp_path, *options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:5] == ["batch", "case", "K", "tree", "accepted"]
    shapes = [["3", "-"], ["4", "-"], ["3", "20"], ["4", "20"]] if way else [["4", "3"], ["4", "20"]]
    shapes = [["0", "-"], *(len(drafters) * shapes)]
    assert [line.split()[2:4] for line in lines[1 : 1 + len(shapes)]] == shapes
    for case in json.loads((tmp_path / "out.json").read_text())["cases"]:
        assert case["error"] is None and case["tokens"] == 24 * 20, case
        assert case["rounds_by_tree"] == (
            {str(case["tree"]): sum(case["rounds_by_k"].values())} if case["tree"] else {}
        )
        if case["k"]:
            assert case["acceptance_length"] == pytest.approx(asked, abs=0.3)
            rates = acceptance_rates([asked], min(case["k"], case["tree"] or case["k"]))
            assert case["acceptance_per_position"][: len(rates)] == pytest.approx(rates, abs=0.12)


def test_trees_of_real_drafts(folders, capsys):
    """Texts are those of plain `generate()`; how drafts are drawn makes no further cases."""
    options = ["--prompts", folders / "prompts.jsonl", "--limit", 1, "--max-new-tokens", 6, "--runs", 1]
    options += ["--baselines", "dynamic", "--temperature", 0, 1, "--json"]
    options += ["--drafter", folders / "eagle3", "-k", 3, "auto", "--tree", 6, "auto"]
    assert bench(folders, *options, "--draft-probs", "on", "off") == 0
    cases = json.loads(capsys.readouterr().out)["cases"]
    found = [(case["temperature"], case["tree"], case["k"], case["draft_probs"]) for case in cases if case["k"]]
    assert found == [
        *((0.0, tree, k, None) for tree in (6, "auto") for k in (3, "auto")),
        *((1.0, 6, k, None) for k in (3, "auto")),
        *((1.0, "auto", k, probs) for probs in ("on", "off") for k in (3, "auto")),
    ]
    for case in cases:
        assert case["error"] is None and case["same_texts"] in (None, 1.0)
        if (case["k"], case["tree"]) == (3, 6):
            assert {*case["rounds_by_tree"]} == {"6"}


@pytest.mark.parametrize(
    ("further", "asked"),
    [([], [1.9]), (["--continuous"], [0.9, 0.5, 0.3, 0.2, 0.1, 0.1, 0.0])],
    ids=["generate", "continuous"],
)
def test_k_that_is_chosen_round_by_round(folders, tmp_path, further, asked):
    output, options = tmp_path / "out.json", ["--max-new-tokens", 24, "--runs", 1, "--baselines", "engine"]
    options += ["--prompts", folders / "prompts.jsonl", "--limit", 1, "--drafter", folders / "eagle3", "-k", 2, "auto"]
    assert bench(folders, *options, *further, "--synthetic-acceptance", *asked, "--output", output) == 0
    cases = {case["k"]: case for case in json.loads(output.read_text())["cases"]}
    assert list(cases) == [0, 2, "auto"] and not any(case["error"] for case in cases.values())
    used = {int(k): count for k, count in cases["auto"]["rounds_by_k"].items()}
    # Which they are is up to the times of the calls before it; maybe 0 alone, without the drafter.
    assert {*used} <= {*CANDIDATES} and sum(used.values()) == cases["auto"]["rounds"]
    assert len(cases["auto"]["acceptance_per_position"]) in (0, 7) and cases["auto"]["bytes_per_round"] is None
    assert bench(folders, "--drafter", folders / "eagle3", "-k", "most", "--max-new-tokens", 4) == 1


def test_texts_are_compared():
    target = family_target("llama")
    drafter = RANDOM_DRAFTERS["eagle3"](target)
    everything = partial(scripted_acceptance, [1.0] * 3, target.device)
    inputs, options = random_batches(VOCAB, 5, 2, 2, target.device), {"max_new_tokens": 8}
    for is_scripted, texts in ((False, [1.0, 0.0]), (True, [None, None])):
        bench = Bench(target, lambda _: inputs, options, runs=1, bandwidth=1.0, is_scripted=is_scripted)
        bench.measure(Case("dynamic", None, 2))
        for context, expected in zip((nullcontext, everything), texts, strict=True):
            case = Case("eagle3", 3, 2)
            bench.measure(case, drafter, context)
            assert case.error is None and case.same_texts == expected


def test_no_scripted_acceptance_on_the_stock_engine(tmp_path, capsys):
    target = family_target(STOCK_FAMILY)
    target.config.save_pretrained(tmp_path / "target")
    RANDOM_DRAFTERS["draft-model"](family_target("llama")).model.config.save_pretrained(tmp_path / "drafter")
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    options = ["--random-weights", "--max-new-tokens", 4, "--prompt-length", 4, "--runs", 1, "--baselines", "dynamic"]
    options += ["--drafter", tmp_path / "drafter", "-k", 2]
    assert bench(tmp_path, *options) == 0
    assert "drafter (stock engine)" in capsys.readouterr().out
    assert bench(tmp_path, *options, "--synthetic-acceptance", 2) == 1
    failed = 'failed: drafter (batch 1, prompt 4, K = 2): ValueError: engine="static" was forced'
    assert failed in capsys.readouterr().out


def test_prompts_of_several_lengths(folders, tmp_path, capsys):
    """A case each, compared with the baseline of the same length; what a round reads grows by the live K/V."""
    output, lengths = tmp_path / "out.json", [4, 20]
    options = ["--random-weights", "--max-new-tokens", 6, "--runs", 1, "--baselines", "engine", "--batch-size", 1, 2]
    options += ["--drafter", folders / "eagle3", folders / "missing", "-k", 2]
    assert bench(folders, *options, "--prompt-length", *lengths, "--output", output) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["batch", "prompt", "case"]
    assert [line.split()[:3] for line in lines[1:9]] == [
        [size, length, name] for size in "12" for length in ("4", "20") for name in ("engine", "eagle3")
    ]
    assert lines[9].startswith("failed: missing (batch 1, prompt 4, K = 2; batch 1, prompt 20, K = 2; batch 2, ")
    assert "a step of engine at batch 1, prompt 4 takes" in lines[10]
    report = json.loads(output.read_text())
    assert report["drift"]["prompt_length"] == 4 and report["arguments"]["prompt_length"] == lengths
    cases = {
        (case["name"].rpartition("/")[2], case["batch_size"], case["prompt_length"]): case for case in report["cases"]
    }
    assert set(cases) == {
        (name, size, n) for name in ("engine", "eagle3", "missing") for size in (1, 2) for n in lengths
    }
    cached = 2 * SPEC.num_kv_heads * SPEC.head_dim * 4  # a layer's keys and values of a token
    # At K = 2 the drafter's layer runs twice a round.
    for name, layers in (("engine", TARGET.target_layers), ("eagle3", TARGET.target_layers + 2 * SPEC.num_layers)):
        for size in (1, 2):
            short, long = (cases[name, size, length] for length in lengths)
            assert long["bytes_per_round"] - short["bytes_per_round"] == size * 16 * layers * cached
            for case in (short, long):
                engine = cases["engine", size, case["prompt_length"]]
                ratio = case["ms_per_round"]["median"] / engine["ms_per_round"]["median"]
                assert case["round_over_engine"] == pytest.approx(ratio)
    assert bench(folders, *options, "--prompt-length", 4) == 0
    assert capsys.readouterr().out.split()[:2] == ["batch", "case"]


@pytest.mark.parametrize(
    ("family", "num_modules"),
    case_counts.cases(list(product(["deepseek-v3", "glm-4.5"], [1, 3])), [("deepseek-v3", 3), ("glm-4.5", 1)]),
)
def test_random_modules_from_a_config(family, num_modules, tmp_path):
    """A config.json is all that is needed to time its MTP modules: three in a row, or one three times."""
    published = publish(family, tmp_path / "published", num_modules).folder
    (tmp_path / "target").mkdir()
    shutil.copy(published / "config.json", tmp_path / "target")
    options = ["--random-weights", "--prompt-length", 5, "--max-new-tokens", 16, "--runs", 1, "--batch-size", 1, 3]
    options += ["--baselines", "engine", "--drafter", tmp_path / "target", "--output", tmp_path / "out.json"]
    assert bench(tmp_path, *options, "--synthetic-acceptance", 0.9, 0.9, 0.0) == 0
    for case in json.loads((tmp_path / "out.json").read_text())["cases"]:
        assert case["error"] is None and case["tokens"] == 16 * case["batch_size"]
        if case["name"] != "engine":
            assert case["k"] == 3 and case["engine"].startswith("static") and case["acceptance_length"] > 1.5
    for dtype in (torch.float32, torch.bfloat16):
        target = load_target(str(tmp_path / "target"), dtype, torch.device("cpu"), random_weights=True)
        # As large as the sum of layers' outputs, so that rounding does not decide what a text becomes.
        size = target.config.num_hidden_layers**0.5
        assert target.get_input_embeddings().weight.std().item() == pytest.approx(size, rel=0.02)
        assert target.get_output_embeddings().weight.std().item() < 0.5
        drafter = random_drafter(str(tmp_path / "target"), target)
        assert len(drafter.frames) == len(drafter.decoder.layers) == num_modules
        assert drafter.config.chaining == ("target" if num_modules == 1 else "modules")
        for model in (target, drafter):
            # Routers are kept in float32 by classes of transformers 5.24.
            others = [one for name, one in model.named_parameters() if not name.endswith("mlp.gate.weight")]
            assert {parameter.dtype for parameter in others} == {dtype}
            experts = [parameter for parameter in model.parameters() if parameter.dim() == 3]
            assert experts and all(parameter.isfinite().all() and parameter.std() > 0 for parameter in experts)


def test_acceptance_rates():
    for length, k in ((1.0, 3), (2.5, 2), (2.5, 7), (4.0, 3)):
        rates = acceptance_rates([length], k)
        assert len(rates) == k and 1 + sum(rates) == pytest.approx(length)
        assert rates == pytest.approx([rates[0] ** step for step in range(1, k + 1)])
    assert acceptance_rates([0.8, 0.5, 0.5], 2) == [0.8, 0.5]
    assert acceptance_rates([0.25], 1) == [0.25]
    for asked, k, message in (
        ([4.5], 3, "at most 4 tokens"),
        ([0.8, 0.5], 3, "K is 3"),
        ([0.5, 0.8], 2, "never grow"),
        ([1.5, 0.8], 2, "never grow"),
        ([0.5, -0.1], 2, "never grow"),
    ):
        with pytest.raises(ValueError, match=message):
            acceptance_rates(asked, k)


def test_scripted_acceptance_ends_with_its_context():
    target = family_target("llama")
    drafter, prompts = RANDOM_DRAFTERS["eagle3"](target), padded_prompts([4, 7])
    options = {"max_new_tokens": 24, "do_sample": False, "assistant_model": drafter, "num_assistant_tokens": 3}
    plain, judge = target.generate(**prompts, max_new_tokens=24, do_sample=False), rounds.verify
    with pytest.raises(RuntimeError, match="inside"), scripted_acceptance([1.0, 1.0, 0.0], torch.device("cpu")):
        target.generate(**prompts, **options)
        stats = drafter.stats
        target.generate(**prompts, **{**options, "do_sample": True})
        assert drafter.stats.acceptance_per_position == [1.0, 1.0, 0.0]
        raise RuntimeError("inside")
    assert stats.acceptance_per_position == [1.0, 1.0, 0.0] and stats.rounds == 2 * 8
    assert rounds.verify is judge
    assert torch.equal(target.generate(**prompts, **options), plain)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt-oss"])
def test_engine_without_a_drafter(family):
    """Rounds of K = 0 generate what plain `generate()` does; to users K = 0 stays an error."""
    target, prompts = family_target(family), padded_prompts([5, 1, 9])
    options = {"max_new_tokens": 20, "do_sample": False, "repetition_penalty": 1.2}
    plain, alone = target.generate(**prompts, **options), NoDrafter(target)
    assert torch.equal(target.generate(**prompts, **options, assistant_model=alone), plain)
    assert alone.stats.acceptance_length == 1.0 and alone.stats.num_rounds == 19
    assert (alone.stats.drafted, alone.stats.acceptance_per_position) == (0, [])
    with pytest.raises(ValueError, match="num_assistant_tokens is 0"):
        drafter = RANDOM_DRAFTERS["draft-model"](target)
        target.generate(**prompts, **options, assistant_model=drafter, num_assistant_tokens=0)


@pytest.mark.core
def test_sampling_without_drafts():
    """With nothing to accept or reject, the token is drawn from the target's distribution."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 1, 9, generator=generator)
    seeds, lengths = torch.arange(5), torch.tensor([3, 1, 4, 1, 5])
    drafts = torch.empty(5, 0, dtype=torch.int64)
    result = verify_sampling(scores, drafts, None, None, seeds, lengths)
    drawn = ops.exponential_sample(scores[:, 0].softmax(-1), seeds, lengths, RandomStream.TARGET)
    assert torch.equal(result.tokens, drawn[:, None])
    assert result.accepted.tolist() == [0] * 5 and result.committed.tolist() == [1] * 5


@pytest.mark.parametrize("dialect", [*DIALECTS, *PEAGLE_DIALECTS])
def test_random_drafters_have_the_shapes_of_loaded_ones(dialect, tmp_path):
    spec = (
        PEAGLE if dialect in PEAGLE_DIALECTS else Spec(qk_norm=dialect == "speculators", fc_norm=dialect == "specforge")
    )
    target = tiny_target(spec, dtype=torch.float32)
    folder = write(dialect, tmp_path, spec, make_weights(spec))
    loaded = AutoDrafter.from_pretrained(folder, target)
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    built = random_drafter(str(folder), target)
    assert type(built) is type(loaded) and built.aux_hidden_state_layer_ids == loaded.aux_hidden_state_layer_ids
    shapes = [{name: tensor.shape for name, tensor in one.state_dict().items()} for one in (built, loaded)]
    for found in shapes:  # Published beside the draft layers or not, an embedding is read a row at a time.
        found.pop("embed_tokens.weight", None)
    assert shapes[0].keys() == shapes[1].keys()
    assert {name: shape[-1:] for name, shape in shapes[0].items()} == {
        name: shape[-1:] for name, shape in shapes[1].items()
    }


@pytest.mark.parametrize("layout", blocks.LAYOUTS)
def test_random_drafters_of_blocks_have_the_shapes_of_loaded_ones(layout, tmp_path):
    target = tiny_target(SPEC, dtype=torch.float32)
    for number, spec in enumerate(blocks.LAYOUTS[layout]):
        folder = blocks.write(layout, tmp_path / str(number), spec, blocks.make_weights(spec))
        loaded = AutoDrafter.from_pretrained(folder, target)
        (folder / "model.safetensors").unlink()
        if spec.hidden_size != target.config.hidden_size:  # it has an embedding of its own, which is not looked for
            continue
        built = random_drafter(str(folder), target)
        assert type(built) is type(loaded) and built.config.causal == loaded.config.causal
        shapes = [{name: tensor.shape for name, tensor in one.state_dict().items()} for one in (built, loaded)]
        if layout.startswith("deepspec"):  # copies of the target's
            shapes[1] = {
                name: shape
                for name, shape in shapes[1].items()
                if name.split(".")[0] not in ("embed_tokens", "lm_head")
            }
        assert shapes[0] == shapes[1]


@pytest.mark.parametrize("bias", [False, True])
def test_random_pard2_drafters_have_the_shapes_of_loaded_ones(bias, tmp_path):
    target = tiny_target(SPEC, dtype=torch.float32)
    folder = pard2_reference.write(tmp_path, bias=bias)
    loaded = AutoDrafter.from_pretrained(folder, target)
    (folder / "model.safetensors").unlink()
    (folder / pard2_reference.PROJECTION_FILE).unlink()
    built = random_drafter(str(folder), target)
    assert type(built) is type(loaded) and built.aux_hidden_state_layer_ids == loaded.aux_hidden_state_layer_ids
    shapes = [{name: tensor.shape for name, tensor in one.state_dict().items()} for one in (built, loaded)]
    assert shapes[0] == shapes[1]


def test_bytes_of_a_round():
    target = family_target("llama")
    layer = 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32)
    weights = NUM_LAYERS * layer + 4 * (32 + 96 * 32)
    cached = NUM_LAYERS * 2 * 2 * 8 * 4  # a token's keys and values
    assert round_bytes(target, None, 0, batch=3, length=10.5) == weights + int(3 * 10.5 * cached)
    for name, passes in (("draft-model", 5), ("pard", 1)):
        drafter = RANDOM_DRAFTERS[name](target)
        model = drafter.model
        own = 4 * (sum(map(torch.Tensor.numel, model.parameters())) - model.get_input_embeddings().weight.numel())
        own_cached = model.config.num_hidden_layers * 2 * 1 * 12 * 4
        total = round_bytes(target, drafter, 5, batch=1, length=10)
        assert total == weights + 10 * cached + passes * (own + 10 * own_cached)
    projection = RANDOM_DRAFTERS["pard2"](target)
    assert round_bytes(target, projection, 5, batch=1, length=10) == total + 4 * projection.target_proj.weight.numel()
    eagle = RANDOM_DRAFTERS["eagle3"](target)
    rounded = NoDrafter(target, kv_cache_dtype="fp8")
    assert round_bytes(target, rounded, 0, batch=3, length=10.5) == weights + int(3 * 10.5 * cached) // 4
    more = [round_bytes(target, eagle, k, batch=1, length=10) for k in (1, 2, 3)]
    assert more[2] - more[1] == more[1] - more[0]
    read = sum(map(torch.Tensor.numel, eagle.parameters())) - eagle.embed_tokens.weight.numel()
    assert more[0] == weights + 10 * cached + 4 * read + 2 * 2 * 8 * 4 * 10
    recurrent = family_target("mamba")
    assert round_bytes(recurrent, None, 0, batch=3, length=10) == round_bytes(recurrent, None, 0, batch=1, length=99)
    for name in ("dflash", "dspark", "dflash2", "domino"):  # one pass, then K steps
        drafter = RANDOM_DRAFTERS[name](target, layer_types=["full_attention"] * 3)
        sizes = {name: parameter.numel() for name, parameter in drafter.named_parameters()}
        # Of tables of tokens few rows are read.
        tables = sum(size for name, size in sizes.items() if "markov_w1" in name or "codebook" in name)
        parts = ("markov_w2", "markov_head.joint", "prefix_gru", "embed_proj")
        step = sum(size for name, size in sizes.items() if any(part in name for part in parts))
        read = sum(sizes.values()) + drafter.head_weight.numel() - tables - step
        total = weights + 10 * cached + 4 * read + 3 * 2 * 2 * 8 * 4 * 10
        assert [round_bytes(target, drafter, k, batch=1, length=10) for k in (1, 3)] == [
            total + 4 * step,
            total + 3 * 4 * step,
        ]
    windowed = family_target("mistral")  # a window of 7 slots in every layer
    assert round_bytes(windowed, None, 0, batch=1, length=100) == weights + 7 * cached
    assert round_bytes(family_target("qwen3-moe"), None, 0, batch=1, length=10) is None
    assert copy_bandwidth(torch.device("cpu"), groups=1) > 1e8


def test_counting_tokens():
    new = torch.tensor([[5, 6, 7, 8], [5, 2, 0, 0], [3, 2, 2, 0], [5, 6, 7, 2]])
    assert count_tokens(new, None) == [4, 4, 4, 4]
    assert count_tokens(new, 2) == [4, 2, 2, 4]
    assert count_tokens(new, [2, 3]) == [4, 2, 1, 4]


def test_batches(folders):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folders / "target")
    prompts = load_prompts(str(folders / "prompts.jsonl"))
    first, second = text_batches(tokenizer, prompts, 2, torch.device("cpu"))
    assert first["attention_mask"].sum(dim=1).tolist() == [7, 10] and first["attention_mask"][0, 0] == 0
    assert first["input_ids"][1, :3].tolist() == [1, 2, 8]
    assert second["attention_mask"].sum(dim=1).tolist() == [13, 7]
    assert torch.equal(second["input_ids"][1, -7:], first["input_ids"][0, -7:])
    tokenizer.chat_template = None
    (plain,) = text_batches(tokenizer, prompts, 3, torch.device("cpu"))
    assert plain["attention_mask"].sum(dim=1).tolist() == [4, 7, 10]
    (alone,) = random_batches(SPEC.vocab_size, 6, 1, 1, torch.device("cpu"))
    (filled,) = random_batches(SPEC.vocab_size, 6, 2, 4, torch.device("cpu"))
    assert torch.equal(filled["input_ids"][:2], filled["input_ids"][2:])
    assert torch.equal(filled["input_ids"][:1], alone["input_ids"])
    assert load_prompts(None, 3) == list(PROMPTS[:3]) and len(load_prompts(None)) == 16


def test_ids_of_prompts(tmp_path):
    """A line separator inside a text is not the end of a line of the file."""
    lines = [{"prompt": "a\u2028b"}, {"id": "x", "prompt": "c"}, {"id": 7, "prompt": ["d", "later"]}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\r\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    assert read_prompts(file) == [(0, "a\u2028b"), ("x", "c"), (7, "d")]
    assert read_prompts(None, 1) == [(0, PROMPTS[0])]


def test_end_of_sequence(folders, capsys, tmp_path):
    """Answers end at the token that was named, padding is not counted, and --ignore-eos goes on."""
    target, prompt = load_target(str(folders / "target"), torch.float32, torch.device("cpu")), "w5 w6"
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": prompt}))
    ids = torch.tensor([[1, 2, 5, 6, 3]])
    out = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    answer = out[0, ids.shape[1] :].tolist()
    end = answer[4]
    options = ["--prompts", tmp_path / "one.jsonl", "--max-new-tokens", 9, "--runs", 1]
    options += ["--baselines", "dynamic", "engine"]
    for more, tokens in (
        ([], 9),
        (["--eos-token", f"w{end}"], answer.index(end) + 1),
        (["--eos-token", f"w{end}", "--ignore-eos"], 9),
    ):
        assert bench(folders, *options, *more, "--json") == 0
        cases = json.loads(capsys.readouterr().out)["cases"]
        assert [case["tokens"] for case in cases] == [tokens] * 2
    assert bench(folders, *options, "--eos-token", "<nobody>") == 1
    assert "no token of the target's tokenizer" in capsys.readouterr().err


def test_sampling(folders, capsys):
    options = ["--prompts", folders / "prompts.jsonl", "--max-new-tokens", 8, "--runs", 1, "--temperature", 1.0]
    assert bench(folders, "--drafter", folders / "eagle3", *options, "--baselines", "engine", "--json") == 0
    engine, case = json.loads(capsys.readouterr().out)["cases"]
    assert engine["tokens"] == case["tokens"] == 3 * 8 and case["k"] == 3
    assert case["speedup"] is None and case["round_over_dynamic"] is None and case["round_over_engine"] > 0


def test_temperatures_and_draft_probs(folders, tmp_path, capsys):
    """Every temperature has its baselines; where nothing is drawn, how drafts are drawn makes no further cases."""
    options = ["--prompts", folders / "prompts.jsonl", "--max-new-tokens", 6, "--runs", 1, "--limit", 1, "-k", 2]
    options += ["--temperature", 0, 0.7, 1.2, "--draft-probs", "on", "off", "--baselines", "dynamic", "engine"]
    options += ["--output", tmp_path / "out.json", "--drafter", folders / "eagle3", folders / "missing"]
    drawn, generate = {}, type(tiny_target(SPEC)).generate

    def watched(self, *args, **kwargs):
        out = generate(self, *args, **kwargs)
        drafter = kwargs.get("assistant_model")
        if drafter is not None and drafter.stats.num_assistant_tokens:
            drawn[kwargs.get("temperature", 0), kwargs["do_sample"], drafter.draft_probs] = drafter.stats.draft_probs
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(tiny_target(SPEC)), "generate", watched)
        assert bench(folders, *options) == 0
    assert drawn == {
        (0, False, "auto"): False,
        (0.7, True, True): True,
        (0.7, True, False): False,
        (1.2, True, True): True,
        (1.2, True, False): False,
    }
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["arguments"]["temperature"] == [0, 0.7, 1.2] and report["arguments"]["draft_probs"] == ["on", "off"]
    assert report["drift"]["case"] == "dynamic" and report["drift"]["temperature"] == 0
    cases = [case for case in report["cases"] if case["error"] is None]
    assert [(case["name"].rpartition("/")[2], case["temperature"], case["draft_probs"]) for case in cases] == [
        ("dynamic", 0, None),
        ("engine", 0, None),
        ("eagle3", 0, None),
        ("dynamic", 0.7, None),
        ("engine", 0.7, None),
        ("eagle3", 0.7, "on"),
        ("eagle3", 0.7, "off"),
        ("dynamic", 1.2, None),
        ("engine", 1.2, None),
        ("eagle3", 1.2, "on"),
        ("eagle3", 1.2, "off"),
    ]
    engines = {case["temperature"]: case for case in cases if case["name"] == "engine"}
    for case in cases:
        engine = engines[case["temperature"]]["ms_per_round"]["median"]
        assert case["round_over_engine"] == pytest.approx(case["ms_per_round"]["median"] / engine)
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:6] == ["batch", "case", "T", "draft", "probs", "K"]
    assert [line.split()[2:4] for line in lines[4:7]] == [["0.7", "-"], ["0.7", "on"], ["0.7", "off"]]
    where = "batch 1, K = 2; batch 1, T = 0.7, draft probs on, K = 2; batch 1, T = 0.7, draft probs off, K = 2; "
    assert lines[11].startswith(f"failed: missing ({where}")


def test_failed_cases_are_reported_and_others_run(folders, capsys, monkeypatch, tmp_path):
    options = ["--prompts", folders / "prompts.jsonl", "--max-new-tokens", 6, "--runs", 1, "--limit", 1]
    drafters = [folders / "eagle3", folders / "missing"]
    generate = type(tiny_target(SPEC)).generate

    def out_of_memory(self, *args, **kwargs):
        if kwargs.get("cache_implementation") == "static":
            raise torch.OutOfMemoryError("no room\nfor this")
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(type(tiny_target(SPEC)), "generate", out_of_memory)
    assert bench(folders, "--drafter", *drafters, "-k", 1, 2, *options, "--output", tmp_path / "out.json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[1:5]] == ["dynamic", "engine", "eagle3", "eagle3"]
    assert lines[5] == "failed: static (batch 1): OutOfMemoryError: no room for this"
    assert lines[6].startswith("failed: missing (batch 1, K = 1; batch 1, K = 2): ") and len(lines) == 8
    cases = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert [bool(case["error"]) for case in cases] == [False, True, False, False, False, True, True]
    # The baselines alone are not what was asked about: nothing is measured.
    assert bench(folders, "--drafter", folders / "missing", "--baselines", "dynamic", *options) == 1
    captured = capsys.readouterr()
    assert "No drafter could be read" in captured.err and str(folders / "missing") in captured.err
    assert captured.out == ""


def test_missing_drafters_are_said_before_anything_is_measured(folders, capsys, monkeypatch):
    said = []
    monkeypatch.setattr(
        "hf_specdec.bench.command.load_target", lambda *_: said.append(capsys.readouterr().err) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        bench(folders, "--drafter", folders / "eagle3", folders / "missing", "--prompts", folders / "prompts.jsonl")
    assert f"hf-specdec: {folders / 'missing'} will not be measured: " in said[0]


def test_errors_are_one_line(folders, capsys, monkeypatch, tmp_path):
    (tmp_path / "no_prompt.jsonl").write_text('{"prompt": "w5"}\n{"text": "w6"}\n')
    (tmp_path / "no_json.jsonl").write_text("w5\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    monkeypatch.setitem(sys.modules, "datasets", None)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    for arguments, message in (
        (["--prompts", tmp_path / "none.jsonl"], "There is no file of prompts at"),
        (["--prompts", tmp_path / "no_prompt.jsonl"], "Line 2 of"),
        (["--prompts", tmp_path / "no_json.jsonl"], "is not JSON"),
        (["--prompts", tmp_path / "empty.jsonl"], "holds no prompts"),
        (["--prompts", "hub:org/chats"], "needs the library `datasets`"),
        (["--plots", tmp_path], "pip install 'hf-specdec[bench]'"),
        (["-k", 0], "num_assistant_tokens is 0"),
        (["--tree", 0, 128], "tree is 128; expected an int of 0"),
        (["--runs", 0], "--runs is 0; expected at least 1"),
        (["--max-new-tokens", 1], "expected at least 2"),
        (["--batch-size", 2, 0], "--batch-size is [2, 0]"),
        (["--temperature", 0, -1], "--temperature is -1.0"),
        (["--baselines"], "nothing to measure"),
        (["--random-weights", "--prompts", "x"], "drop --prompts"),
        (["--synthetic-acceptance", 0.5, 0.7], "never grow"),
        (["--device", "nonsense"], "--device is 'nonsense'"),
        (["--device", "meta"], "--device is 'meta', which torch cannot use here"),
    ):
        assert main(["bench", "--target", str(folders / "target"), *map(str, arguments)]) == 1
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err
    for options in ([], ["--random-weights"]):
        assert main(["bench", "--target", "/nonexistent", *options]) == 1
        captured = capsys.readouterr()
        assert captured.err.startswith("hf-specdec: /nonexistent is not a folder; expected one, or a repository")
        assert captured.err.count("\n") == 1
    assert bench(folders, target="target/missing.gguf") == 1
    assert "There is no GGUF file at" in capsys.readouterr().err


def test_prompts_from_the_hub(monkeypatch):
    """`hub:name[:split[:column]]`; a conversation is asked its first turn."""

    class Rows(dict):
        column_names = property(list)

        def __len__(self):
            return len(self["prompt"])

        def select(self, rows):
            return {name: [values[row] for row in rows] for name, values in self.items()}

    chat = [{"role": "user", "content": "third"}, {"role": "assistant", "content": "answer"}]
    rows, asked = Rows(prompt=["first", ["second", "later"], chat], turns=[1, 2, 3]), []

    def load_dataset(name, split):
        asked.append((name, split))
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert load_prompts("hub:org/chats") == ["first", "second", "third"]
    assert load_prompts("hub:org/chats:test", limit=1) == ["first"]
    assert load_prompts("hub:org/chats:test:prompt", limit=9) == ["first", "second", "third"]
    assert asked == [("org/chats", "train"), ("org/chats", "test"), ("org/chats", "test")]
    with pytest.raises(ValueError, match=r"no column 'question', but 'prompt', 'turns'.*hub:org/chats:test:COLUMN"):
        load_prompts("hub:org/chats:test:question")
    with pytest.raises(ValueError, match="Column 'turns' of org/chats holds a int"):
        load_prompts("hub:org/chats:test:turns")
    with pytest.raises(ValueError, match="has 4 parts"):
        load_prompts("hub:org/chats:test:prompt:more")
    rows["id"] = ["x", 8, None]
    assert read_prompts("hub:org/chats") == [("x", "first"), (8, "second"), (2, "third")]


def test_gpu_time_excludes_waiting_for_the_host():
    intervals = [(10.0, 12.0), (0.0, 4.0), (4.5, 6.0), (5.0, 5.5), (20.0, 21.0)]
    assert busy_time(intervals, short_gap=1.0) == 6.0 + 2.0 + 1.0
    assert busy_time(intervals, short_gap=0.0) == 4.0 + 1.5 + 2.0 + 1.0
    assert busy_time(intervals, short_gap=5.0) == 12.0 + 1.0
    assert busy_time([]) == 0.0


def test_measurements_are_written_before_the_process_ends(folders, tmp_path, monkeypatch):
    measured = measure_all

    def interrupted(*args):
        yield next(measured(*args))
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_specdec.bench.command.measure_all", interrupted)
    output = tmp_path / "out.json"
    options = ["--prompts", folders / "prompts.jsonl", "--max-new-tokens", 6, "--runs", 1, "--limit", 1]
    with pytest.raises(KeyboardInterrupt):
        bench(folders, *options, "--baselines", "dynamic", "static", "--output", output)
    report = json.loads(output.read_text())
    assert [case["name"] for case in report["cases"]] == ["dynamic"] and report["drift"] is None
    assert 0 < report["cases"][0]["cold_ms_to_first_token"] < 60e3


def test_plots(folders, tmp_path):
    pytest.importorskip("matplotlib")
    options = ["--prompts", folders / "prompts.jsonl", "--max-new-tokens", 6, "--runs", 2, "--limit", 1]
    options += ["--temperature", 0, 1, "--draft-probs", "on", "auto"]
    drafters = [folders / "eagle3", folders / "missing"]
    assert bench(folders, "--drafter", *drafters, "-k", 1, "auto", *options, "--plots", tmp_path / "plots") == 0
    pictures = {path.name: path.read_bytes() for path in (tmp_path / "plots").iterdir()}
    assert sorted(pictures) == ["acceptance.png", "round_time.png", "tokens_per_second.png"]
    assert all(content.startswith(b"\x89PNG") and len(content) > 5000 for content in pictures.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_figures(folders, capsys):
    options = ["--random-weights", "--prompt-length", 16, "--max-new-tokens", 24, "--gpu-time", "--json"]
    options += ["--drafter", str(folders / "eagle3"), "-k", "3", "--synthetic-acceptance", "2"]
    assert main(["bench", "--target", str(folders / "target"), "--device", "cuda", *map(str, options)]) == 0
    for case in json.loads(capsys.readouterr().out)["cases"]:
        assert case["error"] is None and case["peak_memory_bytes"] > 0 and 0 < case["bandwidth_share"] < 1
        assert 0 < case["gpu_ms_per_round"] < 1.2 * case["ms_per_round"]["high"]
