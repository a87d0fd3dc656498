"""Finished prompts of a run, on disk, so that after a crash only unfinished batches are generated again."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SETTINGS = "settings.json"


class Journal:
    """Finished prompts of a run that writes the jsonl file `output`: a jsonl file for each process, in a folder beside
    it. Completions depend on `settings`, JSON values.

    When the run is finished the files are joined and the folder is removed. The output is written atomically: if it
    exists, it is complete.
    """

    def __init__(self, output: Path, settings: dict[str, Any]):
        self.output, self.settings = output, settings
        self.summary = output.with_suffix(".summary.json")
        self._folder = output.with_name(output.name + ".parts")
        self._file: Any = None

    def begin(self) -> set[int | str] | None:
        """Start the run, or resume it. Returns the ids of finished prompts, or None if the output exists. One process
        calls it, before the others `open`. Lines that a crash cut off are removed.

        Raises `ValueError` if files belong to a run with other settings or to one that still runs, or are damaged.
        """
        if self.output.exists():
            self._check_settings(self.output, self.summary, lambda content: content["settings"])
            shutil.rmtree(self._folder, ignore_errors=True)
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        kept = self._folder / SETTINGS
        if kept.exists():
            self._check_settings(self._folder, kept, lambda content: content)
        elif self._parts():
            raise ValueError(f"{self._folder} has no {SETTINGS}; remove the folder, or name another output.")
        else:
            write_whole(kept, json.dumps(self.settings, indent=1))
        for part in self._parts():
            with part.open("rb+") as file:
                self._lock(file)
                content = file.read()
                file.truncate(content.rfind(b"\n") + 1)
        return set(self.records())

    def open(self, process: int) -> None:
        """Open the file of process number `process`. It is locked until the process ends."""
        self._file = (self._folder / f"{process:05}.jsonl").open("a", encoding="utf-8")
        self._lock(self._file)

    def write(self, records: Iterable[dict[str, Any]]) -> None:
        """Append records and flush them to disk."""
        self._file.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
        self._file.flush()
        os.fsync(self._file.fileno())

    def records(self) -> dict[int | str, dict[str, Any]]:
        """All records so far, by the prompt's id."""
        found: dict[int | str, dict[str, Any]] = {}
        for part in self._parts():
            # Not `splitlines`: a completion may hold other line breaks, such as U+2028.
            for number, line in enumerate(part.read_text(encoding="utf-8").split("\n")[:-1], start=1):
                try:
                    record = json.loads(line)
                    known = record["id"] in found
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(f"Line {number} of {part} is damaged: {line[:80]!r}; remove it.") from error
                if known:
                    raise ValueError(f"Line {number} of {part}: prompt {record['id']!r} was done before; remove it.")
                found[record["id"]] = record
        return found

    def finish(self, records: Iterable[dict[str, Any]], summary: dict[str, Any]) -> None:
        """Write the output and its summary, and remove the folder; one process calls it."""
        write_whole(self.summary, json.dumps({"settings": self.settings, **summary}, indent=1))
        write_whole(self.output, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
        shutil.rmtree(self._folder)

    def _parts(self) -> list[Path]:
        return sorted(self._folder.glob("*.jsonl"))

    def _lock(self, file: Any) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"Another process still writes {file.name}; end what is left of the run before, or name another output."
            ) from error

    def _check_settings(self, what: Path, file: Path, read) -> None:
        try:
            found = read(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{what} exists, but {file} does not say how it was made; name another output.") from error
        names = sorted(found.keys() | self.settings.keys())
        changes = [name for name in names if found.get(name) != self.settings.get(name)]
        if changes:
            told = ", ".join(f"{name} was {found.get(name)!r}, now {self.settings.get(name)!r}" for name in changes)
            raise ValueError(f"{what} belongs to a run with other settings ({told}); name another output or remove it.")


def write_whole(file: Path, content: str) -> None:
    """Write `file` atomically: after a crash it has either all of `content` or its former content."""
    draft = file.with_name(file.name + ".draft")
    with draft.open("w", encoding="utf-8") as written:
        written.write(content)
        written.flush()
        os.fsync(written.fileno())
    draft.replace(file)
