"""`zeepo verify` as a user runs it: on scripts, in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from zeepo.cli import main
from zeepo.verify.runs import Stage

MODEL = """
import torch
from torch import nn

def build():
    layers = [m for _ in range(4) for m in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(32, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

def train(model, optimizer, num_steps):
    for _ in range(num_steps):
        loss = model(torch.randn(8, 32)).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""

WITHOUT_INIT = """
import sys
from training import build, train
if __name__ == "__main__":
    train(*build(), int(sys.argv[1]))

def job():
    train(*build(), 3)
"""

WITH_INIT = """
import zeepo
from training import build, train
model, optimizer = build()
with zeepo.init(model, optimizer) as session:
    train(model, optimizer, 10)
    assert session.stats()["evictions"] >= 0 and session.plan.explain()
"""


@dataclass(frozen=True)
class Outcome:
    """What the command printed and returned."""

    status: int
    text: str
    progress: str


class Sandbox:
    """A directory of scripts in which the command runs; processes come from a shared stage."""

    def __init__(
        self, directory: Path, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch
    ):
        self._directory = directory
        self._capsys = capsys
        self._patch = patch
        patch.chdir(directory)
        self.write("training.py", MODEL)

    def write(self, name: str, text: str) -> None:
        (self._directory / name).write_text(text)

    def verify(self, *arguments: str, sabotage: str = "") -> Outcome:
        self._patch.setenv("ZEEPO_VERIFY_SABOTAGE", sabotage)
        status = main(["verify", *arguments])
        shown = self._capsys.readouterr()
        return Outcome(status, shown.out, shown.err)


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage
    assert not stage.directory.exists()


@pytest.fixture
def sandbox(
    tmp_path: Path,
    stage: Stage,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Sandbox:
    @contextmanager
    def borrowed() -> Iterator[Stage]:
        try:
            yield stage
        finally:
            stage.stop_runs()

    monkeypatch.setattr("zeepo.cli.verify.Stage", borrowed)
    return Sandbox(tmp_path, capsys, monkeypatch)


def test_the_command_itself(tmp_path: Path) -> None:
    """In a process of its own, with a stage of its own; nothing of it is left."""
    (tmp_path / "training.py").write_text(MODEL)
    (tmp_path / "script.py").write_text(WITHOUT_INIT)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    done = subprocess.run(
        [Path(sys.executable).with_name("zeepo"), "verify", "script.py", "2"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.startswith("PASS  script.py: 2 steps"), done
    assert done.returncode == 0
    assert list(temporary.glob("zeepo*")) == []


def test_a_script_with_its_own_init_passes(sandbox: Sandbox) -> None:
    sandbox.write("script.py", WITH_INIT)
    outcome = sandbox.verify("--steps", "3", "script.py")
    assert outcome.status == 0, outcome
    assert outcome.text.startswith("PASS  script.py: 3 steps")
    assert (
        "params on disk, grads on disk, optimizer_state on disk, activations to disk"
        in outcome.text
    )
    assert "lockstep: step 3" in outcome.progress


def test_options_override_and_arguments_reach_the_script(sandbox: Sandbox) -> None:
    sandbox.write("script.py", WITHOUT_INIT)
    outcome = sandbox.verify("--params", "ram", "--activations", "recompute", "script.py", "2")
    assert outcome.status == 0, outcome
    assert outcome.text.startswith("PASS  script.py: 2 steps")
    assert "params in ram, grads on disk" in outcome.text
    assert "activations recomputed" in outcome.text


def test_a_function_passes(sandbox: Sandbox) -> None:
    sandbox.write("program.py", WITHOUT_INIT)
    outcome = sandbox.verify("program:job")
    assert outcome.status == 0, outcome
    assert outcome.text.startswith("PASS  program:job: 3 steps")


def test_a_difference_is_named_and_bisected(sandbox: Sandbox) -> None:
    sandbox.write("script.py", WITH_INIT)
    outcome = sandbox.verify("--steps", "3", "script.py", sabotage="update.late")
    assert outcome.status == 1, outcome
    lines = [" ".join(line.split()) for line in outcome.text.splitlines()]
    assert lines[0].startswith("FAIL script.py: the first difference is")
    assert lines[1:3] == ["step 2", "phase parameter"]
    assert lines[3].endswith(".weight")
    assert lines[4] == "unit " + lines[3].split()[1].split(".")[0]
    assert "elements differ, first at flat index" in lines[5]
    assert "expected" in lines[5]
    rows = {line for line in lines if line.endswith("same bits")}
    assert rows == {"updates done at once same bits", "everything in ram same bits"}
    assert "The difference disappears with updates done at once; not with" in lines[-1]


def test_a_wrong_gradient_is_seen_before_it_reaches_a_parameter(sandbox: Sandbox) -> None:
    sandbox.write("script.py", WITH_INIT)
    outcome = sandbox.verify("--no-bisect", "script.py", sabotage="zero.keep")
    assert outcome.status == 1, outcome
    lines = [" ".join(line.split()) for line in outcome.text.splitlines()]
    assert lines[1:3] == ["step 2", "phase gradient"]
    assert lines[3] == "tensor 0.weight"


def test_a_script_that_is_not_deterministic_is_not_held_against_zeepo(sandbox: Sandbox) -> None:
    sandbox.write("script.py", "import torch\ntorch.seed()\n" + WITH_INIT)
    outcome = sandbox.verify("--steps", "2", "script.py")
    assert outcome.status == 2, outcome
    assert "script.py is not deterministic" in outcome.text
    assert "FAIL" not in outcome.text


def test_the_error_of_a_script_is_shown_as_it_is(sandbox: Sandbox) -> None:
    sandbox.write("script.py", "def broken():\n    raise KeyError('mine')\nbroken()\n")
    outcome = sandbox.verify("script.py")
    assert outcome.status == 2, outcome
    shown = outcome.text.splitlines()
    assert shown[0] == "The program fails by itself, plainly: KeyError: 'mine'"
    assert shown[1:3] == [
        "Traceback (most recent call last):",
        '  File "script.py", line 3, in <module>',
    ]
    assert shown[-1] == "KeyError: 'mine'"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("print('nothing')", "made no optimizer step"),
        (
            WITH_INIT.replace("optimizer) as", "optimizer, ram='1KiB') as"),
            "zeepo refuses this program",
        ),
    ],
)
def test_what_cannot_be_verified_says_why(sandbox: Sandbox, script: str, message: str) -> None:
    sandbox.write("script.py", script)
    outcome = sandbox.verify("script.py")
    assert outcome.status == 2, outcome
    assert message in outcome.text


def test_a_missing_script_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "nowhere.py"]) == 2
    assert "no script nowhere.py" in capsys.readouterr().out
