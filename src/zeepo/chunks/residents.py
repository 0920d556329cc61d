"""Which chunks stay in RAM from step to step. Pure.

To keep what was used last saves a read where the direction of a step turns. To keep the same chunks
all the time saves every one of their transfers, the write of what an update changed among them: a
parameter's two reads and a write, a state's one and one. So the room that no moment of a step needs
is given to a fixed set of chunks. Transfers that come in a burst are what training waits for (the
update of an embedding moves as much as ten layers and computes little), while few bytes a second go
unnoticed. So the set is chosen to make the sum of the squares of what moves in each slice of the
step small: first where the most moves, of two chunks there the one with more transfers, and where
all is level, evenly.

How much room that is comes from the last step: what its moments left of the limit beside what was
leased, less room for what is on its way. A chunk takes room from the moments at which it is not
leased anyway: the weight of a large head may stay although the moment that computes with it is the
worst of the step. When a chunk of the set had to leave all the same, the set gets smaller by as
much.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate

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
REGRET = 15 / 16
"""...and how much of what it was too large by is still held against it a step later."""
SLICES = 64
"""A step is looked at in so many parts of the same duration."""
GOLDEN = 0.6180339887498949


@dataclass(frozen=True)
class Movable:
    """A chunk that moves in a step."""

    key: int
    nbytes: int
    moments: tuple[float, ...]
    """When it moves, if it does not stay: seconds into the step, without time that was waited."""


Rooms = Mapping[frozenset[int], int]
"""The least room of the moments at which these large chunks, and no others, were leased."""


class Residents:
    """The set, and what one step teaches about its size."""

    def __init__(self) -> None:
        self.keys: frozenset[int] = frozenset()
        self._rooms: Rooms = {}
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
        self._recent_rooms.append(self._find_rooms(known, limit_bytes, other_bytes))
        rooms = _least(item for recent in self._recent_rooms for item in recent.items())
        self._least_limit_bytes = None
        self._least_left_bytes.clear()
        self._left.clear()
        is_known = self.keys <= known.keys()
        if is_known and _are_close(rooms, self._rooms, WORTH_CHANGING * limit_bytes):
            return
        self._rooms = rooms
        self.keys = choose(known.values(), rooms, int(LARGEST_SHARE * limit_bytes))

    def _find_rooms(
        self, known: Mapping[int, Movable], limit_bytes: int, other_bytes: int
    ) -> Rooms:
        if not known:
            return {}
        sizes = sorted(chunk.nbytes for chunk in known.values())
        halfway = bisect_left(list(accumulate(sizes)), sum(sizes) / 2)
        usual, weighty = sizes[len(sizes) // 2], sizes[halfway]
        on_their_way = max(USUAL_ON_THEIR_WAY * usual, WEIGHTY_ON_THEIR_WAY * weighty)
        taken_bytes = other_bytes + on_their_way + int(self._regret_bytes)
        large = {c.key for c in known.values() if c.nbytes > LARGE_SHARE * limit_bytes}
        return _least(
            (leased & large, max(0, left_bytes - taken_bytes))
            for leased, left_bytes in self._least_left_bytes.items()
        )


def _least(rooms: Iterable[tuple[frozenset[int], int]]) -> Rooms:
    found: dict[frozenset[int], int] = {}
    for leased, room_bytes in rooms:
        found[leased] = min(room_bytes, found.get(leased, room_bytes))
    return found


def _are_close(rooms: Rooms, others: Rooms, nbytes: float) -> bool:
    return rooms.keys() == others.keys() and all(abs(rooms[k] - others[k]) < nbytes for k in rooms)


def choose(known: Iterable[Movable], rooms: Rooms, largest_bytes: int) -> frozenset[int]:
    """Chunks that fit into `rooms`, so that what still moves is as level as it can be."""
    ordered = sorted(known, key=lambda c: (c.moments[0], c.key))
    moving = Counter[int]()
    alike: dict[tuple[int, ...], list[tuple[float, int]]] = {}
    """Chunks that move in the same slices, and so are worth the same: their places in `ordered`."""
    for number, (chunk, slices) in enumerate(zip(ordered, _slices_of(ordered), strict=True)):
        alike.setdefault(slices, []).append((number * GOLDEN % 1, number))
        for index in slices:
            moving[index] += chunk.nbytes

    def entry(slices: tuple[int, ...]) -> tuple[int, tuple[float, int], tuple[int, ...]]:
        return -sum(moving[index] for index in slices), alike[slices][-1], slices

    for group in alike.values():
        group.sort(reverse=True)  # the next is the last
    heap = [entry(slices) for slices in alike]
    heapify(heap)
    chosen: set[int] = set()
    left_bytes = dict(rooms)
    while heap:
        # What moves gets less with every choice: what is on top, and still worth that, is the best.
        top = heappop(heap)
        slices = top[2]
        if top == entry(slices):
            chunk = ordered[alike[slices].pop()[1]]
            beside = [leased for leased in left_bytes if chunk.key not in leased]
            least_bytes = min((left_bytes[leased] for leased in beside), default=0)
            if chunk.nbytes <= min(least_bytes, largest_bytes):
                chosen.add(chunk.key)
                for leased in beside:
                    left_bytes[leased] -= chunk.nbytes
                for index in slices:
                    moving[index] -= chunk.nbytes
        if alike[slices]:
            heappush(heap, entry(slices))
    return frozenset(chosen)


def _slices_of(known: Sequence[Movable]) -> list[tuple[int, ...]]:
    """In which slices of the step each chunk moves."""
    end = max((max(c.moments) for c in known), default=0.0) or 1.0
    return [tuple(min(SLICES - 1, int(SLICES * m / end)) for m in c.moments) for c in known]
