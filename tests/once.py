"""What is dear is done once in a test run, also when several workers need it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], None]) -> Path:
    """A folder that `fill` has filled; the worker that comes second waits for the first."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # then it is this worker's own, inside everybody's
        root = root.parent
    folder, done = root / name, root / f"{name}.done"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder.mkdir(exist_ok=True)
            fill(folder)
            done.touch()
    return folder
