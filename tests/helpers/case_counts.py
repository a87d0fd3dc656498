"""How many cases a test tries: all of them on a GPU or with `--slow`, fewer where Triton's interpreter runs kernels."""

import os
from collections.abc import Sequence
from typing import Any

import torch

ALL_CASES = "HF_SPECDEC_ALL_CASES"
tries_all = torch.cuda.is_available() or os.environ.get(ALL_CASES) == "1"


def num_cases(all_cases: int, few: int) -> int:
    return all_cases if tries_all else few


def cases(all_cases: Sequence[Any], few: Sequence[Any]) -> Sequence[Any]:
    assert set(few) <= set(all_cases)
    return all_cases if tries_all else few
