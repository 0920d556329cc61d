"""The store: chunks come up when leased and go down when room is needed.

This is the interface: chunks are made, filled, leased, dropped. How bytes come and go is `moves`.
Everything runs in the thread that calls it; only the tiers' own threads move bytes. The invariants:

- a leased chunk is resident and is not evicted;
- room is made, and reserved in the ledger, before memory is taken;
- a chunk leaves RAM only when the lower tier holds its current version ([Note: versions] in
  chunk.py).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Future

import torch

from zeepo.chunks.accounts import StoreCounters, forked_message, too_much_at_once
from zeepo.chunks.chunk import Chunk, Kind
from zeepo.chunks.foresight import Foresight
from zeepo.chunks.layout import Layout
from zeepo.chunks.losses import give_up
from zeepo.chunks.moves import Moves
from zeepo.chunks.storages import is_in_backward, new_storage, swap_memory
from zeepo.errors import BudgetError, DiskError, InternalError, SessionError
from zeepo.memory.budget import RamBudget
from zeepo.memory.ledger import Reservation
from zeepo.memory.pool import Buffer, BufferPool
from zeepo.memory.rises import BETWEEN_USES
from zeepo.memory.spares import WORTH_KEEPING_BYTES
from zeepo.memory.tier import Tier
from zeepo.sabotage import sabotaged


class ChunkStore:
    """Keeps chunks in RAM while they are used and in their home tier otherwise."""

    def __init__(self, pool: BufferPool, *, prefetch: bool = True, guaranteed_bytes: int = 0):
        self.pool = pool
        self.ledger = pool.ledger
        self.moves = Moves(pool, guaranteed_bytes)
        self.foresight = Foresight(self.moves)
        self.trace = self.moves.trace
        self.counters = self.moves.counters
        self._prefetch_enabled = prefetch
        self.lock = threading.RLock()
        self._owner_pid = os.getpid()
        self._next_key = 0
        self._num_leases = 0
        self._is_closing = False
        self.lost: list[tuple[str, Exception]] = []
        """While closing: slots whose bytes could not be brought back, and why."""

    @property
    def budget(self) -> RamBudget | None:
        """Moves the ledger's limit; without one the limit stays where it is."""
        return self.moves.budget

    # -- chunks -----------------------------------------------------------------------------------

    def create(self, kind: Kind, label: str, layout: Layout, home: Tier | None) -> Chunk:
        """A new, empty chunk."""
        with self.lock:
            chunk = Chunk(self._next_key, kind, label, layout, home, self.moves.in_ram)
            self._next_key += 1
            self.moves.chunks[chunk.key] = chunk
            return chunk

    def chunks(self) -> list[Chunk]:
        return list(self.moves.chunks.values())

    def adopt(
        self, chunk: Chunk, index: int, storage: torch.UntypedStorage, *, copy: bool = False
    ) -> None:
        """Make `storage`, with the memory it has or in a buffer, the content of a slot."""
        with self.lock:
            self.make_ready([chunk])
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
                if copy or self._is_tight(chunk):
                    self._take_buffer(chunk)
                if chunk.buffer is not None and not chunk.raw_holds:
                    self.moves.settle(chunk)
                    chunk.move_into_buffer(index, storage)
                else:
                    chunk.keep_own(index, self.moves.take_in(chunk, storage))
                chunk.storages[index] = storage
                chunk.is_resident = True
                chunk.version += 1
                self.foresight.note_short_lived(chunk)
            finally:
                self.release([chunk])

    def _is_tight(self, chunk: Chunk) -> bool:
        """Once chunks have to leave, new content is copied into a buffer, which can be used again.

        Memory of its own would be taken from the pool now and cleared by the system later, which
        costs more than the copy. Of what is large there is no room for two.
        """
        may_copy = (
            chunk.layout.largest_slot_bytes <= WORTH_KEEPING_BYTES and not chunk.is_short_lived
        )
        return may_copy and bool(self.counters.num_evictions)

    def _take_buffer(self, chunk: Chunk) -> None:
        nbytes = chunk.layout.nbytes
        if chunk.home is None or not chunk.is_empty or chunk.buffer is not None or not nbytes:
            return
        with contextlib.suppress(BudgetError):  # no room for all slots at once: one by one then
            self.moves.make_buffer_room(nbytes)
            chunk.buffer = self.pool.acquire(nbytes, chunk.kind.value)

    def new_buffer(self, nbytes: int, tag: str) -> Buffer:
        """One of the pool's for the caller; chunks leave to make room for it."""
        with self.lock:
            self.moves.make_buffer_room(nbytes)
            return self.pool.acquire(nbytes, tag)

    def adopt_buffer(self, chunk: Chunk, buffer: Buffer) -> None:
        """Make a filled buffer the content of an empty chunk of one slot."""
        with self.lock:
            self.make_ready([chunk])
            if chunk.buffer is not None or not chunk.is_empty or len(chunk.storages) != 1:
                raise InternalError(f"{chunk.label} cannot take a buffer")
            buffer.retag(chunk.kind.value)
            chunk.buffer = buffer
            chunk.storages[0] = new_storage(0)
            chunk.place_in_buffer()
            chunk.is_resident = True
            chunk.version += 1

    def evict(self, chunk: Chunk) -> None:
        """Send a chunk down now."""
        with self.lock:
            self.moves.evict(chunk)

    def drop(self, chunk: Chunk, index: int) -> None:
        """Forget what a slot holds; its storage loses its memory."""
        with self.lock:
            if chunk.storages[index] is None:
                return
            self.end_write(chunk)
            with contextlib.suppress(DiskError):  # nobody will ask for it
                self.moves.finish_fetch(chunk)
            self.moves.keep_spare(chunk, index)
            chunk.clear_slot(index)
            chunk.storages[index] = None
            if chunk.is_empty:
                chunk.clear()
                chunk.lower_version = -1
                chunk.version = 0

    def free_from_store(self, chunk: Chunk, index: int, *, in_buffer: bool = False) -> None:
        """Let a slot's storage go, with memory of its own and the current bytes.

        Ordinary memory; or, without a copy, that of the buffer, which is not the pool's any more.
        """
        with self.lock:
            storage = chunk.storages[index]
            if storage is None:
                return
            try:
                self.lease([chunk])
            except (DiskError, InternalError) as error:
                if not self._is_closing:
                    raise
                self.lose(chunk, error)
                return
            try:
                self.end_write(chunk)
                if index in chunk.own_memory:
                    chunk.let_own_go(index)
                elif storage.nbytes() and (chunk.raw_holds or in_buffer):
                    chunk.is_buffer_lent = True
                elif storage.nbytes():
                    ordinary = new_storage(storage.nbytes())
                    ordinary.copy_(storage, False)
                    swap_memory(storage, ordinary)
                chunk.storages[index] = None
            finally:
                self.release([chunk])
            if chunk.is_empty:
                chunk.clear()
                chunk.lower_version = -1

    def settle(
        self, chunk: Chunk, places: dict[int, tuple[torch.UntypedStorage, Reservation]]
    ) -> None:
        """Give slots of a leased chunk other memory, filled already; nothing moves it after that.

        Slots that are not named keep the memory they have, which must be their own unless a raw
        address holds the buffer.
        """
        with self.lock:
            self.moves.end_loans(chunk)
            self.end_write(chunk)
            for index, (place, reservation) in places.items():
                storage = chunk.storages[index]
                assert storage is not None
                swap_memory(storage, place)
                chunk.keep_own(index, reservation)
            if chunk.buffer is not None and not chunk.raw_holds:
                chunk.buffer.release()
                chunk.buffer = None
            if chunk.extent is not None and chunk.home is not None:
                chunk.home.free(chunk.extent)
            chunk.extent = chunk.home = None
            chunk.is_resident = True
            chunk.lower_version = -1

    def lose(self, chunk: Chunk, error: Exception) -> None:
        """While closing: what of a chunk is not in memory cannot be had any more."""
        with self.lock:
            self.lost += [(name, error) for name in give_up(chunk)]

    def mark_changed(self, chunk: Chunk) -> None:
        """The resident bytes of a leased chunk were changed."""
        chunk.version += 1

    # -- leases -----------------------------------------------------------------------------------

    def lease(self, chunks: Sequence[Chunk]) -> None:
        """Make chunks resident and keep them so until `release`."""
        with self.lock:
            self.check_process()
            self.make_ready(chunks)
            for chunk in chunks:
                chunk.leases += 1
                chunk.last_lease = self._num_leases = self._num_leases + 1
            try:
                self.look_at_budget(tuple(c.key for c in chunks))
                self.foresight.note_need(chunks)
                for chunk in chunks:
                    self.moves.start_fetch(chunk)
                for chunk in chunks:
                    self.moves.finish_fetch(chunk)
                if self.moves.note_use(chunks):
                    self.foresight.let_copies_go()
                    self.read_ahead(chunks)
            except BaseException:
                self.release(chunks)
                raise

    def end_step(self) -> None:
        """What was accessed is the forecast of the next step; reading ahead begins."""
        with self.lock:
            self.foresight.end_step()
            self.pool.end_step()
            self.read_ahead()

    def look_at_budget(self, use: Hashable = BETWEEN_USES) -> None:
        """Follow the process's growth; chunks leave when torch has taken their room."""
        if self.budget is None or self._is_closing:
            return
        with self.lock:
            self.moves.note_progress()
            self.budget.look(use, in_backward=is_in_backward())
            if self.ledger.used_bytes > (self.ledger.limit_bytes or 0):
                self.moves.shrink_to_limit()

    def expect(self, nbytes: int) -> None:
        """Torch is about to take `nbytes` (a gradient): make room as far as that is possible."""
        with self.lock:
            self.look_at_budget()
            if self.budget is not None and not self._is_closing:
                with self.budget.expecting(nbytes), contextlib.suppress(BudgetError):
                    self.moves.fit_ledger()

    def wait(self, future: Future[None]) -> None:
        """Wait for a transfer of somebody else's, and count the time."""
        self.moves.wait(future)

    @property
    def is_closing(self) -> bool:
        """Whether the limit stays where it is, because everything is being given back."""
        return self._is_closing

    def has_leases(self) -> bool:
        """Whether somebody holds a lease for long: an address in use, a gathered block."""
        return any(chunk.leases for chunk in self.moves.chunks.values())

    def make_ready(self, chunks: Iterable[Chunk]) -> None:
        """Do what has to be done before chunks are used."""
        for chunk in chunks:
            if chunk.before_use is not None and not sabotaged("update.late"):
                chunk.before_use()

    def read_ahead(self, leased: Sequence[Chunk] = ()) -> None:
        """Start reading what comes next; what fails is tried again, aloud, when it is needed."""
        with self.lock:
            if self._prefetch_enabled:
                with contextlib.suppress(DiskError):
                    self.foresight.read_ahead(leased)

    def release(self, chunks: Iterable[Chunk]) -> None:
        """Give leases back."""
        with self.lock:
            for chunk in chunks:
                if chunk.leases <= 0:
                    if self._is_closing:  # closed inside a block that held the lease
                        continue
                    raise InternalError(f"{chunk.label} is released more often than leased")
                chunk.leases -= 1
                if chunk.leases == 0 and self._prefetch_enabled:
                    with contextlib.suppress(DiskError):  # tried again, aloud, at its eviction
                        self.moves.write_early(chunk)

    def check_process(self) -> None:
        """Threads do not survive a fork, so a child can neither read nor wait."""
        if os.getpid() != self._owner_pid:
            raise SessionError(forked_message(self._owner_pid))

    def check_room_for(self, chunks: Sequence[Chunk]) -> None:
        """Raise `BudgetError`, before anything is moved, unless chunks can be resident at once."""
        with self.lock:
            if self.moves.spares.let_go():
                self.look_at_budget()
            known = self.moves.chunks.values()
            if message := too_much_at_once(known, self.ledger, chunks, self.most_bytes):
                raise BudgetError(message)

    @property
    def most_bytes(self) -> int | None:
        """The limit of this moment, if nothing were left to torch that it does not have."""
        return self.ledger.limit_bytes if self.budget is None else self.budget.most_bytes

    def has_room_for(self, nbytes: int) -> bool:
        """Whether torch may take so much without anything being moved."""
        most_bytes = self.most_bytes
        return most_bytes is None or self.ledger.used_bytes + nbytes <= most_bytes

    def make_room(self, nbytes: int) -> None:
        """Evict until torch may take `nbytes` more; BudgetError when leases forbid it."""
        with self.lock:
            self.moves.make_ledger_room(nbytes)

    def end_write(self, chunk: Chunk) -> None:
        """Let a write end whose outcome does not matter: the bytes are here, or not wanted."""
        with contextlib.suppress(DiskError):
            self.moves.settle(chunk)

    def begin_closing(self) -> None:
        """Every lease but other ranks' is over, nothing is read ahead, and what cannot be read is
        given up.

        The budget holds as long as values can be kept inside it. A chunk to which somebody has a
        raw address stays where it is.
        """
        with self.lock:
            self.moves.spares.forget_lent()
            self.moves.spares.let_go()
            self.look_at_budget()
            self.ledger.limit_bytes = self.most_bytes
            self._is_closing = True
            self._prefetch_enabled = False
            self.moves.must_have_room = True
            for chunk in self.moves.chunks.values():
                chunk.leases = chunk.loans
                if chunk.raw_holds:
                    chunk.home = None

    def give_up(self, chunks: Iterable[Chunk], error: Exception) -> None:
        """While closing: the current values of these chunks cannot be had any more."""
        with self.lock:
            for chunk in chunks:
                self.end_write(chunk)
                with contextlib.suppress(DiskError):
                    self.moves.finish_fetch(chunk)
                self.lost += [(name, error) for name in give_up(chunk, is_stale=True)]
                chunk.clear()

    def abandon(self) -> None:
        """The very end: no transfer is under way, and no storage is the store's any more."""
        for chunk in self.moves.chunks.values():
            for future in (chunk.writing, chunk.fetching):
                if future is not None:
                    self.moves.finish_quietly(future)
            chunk.writing = chunk.fetching = None
            error = InternalError(f"{chunk.label} was not given back")
            self.lost += [(name, error) for name in give_up(chunk)]


__all__ = ["Chunk", "ChunkStore", "Kind", "StoreCounters"]
