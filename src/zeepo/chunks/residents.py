"""Which chunks stay in RAM from step to step, and how much room they have. Pure.

To keep what was used last saves a read where the direction of a step turns. To keep the same chunks
all the time saves every one of their transfers, the write of what an update changed among them: a
parameter's two reads and a write, a state's one and one. So the room that no moment of a step needs
is given to a fixed set of chunks; which, is `choosing`'s work.

How much room that is comes from the last step: what its moments left of the limit beside what was
leased, less room for what is on its way. A chunk takes room from the moments at which it is not
leased anyway: the weight of a large head may stay although the moment that computes with it is the
worst of the step. When a chunk of the set had to leave all the same, the set gets smaller by as
much.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import accumulate

from zeepo.chunks.choosing import Link, Movable, Rooms, choose

USUAL_ON_THEIR_WAY = 8
"""Room that is left to reading ahead and writing behind: so many chunks of the usual size..."""
WEIGHTY_ON_THEIR_WAY = 4
"""...or so many of the size that half of all bytes are in, where few chunks are most of them."""
RECENT = 2
"""How many ends of steps are looked back at: each of two optimizers ends one, with its own part."""
LARGE_SHARE = 1 / 10
"""Of a chunk larger than this part of the limit it matters when it is leased..."""
LARGEST_SHARE = 1 / 4
"""...and one larger than this does not stay: it would be most of the set."""
WORTH_CHANGING = 1 / 16
"""The set changes when its room did by at least this part of the limit..."""
WORTH_CHANGING_SPEED = 1 / 4
"""...or the tiers' speed by this part of itself."""
REGRET = 15 / 16
"""How much of what the set was too large by is still held against it a step later."""


class Residents:
    """The set, and what one step teaches about its size."""

    def __init__(self) -> None:
        self.keys: frozenset[int] = frozenset()
        self._rooms: Rooms = {}
        self._bytes_per_second = 0.0
        """What the set was chosen for."""
        self._recent_rooms: deque[Rooms] = deque(maxlen=RECENT)
        self._recent: deque[dict[int, Movable]] = deque(maxlen=RECENT)
        self._least_limit_bytes: int | None = None
        self._least_left_bytes: dict[frozenset[int], int] = {}
        """By what was leased."""
        self._left: dict[int, int] = {}
        """Of the set, those that had to leave in this step, with their bytes."""
        self._regret_bytes = 0.0

    def note_lease(self, leased: frozenset[int], nbytes: int, limit_bytes: int) -> None:
        """So much is needed at once, for these chunks too, under the limit of this moment."""
        left_bytes = limit_bytes - nbytes
        if left_bytes < self._least_left_bytes.get(leased, limit_bytes + 1):
            self._least_left_bytes[leased] = left_bytes
        if self._least_limit_bytes is None or limit_bytes < self._least_limit_bytes:
            self._least_limit_bytes = limit_bytes

    def note_eviction(self, key: int, nbytes: int) -> None:
        """A chunk had to leave."""
        if key in self.keys:
            self._left[key] = nbytes

    def end_step(
        self, movable: Iterable[Movable], other_bytes: int, bytes_per_second: float = 0.0
    ) -> None:
        """Choose anew, if what the step showed makes enough of a difference.

        `other_bytes` are what the limit must leave to others than these chunks; `bytes_per_second`
        is how fast they came and went, or 0 where nobody knows.
        """
        self._recent.append({chunk.key: chunk for chunk in movable})
        known: dict[int, Movable] = {}
        for step in self._recent:
            known |= step
        limit_bytes = self._least_limit_bytes or 0
        self._regret_bytes = REGRET * self._regret_bytes + sum(self._left.values())
        ahead_bytes = _bytes_on_their_way([chunk.nbytes for chunk in known.values()])
        taken_bytes = other_bytes + ahead_bytes + int(self._regret_bytes)
        self._recent_rooms.append(self._find_rooms(known, limit_bytes, taken_bytes))
        rooms = _least(item for recent in self._recent_rooms for item in recent.items())
        self._least_limit_bytes = None
        self._least_left_bytes.clear()
        self._left.clear()
        is_known = self.keys <= known.keys()
        is_as_fast = abs(bytes_per_second - self._bytes_per_second) <= (
            WORTH_CHANGING_SPEED * self._bytes_per_second
        )
        if is_known and is_as_fast and _are_close(rooms, self._rooms, WORTH_CHANGING * limit_bytes):
            return
        self._rooms, self._bytes_per_second = rooms, bytes_per_second
        link = Link(bytes_per_second, ahead_bytes)
        self.keys = choose(known.values(), rooms, int(LARGEST_SHARE * limit_bytes), link)

    def _find_rooms(
        self, known: Mapping[int, Movable], limit_bytes: int, taken_bytes: int
    ) -> Rooms:
        if not known:
            return {}
        large = {c.key for c in known.values() if c.nbytes > LARGE_SHARE * limit_bytes}
        return _least(
            (leased & large, max(0, left_bytes - taken_bytes))
            for leased, left_bytes in self._least_left_bytes.items()
        )


def _bytes_on_their_way(sizes: Iterable[int]) -> int:
    """Room for what is being read and written, by how large chunks are."""
    ordered = sorted(sizes)
    if not ordered:
        return 0
    halfway = bisect_left(list(accumulate(ordered)), sum(ordered) / 2)
    usual, weighty = ordered[len(ordered) // 2], ordered[halfway]
    return max(USUAL_ON_THEIR_WAY * usual, WEIGHTY_ON_THEIR_WAY * weighty)


def _least(rooms: Iterable[tuple[frozenset[int], int]]) -> Rooms:
    found: dict[frozenset[int], int] = {}
    for leased, room_bytes in rooms:
        found[leased] = min(room_bytes, found.get(leased, room_bytes))
    return found


def _are_close(rooms: Rooms, others: Rooms, nbytes: float) -> bool:
    return rooms.keys() == others.keys() and all(abs(rooms[k] - others[k]) < nbytes for k in rooms)
