"""`zeepo.init(num_gpus=...)` in a program that was started once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import zeepo
from tests.launch.programs import TRAINING, waiting

SLOW = pytest.mark.slow
SECONDS = 240.0


def clean_environment() -> dict[str, str]:
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {k: v for k, v in os.environ.items() if k not in launchers}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    """Start a program in a folder of its own."""
    processes = []

    def run(text: str, *args: str) -> subprocess.Popen[str]:
        script = tmp_path / "script.py"
        script.write_text(text)
        process = subprocess.Popen(
            [sys.executable, str(script), *args],
            cwd=tmp_path,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def pids(folder: Path, num_ranks: int = 3) -> list[int]:
    """Of all ranks, once they have said so."""
    deadline = time.monotonic() + SECONDS
    files = [folder / f"pid{rank}" for rank in range(num_ranks)]
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [int(file.read_text()) for file in files]


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def wait_until_gone(found: list[int], seconds: float) -> float:
    started = time.monotonic()
    while any(map(is_alive, found)):
        assert time.monotonic() - started < seconds, "a rank outlives the program"
        time.sleep(0.02)
    return time.monotonic() - started


# 5 x 16 + 1 or 2: the last batch has fewer samples than there are ranks.
@pytest.mark.parametrize(
    ("num_ranks", "num_samples"),
    [(2, 81), *(pytest.param(*sizes, marks=SLOW) for sizes in ((3, 82), (4, 82), (2, 87)))],
)
def test_like_one_process(start, num_ranks: int, num_samples: int) -> None:  # type: ignore[no-untyped-def]
    found = []
    for ranks in (1, num_ranks):
        process = start(TRAINING, str(ranks), str(num_samples))
        out, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, err
        found.append(out.splitlines())
    (*plain, plain_stats, plain_end), (*losses, stats, end) = found
    assert len(losses) == len(plain) == 12
    for loss, expected in zip(losses, plain, strict=True):
        assert float.fromhex(loss) == pytest.approx(float.fromhex(expected), abs=1e-6)
    assert end.split()[1] == plain_end.split()[1] == str(num_samples), "whole again after close"
    total, expected_total = (float.fromhex(text.split()[0]) for text in (end, plain_end))
    assert total == pytest.approx(expected_total, abs=1e-5)
    (seen, kept), (_, whole) = map(str.split, (stats, plain_stats))
    assert int(seen) == num_samples, "an evaluation sees every sample"
    assert int(kept) <= int(whole) / num_ranks + 64 * 5
    assert f"num_gpus={num_ranks}" in err
    assert "share its" in err


@SLOW
def test_a_script_that_forgets_to_close(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Rank 0 may still need the others' parameters; and batches may be taken ahead of their use."""
    loop = """it = iter(loader)
    ahead = next(it, None)
    while ahead is not None:
        (x, y), ahead = ahead, next(it, None)"""
    text = TRAINING.replace("for x, y in loader:\n        optimizer", loop + "\n        optimizer")
    assert text != TRAINING
    end = text.index("with torch.no_grad")
    text = text[:end] + "import os\nif os.environ.get('RANK', '0') == '0':\n"
    text += "    time.sleep(1)\n    torch.save(model.state_dict(), f'model{num_ranks}.pt')\n"
    for num_ranks in (1, 2):
        process = start(text, str(num_ranks), "87")
        _, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, err
    one, two = (torch.load(tmp_path / f"model{n}.pt") for n in (1, 2))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-6, rtol=1e-5)


