"""Before a session ends: every chunk gets the memory in which the user keeps it.

What fits into the budget gets ordinary memory: parameters first, then gradients, then optimizer
state. The rest becomes private mappings of unlinked files ([memory/reclaimable]). Chunk by chunk:
lease (a read that is checked), copy or write out, exchange the storages' memory, give the chunk's
place on disk back; so RAM never holds more than the budget and the disk one chunk more than the
state itself. A state kept in pieces is written piece by piece, never whole.

Invariant: a value is lost only if it cannot be read. When the disk takes no more, values get
ordinary memory beyond the budget, and `failure` says so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch

from zeepo.chunks.layout import align_up
from zeepo.chunks.storages import new_storage
from zeepo.chunks.store import Chunk, ChunkStore, Kind
from zeepo.engine.assembly import PartsTier
from zeepo.errors import DiskError, InternalError, RankError
from zeepo.memory.heap import give_back_free_memory
from zeepo.memory.ledger import Reservation
from zeepo.memory.mapping import PAGE_BYTES, address_of
from zeepo.memory.reclaimable import Pieces, ReclaimableSpace
from zeepo.units import format_bytes

KEPT_FIRST = (Kind.PARAM, Kind.GRAD, Kind.STATE)
KEPT_TAG = "given back"
NO_LIMIT = 1 << 62

Places = dict[int, tuple[torch.UntypedStorage, Reservation]]


class _UnreadableError(Exception):
    """Bytes that are to be given back could not be read."""

    def __init__(self, reason: Exception):
        super().__init__(str(reason))
        self.reason = reason


class Closing:
    """Settles the chunks of a store. Without a disk everything is kept in ordinary memory."""

    def __init__(self, store: ChunkStore, space: ReclaimableSpace | None):
        self._store = store
        self._space = space
        self._failures: list[DiskError] = []
        """Why values that belong on disk are in ordinary memory."""
        self._limit_bytes = store.ledger.limit_bytes
        """The budget; while closing, the ledger's own limit rises when values have no place."""

    def check(self) -> None:
        """Raise `DiskError`, with nothing changed, if the disk clearly cannot hold the rest."""
        self._limit_bytes = self._store.most_bytes
        _, leaving = self._divide()
        sizes = [chunk.layout.nbytes for chunk in leaving]
        if sizes and self._space is not None:
            self._space.check_free(sum(sizes) + max(sizes))

    def begin(self) -> None:
        """The session is over: end its leases, note its budget."""
        self._store.begin_closing()
        self._limit_bytes = self._store.ledger.limit_bytes

    def settle_all(self) -> None:
        """Nothing is in a lower tier afterwards."""
        kept, leaving = self._divide()
        for chunk in [c for c in leaving if c.is_resident]:  # they need no room
            self._settle(chunk, is_kept=False)
        for chunk in kept:
            self._settle(chunk, is_kept=True)
        for chunk in [c for c in leaving if c.home is not None and not c.is_empty]:
            self._settle(chunk, is_kept=False)

    def failure(self) -> DiskError | None:
        """What to say when the disk refused values and the budget could not hold them."""
        excess_bytes = (self._store.ledger.limit_bytes or 0) - (self._limit_bytes or 0)
        if not self._failures or excess_bytes <= 0:
            return None
        return DiskError(
            "session.close: every tensor is whole and true, but the disk did not take what the "
            f"budget does not hold: {format_bytes(excess_bytes)} more than ram allows are in "
            f"memory now. The first failure: {self._failures[0]}"
        )

    # -- what stays in ordinary memory ------------------------------------------------------------

    def _divide(self) -> tuple[list[Chunk], list[Chunk]]:
        """Chunks that fit into the budget, the most useful first, and those that do not."""
        everything = [chunk for chunk in self._store.chunks() if not chunk.is_empty]
        wholes = [tier for c in everything if isinstance(tier := c.home, PartsTier)]
        parts = {chunk.key for whole in wholes for chunk in whole.chunks()}
        visible = [c for c in everything if c.home is not None and not c.raw_holds]
        visible = [c for c in visible if c.key not in parts and not c.is_part]
        room = self._room_bytes(visible, [c for c in everything if c.key in parts])
        kept: list[Chunk] = []
        leaving: list[Chunk] = []
        for chunk in sorted(visible, key=_usefulness):
            nbytes = chunk.layout.nbytes
            if nbytes <= room:
                room -= nbytes
                kept.append(chunk)
            else:
                leaving.append(chunk)
        return kept, leaving

    def _room_bytes(self, visible: Sequence[Chunk], parts: Sequence[Chunk]) -> int:
        """The budget less what cannot move and what one chunk on its way needs."""
        ledger = self._store.ledger
        if self._limit_bytes is None or self._space is None:
            return NO_LIMIT
        moving = max((_working_bytes(chunk) for chunk in visible), default=0)
        of_chunks = sum(chunk.resident_bytes for chunk in (*visible, *parts))
        of_others = ledger.used_bytes - of_chunks - self._store.pool.idle_bytes
        return self._limit_bytes - of_others - moving

    # -- one chunk --------------------------------------------------------------------------------

    def _settle(self, chunk: Chunk, *, is_kept: bool) -> None:
        frees_heap = bool(chunk.own_memory) and not is_kept
        try:
            if isinstance(chunk.home, PartsTier):
                frees_heap |= _rests_in_ram(chunk)
                self._settle_whole(chunk, chunk.home, is_kept=is_kept)
            else:
                self._settle_leased(chunk, is_kept=is_kept)
        except _UnreadableError as failure:
            self._store.lose(chunk, failure.reason)
        if self._space is not None:
            self._space.reclaim()
        if frees_heap:
            give_back_free_memory()

    def _settle_leased(self, chunk: Chunk, *, is_kept: bool) -> None:
        try:
            self._store.lease([chunk])
        except (DiskError, InternalError, RankError) as error:
            raise _UnreadableError(error) from error
        try:
            places = None if is_kept else self._write_out(chunk, chunk.pieces())
            self._store.settle(chunk, self._copy(chunk) if places is None else places)
        finally:
            self._store.release([chunk])

    def _settle_whole(self, chunk: Chunk, tier: PartsTier, *, is_kept: bool) -> None:
        """A state kept in pieces: taken from them, unless it is in memory as the user left it."""
        if chunk.is_resident:
            self._settle_leased(chunk, is_kept=is_kept)
        else:
            places = None if is_kept else self._write_out(chunk, _readable(tier))
            if places is None:
                place, reservation = self._ordinary(chunk.layout.nbytes)
                for offset, memory in _readable(tier):
                    ctypes.memmove(place.data_ptr() + offset, address_of(memory), memory.nbytes)
                places = {0: (place, reservation)}
            self._store.settle(chunk, places)
        tier.drop_parts()

    def _write_out(self, chunk: Chunk, pieces: Pieces) -> Places | None:
        """Places in a file of the chunk's own; None if the disk refuses."""
        assert self._space is not None
        try:
            mapping = self._space.write(chunk.label, chunk.layout.nbytes, pieces)
        except DiskError as error:
            self._failures.append(error)
            return None
        ledger = self._store.ledger
        slots = [(i, chunk.layout.slots[i]) for i, _ in chunk.present()]
        return {
            index: (mapping.storage(slot.offset_bytes, slot.nbytes), ledger.reserve(KEPT_TAG, 0))
            for index, slot in slots
            if slot.nbytes
        }

    def _copy(self, chunk: Chunk) -> Places:
        """Ordinary memory for the slots that lie in the chunk's buffer."""
        places: Places = {}
        for index, storage in chunk.present():
            if storage.nbytes() and index not in chunk.own_memory:
                place, reservation = self._ordinary(storage.nbytes())
                place.copy_(storage, False)
                places[index] = (place, reservation)
        return places

    def _ordinary(self, nbytes: int) -> tuple[torch.UntypedStorage, Reservation]:
        self._store.make_room(nbytes)
        return new_storage(nbytes), self._store.ledger.reserve(KEPT_TAG, nbytes)


def _readable(tier: PartsTier) -> Iterator[tuple[int, memoryview]]:
    """The stream of a state in pieces; what fails in it is told from a write that fails."""
    stream = tier.stream()
    while True:
        try:
            piece = next(stream, None)
        except (DiskError, InternalError, RankError) as error:
            raise _UnreadableError(error) from error
        if piece is None:
            return
        yield piece


def _rests_in_ram(chunk: Chunk) -> bool:
    """A state whose pieces never leave RAM."""
    tier = chunk.home
    return isinstance(tier, PartsTier) and all(part.home is None for part in tier.chunks())


def _usefulness(chunk: Chunk) -> tuple[bool, int, int]:
    """The smallest is kept first."""
    return not _rests_in_ram(chunk), KEPT_FIRST.index(chunk.kind), chunk.key


def _working_bytes(chunk: Chunk) -> int:
    """What settling a chunk takes beside the memory it gets."""
    nbytes = chunk.layout.nbytes
    if isinstance(chunk.home, PartsTier) and not _rests_in_ram(chunk):
        nbytes = chunk.home.part_bytes
    return align_up(nbytes, PAGE_BYTES)
