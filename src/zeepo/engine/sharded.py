"""One PARAM chunk on all ranks, what is split, and what facts ranks exchange are about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from zeepo.chunks.layout import Layout
from zeepo.chunks.store import Chunk, Kind
from zeepo.engine.shards import GatherTier
from zeepo.sharding.ranges import Range


class Subject(IntEnum):
    """What facts are about."""

    START = 1
    VALUES = 2
    BACKWARD = 3
    SAMPLES = 8
    STEP = 4
    CHANGE = 5
    NORM = 6
    CLOSE = 7
    LOSS = 9


@dataclass(frozen=True)
class Stages:
    """What is split over the ranks."""

    stage: int

    def splits(self, kind: Kind) -> bool:
        return self.stage >= {Kind.STATE: 1, Kind.GRAD: 2, Kind.PARAM: 3}[kind]


class Sharded:
    """One PARAM chunk and what goes with it on all ranks."""

    def __init__(self, whole: Chunk, ranges: Sequence[Range], rank: int):
        self.whole = whole
        self.ranges = ranges
        self.own = ranges[rank]
        self.version = 0
        """How often it was updated; the same on every rank."""
        self.param: GatherTier | None = None
        """Where the whole comes from, when parameters are split."""
        self.contribution: Chunk | None = None
        """What backward made here and is not on its way to the owners yet."""
        self.spare: Chunk | None = None
        """An empty chunk for the next contribution."""
        self.fresh: set[int] = set()
        """The parameters that got a gradient in this backward."""
        self.sent: set[int] | None = None
        """The parameters whose gradients of this backward are on their way; None before."""
        self.grad: GatherTier | None = None
        """Where the whole reduced gradient comes from."""

    @property
    def label(self) -> str:
        return self.whole.label

    @property
    def parameters(self) -> list[tuple[str, int, int]]:
        """Name, first and last byte of each parameter in the chunk."""
        slots = self.whole.layout.slots
        return [(slot.name, slot.offset_bytes, slot.end_bytes) for slot in slots]


def elements_in(
    part: Range, layout: Layout, itemsizes: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Of each slot, where the elements that lie in a range begin and how many they are."""
    starts, numels = [], []
    for slot, itemsize in zip(layout.slots, itemsizes, strict=True):
        inside = part.intersect(slot.offset_bytes, slot.end_bytes)
        starts.append((inside.low - slot.offset_bytes) // itemsize if inside.nbytes else 0)
        numels.append(inside.nbytes // itemsize)
    return starts, numels
