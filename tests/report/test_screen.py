"""Lines drawn in place: what the program prints looks as if they were not there."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from tests.report.terminal import Terminal
from zeepo.report.screen import Screen

BLOCK = ["first of ours", "second of ours", "third of ours"]


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


@pytest.fixture
def screen(terminal: Terminal) -> Iterator[Screen]:
    screen = Screen(terminal, [terminal])
    yield screen
    screen.close()


def test_drawing_again_replaces(terminal: Terminal, screen: Screen) -> None:
    terminal.write("before\n")
    screen.draw(BLOCK)
    screen.draw(["one", "two"])
    assert terminal.text == "before\none\ntwo"


def test_prints_come_out_whole_above_the_lines(terminal: Terminal) -> None:
    second = terminal.second()
    screen = Screen(terminal, [terminal, second])
    handler = logging.StreamHandler(terminal)
    for number in range(3):
        screen.draw(BLOCK)
        print("step", number, file=second)
        screen.draw(BLOCK)
        handler.emit(logging.LogRecord("x", 1, "f", 1, f"log {number}", (), None))
    screen.draw(BLOCK)
    printed = "step 0\nlog 0\nstep 1\nlog 1\nstep 2\nlog 2\n"
    assert terminal.text == printed + "\n".join(BLOCK)
    screen.close()
    assert terminal.text == printed


def test_an_unfinished_line_is_left_alone(terminal: Terminal, screen: Screen) -> None:
    screen.draw(BLOCK)
    terminal.write("\r 50%|#####     |")
    screen.draw(BLOCK)
    terminal.write("\r100%|##########|")
    assert terminal.text == "100%|##########|"
    terminal.write("\n")
    screen.draw(["ours"])
    assert terminal.text == "100%|##########|\nours"


def test_the_streams_are_as_before_after_close(terminal: Terminal) -> None:
    screen = Screen(terminal, [terminal])
    assert "write" in vars(terminal)
    screen.close()
    screen.close()
    screen.draw(BLOCK)
    assert "write" not in vars(terminal)
    assert terminal.text == ""


def test_a_write_that_somebody_put_over_ours_stays(terminal: Terminal) -> None:
    screen = Screen(terminal, [terminal])
    ours = terminal.write

    def theirs(text: str) -> int:
        return ours(text.upper())

    terminal.write = theirs  # type: ignore[method-assign]
    screen.close()
    terminal.write("printed\n")
    assert terminal.text == "PRINTED\n"


def test_a_forked_process_prints_in_the_place_of_the_lines(
    terminal: Terminal, screen: Screen
) -> None:
    screen.draw(BLOCK)
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            screen.draw(["not the child's"])
            terminal.write("from ")
            terminal.write("the child\n")
            screen.close()
            os.write(sending, terminal.text.encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        assert pipe.read() == "from the child\n"
    screen.draw(["still drawing"])
    assert terminal.text == "still drawing"


def test_a_forked_process_that_prints_elsewhere_gets_no_sequences(
    terminal: Terminal, screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen.draw(BLOCK)
    screen.hold()
    screen.let_go(in_child=True)
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    terminal.write("X")
    assert terminal.text == "X" + "\n".join(BLOCK)[1:]
