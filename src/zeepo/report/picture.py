"""What the progress display shows, kept from events and drawn as text. No terminal here.

`Picture` follows the events of one session; `block` draws it in place, `line` for a log, `summary`
at the end.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from rich.text import Text

from zeepo.events import Event
from zeepo.units import format_bytes

_COLOURS = {
    "params": "blue",
    "grads": "magenta",
    "optimizer state": "green",
    "activations": "cyan",
}
"""Of the tags of the ledger, in the order of the bar."""
_OTHER_COLOUR = "yellow"
_BAR_CELLS = 24

_Parts = list[tuple[int, str]]
"""Bytes and the colour they have in a bar."""
_Row = tuple[str, Text, str, Text]
"""Label, bar, figures, detail."""


class Picture:
    """The session as its events tell it."""

    def __init__(self) -> None:
        self.build: Event = {}
        self.opening: Event = {}
        self.step: Event = {}
        self.ram = 0
        self.seconds_per_step = 0.0
        self.waited_share = 0.0
        self._recent_seconds: deque[float] = deque(maxlen=10)
        self._recent_waited: deque[float] = deque(maxlen=10)
        self._last_time = 0.0
        self.is_closing = False

    @property
    def is_empty(self) -> bool:
        return not self.opening and not self.build

    def add(self, event: Event) -> None:
        """Take an event in."""
        if event["event"] == "session_open":
            self.opening = event
            self.ram = event["ram"]
        elif event["event"] == "step":
            self.step = event
            self._recent_seconds.append(event["seconds"])
            self._recent_waited.append(event["seconds_waited"])
            self._measure_pace()
        elif event["event"] == "budget":
            self.ram = event["new"]
        elif event["event"] in ("build", "build_end"):
            self.build = event
        elif event["event"] == "closing":
            self.is_closing = True
        if event["event"] in ("session_open", "step", "build", "closing"):
            self._last_time = event["time"]

    def _measure_pace(self) -> None:
        """Over the last steps, without the first, which also sets up."""
        seconds, waited = list(self._recent_seconds), list(self._recent_waited)
        if self.step["number"] == len(seconds) > 1:
            seconds, waited = seconds[1:], waited[1:]
        self.seconds_per_step = sum(seconds) / len(seconds)
        self.waited_share = sum(waited) / sum(seconds) if sum(seconds) else 0.0

    # -- in place ---------------------------------------------------------------------------------

    def block(self, now: float, width: int, *, ascii_only: bool = False) -> list[Text]:
        """Lines to be drawn over and over, none wider than `width`; `now` is as events' `time`."""
        cells = _BAR_CELLS if width >= 80 else _BAR_CELLS // 2
        rows = [self._head(now)]
        if self.step:
            rows += self._bars(cells, ascii_only)
        lines = []
        for label, bar, figures, detail in rows:
            line = Text(f"{label:<9}", style="bold" if label == "zeepo" else "")
            line = Text.assemble(line, bar, " " * (cells - len(bar)), f"  {figures:<24}  ", detail)
            line.truncate(width, overflow="ellipsis" if not ascii_only else "crop")
            lines.append(line)
        return lines

    def _bars(self, cells: int, ascii_only: bool) -> list[_Row]:
        used, limit = self.step["bytes_now"], self.step["bytes_limit"]
        tags = dict(sorted(self.step["bytes_by_tag"].items(), key=_place))
        parts = [(count, _COLOURS.get(tag, _OTHER_COLOUR)) for tag, count in tags.items()]
        growth, peak = (self.step[f"{p}resident_growth_bytes"] for p in ("", "peak_"))
        growth_parts = [(growth, "red" if growth > self.ram else "cyan")]
        peak_text = Text(f"peak {format_bytes(peak)}", style="red" if peak > self.ram else "")

        def row(label: str, parts: _Parts, used: int, limit: int | None, detail: Text) -> _Row:
            return label, _bar(parts, limit, cells, ascii_only), _of(used, limit), detail

        rows = [
            row("RAM", parts, used["ram"], limit["ram"], _kinds(tags)),
            row("process", growth_parts, growth, self.ram, peak_text),
        ]
        if limit["disk"] is not None:
            disk = [(used["disk"], "cyan")]
            rows.append(row("DISK", disk, used["disk"], limit["disk"], self._moved()))
        return rows

    def _head(self, now: float) -> _Row:
        since = max(0.0, now - self._last_time)
        if self.is_closing:
            return "zeepo", Text("closing"), f"{since:.0f} s", Text("giving the values back")
        if not self.opening:
            return (
                "zeepo",
                Text("building"),
                f"{self.build['seconds'] + since:.0f} s",
                self._built(),
            )
        if not self.step:
            units = _count(len(self.opening.get("units", ())), "unit")
            return "zeepo", Text("first step"), f"{since:.0f} s", Text(units)
        pace = f"{_seconds(self.seconds_per_step)} a step"
        late = f", {since:.0f} s into the next" if since >= 2 else ""
        waited = Text(f"{self.waited_share:.0%} waiting for transfers{late}")
        return "zeepo", Text(f"step {self.step['number']}"), pace, waited

    def _built(self) -> Text:
        count = _count(self.build["num_parameters"], "parameter")
        return Text(f"{format_bytes(self.build['parameter_bytes'])} in {count} so far")

    def _moved(self) -> Text:
        moved = self.step["bytes_moved"]
        read, written = format_bytes(moved["disk->ram"]), format_bytes(moved["ram->disk"])
        return Text(f"{read} read, {written} written a step")

    # -- in a log ---------------------------------------------------------------------------------

    def building_line(self) -> str:
        """How far the model is built, in one line."""
        built, seconds = self._built().plain, _seconds(self.build["seconds"])
        if self.build["event"] == "build":
            return f"zeepo: building, {built}, {seconds}"
        return f"zeepo: built {built.removesuffix(' so far')} in {seconds}"

    def opening_line(self) -> str:
        """What is to come, in one line."""
        event = self.opening
        where = ", ".join(event["disk"]) or "none"
        return (
            f"zeepo: {_count(len(event['units']), 'unit')}, ram {format_bytes(event['ram'])} "
            f"(least {format_bytes(event['minimum_ram'])}), disk {where}"
        )

    def line(self) -> str:
        """Where it is, in one line."""
        step = self.step
        tier, limit = step["bytes_now"], step["bytes_limit"]
        parts = [
            f"zeepo: step {step['number']}",
            f"{_seconds(self.seconds_per_step)} a step",
            f"ram {_of(tier['ram'], limit['ram'])}",
            f"process {_of(step['resident_growth_bytes'], self.ram)}",
        ]
        if limit["disk"] is not None:
            parts += [f"disk {_of(tier['disk'], limit['disk'])}", self._moved().plain]
        return ", ".join([*parts, f"{self.waited_share:.0%} waiting"])

    # -- at the end -------------------------------------------------------------------------------

    def summary(self, close: Event) -> list[Text]:
        """What it took, in a few lines."""
        steps, seconds, waited = close["num_steps"], close["seconds"], close["seconds_waited"]
        head = f"zeepo: {_count(steps, 'step')} in {_seconds(seconds)}"
        if steps:
            head += f", {_seconds(self.seconds_per_step)} a step at the end"
        share = waited / seconds if seconds else 0.0
        rows = {
            "memory": _peak_text(close),
            "moved": _moved_text(close) if any(close["bytes_moved"].values()) else "",
            "waited": f"{_seconds(waited)} for transfers, {share:.0%} of the time",
        }
        lines = [Text(head, style="bold")]
        for name, text in rows.items():
            if not text:
                continue
            over = name == "memory" and close["peak_resident_growth_bytes"] > close["ram"]
            lines.append(Text(f"  {name:<8}{text}", style="red" if over else ""))
        return lines


