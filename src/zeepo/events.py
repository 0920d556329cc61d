"""What a session tells whoever listens: one event at a time, as plain values.

Invariant: `emit` never raises and never changes what the training does. A listener that fails is
removed, with one line on stderr that says why. Nothing is collected when nobody listens: whoever
has something to tell asks `is_heard` first.

An event is a dictionary of values that JSON can hold: `time` (seconds since 1970), `event` (its
name) and the fields of that event. docs/start.md lists them.
"""

import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zeepo.errors import ConfigError, DiskError, ZeepoError

Event = Mapping[str, Any]
Listener = Callable[[Event], None]

_listeners: list[Listener] = []


def is_heard() -> bool:
    """Whether anybody listens."""
    return bool(_listeners)


def listen(listener: Listener) -> None:
    """Call `listener` with every event from now on."""
    _listeners.append(listener)


def stop_listening(listener: Listener) -> None:
    """Not any more; harmless when it was removed already."""
    with contextlib.suppress(ValueError):
        _listeners.remove(listener)


def emit(name: str, **fields: Any) -> None:
    """Tell every listener; one that raises is removed."""
    if not _listeners:
        return
    event = {"time": time.time(), "event": name, **fields}
    for listener in list(_listeners):
        try:
            listener(event)
        except Exception as error:  # whatever it is: the training is worth more than its report
            stop_listening(listener)
            warn(f"{listener} stops at event {name!r}: {error!r}. Training goes on.")


def warn(text: str) -> None:
    """One line on stderr, about what must not stop the training."""
    # A stderr that is closed or full cannot be told about either.
    with contextlib.suppress(OSError, ValueError):
        print(f"zeepo: {text}", file=sys.stderr, flush=True)


class EventFile:
    """A listener that appends each event to a file, one JSON object per line.

    A line is written by one call of the system, without a buffer: it is there for `tail -f` when
    `emit` returns, and whole even when several processes write to the same file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            self._descriptor = os.open(path, flags, 0o644)
        except OSError as error:
            raise _refusal(path, error) from error
        try:  # one line now: a full disk is found before anything else is done
            self({"time": time.time(), "event": "file_open", "process": os.getpid()})
        except OSError as error:
            self.close()
            raise _refusal(path, error) from error

    def __call__(self, event: Event) -> None:
        line = json.dumps(event, allow_nan=False).encode() + b"\n"
        if os.write(self._descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def __str__(self) -> str:
        return f"the events file {self._path}"

    def close(self) -> None:
        """Twice is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _refusal(path: Path, error: OSError) -> ZeepoError:
    message = f"cannot write the events file {path}: {error.strerror}."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskError(f"{message} Free some space, or give events= a path on another disk.")
    return ConfigError(
        f"{message} Give events= (or ZEEPO_EVENTS) the path of a file, new or to append to, in a "
        "directory that exists and is writable."
    )
