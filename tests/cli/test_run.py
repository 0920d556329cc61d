"""`zeepo run` as a user types it, on one host."""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.launching import (
    CLUSTER,
    SECONDS,
    commands_in,
    launch,
    losses_expected,
    losses_printed,
    outcome_of,
    started,
)
from zeepo.cli import main, run
from zeepo.doctor.machine import num_cores
from zeepo.units import GiB

TELL = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "ZEEPO_RAM", "OMP_NUM_THREADS")
told = {"arguments": sys.argv[1:], **{name: os.environ.get(name) for name in names}}
with open(f"told{os.environ['RANK']}.json", "w") as file:
    json.dump(told, file)
"""

TRAIN = """
import os, pickle, sys
import torch.distributed as dist
from tests.dist.training import under_ddp, under_zeepo
dist.init_process_group("gloo")
found = under_ddp() if sys.argv[1] == "ddp" else under_zeepo(3, None, {})
with open(f"{sys.argv[1]}{dist.get_rank()}.pickle", "wb") as file:
    pickle.dump({"seen": found["seen"], "values": found["values"]}, file)
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


# ---- Training


@pytest.mark.slow
def test_the_example_trains_as_one_process_does() -> None:
    (command,) = [line for line in commands_in(CLUSTER / "README.md") if "--nproc 2 --ram" in line]
    done = launch("bash", "-c", command, cwd=CLUSTER)
    assert done.status == 0, done.err
    assert losses_printed(done.out, 2) == losses_expected(2, 5)[0]
    assert "OMP_NUM_THREADS" not in done.err
    assert "num_gpus" not in done.err, "nobody asked for a number"


@pytest.mark.slow
def test_losses_parameters_and_state_are_those_of_ddp(script: Path) -> None:
    """By `zeepo run`, and by torchrun without it: nothing needs zeepo's command."""
    script.write_text(TRAIN)
    folder = script.parent

    def trained(name: str, *command: str) -> list[dict[str, Any]]:
        done = launch(*command, str(script), name, cwd=folder)
        assert done.status == 0, done.err
        return [pickle.loads((folder / f"{name}{rank}.pickle").read_bytes()) for rank in (0, 1)]

    plain = trained("ddp", "torchrun", "--standalone", "--nproc-per-node", "2")
    ours = trained("run", "zeepo", "run", "--nproc", "2")
    bare = trained("torchrun", "torchrun", "--standalone", "--nproc-per-node", "2")
    assert plain[0]["seen"] != plain[1]["seen"]  # each rank has batches of its own
    assert plain[0]["values"] == plain[1]["values"]
    assert ours == plain
    assert bare == plain


# ---- What the script is given


def told(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"told{rank}.json").read_text())
    return found


