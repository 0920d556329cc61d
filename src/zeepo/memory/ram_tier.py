"""The tier whose extents are buffers of a pool: the same promises as disk, moved by memory copies.

Invariant: an extent's bytes are in the pool's ledger from `allocate` until `free` has taken
effect. No checksums: this is the memory everything else is trusted to live in.
"""

import ctypes
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from zeepo.errors import InternalError
from zeepo.memory.ledger import Ledger
from zeepo.memory.mapping import address_of
from zeepo.memory.pool import Buffer, BufferPool
from zeepo.memory.tier import (
    Describe,
    Extent,
    Piece,
    assemble,
    check_live,
    check_pieces,
    check_target,
)
from zeepo.memory.transfers import TransferQueue

_PART_BYTES = 8 << 20


class _RamExtent(Extent):
    def __init__(self, label: str, nbytes: int, describe: Describe | None, buffer: Buffer) -> None:
        super().__init__(label, nbytes, describe)
        self.buffer = buffer


class RamTier:
    """Extents in RAM. Give it a pool to share buffers with others, or a ledger to have its own."""

    name = "ram"

    def __init__(
        self, source: BufferPool | Ledger, num_threads: int = 1, tag: str = "ram tier"
    ) -> None:
        self._pool = source if isinstance(source, BufferPool) else BufferPool(source)
        self._tag = tag
        self._lock = threading.Lock()
        self._live: set[_RamExtent] = set()
        self._used_bytes = 0
        self._peak_bytes = 0
        self._bytes_read = 0
        self._bytes_written = 0
        self._queue = TransferQueue("ram", num_threads)
        self._finalizer = weakref.finalize(self, self._queue.close)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes

    @property
    def bytes_read(self) -> int:
        return self._bytes_read

    @property
    def bytes_written(self) -> int:
        return self._bytes_written

    @property
    def seconds_busy(self) -> float:
        return self._queue.seconds_busy

    def allocate(self, label: str, nbytes: int, describe: Describe | None = None) -> Extent:
        buffer = self._pool.acquire(nbytes, self._tag)
        with self._lock:
            self._used_bytes += buffer.capacity_bytes
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
            extent = _RamExtent(label, nbytes, describe, buffer)
            self._live.add(extent)
        return extent

    def write(self, extent: Extent, pieces: Sequence[tuple[int, memoryview]]) -> Future[None]:
        own = _own(extent)
        checked = check_pieces(own, pieces)
        parts = [
            partial(self._write_part, own, checked, low, high) for low, high in _ranges(own.nbytes)
        ]
        future = self._queue.submit(own.lane, parts, exclusive=True)
        own.num_writes += 1
        return future

    def read(self, extent: Extent, target: memoryview) -> Future[None]:
        own = _own(extent, to_read=True)
        checked = check_target(own, target)
        parts = [
            partial(self._read_part, own, checked, low, high) for low, high in _ranges(own.nbytes)
        ]
        return self._queue.submit(own.lane, parts, exclusive=False)

    def free(self, extent: Extent) -> None:
        own = _own(extent)
        own.is_freed = True
        self._queue.submit(own.lane, (), exclusive=True, on_done=partial(self._give_back, own))

    def close(self) -> None:
        self._finalizer()
        for extent in list(self._live):
            self._give_back(extent)

    def _give_back(self, extent: _RamExtent) -> None:
        with self._lock:
            if extent not in self._live:
                return
            self._live.remove(extent)
            self._used_bytes -= extent.buffer.capacity_bytes
        extent.buffer.release()

    def _write_part(
        self, extent: _RamExtent, pieces: list[Piece], low: int, high: int, thread_index: int
    ) -> None:
        assemble(pieces, low, high, extent.buffer.address + low)
        with self._lock:
            self._bytes_written += high - low

    def _read_part(
        self, extent: _RamExtent, target: memoryview, low: int, high: int, thread_index: int
    ) -> None:
        ctypes.memmove(address_of(target) + low, extent.buffer.address + low, high - low)
        with self._lock:
            self._bytes_read += high - low


def _ranges(nbytes: int) -> list[tuple[int, int]]:
    return [(low, min(low + _PART_BYTES, nbytes)) for low in range(0, nbytes, _PART_BYTES)]


def _own(extent: Extent, to_read: bool = False) -> _RamExtent:
    check_live(extent, to_read)
    if not isinstance(extent, _RamExtent):
        raise InternalError(f"extent {extent.label!r} does not belong to the ram tier")
    return extent
