"""The context `compile_only`: kernels are compiled in parallel and not launched, on a machine without a GPU, too."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_specdec import ops
from hf_specdec.kernels.types import NormKind

HELPER = Path(__file__).parent.parent / "helpers" / "compile_ahead.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict:
    cache = str(tmp_path_factory.mktemp("triton"))
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
    run = subprocess.run([sys.executable, HELPER], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def test_each_variant_is_compiled_once_and_in_other_threads(found: dict) -> None:
    # The norm with and without a weight, and three others.
    names, in_other_threads = zip(*found["compiled"], strict=True)
    norm = "_rms_norm_kernel"
    assert names == ("_commit_kernel", norm, norm, "_slots_kernel", "_write_kv_kernel")
    assert all(in_other_threads)
    assert found["again"] == 0


def test_launchers_are_read_in_one_thread(found: dict) -> None:
    """Python may give a thread the launcher that another thread has loaded; see `_Loading`."""
    assert found["launchers"] == ["MainThread"]


def test_a_kernel_that_failed_is_compiled_again(found: dict) -> None:
    assert found["after_errors"] == [1, 1, 0]


def test_integers_are_those_of_the_reference_and_floats_are_zeros(found: dict) -> None:
    assert found["slots"] == [[4, 5], [99, 99]]
    assert found["norm"] == [[0.0] * 64] * 2


def test_writes_of_floats_are_left_out(found: dict) -> None:
    assert found["written"] == [0.0]
    assert found["committed"] == [2, 0]


def test_the_context_ends(found: dict) -> None:
    assert not found["is_compile_only"]


def test_references_run_as_they_are() -> None:
    inputs = torch.randn(2, 8)
    expected = ops.rms_norm(inputs, None, 1e-6, NormKind())
    with ops.compile_only(inputs.device):
        assert not ops.is_compile_only()
        assert torch.equal(ops.rms_norm(inputs, None, 1e-6, NormKind()), expected)
