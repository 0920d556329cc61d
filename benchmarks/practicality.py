"""How much of plain PyTorch's speed is left when the training state is offloaded?

Practicality is the time of a step in memory over the time of the same step offloaded. Plain
PyTorch (fused AdamW) and zeepo train the same GPT on the same batches in turns of a few steps, each
in a process of its own, because `ram` bounds the growth of zeepo's; the other waits meanwhile. The
first steps of a turn do not count, because they meet what the other left behind. The figure is the
median over turns. Losses must be equal bit for bit. On disk the model is built inside the budget,
and what the process grew by at most is told beside it.

Exposed time is what a step takes beyond its largest part alone: the plain step of the same turn
(compute), or the bytes that zeepo moved, with the disk tier alone. The disk is a link in each
direction, and one that both share: what zeepo moved in a step, both directions at once, is timed
after each turn by a process that does nothing else. `exposed_by_direction` leaves that out, as if
reads cost writes nothing. The figures are medians over turns.

What is not asked for stays in the result as it is, each run with its own date and commit.

    python benchmarks/practicality.py --disk DIRECTORY [--tokens 256,1024] [--ways disk,backward]
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import reporting
import torch
from children import Child, serve
from disk_speed import TierWay, tier_run
from gpt import GPT, GPTConfig

import zeepo
from zeepo.planner.machine import peak_resident_growth_bytes

LARGE = GPTConfig(num_layers=24, width=1024, num_heads=16, sequence=256, checkpointing=True)
SHORT = GPTConfig(num_layers=4, width=256, num_heads=4, sequence=64, checkpointing=True)
ON_DISK = {"params": "disk", "grads": "disk", "optimizer_state": "disk"}
WAYS: dict[str, dict[str, Any]] = {
    "ram": dict.fromkeys(ON_DISK, "ram"),
    "disk": {**ON_DISK, "update": "step"},
    "backward": {**ON_DISK, "update": "backward"},
}
"""Where everything is; `backward` is on disk too, and updates while backward runs."""


LINK_BYTES = 3e9
"""Moved to time the disk alone."""


@dataclass(frozen=True)
class Turns:
    """How plain and zeepo take turns."""

    num_turns: int
    num_steps: int
    num_skipped: int
    """Steps at the beginning of a turn that do not count."""
    num_warm_up: int
    """Turns that do not count."""


class Trainer:
    """One model with its optimizer, trained step by step."""

    def __init__(self, config: GPTConfig, building: AbstractContextManager[Any] | None = None):
        torch.manual_seed(0)
        with building or nullcontext():
            self.model = GPT(config)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.losses: list[float] = []

    def turn(self, batches: torch.Tensor, num_skipped: int) -> float:
        """Train on each batch; seconds of a counted step."""
        started = time.perf_counter()
        for number, batch in enumerate(batches):
            if number == num_skipped:
                started = time.perf_counter()
            loss = self.model(batch[:, :-1], batch[:, 1:])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
        return (time.perf_counter() - started) / (len(batches) - num_skipped)


def _train_plainly(pipe: Connection, config: GPTConfig) -> None:
    """The other process: a turn for each message."""
    trainer = Trainer(config)
    pipe.send("ready")
    serve(pipe, lambda message: (trainer.turn(*message), trainer.losses))


class PlainProcess:
    """Plain PyTorch in a process of its own."""

    def __init__(self, config: GPTConfig):
        self._child = Child(_train_plainly, config)
        self.losses: list[float] = []

    def turn(self, batches: torch.Tensor, num_skipped: int) -> float:
        seconds, self.losses = self._child.ask((batches, num_skipped))
        return float(seconds)

    def close(self) -> None:
        self._child.close()


def _move_bytes(pipe: Connection, folder: str) -> None:
    """Another process: bytes to and from disk for each message."""
    with tier_run(Path(folder), 1 << 30, TierWay()) as run:
        pipe.send("ready")
        serve(pipe, run.seconds_to_move)


class DiskProcess:
    """The disk tier alone."""

    def __init__(self, folder: str):
        self._child = Child(_move_bytes, folder)

    def seconds_to_move(self, moved: Mapping[str, float]) -> float:
        """What a step moves; of much, a part is timed."""
        nbytes = {"read": moved["disk->ram"], "write": moved["ram->disk"]}
        share = min(1.0, LINK_BYTES / max(1.0, sum(nbytes.values())))
        return float(self._child.ask({d: share * n for d, n in nbytes.items()})) / share

    def close(self) -> None:
        self._child.close()


def compare(
    config: GPTConfig, num_sequences: int, turns: Turns, options: Mapping[str, Any], folder: str
) -> dict[str, Any]:
    """Train plainly and under zeepo in turns, and then the disk alone."""
    plain, disk = PlainProcess(config), DiskProcess(folder)
    place = {name: options[name] for name in ("ram", "disk") if name in options}
    managed = Trainer(config, zeepo.lazy(**place) if place else None)
    with zeepo.init(managed.model, managed.optimizer, **options) as session:
        generator = torch.Generator().manual_seed(1)
        pairs: list[tuple[float, float]] = []
        moved: list[dict[str, float]] = []
        disk_seconds: list[float] = []
        stolen: list[float] = []
        for number in range(turns.num_turns):
            shape = (turns.num_steps, num_sequences, config.sequence + 1)
            batches = torch.randint(config.vocabulary, shape, generator=generator)
            began, stolen_before = time.perf_counter(), reporting.stolen_seconds()
            plain_seconds = plain.turn(batches, turns.num_skipped) if number % 2 else 0.0
            before = session.stats()
            zeepo_seconds = managed.turn(batches, turns.num_skipped)
            after = session.stats()
            if not number % 2:
                plain_seconds = plain.turn(batches, turns.num_skipped)
            pairs.append((plain_seconds, zeepo_seconds))
            moved.append(per_step(before, after, turns.num_steps))
            disk_seconds.append(disk.seconds_to_move(moved[-1]))
            core_seconds = (os.cpu_count() or 1) * (time.perf_counter() - began)
            stolen.append((reporting.stolen_seconds() - stolen_before) / core_seconds)
            print(
                f"  turn {number}: plain {plain_seconds:6.2f} s  zeepo {zeepo_seconds:6.2f} s  "
                f"{plain_seconds / zeepo_seconds:.3f}  waited {moved[-1]['seconds_waited']:.2f} s  "
                f"disk alone {disk_seconds[-1]:.2f} s  "
                f"stolen {stolen[-1]:.1%}  "
                f"{'same losses' if plain.losses == managed.losses else 'LOSSES DIFFER'}",
                flush=True,
            )
        minimum_ram = session.plan.minimum_ram
        grown_bytes = peak_resident_growth_bytes()
        print(f"  the process grew by {grown_bytes / 2**30:.2f} GiB at most", flush=True)
    plain.close()
    disk.close()
    counted = pairs[turns.num_warm_up :]
    ratios = [a / b for a, b in counted]
    return {
        "plain_seconds": statistics.median(a for a, _ in counted),
        "zeepo_seconds": statistics.median(b for _, b in counted),
        "practicality": statistics.median(ratios),
        "practicalities": ratios,
        "seconds_of_turns": counted,
        "disk_alone_seconds_of_turns": disk_seconds[turns.num_warm_up :],
        "shares_stolen_by_host": stolen[turns.num_warm_up :],
        "per_step": moved[-1],
        "turns": asdict(turns),
        "losses_bit_equal": plain.losses == managed.losses,
        "minimum_ram": minimum_ram,
        "peak_growth_bytes": grown_bytes,
    }


def compare_apart(*args: Any) -> dict[str, Any]:
    """`compare` in a process of its own: what one way leaves in the heap would count in the `ram`
    of the next."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as pool:
        return pool.submit(compare, *args).result()


