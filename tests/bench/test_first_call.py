"""What times the first calls of a process on a GPU runs."""

import argparse
import gc

import pytest
from first_call import CASES, measure
from oracle import random_eagle3
from targets import tiny_target


@pytest.mark.parametrize("case", CASES)
def test_first_calls_are_timed(tmp_path, case):
    target = tiny_target("llama")
    for name, one in (("target", target), ("drafter", random_eagle3(target))):
        one.config.save_pretrained(tmp_path / name)
    folders = {name: str(tmp_path / name) for name in ("target", "drafter")}
    args = argparse.Namespace(**folders, num_assistant_tokens=2, max_new_tokens=3, prompts=2)
    try:
        found = measure(case, args)
    finally:
        gc.unfreeze()  # which a server has frozen
    assert {name for name in found if name.endswith("_again")} and all(seconds > 0 for seconds in found.values())