@SLOW
def test_other_ranks_print_nothing_and_end_with_the_first(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    process = start(waiting("break"), "{}")
    found = pids(tmp_path)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert out == "ready\n"
    assert re.findall(r"I am rank (\d)", err) == ["0"]
    wait_until_gone(found, 1.0)


def test_one_traceback_the_right_one(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    act = "if rank == 2: raise ValueError('no more data')"
    process = start(waiting(act), f"dict(disk={str(tmp_path)!r}, stage=2)")
    found = pids(tmp_path)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "zeepo: rank 2 failed" in err
    assert err.count("Traceback (most recent call last)") == 1, err
    assert err.rstrip().endswith("ValueError: no more data")
    wait_until_gone(found, 1.0)
    assert not list(tmp_path.glob("zeepo-scratch-*"))


@SLOW
def test_the_first_ranks_own_exception(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    process = start(waiting("if rank == 0: raise ValueError('mine')"), "{}")
    found = pids(tmp_path)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert err.count("Traceback (most recent call last)") == 1, err
    assert err.rstrip().endswith("ValueError: mine")
    wait_until_gone(found, 3.0)


@SLOW
def test_a_rank_that_fails_after_the_end_is_not_lost(start) -> None:  # type: ignore[no-untyped-def]
    text = waiting("break") + "\nif rank == 1: sys.exit(7)\n"
    process = start(text, "{}")
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 7, err


@pytest.mark.parametrize("whom", ["group", pytest.param("first", marks=SLOW)])
def test_interrupted(start, tmp_path: Path, whom: str) -> None:  # type: ignore[no-untyped-def]
    """Ctrl-C in a terminal reaches every process; `kill -INT` only one."""
    process = start(waiting(pause="time.sleep(0.01)"), f"dict(disk={str(tmp_path)!r})")
    found = pids(tmp_path)
    time.sleep(0.5)
    (os.killpg if whom == "group" else os.kill)(process.pid, signal.SIGINT)
    wait_until_gone(found, 20.0)
    _, err = process.communicate()
    assert process.returncode == -signal.SIGINT
    assert err.count("Traceback (most recent call last)") <= 1, err
    assert "KeyboardInterrupt" in err
    assert not list(tmp_path.glob("zeepo-scratch-*"))


@SLOW
def test_killed(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    process = start(waiting(pause="time.sleep(0.01)"), "{}")
    found = pids(tmp_path)
    process.kill()
    wait_until_gone(found, 5.0)


@SLOW
def test_another_rank_is_killed(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    process = start(waiting(pause="time.sleep(0.01)"), "{}")
    found = pids(tmp_path)
    os.kill(found[1], signal.SIGKILL)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "rank 1 failed:\nit was ended by SIGKILL (out of memory?)" in err
    wait_until_gone(found, 1.0)


@SLOW
def test_a_rank_that_never_comes(start) -> None:  # type: ignore[no-untyped-def]
    text = "import os, sys\nif os.environ.get('RANK') == '1': sys.exit('no licence')\n" + waiting()
    process = start(text, "{}")
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert err.endswith("zeepo: rank 1 failed:\nno licence\n")


@SLOW
def test_a_sampler_of_its_own_randomness_is_found_out(start) -> None:  # type: ignore[no-untyped-def]
    text = TRAINING.replace(
        "shuffle=True", "sampler=sorted(range(num_samples), key=lambda i: os.urandom(4))"
    )
    process = start("import os\n" + text, "2", "40")
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "rank 1 drew another batch than rank 0" in err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["-c", "{}"], "it came with -c"),
        pytest.param(["-"], "it was not read from a file", marks=SLOW),
        pytest.param(["-i", "script.py"], "an interactive session cannot be run again", marks=SLOW),
    ],
)
def test_what_cannot_be_run_again_is_refused(
    tmp_path: Path, command: list[str], words: str
) -> None:
    text = "import zeepo; zeepo.init(num_gpus=2)"
    if "-i" in command:
        (tmp_path / "script.py").write_text("import sys; sys.ps1 = ''\n" + text)
    done = subprocess.run(
        [sys.executable, *(part.replace("{}", text) for part in command)],
        cwd=tmp_path,
        env=clean_environment(),
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "UnsupportedError: num_gpus=2: zeepo starts the other ranks by running" in done.stderr
    assert words in done.stderr
    assert "zeepo run --nproc 2 script.py" in done.stderr


def test_refused_inside_a_test_run() -> None:
    with pytest.raises(zeepo.UnsupportedError, match="that would be the whole test run"):
        zeepo.init(num_gpus=2)


@SLOW
def test_under_a_launcher_the_launcher_counts(start, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """And loaders are left alone: each rank sees all of its own data."""
    script = tmp_path / "script.py"
    script.write_text(TRAINING + "\nprint(session.is_closed)\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(str(script), "3", "40"),
        ],
        cwd=tmp_path,
        env={**clean_environment(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "num_gpus=3, but the launcher has started 2 ranks: that counts." in done.stderr
    assert len(re.findall(r"0x1\.", done.stdout)) == 2 * (2 * 3 + 1)
