"""Ctrl-C waits until the engine is between two moves.

Python raises KeyboardInterrupt between any two bytecodes, so also where a chunk is half placed and
no `finally` could tell. While a session is open, the handler looks at what is running: the user's
code, or torch's on the user's behalf, is interrupted at once; the engine's own is let finish, and
the signal is sent again a moment later. Nothing is paid for this until somebody presses Ctrl-C.

A handler of the user's own is left alone, and nothing waits longer than `PATIENCE_SECONDS`: a disk
that hangs can be interrupted too.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

RETRY_SECONDS = 0.001
PATIENCE_SECONDS = 10.0

_PACKAGE = str(Path(__file__).parents[1])
_CALLS_OTHERS = frozenset(
    {
        "_dispatch",
        "_one_by_one",
        "_Intercepting.__torch_function__",
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
    """Python's own SIGINT handler, delayed, until `remove`."""

    def __init__(self) -> None:
        self._since: float | None = None
        """When the interrupt that is waiting came."""
        self._is_held = False
        self._is_installed = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._is_installed:
            signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
        is_patient = self._is_held or now - self._since < PATIENCE_SECONDS
        if is_patient and is_engine_at_work(frame):
            retry = threading.Timer(RETRY_SECONDS, _send_again, (self,))
            retry.daemon = True
            retry.start()
            return
        self._since = None
        signal.default_int_handler(number, frame)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Wait as long as it takes: what is going on must not be left half done."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def remove(self) -> None:
        """Python's own handler again, unless the user has set another meanwhile.

        An interrupt that was waiting is raised now: the engine has nothing left to do.
        """
        if not self._is_installed or threading.current_thread() is not threading.main_thread():
            return
        self._is_installed = False
        is_waiting, self._since = self._since is not None, None
        if signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if is_waiting:
            signal.raise_signal(signal.SIGINT)


def _send_again(interrupts: Interrupts) -> None:
    if interrupts._since is not None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
