"""The progress display, from events to what a person sees."""

from __future__ import annotations

import io
import sys
import time
from typing import Any

import pytest
import torch
from torch import nn

import zeepo
from tests.report.terminal import Terminal
from zeepo.config import Options
from zeepo.report import observe, progress
from zeepo.report.picture import Picture
from zeepo.report.progress import Progress
from zeepo.units import GiB, MiB

OPEN: dict[str, Any] = {
    "event": "session_open",
    "time": 100.0,
    "ram": GiB,
    "minimum_ram": 900 * MiB,
    "units": {"layer0": 1, "layer1": 1},
    "placement": {},
    "disk": ["/scratch"],
}


def step(number: int, **changed: Any) -> dict[str, Any]:
    return {
        "event": "step",
        "time": 100.0 + 2 * number,
        "number": number,
        "seconds": 2.0,
        "bytes_now": {"ram": 512 * MiB, "disk": 2 * GiB},
        "bytes_limit": {"ram": 768 * MiB, "disk": 8 * GiB},
        "bytes_by_tag": {"grads": 384 * MiB, "params": 128 * MiB},
        "bytes_moved": {"disk->ram": 3 * GiB, "ram->disk": 2 * GiB},
        "seconds_waited": 0.5,
        "resident_growth_bytes": 600 * MiB,
        "peak_resident_growth_bytes": 700 * MiB,
        **changed,
    }


