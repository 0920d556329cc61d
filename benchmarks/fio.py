"""fio (`apt-get install fio`) on one file: what the disk tier is held against."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

MiB = 1 << 20
BOTH = "read+write"
HUGE_PAGES_OF_MALLOC = "glibc.malloc.hugetlb=1"
"""madvise(MADV_HUGEPAGE) for what malloc maps: huge pages without asking the administrator."""


@dataclass(frozen=True)
class FioWay:
    """One way to run fio."""

    engine: str
    block: str
    jobs: int
    depth: int
    huge_pages: bool

    @property
    def memory_bytes(self) -> int:
        """What is in flight, and so what its buffers take."""
        return int(self.block.removesuffix("M")) * MiB * self.jobs * self.depth

    def __str__(self) -> str:
        memory = ", huge pages" if self.huge_pages else ""
        return f"{self.engine}, {self.block}, {self.jobs} jobs, depth {self.depth}{memory}"


def fio_ways(*, is_short: bool) -> list[FioWay]:
    """psync has no depth: its jobs are its requests in flight."""
    if is_short:
        return [
            FioWay("psync", "4M", 2, 1, True),
            FioWay("libaio", "4M", 1, 4, True),
            FioWay("io_uring", "4M", 1, 4, True),
            FioWay("psync", "4M", 1, 1, False),
            FioWay("io_uring", "4M", 1, 32, True),
        ]
    grid = itertools.product(
        ("psync", "libaio", "io_uring"), ("1M", "4M", "16M"), (1, 2, 4), (1, 4, 16, 32)
    )
    shapes = [shape for shape in grid if shape[0] != "psync" or shape[3] == 1]
    return [FioWay(*shape, is_huge) for shape in shapes for is_huge in (True, False)]


@dataclass(frozen=True)
class Fio:
    """fio on one file that is written in full before anything is measured."""

    path: Path
    size_bytes: int

    def lay_out(self) -> None:
        self._run(self._job("write", FioWay("psync", "4M", 1, 1, True), 0, self.size_bytes), True)

    def bytes_per_second(
        self, ways: dict[str, FioWay], direction: str, seconds: float
    ) -> tuple[float, float]:
        """Of one direction, or of both at once on two halves of the file; and the CPUs taken."""
        timed = ["--time_based", f"--runtime={seconds}"]
        if direction != BOTH:
            way = ways[direction]
            jobs = [*self._job(direction, way, 0, self.size_bytes), *timed]
            return self._run(jobs, way.huge_pages)
        half = self.size_bytes // 2
        jobs: list[str] = []
        for low, one in ((0, "read"), (half, "write")):
            jobs += [*self._job(one, ways[one], low, half), *timed, "--new_group"]
        is_huge = ways["read"].huge_pages or ways["write"].huge_pages
        return self._run(jobs, is_huge)

    @staticmethod
    def _job(direction: str, way: FioWay, offset: int, nbytes: int) -> list[str]:
        """A group of jobs that share `nbytes` of the file."""
        share = nbytes // way.jobs // (16 * MiB) * 16 * MiB
        found = [f"--name={direction}", f"--rw={direction}", f"--ioengine={way.engine}"]
        found += [f"--bs={way.block}", f"--numjobs={way.jobs}", f"--iodepth={way.depth}"]
        return [*found, f"--offset={offset}", f"--offset_increment={share}", f"--size={share}"]

    def _run(self, jobs: list[str], is_huge: bool) -> tuple[float, float]:
        command = ["fio", f"--filename={self.path}", "--direct=1", "--fallocate=none"]
        command += ["--overwrite=1", "--iomem_align=2M", "--output-format=json"]
        environment = dict(os.environ)
        if is_huge:
            environment["GLIBC_TUNABLES"] = HUGE_PAGES_OF_MALLOC
        done = subprocess.run([*command, *jobs], capture_output=True, text=True, env=environment)
        if done.returncode:
            what = (done.stderr or done.stdout)[-300:]
            raise RuntimeError(f"fio failed ({' '.join(jobs)}): {what}")
        found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        sides = [job[one] for job in found for one in ("read", "write")]
        # Jobs that wait for their last requests run longer than others: their sum of bytes per
        # second would count time in which only some of them ran as if all had.
        seconds = max(side["runtime"] for side in sides) / 1000
        cpus = sum(job["usr_cpu"] + job["sys_cpu"] for job in found) / 100
        return sum(side["io_bytes"] for side in sides) / seconds, cpus
