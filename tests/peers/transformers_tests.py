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
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from peer_tests import (
    MISSING,
    ROOT,
    Outcome,
    Outcomes,
    Runner,
    by_group,
    cell,
    class_of,
    compared,
    report,
    table,
    together,
)

PAGE = ROOT / "docs" / "transformers.md"
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


def files(source: Path, name: str) -> list[Path]:
    """Files with tests of models in the folder called `name`."""
    return sorted((source / "tests" / "models" / name).glob("test_modeling_*.py"))


def paths(source: Path, models: list[str]) -> Iterator[str]:
    """Files and folders to run, relative to the checkout, for `models`, folders of `tests/models`."""
    if GENERATION in models:
        yield "tests/generation"
    for name in models:
        if name != GENERATION:
            yield from (str(one.relative_to(source)) for one in files(source, name))


def folder_of(test: str) -> str:
    """The folder that a row of the tables is about."""
    parts = test.partition("::")[0].split("/")
    return parts[2] if parts[1] == "models" else parts[1]


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
        for folder, tests in by_group(self.tests, folder_of):
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
    source = options.source.resolve()
    unknown = [name for name in options.models if name != GENERATION and not files(source, name)]
    if unknown:
        parser.error(f"{options.source} has no tests of {', '.join(unknown)} in tests/models")
    if options.write is not None and options.only is not None:
        parser.error("--write is for both tables, not for the one of --only")
    flags = ["--compile"] if options.compile else []
    runner = Runner(source, "transformers_plugin", [*flags, *paths(source, options.models)], options.n, options.keep)

    sections, faults, alone = [], [], None
    if options.only != "b":
        alone = runner.run("--with=nothing")
        counts, differences = compared(alone, runner.run("--with=import"), folder_of, "the import")
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
    text = f"{HEADING}\n\n{INTRODUCTION.format(versions=versions(source))}\n\n" + "\n\n".join(sections) + "\n"
    return report(text, HEADING, faults, options.write)


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
