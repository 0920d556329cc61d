"""Which bytes of one scratch file are in use: pure bookkeeping.

Freed ranges are either *backed* (the file system still holds blocks for them: fast to write
again) or *holes* (given back to the file system). Invariant: used ranges, backed ranges and holes
never overlap and together cover [0, end). `backed_bytes + used_bytes` bounds what the file takes
on disk; since the file is sparse, fragmentation costs addresses and no space.
"""

import bisect


class FileSpace:
    """First-fit allocation of byte ranges in a file that can grow without end."""

    def __init__(self) -> None:
        self.end = 0
        self.used_bytes = 0
        self._backed = _RangeSet()
        self._holes = _RangeSet()

    @property
    def backed_bytes(self) -> int:
        """Free bytes the file system has not got back."""
        return self._backed.total_bytes

    def can_reuse(self, nbytes: int) -> bool:
        """Whether `allocate` would take a backed range: no new space on disk."""
        return nbytes == 0 or self._backed.fits(nbytes)

    def allocate(self, nbytes: int) -> int:
        """The offset of a free range of `nbytes`: a backed one, else a hole, else at the end."""
        self.used_bytes += nbytes
        if nbytes == 0:
            return 0
        for ranges in (self._backed, self._holes):
            offset = ranges.take(nbytes)
            if offset is not None:
                return offset
        offset = self.end
        self.end += nbytes
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        self.used_bytes -= nbytes
        if nbytes:
            self._backed.add(offset, offset + nbytes)

    def backed_ranges(self) -> list[tuple[int, int]]:
        return self._backed.ranges()

    def make_hole(self, start: int, stop: int) -> None:
        """Record that the whole backed range [start, stop) was given back to the file system."""
        self._backed.remove(start, stop)
        self._holes.add(start, stop)


class _RangeSet:
    """Disjoint, sorted, merged ranges."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.total_bytes = 0

    def ranges(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._stops, strict=True))

    def fits(self, nbytes: int) -> bool:
        return any(stop - start >= nbytes for start, stop in self.ranges())

    def take(self, nbytes: int) -> int | None:
        for i, (start, stop) in enumerate(self.ranges()):
            if stop - start < nbytes:
                continue
            self.total_bytes -= nbytes
            if stop - start == nbytes:
                del self._starts[i], self._stops[i]
            else:
                self._starts[i] = start + nbytes
            return start
        return None

    def add(self, start: int, stop: int) -> None:
        self.total_bytes += stop - start
        i = bisect.bisect_left(self._starts, start)
        if i < len(self._starts) and self._starts[i] == stop:
            stop = self._stops[i]
            del self._starts[i], self._stops[i]
        if i > 0 and self._stops[i - 1] == start:
            self._stops[i - 1] = stop
            return
        self._starts.insert(i, start)
        self._stops.insert(i, stop)

    def remove(self, start: int, stop: int) -> None:
        i = bisect.bisect_left(self._starts, start)
        if i == len(self._starts) or (self._starts[i], self._stops[i]) != (start, stop):
            raise ValueError(f"[{start}, {stop}) is not one of the ranges")
        self.total_bytes -= stop - start
        del self._starts[i], self._stops[i]
