"""The plot: resident memory over time, both runs, with the budget and the phases.

    python -m examples.demo.plot benchmarks/results/demo.json docs/demo.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display is needed
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

GiB_IN_MIB = 1024
COLOURS = {"plain": "#b4531a", "zeepo": "#1f5fa8"}
TITLES = {"plain": "plain PyTorch", "zeepo": "zeepo"}
GREY = "#666666"


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the plot of a result as a PNG, twice as many pixels as README shows."""
    settings = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(settings):
        figure, axes = plt.subplots(figsize=(9, 4.6), dpi=200, layout="constrained")
        top = max(_peak(run) for run in result["runs"].values())
        for name, run in result["runs"].items():
            _draw_run(axes, name, run)
        _draw_budget(axes, result)
        _label_runs(axes, result, top)
        axes.set_xlim(left=0)
        axes.set_ylim(0, top * 1.18)
        axes.set_xlabel("seconds since the start of the process")
        axes.set_ylabel("resident memory, GiB")
        axes.set_title(_title(result), loc="left", fontsize=11.5, fontweight="bold")
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


def _peak(run: dict[str, Any]) -> float:
    return max(mib for _, mib in run["samples_mib"]) / GiB_IN_MIB


def _title(result: dict[str, Any]) -> str:
    verdict = result["verdict"]
    num_steps = len(result["runs"]["zeepo"]["losses"])
    losses = "the same losses, bit for bit" if verdict["losses_equal"] else "DIFFERENT losses"
    return (
        f"A GPT of {result['parameters'] / 1e6:.0f}M parameters, {num_steps} steps: {losses}, "
        f"with {verdict['memory_ratio']:.0%} of the memory"
    )


def _draw_run(axes: Axes, name: str, run: dict[str, Any]) -> None:
    seconds, mib = zip(*run["samples_mib"], strict=True)
    gib = [value / GiB_IN_MIB for value in mib]
    axes.plot(seconds, gib, color=COLOURS[name], linewidth=1.6)
    axes.fill_between(seconds, gib, color=COLOURS[name], alpha=0.10, linewidth=0)
    for phase in run["phases"]:
        at = phase["at_seconds"]
        nearest = min(range(len(seconds)), key=lambda i: abs(seconds[i] - at))
        axes.plot([at, at], [0, gib[nearest]], color=COLOURS[name], linewidth=0.8, linestyle=":")


def _label_runs(axes: Axes, result: dict[str, Any], top: float) -> None:
    """Names at the curves, phases at the foot, instead of a legend."""
    for name, run in result["runs"].items():
        seconds, mib = max(run["samples_mib"], key=lambda sample: sample[1])
        text = f"{TITLES[name]}: {run['seconds_per_step']:.2f} s per step"
        axes.text(seconds, mib / GiB_IN_MIB + top * 0.02, text, color=COLOURS[name], weight="bold")
        level = top * (0.055 if name == "plain" else 0.015)
        phases = run["phases"]
        for phase, following in zip(phases, phases[1:], strict=False):
            middle = (phase["at_seconds"] + following["at_seconds"]) / 2
            axes.text(middle, level, phase["name"], color=COLOURS[name], ha="center", fontsize=8)


def _draw_budget(axes: Axes, result: dict[str, Any]) -> None:
    zeepo = result["runs"]["zeepo"]
    budget = (zeepo["base_bytes"] + result["settings"]["ram_bytes"]) / 2**30
    end = max(run["samples_mib"][-1][0] for run in result["runs"].values())
    axes.axhline(budget, color=GREY, linewidth=1, linestyle="--")
    text = f'zeepo may use: ram="{result["settings"]["ram"]}" + import torch, zeepo'
    axes.text(end, budget, text, color=GREY, ha="right", va="bottom", fontsize=9)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
