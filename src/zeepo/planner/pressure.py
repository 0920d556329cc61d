"""Notices that somebody wants our cgroup's memory back although its limit still stands.

In a memory cgroup of version 1 a limit cannot be set below what is in use: the system tries to
reclaim, finds nothing it may take, and refuses. While it tries, it signals pressure. A signal when
the cgroup has plenty left can only mean that, so the session gives up a quarter of what it has, as
often as it is asked, and the limit can be set. Version 2 sets the limit first; there the limit
itself is enough to go by.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

PLENTY_BYTES = 64 << 20
SHRINK_SHARE = 0.25
EVERY_SECONDS = 0.3
FORGET_SECONDS = 5.0


class ReclaimRequests:
    """Listens for pressure in our memory cgroup; silent where that cannot be done."""

    def __init__(
        self, cgroup: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
    ):
        self._events = -1
        self._allowed_bytes: int | None = None
        self._asked_at = 0.0
        with contextlib.suppress(OSError, AttributeError):  # no version 1, no rights, no eventfd
            self._listen(_own_folder(cgroup, root))

    def _listen(self, folder: Path) -> None:
        events = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            level = os.open(folder / "memory.pressure_level", os.O_RDONLY | os.O_CLOEXEC)
            try:
                control = folder / "cgroup.event_control"
                control.write_text(f"{events} {level} critical")
            finally:
                os.close(level)
        except BaseException:
            os.close(events)
            raise
        self._events = events

    def spare_bytes(self, growth_bytes: int, spare: Callable[[], int | None]) -> int | None:
        """What the system can still give: negative when it wants some back."""
        left = spare()
        now = time.monotonic()
        if self._is_signalled() and (left is None or left > PLENTY_BYTES):
            if now - self._asked_at > EVERY_SECONDS:
                self._allowed_bytes = int(growth_bytes * (1 - SHRINK_SHARE))
                self._asked_at = now
        elif now - self._asked_at > FORGET_SECONDS:
            self._allowed_bytes = None
        if self._allowed_bytes is None:
            return left
        wanted = self._allowed_bytes - growth_bytes
        return wanted if left is None else min(left, wanted)

    def _is_signalled(self) -> bool:
        if self._events < 0:
            return False
        try:
            return os.eventfd_read(self._events) > 0
        except BlockingIOError:
            return False

    def close(self) -> None:
        if self._events >= 0:
            os.close(self._events)
            self._events = -1


def _own_folder(cgroup: Path, root: Path) -> Path:
    for line in cgroup.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return root / "memory" / path.lstrip("/")
    raise FileNotFoundError("no memory cgroup of version 1")
