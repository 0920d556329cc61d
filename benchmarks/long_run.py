"""Does a long run grow?

    python benchmarks/long_run.py --disk DIRECTORY [--steps 220 1000] [--short]

A GPT with everything on disk and little more `ram` than its least trains for many steps; after each
the resident memory and what the session holds are read, once the states exist and the allocator
has settled. Resident memory goes up and down from step to step by more than a small leak would add
in 200 steps, so there are two figures, of the last quarter of the steps less the first: of the
largest, and of the medians. And there are runs of two lengths: what leaks grows with the number of
steps, what wavers does not. Nothing may be held longer: not memory, not file descriptors, not
threads, not disk.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import reporting
import torch
from gpt import GPT, GPTConfig
from practicality import WAYS

import zeepo
from zeepo.planner.machine import resident_bytes

MODEL = GPTConfig(num_layers=8, width=256, num_heads=4, vocabulary=8192, sequence=64)
NUM_SETTLING = 20
"""Steps that do not count: states are made, the heap finds its size."""
MiB = 1 << 20


def train(update: str, num_steps: int, disk: str) -> dict[str, Any]:
    """What is held after each step."""
    torch.manual_seed(0)
    model = GPT(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    generator = torch.Generator().manual_seed(1)
    held: list[dict[str, int]] = []
    with zeepo.init(model, optimizer, ram="256MiB", disk=disk, **_way(update)) as session:
        for _ in range(num_steps):
            tokens = torch.randint(MODEL.vocabulary, (4, 65), generator=generator)
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            if update == "step":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            held.append(
                {
                    "resident": resident_bytes(),
                    "files": len(os.listdir("/proc/self/fd")),
                    "threads": threading.active_count(),
                    "disk": sum(f.stat().st_blocks * 512 for f in _files(disk)),
                }
            )
        evictions = session.stats()["evictions"]
    return {"update": update, "held": held, "evictions": evictions}


def _way(update: str) -> dict[str, Any]:
    return WAYS["disk" if update == "step" else "backward"]


def _files(folder: str) -> list[Path]:
    return [path for path in Path(folder).rglob("*") if path.is_file()]


Middle = Callable[[list[int]], float]


def growth(held: list[dict[str, int]], figure_of: Middle) -> dict[str, float]:
    """Of each figure: that of the last quarter of the steps less that of the first."""
    counted = held[NUM_SETTLING:]
    quarter = max(1, len(counted) // 4)
    first, last = counted[:quarter], counted[-quarter:]
    return {
        name: figure_of([h[name] for h in last]) - figure_of([h[name] for h in first])
        for name in held[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    reporting.add_arguments(parser)
    parser.add_argument("--disk")
    parser.add_argument("--steps", type=int, nargs="*")
    args = parser.parse_args()
    lengths = args.steps or ([NUM_SETTLING + 12] if args.short else [220, 1000])
    report = reporting.new_report("what a long run holds, step by step", runs=[])
    path = reporting.result_path("long_run", is_short=args.short, given=args.result)
    for num_steps, update in itertools.product(lengths, ("step", "backward")):
        with tempfile.TemporaryDirectory(dir=args.disk) as disk:
            run = train(update, num_steps, disk)
        run["growth"] = growth(run["held"], max)
        run["growth_of_medians"] = growth(run["held"], statistics.median)
        report["runs"].append(run)
        reporting.write(report, path)
    rows = [
        (
            run["update"],
            len(run["held"]),
            run["evictions"],
            f"{statistics.median(h['resident'] for h in run['held']) / MiB:.0f}",
            f"{run['growth']['resident'] / MiB:.1f}",
            f"{run['growth_of_medians']['resident'] / MiB:.1f}",
            *(run["growth"][name] for name in ("files", "threads", "disk")),
        )
        for run in report["runs"]
    ]
    heads = (
        "update", "steps", "evictions", "resident, MiB", "largest grew, MiB", "median grew, MiB",
        "files", "threads", "disk, bytes",
    )  # fmt: skip
    reporting.print_table(str(report["question"]), heads, rows)
    _plot(report, path)


def _plot(report: Mapping[str, Any], path: Path) -> None:
    figure, axes = reporting.new_plot()
    for run in report["runs"]:
        sizes = [held["resident"] / MiB for held in run["held"]]
        axes.plot(range(1, len(sizes) + 1), sizes, label=f'update="{run["update"]}"', linewidth=0.8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel("resident memory, MiB")
    axes.legend(frameon=False)
    reporting.save_plot(figure, report, path)


if __name__ == "__main__":
    main()
