"""Every example runs in a small form, as a user starts it, and what it says is true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples import binary_classification

ROOT = Path(__file__).parent.parent


def run(*command: object) -> str:
    """What the program prints; it has to succeed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# -- binary_classification ------------------------------------------------------------------------


def test_binary_classification(tmp_path: Path) -> None:
    shown = run(
        "examples/binary_classification.py", "--width=384", "--steps=3", "--ram=118MiB",
        f"--disk={tmp_path}",
    )  # fmt: skip
    moved = re.search(r"zeepo moved ([\d,]+) MiB", shown)
    assert moved
    assert int(moved[1].replace(",", "")) > 20, "everything fitted: nothing is shown"
    rows = re.findall(r"^(plain|by hand|zeepo),?.*?([\d.]+)% +(.*)$", shown, re.MULTILINE)
    assert [name for name, _, _ in rows] == ["plain", "plain", "by hand", "zeepo"]
    assert len({accuracy for _, accuracy, _ in rows}) == 1
    assert float(rows[0][1]) > 85, "nothing was learnt"
    same = "none, equal bit for bit"
    assert [difference == same for _, _, difference in rows] == [True, False, True, True]
    assert float(rows[1][2].split()[0]) < 1e-5, "all data at once: rounding, and no more"
    assert list(tmp_path.iterdir()) == []


def test_binary_classification_sees_a_single_bit(capsys: pytest.CaptureFixture[str]) -> None:
    model, other = (binary_classification.make_model(8) for _ in range(2))
    with torch.no_grad():
        bias = other[-1].bias
        bias.copy_(bias.nextafter(torch.tensor([9.0])))
    x, y = binary_classification.load_data()
    binary_classification.report("other", other, model, x, y)
    assert "equal" not in capsys.readouterr().out
