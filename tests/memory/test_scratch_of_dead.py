"""The scratch folder of a process that is gone is removed; of one that lives, never."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from zeepo.memory.scratch import ScratchFolder, remove_of_dead


def _fork_owner(directory: Path) -> int:
    """A process that has a scratch folder and waits to be killed."""
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        ScratchFolder(directory)
        os.write(done, b"!")
        time.sleep(60.0)
        os._exit(0)
    assert os.read(ready, 1) == b"!"
    os.close(ready)
    os.close(done)
    return pid


def test_only_the_dead_ones_folder_goes(tmp_path: Path) -> None:
    killed, living = _fork_owner(tmp_path), _fork_owner(tmp_path)
    try:
        (of_killed,) = tmp_path.glob(f"zeepo-scratch-{killed}-*")
        (of_living,) = tmp_path.glob(f"zeepo-scratch-{living}-*")
        os.kill(killed, signal.SIGKILL)
        assert remove_of_dead(of_killed, 5.0)
        assert not of_killed.exists()
        assert not remove_of_dead(of_killed, 0.0)  # another was faster
        assert not remove_of_dead(of_living, 0.1)
        assert (of_living / "owner.json").exists()
    finally:
        os.kill(living, signal.SIGKILL)
        os.waitpid(killed, 0)
        os.waitpid(living, 0)


def test_a_folder_that_is_not_scratch_stays(tmp_path: Path) -> None:
    theirs = tmp_path / "results"
    theirs.mkdir()
    (theirs / "lock").write_text("")
    assert not remove_of_dead(theirs, 0.0)
    assert (theirs / "lock").exists()
