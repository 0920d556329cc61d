"""What the two runs come to: the verdict, the result that is kept, and the tables made of it.

The result is plain data (it is the JSON file); the tables and the plot are made from it alone, so
what README shows is what was measured. The verdict fails when one loss differs in one bit, or when
zeepo's resident memory grew by more than its share of what plain's grew by.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import textwrap
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from examples.demo.watch import ROOT, MiB, Run

THIN_SECONDS = 0.2


def judge(
    plain_losses: list[str], zeepo_losses: list[str], growth: tuple[int, int], share: float | None
) -> dict[str, Any]:
    """The verdict; `share` is None where memory is not judged."""
    pairs = enumerate(zip(plain_losses, zeepo_losses, strict=False))
    different = next((step for step, (one, other) in pairs if one != other), None)
    losses_equal = bool(plain_losses) and plain_losses == zeepo_losses
    plain_growth, zeepo_growth = growth
    memory_kept = None if share is None else zeepo_growth <= share * plain_growth
    return {
        "losses_equal": losses_equal,
        "first_different_step": None if different is None else different + 1,
        "memory_ratio": zeepo_growth / plain_growth,
        "memory_share_promised": share,
        "memory_kept": memory_kept,
        "passed": losses_equal and memory_kept is not False,
    }


def make_result(
    plain: Run, zeepo: Run, settings: dict[str, Any], host: dict[str, Any]
) -> dict[str, Any]:
    """Everything worth keeping of both runs; `host` is what `machine` said before them."""
    growth = plain.growth_bytes, zeepo.growth_bytes
    return {
        "question": "one GPT by plain PyTorch and by zeepo: losses, memory, speed",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": host,
        "torch": zeepo.facts["torch"],
        "settings": settings,
        "parameters": zeepo.facts["parameters"],
        "verdict": judge(plain.losses, zeepo.losses, growth, settings["share"]),
        "runs": {run.name: _summary(run) for run in (plain, zeepo)},
    }


def _summary(run: Run) -> dict[str, Any]:
    counted = run.step_seconds[1:] or run.step_seconds
    return {
        "base_bytes": run.base_bytes,
        "growth_bytes": run.growth_bytes,
        "phases": [
            {"name": name, "at_seconds": round(at, 2), "growth_bytes_before": _grown(run, peak)}
            for name, at, peak in run.phases
        ],
        "seconds_per_step": statistics.median(counted),
        "step_seconds": run.step_seconds,
        "total_seconds": run.phases[-1][1],
        "losses": run.losses,
        "final_loss": float.fromhex(run.losses[-1]),
        "facts": run.facts,
        "samples_mib": _thinned(run),
    }


def _grown(run: Run, peak_bytes: int) -> int:
    return max(0, peak_bytes - run.base_bytes)


def _thinned(run: Run) -> list[list[float]]:
    """[seconds, resident MiB]: the largest sample of each fifth of a second."""
    largest: dict[int, tuple[float, int]] = {}
    for at, resident in run.samples:
        key = int(at / THIN_SECONDS)
        if key not in largest or resident > largest[key][1]:
            largest[key] = at, resident
    return [[round(at, 2), round(resident / MiB, 1)] for at, resident in largest.values()]


def machine() -> dict[str, Any]:
    """What the figures depend on. To be asked before the runs: the load is others' work then."""
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo").read_text()
    if "model name" in cpuinfo:
        model = cpuinfo.split("model name")[1].split(":", 1)[1].split("\n", 1)[0].strip()
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def is_busy(host: dict[str, Any]) -> bool:
    """Others' work takes so much of this machine that speeds measured now say little."""
    return host["load_before"] > host["cores"] / 2


def _commit() -> str | None:
    """The commit measured, marked where files differ from it; None without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


# -- for people -----------------------------------------------------------------------------------


def _rows(result: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    plain, zeepo = result["runs"]["plain"], result["runs"]["zeepo"]

    def row(name: str, key: str, form: str, unit: str, scale: float = 1) -> tuple[str, ...]:
        values = [f"{run[key] / scale:{form}}{unit}" for run in (plain, zeepo)]
        return name, *values, f"{zeepo[key] / plain[key]:.2f}"

    equal = "equal bit for bit" if result["verdict"]["losses_equal"] else "DIFFERENT"
    final = [f"{run['final_loss']:.6f}" for run in (plain, zeepo)]
    return [
        row("memory grew by at most", "growth_bytes", ",.0f", " MiB", MiB),
        row("seconds per step", "seconds_per_step", ".2f", " s"),
        row("seconds in all", "total_seconds", ".0f", " s"),
        (f"loss after {len(plain['losses'])} steps", *final, equal),
    ]


def terminal_table(result: dict[str, Any]) -> Table:
    table = Table()
    table.add_column()
    for title in ("plain PyTorch", "zeepo", "zeepo / plain"):
        table.add_column(title, justify="right")
    for row in _rows(result):
        table.add_row(*row)
    return table


def verdict_lines(result: dict[str, Any]) -> list[str]:
    """What was promised and whether it was kept."""
    verdict = result["verdict"]
    num_steps = len(result["runs"]["plain"]["losses"])
    if verdict["losses_equal"]:
        lines = [f"losses equal bit for bit: yes ({num_steps} steps)"]
    else:
        where = verdict["first_different_step"] or "the last: one run has more"
        lines = [f"losses equal bit for bit: NO (first different step: {where})"]
    share, ratio = verdict["memory_share_promised"], verdict["memory_ratio"]
    if verdict["memory_kept"] is not None:
        answer = "yes" if verdict["memory_kept"] else "NO"
        lines.append(f"within {share:.0%} of plain's memory: {answer} ({ratio:.1%})")
    return lines


def readme_block(result: dict[str, Any]) -> str:
    """The measured table as README has it."""
    settings, host = result["settings"], result["machine"]
    model = (
        f"{result['parameters'] / 1e6:.0f}M parameters ({settings['layers']} layers, width "
        f"{settings['width']}, vocabulary {settings['vocabulary']:,}), {settings['batch']} x "
        f"{settings['sequence']} tokens a step, fused AdamW and activation checkpointing in both; "
        f'`ram="{settings["ram"]}"`; {host["cores"]} cores, torch {result["torch"]}, '
        f"{result['date'][:10]}. Memory is the growth of resident memory after "
        "`import torch, zeepo`, from building to the end, as the kernel counts it; seconds per "
        "step are medians without the first step."
    )
    if is_busy(host):
        model += " **The machine was busy with other work: the speeds say little.**"
    rows = ["| " + " | ".join(row) + " |" for row in _rows(result)]
    head = ["| | plain PyTorch | zeepo | zeepo / plain |", "|---|---:|---:|---:|"]
    return "\n".join([*head, *rows, "", *textwrap.wrap(model, 100)])


def put_into_readme(readme: str, result: dict[str, Any]) -> str:
    """README with the block between its two markers replaced."""
    before, rest = readme.split(README_BEGIN)
    _, after = rest.split(README_END)
    return f"{before}{README_BEGIN}\n{readme_block(result)}\n{README_END}{after}"


README_BEGIN = "<!-- measured by make demo-keep -->"
README_END = "<!-- end -->"
