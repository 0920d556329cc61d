"""Which chunks stay in RAM from step to step. Pure.

To keep what was used last saves a read where the direction of a step turns. To keep the same chunks
all the time saves every one of their transfers, the write of what an update changed among them: a
parameter's two reads and a write, a state's one and one. So the room that no moment of a step needs
is given to a fixed set of chunks: those with the most transfers first, spread evenly over the step,
so that reading and writing never come in a burst.

How much room that is comes from the last step: the least limit it saw, less what was leased at
once at the worst moment, less room for what is on its way. When a chunk of the set had to leave all
the same, the set gets smaller by as much.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

CHUNKS_ON_THEIR_WAY = 12
"""Room that is left to reading ahead and writing behind, in chunks of the usual size."""
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
        self._least_limit_bytes: int | None = None
        self._most_leased_bytes = 0
        self._left_bytes = 0
        self._regret_bytes = 0.0

    def note_lease(self, nbytes: int, limit_bytes: int) -> None:
        """So much is needed at once, under a limit."""
        if nbytes > self._most_leased_bytes:
            self._most_leased_bytes = nbytes
        if self._least_limit_bytes is None or limit_bytes < self._least_limit_bytes:
            self._least_limit_bytes = limit_bytes

    def note_eviction(self, key: int, nbytes: int) -> None:
        """A chunk had to leave."""
        if key in self.keys:
            self._left_bytes += nbytes

    def end_step(self, movable: Iterable[Movable], other_bytes: int) -> None:
        """Choose anew, if what the step showed makes enough of a difference.

        `other_bytes` are what the limit must leave to others than these chunks.
        """
        known = list(movable)
        limit_bytes = self._least_limit_bytes or 0
        self._regret_bytes = REGRET * self._regret_bytes + self._left_bytes
        room_bytes = self._room(known, limit_bytes, other_bytes)
        self._least_limit_bytes, self._most_leased_bytes, self._left_bytes = None, 0, 0
        is_known = self.keys <= {chunk.key for chunk in known}
        if is_known and abs(room_bytes - self._room_bytes) < WORTH_CHANGING * limit_bytes:
            return
        self._room_bytes = room_bytes
        self.keys = choose(known, room_bytes, int(LARGEST_SHARE * limit_bytes))

    def _room(self, known: list[Movable], limit_bytes: int, other_bytes: int) -> int:
        if not known:
            return 0
        on_their_way = CHUNKS_ON_THEIR_WAY * int(median(chunk.nbytes for chunk in known))
        needed = self._most_leased_bytes + other_bytes + on_their_way
        return max(0, limit_bytes - needed - int(self._regret_bytes))


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
