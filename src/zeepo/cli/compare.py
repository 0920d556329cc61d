"""`zeepo compare`: one training program plainly, under DDP, and under zeepo in several ways.

Every way trains the same program on the same batches: over several ranks each batch is sliced.
Prints time, peak memory of a rank, the final value of a metric that the program prints, and how far
it spreads over random seeds; writes a JSON and a plot.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zeepo.compare.child import CompareJob
from zeepo.compare.plot import draw
from zeepo.compare.runs import RunError, run_once
from zeepo.compare.ways import KEYS, Result, Way, all_ways
from zeepo.units import format_bytes, parse_bytes

PASS, FAILED, ERROR = 0, 1, 2
_WIDTH_OF_A_LOG = 140


def add_command(commands: Any) -> None:
    """Add `compare` to the command line."""
    parser = commands.add_parser(
        "compare",
        help="train a program plainly, under DDP and under zeepo, and show what each costs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit status: 0 all ways finished, 1 one of them failed, 2 the use is wrong",
    )
    parser.add_argument("script", help="a training program that calls zeepo.init")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the program's own: all that follows it"
    )
    parser.add_argument("--ranks", type=_count, default=2, help="of the ways with several")
    parser.add_argument(
        "--ways", type=_ways, default=KEYS, metavar="NAME,...", help=f"of {', '.join(KEYS)}"
    )
    parser.add_argument("--seeds", type=_count, default=2, help="runs of each way (default 2)")
    parser.add_argument(
        "--metric", default="loss", help="the word before the number that the program prints"
    )
    parser.add_argument("--ram", help="of each rank, in the ways with a disk (default: the least)")
    parser.add_argument("--disk", help="a folder for them (default: a temporary one)")
    parser.add_argument("--out", default="compare", help="compare.json and compare.png (default)")
    parser.set_defaults(run=run)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _ways(text: str) -> tuple[str, ...]:
    for name in text.split(","):
        if name not in KEYS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(KEYS)}")
    return ("plain", *text.split(","))  # the others are compared with it


def run(arguments: argparse.Namespace) -> int:
    """Compare, show, and return the exit status."""
    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False, width=None if is_terminal else _WIDTH_OF_A_LOG)
    problem = _find_problem(arguments)
    if problem:
        console.print(escape(f"zeepo compare: {problem}"))
        return ERROR
    ways = [way for way in all_ways(arguments.ranks) if way.key in arguments.ways]
    console.print(escape(_announcement(ways, arguments)))
    results = [_train(way, arguments, console, f"{n}/{len(ways)}") for n, way in enumerate(ways, 1)]
    _show(results, arguments.metric, console)
    _keep(results, arguments, console)
    return FAILED if any(result.failure for result in results) else PASS


def _announcement(ways: Sequence[Way], arguments: argparse.Namespace) -> str:
    """How long it may take is for the user to judge, before it begins."""
    num_runs = len(ways) * arguments.seeds
    runs = "1 run" if num_runs == 1 else f"{num_runs} runs"
    what = " ".join([Path(arguments.script).name, *arguments.arguments])
    return (
        f"{runs} of {what}, one after another: {len(ways)} ways, seeds of each: {arguments.seeds}"
    )


def _find_problem(arguments: argparse.Namespace) -> str:
    if not Path(arguments.script).is_file():
        return f"no script {arguments.script}"
    if arguments.disk is not None and not Path(arguments.disk).is_dir():
        return f"--disk {arguments.disk} is not a folder"
    if not Path(arguments.out).absolute().parent.is_dir():
        return f"--out {arguments.out}: its folder does not exist"
    if arguments.ram is not None:
        try:
            parse_bytes(arguments.ram)
        except ValueError as error:
            return f"--ram {arguments.ram}: {error}"
    return ""


def _train(way: Way, arguments: argparse.Namespace, console: Console, number: str) -> Result:
    """Every seed in one way."""
    runs = []
    for seed in range(arguments.seeds):
        what = f"{number} {way.name}, seed {seed + 1} of {arguments.seeds}"
        with tempfile.TemporaryDirectory() as folder, console.status(escape(what)):
            job = CompareJob(
                script=arguments.script,
                arguments=tuple(arguments.arguments),
                way=way,
                seed=seed,
                disk=arguments.disk or folder,
                ram=arguments.ram,
                folder=folder,
            )
            try:
                runs.append(run_once(job, arguments.metric))
            except RunError as error:
                console.print(escape(f"{what}: failed\n{error}"))
                return Result(way, tuple(runs), str(error).strip().splitlines()[-1])
        if not console.is_terminal:
            console.print(escape(f"{what}: {runs[-1].seconds:.1f} s"))
    return Result(way, tuple(runs))


def _show(results: Sequence[Result], metric: str, console: Console) -> None:
    plain = results[0]
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    titles = ("time", "range", "x plain", "ram", "peak of a rank", "x plain")
    for title in (*titles, metric, "spread", "off plain"):
        table.add_column(title, justify="right")
    for result in results:
        if result.failure:
            table.add_row(escape(result.way.name), "failed")
            continue
        ratios = ["", ""]
        if not plain.failure:
            ratios = [
                f"{result.seconds / plain.seconds:.2f}",
                f"{result.peak_bytes / max(1, plain.peak_bytes):.2f}",
            ]
        table.add_row(
            escape(result.way.name),
            f"{result.seconds:.1f} s",
            _range(result),
            ratios[0],
            "" if result.ram_bytes is None else format_bytes(result.ram_bytes),
            format_bytes(result.peak_bytes),
            ratios[1],
            "not printed" if result.metric is None else f"{result.metric:.6g}",
            "" if result.spread is None else f"{result.spread:.2g}",
            _off(result, plain),
        )
    console.print(table)
    console.print(
        f"\n{metric}: the last that the first rank printed, the mean over the seeds. Spread: "
        "between the seeds.\nOff plain: the largest difference to plain PyTorch with the same "
        "seed. Peak: growth of the largest rank\nwhile the program ran: of a small model most "
        "is torch and data. Time: the median of the seeds, without torch's\nimport. Range: the "
        "shortest and the longest. Ram: the budget of each rank; with a disk --ram, or the least "
        "that\nworks, else what was free."
    )


def _range(result: Result) -> str:
    low, high = result.seconds_range
    return f"{low:.1f} to {high:.1f}" if len(result.runs) > 1 else ""


def _off(result: Result, plain: Result) -> str:
    difference = None if plain.failure else result.difference(plain)
    if difference is None or result is plain:
        return ""
    return "0" if difference == 0 else f"{difference:.1e}"


def _keep(results: Sequence[Result], arguments: argparse.Namespace, console: Console) -> None:
    base = Path(arguments.out)
    base = base.with_suffix("") if base.suffix in (".json", ".png") else base
    report = {
        "script": arguments.script,
        "arguments": arguments.arguments,
        "metric": arguments.metric,
        "seeds": arguments.seeds,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count()},
        "results": [result.as_json() for result in results],
    }
    data = base.with_name(base.name + ".json")
    data.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    console.print(escape(f"\nwritten: {data}"))
    picture = base.with_name(base.name + ".png")
    try:
        seeds = "1 seed" if arguments.seeds == 1 else f"{arguments.seeds} seeds"
        title = f"{Path(arguments.script).name}: {seeds}, {os.cpu_count()} cores"
        draw(results, arguments.metric, title, picture)
        console.print(escape(f"written: {picture}"))
    except ModuleNotFoundError:
        console.print("no plot: matplotlib is not installed (pip install matplotlib).")
