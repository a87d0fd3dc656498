"""pytest plugin of tests of other projects: alone, with the package imported, or with drafters.

Every test begins with the random numbers that its name gives, in every way of running. A test that asks for a file of
the Hub counts as skipped. A plugin beside it chooses tests, and says what a drafter is used for.
"""

from __future__ import annotations

import copy
import functools
import json
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDS_HUB = "needs the Hub"
HTTP_CLIENTS = {"httpx", "httpx2", "requests", "urllib3", "urllib"}

_ORDER = ("skipped", "passed", "failed")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hf_specdec")
    group.addoption("--with", dest="specdec", choices=("nothing", "import", "drafters"), default="nothing")
    group.addoption("--outcomes", type=Path, help="file to write outcomes to")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.specdec != "nothing":
        # The folder `kernels` beside the package must not be found by those who look for the package of that name.
        sys.path.insert(0, str(ROOT))
        import hf_specdec  # noqa: F401

        sys.path.remove(str(ROOT))
    if not hasattr(config, "workerinput") and config.option.outcomes is not None:
        config.pluginmanager.register(Outcomes(config.option.outcomes))


class Outcomes:
    """Outcome, reason and notes of every test, written when all have run."""

    def __init__(self, path: Path):
        self.path = path
        self.found: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            return
        found = self.found.setdefault(report.nodeid, {"outcome": "", "reason": "", "notes": []})
        if _ORDER.index(report.outcome) >= (_ORDER.index(found["outcome"]) if found["outcome"] else 0):
            found |= {"outcome": report.outcome, "reason": _reason(report)}
        found["notes"] += [value for name, value in report.user_properties if value not in found["notes"]]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.found[report.nodeid] = {"outcome": "failed", "reason": _reason(report), "notes": ["not collected"]}

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps(self.found))


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The message of an exception, or why a test was skipped, in one line."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    lines = [line[2:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
    return (lines or report.longreprtext.splitlines()[-1:] or [""])[0] if report.failed else ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    import numpy
    import torch

    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    for module in list(sys.modules.values()):  # generators of their own, from which testers draw inputs
        generator = vars(module).get("global_rng") if module is not None else None
        if isinstance(generator, random.Random):
            generator.seed(seed)
    NOTES.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    if report.failed and call.excinfo is not None and asked_hub(call.excinfo.value):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: {NEEDS_HUB}")
    if call.when == "call":
        report.user_properties += [("hf_specdec", note) for note in NOTES]
    return report


def asked_hub(error: BaseException | None) -> bool:
    """Whether an error came of a file that is not on this machine."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    while error is not None:
        of_client = type(error).__module__.partition(".")[0] in HTTP_CLIENTS
        if of_client or isinstance(error, (OfflineModeIsEnabled, LocalEntryNotFoundError, ConnectionError)):
            return True
        error = error.__cause__ or error.__context__
    return False


# Of the test that runs: what drafters its calls had, and what became of them.
NOTES: list[str] = []


def drafter_of(target: Any, assistant: Any) -> Any:
    """A drafter bound to `target`: a copy of `assistant`, or a small Llama where that cannot be one, or is None."""
    from transformers import LlamaConfig

    from hf_specdec.config import DraftModelConfig
    from hf_specdec.drafters import DraftModelDrafter

    drafter = None
    if assistant is not None:
        settings, number = assistant.config.to_dict(), assistant.generation_config.num_assistant_tokens
        config = DraftModelConfig(model=settings, **({} if number is None else {"num_assistant_tokens": number}))
        try:
            drafter = DraftModelDrafter(config, copy.deepcopy(assistant))
        except ValueError as refused:
            NOTES.append(f"a Llama in place of the assistant: {refused}")
    if drafter is None:
        text = target.config.get_text_config(decoder=True)
        llama = LlamaConfig(
            vocab_size=text.vocab_size,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
        drafter = DraftModelDrafter(DraftModelConfig(model=llama.to_dict(), num_assistant_tokens=2))
    drafter.eval().to(target.device)
    drafter.bind(target)
    return drafter


def replace(owner: type, name: str, function: Callable) -> None:
    """Let `function` take the place of a method, which it gets as its first argument."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def ours(self, *args, **kwargs):
        return function(original, self, *args, **kwargs)

    setattr(owner, name, ours)
