"""One chunk: a layout, the storages of its slots, and where their bytes are now.

[Note: storages]
Every slot has one torch storage that lives as long as the tensor it belongs to. Fetching and
evicting do not replace tensors: they exchange the storage's data pointer
(`UntypedStorage._swap_data_ptr_`), so each view of the tensor, including those that autograd
saved for backward, is valid again after a fetch. A slot's bytes lie either inside the chunk's
pool buffer or in memory of the storage's own (as the user or autograd allocated it). An evicted
storage has no memory and zero bytes.

[Note: versions]
`version` counts changes; `lower_version` is the version the lower tier holds. A chunk is dirty
when they differ. A write stores the version it started with, so a change during the write leaves
the chunk dirty. A fetch asserts that the extent was not written since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from enum import Enum

import torch

from zeepo.chunks.layout import Layout
from zeepo.chunks.storages import memory_of, swap_memory, take_memory
from zeepo.errors import InternalError
from zeepo.memory.ledger import Reservation
from zeepo.memory.pool import Buffer
from zeepo.memory.tier import Extent, Tier
from zeepo.sabotage import sabotaged

NOWHERE = -1
"""As the number of writes to the lower tier: what it holds is not a version of the chunk."""


class Kind(Enum):
    """What a chunk holds; the value is the ledger's tag."""

    PARAM = "params"
    GRAD = "grads"
    STATE = "optimizer state"


