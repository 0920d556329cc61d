"""What every benchmark says of itself, and how: one report (machine, commit, date), one table, one
style of plot. No figure is made here.

A short form (`--short`) is a check that a benchmark runs; what it finds goes to
benchmarks/results/short, which is not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results"
QUIET_LOAD = 0.5
"""Of the last minute: with more, something else runs and no time is worth keeping."""


def commit() -> str:
    """The commit that is measured, with "-dirty" when the source differs from it."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    changes = ["git", "status", "--porcelain", "--", "src", "benchmarks/*.py"]
    changed = subprocess.run(changes, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    return head.stdout.strip() + ("-dirty" if changed else "")


def machine() -> dict[str, Any]:
    """What decides the figures beside the code; the load is that of this moment."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def stolen_seconds() -> float:
    """The core-seconds since the start of the machine that its host gave to others."""
    _, *ticks = Path("/proc/stat").read_text().splitlines()[0].split()
    return int(ticks[7]) / os.sysconf("SC_CLK_TCK")


def _cpu_name() -> str:
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return found[1].strip() if found else platform.machine()


def new_report(question: str, **facts: Any) -> dict[str, Any]:
    """The head of a report, then `facts`."""
    return {
        "question": question,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        **facts,
    }


def result_path(name: str, *, is_short: bool = False, given: str | Path | None = None) -> Path:
    """Where the result `name` goes: as given, or by its form; its folder exists afterwards."""
    path = Path(given) if given else (RESULTS / "short" if is_short else RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def write(report: Mapping[str, Any], path: Path) -> None:
    """Whole or not at all: an interrupted benchmark leaves what it had written before."""
    staged = path.with_suffix(".staged")
    staged.write_text(json.dumps(report, indent=1) + "\n")
    staged.replace(path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every benchmark can be told."""
    parser.add_argument("--short", action="store_true", help="a check that it runs, in a minute")
    parser.add_argument("--result", type=Path, help="where the JSON goes; the plot lies beside it")


def warn_of_load() -> None:
    """Said before measuring: the figures would be somebody else's too."""
    load = os.getloadavg()[0]
    if load > QUIET_LOAD:
        Console(stderr=True).print(
            f"[yellow]load average {load:.2f}: something else runs, times mean little[/yellow]"
        )


def median_and_spread(values: Sequence[float], digits: int = 2) -> str:
    """`4.21 (4.10 to 4.44)`"""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def print_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Text to the left, what is or begins with a number to the right."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, head in enumerate(heads):
        cells = [str(row[index]) for row in rows]
        is_number = bool(cells) and all(re.match(r"[-+≥≤x]?\s*\d|-$|$", cell) for cell in cells)
        table.add_column(head, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console = Console()
    # A pipe is 80 columns wide for rich, which would fold every cell of a wide table.
    (console if console.is_terminal else Console(width=140)).print(table)


def new_plot(width: float = 8.0, height: float = 4.5, columns: int = 1) -> tuple[Any, Any]:
    """A figure and its axes (an array of them with several columns)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained")
    for axis in [axes] if columns == 1 else axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_plot(figure: Any, report: Mapping[str, Any], path: Path) -> Path:
    """As PNG beside the JSON at `path`, with the machine and the commit at its foot."""
    found = report["machine"]
    head, _, dirty = report["commit"].partition("-")
    what = f"{head[:10]}{' and changes' if dirty else ''}, load {found['load_average']:.1f}"
    foot = f"{found['cpu']}, {found['cores']} cores, {what}, {report['date'][:10]}"
    figure.supxlabel(foot, fontsize=7, color="gray")
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=130)
    return target
