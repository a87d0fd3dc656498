"""Configurations and inputs of transformers' own tests, from a checkout of its repository of the installed version.

They are not in the package: `use(<checkout>)` makes `tests` of the checkout importable. Stand-ins replace packages that
their files import and that are not installed (`parameterized`, `datasets`, ...), since only configurations are made.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import types
import unittest
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedConfig

# Inputs of their testers that do not belong to a prompt.
_NOT_OF_PROMPTS = ("labels", "decoder_input_ids", "decoder_attention_mask", "head_mask", "next_sentence_label")


class Sourced(NamedTuple):
    """The configuration and inputs of transformers' tests for a class.

    Attributes:
        config: tiny.
        inputs: of a batch of prompts.
    """

    config: PreTrainedConfig
    inputs: dict[str, Any]


class _Anything:
    """Any member of a module that is not installed. Called with a function alone, as a decorator, it returns the
    function; otherwise itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


_used: list[Path] = []


def is_used() -> bool:
    """Whether there is a checkout."""
    return bool(_used)


def use(checkout: Path) -> None:
    """Make the tests of a checkout importable."""
    if not (checkout / "tests" / "models").is_dir():
        raise ValueError(f"{checkout} has no folder tests/models; expected a checkout of transformers' repository.")
    sys.path.insert(0, str(checkout.resolve()))
    _used.append(checkout)


def _stand_in(name: str) -> None:
    """A module called `name`, and the packages that contain it."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if path not in sys.modules:
            module = types.ModuleType(path)
            module.__spec__, module.__path__ = ModuleSpec(path, None), []
            module.__getattr__ = _Anything().__getattr__
            sys.modules[path] = module


def _import(name: str) -> types.ModuleType:
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] in ("tests", "transformers"):
                raise
            _stand_in(error.name)
        except ImportError as error:  # a checkout of a neighbouring version may lack or have other helpers
            missing = re.match(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
            if missing is None:
                raise
            setattr(sys.modules[missing[2]], missing[1], _Anything())


@functools.cache
def find(class_name: str) -> Sourced:
    """The configuration and inputs with which transformers tests a class.

    Raises:
        Exception: whatever their code raises; `LookupError` if there is no test of the class.
    """
    model_class = getattr(transformers, class_name)
    folder = model_class.__module__.split(".")[-2]
    module = _import(f"tests.models.{folder}.test_modeling_{folder}")
    tests = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, unittest.TestCase)]
    for test in tests:
        if not hasattr(test, "all_model_classes"):
            continue
        case = test()
        case.setUp()  # some of which find out the classes
        if model_class in (case.all_model_classes or ()):
            torch.manual_seed(0)
            config, inputs = case.model_tester.prepare_config_and_inputs_for_common()
            found = case._prepare_for_class(inputs, model_class)
            kept = {name: value for name, value in found.items() if name not in _NOT_OF_PROMPTS and value is not None}
            return Sourced(config, kept)
    raise LookupError(f"tests/models/{folder} has no test of {class_name}")
