"""pytest plugin of `transformers_tests.py`: transformers' own tests alone, with the package imported, or with drafters.

Every test begins with the random numbers that its name gives, in every way of running. A test that asks for a file of
the Hub counts as skipped. With drafters, a call of transformers that has an assistant gets a drafter of ours instead.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import random
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDS_HUB = "needs the Hub"
HTTP_CLIENTS = {"httpx", "httpx2", "requests", "urllib3", "urllib"}

# Tests whose calls have an assistant, by name or file.
ASSISTED_NAMES = re.compile(r"assist|speculat|mtp|dflash")
ASSISTED_FILES = ("test_candidate_generator", "test_continuous_batching", "test_mtp")
# Tests of a model's folder that call `generate()`, beside those of `GenerationTesterMixin`.
GENERATION_NAMES = re.compile(rf"generat|beam|prompt_lookup|{ASSISTED_NAMES.pattern}")
# Minutes each, of a compiler of models that sees nothing of the package.
COMPILED = {"torch_compile_test", "torch_export_test", "onnx_export_test", "executorch_export_test"}
COMPILED_NAMES = re.compile("compil|export")

_ORDER = ("skipped", "passed", "failed")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hf_specdec")
    group.addoption("--with", dest="specdec", choices=("nothing", "import", "drafters"), default="nothing")
    group.addoption("--outcomes", type=Path, help="file to write outcomes to")
    group.addoption("--assisted", action="store_true", help="tests of assisted decoding only")
    group.addoption("--ordinary", action="store_true", help="no attention weights, and attention masks of tokens only")
    group.addoption("--compile", action="store_true", help="also tests that compile or export models")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.specdec != "nothing":
        # The folder `kernels` beside the package must not be found by those who look for the package of that name.
        sys.path.insert(0, str(ROOT))
        import hf_specdec  # noqa: F401

        sys.path.remove(str(ROOT))
    if config.option.specdec == "drafters":
        replace_assistants()
    if config.option.ordinary:
        replace_masks()
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


def is_assisted(item: pytest.Item) -> bool:
    """Whether calls of a test have an assistant."""
    return ASSISTED_NAMES.search(item.name) is not None or item.path.stem in ASSISTED_FILES


def is_generation(item: pytest.Item) -> bool:
    """Whether a test is one of generation: by its folder, its mixin, its mark or its name."""
    if item.path.parent.name == "generation" or GENERATION_NAMES.search(item.name):
        return True
    bases = inspect.getmro(item.cls) if getattr(item, "cls", None) else ()
    of_mixin = any(item.name in vars(base) for base in bases if base.__name__ == "GenerationTesterMixin")
    return of_mixin or item.get_closest_marker("generate") is not None


def is_compiled(item: pytest.Item) -> bool:
    """Whether a test compiles or exports a model."""
    marks = {mark.name for mark in item.iter_markers()}
    return bool(COMPILED & marks) or COMPILED_NAMES.search(item.name) is not None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = is_assisted if config.option.assisted else is_generation
    kept = [one for one in items if wanted(one) and (config.option.compile or not is_compiled(one))]
    config.hook.pytest_deselected(items=list(set(items) - set(kept)))
    items[:] = kept
    if config.option.ordinary:
        for kind in {one.cls for one in items if hasattr(getattr(one, "cls", None), "has_attentions")}:
            kind.has_attentions = False


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
    _NOTES.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    if report.failed and call.excinfo is not None and asked_hub(call.excinfo.value):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: {NEEDS_HUB}")
    if call.when == "call":
        report.user_properties += [("hf_specdec", note) for note in _NOTES]
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


# Of the test that runs: which drafters its calls had, and on which engine.
_NOTES: list[str] = []


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
            _NOTES.append(f"a Llama in place of the assistant: {refused}")
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


def mtp_drafter_of(target: Any) -> Any:
    """A drafter of the MTP modules in the folder that `target` was loaded from."""
    from hf_specdec import AutoDrafter

    return AutoDrafter.from_pretrained(target.name_or_path, target=target)


def replace(owner: type, name: str, function: Callable) -> None:
    """Let `function` take the place of a method, which it gets as its first argument."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def ours(self, *args, **kwargs):
        return function(original, self, *args, **kwargs)

    setattr(owner, name, ours)


def replace_masks() -> None:
    """Let `generate()` read masks with holes as if all were tokens: testers draw them without a meaning."""
    from transformers import GenerationMixin

    def generate(original, self, *args, attention_mask=None, **kwargs):
        if attention_mask is None:
            return original(self, *args, **kwargs)
        if attention_mask.dim() == 2 and bool((attention_mask.diff(dim=1) < 0).any()):
            attention_mask = attention_mask.new_ones(attention_mask.shape)
        return original(self, *args, attention_mask=attention_mask, **kwargs)

    replace(GenerationMixin, "generate", generate)


def replace_assistants() -> None:
    """Let calls with an assistant, and those of continuous batching, run with a drafter."""
    from transformers import GenerationMixin, PreTrainedModel
    from transformers.generation.continuous_batching.continuous_api import ContinuousMixin

    from hf_specdec import Drafter

    def generate(original, self, *args, assistant_model=None, **kwargs):
        if isinstance(assistant_model, Drafter):
            return original(self, *args, assistant_model=assistant_model, **kwargs)
        if kwargs.get("use_mtp"):
            kwargs["use_mtp"], assistant_model = None, mtp_drafter_of(self)
        elif isinstance(assistant_model, PreTrainedModel):
            assistant_model = drafter_of(self, assistant_model)
        if assistant_model is None:
            return original(self, *args, **kwargs)
        output = original(self, *args, assistant_model=assistant_model, **kwargs)
        stats = getattr(assistant_model, "stats", None)
        if stats is not None:
            _NOTES.append(f"{stats.engine}: {stats.reason}")
        return output

    def continuous(original, self, *args, assistant_model=None, **kwargs):
        drafter = drafter_of(self, None) if assistant_model is None else assistant_model
        _NOTES.append("continuous")
        return original(self, *args, assistant_model=drafter, **kwargs)

    replace(GenerationMixin, "generate", generate)
    for name in ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager"):
        replace(ContinuousMixin, name, continuous)
