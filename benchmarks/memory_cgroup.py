"""A memory cgroup (version 1 or 2) for one child process: the system's own proof of a budget."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Names:
    """What the two versions call the same things."""

    limit: str
    usage: str
    peak: str


VERSION_1 = Names("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes")
VERSION_2 = Names("memory.max", "memory.current", "memory.peak")


class MemoryCgroup:
    """A new cgroup below our own, removed at the end of the block."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        top, self.names = _own_cgroup()
        self.path = top / f"zeepo-{os.getpid()}-{time.monotonic_ns()}"
        self._limit_bytes = limit_bytes

    def __enter__(self) -> MemoryCgroup:
        self.path.mkdir()
        if self._limit_bytes is not None:
            self.set_limit(self._limit_bytes)
        swappiness = self.path / "memory.swappiness"
        if swappiness.exists():
            swappiness.write_text("0")
        return self

    def __exit__(self, *_: object) -> None:
        for _attempt in range(50):  # the kernel needs a moment to let go of a dead process
            with contextlib.suppress(OSError):
                self.path.rmdir()
                return
            time.sleep(0.1)
        raise RuntimeError(f"{self.path} cannot be removed: something still runs in it")

    def set_limit(self, limit_bytes: int) -> None:
        (self.path / self.names.limit).write_text(str(limit_bytes))

    def peak_bytes(self) -> int:
        """The most that was ever charged, as the kernel counted it."""
        return int((self.path / self.names.peak).read_text())

    def usage_bytes(self) -> int:
        return int((self.path / self.names.usage).read_text())

    def kill_all(self) -> None:
        """End every process that is still in the cgroup."""
        for pid in (self.path / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def start(self, command: Sequence[str], **options: object) -> subprocess.Popen[str]:
        """Start a command inside the cgroup."""
        join = f'echo $$ > "{self.path}/cgroup.procs" && exec "$@"'
        return subprocess.Popen(["sh", "-c", join, "sh", *command], text=True, **options)  # type: ignore[call-overload,no-any-return]


def _own_cgroup() -> tuple[Path, Names]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return ROOT / "memory" / path.lstrip("/"), VERSION_1
    return ROOT / Path("/proc/self/cgroup").read_text().split("::")[1].strip().lstrip(
        "/"
    ), VERSION_2
