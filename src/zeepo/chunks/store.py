"""The store: chunks come up when leased and go down when room is needed.

Everything here runs in the thread that calls it; only the tiers' own threads move bytes, and they
are met again at one place, `_wait`. The invariants:

- a leased chunk is resident and is not evicted;
- room is made, and reserved in the ledger, before memory is taken;
- a chunk leaves RAM only when the lower tier holds its current version ([Note: versions] in
  chunk.py).

Who goes is decided by `eviction`, what comes early by `trace`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import torch

from zeepo.chunks.accounts import StoreCounters, no_room_message
from zeepo.chunks.chunk import Chunk, Kind
from zeepo.chunks.eviction import Candidate, choose_victims
from zeepo.chunks.layout import Layout
from zeepo.chunks.losses import give_up, named
from zeepo.chunks.storages import new_storage, swap_memory
from zeepo.chunks.trace import Trace
from zeepo.errors import BudgetError, DiskError, InternalError
from zeepo.memory.pool import BufferPool
from zeepo.memory.tier import Tier
from zeepo.sabotage import sabotaged

PAGE_BYTES = 4096
LOOKAHEAD_CHUNKS = 24
PRESSURE = 0.5
"""Above this share of the budget, changed chunks are written before their room is needed."""


class ChunkStore:
    """Keeps chunks in RAM while they are used and in their home tier otherwise."""

    def __init__(self, pool: BufferPool, *, prefetch: bool = True):
        self.pool = pool
        self.ledger = pool.ledger
        self.trace = Trace()
        self.counters = StoreCounters()
        self._prefetch_enabled = prefetch
        self._chunks: dict[int, Chunk] = {}
        self._lock = threading.RLock()
        self._next_key = 0
        self._is_closing = False
        self.lost: list[tuple[str, Exception]] = []
        """While closing: slots whose bytes could not be brought back, and why."""

    # -- chunks -----------------------------------------------------------------------------------

    def create(self, kind: Kind, label: str, layout: Layout, home: Tier | None) -> Chunk:
        """A new, empty chunk."""
        with self._lock:
            chunk = Chunk(self._next_key, kind, label, layout, home)
            self._next_key += 1
            self._chunks[chunk.key] = chunk
            return chunk

    def chunks(self) -> list[Chunk]:
        return list(self._chunks.values())

    def adopt(self, chunk: Chunk, index: int, storage: torch.UntypedStorage) -> None:
        """Make `storage`, with the memory it has, the content of a slot."""
        with self._lock:
            slot = chunk.layout.slots[index]
            if storage.nbytes() != slot.nbytes:
                raise InternalError(
                    f"{chunk.label}: {slot.name} has {storage.nbytes()} bytes, "
                    f"its slot {slot.nbytes}"
                )
            if chunk.storages[index] is not None:
                raise InternalError(f"{chunk.label}: the slot of {slot.name} is taken")
            self.lease([chunk])
            try:
                self._take_idle_buffer(chunk)
                if chunk.buffer is not None and not chunk.raw_holds:
                    self._settle(chunk)
                    chunk.move_into_buffer(index, storage)
                else:
                    self._make_ledger_room(slot.nbytes)
                    chunk.own_memory[index] = self.ledger.reserve(chunk.kind.value, slot.nbytes)
                chunk.storages[index] = storage
                chunk.is_resident = True
                chunk.version += 1
            finally:
                self.release([chunk])

    def _take_idle_buffer(self, chunk: Chunk) -> None:
        """Rather than unmap an idle buffer for new memory, copy the new content into it."""
        nbytes = chunk.layout.nbytes
        if chunk.home is None or not chunk.is_empty or self.ledger.can_reserve(nbytes):
            return
        if self.pool.has_idle(nbytes):
            chunk.buffer = self.pool.acquire(nbytes, chunk.kind.value)

    def attach_lower(self, chunk: Chunk, index: int, storage: torch.UntypedStorage) -> None:
        """Give an empty chunk a slot whose bytes its home tier holds already."""
        assert chunk.home is not None
        chunk.extent = chunk.home.allocate(chunk.label, chunk.layout.nbytes, chunk.layout.describe)
        chunk.storages[index] = storage
        chunk.lower_version = chunk.version
        chunk.expected_writes = chunk.extent.num_writes

    def evict(self, chunk: Chunk) -> None:
        """Send a chunk down now."""
        with self._lock:
            self._evict(chunk)

    def drop(self, chunk: Chunk, index: int) -> None:
        """Forget what a slot holds; its storage loses its memory."""
        with self._lock:
            if chunk.storages[index] is None:
                return
            self._end_write(chunk)
            with contextlib.suppress(DiskError):  # nobody will ask for it
                self._finish_fetch(chunk)
            chunk.clear_slot(index)
            chunk.storages[index] = None
            if chunk.is_empty:
                chunk.clear()
                chunk.lower_version = -1
                chunk.version = 0

    def free_from_store(self, chunk: Chunk, index: int) -> None:
        """Let a slot's storage go, with ordinary memory of its own and the current bytes."""
        with self._lock:
            storage = chunk.storages[index]
            if storage is None:
                return
            try:
                self.lease([chunk])
            except (DiskError, InternalError) as error:
                if not self._is_closing:
                    raise
                self.lost += [(name, error) for name in give_up(chunk)]
                return
            try:
                self._end_write(chunk)
                if index in chunk.own_memory:
                    chunk.own_memory.pop(index).release()
                elif storage.nbytes() and not chunk.raw_holds:
                    ordinary = new_storage(storage.nbytes())
                    ordinary.copy_(storage, False)
                    swap_memory(storage, ordinary)
                chunk.storages[index] = None
            finally:
                self.release([chunk])
            if chunk.is_empty:
                chunk.clear()
                chunk.lower_version = -1

    def mark_changed(self, chunk: Chunk) -> None:
        """The resident bytes of a leased chunk were changed."""
        chunk.version += 1

    # -- leases -----------------------------------------------------------------------------------

    def lease(self, chunks: Sequence[Chunk]) -> None:
        """Make chunks resident and keep them so until `release`."""
        with self._lock:
            for chunk in chunks:
                chunk.leases += 1
            try:
                for chunk in chunks:
                    self._start_fetch(chunk)
                for chunk in chunks:
                    self._finish_fetch(chunk)
                is_new = [self.trace.access(c.key) for c in chunks if not c.is_empty]
                if self._prefetch_enabled and any(is_new):
                    # What fails here is tried again, and fails aloud, when it is needed.
                    with contextlib.suppress(DiskError):
                        self._prefetch()
            except BaseException:
                self.release(chunks)
                raise

    def release(self, chunks: Iterable[Chunk]) -> None:
        """Give leases back."""
        with self._lock:
            for chunk in chunks:
                if chunk.leases <= 0:
                    if self._is_closing:  # closed inside a block that held the lease
                        continue
                    raise InternalError(f"{chunk.label} is released more often than leased")
                chunk.leases -= 1
                if chunk.leases == 0 and self._prefetch_enabled:
                    with contextlib.suppress(DiskError):  # tried again, aloud, at its eviction
                        self._write_early(chunk)

    # -- moving down ------------------------------------------------------------------------------

    def make_room(self, nbytes: int) -> None:
        """Evict until torch may take `nbytes` more; BudgetError when leases forbid it."""
        with self._lock:
            self._make_ledger_room(nbytes)

    def _make_buffer_room(self, nbytes: int) -> None:
        """Evict until the pool can hand out a buffer."""
        while not self.pool.can_acquire(nbytes):
            self._evict_for(nbytes)

    def _make_ledger_room(self, nbytes: int) -> None:
        """Evict until the ledger has room for memory that is not the pool's."""
        while not self.ledger.can_reserve(nbytes):
            if self.pool.idle_bytes:
                self.pool.trim(nbytes - self.ledger.free_bytes)
            else:
                self._evict_for(nbytes)

    def _missing_bytes(self, nbytes: int) -> int:
        """How much has to leave so that `nbytes` fit, once idle buffers are unmapped."""
        limit = self.ledger.limit_bytes or 0
        return max(1, nbytes - (limit - self.ledger.used_bytes) - self.pool.idle_bytes)

    def _evict_for(self, nbytes: int) -> None:
        victims = choose_victims(self._candidates(), self._missing_bytes(nbytes))
        if victims is None:
            raise BudgetError(no_room_message(self._chunks.values(), self.ledger, nbytes))
        for key in victims:
            self._start_write(self._chunks[key])
        for key in victims:
            self._evict(self._chunks[key])

    def _candidates(self, *, only_clean: bool = False) -> list[Candidate]:
        return [
            Candidate(c.key, c.resident_bytes, self.trace.next_use(c.key), not c.is_dirty)
            for c in self._chunks.values()
            if c.leases == 0
            and c.home is not None
            and (c.is_resident or c.fetching is not None)
            and not (only_clean and (c.is_dirty or c.writing is not None))
        ]

    def _start_write(self, chunk: Chunk) -> None:
        self._collect_write(chunk)
        if not chunk.is_resident or not chunk.is_dirty or chunk.writing is not None:
            return
        if sabotaged("evict.write") and chunk.lower_version >= 0:
            chunk.lower_version = chunk.version
            return
        assert chunk.home is not None
        if chunk.extent is None:
            chunk.extent = chunk.home.allocate(
                chunk.label, max(1, chunk.layout.nbytes), chunk.layout.describe
            )
        chunk.writing_version = chunk.version
        chunk.leases += 1  # a tier made of other chunks makes room while it writes
        try:
            chunk.writing = chunk.home.write(chunk.extent, chunk.pieces())
        finally:
            chunk.leases -= 1
        chunk.expected_writes = chunk.extent.num_writes
        self.counters.num_writes += 1
        self.counters.bytes_evicted += chunk.layout.nbytes

    def _collect_write(self, chunk: Chunk) -> None:
        """Take note of a write that is done, without waiting."""
        if chunk.writing is not None and chunk.writing.done():
            self._settle(chunk)

    def _settle(self, chunk: Chunk) -> None:
        """Wait until no write reads from the chunk's memory."""
        if chunk.writing is None:
            return
        future, chunk.writing = chunk.writing, None
        chunk.lower_version = -1
        if not sabotaged("evict.wait"):
            try:
                self._wait(future)
            except DiskError as error:
                raise named(error, chunk) from None
            except BaseException:
                self._finish_quietly(future)
                raise
        chunk.lower_version = chunk.version if sabotaged("write.clean") else chunk.writing_version

    def _evict(self, chunk: Chunk) -> None:
        if chunk.leases or chunk.home is None:
            raise InternalError(f"{chunk.label} is evicted while leased")
        if chunk.fetching is not None:
            self._finish_fetch(chunk)
        while chunk.is_resident and (chunk.is_dirty or chunk.writing is not None):
            self._start_write(chunk)
            self._settle(chunk)
        if chunk.is_resident:
            chunk.clear()
            self.counters.num_evictions += 1

    def _write_early(self, chunk: Chunk) -> None:
        """Under pressure, write what is changed and not needed soon, while compute goes on."""
        limit = self.ledger.limit_bytes
        if chunk.home is None or limit is None or not chunk.is_resident or chunk.is_empty:
            return
        if self.ledger.used_bytes < PRESSURE * limit or not chunk.is_dirty:
            return
        next_use = self.trace.next_use(chunk.key)
        if LOOKAHEAD_CHUNKS < next_use < float("inf"):
            self._start_write(chunk)

    # -- moving up --------------------------------------------------------------------------------

    def _start_fetch(self, chunk: Chunk) -> None:
        if sabotaged("state.stale") and self._can_be_made_stale(chunk):
            chunk.clear()
            chunk.version = chunk.lower_version
        if chunk.is_resident or chunk.fetching is not None or chunk.is_empty:
            return
        if chunk.extent is None or chunk.home is None or chunk.lower_version != chunk.version:
            raise InternalError(
                f"{chunk.label} version {chunk.version} is nowhere: the lower tier holds "
                f"{chunk.lower_version}"
            )
        if chunk.extent.num_writes != chunk.expected_writes:
            raise InternalError(f"{chunk.label} was written behind the store's back")
        nbytes = -(-max(1, chunk.layout.nbytes) // PAGE_BYTES) * PAGE_BYTES
        self._make_buffer_room(nbytes)
        chunk.buffer = self.pool.acquire(nbytes, chunk.kind.value)
        chunk.leases += 1
        try:
            chunk.fetching = chunk.home.read(chunk.extent, chunk.buffer.memory)
        except BaseException:
            chunk.buffer.release()
            chunk.buffer = None
            raise
        finally:
            chunk.leases -= 1
        self.counters.num_fetches += 1
        self.counters.bytes_fetched += chunk.layout.nbytes

    @staticmethod
    def _can_be_made_stale(chunk: Chunk) -> bool:
        return (
            chunk.kind is Kind.STATE
            and chunk.is_resident
            and chunk.leases == 1
            and chunk.lower_version >= 0
            and chunk.writing is None
        )

    def _finish_fetch(self, chunk: Chunk) -> None:
        if chunk.fetching is None:
            return
        future, chunk.fetching = chunk.fetching, None
        try:
            if not sabotaged("fetch.wait"):
                self._wait(future)
        except BaseException as error:
            assert chunk.buffer is not None
            self._finish_quietly(future)
            chunk.buffer.release()
            chunk.buffer = None
            if isinstance(error, DiskError):
                raise named(error, chunk) from None
            raise
        chunk.place_in_buffer()
        chunk.is_resident = True

    def _prefetch(self) -> None:
        """Start reading what comes next, as far as room can be had without harm."""
        for key in self.trace.upcoming(LOOKAHEAD_CHUNKS):
            chunk = self._chunks.get(key)
            if chunk is None or chunk.is_resident or chunk.fetching or chunk.is_empty:
                continue
            if chunk.extent is None or chunk.is_dirty:
                continue
            nbytes = -(-max(1, chunk.layout.nbytes) // PAGE_BYTES) * PAGE_BYTES
            if not self.pool.can_acquire(nbytes) and not self._make_room_early(chunk, nbytes):
                return
            self._start_fetch(chunk)
            self.counters.num_prefetches += 1

    def _make_room_early(self, chunk: Chunk, nbytes: int) -> bool:
        """Make room for a prefetch from clean chunks that are needed later than it."""
        missing = self._missing_bytes(nbytes)
        later_than = self.trace.next_use(chunk.key)
        for other in self._chunks.values():
            self._collect_write(other)
        victims = choose_victims(self._candidates(only_clean=True), missing, later_than=later_than)
        if victims is None:
            return False
        for key in victims:
            self._evict(self._chunks[key])
        return self.pool.can_acquire(nbytes)

    # -- waiting and closing ----------------------------------------------------------------------

    def _wait(self, future: Future[None]) -> None:
        """The one place where the training thread waits for a tier."""
        started = time.perf_counter()
        try:
            future.result()
        finally:
            self.counters.seconds_waited += time.perf_counter() - started

    @staticmethod
    def _finish_quietly(future: Future[None]) -> None:
        """Let a transfer end, whatever its outcome: its memory must not be reused before."""
        future.exception()

    def _end_write(self, chunk: Chunk) -> None:
        """Let a write end whose outcome does not matter: the bytes are here, or not wanted."""
        with contextlib.suppress(DiskError):
            self._settle(chunk)

    def begin_closing(self) -> None:
        """Every lease is over, nothing is read ahead, and what cannot be read is given up."""
        with self._lock:
            self._is_closing = True
            self._prefetch_enabled = False
            self.ledger.limit_bytes = None
            for chunk in self._chunks.values():
                chunk.leases = 0

    def abandon(self) -> None:
        """The very end: no transfer is under way, and no storage is the store's any more."""
        for chunk in self._chunks.values():
            for future in (chunk.writing, chunk.fetching):
                if future is not None:
                    self._finish_quietly(future)
            chunk.writing = chunk.fetching = None
            error = InternalError(f"{chunk.label} was not given back")
            self.lost += [(name, error) for name in give_up(chunk)]


__all__ = ["Chunk", "ChunkStore", "Kind", "StoreCounters"]
