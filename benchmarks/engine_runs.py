"""Runs of an engine (rank_engines.py): its processes, their figures, the best configuration of an
engine, and several engines in turns. What is asked of them is the business of the benchmarks.

A run's figure is the median of its counted steps (of the slowest rank) and the peak resident memory
of the largest rank; an engine's is the median over turns, with the spread beside it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import reporting
from rank_engines import Configuration, written
from reporting import HERE, ROOT

MB = 1_000_000
NUM_WARM_UP = 2


@dataclass(frozen=True)
class Setting:
    """What every run of a comparison has in common."""

    num_ranks: int
    model: dict[str, Any]
    num_steps: int
    """Of a run, the first `NUM_WARM_UP` uncounted."""
    num_tuning_steps: int
    """Of a run that only looks for the best configuration."""
    num_turns: int
    seconds: float
    """For one run."""
    batch: int = 1
    disk: str | None = None
    reference: str = "ddp"
    """The engine whose losses the others' are compared with."""


@dataclass(frozen=True)
class Tuned:
    """The fastest configuration of each engine, and what all of them did."""

    best: dict[str, Configuration]
    tried: dict[str, dict[str, Any]]

    def short(self) -> dict[str, Any]:
        return {label: without_losses(facts) for label, facts in self.tried.items()}


def python_for(configuration: Configuration) -> str:
    """The interpreter of an engine's environment."""
    if configuration.kind != "deepspeed":
        return sys.executable
    return os.environ.get("PEERS_PYTHON", str(ROOT / ".peers" / "bin" / "python"))


def lacks(configuration: Configuration) -> str:
    """What has to be installed before this can run; nothing if it can."""
    is_there = Path(python_for(configuration)).exists()
    return "" if is_there else f"no environment for {configuration.kind}: make peers-env"