def per_step(before: Any, after: Any, num_steps: int) -> dict[str, float]:
    moved = {
        edge: (after["bytes_moved"][edge] - before["bytes_moved"][edge]) / num_steps
        for edge in ("disk->ram", "ram->disk")
    }
    waited = (after["seconds_waited"] - before["seconds_waited"]) / num_steps
    return {**moved, "seconds_waited": waited}


def link_speeds(disk: Path, total_bytes: int) -> dict[str, float]:
    """Bytes per second of the disk tier alone, with its checksums, in each direction."""
    with tier_run(disk, total_bytes, TierWay()) as run:
        return {
            edge: statistics.median(run.bytes_per_second(direction, 1.0)[0] for _ in range(3))
            for edge, direction in (("ram->disk", "write"), ("disk->ram", "read"))
        }


def exposed(
    pairs: Sequence[tuple[float, float]],
    moved: Mapping[str, float],
    speeds: Mapping[str, float],
    disk_seconds: Sequence[float],
) -> dict[str, Any]:
    """What of a step nothing alone explains; `pairs` are seconds of compute and of a step, and with
    `disk_seconds` beside each other in time, because the machine is not equally fast at all times.
    """
    alone = {edge: moved[edge] / speed for edge, speed in speeds.items()}
    found: dict[str, Any] = {f"{edge}_alone_seconds": value for edge, value in alone.items()}
    found["compute_alone_seconds"] = statistics.median(compute for compute, _ in pairs)
    found["disk_alone_seconds"] = statistics.median(disk_seconds)
    for name, link_seconds in (("exposed", disk_seconds), ("exposed_by_direction", [0.0])):
        links = itertools.cycle(link_seconds)
        seconds = [
            max(0.0, step - max(compute, disk, *alone.values()))
            for (compute, step), disk in zip(pairs, links, strict=False)
        ]
        shares = [beyond / step for beyond, (_, step) in zip(seconds, pairs, strict=True)]
        found[f"{name}_seconds"] = statistics.median(seconds)
        found[f"{name}_share"] = statistics.median(shares)
        found[f"{name}_shares"] = shares
    return found


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    reporting.add_arguments(parser)
    parser.add_argument("--disk", default=None)
    parser.add_argument("--ram", default="1.5GiB", help="budget of the runs on disk")
    parser.add_argument("--tokens", default="256,1024", help="per step")
    parser.add_argument("--ways", default="ram,disk,backward", help=", ".join(WAYS))
    parser.add_argument("--turns", type=int, default=10, help="half with 1024 tokens")
    return parser.parse_args()


