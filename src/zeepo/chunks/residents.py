"""Which chunks stay in RAM from step to step. Pure.

To keep what was used last saves a read where the direction of a step turns. To keep the same chunks
all the time saves every one of their transfers, the write of what an update changed among them: a
parameter's two reads and a write, a state's one and one. So the room that no moment of a step needs
is given to a fixed set of chunks: those with the most transfers first, spread evenly over the step,
so that reading and writing never come in a burst.

How much room that is comes from the last step: what its worst moment left of the limit beside what
was leased, less room for what is on its way. When a chunk of the set had to leave all the same, the
set gets smaller by as much.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

USUAL_ON_THEIR_WAY = 12
"""Room that is left to reading ahead and writing behind: so many chunks of the usual size..."""
WEIGHTY_ON_THEIR_WAY = 4
"""...or so many of the size that half of all bytes are in, where few chunks are most of them."""
RECENT = 2
"""How many ends of steps are looked back at: each of two optimizers ends one, with its own part."""
LARGEST_SHARE = 1 / 8
"""A chunk larger than this part of the limit does not stay: it would be most of the set."""
WORTH_CHANGING = 1 / 16
"""The set changes when its room did by at least this part of the limit..."""
REGRET = 15 / 16
"""...and how much of what it was too large by is still held against it a step later."""
GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Movable:
    """A chunk that moves in a step."""

    key: int
    nbytes: int
    num_transfers: int
    """How often it moves in a step when it does not stay."""
    position: int
    """Its first use in the step."""


class Residents:
    """The set, and what one step teaches about its size."""

    def __init__(self) -> None:
        self.keys: frozenset[int] = frozenset()
        self._room_bytes = 0
        self._recent_rooms: deque[int] = deque(maxlen=RECENT)
        self._recent: deque[dict[int, Movable]] = deque(maxlen=RECENT)
        self._least_limit_bytes: int | None = None
        self._least_left_bytes: int | None = None
        self._left: dict[int, int] = {}
        """Of the set, those that had to leave in this step, with their bytes."""
        self._regret_bytes = 0.0

    def note_lease(self, nbytes: int, limit_bytes: int) -> None:
        """So much is needed at once, under the limit of this moment."""
        left_bytes = limit_bytes - nbytes
        if self._least_left_bytes is None or left_bytes < self._least_left_bytes:
            self._least_left_bytes = left_bytes
        if self._least_limit_bytes is None or limit_bytes < self._least_limit_bytes:
            self._least_limit_bytes = limit_bytes

    def note_eviction(self, key: int, nbytes: int) -> None:
        """A chunk had to leave."""
        if key in self.keys:
            self._left[key] = nbytes

    def end_step(self, movable: Iterable[Movable], other_bytes: int) -> None:
        """Choose anew, if what the step showed makes enough of a difference.

        `other_bytes` are what the limit must leave to others than these chunks.
        """
        self._recent.append({chunk.key: chunk for chunk in movable})
        known: dict[int, Movable] = {}
        for step in self._recent:
            known |= step
        limit_bytes = self._least_limit_bytes or 0
        self._regret_bytes = REGRET * self._regret_bytes + sum(self._left.values())
        self._recent_rooms.append(self._room(list(known.values()), other_bytes))
        room_bytes = min(self._recent_rooms)
        self._least_limit_bytes = self._least_left_bytes = None
        self._left.clear()
        is_known = self.keys <= known.keys()
        if is_known and abs(room_bytes - self._room_bytes) < WORTH_CHANGING * limit_bytes:
            return
        self._room_bytes = room_bytes
        self.keys = choose(known.values(), room_bytes, int(LARGEST_SHARE * limit_bytes))

    def _room(self, known: list[Movable], other_bytes: int) -> int:
        if not known:
            return 0
        sizes = sorted(chunk.nbytes for chunk in known)
        halfway = bisect_left(list(accumulate(sizes)), sum(sizes) / 2)
        usual, weighty = sizes[len(sizes) // 2], sizes[halfway]
        on_their_way = max(USUAL_ON_THEIR_WAY * usual, WEIGHTY_ON_THEIR_WAY * weighty)
        left_bytes = (self._least_left_bytes or 0) - other_bytes - on_their_way
        return max(0, left_bytes - int(self._regret_bytes))


def choose(known: Iterable[Movable], room_bytes: int, largest_bytes: int) -> frozenset[int]:
    """Chunks of at most `room_bytes`: the more transfers the better, spread over the step."""
    chosen: set[int] = set()
    ordered = sorted(known, key=lambda c: (c.position, c.key))
    spread = {chunk.key: index * GOLDEN % 1 for index, chunk in enumerate(ordered)}
    for chunk in sorted(ordered, key=lambda c: (-c.num_transfers, spread[c.key])):
        if chunk.nbytes <= min(room_bytes, largest_bytes):
            chosen.add(chunk.key)
            room_bytes -= chunk.nbytes
    return frozenset(chosen)