def environment_for(configuration: Configuration, num_ranks: int, rank: int) -> dict[str, str]:
    found = {
        **os.environ,
        "OMP_NUM_THREADS": str(configuration.num_threads),
        "WORLD_SIZE": str(num_ranks),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    if configuration.kind == "deepspeed":
        home = Path(python_for(configuration)).parent.parent  # what it compiles is built there once
        found |= {"DS_ACCELERATOR": "cpu"}
        found["PATH"] = f"{home / 'bin'}:{found.get('PATH', '')}"
        found.setdefault("TORCH_EXTENSIONS_DIR", str(home / "torch_extensions"))
        found.pop("PYTHONPATH", None)
    return found


def command_for(configuration: Configuration, job: Path) -> list[str]:
    """What starts a rank, but for its number."""
    return [python_for(configuration), str(HERE / "rank_engines.py"), str(job)]


def run(configuration: Configuration, setting: Setting, num_steps: int) -> dict[str, Any]:
    """Train with one process for each rank; what they tell, or why it failed."""
    num_ranks, seconds = setting.num_ranks, setting.seconds
    if lacking := lacks(configuration):
        return {"failed": lacking}
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir=setting.disk) as disk,
    ):
        job = Path(folder) / "job.json"
        task = {"num_ranks": num_ranks, "model": setting.model, "batch": setting.batch}
        task |= {"configuration": written(configuration.on(disk)), "num_steps": num_steps}
        job.write_text(json.dumps(task))
        command = command_for(configuration, job)
        outputs = [(Path(folder) / f"output{rank}").open("w+") for rank in range(num_ranks)]
        ranks = [
            subprocess.Popen(
                [*command, str(rank)],
                env=environment_for(configuration, num_ranks, rank),
                stdout=outputs[rank],
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for rank in range(num_ranks)
        ]
        is_done = _wait(ranks, seconds)
        said = [Path(output.name).read_text() for output in outputs]
        for output in outputs:
            output.close()
        if not is_done:
            return {"failed": last_words(said) or f"no end in {seconds:.0f} s"}
        facts = [
            json.loads((Path(folder) / f"facts{rank}.json").read_text())
            for rank in range(num_ranks)
        ]
    return _figures(facts)


def _wait(ranks: Sequence[subprocess.Popen[Any]], seconds: float) -> bool:
    """Until all have ended well; when one has not, the others are ended too."""
    deadline = time.monotonic() + seconds
    codes: list[int | None] = [None]
    try:
        while None in codes and not any(codes) and time.monotonic() < deadline:
            time.sleep(0.2)
            codes = [rank.poll() for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)  # with the children it may have
                rank.wait()
    return not any(codes) and None not in codes


def last_words(said: Sequence[str]) -> str:
    """The last error anybody told, without paths."""
    lines = [line for text in said for line in text.splitlines()]
    errors = [line for line in lines if re.search(r"^\S*Error\b", line)]
    return re.sub(r"(/[\w.-]+)+", "...", errors[-1])[:200] if errors else ""


def _figures(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One run's figures from what its ranks told."""
    peaks = [max(fact["peak_of_set_up"], fact["peak_of_steps"]) for fact in facts]
    resident = max(fact["resident_after_import"] for fact in facts)
    return {
        "seconds_per_step": max(statistics.median(f["seconds"][NUM_WARM_UP:]) for f in facts),
        "peak_bytes": max(peaks),
        "peak_bytes_above_import": max(peaks) - resident,
        "peak_of_steps_above_import": max(f["peak_of_steps"] for f in facts) - resident,
        "seconds": [fact["seconds"] for fact in facts],
        "losses": [fact["losses"] for fact in facts],
        "bill": facts[0].get("bill", {}),
    }


def loss_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest relative difference of any loss; 0.0 means every bit is equal."""
    pairs = [
        (float.fromhex(a), float.fromhex(b))
        for mine, other in zip(ours["losses"], theirs["losses"], strict=True)
        for a, b in zip(mine, other, strict=True)
    ]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def describe(configuration: Configuration, facts: dict[str, Any]) -> str:
    if "failed" in facts:
        return f"{configuration.label:<40} failed: {facts['failed']}"
    return (
        f"{configuration.label:<40} {facts['seconds_per_step']:6.2f} s  "
        f"peak {facts['peak_bytes'] / MB:6.0f} MB, "
        f"{facts['peak_bytes_above_import'] / MB:6.0f} above import"
    )


def tune(
    candidates: Mapping[str, Sequence[Configuration]],
    setting: Setting,
    known: Mapping[str, dict[str, Any]] | None = None,
) -> Tuned:
    """Every configuration once, unless its facts are known; the fastest of each engine."""
    found = Tuned({}, {})
    for engine, configurations in candidates.items():
        for configuration in configurations:
            facts = (known or {}).get(configuration.label)
            if facts is None:
                facts = run(configuration, setting, setting.num_tuning_steps)
            found.tried[configuration.label] = facts
            print(describe(configuration, facts), flush=True)
            fastest = found.best.get(engine)
            if "failed" not in facts and (
                fastest is None
                or facts["seconds_per_step"] < found.tried[fastest.label]["seconds_per_step"]
            ):
                found.best[engine] = configuration
    return found


def take_turns(
    tuned: Tuned, setting: Setting, after_turn: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """The engines in turns, each in its best configuration; rows, also told after each turn."""
    turns: dict[str, list[dict[str, Any]]] = {engine: [] for engine in tuned.best}
    rows: dict[str, Any] = {}
    for turn in range(setting.num_turns):
        for engine in list(turns)[:: 1 if turn % 2 else -1]:
            facts = run(tuned.best[engine], setting, setting.num_steps)
            print(f"turn {turn}: {describe(tuned.best[engine], facts)}", flush=True)
            turns[engine].append(facts)
        rows = _rows(tuned, turns, setting.reference)
        after_turn(rows)
    return rows


def _rows(
    tuned: Tuned, turns: dict[str, list[dict[str, Any]]], reference_engine: str
) -> dict[str, Any]:
    """What the turns so far come to, by engine."""
    good = {
        engine: [facts for facts in runs if "failed" not in facts] for engine, runs in turns.items()
    }
    rows = {engine: _row(tuned.best[engine], runs) for engine, runs in good.items() if runs}
    reference = next(iter(good.get(reference_engine, [])), None)
    for engine, row in rows.items():
        row["loss_difference"] = (
            None if reference is None else loss_difference(good[engine][0], reference)
        )
    return rows


def without_losses(facts: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if key != "losses"}


def _row(configuration: Configuration, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = sorted(facts["seconds_per_step"] for facts in runs)
    return {
        "configuration": configuration.name,
        "num_threads": configuration.num_threads,
        "seconds_per_step": statistics.median(seconds),
        "seconds_of_turns": seconds,
        **{
            key: int(statistics.median(facts[key] for facts in runs))
            for key in ("peak_bytes", "peak_bytes_above_import", "peak_of_steps_above_import")
        },
    }


def print_rows(title: str, rows: dict[str, dict[str, Any]], reference: str) -> None:
    heads = ["engine", "best configuration", "s/step (range)", "peak RSS per rank, MB"]
    heads += ["above import, MB", f"losses against {reference}"]
    told = []
    for engine, row in rows.items():
        difference = row["loss_difference"]
        losses = "-" if difference is None else f"{difference:.1e}" if difference else "same bits"
        configuration = f"{row['configuration']}"
        seconds = reporting.median_and_spread(row["seconds_of_turns"])
        peaks = [f"{row[key] / MB:.0f}" for key in ("peak_bytes", "peak_bytes_above_import")]
        told.append([engine, configuration, seconds, *peaks, losses])
    reporting.print_table(title, heads, told)
