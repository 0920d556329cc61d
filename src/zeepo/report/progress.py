"""The progress display: follows a session's events and shows them on stderr.

On a terminal a few lines are redrawn in place, by a thread of their own, so that a long step is
seen to run; elsewhere a plain line is printed now and then. Both end with a short summary when the
session is closed. Nothing here can stop the training: what goes wrong ends the display, and `emit`
says so.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from typing import TextIO

from rich.console import Console

from zeepo import events
from zeepo.events import Event
from zeepo.report.picture import Picture
from zeepo.report.screen import Screen

REDRAW_SECONDS = 0.2
IDLE_REDRAW_SECONDS = 1.0
"""Without news only a clock goes on."""
LINE_SECONDS = 10.0


class Progress:
    """An observer of one session, or of one build. `stream` is stderr, if not given."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream: TextIO = sys.stderr if stream is None else stream
        self._console = Console(file=self._stream, highlight=False, soft_wrap=True)
        self._picture = Picture()
        self._live: LiveDisplay | None = None
        self._next_line_at = time.monotonic() + LINE_SECONDS
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            try:
                self._live = LiveDisplay(self._picture, self._console, Screen(self._stream))
            except (AttributeError, TypeError):
                self._live = None  # a stream of a kind of its own: plain lines are always readable

    def __str__(self) -> str:
        return "the progress display"

    def __call__(self, event: Event) -> None:
        self._picture.add(event)
        if event["event"] == "close":
            self.close()
            for line in self._picture.summary(event):
                self._console.print(line)
        elif event["event"] == "build_end":
            self.close()
            if event["seconds"] >= LINE_SECONDS:
                self._print(self._picture.building_line())
        elif self._live is not None:
            self._live.tell()
        elif event["event"] == "session_open":
            self._print(self._picture.opening_line())
        elif event["event"] in ("step", "build") and time.monotonic() >= self._next_line_at:
            self._next_line_at = time.monotonic() + LINE_SECONDS
            is_step = event["event"] == "step"
            self._print(self._picture.line() if is_step else self._picture.building_line())

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Erase what is drawn in place. Twice is harmless."""
        if self._live is not None:
            self._live.close()


class LiveDisplay:
    """Redraws the picture in place until closed, from a thread of its own."""

    def __init__(self, picture: Picture, console: Console, screen: Screen) -> None:
        self._picture = picture
        self._console = console
        self._screen = screen
        self._news = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zeepo progress", daemon=True)
        self._thread.start()
        # A daemon thread that is stopped while it writes would take the interpreter with it.
        atexit.register(self.close)

    def tell(self) -> None:
        """There is something new to draw."""
        self._news.set()

    def _run(self) -> None:
        try:
            while not self._closed.wait(REDRAW_SECONDS):
                if (
                    self._news.wait(IDLE_REDRAW_SECONDS - REDRAW_SECONDS)
                    or not self._picture.is_empty
                ):
                    self._news.clear()
                    self._draw()
        except Exception as error:  # a thread has nobody to raise to; the training goes on
            self._screen.close()
            events.warn(f"the progress display stops: {error!r}. Training goes on.")

    def _draw(self) -> None:
        width, height = self._console.size
        ascii_only = self._console.options.ascii_only
        block = self._picture.block(time.time(), width - 1, ascii_only=ascii_only)
        with self._console.capture() as capture:
            for line in block[: max(1, height - 1)]:
                self._console.print(line)
        self._screen.draw(capture.get().splitlines())

    def close(self) -> None:
        """Stop and erase; twice is harmless."""
        atexit.unregister(self.close)
        self._closed.set()
        self._news.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._screen.close()
