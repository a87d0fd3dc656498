"""Functions of the package that a call runs: `PYTHONPATH=. python tests/helpers/call_counts.py` prints them by file.

The counts are of a warm call of `generate()` on a CPU, up to its first committed token and in a round after it.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from oracle import random_eagle3
from targets import new_target, padded_prompts

import hf_specdec

PACKAGE = str(Path(hf_specdec.__file__).parent)


class Calls(NamedTuple):
    """Calls of the package's functions, by file and function.

    Attributes:
        first: calls before the first token is committed.
        changes: how many of these went to another file.
        round: calls in a round of all rows after it, on average.
    """

    first: Counter[tuple[str, str]]
    changes: int
    round: float


def count_calls(lengths: list[int], max_new_tokens: int = 12) -> Calls:
    """Count in the third call with EAGLE-3 over prompts of `lengths`; the first two warm up.

    The target is new: calls with `output_hidden_states` leave hooks of transformers on those that tests share.
    """
    target, prompts = new_target("llama"), padded_prompts(lengths)
    drafter = random_eagle3(target)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens, "assistant_model": drafter}
    for _ in range(2):
        target.generate(**prompts, **options)
    first: Counter[tuple[str, str]] = Counter()
    changes, later, last, is_first = 0, 0, None, True

    def profile(frame, event, argument):
        nonlocal changes, later, last, is_first
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(PACKAGE):
            return
        if is_first:
            first[file.removeprefix(f"{PACKAGE}/"), frame.f_code.co_name] += 1
            changes += file != last
            last, is_first = file, frame.f_code.co_name != "commit_first_token"
        else:
            later += 1

    sys.setprofile(profile)
    try:
        target.generate(**prompts, **options)
    finally:
        sys.setprofile(None)
    return Calls(first, changes, later / drafter.stats.num_rounds)


if __name__ == "__main__":
    found = count_calls([9, 4])
    files: Counter[str] = Counter()
    for (file, _), number in found.first.items():
        files[file] += number
    for file, number in files.most_common(30):
        names = ", ".join(f"{name} {one}" for (where, name), one in found.first.most_common() if where == file)
        print(f"{number:6} {file}: {names[:150]}")
    print(
        f"{found.first.total()} calls in {len(files)} files with {found.changes} changes of file before the first token"
    )
    print(f"{found.round:.0f} calls a round")
