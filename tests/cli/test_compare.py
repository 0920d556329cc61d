"""`zeepo compare` on small programs, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zeepo.cli import main

PROGRAM = """
import sys, torch, zeepo
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(44, 6), torch.randint(3, (44,)))
loader = DataLoader(data, batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(6, 17), nn.ReLU(), nn.Linear(17, 9), nn.ReLU(), nn.Linear(9, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with zeepo.init(model, optimizer, stage=1, num_gpus=4):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.9f}, score {sum(p.sum().item() for p in model.parameters()):.9f}")
if sys.argv[1:] == ["--fail"]:
    raise ValueError("asked for")
"""


COMMAND = "import sys; from zeepo.cli import main; sys.exit(main())"


def compare(folder: Path, *options: str, text: str = PROGRAM) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(text)
    ours = [option for option in options if option != "--fail"]
    theirs = [option for option in options if option == "--fail"]
    return subprocess.run(
        [sys.executable, "-c", COMMAND, "compare", *ours, "script.py", *theirs],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "ways",
    [
        "disk",
        pytest.param("ddp,stage3", marks=pytest.mark.slow),
        pytest.param("disk,ddp,stage1,stage2,stage3-disk", marks=pytest.mark.slow),
    ],
)
def test_all_ways_give_the_same(tmp_path: Path, ways: str) -> None:
    done = compare(tmp_path, "--seeds=1", f"--ways={ways}", "--metric=score")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "compare.json").read_text())["results"]
    assert [result["way"]["key"] for result in found] == ["plain", *ways.split(",")]
    plain, *others = [result["runs"][0] for result in found]
    for run in others:
        assert run["metric"] == pytest.approx(plain["metric"], abs=1e-6)
        assert 0 < run["seconds"] < 1000
        assert run["peak_bytes"] > 1 << 20
        assert run["torch_version"] == torch.__version__
        assert run["num_threads"] == 1
    for result in found:
        is_zeepo = result["way"]["engine"] == "zeepo"
        assert (result["runs"][0]["ram_bytes"] is not None) == is_zeepo
    assert (tmp_path / "compare.png").read_bytes()[:4] == b"\x89PNG"
    num_ways = len(found)
    assert f"{num_ways} runs of script.py, one after another: {num_ways} ways" in done.stdout
    for result in found:
        assert result["way"]["name"] in done.stdout
    assert {p.name for p in tmp_path.iterdir()} == {"script.py", "compare.json", "compare.png"}


@pytest.mark.slow
def test_a_program_that_does_not_know_zeepo(tmp_path: Path) -> None:
    text = PROGRAM.replace("with zeepo.init(model, optimizer, stage=1, num_gpus=4):", "if True:")
    assert text != PROGRAM
    done = compare(tmp_path, "--seeds=1", "--ways=ddp,stage2", text=text)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "compare.json").read_text())["results"]
    plain, *others = [result["runs"][0]["metric"] for result in found]
    assert others == pytest.approx([plain, plain], abs=1e-6)


@pytest.mark.slow
def test_seeds_differ_and_repeat(tmp_path: Path) -> None:
    done = compare(tmp_path, "--seeds=2", "--ways=plain")
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads((tmp_path / "compare.json").read_text())["results"]
    first, second = [run["metric"] for run in result["runs"]]
    assert first != second
    low, high = sorted(run["seconds"] for run in result["runs"])
    assert f"{low:.1f} to {high:.1f}" in done.stdout


@pytest.mark.slow
def test_the_ram_that_was_given_is_shown(tmp_path: Path) -> None:
    done = compare(tmp_path, "--seeds=1", "--ways=disk", "--ram=321MiB")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "321.0 MiB" in done.stdout
    found = json.loads((tmp_path / "compare.json").read_text())["results"]
    assert [result["runs"][0]["ram_bytes"] for result in found] == [None, 321 << 20]


@pytest.mark.slow
def test_without_a_model_the_disk_ways_get_the_least_too(tmp_path: Path) -> None:
    text = PROGRAM.replace("zeepo.init(model, optimizer, stage=1, num_gpus=4)", "zeepo.init()")
    text = text.replace("loss {loss.item():.9f}", "loss nan")
    assert text.count("zeepo.init()") == text.count("loss nan") == 1
    done = compare(tmp_path, "--seeds=1", "--ways=disk", text=text)
    assert done.returncode == 0, done.stdout + done.stderr
    plain, disk = json.loads((tmp_path / "compare.json").read_text())["results"]
    assert disk["runs"][0]["ram_bytes"] < 200 << 20
    assert plain["runs"][0]["metric"] is None


def test_a_program_that_fails(tmp_path: Path) -> None:
    done = compare(tmp_path, "--seeds=1", "--ways=plain", "--fail")
    assert done.returncode == 1
    assert "ValueError: asked for" in done.stdout
    assert "failed" in done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ram=lots"], "--ram lots"),
        (["--disk=/nowhere"], "is not a folder"),
        (["--out=nowhere/compare"], "its folder does not exist"),
    ],
)
def test_what_cannot_be_is_said_before_training(
    tmp_path: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    assert main(["compare", *options, str(script)]) == 2
    assert words in capsys.readouterr().out
