"""How chunks come up and go down: room, writes, writing early, reads.

Called by the store under its lock. A transfer is started here and met again at one place, `wait`.
Who goes is decided by `eviction`, who comes early or stays by `foresight`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from torch import UntypedStorage

from zeepo.chunks.accounts import (
    StoreCounters,
    can_be_made_stale,
    candidates,
    no_room_message,
)
from zeepo.chunks.chunk import Chunk, Kind
from zeepo.chunks.eviction import Candidate, choose_victims
from zeepo.chunks.layout import align_up
from zeepo.chunks.losses import named
from zeepo.chunks.residents import Residents
from zeepo.chunks.storages import is_in_backward, is_ordinary, new_storage, swap_memory
from zeepo.chunks.trace import Trace
from zeepo.errors import BudgetError, DiskError, InternalError, RankError
from zeepo.memory.budget import WORTH_LEAVING_BYTES, RamBudget
from zeepo.memory.ledger import Reservation
from zeepo.memory.pool import BufferPool
from zeepo.memory.spares import WORTH_KEEPING_BYTES, Spares
from zeepo.memory.transfers import Transfer
from zeepo.sabotage import sabotaged

PAGE_BYTES = 4096
LOOKAHEAD_CHUNKS = 24
PRESSURE = 0.5
"""Above this share of the budget, changed chunks are written before their room is needed."""
GRADS_STAY = 0.7
"""Gradients are written early only when this share of the budget is changed: a gradient that can
stay until the update is never written at all."""


class Moves:
    """The chunks of a store and their way between RAM and their home tiers."""

    def __init__(self, pool: BufferPool, guaranteed_bytes: int = 0):
        self.pool = pool
        self.ledger = pool.ledger
        self.trace = Trace()
        self.counters = StoreCounters()
        self.residents = Residents()
        self.spares = Spares()
        self.chunks: dict[int, Chunk] = {}
        self.in_ram: dict[int, Chunk] = {}
        """Those of them that hold memory."""
        self._coming: dict[int, Chunk] = {}
        """Those of them that are being read."""
        self.copies: list[Chunk] = []
        """Those of them that are copies of what is split over the ranks."""
        self._guaranteed_bytes = guaranteed_bytes
        """What may be held whatever the limit is at this moment: one function's needs."""
        self.wait_for_loan: Callable[[], bool] | None = None
        """Waits until a rank gives back what it borrowed; False if there is no such thing."""
        self.let_rows_go: Callable[[], bool] | None = None
        """Sends rows of embeddings that nobody uses now to disk; False if there are none."""
        self.budget: RamBudget | None = None
        """Moves the ledger's limit; without one the limit stays where it is."""
        self.must_have_room = False
        """While closing, values come before the budget: what no eviction frees is granted."""

    def take_in(self, chunk: Chunk, storage: UntypedStorage) -> Reservation:
        """Memory that torch has taken is the ledger's now; for a while only if it goes soon."""
        nbytes = storage.nbytes()
        if chunk.kind is Kind.GRAD and (spare := self.spares.arrived(storage)) is not None:
            return spare
        if self.budget is not None:
            if chunk.is_short_lived and nbytes >= WORTH_LEAVING_BYTES:
                return self.budget.admit(chunk.kind.value, nbytes)
            self.budget.hand_over(nbytes)
        self.make_ledger_room(nbytes)
        return self.ledger.reserve(chunk.kind.value, nbytes)

    def keep_spare(self, chunk: Chunk, index: int) -> None:
        """A slot is about to be emptied: in backward the memory of a large gradient is left to the
        next of its size. Only torch's own: an array of the user's may have become a gradient."""
        storage = chunk.storages[index]
        if storage is None or not chunk.is_short_lived or index not in chunk.own_memory:
            return
        if (
            chunk.raw_holds or self.budget is None or self.must_have_room
        ):  # closing: nothing is kept
            return
        nbytes = storage.nbytes()
        if nbytes <= WORTH_KEEPING_BYTES or not is_ordinary(storage) or not is_in_backward():
            return
        kept_bytes = self.spares.nbytes + self.spares.lent_bytes + nbytes
        if kept_bytes > self.budget.most_spare_bytes or not self.spares.is_wanted(nbytes):
            return
        memory = new_storage(0)
        swap_memory(storage, memory)
        reservation = chunk.hand_over_own(index)
        self.budget.keep_room_of([reservation])
        self.spares.keep(memory, reservation)

    # -- moving down ------------------------------------------------------------------------------

    def make_buffer_room(self, nbytes: int) -> None:
        """Evict until the pool can hand out a buffer, which is never smaller than a page."""
        nbytes = align_up(max(1, nbytes), PAGE_BYTES)
        while not self.pool.can_acquire(nbytes):
            self.evict_for(nbytes)

    def make_ledger_room(self, nbytes: int) -> None:
        """Evict until the ledger has room for memory that is not the pool's."""
        if nbytes > 0:
            self._make_headroom(nbytes)

    def fit_ledger(self) -> None:
        """Evict until the ledger is inside its limit."""
        self._make_headroom(0)

    def _make_headroom(self, nbytes: int) -> None:
        while self.ledger.headroom_bytes < nbytes:
            if self.pool.idle_bytes:
                self.pool.trim(nbytes - self.ledger.headroom_bytes)
            else:
                self.evict_for(nbytes)

    def missing_bytes(self, nbytes: int) -> int:
        """How much has to leave so that `nbytes` fit, once idle buffers are unmapped."""
        limit = self.ledger.limit_bytes or 0
        return max(1, nbytes - (limit - self.ledger.used_bytes) - self.pool.idle_bytes)

    def evict_for(self, nbytes: int) -> None:
        try:
            victims = choose_victims(self._candidates(), self.missing_bytes(nbytes))
            if victims is None:
                self._make_room_otherwise(nbytes)
                return
            self._evict_all(victims)
        except (BudgetError, DiskError):
            if not self.must_have_room:
                raise
            limit = self.ledger.limit_bytes or 0
            self.ledger.limit_bytes = limit + self.missing_bytes(nbytes)

    def _make_room_otherwise(self, nbytes: int) -> None:
        """Chunks alone do not make room: activations do, or what one function needs is granted.

        Granted only when no chunk is left that could leave: the guarantee has no room for others.
        Beyond it (addresses that the user holds count too) there is what torch might take, and
        has not taken.
        """
        if self._relieve(nbytes):
            return
        # Buffers may be larger than what they hold, while there is room: the guarantee has none.
        if sum([chunk.tighten() for chunk in self.in_ram.values()]):
            return
        movable = [c.key for c in self._candidates() if c.nbytes]
        if movable:
            self._evict_all(movable)
            return
        if self.wait_for_loan is not None and self.wait_for_loan():
            return
        wanted = align_up(nbytes, PAGE_BYTES)
        needed = self.ledger.used_bytes - self.pool.idle_bytes + wanted
        unused_bytes = 0 if self.budget is None else self.budget.unused_bytes()
        if needed > self._guaranteed_bytes and wanted > unused_bytes:
            if self.let_rows_go is not None and self.let_rows_go():
                return
            raise BudgetError(no_room_message(self.chunks.values(), self.ledger, nbytes))
        self.ledger.limit_bytes = max(needed, self.ledger.limit_bytes or 0)

    def _relieve(self, nbytes: int) -> bool:
        """Torch may not need its room now, or saved activations go; whether that was of use."""
        if self.budget is None or self.must_have_room:
            return False
        if self.spares.let_go():
            self.budget.look()
            return True
        if self.budget.lend(self.missing_bytes(nbytes)):
            return True
        if self.budget.spill is None:
            return False
        held_bytes = self.ledger.used_bytes - self.pool.idle_bytes
        spilled_bytes = self.budget.spill(nbytes)
        self.budget.look()
        return spilled_bytes > 0 or self.ledger.used_bytes - self.pool.idle_bytes < held_bytes

    def shrink_to_limit(self) -> None:
        """The limit fell below what is held: idle buffers go, then chunks, as far as they can."""
        while (excess := self.ledger.used_bytes - (self.ledger.limit_bytes or 0)) > 0:
            if self.pool.trim(excess):
                continue
            known = self._candidates()
            victims = choose_victims(known, min(excess, sum(c.nbytes for c in known)))
            if not victims:
                return
            self._evict_all(victims)

    def movable_bytes(self) -> int:
        """What could leave RAM now."""
        chunks = self.in_ram.values()
        movable = [c.resident_bytes for c in chunks if c.home is not None and not c.leases]
        return sum(movable) + self.pool.idle_bytes

    def _candidates(self) -> list[Candidate]:
        return candidates(self.in_ram.values(), self.trace, self.residents.keys)

    def _evict_all(self, keys: Sequence[int]) -> None:
        """All writes are started before the first is waited for."""
        for key in keys:
            self.start_write(self.chunks[key])
        for key in keys:
            self.evict_unless_lent(self.chunks[key])

    def evict_unless_lent(self, chunk: Chunk) -> None:
        """While we waited for another chunk, a rank may have borrowed this one."""
        if not chunk.leases:
            self.evict(chunk)

    def start_write(self, chunk: Chunk) -> None:
        self.collect_write(chunk)
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

    def collect_write(self, chunk: Chunk) -> None:
        """Take note of a write that is done, without waiting. One that failed is as if it had not
        been tried: the disk may have room by now, and the next try tells."""
        if chunk.writing is None or not chunk.writing.done():
            return
        if isinstance(chunk.writing.exception(), DiskError):
            chunk.writing, chunk.lower_version = None, -1
        else:
            self.settle(chunk)

    def settle(self, chunk: Chunk) -> None:
        """Wait until no write reads from the chunk's memory."""
        if chunk.writing is None:
            return
        future, chunk.writing = chunk.writing, None
        chunk.lower_version = -1
        if not sabotaged("evict.wait"):
            try:
                self.wait(future)
            except DiskError as error:
                raise named(error, chunk) from None
            except BaseException:
                self.finish_quietly(future)
                raise
        chunk.lower_version = chunk.version if sabotaged("write.clean") else chunk.writing_version

    def end_loans(self, chunk: Chunk) -> None:
        """Wait until no rank reads from a chunk's memory; one that is gone reads no more."""
        with contextlib.suppress(RankError):
            while chunk.loans and self.wait_for_loan is not None and self.wait_for_loan():
                pass

    def evict(self, chunk: Chunk) -> None:
        if chunk.leases or chunk.home is None:
            raise InternalError(f"{chunk.label} is evicted while leased")
        if chunk.fetching is not None:
            self.finish_fetch(chunk)
        while chunk.is_resident and (chunk.is_dirty or chunk.writing is not None):
            self.start_write(chunk)
            self.settle(chunk)
        if chunk.is_resident:
            self.residents.note_eviction(chunk.key, chunk.resident_bytes)
            if self.budget is not None:
                self.budget.keep_room_of(chunk.own_memory.values())
            chunk.clear()
            self.counters.num_evictions += 1

    def write_early(self, chunk: Chunk) -> None:
        """Under pressure, write what is changed and not needed soon, while compute goes on."""
        limit = self.ledger.limit_bytes
        if chunk.home is None or limit is None or not chunk.is_resident or chunk.is_empty:
            return
        if self.ledger.used_bytes < PRESSURE * limit or not chunk.is_dirty:
            return
        if chunk.is_short_lived or chunk.key in self.residents.keys:
            return
        changed = (c.resident_bytes for c in self.in_ram.values() if c.is_dirty and c.is_resident)
        if chunk.kind is Kind.GRAD and sum(changed) < GRADS_STAY * limit:
            return
        next_use = self.trace.next_use(chunk.key)
        if LOOKAHEAD_CHUNKS < next_use < float("inf"):
            self.start_write(chunk)

    # -- moving up --------------------------------------------------------------------------------

    def start_fetch(self, chunk: Chunk) -> None:
        if sabotaged("state.stale") and can_be_made_stale(chunk):
            chunk.clear()
            chunk.version = chunk.lower_version
        self.forget_failed_fetch(chunk)
        if chunk.is_resident or chunk.fetching is not None or chunk.is_empty:
            return
        if chunk.extent is None or chunk.home is None or chunk.lower_version != chunk.version:
            raise InternalError(
                f"{chunk.label} version {chunk.version} is nowhere: the lower tier holds "
                f"{chunk.lower_version}"
            )
        if chunk.extent.num_writes != chunk.expected_writes:
            raise InternalError(f"{chunk.label} was written behind the store's back")
        nbytes = align_up(max(1, chunk.layout.nbytes), PAGE_BYTES)
        self.make_buffer_room(nbytes)
        chunk.buffer = self.pool.acquire(nbytes, chunk.kind.value)
        chunk.leases += 1
        try:
            chunk.fetching = chunk.home.read(chunk.extent, chunk.buffer.memory)
            self._coming[chunk.key] = chunk
        except BaseException:
            chunk.buffer.release()
            chunk.buffer = None
            raise
        finally:
            chunk.leases -= 1
        self.counters.num_fetches += 1

    def note_progress(self) -> None:
        """Reads on their way fill fresh memory, which is not torch's: note how far they are."""
        if not self.pool.fresh_bytes:
            return
        for chunk in self._coming.values():
            read, buffer = chunk.fetching, chunk.buffer
            if buffer is None or not buffer.fresh_bytes:
                continue
            if isinstance(read, Transfer) and read.num_parts:
                buffer.touched(chunk.layout.nbytes * read.num_parts_done // read.num_parts)

    def forget_failed_fetch(self, chunk: Chunk) -> None:
        """A read that failed earlier, ahead of need or beside another, is tried again."""
        failed = chunk.fetching is not None and chunk.fetching.done() and chunk.fetching.exception()
        if failed:
            assert chunk.buffer is not None
            chunk.buffer.release()
            chunk.buffer = chunk.fetching = None
            self._coming.pop(chunk.key, None)

    def finish_fetch(self, chunk: Chunk) -> None:
        if chunk.fetching is None:
            return
        future, chunk.fetching = chunk.fetching, None
        self._coming.pop(chunk.key, None)
        try:
            if not sabotaged("fetch.wait"):
                self.wait(future)
        except BaseException as error:
            assert chunk.buffer is not None
            self.finish_quietly(future)
            chunk.buffer.release()
            chunk.buffer = None
            if isinstance(error, DiskError):
                raise named(error, chunk) from None
            raise
        chunk.place_in_buffer()
        chunk.is_resident = True

    # -- waiting ----------------------------------------------------------------------

    def wait(self, future: Future[None]) -> None:
        """The one place where the training thread waits for a tier."""
        started = time.perf_counter()
        try:
            future.result()
        finally:
            self.counters.seconds_waited += time.perf_counter() - started

    def note_use(self, chunks: Sequence[Chunk]) -> bool:
        """Tell the trace, by a clock that stands still while training waits; whether that is new
        to it."""
        now = time.perf_counter() - self.counters.seconds_waited
        return sum(self.trace.access(c.key, now) for c in chunks if c.is_used_by_lease) > 0

    @staticmethod
    def finish_quietly(future: Future[None]) -> None:
        """Let a transfer end, whatever its outcome: its memory must not be reused before."""
        future.exception()
