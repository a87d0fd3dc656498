"""README and docs: lengths, links and paths that lead somewhere, examples that are Python, a chart that is current."""

import ast
import json
import re
import runpy
from pathlib import Path

import pytest

from hf_specdec.drafters.registry import FAMILIES

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
MOST_LINES = {"README.md": 150, "docs/glossary.md": 25}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """What links to headings of `page` are called, as GitHub makes them."""
    prose = BLOCK.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), link
        assert not anchor or anchor in anchors(there), link


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "inside.md"], ids=lambda page: page.name)
def test_paths_lead_somewhere(page):
    for path in re.findall(r"`([\w/]+(?:\.py|/))`", page.read_text(encoding="utf-8")):
        assert any((folder / path).exists() for folder in (ROOT, ROOT / "hf_specdec")), path


@pytest.mark.parametrize("name", MOST_LINES)
def test_pages_are_short(name):
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= MOST_LINES[name]


@pages
def test_examples_are_python(page):
    for language, content in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            ast.parse(content)


def test_chart_shows_its_figures():
    figures = ROOT / "docs" / "figures"
    draw = runpy.run_path(str(figures / "rounds.py"))["draw"]
    drawn = draw(json.loads((figures / "rounds.json").read_text(encoding="utf-8")))
    assert (figures / "rounds.svg").read_text(encoding="utf-8") == drawn


def test_every_module_has_a_place_for_its_tests():
    """By the table of docs/inside.md, whose paths exist."""
    section = (
        (ROOT / "docs" / "inside.md").read_text(encoding="utf-8").split("## Where the tests are")[1].split("## ")[0]
    )
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", section, flags=re.MULTILINE)
    patterns = [pattern for modules, _ in rows for pattern in re.findall(r"`([^`]+)`", modules)]
    for _, tests in rows:
        assert all((ROOT / path).exists() for path in re.findall(r"`(tests/[^`]+)`", tests)), tests
    folders = {path.parts[0] for path in map(Path, patterns) if len(path.parts) > 1}
    for module in [*(ROOT / "hf_specdec").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        name = module.relative_to(ROOT).as_posix().removeprefix("hf_specdec/")
        assert "/" not in name or name.partition("/")[0] in folders, f"docs/inside.md has no row for {name}"


def test_table_of_families():
    """Each family has one row in docs/checkpoints.md, which begins with its name."""
    page = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    rows = page[page.index("| family |") :].split("\n\n")[0].lower().replace("-", "").splitlines()[2:]
    names = [family.drafter.config_class.family.lower().replace("-", "") for family in FAMILIES]
    assert [sum(re.match(rf"\| {name}\b", row) is not None for row in rows) for name in names] == [1] * len(rows)
