"""Options and settings of all tests."""

import gc
import os
import sys

import pytest
from core_parameters import mark_core

# Files that take longest: a worker that begins one of them last keeps the others waiting.
LONGEST = {
    "test_attention_kernel.py",
    "test_bench.py",
    "test_concurrent_use.py",
    "test_continuous.py",
    "test_cuda_graph_replay.py",
    "test_distribution.py",
    "test_draft_tokens.py",
    "test_generate_batch.py",
    "test_generate_options.py",
    "test_lossless.py",
    "test_mtp.py",
    "test_recurrence_kernel.py",
    "test_recurrent_targets.py",
    "test_restored_after_call.py",
    "test_sessions.py",
    "test_short_conv_kernel.py",
    "test_smollm2.py",
    "test_tensor_parallel.py",
    "test_varying_drafts.py",
    "test_verify_kernel.py",
    "test_zoo.py",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run all tests and cases, also those that take long")
    parser.addoption("--fuzz-seconds", type=float, default=20.0, help="seconds of the tests in tests/fuzz")
    parser.addoption("--fuzz-seed", type=int, default=None, help="what they draw from; random by default")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.slow:
        os.environ["HF_SPECDEC_ALL_CASES"] = "1"
    # A process that has tests run by others need not import torch, and they begin the sooner.
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if is_worker or config.getoption("dist", "no") == "no":
        prepare_torch(is_worker)


def prepare_torch(is_worker: bool) -> None:
    """What must be set before tests are imported."""
    # Several workers with a thread for every core each would only get in each other's way; so would what they start.
    if is_worker:
        os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    if is_worker:
        torch.set_num_threads(1)
    # Without a GPU Triton kernels run in its interpreter; Triton reads this when it is imported.
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_core(items, is_complete=not any("::" in argument for argument in config.args))
    left_out = set()
    # All classes of transformers take many minutes: they run when they are asked for by their mark.
    if "zoo" not in config.option.markexpr:
        left_out.add("zoo")
    if not config.option.slow:
        left_out.add("slow")
    deselected = [item for item in items if left_out & {mark.name for mark in item.iter_markers()}]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if not left_out & {mark.name for mark in item.iter_markers()}]
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """Modules live as long as the process: garbage collection need not go through them again and again, nor need
    Triton's interpreter."""
    gc.collect()
    gc.freeze()
    if "triton.runtime.interpreter" in sys.modules:
        import interpreter

        interpreter.remember_builtins()
        interpreter.skip_overflow_checks()
        interpreter.remember_dtypes()
