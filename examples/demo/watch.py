"""One run of the training program in a process of its own, with its memory sampled from outside.

Every 50 ms the parent reads the child's /proc/<pid>/status: the resident memory of the moment for
the plot, and the kernel's own high-water mark for the figures, so that no short peak is missed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SAMPLE_SECONDS = 0.05
MiB, GiB = 2**20, 2**30  # zeepo.units has them, but would bring torch into the parent


@dataclass
class Run:
    """What is known of one run; grows while it runs."""

    name: str
    num_steps: int
    started: float = field(default_factory=time.monotonic)
    base_bytes: int = 0
    """Resident after `import torch, zeepo`."""
    peak_bytes: int = 0
    """The kernel's high-water mark."""
    samples: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since the start, resident bytes)"""
    phases: list[tuple[str, float, int]] = field(default_factory=list)
    """(name, seconds since the start, high-water mark at that moment)"""
    losses: list[str] = field(default_factory=list)
    """As hexadecimal floats: equal text means equal bits."""
    step_seconds: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """What else the run said of itself."""

    @property
    def growth_bytes(self) -> int:
        return max(0, self.peak_bytes - self.base_bytes)

    def take(self, record: dict[str, Any]) -> None:
        """One line of the child's."""
        seconds = record.pop("clock") - self.started
        if "loss" in record:
            self.losses.append(record["loss"])
            self.step_seconds.append(record["seconds"])
        else:
            self.phases.append((record.pop("phase"), seconds, self.peak_bytes))
            self.base_bytes = record.pop("base", self.base_bytes)
            self.facts |= record

    def sample(self, pid: int) -> None:
        """Look at the child from outside; nothing is noted once it has ended."""
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return
        lines = dict(line.split(":", 1) for line in status.splitlines())
        if "VmRSS" in lines:  # a child that has ended, but was not yet waited for, has none
            resident, peak = (int(lines[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM"))
            self.samples.append((time.monotonic() - self.started, resident))
            self.peak_bytes = max(self.peak_bytes, peak)


def run_and_watch(
    name: str, num_steps: int, arguments: list[str], changed: Callable[[Run], None]
) -> Run:
    """Train in a child until its end; `changed` is called whenever something new is known."""
    run = Run(name, num_steps)
    command = [sys.executable, "-m", "examples.demo.train", "--run", name, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(SAMPLE_SECONDS):
                run.sample(child.pid)
                changed(run)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            for line in child.stdout or ():
                run.sample(child.pid)
                run.take(json.loads(line))
                changed(run)
        except BaseException:
            child.terminate()
            raise
        finally:
            ended.set()
            watcher.join()
    if child.returncode:
        raise SystemExit(f"the {name} run failed with exit code {child.returncode}; see above")
    return run
