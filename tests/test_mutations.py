"""A deliberately broken engine is noticed by the parity cases; an unbroken one passes them.

One test per site of `zeepo.sabotage`. All sites run in one program (mutation_runner), each in a
child of its own. A crash, an exception or a difference in the numbers is a mutant caught; one that
survives is a missing parity case.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.once import once
from zeepo.sabotage import SITES, sabotage, sabotaged

ROOT = Path(__file__).parents[1]
CAUGHT = ("difference", "exception", "crash")

Answers = dict[str, dict[str, Any]]


def break_every_site(folder: Path) -> None:
    command = [sys.executable, "-m", "tests.mutation_runner", str(folder), "none", *SITES]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    (folder / "answers.jsonl").write_text(done.stdout)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """How the run of every site ended."""
    told = once(tmp_path_factory, "mutations", break_every_site) / "answers.jsonl"
    found = [json.loads(line) for line in told.read_text().splitlines() if line.startswith("{")]
    return {answer["site"]: answer for answer in found}


def test_unbroken_engine_passes_the_same_cases(answers: Answers) -> None:
    """Otherwise the cases could not show that a mutant was caught."""
    answer = answers["none"]
    assert answer["outcome"] == "survived", f"{answer['case']}: {answer['detail']}"


@pytest.mark.parametrize("site", SITES)
def test_mutant_is_caught(site: str, answers: Answers) -> None:
    assert answers["none"]["outcome"] == "survived", "it fails unbroken: this shows nothing"
    answer = answers[site]
    assert answer["outcome"] in CAUGHT, (
        f"{site} ({SITES[site]}): {answer['outcome']}. {answer['detail']}"
    )


def test_sites_are_those_in_the_source() -> None:
    """A site that is named but nowhere asked for would survive for nothing."""
    used: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        used.update(re.findall(r"""sabotaged\(\s*["']([^"']+)["']""", path.read_text()))
    assert used == set(SITES)


def test_only_the_site_that_is_broken_is_broken() -> None:
    first, second = list(SITES)[:2]
    with sabotage(first):
        assert sabotaged(first)
        assert not sabotaged(second)
    assert not sabotaged(first)


def test_a_site_that_does_not_exist_is_refused() -> None:
    with pytest.raises(KeyError, match="no sabotage site"), sabotage("nothing.like.this"):
        pass