class Chunk:
    """State of one chunk; changed only by the store."""

    def __init__(
        self,
        key: int,
        kind: Kind,
        label: str,
        layout: Layout,
        home: Tier | None,
        in_ram: dict[int, Chunk],
    ):
        self._in_ram = in_ram
        """All chunks of the store that hold memory, by key; this one enters and leaves it."""
        self.resident_bytes = 0
        """The memory it holds."""
        self.key = key
        self.kind = kind
        self.label = label
        self.layout = layout
        self.home = home
        """The tier it is evicted to; None when it stays in RAM."""
        self.storages: list[torch.UntypedStorage | None] = [None] * len(layout.slots)
        self._own_memory: dict[int, Reservation] = {}
        self._buffer: Buffer | None = None
        self.is_resident = False
        self.fetching: Future[None] | None = None
        self.writing: Future[None] | None = None
        self.writing_version = 0
        self.version = 0
        self.lower_version = -1
        self.extent: Extent | None = None
        self.expected_writes = 0
        self.leases = 0
        self.loans = 0
        """How many of the leases are other ranks': they read from this memory."""
        self.may_be_prefetched = True
        """False for what is assembled from other chunks: that needs their room too."""
        self.is_copy = False
        """What is here is a copy of parts on all ranks: few of such are kept beyond their use."""
        self.is_foreseeable = True
        """Whether its uses tell when the next will be; False when other ranks' pace decides."""
        self.last_lease = 0
        """When it was leased last, counted in leases."""
        self.is_part = False
        """Part of a whole that is another chunk: not the user's to see, or to get back."""
        self.is_short_lived = False
        """What comes in will be dropped soon: it is not worth a copy, and is a guest if large."""
        self.before_use: Callable[[], None] | None = None
        """What has to be done before anybody uses these bytes; it takes itself away."""
        self.raw_holds = 0
        """How many leases are held by addresses outside torch (numpy, data_ptr)."""
        self.is_buffer_lent = False
        """A slot was let go that goes on living in the buffer, because of such an address."""

    @property
    def is_empty(self) -> bool:
        return all(storage is None for storage in self.storages)

    @property
    def is_used_by_lease(self) -> bool:
        """Whether a lease is part of the trace: of an empty chunk only where a gradient arrives."""
        is_arrival = self.kind is Kind.GRAD and not self.is_copy
        return self.is_foreseeable and (is_arrival or not self.is_empty)

    @property
    def is_dirty(self) -> bool:
        return self.version != self.lower_version

    @property
    def is_retired(self) -> bool:
        """Whether somebody else has what it holds."""
        return self.expected_writes == NOWHERE and not self.is_resident

    @property
    def own_memory(self) -> Mapping[int, Reservation]:
        """Slots whose bytes are in memory of their own, with the ledger entry for it."""
        return self._own_memory

    def keep_own(self, index: int, reservation: Reservation) -> None:
        """A slot has memory of its own now, in the place of any it had."""
        self.let_own_go(index)
        self._own_memory[index] = reservation
        self._count_memory()

    def let_own_go(self, index: int) -> None:
        """A slot's own memory, if it has any, is not the store's any more."""
        reservation = self._own_memory.pop(index, None)
        if reservation is not None:
            reservation.release()
            self._count_memory()

    def hand_over_own(self, index: int) -> Reservation:
        """A slot's own memory is somebody else's, with its place in the ledger."""
        reservation = self._own_memory.pop(index)
        self._count_memory()
        return reservation

    @property
    def buffer(self) -> Buffer | None:
        """The pool's memory for all slots that have none of their own."""
        return self._buffer

    @buffer.setter
    def buffer(self, buffer: Buffer | None) -> None:
        self._buffer = buffer
        self._count_memory()

    def tighten(self) -> int:
        """Give back what its buffer has beyond its slots; how many bytes that is."""
        if self._buffer is None:
            return 0
        given_bytes = self._buffer.shrink(self.layout.nbytes)
        self._count_memory()
        return given_bytes

    def _count_memory(self) -> None:
        buffered = 0 if self._buffer is None else self._buffer.capacity_bytes
        self.resident_bytes = buffered + sum(r.nbytes for r in self._own_memory.values())
        if self.resident_bytes:
            self._in_ram[self.key] = self
        else:
            self._in_ram.pop(self.key, None)

    def present(self) -> list[tuple[int, torch.UntypedStorage]]:
        return [(i, s) for i, s in enumerate(self.storages) if s is not None]

    def place_in_buffer(self) -> None:
        """Point every present slot at its place in the buffer."""
        assert self.buffer is not None
        self.buffer.touched(self.layout.nbytes)
        shift = 64 if sabotaged("slot.offset") and self.layout.nbytes > 128 else 0
        for index, storage in self.present():
            slot = self.layout.slots[index]
            if slot.nbytes == 0:
                continue
            if storage.nbytes() != 0:
                raise InternalError(f"{self.label}: {slot.name} is fetched over live memory")
            offset = max(0, min(slot.offset_bytes + shift, self.layout.nbytes - slot.nbytes))
            swap_memory(storage, self.buffer.storage(offset, slot.nbytes))

    def move_into_buffer(self, index: int, storage: torch.UntypedStorage) -> None:
        """Copy a storage's bytes to their place in the buffer and let go of its own memory."""
        assert self.buffer is not None
        self.buffer.touched()  # of several slots the first: the others follow at once
        slot = self.layout.slots[index]
        if slot.nbytes:
            place = self.buffer.storage(slot.offset_bytes, slot.nbytes)
            place.copy_(storage, False)
            swap_memory(storage, place)

    def clear_slot(self, index: int) -> None:
        """Take the memory from one slot's storage."""
        storage = self.storages[index]
        if storage is not None and storage.nbytes() != 0:
            take_memory(storage)
        self.let_own_go(index)

    def clear(self) -> None:
        """Take the memory from every slot and give the buffer back."""
        for index in range(len(self.storages)):
            self.clear_slot(index)
        if self.buffer is not None:
            if self.raw_holds or self.is_buffer_lent:
                self.buffer.give_away()
            else:
                self.buffer.release()
            self.buffer = None
        self.is_buffer_lent = False
        self.is_resident = False

    def _present_runs(self) -> list[tuple[int, int]]:
        """Where the slots are that hold something, neighbours in one run."""
        starts = [slot.offset_bytes for slot in self.layout.slots]
        runs: list[tuple[int, int]] = []
        for index, end in enumerate([*starts[1:], self.layout.nbytes]):
            if self.storages[index] is None:
                continue
            low = starts[index] if index else 0
            if runs and runs[-1][1] == low:
                low, _ = runs.pop()
            runs.append((low, end))
        return runs

    def pieces(self) -> list[tuple[int, memoryview]]:
        """The resident bytes as (offset, bytes), for a write or for other ranks; nothing of slots
        that hold nothing: a buffer still has there what its last holder left."""
        if self.buffer is not None and not self.own_memory:
            memory = self.buffer.memory
            return [(low, memory[low:high]) for low, high in self._present_runs()]
        return [
            (self.layout.slots[index].offset_bytes, memory_of(storage))
            for index, storage in self.present()
            if storage.nbytes() != 0
        ]
