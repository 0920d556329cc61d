"""The demo in its small form, and that it fails when it should."""

from __future__ import annotations

import argparse
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.demo import report
from examples.demo.__main__ import conclude
from examples.demo.text import Tokenizer
from examples.demo.watch import MiB, Run
from tests.once import once

ROOT = Path(__file__).parent.parent


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert content[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def run_small_demo(folder: Path) -> None:
    output = folder / "output"
    output.mkdir()
    command = [sys.executable, "-m", "examples.demo", "--small", "--output", str(output)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ZEEPO_PROGRESS": "true"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "", "zeepo's own progress is in the way of the demo's"
    (folder / "printed").write_text(done.stdout)


@pytest.fixture(scope="module")
def small_demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The output folder and what was printed."""
    folder = once(tmp_path_factory, "demo", run_small_demo)
    return folder / "output", (folder / "printed").read_text()


def test_losses_are_equal_and_shown(small_demo: tuple[Path, str]) -> None:
    output, shown = small_demo
    runs = json.loads((output / "demo.json").read_text())["runs"]
    assert len(runs["plain"]["losses"]) == 3
    assert runs["plain"]["losses"] == runs["zeepo"]["losses"]
    assert len(set(runs["plain"]["losses"])) == 3, "nothing was trained"
    assert "losses equal bit for bit: yes (3 steps)" in shown


def test_progress_is_shown_for_each_step(small_demo: tuple[Path, str]) -> None:
    _, shown = small_demo
    for name in ("plain", "zeepo"):
        for step in (1, 2, 3):
            line = rf"^{name} training +{step}/3 +loss .* s/step +resident .* GiB, peak "
            assert len(re.findall(line, shown, re.MULTILINE)) == 1


def test_result_has_the_figures(small_demo: tuple[Path, str]) -> None:
    output, _ = small_demo
    result = json.loads((output / "demo.json").read_text())
    assert result["machine"]["cores"] >= 1
    assert result["machine"]["ram_bytes"] > 0
    assert result["torch"][0].isdigit()
    assert result["parameters"] > 5_000_000
    assert result["verdict"]["losses_equal"] is True
    for name, phases in (("plain", "build train end"), ("zeepo", "build train close end")):
        run = result["runs"][name]
        assert " ".join(phase["name"] for phase in run["phases"]) == phases
        assert run["growth_bytes"] > 50 * MiB
        assert run["seconds_per_step"] > 0
        assert len(run["samples_mib"]) > 10
        sampled = max(mib for _, mib in run["samples_mib"]) * MiB - run["base_bytes"]
        assert sampled <= run["growth_bytes"] + MiB
    assert result["runs"]["zeepo"]["facts"]["stats"]["evictions"] > 0


def test_plot_is_a_png_of_sane_size(small_demo: tuple[Path, str]) -> None:
    output, shown = small_demo
    width, height = png_size(output / "demo.png")
    assert 1200 <= width <= 2400
    assert 600 <= height <= 1400
    assert "demo.png" in shown


def test_scratch_files_are_gone(small_demo: tuple[Path, str]) -> None:
    output, _ = small_demo
    assert sorted(path.name for path in output.iterdir()) == ["demo.json", "demo.png"]


# -- the verdict ----------------------------------------------------------------------------------


def made_up_run(name: str, losses: list[float], growth_mib: int) -> Run:
    run = Run(name, len(losses), started=0.0, base_bytes=100 * MiB)
    run.samples = [(step / 10, (100 + growth_mib) * MiB) for step in range(30)]
    run.peak_bytes = (100 + growth_mib) * MiB
    run.phases = [("build", 0.5, 0), ("train", 1.0, 0), ("end", 2.9, run.peak_bytes)]
    run.losses = [loss.hex() for loss in losses]
    run.step_seconds = [1.0] * len(losses)
    run.facts = {"torch": "2", "parameters": 1, "ram_bytes": 100 * MiB}
    return run


SETTINGS: dict[str, Any] = {
    "layers": 1, "width": 64, "vocabulary": 300, "sequence": 8, "batch": 1, "steps": 2,
    "share": 0.25, "ram": "100MiB",
}  # fmt: skip


@pytest.mark.parametrize(
    ("losses", "growth_mib", "exit_code", "line"),
    [
        ([3.5, 2.5], 100, 0, "within 25% of plain's memory: yes (25.0%)"),
        ([3.5, 2.5], 101, 1, "within 25% of plain's memory: NO (25.2%)"),
        ([3.5, 2.5 + 2**-51], 100, 1, "bit for bit: NO (first different step: 2)"),
        ([3.5], 100, 1, "bit for bit: NO"),
    ],
)
def test_exit_code(
    losses: list[float],
    growth_mib: int,
    exit_code: int,
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain, zeepo = made_up_run("plain", [3.5, 2.5], 400), made_up_run("zeepo", losses, growth_mib)
    args = argparse.Namespace(output=tmp_path, keep=False)
    result = report.make_result(plain, zeepo, SETTINGS, report.machine())
    assert conclude(result, args) == exit_code
    assert line in capsys.readouterr().out


def test_no_losses_are_not_equal_losses() -> None:
    assert not report.judge([], [], (400, 100), 0.25)["passed"]


# -- text and README ------------------------------------------------------------------------------


def test_tokens_give_the_text_back() -> None:
    text = b"def f(x):\n    return x + 12345 - x\n\xc3\xa9 \xff" * 3 + b"rare_word_of_its_own"
    tokenizer = Tokenizer.of(text, 262)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokens.max() == 261
    assert len(tokens) < len(text)


def test_readme_has_the_figures_that_were_kept() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text())
    readme = (ROOT / "README.md").read_text()
    assert report.put_into_readme(readme, result) == readme
    width, _ = png_size(ROOT / "docs" / "demo.png")
    assert width >= 1200
    assert "docs/demo.png" in readme
