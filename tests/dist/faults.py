"""Ranks that are processes of their own, to be killed, stopped, cut off, and looked at afterwards.

A nursery is a process that has imported torch and zeepo and forks ranks on demand: each begins at
once and ends as a script does, with its traceback on stderr, its exit code and all that runs at the
end of an interpreter. Where a rank is, it writes into a small shared file; who kills it reads there
where it was.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
PHASES = (
    "start",
    "outside",
    "forward",
    "backward",
    "reduction",
    "optimizer.step",
    "closing",
    "end",
)
_RECORD = "<iid"


class Whereabouts:
    """Step, phase and time of a rank, readable by others at any moment."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(struct.calcsize(_RECORD)))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    def write(self, step: int, phase: str) -> None:
        struct.pack_into(_RECORD, self._memory, 0, step, PHASES.index(phase), time.monotonic())

    def read(self) -> tuple[int, str, float]:
        step, phase, when = struct.unpack_from(_RECORD, self._memory, 0)
        return step, PHASES[phase], when


@dataclass
class Rank:
    """One rank that was started."""

    number: int
    pid: int
    folder: Path
    nursery: Nursery
    exit_code: int | None = None

    def __post_init__(self) -> None:
        self._handle = os.pidfd_open(self.pid)
        self.whereabouts = Whereabouts(self.folder / f"whereabouts{self.number}")

    @property
    def stderr(self) -> str:
        return (self.folder / f"stderr{self.number}").read_text()

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / f"result{self.number}").read_text())
        return found

    def signal(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._handle, number)

    def wait(self, seconds: float) -> bool:
        """Whether it has ended by then; `exit_code` is known if so."""
        if self.exit_code is None:
            if not select.select([self._handle], [], [], seconds)[0]:
                return False
            self.exit_code = self.nursery.ask({"wait": self.pid})["code"]
            os.close(self._handle)
        return True

    def wait_until(self, step: int, phase: str, seconds: float = 60.0) -> None:
        """Until it is there, or further."""
        deadline = time.monotonic() + seconds
        while True:
            here, in_phase, _ = self.whereabouts.read()
            if (here, PHASES.index(in_phase)) >= (step, PHASES.index(phase)):
                return
            if time.monotonic() > deadline or self.wait(0.0):
                raise TimeoutError(f"rank {self.number} is at {here} {in_phase}:\n{self.stderr}")
            time.sleep(0.0005)


class Nursery:
    """Forks ranks; a context manager, at whose end those that still live are killed."""

    def __enter__(self) -> Nursery:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.dist.fault_programs"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment,
            text=True,
        )
        self._ranks: list[Rank] = []
        return self

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def start(
        self, num_ranks: int, folder: Path, program: str, *, hosts: Any = None, **options: Any
    ) -> list[Rank]:
        """Ranks that run a function of `fault_programs`; `hosts`: each rank's namespace."""
        folder.mkdir(parents=True, exist_ok=True)
        ranks = []
        for number in range(num_ranks):
            Whereabouts(folder / f"whereabouts{number}")
            order = {"rank": number, "num_ranks": num_ranks, "folder": str(folder)}
            order |= {"program": program, "options": options}
            order["host"] = None if hosts is None else hosts[number]
            ranks.append(Rank(number, self.ask(order)["pid"], folder, self))
        self._ranks += ranks
        return ranks

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for rank in self._ranks:
            if rank.exit_code is None and not rank.wait(0.0):
                rank.signal(signal.SIGKILL)
                rank.wait(10.0)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10.0)
        self._process.stdout.close()


def scratch_left(disk: Path) -> list[str]:
    """What is in a disk directory that ranks have used."""
    return sorted(str(path.relative_to(disk)) for path in disk.rglob("*"))


def sockets_of(pids: list[int]) -> int:
    """Sockets that processes have open; one that has ended has none."""
    count = 0
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").glob("*"):
            count += os.readlink(entry).startswith("socket:")
    return count
