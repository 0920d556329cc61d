"""Which directory holds which block of an extent: pure arithmetic.

A pattern is a short cycle of directory numbers in proportion to their weights, spread evenly. An
extent enters the cycle at a phase; block `b` is on directory `order[(phase + b) % period]`.
Invariant: an extent's blocks on one directory fill the slots 0, 1, 2, ... of one contiguous
region, in block order. The extent's last block is always its directory's last slot.
"""

from collections.abc import Sequence
from fractions import Fraction

_PERIOD = 64


class StripePattern:
    """The cycle for directories with these weights (their bandwidths, in any unit)."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.order = stripe_order(weights)
        self.period = len(self.order)
        self.num_directories = len(weights)
        # _before[i][d]: how many of the cycle's first i entries are directory d.
        self._before = [tuple([0] * self.num_directories)]
        for directory in self.order:
            counts = list(self._before[-1])
            counts[directory] += 1
            self._before.append(tuple(counts))

    def locate(self, phase: int, block: int) -> tuple[int, int]:
        """The directory that holds `block`, and the block's slot in the extent's region there."""
        directory = self.order[(phase + block) % self.period]
        slot = self._count(phase + block, directory) - self._count(phase, directory)
        return directory, slot

    def num_slots(self, phase: int, num_blocks: int) -> tuple[int, ...]:
        """How many of an extent's blocks each directory holds."""
        return tuple(
            self._count(phase + num_blocks, directory) - self._count(phase, directory)
            for directory in range(self.num_directories)
        )

    def _count(self, position: int, directory: int) -> int:
        cycles, rest = divmod(position, self.period)
        return cycles * self._before[-1][directory] + self._before[rest][directory]


def stripe_order(weights: Sequence[float]) -> tuple[int, ...]:
    """One cycle of directory numbers: shares by largest remainder, at least one entry each."""
    if not weights or not all(0 < weight < float("inf") for weight in weights):
        raise ValueError(f"stripe weights must be positive and finite, got {list(weights)}")
    if len(set(weights)) == 1:
        return tuple(range(len(weights)))
    exact = [Fraction(weight) for weight in weights]
    period = max(_PERIOD, len(weights))
    shares = [weight * period / sum(exact) for weight in exact]
    counts = [max(1, int(share)) for share in shares]
    # Hand out, or take back, what rounding left over, where it distorts the least.
    while sum(counts) < period:
        counts[max(range(len(counts)), key=lambda d: shares[d] - counts[d])] += 1
    while sum(counts) > period:
        candidates = [d for d in range(len(counts)) if counts[d] > 1]
        counts[max(candidates, key=lambda d: counts[d] - shares[d])] -= 1
    places = [
        (Fraction(2 * turn + 1, 2 * count), directory)
        for directory, count in enumerate(counts)
        for turn in range(count)
    ]
    return tuple(directory for _, directory in sorted(places))
