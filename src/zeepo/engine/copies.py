"""Ordinary copies of managed tensors that outlive the call: for pickles, deep copies, printing.

`torch.save` and `copy.deepcopy` of a model keep a copy of every tensor at the same time. Copies get
ordinary memory, counted in the ledger, as long as all of them leave the session the least it needs;
beyond that they are private mappings of unlinked files ([memory/reclaimable]). Without a disk, and
for small tensors, they are plain clones.

Invariant: with a disk, large copies never take RAM that is not in the ledger.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from zeepo.chunks.storages import is_dense, memory_of
from zeepo.chunks.store import ChunkStore
from zeepo.engine.assembly import PartsTier
from zeepo.engine.managed import Home, plain_torch
from zeepo.errors import BudgetError
from zeepo.memory.ledger import Reservation
from zeepo.memory.mapping import Mapping
from zeepo.memory.reclaimable import ReclaimableSpace

SMALL_BYTES = 64 << 10
"""Below this a file and a mapping (the system allows some 65000) cost more than they save."""
TAG = "copies"


class Copies:
    """Makes the copies of one manager's tensors."""

    def __init__(self, store: ChunkStore):
        self._store = store
        self._space: ReclaimableSpace | None = None
        self._minimum_bytes = 0
        self._ended: deque[Reservation] = deque()

    def use_disk(self, space: ReclaimableSpace, minimum_bytes: int) -> None:
        """Copies may go to disk; `minimum_bytes` of the ledger are never theirs."""
        self._space = space
        self._minimum_bytes = minimum_bytes

    def make(self, home: Home, tensor: Tensor) -> Tensor:
        """A copy of the managed `tensor`; grad mode is off."""
        nbytes = tensor.numel() * tensor.element_size()
        if self._space is None or nbytes < SMALL_BYTES:
            return tensor.clone(memory_format=torch.preserve_format)
        self.count_out_ended()
        copy = self._in_ram(tensor, nbytes)
        return self._on_disk(self._space, home, tensor, nbytes) if copy is None else copy

    def count_out_ended(self) -> None:
        """Take copies that are gone out of the ledger."""
        while self._ended:
            self._ended.popleft().release()

    def _in_ram(self, tensor: Tensor, nbytes: int) -> Tensor | None:
        """A copy in memory that is counted until it is gone; None if there is no room for it."""
        ledger = self._store.ledger
        if (most_bytes := self._store.most_bytes) is not None:
            taken_bytes = ledger.by_tag().get(TAG, 0)
            if taken_bytes + nbytes > most_bytes - self._minimum_bytes:
                return None
        try:
            self._store.make_room(nbytes)
            reservation = ledger.reserve(TAG, nbytes)
        except BudgetError:  # somebody holds long leases: the disk then
            return None
        memory = np.frombuffer(Mapping(nbytes).memory, dtype=np.uint8)[:nbytes]
        # Garbage is collected in any thread, also inside the ledger: only note it there.
        weakref.finalize(memory, self._ended.append, reservation).atexit = False
        copy = _over(torch.from_numpy(memory).untyped_storage(), tensor)
        copy.copy_(tensor)
        return copy

    def _on_disk(self, space: ReclaimableSpace, home: Home, tensor: Tensor, nbytes: int) -> Tensor:
        space.check_limit(home.name, nbytes)
        if _shows_slot(home, tensor):
            mapping = space.write(home.name, nbytes, self._slot_bytes(home))
            return _over(mapping.storage(0, nbytes), tensor)
        clone = tensor.clone(memory_format=torch.preserve_format)
        mapping = space.write(home.name, nbytes, [(0, memory_of(clone.untyped_storage()))])
        return _over(mapping.storage(0, nbytes), clone)

    def _slot_bytes(self, home: Home) -> Iterator[tuple[int, memoryview]]:
        """A slot's bytes, leased while they are handed out; of a state in pieces, one by one."""
        chunk = home.chunk
        with self._store.lock:
            self._store.make_ready([chunk])
            if isinstance(chunk.home, PartsTier) and not chunk.is_resident:
                yield from chunk.home.stream()
                return
            self._store.lease([chunk])
            try:
                storage = chunk.storages[home.index]
                assert storage is not None
                yield 0, memory_of(storage)
            finally:
                self._store.release([chunk])


def _shows_slot(home: Home, tensor: Tensor) -> bool:
    """Whether the bytes of a tensor's slot, as they lie, are the bytes of a copy."""
    slot = home.chunk.layout.slots[home.index]
    with plain_torch():
        return (
            tensor.storage_offset() == 0
            and tensor.numel() * tensor.element_size() == slot.nbytes
            and is_dense(tensor)
            and not tensor.is_conj()
            and not tensor.is_neg()
        )


def _over(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """A tensor over a storage, with the strides that a clone of `like` has."""
    with plain_torch():
        stride = torch.empty_like(like, device="meta").stride()
        return torch.empty(0, dtype=like.dtype).set_(storage, 0, like.shape, stride)
