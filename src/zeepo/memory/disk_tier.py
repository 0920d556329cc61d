"""The tier on disk: extents striped over one scratch file per directory.

Invariant: an extent's blocks keep their places from `allocate` until `free` has taken effect,
every byte read has been checked against the checksum of its last write (kept in RAM), and the
files take no more than `limit_bytes` on disk. How requests are ordered is `transfers`' work,
which block lies where `striping`'s, how blocks move and are checked `block_io`'s.

The scratch folders vanish at `close`, when the tier is garbage, and at interpreter exit; a killed
process's are removed by the next session that uses the directory.
"""

import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from zeepo.errors import DiskError, InternalError
from zeepo.memory.block_io import GRAIN_BYTES, Block, DiskExtent, Run, Sources, block_io
from zeepo.memory.disk_directory import DiskDirectory
from zeepo.memory.mapping import PAGE_BYTES, Mapping, address_of, round_up
from zeepo.memory.pool import Buffer, BufferPool
from zeepo.memory.striping import StripePattern
from zeepo.memory.tier import Describe, Extent, check_live, check_pieces, check_target
from zeepo.memory.transfers import TransferQueue
from zeepo.units import enough_bytes, format_bytes

BLOCK_BYTES = 8 << 20
"""A transfer is cut in blocks of this size, so that one extent keeps several threads busy; one that
is aligned is one call of the system. Every block takes the interpreter's lock from the training
thread for a moment: rather few."""

NUM_THREADS = 8
"""As many blocks are on their way: a disk of several GB/s wants that much in flight, and goes on
while some of the threads take checksums."""
STAGING_BYTES = NUM_THREADS * GRAIN_BYTES
"""What these threads take of a budget."""


