"""A few lines at the bottom of the terminal, drawn over and over, below what the program prints.

Invariant: what the program prints appears as if the lines were not there. While they are shown the
cursor rests at their start, and `write` of stdout and stderr, if they are terminals, first erases
them. The streams stay the same objects, so handlers that were made before (logging) are covered
too. Where a line of the program's own is unfinished (a prompt, a progress bar) nothing is drawn
until it is finished. A forked process (a DataLoader's worker) draws nothing and prints in the place
of the lines.

Output around Python (a C library's) overwrites the first of the lines; the next drawing repairs it.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TextIO

_ERASE = "\x1b[J"  # from the cursor to the end of the screen
_ERASE_REST_OF_LINE = "\x1b[K"


class Screen:
    """The lines, on `stream`; `watched` are all streams that reach the same terminal.

    Raises TypeError or AttributeError when one of them is of a kind that cannot be watched.
    """

    def __init__(self, stream: TextIO, watched: Sequence[TextIO] | None = None) -> None:
        if watched is None:
            watched = [s for s in (sys.stdout, sys.stderr) if s is not None and s.isatty()]
        self._lock = threading.RLock()  # a signal handler may print while we draw
        self._is_drawn = False
        self._is_line_finished = True
        self._is_child = False
        self._restores: list[Callable[[], None]] = []
        self._write = stream.write
        self._flush = stream.flush
        self._others = [s for s in watched if s is not stream]
        for one in {id(s): s for s in (stream, *watched)}.values():
            self._watch(one)
        _screens.add(self)

    def _watch(self, stream: Any) -> None:
        original: Callable[[str], int] = stream.write

        def write(text: str) -> int:
            with self._lock:
                if self._is_child:
                    self._erase_as_child(stream)
                else:
                    self._erase()
                if text:
                    self._is_line_finished = text.endswith("\n")
                return original(text)

        def restore() -> None:
            if vars(stream).get("write") is write:  # else somebody has put theirs over ours
                del stream.write
                if was_own:
                    stream.write = original

        was_own = "write" in vars(stream)
        stream.write = write
        self._restores.append(restore)

    def draw(self, lines: Sequence[str]) -> None:
        """Show these lines, each shorter than the terminal is wide, instead of those there."""
        with self._lock:
            if self._is_child or not self._is_line_finished or not self._restores:
                return
            for stream in self._others:
                stream.flush()
            text = "\n".join(line + _ERASE_REST_OF_LINE for line in lines) + _ERASE + "\r"
            up = len(lines) - 1
            self._write(text + (f"\x1b[{up}A" if up > 0 else ""))
            self._flush()
            self._is_drawn = True

    def _erase(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            self._write(_ERASE)
            self._flush()

    def close(self) -> None:
        """Erase the lines and let the streams be. Twice is harmless."""
        with self._lock:
            if not self._is_child:
                self._erase()
            while self._restores:
                self._restores.pop()()

    # -- forks: a lock that another thread holds would stay locked in the child -----------------

    def hold(self) -> None:
        """Before a fork: nobody is in the middle of drawing or printing."""
        self._lock.acquire()

    def let_go(self, *, in_child: bool) -> None:
        """After it. The lines are the parent's: the child only prints in their place."""
        self._is_child = in_child
        self._lock.release()

    def _erase_as_child(self, stream: TextIO) -> None:
        """The cursor is at the start of the parent's lines, if there are any; it draws them anew.

        The child may have sent its output elsewhere meanwhile.
        """
        if self._is_line_finished and stream.isatty():
            self._write(_ERASE)
            self._flush()


_screens: weakref.WeakSet[Screen] = weakref.WeakSet()
_held: list[Screen] = []


def _before_fork() -> None:
    for screen in list(_screens):
        screen.hold()
        _held.append(screen)


def _after_fork(*, in_child: bool) -> None:
    while _held:
        _held.pop().let_go(in_child=in_child)


os.register_at_fork(
    before=_before_fork,
    after_in_parent=partial(_after_fork, in_child=False),
    after_in_child=partial(_after_fork, in_child=True),
)
