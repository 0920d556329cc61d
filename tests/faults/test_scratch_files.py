"""Scratch files: gone at close and at exit, a crash's leftovers cleaned, others' never touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import zeepo
from tests.faults.small import REPOSITORY, build, run_program, scratch_files, train

OPENING = """
import sys
from pathlib import Path
from tests.faults.small import *
model, optimizer = build()
session = open_at_minimum(model, optimizer, Path(sys.argv[1]))
train(model, optimizer, range(2))
assert len(scratch_files(Path(sys.argv[1]))) >= 3
"""


@pytest.mark.slow  # tests/memory/test_scratch.py has it without a session
def test_exit_without_close_and_uncaught_exceptions(tmp_path: Path) -> None:
    late = "import atexit\natexit.register(lambda: print(float(model.layers[0].bias.sum())))\n"
    done = run_program(OPENING + late, tmp_path)
    assert done.returncode == 0, done.stderr
    assert scratch_files(tmp_path) == []
    done = run_program(OPENING + "raise ValueError('the end')\n", tmp_path)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: the end"), done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # so has it this
def test_leftovers_of_the_killed_and_files_of_the_living(tmp_path: Path) -> None:
    source = OPENING + "print('ready', flush=True)\nsys.stdin.read()\n"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", source, str(tmp_path)],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    killed, living = processes
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        assert len(list(tmp_path.iterdir())) == 2
        killed.send_signal(signal.SIGKILL)
        killed.wait(30)
        (left,) = tmp_path.glob(f"zeepo-scratch-{killed.pid}-*")
        theirs = [p for p in tmp_path.iterdir() if p != left]
        (tmp_path / "mine.txt").write_text("the user's")
        model, optimizer = build()
        with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path):
            train(model, optimizer, range(1))
            assert not left.exists()
            assert all(path.exists() for path in theirs)
        assert sorted(tmp_path.iterdir()) == sorted([*theirs, tmp_path / "mine.txt"])
        living.communicate("", timeout=30)
        assert living.returncode == 0
        assert list(tmp_path.iterdir()) == [tmp_path / "mine.txt"]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
