"""Running the ranks of one way, and reading what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from zeepo.compare.child import CompareJob
from zeepo.compare.ways import RunFacts, find_metric

LOOK_SECONDS = 0.05
AFTER_FAILURE_SECONDS = 5.0


class RunError(Exception):
    """The program failed in one way; the text is of the rank to blame."""


def run_once(job: CompareJob, metric: str) -> RunFacts:
    """All ranks of one run, to their end."""
    path, folder = job.write(), Path(job.folder)
    num_ranks = job.way.num_ranks
    processes = [_start(path, folder, rank, num_ranks) for rank in range(num_ranks)]
    try:
        _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    facts = []
    failures = []
    for rank in range(num_ranks):
        file = folder / f"facts{rank}.json"
        if file.exists():
            facts.append(json.loads(file.read_text()))
            failures += [facts[-1]["failure"]] if facts[-1]["failure"] else []
        else:
            status = processes[rank].returncode
            text = (folder / f"errors{rank}").read_text(errors="replace")
            failures.append(f"rank {rank} ended with status {status}\n{text[-2000:]}")
    if failures:
        causes = [text for text in failures if "zeepo.errors.RankError" not in text]
        raise RunError((causes or failures)[0])
    printed = (folder / "output0").read_text(errors="replace")
    return RunFacts(
        seconds=max(fact["seconds"] for fact in facts),
        peak_bytes=max(fact["peak_bytes"] for fact in facts),
        metric=find_metric(printed, metric),
        ram_bytes=max((ram for fact in facts for ram in fact["ram_bytes"]), default=None),
        torch_version=facts[0]["torch_version"],
        num_threads=facts[0]["num_threads"],
    )


def _start(job: Path, folder: Path, rank: int, num_ranks: int) -> subprocess.Popen[bytes]:
    place = {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    if num_ranks > 1:
        num_threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
        place |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(num_threads))}
        place |= {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    with (folder / f"output{rank}").open("wb") as out, (folder / f"errors{rank}").open("wb") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "zeepo.compare.child", str(job), str(rank)],
            env={**os.environ, **place, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Until all have ended; when one fails the others get a moment to end too."""
    deadline: float | None = None
    while any(process.poll() is None for process in processes):
        if deadline is None and any(process.poll() for process in processes):
            deadline = time.monotonic() + AFTER_FAILURE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            return
        time.sleep(LOOK_SECONDS)
