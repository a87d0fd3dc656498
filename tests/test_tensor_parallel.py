"""A target split over two processes says what it says in one, and processes that disagree are told so."""

import json
import re

import pytest
from launch import ROOT, finish, launch
from targets import tiny_target
from tensor_parallel import DRAFTERS, OTHER_FAMILIES, say_all, say_briefly


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What the two processes said, each by the name of the case."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    for family in ("llama", *OTHER_FAMILIES):
        tiny_target(family).save_pretrained(folder / family)
    finish(launch(ROOT / "tests" / "tensor_parallel.py", folder, folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.core
def test_one_process_and_two_say_the_same(answers):
    expected = json.loads(json.dumps(say_all(tiny_target("llama"))))
    assert answers[0]["sharded"] == ["DTensor"], "the target was not split"
    for rank, said in enumerate(answers):
        different = [name for name in expected if said[name] != expected[name]]
        assert not different, f"process {rank} says something else: {different}"
    accepted = [sum(map(sum, expected[f"{name}, sampling"][1])) for name in DRAFTERS]
    assert all(count > 0 for count in accepted), "drafts were never accepted"
    assert all(expected[f"{name}, greedy"][0] == expected["plain"][0] for name in DRAFTERS)
    assert expected["borrower, sampling"][0] != expected["row seeds"][0]


@pytest.mark.core
@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_other_families(answers, family):
    expected = json.loads(json.dumps(say_briefly(tiny_target(family))))
    assert [said[family] for said in answers] == [expected, expected]


@pytest.mark.core
def test_seeds_are_those_of_the_first_process(answers):
    first, second = (said["seeds of their own"] for said in answers)
    assert first == second


@pytest.mark.core
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other prompts", "ValueError: .* called with different prompts, .*; expected the same call on every one"),
        ("other settings", "ValueError: .* called with different generation settings; expected the same call"),
        ("other row seeds", "ValueError: .* called with different seeds"),
        ("other random state", r"ValueError: .* called with different random state \(set_seed\)"),
        ("fsdp", r"ValueError: synced_gpus is set: .* \(FSDP or DeepSpeed stage 3\)"),
        ("max_time", "ValueError: max_time is set, .* clocks differ, .* Use max_new_tokens"),
        ("other tokens", "RuntimeError: .* generated different tokens, .* Logits processors and stopping criteria"),
    ],
)
def test_processes_that_disagree(answers, case, words):
    for said in answers:
        assert re.match(words, said[case]), said[case]
