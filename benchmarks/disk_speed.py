"""How fast is the disk tier, beside the best that fio gets out of the same directory?

    python benchmarks/disk_speed.py --disk DIRECTORY [--sweep] [--short]

fio (needed: `apt-get install fio`) tries its engines, block sizes, jobs, depths, and memory with
and without huge pages; the best of each direction then runs in turns with zeepo's `DiskTier`, which
works as in training: extents of a chunk's size, buffers of its pool, several requests in flight,
every block with its checksum. The figure is the ratio of medians over turns. fio's best may be one
that reuses a few MiB, which stay in a cache, so beside it runs the best of those that have as much
memory in flight as the tier, and beside the tier one that has little in flight, as fio's best has.
Reads and writes at once are measured too.
With --sweep the tier also runs with other threads, blocks and chunks, to see what limits it.
Everything overwrites blocks that were written before, as training does after its first step.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import reporting
from fio import BOTH, Fio, FioWay, MiB, fio_ways

from zeepo.memory.disk_tier import DiskTier
from zeepo.memory.ledger import Ledger
from zeepo.memory.pool import BufferPool

GB = 1e9
DIRECTIONS = ("read", "write", BOTH)
GOAL = 0.9
FIO, SAME_MEMORY = "fio's best", "fio, memory as zeepo"
ZEEPO, LITTLE_MEMORY = "zeepo", "zeepo, little memory"


@dataclass(frozen=True)
class TierWay:
    """How the tier runs; the default is what training has."""

    chunk_bytes: int = 32 * MiB
    num_in_flight: int = 4
    num_threads: int | None = None
    block_bytes: int | None = None

    @property
    def memory_bytes(self) -> int:
        return self.chunk_bytes * self.num_in_flight

    def __str__(self) -> str:
        found = [f"chunks of {self.chunk_bytes // MiB} MiB, {self.num_in_flight} in flight"]
        found += [f"{self.num_threads} threads"] * (self.num_threads is not None)
        if self.block_bytes is not None:
            found.append(f"blocks of {self.block_bytes // MiB} MiB")
        return ", ".join(found)


class TierRun:
    """A tier with its extents written, and the buffers that its requests use in turn."""

    def __init__(self, directory: Path, size_bytes: int, way: TierWay) -> None:
        self.way = way
        self.pool = BufferPool(Ledger("ram", None))
        asked = {"num_threads": way.num_threads, "block_bytes": way.block_bytes}
        options = {name: number for name, number in asked.items() if number is not None}
        self.tier = DiskTier([directory], pool=self.pool, **options)
        self.extents = [
            self.tier.allocate(f"chunk {number}", way.chunk_bytes)
            for number in range(size_bytes // way.chunk_bytes)
        ]
        self.buffers = [self.pool.acquire(way.chunk_bytes, "bench") for _ in range(self._num())]
        noise = os.urandom(MiB)
        for buffer in self.buffers:
            for low in range(0, way.chunk_bytes, MiB):
                buffer.memory[low : low + MiB] = noise
        for extent in self.extents:
            self.tier.write(extent, [(0, self.buffers[0].memory)]).result()

    def _num(self) -> int:
        return 2 * self.way.num_in_flight  # both directions at once have their own

    def close(self) -> None:
        self.tier.close()

    def _start(self, direction: str, number: int, buffer: Any) -> Future[None]:
        if direction == BOTH:
            direction = ("read", "write")[number % 2]
        extent = self.extents[number % len(self.extents)]
        if direction == "read":
            return self.tier.read(extent, buffer.memory)
        return self.tier.write(extent, [(0, buffer.memory)])

    def bytes_per_second(self, direction: str, seconds: float) -> tuple[float, float]:
        """As many requests as there is time for; and the CPUs taken."""
        num_in_flight = self.way.num_in_flight * (2 if direction == BOTH else 1)
        under_way: list[Future[None] | None] = [None] * num_in_flight
        cpu_started, started = time.process_time(), time.perf_counter()
        number = 0
        while time.perf_counter() - started < seconds:
            slot = number % num_in_flight
            earlier = under_way[slot]
            if earlier is not None:
                earlier.result()
            under_way[slot] = self._start(direction, number, self.buffers[slot])
            number += 1
        for future in under_way:
            if future is not None:
                future.result()
        elapsed = time.perf_counter() - started
        cpus = (time.process_time() - cpu_started) / elapsed
        return number * self.way.chunk_bytes / elapsed, cpus

    def seconds_to_move(self, nbytes: Mapping[str, float]) -> float:
        """So much in each direction, both beginning at once: as fast as the disk lets them."""
        num_in_flight = self.way.num_in_flight
        idle = {"read": self.buffers[:num_in_flight], "write": self.buffers[num_in_flight:]}
        left = dict(nbytes)
        under_way: dict[Future[None], tuple[str, Any]] = {}
        numbers = {"read": itertools.count(0, 2), "write": itertools.count(1, 2)}
        started = time.perf_counter()
        while True:
            for direction in left:
                while left[direction] > 0 and idle[direction]:
                    buffer = idle[direction].pop()
                    number = next(numbers[direction])
                    future = self._start(direction, number, buffer)
                    under_way[future] = direction, buffer
                    left[direction] -= self.way.chunk_bytes
            if not under_way:
                return time.perf_counter() - started
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                future.result()
                direction, buffer = under_way.pop(future)
                idle[direction].append(buffer)


@contextmanager
def tier_run(directory: Path, size_bytes: int, way: TierWay) -> Iterator[TierRun]:
    """A tier as `way` says, open in the block."""
    run = TierRun(directory, size_bytes, way)
    try:
        yield run
    finally:
        run.close()


def best_fio(fio: Fio, ways: Sequence[FioWay], seconds: float) -> dict[str, Any]:
    """Every way once in both directions, the best three again for longer."""
    tried: dict[str, dict[str, float]] = {"read": {}, "write": {}}
    best: dict[str, FioWay] = {}
    for direction, found in tried.items():
        for way in ways:
            speed, _ = fio.bytes_per_second({direction: way}, direction, seconds)
            found[str(way)] = round(speed / GB, 3)
        finalists = sorted(ways, key=lambda way: -found[str(way)])[:3]
        again = {
            way: fio.bytes_per_second({direction: way}, direction, 3 * seconds)[0]
            for way in finalists
        }
        best[direction] = max(again, key=lambda way: again[way])
        print(f"fio {direction}: best of {len(ways)}: {best[direction]}", flush=True)
    return {"best": best, "tried": tried}


Measure = Callable[[str, float], tuple[float, float]]


def take_turns(measures: dict[str, Measure], turns: int, seconds: float) -> dict[str, Any]:
    """Each in turn, the order reversed every other time: GB/s and CPUs by who and direction."""
    speeds = {who: {d: [] for d in DIRECTIONS} for who in measures}
    cpus = {who: {d: [] for d in DIRECTIONS} for who in measures}
    for turn in range(turns):
        for direction in DIRECTIONS:
            for who in list(measures)[:: -1 if turn % 2 else 1]:
                speed, taken = measures[who](direction, seconds)
                speeds[who][direction].append(round(speed / GB, 3))
                cpus[who][direction].append(round(taken, 2))
    return {"gb_per_second": speeds, "cpus": cpus}


def compare(args: argparse.Namespace, directory: Path, size_bytes: int) -> dict[str, Any]:
    """fio's best and the tier in turns."""
    fio = Fio(directory / "fio", size_bytes)
    fio.lay_out()
    tuned = best_fio(fio, fio_ways(is_short=args.short), args.tuning_seconds)
    default = TierWay()
    like = best_with_memory(fio_ways(is_short=args.short), tuned["tried"], default.memory_bytes)
    measures: dict[str, Measure] = {
        FIO: lambda direction, s: fio.bytes_per_second(tuned["best"], direction, s),
        SAME_MEMORY: lambda direction, s: fio.bytes_per_second(like, direction, s),
    }
    little = TierWay(chunk_bytes=16 * MiB, num_in_flight=2)
    with (
        tier_run(directory, size_bytes, default) as run,
        tier_run(directory, size_bytes, little) as little_run,
    ):
        measures[ZEEPO] = run.bytes_per_second
        measures[LITTLE_MEMORY] = little_run.bytes_per_second
        found = take_turns(measures, args.turns, args.seconds)
    for name, zeepo, other in (
        ("ratio", ZEEPO, FIO),
        ("ratio_with_little_memory", LITTLE_MEMORY, FIO),
        ("ratio_with_same_memory", ZEEPO, SAME_MEMORY),
    ):
        found[name] = {
            d: round(_ratio(found["gb_per_second"], zeepo, other, d), 3) for d in DIRECTIONS
        }
    for name, ways in (("fio_best", tuned["best"]), ("fio_with_same_memory", like)):
        found[name] = {d: asdict(way) | {"label": str(way)} for d, way in ways.items()}
    found["fio_tried"] = tuned["tried"]
    found["tier"] = str(default)
    fio.path.unlink()
    return found


