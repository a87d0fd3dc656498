"""Runs transformers' own tests of generation with the package, and compares them with those without it.

    python tests/peers/transformers_tests.py --source CHECKOUT                        both tables
    python tests/peers/transformers_tests.py --source CHECKOUT --only a --models llama mamba
    python tests/peers/transformers_tests.py --source CHECKOUT --write docs/transformers.md

CHECKOUT is one of transformers, of about the version that is installed, of which only the tests are run. They need its
own test packages (`parameterized`, `datasets`). Nothing is downloaded: a test that asks for a file of the Hub counts as
skipped. Tests that compile or export models are left out without `--compile`.

(a) Tests of generation, with `hf_specdec` imported and without: no outcome may differ.
(b) Tests of assisted decoding, with a drafter in place of the assistant: as they are, and as ordinary calls, without
attention weights, which the static engine does not compute, and with masks that hide no token. Each that passes
without must pass, or be listed in docs/transformers.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "transformers.md"
HEADING = "## transformers' own tests"
GENERATION = "generation"
# Attention of every kind, mixtures of experts, recurrent layers and hybrids, encoder-decoders, models of sound, and
# those that prepare configurations of generation themselves.
MODELS = (
    *("llama", "mistral", "qwen3", "gemma2", "gemma3", "phi3", "cohere2", "olmo2"),
    *("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"),
    *("mamba", "mamba2", "jamba", "bamba", "qwen3_next"),
    *("musicgen", "kyutai_speech_to_text", "moshi", "whisper"),
)


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
        models: folders of `tests/models` to run.
        processes: that run tests at the same time.
        compiles: whether tests are run that compile or export models.
        kept: folder for the outcomes of each run, in which a run is not repeated; None for none.
    """

    source: Path
    models: list[str]
    processes: int
    compiles: bool
    kept: Path | None = None

    def paths(self) -> Iterator[str]:
        """Files and folders to run, relative to the checkout."""
        if GENERATION in self.models:
            yield "tests/generation"
        for name in self.models:
            if name != GENERATION:
                yield from (str(one.relative_to(self.source)) for one in self.files(name))

    def files(self, name: str) -> list[Path]:
        """Files with tests of models in the folder called `name`."""
        return sorted((self.source / "tests" / "models" / name).glob("test_modeling_*.py"))

    def run(self, *options: str) -> Outcomes:
        """The outcomes of the tests with `options` of the plugin.

        Raises:
            RuntimeError: pytest could not run.
        """
        settings = {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH")))),
        }
        arguments = [*(("--compile",) if self.compiles else ()), *options, *self.paths()]
        with tempfile.TemporaryDirectory() as folder:
            name = f"{zlib.crc32(' '.join(arguments).encode()):08x}.json"
            outcomes = (Path(folder) if self.kept is None else self.kept) / name
            command = [
                *(sys.executable, "-m", "pytest", "-p", "transformers_plugin", "-p", "no:cacheprovider"),
                *(
                    "-q",
                    "--tb=short",
                    "-W",
                    "ignore",
                    "--continue-on-collection-errors",
                    "-o",
                    "log_cli=0",
                    "--timeout=600",
                    f"--outcomes={outcomes}",
                ),
                *(() if self.processes < 2 else (f"-n{self.processes}", "--dist=loadfile")),
                *arguments,
            ]
            if not outcomes.exists():
                env = {**os.environ, **settings}
                run = subprocess.run(command, cwd=self.source, env=env, capture_output=True, text=True)
            if not outcomes.exists():
                raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}:\n{run.stdout}\n{run.stderr}")
            found = json.loads(outcomes.read_text())
        return {name: Outcome(**one) for name, one in found.items()}


def folder_of(test: str) -> str:
    """The folder that a row of the tables is about."""
    parts = test.partition("::")[0].split("/")
    return parts[2] if parts[1] == "models" else parts[1]


def class_of(test: str) -> str:
    """The class that a test belongs to, or the test itself where it is a function."""
    return test.split("::")[1]


def cell(value: object) -> str:
    """What stands for `value` in a table."""
    return str(value).replace("|", "/")


