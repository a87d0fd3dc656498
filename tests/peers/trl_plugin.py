"""pytest plugin of `trl_tests.py`: data sets of a folder, and a drafter attached to the model of every trainer."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import datasets
import pytest
from peer_plugin import NOTES, drafter_of, replace

_attachments: list[Any] = []


def pytest_configure(config: pytest.Config) -> None:
    datasets.load_dataset = load_dataset
    importlib.import_module("trl.import_utils").__getattr__ = requirement
    if config.option.specdec == "drafters":
        attach_drafters()


def requirement(name: str) -> Any:
    """In place of a check for a package that tests of another version of TRL ask for: it is not there."""
    if name.startswith("is_") and name.endswith("_available"):
        return lambda: False
    raise AttributeError(name)


def load_dataset(name: str, config: str, split: str | None = None, streaming: bool = False) -> Any:
    """`datasets.load_dataset` of what `trl_tests.make_hub` has written."""
    folder = Path(os.environ["PEER_DATA"]) / name.removeprefix("trl-internal-testing/") / config
    found = datasets.load_from_disk(folder)
    most = int(os.environ["PEER_ROWS"])
    found = datasets.DatasetDict({key: one.select(range(min(most, len(one)))) for key, one in found.items()})
    if streaming:
        found = datasets.IterableDatasetDict({key: one.to_iterable_dataset() for key, one in found.items()})
    return found if split is None else found[split]


def attach_drafters() -> None:
    """Let each trainer have a drafter: attached from its making on, and by the callback for the time of training."""
    from trl import GRPOTrainer, RLOOTrainer

    from hf_specdec.drafters.attachment import innermost
    from hf_specdec.trl import DrafterCallback

    def init(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        try:
            drafter = drafter_of(innermost(self.model), None)
        except ValueError as refused:
            NOTES.append(f"no drafter: {refused}")
            return
        _attachments.append(drafter.attach(self.model))
        self.add_callback(callback := DrafterCallback(drafter))
        _attachments.append(callback)

    for kind in (GRPOTrainer, RLOOTrainer):
        replace(kind, "__init__", init)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> None:
    if call.when != "call":
        return
    for one in _attachments:
        attachment = getattr(one, "attachment", one)
        if attachment is not None:
            if attachment.stats.calls:
                NOTES.append(f"drafted: {attachment.stats.calls} calls")
            NOTES.extend(f"plainly: {reason}" for reason in attachment.refusals)
    _attachments.clear()