class DiskTier:
    """Extents on disk.

    `pool` pays for the threads' staging buffers; without one they are mapped outside any budget.
    `weights` replaces the bandwidth probe, `direct` the direct I/O probe (True insists).
    """

    name = "disk"

    def __init__(
        self,
        directories: Sequence[Path],
        limit_bytes: int | None = None,
        num_threads: int = NUM_THREADS,
        block_bytes: int = BLOCK_BYTES,
        *,
        pool: BufferPool | None = None,
        weights: Sequence[float] | None = None,
        direct: bool | None = None,
    ) -> None:
        if block_bytes % PAGE_BYTES or block_bytes <= 0:
            raise InternalError(f"block_bytes must be a multiple of {PAGE_BYTES}: {block_bytes}")
        if not directories or (weights is not None and len(weights) != len(directories)):
            raise InternalError(f"{len(directories)} directories with weights {weights}")
        self.limit_bytes = limit_bytes
        self.block_bytes = block_bytes
        each_bytes = min(block_bytes, GRAIN_BYTES)
        self.staging_bytes = num_threads * each_bytes
        self._changed = threading.Condition()
        self._used_bytes = 0
        self._peak_bytes = 0
        self._bytes_read = 0
        self._bytes_written = 0
        self._next_phase = 0
        self._num_pending_frees = 0
        self.directories: list[DiskDirectory] = []
        staging: list[Buffer | Mapping] = []
        try:
            for directory in directories:
                self.directories.append(DiskDirectory(Path(directory), direct=direct))
            self._pattern = StripePattern(weights or self._measure_weights())
            for _ in range(num_threads):
                staging.append(
                    Mapping(each_bytes) if pool is None else pool.acquire(each_bytes, "staging")
                )
        except BaseException:
            _close_all(os.getpid(), None, self.directories)
            self._release_staging(staging)
            raise
        self._staging = staging
        self._block_io = block_io(staging)
        self._queue = TransferQueue("disk", num_threads)
        self._finalizer = weakref.finalize(
            self, _close_all, os.getpid(), self._queue, self.directories
        )

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

    def allocate(
        self,
        label: str,
        nbytes: int,
        describe: Describe | None = None,
        grain_bytes: int = GRAIN_BYTES,
    ) -> Extent:
        """Room for `nbytes`. Waits for pending frees rather than refuse what they make room for.

        Every `grain_bytes` of a block have a checksum: the least that can be moved alone.
        """
        extent = DiskExtent(label, nbytes, describe)
        num_blocks = -(-nbytes // self.block_bytes)
        with self._changed:
            phase = self._next_phase
            sizes = self._region_sizes(nbytes, phase)
            padded_bytes = sum(sizes)
            while not self._has_room(padded_bytes):
                if self._num_pending_frees == 0:
                    raise DiskError(self._refusal(label, padded_bytes))
                self._changed.wait()
            self._make_room(label, sizes)
            self._next_phase = (phase + num_blocks) % self._pattern.period
            for directory, size in zip(self.directories, sizes, strict=True):
                extent.regions.append((directory.space.allocate(size), size))
            self._used_bytes += padded_bytes
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        extent.blocks = [
            self._place(extent, phase, number, grain_bytes) for number in range(num_blocks)
        ]
        return extent

    def write(self, extent: Extent, pieces: Sequence[tuple[int, memoryview]]) -> Future[None]:
        own = _own(extent)
        sources = Sources(check_pieces(own, pieces))
        parts = [partial(self._write_block, block, sources) for block in own.blocks]
        future = self._queue.submit(own.lane, parts, exclusive=True)
        own.num_writes += 1
        return future

    def read(self, extent: Extent, target: memoryview) -> Future[None]:
        own = _own(extent, to_read=True)
        checked = check_target(own, target)
        address = address_of(checked)
        parts = [partial(self._read_block, own, block, checked, address) for block in own.blocks]
        return self._queue.submit(own.lane, parts, exclusive=False)

    def write_runs(self, extent: Extent, runs: Sequence[Run], source: memoryview) -> Future[None]:
        """Replace whole grains of an extent; what no run names stays as it is."""
        own = _own(extent)
        sources = Sources(check_pieces(own, [(0, source)], source.nbytes))
        parts = [
            partial(self._write_blocks, blocks, sources)
            for blocks in self._shares(own, runs, source.nbytes)
        ]
        future = self._queue.submit(own.lane, parts, exclusive=True)
        own.num_writes += 1
        return future

    def read_runs(
        self, extent: Extent, runs: Sequence[Run], target: memoryview, *, is_urgent: bool = False
    ) -> Future[None]:
        """Read whole grains of an extent, each of them written before; somebody waits for them if
        that is urgent."""
        own = _own(extent, to_read=True)
        address = address_of(target)
        parts = [
            partial(self._read_blocks, own, blocks, target, address)
            for blocks in self._shares(own, runs, target.nbytes)
        ]
        return self._queue.submit(own.lane, parts, exclusive=False, is_urgent=is_urgent)

    def _shares(
        self, extent: DiskExtent, runs: Sequence[Run], memory_bytes: int
    ) -> list[list[Block]]:
        """Runs as parts of blocks, a share for each thread."""
        blocks: list[Block] = []
        for run in runs:
            block = extent.blocks[run.at // self.block_bytes]
            if run.at + run.nbytes > block.high or run.low + run.nbytes > memory_bytes:
                raise InternalError(f"{run} does not lie in a block of {extent.label!r}")
            blocks.append(block.part(run.at, run.nbytes, run.low))
        num_shares = min(len(self._staging), len(blocks))
        return [blocks[share::num_shares] for share in range(num_shares)]

    def free(self, extent: Extent) -> None:
        own = _own(extent)
        own.is_freed = True
        with self._changed:
            self._num_pending_frees += 1
        self._queue.submit(own.lane, (), exclusive=True, on_done=partial(self._give_back, own))

    def reclaim(self) -> None:
        """Give the room of what was freed back to the file systems, where they take it."""
        with self._changed:
            while self._num_pending_frees:
                self._changed.wait()
            for directory in self.directories:
                directory.reclaim()

    def close(self) -> None:
        """Fail what is not started, join the threads, remove the scratch folders. Idempotent."""
        self._finalizer()
        self._release_staging(self._staging)

    @staticmethod
    def _release_staging(staging: list[Buffer | Mapping]) -> None:
        # Not in the finalizer: the garbage collector may run it while the pool's lock is held.
        for buffer in staging:
            if isinstance(buffer, Buffer):
                buffer.release()

    def _measure_weights(self) -> list[float]:
        if len(self.directories) == 1:
            return [1.0]
        return [directory.measure_bytes_per_second() for directory in self.directories]

    def _region_sizes(self, nbytes: int, phase: int) -> list[int]:
        whole, last_bytes = divmod(nbytes, self.block_bytes)
        sizes = [n * self.block_bytes for n in self._pattern.num_slots(phase, whole)]
        if last_bytes:  # The last block takes only the pages it needs.
            directory, _ = self._pattern.locate(phase, whole)
            sizes[directory] += round_up(last_bytes, PAGE_BYTES)
        return sizes

    def _has_room(self, padded_bytes: int) -> bool:
        return self.limit_bytes is None or self._used_bytes + padded_bytes <= self.limit_bytes

    def _make_room(self, label: str, sizes: list[int]) -> None:
        """Keep files within the limit: free ranges count until the file system has them back."""
        if self.limit_bytes is None:
            return
        if self._file_bytes_with(sizes) > self.limit_bytes:
            for directory in self.directories:
                directory.reclaim()
        if self._file_bytes_with(sizes) > self.limit_bytes:
            raise DiskError(
                self._refusal(label, sum(sizes))
                + " Freed room is too fragmented to be reused and this file system cannot take it "
                "back (no hole punching): a local file system such as ext4 or xfs can."
            )

    def _file_bytes_with(self, sizes: list[int]) -> int:
        """What the files may take on disk once regions of these sizes are written."""
        idle_bytes = sum(directory.space.backed_bytes for directory in self.directories)
        new_bytes = sum(
            0 if directory.space.can_reuse(size) else size
            for directory, size in zip(self.directories, sizes, strict=True)
        )
        return self._used_bytes + idle_bytes + new_bytes

    def _refusal(self, label: str, padded_bytes: int) -> str:
        limit_bytes = self.limit_bytes or 0
        where = ", ".join(str(directory.path) for directory in self.directories)
        return (
            f"cannot place {format_bytes(padded_bytes)} ({label!r}) on disk: "
            f"{format_bytes(self._used_bytes)} used of the limit of {format_bytes(limit_bytes)} "
            f"in {where}. Raise disk_limit (to at least "
            f"{enough_bytes(self._used_bytes + padded_bytes)} for this alone), or keep more in ram."
        )

    def _place(self, extent: DiskExtent, phase: int, number: int, grain_bytes: int) -> Block:
        low = number * self.block_bytes
        directory, slot = self._pattern.locate(phase, number)
        offset = extent.regions[directory][0] + slot * self.block_bytes
        high = min(low + self.block_bytes, extent.nbytes)
        return Block(low, high, self.directories[directory].file, offset, grain_bytes)

    def _give_back(self, extent: DiskExtent) -> None:
        with self._changed:
            for directory, (offset, size) in zip(self.directories, extent.regions, strict=True):
                directory.space.free(offset, size)
                self._used_bytes -= size
            self._num_pending_frees -= 1
            self._changed.notify_all()

    def _write_blocks(self, blocks: Sequence[Block], sources: Sources, thread_index: int) -> None:
        for block in blocks:
            self._write_block(block, sources, thread_index)

    def _read_blocks(
        self,
        extent: DiskExtent,
        blocks: Sequence[Block],
        target: memoryview,
        address: int,
        thread_index: int,
    ) -> None:
        for block in blocks:
            self._read_block(extent, block, target, address, thread_index)

    def _write_block(self, block: Block, sources: Sources, thread_index: int) -> None:
        self._block_io.write(block, sources, thread_index)
        with self._changed:
            self._bytes_written += block.nbytes

    def _read_block(
        self, extent: DiskExtent, block: Block, target: memoryview, address: int, thread_index: int
    ) -> None:
        self._block_io.read(extent, block, target, address, thread_index)
        with self._changed:
            self._bytes_read += block.nbytes


def _close_all(
    owner_pid: int, queue: TransferQueue | None, directories: list[DiskDirectory]
) -> None:
    """Threads first: nothing may still use the files that go next."""
    if os.getpid() != owner_pid:
        return
    if queue is not None:
        queue.close()
    for directory in directories:
        directory.close()


def _own(extent: Extent, to_read: bool = False) -> DiskExtent:
    check_live(extent, to_read)
    if not isinstance(extent, DiskExtent):
        raise InternalError(f"extent {extent.label!r} does not belong to the disk tier")
    return extent
