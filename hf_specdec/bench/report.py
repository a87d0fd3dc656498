"""The output of a benchmark: table, environment and plots."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config import AUTO
from ..host.parts import installed_version
from .measure import Case, Latency, Setting, Spread, short_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PACKAGES = ("hf-specdec", "torch", "transformers", "triton")
MISSING = "-"


def environment(device: torch.device) -> dict[str, Any]:
    """The environment of the figures: device, and versions of Python and packages."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.processor() or platform.machine()} ({device.type}, {torch.get_num_threads()} threads)"
    return {"device": name, "python": platform.python_version(), **{name: installed_version(name) for name in PACKAGES}}


def _spread(value: Spread, digits: int = 2) -> str:
    half = f" ±{(value.high - value.low) / 2:.{digits}f}" if len(value.runs) > 1 else ""
    return f"{value.median:.{digits}f}{half}"


def _latency(value: Latency, digits: int = 2) -> str:
    return f"{value.median:.{digits}f} / {value.p99:.{digits}f}"


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


# Titles of columns that are shown only if their values vary.
VARIED = ("prompt", "T", "draft probs")
LEFT_ALIGNED = ("case", "per position")

# Titles of columns, their attributes of `Case`, and formats; None and empty lists are shown as `MISSING`.
COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("batch", "batch_size", str),
    ("prompt", "prompt_length", str),
    ("case", "label", str),
    ("T", "temperature", "{:g}".format),
    ("draft probs", "draft_probs", str),
    ("K", "k", str),
    ("tree", "tree", lambda value: str(value or MISSING)),
    ("same text", "same_texts", _share),
    ("accepted", "acceptance_length", "{:.2f}".format),
    ("ms/round", "ms_per_round", _spread),
    ("GPU ms", "gpu_ms_per_round", "{:.2f}".format),
    ("/engine", "round_over_engine", "{:.2f}".format),
    ("/dynamic", "round_over_dynamic", "{:.2f}".format),
    ("tokens/s", "tokens_per_second", partial(_spread, digits=1)),
    ("speedup", "speedup", "{:.2f}".format),
    ("first ms", "ms_to_first_token", partial(_spread, digits=1)),
    ("first ms p50 / p99", "request_to_first_token", partial(_latency, digits=1)),
    ("ms/token p50 / p99", "request_per_token", _latency),
    ("gap ms p50 / p99", "request_gap", _latency),
    ("cached tokens", "cached_tokens", lambda value: str(value or MISSING)),
    ("peak GB", "peak_memory_bytes", lambda value: f"{value / 1e9:.2f}"),
    ("bandwidth", "bandwidth_share", _share),
    ("per position", "acceptance_per_position", lambda shares: " ".join(map("{:.2f}".format, shares))),
)


def _variant(case: Case) -> str:
    tree = f", tree {case.tree}" if case.tree else ""
    return tree if case.draft_probs in (None, "auto") else f"{tree}, draft probs {case.draft_probs}"


def _lines(drafted: list[Case]) -> list[tuple[str, list[Case]]]:
    """The cases of each line of a plot, by K, with the line's label."""
    lines: dict[tuple[str, str], list[Case]] = {}
    for case in sorted(drafted, key=lambda case: len(case.acceptance_per_position)):
        lines.setdefault((case.name, _variant(case)), []).append(case)
    return [(short_name(name) + variant, line) for (name, variant), line in lines.items()]


def table(cases: list[Case], drift: dict[str, Any] | None = None) -> str:
    """The cases as aligned text, a line each, without empty columns and without `VARIED` columns that do not vary; then
    the errors of failed cases, and the machine's drift."""
    columns = []
    for title, name, show in COLUMNS:
        values = [getattr(case, name) for case in cases if case.error is None]
        cells = [MISSING if value is None or value == [] else show(value) for value in values]
        if len({*cells} - {MISSING}) > (title in VARIED):
            width, pad = max(map(len, (title, *cells))), str.ljust if title in LEFT_ALIGNED else str.rjust
            columns.append([pad(cell, width) for cell in (title, *cells)])
    lines = ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
    failed: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        if case.error is not None:
            number = "" if case.k is None else f", K = {case.k}"
            failed.setdefault((case.name, case.error), []).append(f"{case.setting}{_variant(case)}{number}")
    lines += [f"failed: {short_name(name)} ({'; '.join(where)}): {error}" for (name, error), where in failed.items()]
    if drift is not None:
        what = f"{drift['case']} at {Setting(**{name: drift[name] for name in Setting._fields})}"
        lines.append(f"drift: measured again at the end, a step of {what} takes {drift['ratio']:.2f} times as long")
    return "\n".join(lines)


