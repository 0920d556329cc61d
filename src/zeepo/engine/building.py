"""What is told while `zeepo.lazy` builds a model: `build` now and then, `build_end` at its end.

A large model takes minutes to fill with random numbers, and nothing else would be seen of it.
"""

from __future__ import annotations

import time

from zeepo import events
from zeepo.config import Options
from zeepo.engine.observing import Observation
from zeepo.planner.machine import resident_growth_bytes

TELL_SECONDS = 0.1


class Building:
    """The events of one lazy block."""

    def __init__(self, options: Options) -> None:
        self._observation = Observation(options)
        self._started = time.monotonic()
        self._told_at = float("-inf")
        self._num_parameters = 0
        self._nbytes = 0

    def add(self, nbytes: int) -> None:
        """One more parameter is there; its values may still be to come."""
        self._num_parameters += 1
        self._nbytes += nbytes
        if events.is_heard() and time.monotonic() - self._told_at >= TELL_SECONDS:
            self._told_at = time.monotonic()
            self._tell("build")

    def end(self, *, is_whole: bool) -> None:
        """The block is left; `is_whole` says whether the model was built to its end."""
        if is_whole and events.is_heard():
            self._tell("build_end")
        self._observation.stop()

    def _tell(self, name: str) -> None:
        events.emit(
            name,
            num_parameters=self._num_parameters,
            parameter_bytes=self._nbytes,
            seconds=time.monotonic() - self._started,
            resident_growth_bytes=resident_growth_bytes(),
        )
