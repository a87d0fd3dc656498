"""Batch generation: several processes generate what one does, and a killed run resumes."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import generate_batch
import psutil
import pytest
from batch.journal import Journal
from batch.sharing import cut, cut_evenly
from hypothesis import given
from hypothesis import strategies as st
from oracle import copy_of
from processes import ROOT, finish, launch
from targets import VOCAB, tiny_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PROGRAM = ROOT / "examples" / "generate_batch.py"
NUM_PROMPTS = 16
SAMPLING = ("--temperature", 1.2, "--top-p", 0.95, "--seed", 5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target with a tokenizer, a drafter that is often right, and prompts, some of which have ids."""
    root = tmp_path_factory.mktemp("generate_batch")
    target = tiny_target("llama")
    target.save_pretrained(root / "target")
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w7", pad_token="w0").save_pretrained(root / "target")
    copy_of(target, noise=0.03).save_pretrained(root / "drafter")
    lines = [
        {"prompt": " ".join(f"w{5 + (7 * row + word) % 90}" for word in range(1 + row * 5 % 17))}
        | ({"id": f"line {row}"} if row % 3 else {})
        for row in range(NUM_PROMPTS)
    ]
    (root / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return root


def arguments(folders: Path, output: Path, *more) -> list[str]:
    places = ["--target", folders / "target", "--drafter", folders / "drafter", "--prompts", folders / "prompts.jsonl"]
    options = ["--output", output, "--max-new-tokens", 20, "-k", 3, "--eos-token", "w7", "--token-ids", "--cpu", *more]
    return list(map(str, places + options))


def lines_in(folder: Path) -> int:
    return sum(part.read_bytes().count(b"\n") for part in folder.glob("*.jsonl"))


def kill_after(process, folder: Path, lines: int) -> int:
    """Kill all of a run once it has written so many lines; how many it has written."""
    deadline = time.monotonic() + 120
    while lines_in(folder) < lines and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()[0]
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        member.kill()
    psutil.wait_procs(family, timeout=30)
    process.communicate(timeout=30)
    return lines_in(folder)


def test_a_run_that_was_killed_resumes_with_any_number_of_processes(folders, tmp_path):
    """One process is killed; two resume its run, and one resumes a copy of it."""
    uninterrupted = tmp_path / "whole.jsonl"
    assert generate_batch.main(arguments(folders, uninterrupted, *SAMPLING, "--batch-size", 5)) == 0
    expected = [json.loads(line) for line in uninterrupted.read_text().splitlines()]
    assert [record["id"] for record in expected] == [f"line {row}" if row % 3 else row for row in range(NUM_PROMPTS)]

    asked = {
        processes: arguments(folders, tmp_path / f"{processes}.jsonl", *SAMPLING, "--batch-size", 1)
        for processes in (1, 2)
    }
    parts = {processes: tmp_path / f"{processes}.jsonl.parts" for processes in asked}
    done = kill_after(launch(PROGRAM, *asked[2], processes=1), parts[2], lines=NUM_PROMPTS // 4)
    assert NUM_PROMPTS // 4 <= done < NUM_PROMPTS and not (tmp_path / "2.jsonl").exists(), "the run was not interrupted"
    with next(parts[2].glob("*.jsonl")).open("a") as part:
        part.write('{"id": "line 1", "compl')
    shutil.copytree(parts[2], parts[1])
    assert generate_batch.main(asked[1]) == 0
    finish(launch(PROGRAM, *asked[2], processes=2))

    whole = json.loads((tmp_path / "whole.summary.json").read_text())
    sums = ("prompts", "tokens", "rounds", "drafted", "accepted", "acceptance_length", "acceptance_per_position")
    for processes in (1, 2):
        assert (tmp_path / f"{processes}.jsonl").read_bytes() == uninterrupted.read_bytes()
        assert not parts[processes].exists()
        summary = json.loads((tmp_path / f"{processes}.summary.json").read_text())
        assert {name: summary[name] for name in sums} == {name: whole[name] for name in sums}
        assert summary["tokens"] == sum(record["tokens"] for record in expected)
        now = summary["this_run"]
        assert now["prompts"] == NUM_PROMPTS - done and now["processes"] == processes == len(now["busy_seconds"])
        assert now["tokens_per_second"] > 0 and all(0 < busy <= now["seconds"] * 1.5 for busy in now["busy_seconds"])


@pytest.mark.core
def test_completions_are_those_of_generate(folders, tmp_path):
    output = tmp_path / "out.jsonl"
    assert generate_batch.main(arguments(folders, output, "--limit", 8)) == 0
    target, prompts = tiny_target("llama"), (folders / "prompts.jsonl").read_text().splitlines()
    for record, prompt in zip(map(json.loads, output.read_text().splitlines()), prompts, strict=False):
        ids = [int(word[1:]) for word in json.loads(prompt)["prompt"].split()]
        inputs = target.dummy_inputs["input_ids"].new_tensor([ids])
        plain = target.generate(inputs, do_sample=False, max_new_tokens=20, eos_token_id=7)[0, len(ids) :].tolist()
        assert record["token_ids"] == plain and record["tokens"] == len(plain)
        assert record["ended"] == (plain[-1] == 7)
        assert record["completion"].split() == [f"w{token}" for token in plain if token not in (0, 7)]
        assert record["speculation"]["rounds"] <= len(plain)


def test_samples_depend_on_seed_and_id_only(folders, tmp_path):
    def generated(name, *options):
        assert generate_batch.main(arguments(folders, tmp_path / name, *options)) == 0
        return {record["id"]: record["token_ids"] for record in map(json.loads, (tmp_path / name).open())}

    every = generated("every", *SAMPLING, "--batch-size", 6)
    few = generated("few", *SAMPLING, "--limit", 4, "--tokens-per-batch", 60)
    assert len(few) == 4 and few.items() <= every.items()
    other = generated("other", *SAMPLING[:-1], 6, "--limit", 4)
    assert other.keys() == few.keys() and all(other[name] != few[name] for name in few)


def test_a_run_resumes_only_with_the_same_arguments(folders, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    asked = arguments(folders, output, "--limit", 2)

    def said_of(*options):
        assert generate_batch.main([*asked, *map(str, options)]) == 1
        return capsys.readouterr().err

    assert generate_batch.main(asked) == 0
    content = output.read_bytes()
    assert generate_batch.main(asked) == 0 and "complete already" in capsys.readouterr().out
    assert "out.jsonl belongs to a run with other settings (seed was 0, now 4)" in said_of("--seed", 4)
    assert "other settings (prompts was" in said_of("--limit", 3)
    assert output.read_bytes() == content
    (tmp_path / "out.summary.json").unlink()
    assert "out.jsonl exists, but" in said_of() and output.read_bytes() == content


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--temperature", -1), "--temperature is -1.0; expected 0 (greedy) or more"),
        (("--top-p", 0.9), "expected a --temperature above 0 with them"),
        (("--batch-size", 0), "--batch-size is 0; expected at least 1"),
        (("--chat-template",), "--chat-template is set, but the target's tokenizer has none"),
        (("--prompts", "missing.jsonl"), "There is no file of prompts at missing.jsonl"),
        (("--prompts", "TWICE"), "has two prompts with the id 'a'; expected every id once"),
        (("--prompts", "EMPTY"), "Prompt 'nothing' has no tokens; expected at least one"),
        (("--prompts", "HALF"), r"HALF holds 'a\ud800', which is no text"),
    ],
)
def test_bad_arguments(folders, tmp_path, capsys, options, words):
    files = {"TWICE": '{"id": "a", "prompt": "w1"}\n' * 2, "EMPTY": '{"id": "nothing", "prompt": ""}\n'}
    files["HALF"] = r'{"id": "a\ud800", "prompt": "w1"}'
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    options = [tmp_path / option if option in files else option for option in options]
    assert generate_batch.main(arguments(folders, tmp_path / "out.jsonl", *options)) == 1
    assert words in capsys.readouterr().err and not (tmp_path / "out.jsonl").exists()


def record(name):
    return {"id": name, "completion": "w1\u2028w2"}


def test_journal(tmp_path):
    output, settings = tmp_path / "new" / "out.jsonl", {"seed": 1}
    first = Journal(output, settings)
    assert first.begin() == set()
    first.open(0)
    first.write([record("a"), record(2)])
    with pytest.raises(ValueError, match=r"Another process still writes .*00000\.jsonl; end what is left"):
        Journal(output, settings).begin()
    first._file.write('{"id": "torn')
    first._file.close()
    second = Journal(output, settings)
    assert second.begin() == {"a", 2}
    second.open(1)
    second.write([record("c")])
    with pytest.raises(ValueError, match=r"other settings \(seed was 1, now 2\)"):
        Journal(output, {"seed": 2}).begin()
    second._file.close()
    third = Journal(output, settings)
    assert third.begin() == {"a", 2, "c"}
    third.finish([third.records()[name] for name in ("c", "a", 2)], {"sum": 3})
    assert [json.loads(line) for line in output.read_text().split("\n")[:-1]] == [record("c"), record("a"), record(2)]
    assert json.loads(first.summary.read_text()) == {"settings": settings, "sum": 3}
    assert sorted(path.name for path in output.parent.iterdir()) == ["out.jsonl", "out.summary.json"]
    assert Journal(output, settings).begin() is None


@pytest.mark.parametrize(
    ("line", "words"), [("nonsense", "is damaged: 'nonsense'"), ('{"id": "a"}', "prompt 'a' was done before")]
)
def test_damaged_journal(tmp_path, line, words):
    journal = Journal(tmp_path / "out.jsonl", {})
    journal.begin()
    journal.open(0)
    journal.write([record("a")])
    journal._file.close()
    (tmp_path / "out.jsonl.parts" / "00001.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=words):
        Journal(tmp_path / "out.jsonl", {}).begin()


@given(
    st.lists(st.integers(1, 50), max_size=60).map(lambda lengths: sorted(lengths, reverse=True)),
    st.integers(1, 200),
    st.integers(1, 8),
    st.booleans(),
)
def test_batches(lengths, limit, processes, by_tokens):
    def cost(rows, longest):
        return rows * (longest + 10) if by_tokens else rows

    batches = cut_evenly(lengths, limit, cost, processes)
    assert [place for batch in batches for place in batch] == list(range(len(lengths)))
    assert all(len(batch) == 1 or cost(len(batch), lengths[batch[0]]) <= limit for batch in batches)
    fewest = len(cut(lengths, limit, cost))
    assert fewest <= len(batches) <= processes * -(-fewest // processes)


def test_batches_are_even():
    """400 prompts in batches of at most 32 for two processes: 14 of 28 or 29, not 13 of which the last has 16."""
    sizes = [len(batch) for batch in cut_evenly([9] * 400, 32, lambda rows, _: rows, 2)]
    assert len(sizes) == 14 and max(sizes) == 29 and sum(sizes) == 400
