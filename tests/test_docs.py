"""The Python blocks of README and docs run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import zeepo

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
        found += [(f"{page.name}-{number}", block) for number, block in enumerate(blocks)]
    return found


@pytest.mark.parametrize(("name", "block"), python_blocks())
def test_block_runs(name: str, block: str) -> None:
    try:
        exec(compile(block, name, "exec"), {"__name__": name})
    finally:
        zeepo.close()


def test_there_are_blocks() -> None:
    assert len(python_blocks()) >= 2