def table(head: list[str], rows: list[list[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def by_folder(tests: dict[str, tuple[Outcome, ...]]) -> Iterator[tuple[str, dict[str, tuple[Outcome, ...]]]]:
    """The tests of each folder, and all of them."""
    for folder in dict.fromkeys(map(folder_of, tests)):
        yield folder, {name: pair for name, pair in tests.items() if folder_of(name) == folder}
    yield "all", tests


def together(first: Outcomes, second: Outcomes) -> dict[str, tuple[Outcome, Outcome]]:
    """Outcomes of both runs by test; of a test that only one has, the other one is `MISSING`."""
    return {name: (first.get(name, MISSING), second.get(name, MISSING)) for name in sorted({*first, *second})}


def table_of_import(alone: Outcomes, imported: Outcomes) -> tuple[str, list[str]]:
    """The table of (a), and a line for every test whose outcome differs."""
    rows = []
    for folder, tests in by_folder(together(alone, imported)):
        counts = Counter(with_import.outcome for _, with_import in tests.values())
        hub = sum(with_import.reason == "needs the Hub" for _, with_import in tests.values())
        differing = sum(before.outcome != after.outcome for before, after in tests.values())
        rows.append([folder, len(tests), counts["passed"], counts["failed"], counts["skipped"], hub, differing])
    differences = [
        f"{name}: {before.outcome} without ({before.reason}), {after.outcome} with ({after.reason})"
        for name, (before, after) in together(alone, imported).items()
        if before.outcome != after.outcome
    ]
    head = ["tests of", "tests", "passed", "failed", "skipped", "of these, for the Hub", "differ without the import"]
    return table(head, rows), differences


def engine_of(outcome: Outcome) -> str | None:
    """The engine that ran the last call with a drafter; None if there was none."""
    engines = [note.partition(":")[0] for note in outcome.notes if note.startswith(("static:", "stock:"))]
    return engines[-1] if engines else None


@dataclass
class Assisted:
    """Outcomes of tests of assisted decoding without drafters and with them.

    Attributes:
        tests: by the name of the test, with the way it was run.
    """

    tests: dict[str, tuple[Outcome, Outcome]]

    def table(self) -> str:
        rows = []
        for folder, tests in by_folder(self.tests):
            after = [one for _, one in tests.values()]
            passed = [one for one in after if one.outcome == "passed"]
            engines = Counter(map(engine_of, passed))
            listed = sum(name in self.failures for name in tests)
            skipped = sum(one.outcome == "skipped" for one in after)
            failed = sum(one.outcome == "failed" for one in after) - listed
            counts = [engines["static"], engines["stock"], engines[None]]
            rows.append([folder, len(tests), *counts, skipped, listed, failed])
        head = ["tests of", "tests", "passed on the static engine", "passed on the stock engine"]
        return table([*head, "passed without a drafter's call", "skipped", "listed below", "fail without, too"], rows)

    @property
    def failures(self) -> dict[str, Outcome]:
        """Tests that pass with their own assistant and do not with a drafter."""
        return {
            name: after for name, (before, after) in self.tests.items() if before.outcome == "passed" != after.outcome
        }

    def reasons(self) -> list[list[str]]:
        """Why `failures` do not pass, with the classes of tests and the number of theirs."""
        grouped: dict[str, Counter[str]] = {}
        for name, after in self.failures.items():
            grouped.setdefault(after.reason, Counter())[class_of(name)] += 1
        return [
            [why, ", ".join(f"`{one}` {count}" for one, count in sorted(counts.items()))]
            for why, counts in sorted(grouped.items())
        ]

    def unlisted(self, lines: list[str]) -> list[tuple[str, str]]:
        """Those of `failures`, with the reason, of which no line of a page has the reason and the class of tests."""
        return [
            (name, after.reason)
            for name, after in self.failures.items()
            if not any(cell(after.reason) in line and f"`{class_of(name)}`" in line for line in lines)
        ]

    def notes(self, start: str) -> list[list[object]]:
        """What the plugin noted after `start`, with how often."""
        notes = [
            note.removeprefix(start) for _, one in self.tests.values() for note in one.notes if note.startswith(start)
        ]
        return [[re.sub(r"\d[\d.e+-]*", "N", why), count] for why, count in Counter(notes).most_common()]


def run_assisted(runner: Runner, alone: Outcomes | None) -> Assisted:
    """Both ways of (b); `alone` are outcomes without the package, if these tests have been run."""
    as_they_are = runner.run("--assisted", "--with=drafters")
    if alone is None:
        alone = runner.run("--assisted", "--with=nothing")
    tests = {name: (alone.get(name, MISSING), after) for name, after in as_they_are.items()}
    ordinary = [runner.run("--assisted", "--ordinary", f"--with={what}") for what in ("nothing", "drafters")]
    return Assisted(tests | {f"{name}, ordinary": pair for name, pair in together(*ordinary).items()})


def versions(source: Path) -> str:
    """What was tested, and the version of which the tests are."""
    import torch
    import transformers

    setup = source / "setup.py"
    found = re.search(r'version="([^"]+)"', setup.read_text()) if setup.exists() else None
    return (
        f"transformers {transformers.__version__} and torch {torch.__version__.partition('+')[0]} on a CPU, "
        f"with the tests of {'an unknown version' if found is None else found[1]}"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="checkout of transformers")
    parser.add_argument("--models", nargs="+", default=[GENERATION, *MODELS], help="folders; `generation` for its own")
    parser.add_argument("--only", choices=("a", "b"), help="one table only")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="processes that run tests")
    parser.add_argument("--compile", action="store_true", help="also tests that compile or export models")
    parser.add_argument("--keep", type=Path, help="folder for outcomes of runs, which are then not repeated")
    parser.add_argument("--write", type=Path, help="page whose section on these tests is replaced")
    options = parser.parse_args(arguments)
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        options.keep = options.keep.resolve()
    runner = Runner(options.source.resolve(), options.models, options.n, options.compile, options.keep)
    unknown = [name for name in options.models if name != GENERATION and not runner.files(name)]
    if unknown:
        parser.error(f"{options.source} has no tests of {', '.join(unknown)} in tests/models")
    if options.write is not None and options.only is not None:
        parser.error("--write is for both tables, not for the one of --only")

    sections, faults, alone = [], [], None
    if options.only != "b":
        alone = runner.run("--with=nothing")
        counts, differences = table_of_import(alone, runner.run("--with=import"))
        sections.append(f"### With the package imported\n\n{counts}")
        faults += [f"differs: {one}" for one in differences]
    if options.only != "a":
        assisted = run_assisted(runner, alone)
        reasons = table(["why not with a drafter", "tests"], assisted.reasons())
        parts = [WAYS, assisted.table(), reasons]
        for head, start in NOTES.items():
            rows = assisted.notes(start)
            parts += [table([head, "calls"], rows)] if rows else []
        sections.append("### With a drafter in place of the assistant\n\n" + "\n\n".join(parts))
        if options.write is None:
            listed = PAGE.read_text().splitlines()
            faults += [f"not listed in {PAGE.name}: {name}: {why}" for name, why in assisted.unlisted(listed)]
    text = f"{HEADING}\n\n{INTRODUCTION.format(versions=versions(runner.source))}\n\n" + "\n\n".join(sections) + "\n"
    print(text)
    if options.write is not None:
        page = options.write.read_text() if options.write.exists() else ""
        options.write.write_text(f"{page.partition(HEADING)[0].rstrip()}\n\n{text}")
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"{len(faults)} outcomes to explain")
    return 1 if faults else 0


INTRODUCTION = """\
Made by `python tests/peers/transformers_tests.py --source CHECKOUT --write docs/transformers.md` with
{versions}.
Files of the Hub are not downloaded; tests that compile or export models are left out."""

WAYS = """\
Every test of a model runs twice: as it is, and as an ordinary call, without attention weights, which the static engine
does not compute, and with masks that hide no token, where the tester draws masks with holes."""

# By the heading of a table: how the notes of the plugin begin that it is of.
NOTES = {
    "why the stock engine": "stock: ",
    "why a small Llama drafts in place of the assistant": "a Llama in place of the assistant: ",
}


if __name__ == "__main__":
    sys.exit(main())