CLOSE: dict[str, Any] = {
    "event": "close",
    "time": 110.0,
    "num_steps": 2,
    "seconds": 10.0,
    "ram": GiB,
    "minimum_ram": 900 * MiB,
    "peak_resident_growth_bytes": 950 * MiB,
    "peak_resident_growth_at_open_bytes": 100 * MiB,
    "bytes_moved": {"disk->ram": 6 * GiB, "ram->disk": 4 * GiB},
    "evictions": 12,
    "seconds_waited": 1.0,
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REDRAW_SECONDS", 0.005)
    monkeypatch.setattr(progress, "IDLE_REDRAW_SECONDS", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "130")


def wait_for(terminal: Terminal, text: str) -> None:
    deadline = time.monotonic() + 10
    while text not in terminal.text:
        assert time.monotonic() < deadline, terminal.text
        time.sleep(0.005)


def block(*events: dict[str, Any], now: float = 105.0, width: int = 130, **how: Any) -> list[str]:
    picture = Picture()
    for event in events:
        picture.add(event)
    return [line.plain.rstrip() for line in picture.block(now, width, **how)]


# ---- The picture


def test_the_block_shows_pace_tiers_and_process() -> None:
    assert block(OPEN, step(1), step(2)) == [
        "zeepo    step 2                    2.00 s a step             25% waiting for transfers",
        (
            "RAM      ████████████████░░░░░░░░  512.0 MiB of 768.0 MiB    "
            "params 128.0 MiB, grads 384.0 MiB"
        ),
        "process  ██████████████░░░░░░░░░░  600.0 MiB of 1.0 GiB      peak 700.0 MiB",
        (
            "DISK     ██████░░░░░░░░░░░░░░░░░░  2.0 GiB of 8.0 GiB        "
            "3.0 GiB read, 2.0 GiB written a step"
        ),
    ]


def test_before_the_first_step_a_clock_runs() -> None:
    (line,) = block(OPEN, now=103.0)
    assert line.split() == ["zeepo", "first", "step", "3", "s", "2", "units"]


def test_a_long_step_is_seen_to_run() -> None:
    assert "7 s into the next" in block(OPEN, step(1), now=109.0)[0]


def test_the_first_step_does_not_count_for_the_pace() -> None:
    lines = block(OPEN, step(1, seconds=60.0), step(2), step(3))
    assert "2.00 s a step" in lines[0]


@pytest.mark.parametrize("width", [20, 60, 79])
def test_lines_fit_the_terminal(width: int) -> None:
    assert max(len(line) for line in block(OPEN, step(1), width=width)) <= width


def test_ascii_terminals_get_ascii() -> None:
    assert all(line.isascii() for line in block(OPEN, step(1), width=60, ascii_only=True))


def test_more_than_the_budget_is_red_and_does_not_overflow_the_bar() -> None:
    picture = Picture()
    picture.add(OPEN)
    picture.add(step(1, resident_growth_bytes=2 * GiB, peak_resident_growth_bytes=2 * GiB))
    line = picture.block(0, 130)[2]
    assert line.plain.count("█") == 24
    assert "red" in {str(span.style) for span in line.spans}


def test_a_changed_budget_counts() -> None:
    change = {"event": "budget", "time": 103.0, "old": GiB, "new": 2 * GiB, "why": "resize"}
    assert "600.0 MiB of 2.0 GiB" in block(OPEN, step(1), change)[2]


def test_without_a_disk_there_is_no_disk_line() -> None:
    lines = block(OPEN, step(1, bytes_limit={"ram": GiB, "disk": None}))
    assert [line.split()[0] for line in lines] == ["zeepo", "RAM", "process"]


def test_summary() -> None:
    picture = Picture()
    for event in (OPEN, step(1), step(2)):
        picture.add(event)
    assert [line.plain for line in picture.summary(CLOSE)] == [
        "zeepo: 2 steps in 10.0 s, 2.00 s a step at the end",
        "  memory  grew by 950.0 MiB at most; ram 1.0 GiB, least predicted 900.0 MiB",
        "  moved   disk->ram 6.0 GiB, ram->disk 4.0 GiB (12 evictions)",
        "  waited  1.00 s for transfers, 10% of the time",
    ]


def test_summary_says_when_the_peak_is_older_than_the_session() -> None:
    close = {**CLOSE, "peak_resident_growth_at_open_bytes": 950 * MiB}
    assert "(before the session)" in Picture().summary(close)[1].plain


def test_summary_of_nothing() -> None:
    close = {**CLOSE, "num_steps": 0, "bytes_moved": {"disk->ram": 0, "ram->disk": 0}}
    lines = [line.plain for line in Picture().summary(close)]
    assert lines[0] == "zeepo: 0 steps in 10.0 s"
    assert [line.split()[0] for line in lines] == ["zeepo:", "memory", "waited"]


def build(name: str, seconds: float) -> dict[str, Any]:
    return {
        "event": name,
        "time": 90.0,
        "num_parameters": 340,
        "parameter_bytes": 3 * GiB // 2,
        "seconds": seconds,
        "resident_growth_bytes": 100 * MiB,
    }


def test_building_is_seen_to_go_on() -> None:
    (line,) = block(build("build", 12.0), now=93.0)
    assert line.split(maxsplit=4) == [
        "zeepo",
        "building",
        "15",
        "s",
        "1.5 GiB in 340 parameters so far",
    ]


def test_closing_is_not_a_step() -> None:
    lines = block(OPEN, step(1), {"event": "closing", "time": 103.0}, now=107.0)
    assert lines[0].split() == ["zeepo", "closing", "4", "s", "giving", "the", "values", "back"]
    assert len(lines) == 4


# ---- The display


def test_in_a_terminal_the_block_is_redrawn_and_the_summary_stays() -> None:
    terminal = Terminal()
    display = Progress(terminal)
    display(OPEN)
    wait_for(terminal, "first step")
    terminal.write("loss 0.5\n")
    display(step(1))
    wait_for(terminal, "step 1 ")
    assert terminal.text.startswith("loss 0.5\nzeepo    step 1 ")
    display(CLOSE)
    display.close()
    assert terminal.text.startswith("loss 0.5\nzeepo: 2 steps in 10.0 s")
    assert "RAM" not in terminal.text


def test_elsewhere_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    display = Progress(stream)
    display(OPEN)
    display(step(1))
    monkeypatch.setattr(display, "_next_line_at", 0.0)
    display(step(2))
    display(step(3))
    display(CLOSE)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "zeepo: 2 units, ram 1.0 GiB (least 900.0 MiB), disk /scratch"
    assert lines[1].startswith("zeepo: step 2, 2.00 s a step, ram 512.0 MiB of 768.0 MiB, ")
    assert lines[2].startswith("zeepo: 2 steps in ")
    assert len(lines) == 6
    assert "\x1b" not in stream.getvalue()


def test_a_long_build_is_told_and_a_short_one_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.StringIO()
    display = Progress(stream)
    display(build("build", 1.0))
    display(build("build_end", 2.0))
    assert stream.getvalue() == ""
    monkeypatch.setattr(display, "_next_line_at", 0.0)
    display(build("build", 11.0))
    display(build("build_end", 12.0))
    assert stream.getvalue().splitlines() == [
        "zeepo: building, 1.5 GiB in 340 parameters so far, 11.0 s",
        "zeepo: built 1.5 GiB in 340 parameters in 12.0 s",
    ]


def test_a_dumb_terminal_is_not_drawn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    display = Progress(terminal)
    display(OPEN)
    assert terminal.text.startswith("zeepo: 2 units")
    display.close()


# ---- When there is one


def shown(options: Options) -> bool:
    display = observe(options)
    if display is not None:
        display.close()
    return display is not None


def test_auto_is_on_in_a_terminal_only_outside_pytest_and_verify(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert not shown(Options())
    assert shown(Options(progress=True))
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    assert shown(Options())
    assert not shown(Options(progress=False))
    monkeypatch.setenv("ZEEPO_VERIFY", "managed")
    assert not shown(Options())


def test_auto_is_off_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert not shown(Options())
    monkeypatch.setattr(sys, "stderr", None)
    assert not shown(Options())


def test_a_session_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zeepo.init(model, optimizer, progress=True):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        wait_for(terminal, "step 1 ")
    assert terminal.text.startswith("zeepo: 1 step in ")


def test_building_is_shown_and_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("ZEEPO_PROGRESS", "true")
    with zeepo.lazy():
        nn.Linear(8, 8)
        wait_for(terminal, "building")
    assert terminal.text == ""
    with zeepo.lazy(progress=False):
        assert "write" not in vars(terminal), "somebody draws"
    with pytest.raises(TypeError), zeepo.lazy():
        nn.Linear("wide", 8)  # type: ignore[arg-type]
    assert "write" not in vars(terminal), "somebody draws still"
