"""Every example runs in a small form, and what it says is true.

Those that are about memory or ranks run in processes of their own, as a user starts them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples import binary_classification, finetune_hf, transfer_learning

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


# -- mnist ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ranks", "num_epochs"), [pytest.param(4, 3, marks=pytest.mark.slow), (2, 1)]
)
def test_mnist(num_ranks: int, num_epochs: int) -> None:
    """Falling losses, those of one process, and each rank keeps its share."""
    epochs = f"--epochs={num_epochs}"
    plain, shown = (run("examples/mnist.py", f"--ranks={n}", epochs) for n in (1, num_ranks))
    expected, losses = ([float(x) for x in re.findall(r"loss (\S+)", s)] for s in (plain, shown))
    assert len(losses) == num_epochs
    assert losses == sorted(losses, reverse=True)
    assert losses == pytest.approx(expected, abs=1e-5)
    for kind in ("params", "grads", "optimizer state"):
        assert f"this rank keeps {1 / num_ranks:.0%} of the {kind}" in shown
        assert f"this rank keeps 100% of the {kind}" in plain


# -- binary_classification ------------------------------------------------------------------------


def test_binary_classification(tmp_path: Path) -> None:
    shown = run(
        "examples/binary_classification.py", "--width=384", "--steps=3", "--ram=112MiB",
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


# -- simple_zero ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_simple_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPS", "6")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    shown = run(*launcher, "examples/simple_zero.py")
    losses = [float(loss) for loss in re.findall(r"^step .* loss ([\d.]+)$", shown, re.MULTILINE)]
    assert len(losses) == 2
    assert losses[1] < 0.6 * losses[0], "nothing was learnt"
    for rank in (0, 1):
        assert (
            f"rank {rank}: by hand and with zeepo: equal bit for bit (largest difference 0" in shown
        )


def test_simple_zero_is_simple() -> None:
    assert len((ROOT / "examples" / "simple_zero.py").read_text().splitlines()) < 80


# -- gpt_bigger_than_ram --------------------------------------------------------------------------


@pytest.mark.slow
def test_gpt_bigger_than_ram(tmp_path: Path) -> None:
    shown = run(
        "examples/gpt_bigger_than_ram.py", "--layers=14", "--width=256", "--length=32",
        "--steps=3", "--ram=140MiB", f"--disk={tmp_path}",
    )  # fmt: skip
    losses = [float(loss) for loss in re.findall(r"^step .* loss ([\d.]+) ", shown, re.MULTILINE)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 0.5, "nothing was learnt"
    assert "budget 140.0 MiB" in shown
    assert "least ram: " in shown
    grew = re.search(r"memory grew by (\d+) MiB at most; ram was 140MiB, the state (\d+)", shown)
    assert grew
    assert int(grew[1]) < 1.1 * 140 < int(grew[2])
    assert list(tmp_path.iterdir()) == []


# -- finetune_hf ----------------------------------------------------------------------------------


def test_finetune_hf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, tuned, disk = (tmp_path / name for name in ("base", "tuned", "disk"))
    disk.mkdir()
    finetune_hf.main([f"--make-model={base}", "--width=128", "--layers=2"])
    small = ["--steps=10", "--length=32", "--ram=250MiB", f"--disk={disk}"]
    finetune_hf.main([str(base), str(tuned), *small])
    shown = capsys.readouterr().out
    before, after = (
        float(re.search(rf"perplexity {when}: ([\d.]+)", shown)[1])  # type: ignore[index]
        for when in ("before", "after")
    )
    assert before > 200, "a model with random values hesitates between all bytes"
    assert after < 0.6 * before
    rates = [float(rate) for rate in re.findall(r" lr (.*)$", shown, re.MULTILINE)]
    assert len(rates) == 2
    assert rates[0] > 2 * rates[1] > 0
    _, judge = finetune_hf.load_text()
    model = AutoModelForCausalLM.from_pretrained(tuned)
    assert f"{finetune_hf.perplexity(model, judge, 32):.2f}" == f"{after:.2f}"
    assert list(disk.iterdir()) == []


# -- transfer_learning ----------------------------------------------------------------------------


def test_transfer_learning(capsys: pytest.CaptureFixture[str]) -> None:
    transfer_learning.main(["--channels=16", "--epochs=5"])
    shown = capsys.readouterr().out
    assert "parameters equal to plain PyTorch's bit for bit: yes" in shown
    right = [float(share) for share in re.findall(r"([\d.]+)% right", shown)]
    pretrained, untrained, plain, under_zeepo = right
    assert pretrained > 90
    assert plain == under_zeepo > untrained + 20
    backbone, head = (
        int(number.replace(",", ""))
        for number in re.findall(r"has ([\d,]+) bytes of parameters", shown)
    )
    held, state, of = re.search(  # type: ignore[union-attr]
        r"held ([\d,]+) bytes of parameters at the end,\s+([\d,]+) bytes of .* of (\[.*\])", shown
    ).groups()
    assert int(held.replace(",", "")) == backbone + head
    assert int(state.replace(",", "")) == 2 * head, "AdamW keeps two moments of what trains"
    assert of == "['1.weight', '1.bias']"


# -- README ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_readme_shows_the_program_and_its_command(program: Path) -> None:
    readme = (ROOT / "examples" / "README.md").read_text()
    section = re.search(rf"^## {program.name}$(.*?)(?=^## |\Z)", readme, re.MULTILINE | re.DOTALL)
    assert section
    assert re.search(rf"^\$ .*examples/{program.name}.*\n.+", section[1], re.MULTILINE)
