"""Records of one size in an extent on disk, read and written by their numbers.

A record has a checksum of its own, so one can be moved without its neighbours. None lies in two
blocks of the tier: what is left of a block is not used.
"""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from zeepo.errors import InternalError
from zeepo.memory.block_io import Run
from zeepo.memory.disk_tier import DiskTier
from zeepo.memory.mapping import PAGE_BYTES

Numbers = NDArray[np.int64]
"""Of records, in order, each at most once."""


class Records:
    """`num_records` of `record_bytes` each; every one has to be written before it is read."""

    def __init__(self, tier: DiskTier, label: str, num_records: int, record_bytes: int) -> None:
        if record_bytes % PAGE_BYTES or record_bytes > tier.block_bytes:
            raise InternalError(f"records of {record_bytes} bytes cannot be moved alone")
        self.record_bytes = record_bytes
        self.num_records = num_records
        self._tier = tier
        self._in_block = tier.block_bytes // record_bytes
        whole, rest = divmod(num_records, self._in_block)
        nbytes = whole * tier.block_bytes + rest * record_bytes
        self._extent = tier.allocate(label, nbytes, grain_bytes=record_bytes)

    def read(
        self, numbers: Numbers, target: memoryview, *, is_urgent: bool = False
    ) -> Future[None]:
        """Records, one behind the other, into `target`."""
        return self._tier.read_runs(self._extent, self._runs(numbers), target, is_urgent=is_urgent)

    def write(self, numbers: Numbers, source: memoryview) -> Future[None]:
        """Replace records by those in `source`, one behind the other."""
        return self._tier.write_runs(self._extent, self._runs(numbers), source)

    def free(self) -> None:
        self._tier.free(self._extent)

    def _runs(self, numbers: Numbers) -> list[Run]:
        """Neighbours in a block move at once."""
        if not len(numbers):
            return []
        if numbers[0] < 0 or numbers[-1] >= self.num_records:
            raise InternalError(f"record {numbers[0]} or {numbers[-1]} of {self.num_records}")
        breaks = np.diff(numbers) != 1
        breaks |= numbers[1:] % self._in_block == 0
        starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        lengths = np.diff(np.concatenate((starts, [len(numbers)])))
        return [
            Run(self._place(int(numbers[start])), int(start) * size, int(length) * size)
            for size in (self.record_bytes,)
            for start, length in zip(starts, lengths, strict=True)
        ]

    def _place(self, number: int) -> int:
        """Where a record begins in the extent."""
        block, index = divmod(number, self._in_block)
        return block * self._tier.block_bytes + index * self.record_bytes