def check_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "--plots draws with matplotlib, which is not installed. Install it (pip install 'hf-specdec[bench]'), or "
            "drop --plots: --output keeps all figures."
        )


def draw(cases: list[Case], about: str, folder: Path) -> None:
    """Plot tokens a second and time a round over K, and acceptance by position, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    measured = [case for case in cases if case.error is None]
    pictures = {
        "tokens_per_second": _over_k(measured, "tokens a second", "tokens_per_second"),
        "round_time": _over_k(measured, "ms a round", "ms_per_round"),
        "acceptance": _over_positions(measured),
    }
    for name, figure in pictures.items():
        figure.suptitle(about, fontsize=9)
        figure.savefig(folder / f"{name}.png", dpi=120)


def _panels(cases: list[Case], ylabel: str, xlabel: str) -> tuple[Figure, list[tuple[Setting, Any]]]:
    """A figure with a panel for each setting, and a row for each temperature; and the pairs of setting and panel."""
    from matplotlib.figure import Figure  # not pyplot, which chooses a backend by the display
    from matplotlib.ticker import MaxNLocator

    sizes = sorted({(case.batch_size, case.prompt_length) for case in cases})
    temperatures = sorted({case.temperature for case in cases})
    figure = Figure(figsize=(4.2 * len(sizes), 3.4 * len(temperatures)), layout="constrained")
    panels = figure.subplots(len(temperatures), len(sizes), squeeze=False)
    found = []
    for row, temperature in zip(panels, temperatures, strict=True):
        row[0].set_ylabel(ylabel)
        for panel, (size, length) in zip(row, sizes, strict=True):
            setting = Setting(size, temperature, length)
            panel.set(title=str(setting), xlabel=xlabel)
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
            panel.grid(alpha=0.3)
            found.append((setting, panel))
    return figure, found


def _over_k(cases: list[Case], ylabel: str, figure_name: str) -> Figure:
    """A line for each drafter, with the spread of the runs, and a horizontal line for each baseline."""
    figure, panels = _panels(cases, ylabel, "K, draft tokens a round")
    for setting, panel in panels:
        here = [case for case in cases if case.setting == setting and getattr(case, figure_name) is not None]
        drafted = [case for case in here if case.k and case.k != AUTO]
        for label, line in _lines(drafted):
            values = [getattr(case, figure_name) for case in line]
            errors = [[one.median - one.low for one in values], [one.high - one.median for one in values]]
            medians = [one.median for one in values]
            panel.errorbar([case.k for case in line], medians, errors, marker="o", capsize=2, label=label)
        for style, case in zip(("--", ":", "-."), (case for case in here if case not in drafted), strict=False):
            level = getattr(case, figure_name).median
            panel.axhline(level, linestyle=style, color="black", alpha=0.6, label=case.name)
        panel.set_ylim(bottom=0)
        panel.legend(fontsize=7)
    return figure


def _over_positions(cases: list[Case]) -> Figure:
    """Acceptance at each position, for every drafter at its largest K."""
    figure, panels = _panels(cases, "share of drafts accepted", "position in the block")
    for setting, panel in panels:
        drafted = [case for case in cases if case.setting == setting and case.k]
        for label, (*_, case) in _lines(drafted):
            positions = range(1, len(case.acceptance_per_position) + 1)
            panel.plot(positions, case.acceptance_per_position, marker="o", label=f"{label}, K = {case.k}")
        panel.set_ylim(0, 1)
        if drafted:
            panel.legend(fontsize=7)
    return figure