def test_ranks_share_the_budget_and_the_cores_and_get_their_arguments(script: Path) -> None:
    script.write_text(TELL)
    arguments = ["--ram", "7GiB", "plain", "--", "-m", "--nproc=5", ""]
    done = launch(
        *["zeepo", "run", "--nproc", "3", "--ram", "1GiB", script.name, *arguments],
        cwd=script.parent,
        ZEEPO_RAM="5GiB",
    )
    assert (done.status, done.out, done.err) == (0, "", "")
    for rank in range(3):
        assert told(script.parent, rank) == {
            "arguments": arguments,
            "RANK": str(rank),
            "WORLD_SIZE": "3",
            "ZEEPO_RAM": str(GiB // 3),
            "OMP_NUM_THREADS": str(max(1, num_cores() // 3)),
        }


@pytest.mark.slow
def test_a_module_and_what_the_user_set(script: Path) -> None:
    script.write_text(TELL)
    done = launch(
        *["zeepo", "run", "--nproc", "2", "-m", "script", "-m"],
        cwd=script.parent,
        OMP_NUM_THREADS="7",
        ZEEPO_RAM="5GiB",
    )
    assert done.status == 0, done.err
    found = told(script.parent, 1)
    assert found["arguments"] == ["-m"]
    assert found["OMP_NUM_THREADS"] == "7"
    assert found["ZEEPO_RAM"] == "5GiB"


@pytest.mark.parametrize(
    ("accelerators", "ranks", "says"),
    [(0, 1, "has none"), (1, 1, "has one accelerator"), (4, 4, "has 4 accelerators")],
)
def test_one_rank_for_each_accelerator(
    script: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    accelerators: int,
    ranks: int,
    says: str,
) -> None:
    script.touch()
    seen = []
    monkeypatch.setattr("torch.accelerator.device_count", lambda: accelerators)
    monkeypatch.setattr(run, "_start", lambda launch, options: seen.append(launch) or 0)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["run", str(script)]) == 0
    assert [launch.num_ranks for launch in seen] == [ranks]
    assert says in capsys.readouterr().err


# ---- How it ends


def test_a_failing_rank_is_shown_and_its_status_is_ours(script: Path) -> None:
    script.write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    try:\n"
        "        raise KeyError('no such sample')\n"
        "    except KeyError:\n"
        "        import traceback; traceback.print_exc(); sys.exit(5)\n"
        "time.sleep(600)\n"
    )
    before = time.monotonic()
    done = launch("zeepo", "run", "--nproc", "2", script.name, cwd=script.parent)
    assert time.monotonic() - before < SECONDS / 2
    assert done.status == 5
    assert "KeyError: 'no such sample'" in done.err
    assert 'script.py", line 4' in done.err
    assert "zeepo run: rank 1 (process" in done.err
    assert "ended with status 5" in done.err
    assert 'api.py", line' not in done.err  # no traceback of the launcher's own


@pytest.mark.slow
def test_an_exception_is_shown_and_a_killed_rank_has_a_shells_status(script: Path) -> None:
    script.write_text("raise ValueError('bad data')\n")
    done = launch("zeepo", "run", "--nproc", "1", script.name, cwd=script.parent)
    assert done.status == 1
    assert "ValueError: bad data" in done.err
    script.write_text("import os; os.kill(os.getpid(), 9)\n")
    done = launch("zeepo", "run", "--nproc", "1", script.name, cwd=script.parent)
    assert done.status == 128 + signal.SIGKILL
    assert "ended with SIGKILL" in done.err


@pytest.mark.slow
def test_ranks_start_anew_after_a_failure(script: Path) -> None:
    script.write_text(
        "import os, sys\n"
        "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "open(f'attempt{attempt}.{os.environ[\"RANK\"]}', 'w').close()\n"
        "sys.exit(3 if attempt == '0' and os.environ['RANK'] == '0' else 0)\n"
    )
    command = ["zeepo", "run", "--nproc", "2", "--max-restarts", "1", script.name]
    done = launch(*command, cwd=script.parent)
    assert done.status == 0, done.err
    assert {"attempt0.0", "attempt1.0", "attempt1.1"} <= set(os.listdir(script.parent))
    assert launch("zeepo", "run", "--nproc", "2", script.name, cwd=script.parent).status == 3


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_every_rank(script: Path, number: signal.Signals) -> None:
    script.write_text(
        "import os, time\n"
        "with open(f'new.{os.environ[\"RANK\"]}', 'w') as file:\n"
        "    file.write(str(os.getpid()))\n"
        "os.rename(file.name, f'process.{os.environ[\"RANK\"]}')\n"
        "time.sleep(600)\n"
    )
    files = [script.parent / f"process.{rank}" for rank in range(2)]
    with started(["zeepo", "run", "--nproc", "2", script.name], script.parent) as program:
        give_up = time.monotonic() + SECONDS
        while not all(file.exists() for file in files):
            assert program.poll() is None
            assert time.monotonic() < give_up
            time.sleep(0.05)
        ranks = [int(file.read_text()) for file in files]
        program.send_signal(number)
        done = outcome_of(program)
    assert done.status == 128 + number
    assert f"ended by {number.name}" in done.err
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)


# ---- What is refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--nproc", "0"], "--nproc 0: expected a whole number, at least 1"),
        (["--nproc=-2"], "--nproc -2: expected a whole number"),
        (["--nproc", "gpu"], "--nproc gpu: expected a whole number"),
        (["--nproc", "1", "--ram", "much"], "--ram much: cannot read 'much' as bytes"),
        (["--nproc", "2", "--ram", "1"], "--ram 1: nothing is left for each of 2 ranks"),
        (["--nproc", "1", "--max-restarts", "x"], "--max-restarts x: expected a whole number"),
        (["--nproc", "1", "--nnodes", "2"], "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
        (["--nproc", "1", "--nnodes", "3:2"], "--nnodes 2: expected a whole number, at least 3"),
        (["--nproc", "1", "--nnodes", "2", "--rdzv-endpoint", "a"], "expected HOST:PORT"),
        (["--nproc", "1", "--nnodes", "2", "--rdzv-endpoint", "a:0"], "expected HOST:PORT"),
        (["--nproc", "1", "--nnodes", "2", "--rdzv-endpoint", "a:b"], "expected HOST:PORT"),
        (["--nproc", "1", "--nnodes", "2", "--rdzv-endpoint", "fe80::1:2"], "[ADDRESS]:PORT"),
        (["--nproc", "1", "--node-rank", "0"], "--node-rank is for several hosts"),
        (["--nproc", "1", "--rdzv-endpoint", "a:1"], "--rdzv-endpoint is for several hosts"),
        (
            ["--nproc", "1", "--nnodes", "2", "--rdzv-endpoint", "a:1", "--node-rank", "2"],
            "--node-rank 2: 2 hosts are 0 to 1",
        ),
        (
            ["--nproc", "1", "--nnodes", "1:2", "--rdzv-endpoint", "a:1", "--node-rank", "0"],
            "hosts cannot be numbered when there are 1 to 2",
        ),
    ],
)
def test_refused_before_anything_starts(
    script: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    says: str,
) -> None:
    script.touch()
    monkeypatch.setattr(run, "_start", lambda *_: pytest.fail("it was started"))
    assert main(["run", *options, str(script)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("zeepo run: ")
    assert says in shown
    assert shown.count("\n") == 1


def test_a_script_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--nproc", "1", "absent.py"]) == 2
    assert capsys.readouterr().err == "zeepo run: there is no script absent.py\n"
