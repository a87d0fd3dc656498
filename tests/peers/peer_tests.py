"""Runs tests of another project in processes of their own, and compares outcomes; see `peer_plugin.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass
class Outcome:
    """What became of a test: `"passed"`, `"failed"` or `"skipped"`, why, and what the plugin noted."""

    outcome: str
    reason: str = ""
    notes: list[str] = field(default_factory=list)


# By the identifier of a test.
Outcomes = dict[str, Outcome]
MISSING = Outcome("not run", "the other run has it only")


@dataclass
class Runner:
    """Runs tests of a checkout in processes of their own.

    Attributes:
        source: the checkout.
        plugin: module of this folder that pytest has as a plugin, beside `peer_plugin`.
        paths: files and folders with tests, relative to the checkout.
        processes: that run tests at the same time.
        kept: folder for the outcomes of each run, in which a run is not repeated; None for none.
        settings: environment variables beside those of all runs.
        share: what a process takes from the tests, as of `--dist` of pytest-xdist.
    """

    source: Path
    plugin: str
    paths: list[str]
    processes: int = 1
    kept: Path | None = None
    settings: dict[str, str] = field(default_factory=dict)
    share: str = "loadfile"

    def __post_init__(self) -> None:
        if self.kept is not None:
            self.kept.mkdir(parents=True, exist_ok=True)
            self.kept = self.kept.resolve()

    def run(self, *options: str) -> Outcomes:
        """The outcomes of the tests with `options` of the plugins.

        Raises:
            RuntimeError: pytest could not run.
        """
        settings = {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONDONTWRITEBYTECODE": "",
            # The package that is installed is tested, not the one of the checkout.
            "PYTHONSAFEPATH": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH")))),
            **self.settings,
        }
        arguments = [*options, *self.paths]
        with tempfile.TemporaryDirectory() as folder:
            name = f"{zlib.crc32(' '.join(arguments).encode()):08x}.json"
            outcomes = (Path(folder) if self.kept is None else self.kept) / name
            command = [
                *(sys.executable, "-m", "pytest", "-p", "peer_plugin", "-p", self.plugin, "-p", "no:cacheprovider"),
                *("-q", "--tb=short", "-W", "ignore", "--continue-on-collection-errors", "--import-mode=append"),
                *("-o", "log_cli=0", "--timeout=600", f"--outcomes={outcomes}"),
                *(() if self.processes < 2 else (f"-n{self.processes}", f"--dist={self.share}")),
                *arguments,
            ]
            if not outcomes.exists():
                env = {**os.environ, **settings}
                run = subprocess.run(command, cwd=self.source, env=env, capture_output=True, text=True)
            if not outcomes.exists():
                raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}:\n{run.stdout}\n{run.stderr}")
            found = json.loads(outcomes.read_text())
        return {name: Outcome(**one) for name, one in found.items()}


def cell(value: object) -> str:
    """What stands for `value` in a table."""
    return str(value).replace("|", "/")


def table(head: list[str], rows: list[list[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def by_group(
    tests: dict[str, tuple[Outcome, ...]], group_of: Callable[[str], str]
) -> Iterator[tuple[str, dict[str, tuple[Outcome, ...]]]]:
    """The tests of each group, and all of them."""
    for group in dict.fromkeys(map(group_of, tests)):
        yield group, {name: pair for name, pair in tests.items() if group_of(name) == group}
    yield "all", tests


def together(*runs: Outcomes) -> dict[str, tuple[Outcome, ...]]:
    """Outcomes of all runs by test; of a test that a run has not, its one is `MISSING`."""
    return {name: tuple(run.get(name, MISSING) for run in runs) for name in sorted(set().union(*runs))}


def class_of(test: str) -> str:
    """The class that a test belongs to, or the test itself where it is a function."""
    return test.split("::")[1]


def compared(alone: Outcomes, changed: Outcomes, group_of: Callable[[str], str], how: str) -> tuple[str, list[str]]:
    """A table of the outcomes of `changed`, a run in the way `how`, and a line for every test that differs in it."""
    rows, both = [], together(alone, changed)
    for group, tests in by_group(both, group_of):
        counts = Counter(after.outcome for _, after in tests.values())
        hub = sum(after.reason == "needs the Hub" for _, after in tests.values())
        differing = sum(before.outcome != after.outcome for before, after in tests.values())
        rows.append([group, len(tests), counts["passed"], counts["failed"], counts["skipped"], hub, differing])
    differences = [
        f"{name}: {before.outcome} without ({before.reason}), {after.outcome} with {how} ({after.reason})"
        for name, (before, after) in both.items()
        if before.outcome != after.outcome
    ]
    head = ["tests of", "tests", "passed", "failed", "skipped", "of these, for the Hub", f"differ without {how}"]
    return table(head, rows), differences


def report(text: str, heading: str, faults: list[str], page: Path | None) -> int:
    """Print a section and `faults`, write the section into `page` if there is one, and give the exit status."""
    print(text)
    if page is not None:
        before = page.read_text() if page.exists() else ""
        page.write_text(f"{before.partition(heading)[0].rstrip()}\n\n{text}")
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"{len(faults)} outcomes to explain")
    return 1 if faults else 0
