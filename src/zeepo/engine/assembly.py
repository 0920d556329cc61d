"""A whole tensor made of pieces that live in chunks of their own.

The optimizer state of a large parameter is kept in pieces, so that an update needs one piece at a
time. When the user reads such a state, the whole is assembled: a chunk whose lower "tier" is the
pieces.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from zeepo.chunks.storages import memory_of
from zeepo.chunks.store import Chunk, ChunkStore, Kind
from zeepo.engine.shards import Offered
from zeepo.errors import InternalError
from zeepo.memory.mapping import address_of
from zeepo.memory.tier import Describe, Extent
from zeepo.sharding.network import Network
from zeepo.sharding.ranges import Range
from zeepo.sharding.requests import PeerFuture


@dataclass(frozen=True)
class Part:
    """Where a run of the whole's bytes lies."""

    chunk: Chunk
    index: int
    offset_bytes: int
    nbytes: int


@dataclass(frozen=True)
class RemotePart:
    """A run of the whole's bytes that another rank has, in a chunk of that label."""

    rank: int
    label: str
    low: int
    high: int
    offset_bytes: int

    @property
    def nbytes(self) -> int:
        return self.high - self.low


@dataclass(frozen=True)
class RemoteParts:
    """What other ranks have of a whole."""

    network: Network
    version: Callable[[], int]
    """How often the state was changed, the same on every rank."""
    parts: Sequence[RemotePart]

    def pull(self, part: RemotePart, target: memoryview, future: PeerFuture) -> None:
        """Ask for one part, as it is after the last update."""
        offered = Offered(Kind.STATE, part.label, self.version())
        offered.ask(self.network, part.rank, Range(part.low, part.high), target, future)


class PartsTier:
    """Reads from and writes to the parts of one tensor; no memory of its own."""

    name = "parts"
    used_bytes = 0
    peak_bytes = 0
    bytes_read = 0
    bytes_written = 0
    seconds_busy = 0.0

    def __init__(self, store: ChunkStore, parts: Sequence[Part], remote: RemoteParts | None = None):
        self._store = store
        self._parts = parts
        self._remote = remote

    @property
    def part_bytes(self) -> int:
        """The most that reading it in a stream has in memory at once."""
        remote = self._remote.parts if self._remote else ()
        return max(
            [part.chunk.layout.nbytes for part in self._parts] + [p.nbytes for p in remote],
            default=0,
        )

    def chunks(self) -> list[Chunk]:
        return [part.chunk for part in self._parts]

    def stream(self) -> Iterator[tuple[int, memoryview]]:
        """The whole, part by part as (offset, bytes), each leased while it is handed out."""
        remote = self._remote.parts if self._remote is not None else ()
        parts: list[Part | RemotePart] = [*self._parts, *remote]
        for part in sorted(parts, key=lambda p: p.offset_bytes):
            if isinstance(part, RemotePart):
                assert self._remote is not None
                room = memoryview(bytearray(part.nbytes))
                future = PeerFuture(self._remote.network, part.label, 1)
                self._remote.pull(part, room, future)
                future.result()
                yield part.offset_bytes, room
                continue
            self._store.lease([part.chunk])
            try:
                storage = part.chunk.storages[part.index]
                if storage is None:
                    raise InternalError(f"{part.chunk.label} is lost")
                yield part.offset_bytes, memory_of(storage)
            finally:
                self._store.release([part.chunk])

    def drop_parts(self) -> None:
        """The whole has its bytes elsewhere: forget them here, unless other ranks need them."""
        if self._remote is not None:
            return
        for part in self._parts:
            self._store.drop(part.chunk, part.index)
            self._store.settle(part.chunk, {})

    def allocate(self, label: str, nbytes: int, describe: Describe | None = None) -> Extent:
        return Extent(label, nbytes, describe)

    def read(self, extent: Extent, target: memoryview) -> Future[None]:
        for part in self._parts:
            self._copy(part, target, to_part=False)
        if self._remote is None:
            return _done()
        future = PeerFuture(self._remote.network, "optimizer state", len(self._remote.parts))
        for remote in self._remote.parts:
            place = target[remote.offset_bytes : remote.offset_bytes + remote.nbytes]
            self._remote.pull(remote, place, future)
        return future

    def write(self, extent: Extent, pieces: Sequence[tuple[int, memoryview]]) -> Future[None]:
        extent.num_writes += 1
        for _, source in pieces:
            for part in self._parts:
                self._copy(part, source, to_part=True)
        return _done()

    def free(self, extent: Extent) -> None:
        extent.is_freed = True

    def close(self) -> None:
        return None

    def _copy(self, part: Part, whole: memoryview, *, to_part: bool) -> None:
        self._store.lease([part.chunk])
        try:
            storage = part.chunk.storages[part.index]
            assert storage is not None
            at = address_of(whole) + part.offset_bytes
            here = storage.data_ptr()
            target, source = (here, at) if to_part else (at, here)
            ctypes.memmove(target, source, part.nbytes)
            if to_part:
                self._store.mark_changed(part.chunk)
        finally:
            self._store.release([part.chunk])


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
