"""What happens when a rank is killed? At times spread evenly over a step, and in every phase.

Three ranks train in stage 3 with a disk; rank 1 is killed (SIGKILL). Measured: how long the others
take to end, whether each names rank 1 in a RankError, and whether anything is left on the disk. The
first kills come at even distances over one step; then every phase that was hit less than twice is
aimed at. Prints a histogram of the phases that were hit and writes a JSON.

    python benchmarks/rank_faults.py [--kills 40] [--ranks 3] [--result FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.dist.faults import Nursery, Rank, scratch_left, sockets_of  # noqa: E402

PHASES = ("outside", "forward", "backward", "reduction", "optimizer.step", "closing")
FIRST_STEP = 4
MEASURED_STEPS = 6
LIMIT_SECONDS = 30.0
"""Within which survivors have to end, however busy the machine is."""
OPTIONS = {"stage": 3, "width": 96, "depth": 8, "outside_seconds": 0.01}


@dataclass
class Kill:
    """One rank killed, and what came of it."""

    phase: str
    until_named: float
    """Seconds from the signal until the last survivor had said what happened."""
    until_ended: float
    """And until its process had ended, which takes torch a while."""
    faults: list[str]


def one_kill(nursery: Nursery, folder: Path, num_ranks: int, aim: float | str) -> Kill:
    """Kill rank 1 at that part of a step, or in that phase."""
    disk = folder / "disk"
    disk.mkdir(parents=True)
    steps = FIRST_STEP if aim == "closing" else 10_000
    ranks = nursery.start(
        num_ranks, folder / "run", "train", disk=str(disk), num_steps=steps, **OPTIONS
    )
    victim = ranks[1]
    if isinstance(aim, str):
        victim.wait_until(FIRST_STEP, aim)
        time.sleep(0.002)
    else:
        time.sleep(aim * _step_seconds(victim))
    victim.signal(signal.SIGKILL)
    killed_at = time.monotonic()
    survivors = [rank for rank in ranks if rank is not victim]
    for rank in survivors:
        while "RankError" not in rank.stderr and not rank.wait(0.01):
            if time.monotonic() > killed_at + LIMIT_SECONDS:
                break
    until_named = time.monotonic() - killed_at
    faults = [fault for rank in survivors for fault in _faults_of(rank)]
    until_ended = time.monotonic() - killed_at
    victim.wait(LIMIT_SECONDS)
    if left := scratch_left(disk):
        faults.append(f"{left} is left on the disk")
    if sockets_of([rank.pid for rank in ranks]):
        faults.append("a socket is left")
    _, phase, _ = victim.whereabouts.read()
    return Kill(phase, until_named, until_ended, faults)


def _step_seconds(rank: Rank) -> float:
    """How long a step takes; returns where one begins."""
    rank.wait_until(FIRST_STEP, "outside")
    began = time.monotonic()
    rank.wait_until(FIRST_STEP + MEASURED_STEPS, "outside")
    return (time.monotonic() - began) / MEASURED_STEPS


def _faults_of(rank: Rank) -> list[str]:
    if not rank.wait(LIMIT_SECONDS):
        return [f"rank {rank.number} hangs: {rank.stderr[-2000:]}"]
    said = rank.stderr.strip().split("\n")[-1]
    if rank.exit_code == 1 and "RankError" in said and "rank 1" in said:
        return []
    return [f"rank {rank.number} ended with {rank.exit_code}: {rank.stderr[-2000:]}"]


def measure(num_kills: int, num_ranks: int) -> list[Kill]:
    kills: list[Kill] = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder, Nursery() as nursery:

        def add(aim: float | str) -> None:
            kills.append(one_kill(nursery, Path(folder) / str(len(kills)), num_ranks, aim))
            kill = kills[-1]
            print(
                f"  {len(kills):3}  killed in {kill.phase:15} named after {kill.until_named:5.2f} s"
                f"  all ended after {kill.until_ended:5.2f} s"
                f"  {'; '.join(kill.faults) or 'as they should'}",
                flush=True,
            )

        for number in range(num_kills):
            add((number + 0.5) / num_kills)
        for phase in PHASES:
            for _ in range(10):
                if sum(kill.phase == phase for kill in kills) >= 2:
                    break
                add(phase)
    return kills


def histogram(kills: list[Kill]) -> dict[str, int]:
    counts = Counter(kill.phase for kill in kills)
    return {phase: counts[phase] for phase in (*PHASES, *sorted(counts.keys() - set(PHASES)))}


def _spread(seconds: list[float]) -> dict[str, Any]:
    return {
        "median": round(statistics.median(seconds), 2),
        "largest": round(max(seconds), 2),
        "each": [round(value, 2) for value in seconds],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--result", default=str(ROOT / "benchmarks/results/rank_faults.json"))
    args = parser.parse_args()
    kills = measure(args.kills, args.ranks)
    counts = histogram(kills)
    for phase, count in counts.items():
        print(f"{phase:15} {count:3} {'#' * count}")
    named = [kill.until_named for kill in kills]
    ended = [kill.until_ended for kill in kills]
    faults = [fault for kill in kills for fault in kill.faults]
    print(
        f"{len(kills)} kills, median (largest): named after {statistics.median(named):.2f} s "
        f"({max(named):.2f} s), all ended after {statistics.median(ended):.2f} s "
        f"({max(ended):.2f} s); {len(faults)} faults"
    )
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    ).stdout.strip()
    report: dict[str, Any] = {
        "question": "what happens when one of several ranks is killed",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count()},
        "load": os.getloadavg()[0],
        "ranks": args.ranks,
        "program": OPTIONS,
        "histogram": counts,
        "seconds_until_named": _spread(named),
        "seconds_until_all_ended": _spread(ended),
        "faults": [fault.replace(str(ROOT), "") for fault in faults],
    }
    Path(args.result).write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
