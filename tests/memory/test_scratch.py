"""Scratch folders: gone when their process is, and never anyone else's files."""

import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from zeepo.memory.disk_tier import NUM_THREADS, DiskTier
from zeepo.memory.scratch import ScratchFolder, remove_leftovers

HEADER = """
import os, sys, time
from pathlib import Path
from zeepo.memory.disk_tier import DiskTier
tier = DiskTier([Path(sys.argv[1])])
extent = tier.allocate("chunk", 1 << 20)
tier.write(extent, [(0, memoryview(bytes(1 << 20)))]).result()
"""


def start(script: str, directory: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", HEADER + script, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_live_process_is_left_alone_and_a_killed_ones_leftovers_go(tmp_path: Path) -> None:
    with start("print('ready', flush=True); sys.stdin.read()", tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (folder,) = tmp_path.iterdir()
        assert folder.name.startswith(f"zeepo-scratch-{process.pid}-")
        assert sorted(path.name for path in folder.iterdir()) == [
            "chunks.bin", "lock", "owner.json",
        ]  # fmt: skip
        assert json.loads((folder / "owner.json").read_text())["pid"] == process.pid
        with_live = DiskTier([tmp_path])
        assert folder.exists()
        with_live.close()
        assert list(tmp_path.iterdir()) == [folder]
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (folder / "chunks.bin").exists()
        after = DiskTier([tmp_path])
        assert after.directories[0].removed_leftovers == [folder]
        assert not folder.exists()
        after.close()


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("raise ValueError('user error')", 1),
        ("for _ in range(64): tier.write(extent, [(0, memoryview(bytes(1 << 20)))])", 0),
        # A forked child that ends normally must not take its parent's files with it.
        (
            """
pid = os.fork()
if pid == 0:
    try:
        tier.read(extent, memoryview(bytearray(1 << 20)))
    except AssertionError as error:
        assert "forked child" in str(error)
        tier.close()
        tier.directories[0].folder.remove()
        sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert len(list(Path(sys.argv[1]).glob("*/chunks.bin"))) == 1
tier.read(extent, memoryview(bytearray(1 << 20))).result()
""",
            0,
        ),
    ],
    ids=["exception", "busy", "fork"],
)
def test_nothing_is_left_when_the_interpreter_ends(tmp_path: Path, script: str, code: int) -> None:
    with start(script, tmp_path) as process:
        _, errors = process.communicate()
    assert process.returncode == code, errors
    assert ("user error" in errors) == (code == 1)
    assert list(tmp_path.iterdir()) == []


def test_a_tier_that_becomes_garbage_cleans_up(tmp_path: Path) -> None:
    tier = DiskTier([tmp_path])
    extent = tier.allocate("chunk", 1 << 20)
    tier.write(extent, [(0, memoryview(bytes(1 << 20)))]).result()
    assert len(list(tmp_path.iterdir())) == 1
    thread_names = [thread.name for thread in tier._queue._threads]
    del tier, extent
    # A thread may hold the last transfer for a moment after its future is done.
    deadline = time.monotonic() + 60
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []
    assert thread_names == [f"zeepo-disk-{number}" for number in range(NUM_THREADS)]


def make_leftover(folder: Path) -> None:
    folder.mkdir()
    (folder / "lock").touch()
    (folder / "chunks.bin").write_bytes(b"x" * 100)
    (folder / "owner.json").write_text('{"pid": 1, "start_time": 0, "host": "here"}')


def test_only_our_own_leftovers_are_removed(tmp_path: Path) -> None:
    random_part = "0123456789abcdef"
    ours = tmp_path / f"zeepo-scratch-1-{random_part}"
    make_leftover(ours)
    kept = [tmp_path / name for name in ("mine", f"zeepo-scratch-2-{random_part}-old")]
    for number in range(3, 9):
        kept.append(tmp_path / f"zeepo-scratch-{number}-{random_part}")
    extra_file, no_owner, bad_owner, linked, with_folder, no_lock = kept[2:]
    for folder in kept:
        make_leftover(folder)
    (extra_file / "thesis.tex").touch()
    (no_owner / "owner.json").unlink()
    (bad_owner / "owner.json").write_text("[]")
    precious = tmp_path / "precious"
    precious.write_text("data")
    (linked / "chunks.bin").unlink()
    (linked / "chunks.bin").symlink_to(precious)
    (with_folder / "chunks.bin").unlink()
    (with_folder / "chunks.bin").mkdir()
    (no_lock / "lock").unlink()
    elsewhere = tmp_path / "elsewhere"
    make_leftover(elsewhere)
    link = tmp_path / f"zeepo-scratch-99-{random_part}"
    link.symlink_to(elsewhere)
    kept += [elsewhere, link, precious]
    tier = DiskTier([tmp_path])
    assert tier.directories[0].removed_leftovers == [ours]
    tier.close()
    assert sorted(tmp_path.iterdir()) == sorted(kept)
    assert precious.read_text() == "data"
    assert (elsewhere / "chunks.bin").exists()


def test_a_foreign_file_in_our_folder_survives_close(tmp_path: Path) -> None:
    tier = DiskTier([tmp_path])
    folder = tier.directories[0].folder.path
    (folder / "notes.txt").write_text("mine")
    tier.close()
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_neighbour_that_looks_at_a_new_folder_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank looks for leftovers between the making of our lock file and its locking."""
    open_file = os.open
    timers = []

    def open_and_be_looked_at(path: Any, *args: Any, **kwargs: Any) -> int:
        fd = open_file(path, *args, **kwargs)
        if Path(path).name == "lock" and not timers:
            looking = open_file(path, os.O_RDWR)
            fcntl.flock(looking, fcntl.LOCK_EX | fcntl.LOCK_NB)
            timers.append(threading.Timer(0.1, os.close, [looking]))
            timers[0].start()
        return fd

    monkeypatch.setattr(os, "open", open_and_be_looked_at)
    folder = ScratchFolder(tmp_path)
    assert len(timers) == 1
    assert remove_leftovers(tmp_path) == []
    folder.remove()
    assert list(tmp_path.iterdir()) == []
