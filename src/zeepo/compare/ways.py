"""The ways in which one program is trained, and what a run of one tells. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"


@dataclass(frozen=True)
class Way:
    """One way to train."""

    key: str
    """What the command line calls it."""
    name: str
    engine: Literal["plain", "ddp", "zeepo"]
    num_ranks: int
    options: dict[str, Any] = field(default_factory=dict)
    """Of `zeepo.init`."""
    is_on_disk: bool = False


KEYS = ("plain", "disk", "ddp", "stage1", "stage2", "stage3", "stage3-disk")


def all_ways(num_ranks: int) -> list[Way]:
    """Plain first: it is what the others are compared with."""
    ways = [
        Way("plain", "plain PyTorch", "plain", 1),
        Way("disk", "zeepo, 1 rank, disk", "zeepo", 1, is_on_disk=True),
    ]
    if num_ranks > 1:
        ranks = f"{num_ranks} ranks"
        ways.append(Way("ddp", f"DDP, {ranks}", "ddp", num_ranks))
        for stage in (1, 2, 3):
            name = f"zeepo, {ranks}, stage {stage}"
            ways.append(Way(f"stage{stage}", name, "zeepo", num_ranks, {"stage": stage}))
        name = f"zeepo, {ranks}, stage 3, disk"
        ways.append(Way("stage3-disk", name, "zeepo", num_ranks, {"stage": 3}, is_on_disk=True))
    return ways


@dataclass(frozen=True)
class RunFacts:
    """What one run told."""

    seconds: float
    """From the program's first line to its last, in the slowest rank."""
    peak_bytes: int
    """By how much the largest rank grew."""
    metric: float | None
    """The last value that the first rank printed."""
    ram_bytes: int | None = None
    """The budget of a rank, under zeepo; the largest, if they differ."""
    torch_version: str = ""
    num_threads: int = 0
    """Of torch, in each rank."""

    def as_json(self) -> dict[str, Any]:
        """JSON has no NaN and no infinity: they become null."""
        is_number = self.metric is not None and math.isfinite(self.metric)
        return asdict(self) | {"metric": self.metric if is_number else None}


@dataclass(frozen=True)
class Result:
    """All runs of one way, one for each seed."""

    way: Way
    runs: tuple[RunFacts, ...] = ()
    failure: str = ""

    @property
    def seconds(self) -> float:
        """The median of the seeds."""
        return median(run.seconds for run in self.runs)

    @property
    def seconds_range(self) -> tuple[float, float]:
        """The shortest and the longest run."""
        return min(run.seconds for run in self.runs), max(run.seconds for run in self.runs)

    @property
    def ram_bytes(self) -> int | None:
        return max((run.ram_bytes for run in self.runs if run.ram_bytes is not None), default=None)

    @property
    def peak_bytes(self) -> int:
        return max(run.peak_bytes for run in self.runs)

    @property
    def metrics(self) -> list[float]:
        return [run.metric for run in self.runs if run.metric is not None]

    @property
    def metric(self) -> float | None:
        """The mean over the seeds."""
        return sum(self.metrics) / len(self.metrics) if self.metrics else None

    @property
    def spread(self) -> float | None:
        """Between the seeds: largest less smallest."""
        return max(self.metrics) - min(self.metrics) if len(self.metrics) > 1 else None

    def difference(self, reference: Result) -> float | None:
        """The largest difference to another way's runs with the same seeds."""
        pairs = list(zip(self.metrics, reference.metrics, strict=False))
        return max((abs(a - b) for a, b in pairs), default=None)

    def as_json(self) -> dict[str, Any]:
        runs = [run.as_json() for run in self.runs]
        return {"way": asdict(self.way), "runs": runs, "failure": self.failure}


def find_metric(output: str, name: str) -> float | None:
    """The last number that was printed right after the metric's name; nan and inf are numbers."""
    pattern = rf"(?i)(?<!\w){re.escape(name)}(?!\w)[^\w\n]*?({NUMBER}|nan|[-+]?inf)(?!\w)"
    found = re.findall(pattern, output)
    return float(found[-1].replace(",", "")) if found else None
