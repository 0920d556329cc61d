"""The comparison as a picture: time, memory and quality of each way, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeepo.compare.ways import Result

COLOURS = {"plain": "#7f7f7f", "ddp": "#c98a2b", "zeepo": "#2f6fb3"}


def draw(results: Sequence[Result], metric: str, title: str, path: Path) -> None:
    """Write a PNG; ModuleNotFoundError without matplotlib."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    shown = [result for result in results if not result.failure][::-1]
    figure, axes = pyplot.subplots(
        1, 3, figsize=(12, 1.1 + 0.42 * len(shown)), sharey=True, layout="constrained"
    )
    names = [result.way.name for result in shown]
    colours = [COLOURS[result.way.engine] for result in shown]
    seconds = [result.seconds for result in shown]
    label = "seconds, and their range over the seeds"
    _bars(axes[0], names, seconds, colours, label, "{:.1f}", [r.seconds_range for r in shown])
    megabytes = [result.peak_bytes / 2**20 for result in shown]
    _bars(axes[1], names, megabytes, colours, "peak growth of a rank, MiB", "{:.0f}")
    _dots(axes[2], shown, colours, metric)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bars(
    axis: Any,
    names: list[str],
    values: list[float],
    colours: list[str],
    label: str,
    text: str,
    ranges: Sequence[tuple[float, float]] | None = None,
) -> None:
    """With ranges: a line from the lowest to the highest on each bar, and the number behind it."""
    ranges = [(value, value) for value in values] if ranges is None else ranges
    pairs = list(zip(values, ranges, strict=True))
    errors = [[value - low for value, (low, _) in pairs], [high - v for v, (_, high) in pairs]]
    bars = axis.barh(names, values, color=colours, height=0.65)
    if any(map(any, errors)):
        line = {"fmt": "none", "ecolor": "black", "elinewidth": 0.8, "capsize": 2}
        bars.errorbar = axis.errorbar(values, names, xerr=errors, **line)  # labels stay clear of it
    axis.bar_label(bars, [text.format(value) for value in values], padding=3, fontsize=8)
    axis.set_xlim(0, 1.2 * max((high for _, high in ranges), default=1.0))
    _plain(axis, label)


def _dots(axis: Any, results: Sequence[Result], colours: list[str], metric: str) -> None:
    for row, (result, colour) in enumerate(zip(results, colours, strict=True)):
        if result.metrics:
            axis.plot(result.metrics, [row] * len(result.metrics), "o", color=colour, alpha=0.6)
            assert result.metric is not None
            axis.plot([result.metric], [row], "|", color="black", markersize=14)
    axis.ticklabel_format(axis="x", useOffset=False)
    axis.margins(x=0.15)
    _plain(axis, f"{metric}: each seed, and the mean")


def _plain(axis: Any, label: str) -> None:
    axis.set_xlabel(label, fontsize=9)
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
