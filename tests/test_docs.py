"""Blocks of README and docs run as they stand (tests/page.py); links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.page import LANGUAGES, blocks_of, is_like

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
SLOW_PAGES = [page for page in PAGES if any(block.is_slow for block in blocks_of(page))]
LINKED = [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md"]

RUNNER = ROOT / "tests" / "page.py"


def run(page: Path, folder: Path, *flags: str) -> None:
    """In a process of its own: what a budget has left depends on what the process did before."""
    command = [sys.executable, "-W", "error", str(RUNNER), *flags, str(page), str(folder)]
    environ = {n: v for n, v in os.environ.items() if not n.startswith("ZEEPO_")}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environ)
    assert ran.returncode == 0, ran.stdout + ran.stderr


DEAR = ("exactness", "how", "ranks", "troubleshooting")
"""Pages that start many processes or train for long: the full run has them."""


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[pytest.mark.slow] * (p.stem in DEAR), id=p.stem) for p in PAGES],
)
def test_page_runs(page: Path, tmp_path: Path) -> None:
    run(page, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW_PAGES, ids=lambda page: page.stem)
def test_page_runs_with_its_slow_blocks(page: Path, tmp_path: Path) -> None:
    run(page, tmp_path, "--slow")


@pytest.mark.slow
def test_the_picture_of_a_step_is_drawn(tmp_path: Path) -> None:
    command = [sys.executable, "docs/step_picture.py", str(tmp_path / "step.png")]
    subprocess.run(command, check=True, cwd=ROOT, timeout=120)
    assert (tmp_path / "step.png").stat().st_size > 10_000


def test_at_most_eight_pages() -> None:
    assert len(DOCS) <= 8


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.stem)
def test_blocks_are_of_a_kind_that_runs(page: Path) -> None:
    for block in blocks_of(page):
        assert block.language in LANGUAGES, f"{block.place}: {block.language!r} is not run"
    # A script is written to the folder only; somebody has to start it.
    commands = "".join(b.text for b in blocks_of(page) if b.language == "console")
    scripts = {b.file_name for b in blocks_of(page) if b.language == "python"} - {None}
    assert not [name for name in scripts if str(name) not in commands]


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    fenced = {n for b in blocks_of(page) for n in range(b.line, b.line + b.text.count("\n"))}
    seen: Counter[str] = Counter()
    found = set()
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if number in fenced or not re.match(r"#{1,6} ", line):
            continue
        title = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", line.lstrip("#").strip()).lower()
        anchor = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
        found.add(anchor + (f"-{seen[anchor]}" if seen[anchor] else ""))
        seen[anchor] += 1
    return found


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.is_file(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors_of(file), f"{page.name}: {target}"
    for name in re.findall(r"\b(?:benchmarks|examples|tests|docs)/[\w./-]*\w\.\w+", text):
        assert (ROOT / name).is_file(), f"{page.name} names {name}"


def test_source_names_pages_that_exist() -> None:
    for file in [*(ROOT / "src").rglob("*.py"), ROOT / "CHANGELOG.md", ROOT / "Makefile"]:
        for name in re.findall(r"docs/\w+\.\w+", file.read_text()):
            assert (ROOT / name).is_file(), f"{file.name} names {name}"


def test_dots_stand_for_anything() -> None:
    assert is_like("took ... s\nin all", "took 1.5 s in all\n")
    assert is_like("a ... c", "a b\nb c")
    assert not is_like("took ... s", "took 1.5 s in all")
    assert not is_like("a b", "ab")
