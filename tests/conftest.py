"""Options and settings of all tests."""

import gc
import itertools
import os
import sys
from collections import Counter

import pytest
from core_parameters import mark_core


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run all tests and cases, also those that take long")
    parser.addoption("--fuzz-seconds", type=float, default=12.0, help="seconds of the tests in tests/fuzz")
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
    import small_models
    import torch

    if is_worker:
        torch.set_num_threads(1)
    small_models.prepare()
    os.environ["HF_SPECDEC_CACHE"] = "off"  # what a test has measured is nothing for others
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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the ten slowest files."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if len(seconds) < 2:
        return
    terminalreporter.section("slowest files")
    for name, duration in seconds.most_common(10):
        terminalreporter.write_line(f"{duration:7.1f} s  {name}")


@pytest.hookimpl(tryfirst=True)  # before fixtures
def pytest_runtest_setup() -> None:
    """Weights that a test draws without a seed of its own do not depend on the tests before it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_times_of_other_tests() -> None:
    """Calls with `num_assistant_tokens="auto"` begin with nothing known."""
    costs = sys.modules.get("hf_specdec.auto_k.round_costs")
    if costs is not None:
        costs.table_of.cache_clear()


@pytest.fixture
def shapes_decide() -> None:
    """Calls with `num_assistant_tokens="auto"` begin with the K that suits their shapes."""


@pytest.fixture(autouse=True)
def auto_is_the_same_on_every_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere they begin with the drafter's own K, as the shapes of tiny targets say that drafts hardly pay; and each
    round of a CPU takes a millisecond."""
    if "torch" not in sys.modules:
        return
    from hf_specdec.auto_k.auto_drafts import ExpectedCosts, RoundShape
    from hf_specdec.graphs.cuda_graphs import RoundClock

    if "shapes_decide" not in request.fixturenames:
        monkeypatch.setattr(ExpectedCosts, "first", lambda _, asked: RoundShape(asked))
    mark, marks = RoundClock.mark, itertools.count()
    monkeypatch.setattr(
        RoundClock, "mark", lambda clock: mark(clock) if clock._device.type == "cuda" else next(marks) / 1000
    )


def pytest_collection_finish() -> None:
    """Modules live as long as the process: garbage collection need not go through them again and again, nor need
    Triton's interpreter."""
    gc.collect()
    gc.freeze()
    # Tests import it on a GPU, too, where kernels are compiled.
    if "triton.runtime.interpreter" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        import interpreter

        interpreter.replace_builtins_once()
        interpreter.share_shapes()
        interpreter.skip_overflow_checks()
        interpreter.remember_dtypes()
        interpreter.round_to_float8()
