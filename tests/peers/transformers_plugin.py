"""pytest plugin of `transformers_tests.py`: which of transformers' own tests run, and how with drafters.

With drafters, a call of transformers that has an assistant gets a drafter of ours instead.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from peer_plugin import NOTES, drafter_of, replace

# Tests whose calls have an assistant, by name or file.
ASSISTED_NAMES = re.compile(r"assist|speculat|mtp|dflash")
ASSISTED_FILES = ("test_candidate_generator", "test_continuous_batching", "test_mtp")
# Tests of a model's folder that call `generate()`, beside those of `GenerationTesterMixin`.
GENERATION_NAMES = re.compile(rf"generat|beam|prompt_lookup|{ASSISTED_NAMES.pattern}")
# Minutes each, of a compiler of models that sees nothing of the package.
COMPILED = {"torch_compile_test", "torch_export_test", "onnx_export_test", "executorch_export_test"}
COMPILED_NAMES = re.compile("compil|export")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hf_specdec")
    group.addoption("--assisted", action="store_true", help="tests of assisted decoding only")
    group.addoption("--ordinary", action="store_true", help="no attention weights, and attention masks of tokens only")
    group.addoption("--compile", action="store_true", help="also tests that compile or export models")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.specdec == "drafters":
        replace_assistants()
    if config.option.ordinary:
        replace_masks()


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


def mtp_drafter_of(target: Any) -> Any:
    """A drafter of the MTP modules in the folder that `target` was loaded from."""
    from hf_specdec import AutoDrafter

    return AutoDrafter.from_pretrained(target.name_or_path, target=target)


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
            NOTES.append(f"{stats.engine}: {stats.reason}")
        return output

    def continuous(original, self, *args, assistant_model=None, **kwargs):
        drafter = drafter_of(self, None) if assistant_model is None else assistant_model
        NOTES.append("continuous")
        return original(self, *args, assistant_model=drafter, **kwargs)

    replace(GenerationMixin, "generate", generate)
    for name in ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager"):
        replace(ContinuousMixin, name, continuous)
