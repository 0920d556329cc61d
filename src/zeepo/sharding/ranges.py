"""Which bytes of a chunk belong to which rank. Pure: numbers in, numbers out.

Every rank computes the same ranges from the same numbers, so nobody has to be asked. Boundaries
lie at multiples of 64 bytes, where a cut changes no bit of an elementwise update (chunks/layout);
an optimizer that needs whole parameters gets boundaries where parameters begin.

The invariant: the ranges of a chunk are in the order of the ranks, do not overlap and cover it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from zeepo.errors import ConfigError

ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Range:
    """The bytes [low, high) of a chunk."""

    low: int
    high: int

    @property
    def nbytes(self) -> int:
        return self.high - self.low

    def intersect(self, low: int, high: int) -> Range:
        """The part of [low, high) that lies in this range; empty if there is none."""
        start = min(max(low, self.low), self.high)
        return Range(start, max(start, min(high, self.high)))


def split(
    nbytes: int, weights: Sequence[float], *, at: Sequence[int] | None = None
) -> tuple[Range, ...]:
    """One range for each weight, as nearly in proportion as the boundaries allow.

    `at`: the only places, ascending, where a boundary may lie; without it every multiple of 64.
    """
    total = sum(weights)
    if not weights or total <= 0 or min(weights) < 0:
        raise ConfigError(
            f"ranks cannot share by weights {list(weights)}: give each rank a number that is not "
            "negative, and at least one that is positive."
        )
    bounds = [0]
    share = 0.0
    for weight in weights[:-1]:
        share += weight
        ideal = int(nbytes * (share / total))
        bounds.append(max(bounds[-1], _nearest(ideal, nbytes, at)))
    bounds.append(nbytes)
    return tuple(Range(low, high) for low, high in pairwise(bounds))


def _nearest(ideal: int, nbytes: int, at: Sequence[int] | None) -> int:
    if at is None:
        return min(nbytes, (ideal + ALIGNMENT_BYTES // 2) // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
    index = bisect_left(at, ideal)
    candidates = [*at[max(0, index - 1) : index + 1], nbytes]
    return min(candidates, key=lambda place: abs(place - ideal))
