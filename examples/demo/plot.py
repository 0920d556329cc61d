"""The plot: resident memory over time of both runs, the budget, and the phases below.

python -m examples.demo.plot benchmarks/results/demo.json docs/demo.png
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from examples.demo.watch import GiB, MiB

COLOURS = {"plain": "#b4531a", "zeepo": "#1f5fa8"}
TITLES = {"plain": "plain PyTorch", "zeepo": "zeepo"}
SHADES = {"import": 0.10, "build": 0.30, "train": 0.15, "close": 0.30}
DARK, GREY = "#333333", "#666666"
STYLE = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the plot of a result as a PNG, with twice as many pixels as README shows."""
    runs = result["runs"]
    with plt.rc_context(STYLE):
        figure, (memory, phases) = plt.subplots(
            2, sharex=True, figsize=(9, 4.6), dpi=200, layout="constrained", height_ratios=[9, 1]
        )
        end = max(run["total_seconds"] for run in runs.values())
        memory.set_xlim(0, end)
        for row, (name, run) in enumerate(runs.items()):
            _draw_memory(memory, name, run)
            _draw_phases(phases, row, name, run, end)
        _draw_budget(memory, result, end)
        _finish_axes(memory, phases, result)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


def _headline(result: dict[str, Any]) -> str:
    verdict = result["verdict"]
    losses = "the same losses bit for bit" if verdict["losses_equal"] else "DIFFERENT losses"
    return f"The same GPT, {losses}, {verdict['memory_ratio']:.0%} of the memory"


def _draw_memory(axes: Axes, name: str, run: dict[str, Any]) -> None:
    """A curve with its name in the middle of training: above it, or below where the budget is."""
    inside = [(at, mib) for at, mib in run["samples_mib"] if at <= run["total_seconds"]]
    seconds = [at for at, _ in inside]
    gib = [mib * MiB / GiB for _, mib in inside]
    axes.plot(seconds, gib, color=COLOURS[name], linewidth=1.6)
    axes.fill_between(seconds, gib, color=COLOURS[name], alpha=0.10, linewidth=0)
    begin, end = _training(run)
    trained = [value for at, value in zip(seconds, gib, strict=True) if begin <= at <= end]
    text = f"{TITLES[name]}: +{run['growth_bytes'] / GiB:.2f} GiB, "
    text += f"{run['seconds_per_step']:.2f} s per step"
    is_above = name == "plain"
    place = ((begin + end) / 2, max(trained or gib) if is_above else min(trained or gib))
    axes.annotate(
        text, place, (0, 4 if is_above else -18), textcoords="offset points", ha="center",
        color=COLOURS[name], weight="bold", fontsize=11,
    )  # fmt: skip


def _training(run: dict[str, Any]) -> tuple[float, float]:
    """When training began and ended, in seconds."""
    spans = {name: (begin, end) for name, begin, end in _spans(run)}
    return spans["train"]


def _spans(run: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Each phase with its begin and end; before the first, the process imports torch."""
    begins = [("import", 0.0), *((phase["name"], phase["at_seconds"]) for phase in run["phases"])]
    return [(name, begin, end) for (name, begin), (_, end) in itertools.pairwise(begins)]


def _draw_phases(axes: Axes, row: int, name: str, run: dict[str, Any], whole: float) -> None:
    for phase, begin, end in _spans(run):
        shade = SHADES[phase]
        axes.barh(-row, end - begin, left=begin, height=0.9, color=COLOURS[name], alpha=shade)
        if end - begin > 0.035 * whole:
            axes.text(
                (begin + end) / 2, -row, phase, ha="center", va="center", fontsize=8, color=DARK
            )


def _draw_budget(axes: Axes, result: dict[str, Any], end: float) -> None:
    zeepo, ram = result["runs"]["zeepo"], result["settings"]["ram"]
    level = (zeepo["base_bytes"] + zeepo["facts"]["ram_bytes"]) / GiB
    axes.axhline(level, color=GREY, linewidth=1, linestyle="--")
    text = f'budget: torch +\nzeepo imported,\nram="{ram}"'
    axes.annotate(
        text, (end, level), (5, 0), textcoords="offset points", va="center", color=GREY, fontsize=9
    )


def _finish_axes(memory: Axes, phases: Axes, result: dict[str, Any]) -> None:
    settings, host = result["settings"], result["machine"]
    memory.set_title(_headline(result), loc="left", fontsize=13, weight="bold", pad=22)
    how = (
        f"{result['parameters'] / 1e6:.0f}M parameters, {settings['steps']} steps of "
        f"{settings['batch'] * settings['sequence']} tokens on {host['cores']} cores; "
        "each run in its own process, memory sampled from outside"
    )
    above = {"xycoords": "axes fraction", "textcoords": "offset points"}
    memory.annotate(how, (0, 1), (0, 8), color=GREY, fontsize=9.5, **above)
    memory.set_ylabel("resident memory, GiB")
    memory.set_ylim(bottom=0, top=memory.get_ylim()[1] * 1.06)
    memory.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    memory.set_axisbelow(True)
    memory.tick_params(axis="x", length=0)
    phases.set_yticks([0, -1], ["plain", "zeepo"])
    phases.tick_params(axis="y", length=0)
    phases.spines["left"].set_visible(False)
    phases.set_xlabel("seconds since the start of each process")


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
