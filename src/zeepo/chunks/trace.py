"""What one step did, as a forecast of what the next one will do. Pure.

A trace is the sequence of chunks accessed in a step (the same chunk twice in a row counts once),
and when that was.
The last step's sequence is the forecast; every access moves a cursor through it. When the program
takes another way (an early exit, a dropped layer, an evaluation between steps) the cursor is set
anew to the place whose recent past resembles ours most. A wrong forecast costs time, never a
wrong value.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

CONTEXT = 4
"""How many accesses back two places are compared."""
MAX_RECORDED = 20_000
"""A program that takes no optimizer steps (an evaluation) has its trace cut here."""


class Trace:
    """The forecast, the cursor in it, and the recording of the current step."""

    def __init__(self) -> None:
        self._forecast: list[int] = []
        self._positions: dict[int, list[int]] = {}
        self._cursor = 0
        self._recording: list[int] = []
        self._seconds: list[float] = []
        """When the accesses of the forecast were, from the first on..."""
        self._recorded_seconds: list[float] = []
        """...and those of the recording, on the caller's clock."""

    def access(self, key: int, seconds: float = 0.0) -> bool:
        """Note an access at that time. True when it is a new one, not a repetition of the last."""
        if self._recording and self._recording[-1] == key:
            return False
        if len(self._recording) >= MAX_RECORDED:
            self.end_step()
        self._recording.append(key)
        self._recorded_seconds.append(seconds)
        if self._cursor < len(self._forecast) and self._forecast[self._cursor] == key:
            self._cursor += 1
        else:
            self._resynchronise(key)
        return True

    def end_step(self) -> None:
        """The step is over: what was recorded becomes the forecast."""
        if not self._recording:
            return
        self._forecast = self._recording
        first = self._recorded_seconds[0]
        self._seconds = [seconds - first for seconds in self._recorded_seconds]
        self._recorded_seconds = []
        self._positions = {}
        for position, key in enumerate(self._forecast):
            self._positions.setdefault(key, []).append(position)
        self._recording = []
        self._cursor = 0

    def next_use(self, key: int) -> float:
        """Accesses until `key` is needed again; infinity when it is not in the forecast."""
        positions = self._positions.get(key)
        if not positions:
            return float("inf")
        index = bisect_left(positions, self._cursor)
        if index < len(positions):
            return positions[index] - self._cursor
        return positions[0] + len(self._forecast) - self._cursor

    def upcoming(self, count: int) -> list[int]:
        """The next `count` different chunks, nearest first, into the following step if need be."""
        seen: dict[int, None] = {}
        for step in range(len(self._forecast)):
            if len(seen) >= count:
                break
            key = self._forecast[(self._cursor + step) % len(self._forecast)]
            seen.setdefault(key)
        return list(seen)

    def visits(self, apart: int) -> dict[int, list[float]]:
        """When a step comes to each chunk, uses less than `apart` accesses from each other being
        one visit."""
        length = len(self._forecast)
        found: dict[int, list[float]] = {}
        for key, positions in self._positions.items():
            before = [positions[-1] - length, *positions]
            arrivals = [b for a, b in pairwise(before) if b - a >= apart] or positions[:1]
            found[key] = [self._seconds[position] for position in arrivals]
        return found

    def last_use(self, key: int) -> float:
        """When a step is done with a chunk."""
        return self._seconds[self._positions[key][-1]]

    def first_use_order(self) -> dict[int, int]:
        """Rank of each chunk by its first access in a step: the order the next step needs them."""
        return {key: positions[0] for key, positions in self._positions.items()}

    def _resynchronise(self, key: int) -> None:
        positions = self._positions.get(key)
        if not positions:
            return
        length = len(self._forecast)
        recent = self._recording[-1 - CONTEXT : -1][::-1]

        def score(position: int) -> tuple[int, int]:
            same = 0
            for back, seen in enumerate(recent, start=1):
                if position - back < 0 or self._forecast[position - back] != seen:
                    break
                same += 1
            return same, -((position - self._cursor) % length)

        self._cursor = max(positions, key=score) + 1
