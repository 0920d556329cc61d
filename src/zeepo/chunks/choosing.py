"""Which chunks should stay in RAM, of those that move in a step. Pure.

Two things cost time. Transfers that come in a burst are what training waits for (the update of an
embedding moves as much as ten layers and computes little), while few bytes a second go unnoticed:
the set that makes the sum of the squares of what moves in each slice of the step smallest is the
most level. But where the disk has little time left, every byte is waited for: then the best set is
the one with the most transfers for its bytes. Between the two lies a constant that is added to what
moves in each slice. How long a step takes with the set of each constant is estimated from the speed
of the transfers in the last steps. The most level set is taken unless another makes it shorter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

SLICES = 64
"""A step is looked at in so many parts of the same duration."""
CONSTANTS = (0.0, 4.0, 8.0, 16.0, 64.0)
"""Added to what moves in each slice, as shares of its mean: from level to little in all."""
AS_LONG = 1.01
"""Sets whose steps differ by less take equally long: then the most level is taken, which bears that
the disk is slower for a while."""
MANY_KINDS = 500
"""With so many chunks that are not alike only the first and the last constant are tried."""
ROUNDS = 3
"""A step is followed by others like it: what it begins with is what the one before left."""
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


@dataclass(frozen=True)
class Link:
    """How chunks come and go."""

    bytes_per_second: float
    """Of all transfers together; 0 where it is not known."""
    ahead_bytes: int
    """How far it may be ahead of what computes, where no room is left besides."""


def choose(
    known: Iterable[Movable], rooms: Rooms, largest_bytes: int, link: Link
) -> frozenset[int]:
    """Chunks that fit into `rooms`, so that a step is short."""
    candidates = _Candidates(known)
    if not candidates.seconds or not link.bytes_per_second:
        return candidates.choose(rooms, largest_bytes, 0.0)[0]
    is_simple = len(candidates.alike) <= MANY_KINDS
    found: list[tuple[float, frozenset[int]]] = []
    for constant in CONSTANTS if is_simple else (CONSTANTS[0], CONSTANTS[-1]):
        chosen, moving = candidates.choose(rooms, largest_bytes, constant)
        kept_bytes = sum(chunk.nbytes for chunk in candidates.ordered if chunk.key in chosen)
        free_bytes = max(0, max(rooms.values(), default=0) - kept_bytes)  # at most moments
        wider = Link(link.bytes_per_second, link.ahead_bytes + free_bytes)
        found.append((seconds_of_step(moving, candidates.seconds, wider), chosen))
    shortest = min(seconds for seconds, _ in found)
    return next(chosen for seconds, chosen in found if seconds <= AS_LONG * shortest)


def seconds_of_step(moving: Sequence[int], seconds: float, link: Link) -> float:
    """How long a step takes whose slices compute for `seconds` in all and move so much each.

    A slice computes when what it moves has been moved; transfers run ahead of it, but not by more
    than there is room for.
    """
    slice_seconds = seconds / len(moving)
    computed = moved = began = 0.0
    ends: list[tuple[int, float]] = []
    """What was moved before each slice ended, and when that was."""
    total_bytes = num_ended = 0
    for number in range(ROUNDS * len(moving)):
        nbytes = moving[number % len(moving)]
        if number == (ROUNDS - 1) * len(moving):
            began = computed
        while num_ended < number and total_bytes - ends[num_ended][0] > link.ahead_bytes:
            moved = max(moved, ends[num_ended][1])
            num_ended += 1
        total_bytes += nbytes
        moved += nbytes / link.bytes_per_second
        computed = max(computed, moved) + slice_seconds
        ends.append((total_bytes, computed))
    return computed - began


class _Candidates:
    """The chunks in the order of their first moments, and which of them move in the same slices."""

    def __init__(self, known: Iterable[Movable]) -> None:
        self.ordered = sorted(known, key=lambda c: (c.moments[0], c.key))
        self.seconds = max((max(c.moments) for c in self.ordered), default=0.0)
        self.alike: dict[tuple[int, ...], list[tuple[float, int]]] = {}
        """By slices, chunks that are worth the same: their places in `ordered`, the next last."""
        self._moving = [0] * SLICES
        for number, chunk in enumerate(self.ordered):
            slices = tuple(min(SLICES - 1, self._slice_of(moment)) for moment in chunk.moments)
            self.alike.setdefault(slices, []).append((number * GOLDEN % 1, number))
            for index in slices:
                self._moving[index] += chunk.nbytes
        for group in self.alike.values():
            group.sort(reverse=True)

    def _slice_of(self, moment: float) -> int:
        return int(SLICES * moment / (self.seconds or 1.0))

    def choose(
        self, rooms: Rooms, largest_bytes: int, constant: float
    ) -> tuple[frozenset[int], list[int]]:
        """The set that is best with this constant, and what moves in each slice beside it: first
        chunks where the most moves, of two there the one with more transfers, and where all is
        level, evenly.
        """
        moving = list(self._moving)
        added = constant * sum(moving) / SLICES
        alike = {slices: list(group) for slices, group in self.alike.items()}

        def entry(slices: tuple[int, ...]) -> tuple[float, tuple[float, int], tuple[int, ...]]:
            return -sum(moving[index] + added for index in slices), alike[slices][-1], slices

        heap = [entry(slices) for slices in alike]
        heapify(heap)
        chosen: set[int] = set()
        left_bytes = dict(rooms)
        while heap:
            # What moves gets less with every choice: what is on top, and still worth that, is best.
            top = heappop(heap)
            slices = top[2]
            if top == entry(slices):
                chunk = self.ordered[alike[slices].pop()[1]]
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
        return frozenset(chosen), moving