def best_with_memory(
    ways: Sequence[FioWay], tried: dict[str, dict[str, float]], memory_bytes: int
) -> dict[str, FioWay]:
    """Of the ways with so much memory, the best of each direction."""
    fitting = [way for way in ways if way.memory_bytes == memory_bytes]
    return {d: max(fitting, key=lambda way, d=d: tried[d][str(way)]) for d in tried}


def _ratio(
    speeds: dict[str, dict[str, list[float]]], who: str, other: str, direction: str
) -> float:
    return statistics.median(speeds[who][direction]) / statistics.median(speeds[other][direction])


def sweep(directory: Path, size_bytes: int, seconds: float) -> dict[str, Any]:
    """The tier in other ways, three times each."""
    ways = [
        *(TierWay(num_threads=threads) for threads in (1, 2, 4, 6, 12)),
        *(TierWay(block_bytes=nbytes * MiB) for nbytes in (2, 4, 16)),
        *(TierWay(num_threads=4, block_bytes=nbytes * MiB) for nbytes in (4, 16)),
        *(TierWay(chunk_bytes=nbytes * MiB) for nbytes in (16, 64)),
        TierWay(num_in_flight=1),
    ]
    found: dict[str, Any] = {}
    for way in ways:
        with tier_run(directory, size_bytes, way) as run:
            measured = take_turns({str(way): run.bytes_per_second}, 3, seconds)
        found[str(way)] = {key: value[str(way)] for key, value in measured.items()}
    rows = [
        [way, *(reporting.median_and_spread(f["gb_per_second"][d]) for d in DIRECTIONS)]
        for way, f in found.items()
    ]
    reporting.print_table("zeepo's disk tier in other ways, GB/s", ["way", *DIRECTIONS], rows)
    return found