def _peak_text(close: Event) -> str:
    peak, ram, least = (
        format_bytes(close[name]) for name in ("peak_resident_growth_bytes", "ram", "minimum_ram")
    )
    is_older = close["peak_resident_growth_bytes"] <= close["peak_resident_growth_at_open_bytes"]
    when = " (before the session)" if is_older else ""
    return f"grew by {peak} at most{when}; ram {ram}, least predicted {least}"


def _moved_text(close: Event) -> str:
    moved = ", ".join(f"{edge} {format_bytes(n)}" for edge, n in close["bytes_moved"].items())
    return f"{moved} ({close['evictions']} evictions)"


def _bar(parts: _Parts, limit: int | None, num_cells: int, ascii_only: bool) -> Text:
    """A bar of coloured parts, as much of it as they are of `limit`."""
    full, empty = ("#", ".") if ascii_only else ("█", "░")
    whole = limit or sum(used for used, _ in parts) or 1
    bar = Text()
    total = 0
    for used, colour in parts:
        total += used
        end = min(num_cells, round(num_cells * total / whole))
        bar.append(full * (end - len(bar)), style=colour)
    return bar.append(empty * (num_cells - len(bar)), style="bright_black")


def _place(item: tuple[str, int]) -> tuple[int, int]:
    """Sorts tags: those with a colour of their own first, so that the bar does not flicker."""
    tag, used = item
    return (list(_COLOURS).index(tag), 0) if tag in _COLOURS else (len(_COLOURS), -used)


def _kinds(tags: dict[str, Any]) -> Text:
    """What the bar's colours are."""
    parts = [
        Text(f"{tag} {format_bytes(used)}", style=_COLOURS.get(tag, _OTHER_COLOUR))
        for tag, used in tags.items()
    ]
    return Text(", ").join(parts)


def _of(used: int, limit: int | None) -> str:
    return f"{format_bytes(used)} of {'any' if limit is None else format_bytes(limit)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _seconds(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