def main() -> None:
    args = _parse()
    reporting.warn_of_load()
    config = SHORT if args.short else LARGE
    tokens = [config.sequence] if args.short else [int(count) for count in args.tokens.split(",")]
    report = reporting.new_report(
        "practicality of offload: time of a step in memory / of the same step offloaded",
        model=asdict(config),
        ram=args.ram,
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        runs=[],
    )
    path = reporting.result_path("practicality", is_short=args.short, given=args.result)
    asked = list(itertools.product(tokens, args.ways.split(",")))
    if path.exists() and not args.short:
        kept = json.loads(path.read_text())
        report["runs"] = [
            head_of(kept) | run for run in kept["runs"] if (run["tokens"], run["way"]) not in asked
        ]
    for count, way in asked:
        print(f"{way}, {count} tokens a step", flush=True)
        report["runs"].append(measure(config, way, count, args))
        report["runs"].sort(key=lambda run: (run["tokens"], list(WAYS).index(run["way"])))
        reporting.write(report, path)
    _show(report, path)


def head_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """When, of what and where something was measured."""
    return {key: report[key] for key in ("date", "commit", "machine")}


def measure(config: GPTConfig, way: str, count: int, args: argparse.Namespace) -> dict[str, Any]:
    """One way with so many tokens a step; other runs of the report may be of other days."""
    found = head_of(reporting.new_report(""))
    num_turns = 3 if args.short else args.turns if count < 1024 else args.turns // 2
    turns = Turns(max(2, num_turns), num_steps=3, num_skipped=1, num_warm_up=1)
    with tempfile.TemporaryDirectory(dir=args.disk) as disk:
        speeds = link_speeds(Path(disk), 1 << 30)
        print({edge: f"{speed / 1e9:.2f} GB/s" for edge, speed in speeds.items()}, flush=True)
        place = {} if way == "ram" else {"ram": args.ram, "disk": disk}
        found |= compare_apart(config, count // config.sequence, turns, WAYS[way] | place, disk)
    beyond = exposed(
        found["seconds_of_turns"],
        found["per_step"],
        speeds,
        found["disk_alone_seconds_of_turns"],
    )
    return {"way": way, "tokens": count, **found, "link_bytes_per_second": speeds, **beyond}


def _show(report: Mapping[str, Any], path: Path) -> None:
    rows = [
        (
            run["way"],
            run["tokens"],
            f"{run['plain_seconds']:.2f}",
            f"{run['zeepo_seconds']:.2f}",
            reporting.median_and_spread(run["practicalities"], 3),
            f"{run['per_step']['disk->ram'] / 1e9:.2f}",
            f"{run['per_step']['ram->disk'] / 1e9:.2f}",
            f"{run['disk_alone_seconds']:.2f}" if "disk_alone_seconds" in run else "",
            f"{run['peak_growth_bytes'] / 2**30:.2f}" if "peak_growth_bytes" in run else "",
            _percent(run.get("exposed_shares", [run["exposed_share"]])),
            _percent(run.get("exposed_by_direction_shares", [])),
            "yes" if run["losses_bit_equal"] else "NO",
        )
        for run in report["runs"]
    ]
    heads = (
        "way", "tokens", "plain s", "zeepo s", "practicality", "GB read", "GB written",
        "disk alone, s", "grew, GiB", "exposed, %", "by direction, %", "same losses",
    )  # fmt: skip
    reporting.print_table(str(report["question"]), heads, rows)
    _plot(report, path)


def _percent(shares: Sequence[float]) -> str:
    return reporting.median_and_spread([100 * share for share in shares], 1) if shares else ""


def _plot(report: Mapping[str, Any], path: Path) -> None:
    figure, axes = reporting.new_plot()
    for way in dict.fromkeys(run["way"] for run in report["runs"]):
        runs = sorted((r for r in report["runs"] if r["way"] == way), key=lambda r: r["tokens"])
        middles = [r["practicality"] for r in runs]
        below = [m - min(r["practicalities"]) for m, r in zip(middles, runs, strict=True)]
        above = [max(r["practicalities"]) - m for m, r in zip(middles, runs, strict=True)]
        places = [r["tokens"] for r in runs]
        axes.errorbar(places, middles, (below, above), fmt="o-", capsize=4, label=way)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    tokens = sorted({run["tokens"] for run in report["runs"]})
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [str(count) for count in tokens])
    axes.set_xlabel("tokens a step (median and range of the turns)")
    axes.set_ylabel("practicality (1 = as fast as plain PyTorch)")
    axes.set_ylim(0, max(1.1, 1.05 * axes.get_ylim()[1]))
    axes.legend()
    reporting.save_plot(figure, report, path)


if __name__ == "__main__":
    main()
