"""The ranks that the first one has started: who lives, who failed and why, and their end.

The first rank is the user's own process. The others print nothing: what they write on stderr is
kept in files without a name, so that of many errors the one that caused the rest can be shown.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from zeepo.errors import RankError

LOOK_SECONDS = 0.05
TAIL_LINES = 20
"""Of what a rank wrote on stderr, when it left no traceback."""


@dataclass
class _Other:
    rank: int
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    """What it wrote on stderr."""
    report: IO[bytes]
    """The traceback of the exception that ended it."""

    def failure(self) -> str | None:
        """Why it ended, or is about to, if it failed."""
        code = self.process.poll()
        report = _read(self.report)
        if report and (code is None or code > 0):
            return report.rstrip()
        if not code:
            return None
        text = report or _tail(_read(self.errors))
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return f"it was ended by {name}{hint}\n{text}".rstrip()
        return text.rstrip() or f"it ended with exit status {code}"


class Others:
    """Ranks 1 and above, as processes of this one."""

    def __init__(self) -> None:
        self._others: list[_Other] = []

    def start(self, command: Sequence[str], folder: str, variables: Mapping[str, str]) -> None:
        """Run the command once more; `variables` has its RANK."""
        errors, report = _unlinked_file(), _unlinked_file()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **variables, REPORT_VARIABLE: str(report.fileno())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=(report.fileno(),),
        )
        self._others.append(_Other(int(variables["RANK"]), process, errors, report))

    def refuse_the_ended(self, waiting_for: Sequence[int]) -> None:
        """RankError if a rank that is waited for has ended before it came to `zeepo.init`."""
        for other in self._others:
            if other.rank in waiting_for and other.process.poll() is not None:
                why = other.failure() or "it ended without an error: is init called on every rank?"
                raise RankError(f"rank {other.rank} did not come to zeepo.init: {why}")

    def blame(self, seconds: float) -> tuple[int, str] | None:
        """The rank whose failure came first, and what it says; those that only lost another rank
        are not to blame. Waits until it is known."""
        deadline = time.monotonic() + seconds
        while True:
            failures = {o.rank: text for o in self._others if (text := o.failure())}
            for rank, text in failures.items():
                if not _is_consequence(text):
                    return rank, text
            if time.monotonic() > deadline or not self._alive():
                return None
            time.sleep(LOOK_SECONDS)

    def end(self, seconds: float) -> tuple[int, tuple[int, str] | None]:
        """Wait so long, then end who is left. The first exit status that is not 0, and the rank to
        blame for it."""
        statuses = self._wait(seconds)
        blamed = self.blame(0.0)
        if blamed is None:
            failures = [(o.rank, text) for o in self._others if (text := o.failure())]
            blamed = failures[0] if failures else None
        for stop in (signal.SIGTERM, signal.SIGKILL):
            for other in self._alive():
                with contextlib.suppress(ProcessLookupError):
                    other.process.send_signal(stop)
            if self._alive():
                self._wait(0.5)
        for other in self._others:
            other.process.wait()
            other.errors.close()
            other.report.close()
        self._others = []
        return next((code for code in statuses if code), 0), blamed

    def _alive(self) -> list[_Other]:
        return [other for other in self._others if other.process.poll() is None]

    def _wait(self, seconds: float) -> list[int]:
        """Exit statuses of those that ended by themselves."""
        deadline = time.monotonic() + seconds
        while self._alive() and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        codes = [other.process.poll() for other in self._others]
        return [code for code in codes if code is not None]


REPORT_VARIABLE = "ZEEPO_LAUNCH_REPORT"
"""The file descriptor on which a started rank leaves its traceback."""


def report_exceptions() -> None:
    """In a started rank: the exception that ends it is left where the first rank finds it."""
    descriptor = int(os.environ[REPORT_VARIABLE])
    show = sys.excepthook

    def leave(kind: type[BaseException], error: BaseException, trace: object) -> None:
        import traceback

        text = "".join(traceback.format_exception(error))
        os.pwrite(descriptor, text.encode(errors="replace"), 0)
        show(kind, error, trace)  # type: ignore[arg-type]

    sys.excepthook = leave


def _unlinked_file() -> IO[bytes]:
    """Kept open until `end`, and gone with the process in any case."""
    return os.fdopen(os.memfd_create("zeepo-rank", os.MFD_CLOEXEC), "r+b")


def _read(file: IO[bytes]) -> str:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-TAIL_LINES:])


def _is_consequence(text: str) -> bool:
    """Whether a rank ended because another did."""
    lines = [line for line in text.splitlines() if line and not line.startswith(" ")]
    return any(line.startswith("zeepo.errors.RankError") for line in lines[-3:])
