"""What the system can bear: asked ten times a second, and at once when a limit changes."""

from __future__ import annotations

import time
from collections.abc import Callable

from zeepo.units import MiB

SYSTEM_MARGIN_BYTES = 32 * MiB
"""What is left to the system when it runs short."""
ASK_SYSTEM_SECONDS = 0.1


class SystemRoom:
    """The growth of this process that the system can bear, by what it still has."""

    def __init__(
        self, spare_bytes: Callable[[int], int | None], stated_limit: Callable[[], bytes]
    ) -> None:
        self._spare_bytes = spare_bytes
        """What it can still give a process that has grown so much."""
        self._stated_limit = stated_limit
        """What the limit of our cgroup is said to be: read at every look, in microseconds."""
        self._known_limit = b""
        self.asked_at = 0.0
        self.most_bytes: int | None = None
        """The growth it can bear; None where that is not known."""

    def ask(self, growth: int) -> None:
        now, limit = time.monotonic(), self._stated_limit()
        if now - self.asked_at < ASK_SYSTEM_SECONDS and limit == self._known_limit:
            return
        self.asked_at, self._known_limit = now, limit
        spare = self._spare_bytes(growth)
        if spare is not None:
            self.most_bytes = max(0, growth + spare - SYSTEM_MARGIN_BYTES)
