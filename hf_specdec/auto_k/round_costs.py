"""Times of rounds, kept on disk: by drafts, for a target with its drafter on a device.

`num_assistant_tokens="auto"` begins with what earlier calls have measured, in this process or others. Each target,
drafter, device and set of versions has a file, in the folder `hf_specdec` of Triton's cache or in the folder named by
the environment variable `HF_SPECDEC_CACHE` (`off` for no files). A file that cannot be read is ignored.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
import platform
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..drafters.base import Drafter
from ..host.parts import installed_version
from ..modules.signature import settings_of
from ..parallel.tensor_parallel import tensor_parallel_group
from ..state import RoundShape, Shape
from .auto_drafts import RoundTimes

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "HF_SPECDEC_CACHE"

# A process looks at its file after the first call for buffers and then after this many milliseconds of rounds, since
# reading it would be a percent of a short call. It writes if a time differs by at least this share from the file's.
_BETWEEN_LOOKS, _NEWS = 1e3, 0.05


def table_folder() -> Path | None:
    """The folder of the files; None for no files."""
    asked = os.environ.get(FOLDER_VARIABLE)
    if asked is not None:
        return None if asked in ("", "0", "off") else Path(asked)
    try:
        root = os.environ.get("TRITON_CACHE_DIR") or Path(os.environ.get("TRITON_HOME") or Path.home(), ".triton/cache")
    except RuntimeError:  # there is no home
        return None
    return Path(root, "hf_specdec")


class CostTable:
    """Times of rounds for one `identity` of target, drafter, device and versions, by the properties of rounds.

    They are stored in a file in `folder`; None for no file.
    """

    def __init__(self, identity: str, folder: Path | None):
        self._identity = identity
        name = hashlib.sha256(identity.encode()).hexdigest()[:32]
        self._file = None if folder is None else folder / f"{name}.json"
        self._times: dict[str, RoundTimes] = {}
        # Milliseconds of all rounds when `save` has last read the file.
        self._looked: dict[str, float] = {}
        self._lock = threading.Lock()

    def times(self, shape: Shape) -> RoundTimes:
        """Times of rounds on buffers of `shape`; calls of this process share them."""
        kind = f"drafts drawn, by {shape.verification}" if shape.draft_probs else "most likely drafts"
        name = f"{shape.batch} rows, {'sampled' if shape.is_sampling else 'greedy'}, {kind}"
        with self._lock:
            if name not in self._times:
                known, total = self._read().get(name, ({}, 0.0))
                self._times[name] = RoundTimes(known, total)
            return self._times[name]

    @property
    def known(self) -> dict[str, dict[str, Any]]:
        """The times by their names, as far as they were measured."""
        return {name: one.known for name, one in self._times.items()}

    def save(self) -> None:
        """Add what was measured to the file, now and then. If several processes do so at once, the times of one of them
        remain."""
        with self._lock:
            last = {name: self._looked.get(name, -math.inf) for name in self._times}
            if self._file is None or all(one.total < last[name] + _BETWEEN_LOOKS for name, one in self._times.items()):
                return
            self._looked = {name: one.total for name, one in self._times.items()}
            entries = self._read()
            is_new = False
            for name, times in self._times.items():
                known, total = entries.get(name, ({}, 0.0))
                measured, spent = times.measured()
                is_new |= any(abs(one - known.get(drafted, 0.0)) > _NEWS * one for drafted, one in measured.items())
                is_new |= spent > max(total, 1e3)
                entries[name] = {**known, **measured}, total + spent
            if is_new:
                self._write(entries)
                for times in self._times.values():
                    times.unsaved = 0.0

    def _read(self) -> dict[str, tuple[dict[RoundShape, float], float]]:
        """Milliseconds of a round by its drafts, and of all rounds together, by name."""
        if self._file is None:
            return {}
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
            if found["identity"] != self._identity:
                return {}
            entries = {
                name: (
                    {RoundShape.parse(drafted): float(one) for drafted, one in entry["milliseconds"].items()},
                    float(entry["total"]),
                )
                for name, entry in found["rounds"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        numbers = [one for known, total in entries.values() for one in (*known.values(), total + 1.0)]
        return entries if all(math.isfinite(one) and one > 0 for one in numbers) else {}

    def _write(self, entries: dict[str, tuple[dict[RoundShape, float], float]]) -> None:
        rounds = {
            name: {"milliseconds": {str(drafted): one for drafted, one in sorted(known.items())}, "total": total}
            for name, (known, total) in entries.items()
        }
        folder = self._file.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as own:
                written = Path(own, self._file.name)
                written.write_text(json.dumps({"identity": self._identity, "rounds": rounds}, indent=1), "utf-8")
                os.replace(written, self._file)
        except OSError as error:
            what = f"Times of rounds cannot be kept in {folder} ({error}); set {FOLDER_VARIABLE} to a folder."
            logger.warning_once(what)
            self._file = None


# One table for each identity in a process, so that its calls share times.
table_of = functools.cache(CostTable)


def find_table(model: PreTrainedModel, drafter: Drafter, is_captured: bool) -> CostTable:
    """The table of `model` with `drafter` as they are now. For split targets it is a new one, not on disk, since their
    ranks must agree."""
    group, device = tensor_parallel_group(model), model.device
    packages = "torch", "triton", "transformers", __name__.partition(".")[0]
    identity = {
        "target": _description(model),
        "drafter": _description(drafter),
        "rounds": [
            "captured" if is_captured else "eager",
            f"compiled: {drafter.compiles_rounds}",
            f"batch-invariant: {drafter.batch_invariant}",
            f"window: {drafter.draft_window_size}",
            f"keys: {drafter.kv_cache_dtype}",
        ],
        "device": _device(device),
        "versions": {name: installed_version(name) or "none" for name in packages},
    }
    name = json.dumps(identity, sort_keys=True)
    return table_of(name, table_folder()) if group is None else CostTable(name, None)


def _description(module: PreTrainedModel) -> list[str]:
    """What the time of a pass of `module` depends on: its configuration, and shapes and dtypes of its weights."""
    weights = [f"{name} {tuple(one.shape)} {one.dtype}" for name, one in module.named_parameters()]
    digest = hashlib.sha256(repr((settings_of(module.config), weights)).encode()).hexdigest()
    return [type(module).__name__, f"{sum(one.numel() for one in module.parameters())} parameters", digest]


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads"
