"""Ctrl-C and other signals wait until the engine is between two moves.

Python runs signal handlers, which may raise (KeyboardInterrupt, or the user's own for SIGTERM and
SIGALRM), between any two bytecodes, so also where a chunk is half placed and no `finally` could
tell. While a session is open, every Python handler, also one that is set meanwhile, is preceded by
ours, which looks at what is running: the user's code, or torch's on the user's behalf, is
interrupted at once; the engine's own is let finish, and the signal is delivered when the function
that the user called returns (`deliver`), or sent again a moment later, whichever comes first.
Nothing is paid for this until a signal comes, and `signal.getsignal` answers with the user's own.

Nothing waits longer than `PATIENCE_SECONDS`: a disk that hangs can be interrupted too.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], object]
RETRY_SECONDS = 0.001
PATIENCE_SECONDS = 10.0

waiting: list[Interrupts] = []
"""Whose signals came while the engine was at work; mostly empty."""


def deliver() -> None:
    """Deliver the signals that wait; called where a function of ours hands back to its caller."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and not is_engine_at_work(sys._getframe(2)):
        while waiting:
            waiting.pop()._deliver()


_PACKAGE = str(Path(__file__).parents[1])
_CALLS_OTHERS = frozenset(
    {
        "_dispatch",
        "_one_by_one",
        "_Intercepting.__torch_function__",
        "deliver",
        "Interrupts._run",
        "Interrupts._deliver",
        "FirstForward.__init__.<locals>.call",
        "_joined",
        "_set_data",
        "Manager.run",
        "StepInterception._make_method.<locals>.step",
        "StepInterception._run",
        "StepInterception._run_own_step",
        "Regions._patch_fast_path.<locals>.forward",
        "Regions._run_compiled",
        "Regions._wrap_compiled.<locals>.call",
        "Regions._patch_compiled_modules.<locals>.call",
        "Regions._patch_compiled_modules.<locals>.call.<locals>.inner",
        "Recompute._patch.<locals>.forward",
        "_Sequence.run",
        "_Runner.run",
        "_in_order",
        "Frame.run",
        "Frame._recompute",
        "_wait_for_micro_batches",
    }
)
"""Functions of the engine that call the user's or torch's code, which may be interrupted there."""


def is_engine_at_work(frame: FrameType | None) -> bool:
    """Whether an exception in `frame` would come out of the middle of the engine's own work."""
    innermost = frame
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            is_caller = frame.f_code.co_qualname in _CALLS_OTHERS
            return frame is innermost or not is_caller
        frame = frame.f_back
    return False


class Interrupts:
    """The Python signal handlers there are, delayed, until `remove`."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        """When the signals that are waiting came."""
        self._is_held = False
        self._handlers: dict[int, Handler] = {}
        self._originals: tuple[Any, Any] | None = None
        if threading.current_thread() is threading.main_thread():
            self._install()

    def _install(self) -> None:
        """Go before every handler there is, and every one that is set from now on."""
        set_handler, get_handler = self._originals = signal.signal, signal.getsignal

        def watched_signal(number: int, handler: Any) -> Any:
            previous = watched_getsignal(number)
            if callable(handler):
                set_handler(number, self._handle)
                self._handlers[number] = handler
            else:
                set_handler(number, handler)
                self._handlers.pop(number, None)
            return previous

        def watched_getsignal(number: int) -> Any:
            return self._handlers.get(number) or get_handler(number)

        for number in signal.valid_signals():
            if callable(get_handler(number)):
                watched_signal(number, get_handler(number))
        _replace_functions(watched_signal, watched_getsignal)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        since = self._since.setdefault(number, time.monotonic())
        is_patient = self._is_held or time.monotonic() - since < PATIENCE_SECONDS
        if is_patient and is_engine_at_work(frame):
            if self not in waiting:
                waiting.append(self)
            retry = threading.Timer(RETRY_SECONDS, _send_again, (self, number))
            retry.daemon = True
            retry.start()
        else:
            self._run(number, frame)

    def _deliver(self) -> None:
        for number in list(self._since):
            self._run(number, sys._getframe())

    def _run(self, number: int, frame: FrameType | None) -> None:
        """Call the user's handler, unless another way of delivery was faster."""
        if self._since.pop(number, None) is not None and number in self._handlers:
            self._handlers[number](number, frame)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Wait as long as it takes: what is going on must not be left half done."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def remove(self) -> None:
        """The user's handlers alone again.

        A signal that was waiting is raised now: the engine has nothing left to do.
        """
        if self._originals is None or threading.current_thread() is not threading.main_thread():
            return
        _replace_functions(*self._originals)
        self._originals = None
        undelivered, self._since = list(self._since), {}
        if self in waiting:
            waiting.remove(self)
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)
        for number in undelivered:
            signal.raise_signal(number)


def _replace_functions(set_handler: Any, get_handler: Any) -> None:
    signal.signal, signal.getsignal = set_handler, get_handler


def _send_again(interrupts: Interrupts, number: int) -> None:
    if number in interrupts._since:
        signal.pthread_kill(threading.main_thread().ident or 0, number)