def _share_of_best(found: dict[str, Any], who: str, direction: str) -> float | None:
    """Of fio's best, for a tier."""
    names = {ZEEPO: "ratio", LITTLE_MEMORY: "ratio_with_little_memory"}
    return found[names[who]][direction] if who in names else None


def print_comparison(found: dict[str, Any]) -> None:
    rows = []
    for who, speeds in found["gb_per_second"].items():
        row = [who]
        for direction in DIRECTIONS:
            told = reporting.median_and_spread(speeds[direction])
            share = _share_of_best(found, who, direction)
            row.append(told if share is None else f"{told} = {share:.0%} of the best")
        row.append(
            " / ".join(f"{statistics.median(found['cpus'][who][d]):.2f}" for d in DIRECTIONS)
        )
        rows.append(row)
    heads = ["", *(f"{direction}, GB/s" for direction in DIRECTIONS), "CPUs taken"]
    reporting.print_table("disk tier beside fio's best, same directory", heads, rows)


def draw(report: dict[str, Any], path: Path) -> None:
    figure, axis = reporting.new_plot()
    speeds = report["gb_per_second"]
    width = 0.8 / len(speeds)
    for index, (who, found) in enumerate(speeds.items()):
        middles = [statistics.median(found[d]) for d in DIRECTIONS]
        places = [place + (index - (len(speeds) - 1) / 2) * width for place in range(3)]
        errors = [
            [middle - min(found[d]) for middle, d in zip(middles, DIRECTIONS, strict=True)],
            [max(found[d]) - middle for middle, d in zip(middles, DIRECTIONS, strict=True)],
        ]
        bars = axis.bar(places, middles, 0.92 * width, yerr=errors, label=who, capsize=3)
        labels = [
            f"{m:.2f}" if (share := _share_of_best(report, who, d)) is None else f"{share:.0%}"
            for m, d in zip(middles, DIRECTIONS, strict=True)
        ]
        axis.bar_label(bars, labels, label_type="center", color="white", fontsize=9)
    axis.set_xticks(range(3), ["read", "write", "read + write at once"])
    axis.set_ylabel("GB/s (median, range of the turns)")
    axis.set_title("zeepo's disk tier beside the best of fio")
    axis.set_ylim(0, 1.25 * axis.get_ylim()[1])
    axis.legend(ncols=2, frameon=False, loc="upper left")
    reporting.save_plot(figure, report, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disk", help="a directory on the disk in question")
    parser.add_argument("--size-gib", type=float, help="what is read and written over again")
    parser.add_argument("--turns", type=int)
    parser.add_argument("--seconds", type=float, help="of one measurement")
    parser.add_argument("--sweep", action="store_true", help="the tier in other ways as well")
    reporting.add_arguments(parser)
    args = parser.parse_args()
    if shutil.which("fio") is None:
        raise SystemExit("fio, with which this compares, is not installed: apt-get install fio")
    args.turns = args.turns or (2 if args.short else 5)
    args.seconds = args.seconds or (1.0 if args.short else 3.0)
    args.tuning_seconds = 1
    size_bytes = int((args.size_gib or (0.5 if args.short else 2.0)) * 1024) * MiB
    reporting.warn_of_load()
    report = reporting.new_report(
        "speed of the disk tier beside fio", size_bytes=size_bytes, goal=GOAL, seconds=args.seconds
    )
    path = reporting.result_path("disk_speed", is_short=args.short, given=args.result)
    with tempfile.TemporaryDirectory(dir=args.disk) as folder:
        report |= compare(args, Path(folder), size_bytes)
        print_comparison(report)
        reporting.write(report, path)
        draw(report, path)
        if args.sweep:
            report["sweep"] = sweep(Path(folder), size_bytes, args.seconds / 3)
            reporting.write(report, path)


if __name__ == "__main__":
    main()
