"""Everything a store can be asked, in any order: no byte lost, no budget exceeded, leases kept.

The model is the bytes each slot must hold and the leases that are out. Transfers are late (see
late_tier), so a wait that is missing shows as wrong bytes; some of them fail, so an error that
leaves a lease or a byte behind shows too.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.chunks.late_tier import LateTier
from zeepo.chunks import moves as moves_module
from zeepo.chunks.chunk import Chunk, Kind
from zeepo.chunks.layout import pack
from zeepo.chunks.storages import memory_of
from zeepo.chunks.store import ChunkStore
from zeepo.errors import BudgetError, DiskError, InternalError
from zeepo.memory.disk_tier import DiskTier
from zeepo.memory.ledger import Ledger
from zeepo.memory.pool import BufferPool
from zeepo.memory.ram_tier import RamTier
from zeepo.memory.tier import Tier

PAGE = 4096
Place = tuple[Chunk, int]
LAYOUTS = st.lists(st.sampled_from([0, 1, 60, 700, 3000, 3000]), min_size=1, max_size=3)


def storage_with(content: bytes) -> torch.UntypedStorage:
    storage = torch.UntypedStorage(len(content))
    if content:
        memory_of(storage)[:] = content
    return storage


def bytes_of(storage: torch.UntypedStorage) -> bytes:
    return bytes(memory_of(storage)) if storage.nbytes() else b""


class StoreMachine(RuleBasedStateMachine):
    """The store beside a dictionary of bytes."""

    failures = False

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(moves_module, "LOOKAHEAD_CHUNKS", 1)  # few chunks: see early writes
        self.patch.setattr(moves_module, "PRESSURE", 0.25)
        self.lower = LateTier(self.make_lower())
        self.expected: dict[Place, bytes] = {}
        self.storages: dict[Place, torch.UntypedStorage] = {}
        self.let_go: list[tuple[torch.UntypedStorage, bytes]] = []
        self.held: list[list[Chunk]] = []
        self.pointers: dict[Place, int] = {}
        self.chunks: list[Chunk] = []
        self.num_contents = 0

    def make_lower(self) -> Tier:
        return RamTier(Ledger("lower", None))

    @initialize(
        prefetch=st.booleans(),
        pages=st.integers(3, 6),
        layouts=st.lists(LAYOUTS, min_size=4, max_size=7),
    )
    def open(self, prefetch: bool, pages: int, layouts: list[list[int]]) -> None:
        """Chunks that do not fit together, all of them filled."""
        self.ledger = Ledger("ram", pages * PAGE)
        self.store = ChunkStore(BufferPool(self.ledger), prefetch=prefetch)
        for sizes in layouts:
            self.create(sizes, False, Kind.STATE)
            for index in range(len(sizes)):
                self.fill(self.chunks[-1], index)

    # -- help -------------------------------------------------------------------------------------

    def content(self, nbytes: int) -> bytes:
        """Bytes that occur nowhere else."""
        self.num_contents += 1
        return (self.num_contents.to_bytes(4, "little") * (nbytes // 4 + 1))[:nbytes]

    def num_leases(self, chunk: Chunk) -> int:
        return sum(group.count(chunk) for group in self.held)

    def attempt(self, action: Callable[[], None]) -> bool:
        """Whether it was done; a refusal or a failing disk must have changed nothing."""
        try:
            action()
        except BudgetError:
            return False
        except DiskError:
            assert self.failures
            return False
        return True

    def note_pointers(self) -> None:
        for (chunk, index), storage in self.storages.items():
            if self.num_leases(chunk) and storage.nbytes():
                self.pointers.setdefault((chunk, index), storage.data_ptr())
        for place in [p for p in self.pointers if not self.num_leases(p[0])]:
            del self.pointers[place]

    def fill(self, chunk: Chunk, index: int) -> None:
        content = self.content(chunk.layout.slots[index].nbytes)
        storage = storage_with(content)
        done = self.attempt(lambda: self.store.adopt(chunk, index, storage))
        assert done == (chunk.storages[index] is storage) or self.failures
        if chunk.storages[index] is storage:
            self.expected[chunk, index], self.storages[chunk, index] = content, storage
        else:
            assert bytes_of(storage) == content

    def overwrite(self, place: Place, delivered: int) -> None:
        content = self.content(len(self.expected[place]))
        if content:
            memory_of(self.storages[place])[:] = content
        self.expected[place] = content
        self.lower.deliver(delivered)
        self.store.mark_changed(place[0])

    def use(self, chunk: Chunk, changes: bool, delivered: int) -> None:
        """Lease, perhaps change, release; a failing disk may forbid it."""
        for index in range(len(chunk.layout.slots)):
            if changes and (chunk, index) not in self.storages:
                self.fill(chunk, index)
        if not self.attempt(lambda: self.store.lease([chunk])):
            return
        self.held.append([chunk])
        self.nothing_is_wrong()
        for place in [p for p in self.storages if p[0] is chunk and changes]:
            self.overwrite(place, delivered)
        self.held.pop()
        self.attempt(lambda: self.store.release([chunk]))
        self.nothing_is_wrong()

    # -- rules ------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.chunks) < 9)
    @rule(
        sizes=LAYOUTS,
        stays=st.sampled_from([False] * 7 + [True]),
        kind=st.sampled_from(list(Kind)),
    )
    def create(self, sizes: list[int], stays: bool, kind: Kind) -> None:
        layout = pack([(f"slot{i}", n) for i, n in enumerate(sizes)])
        home = None if stays else self.lower
        label = f"chunk{len(self.chunks)}"
        self.chunks.append(self.store.create(kind, label, layout, home))

    @precondition(lambda self: self.chunks)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        chunk = data.draw(st.sampled_from(self.chunks))
        index = data.draw(st.integers(0, len(chunk.layout.slots) - 1))
        if (chunk, index) in self.storages:
            storage = storage_with(bytes(chunk.layout.slots[index].nbytes))
            with pytest.raises(InternalError, match="is taken"):
                self.store.adopt(chunk, index, storage)
        else:
            self.fill(chunk, index)

    @precondition(lambda self: self.chunks)
    @rule(data=st.data(), delivered=st.integers(0, 2), times=st.integers(1, 3))
    def step(self, data: st.DataObject, delivered: int, times: int) -> None:
        """Training steps: use chunks one after the other, change some, fill empty slots."""
        order = data.draw(st.lists(st.sampled_from(self.chunks), min_size=3, max_size=12))
        changed = data.draw(st.sets(st.sampled_from(self.chunks)))
        for _ in range(times):
            for chunk in order:
                self.use(chunk, chunk in changed, delivered)
            self.store.trace.end_step()
            delivered = 0

    @precondition(lambda self: self.chunks)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        group = data.draw(st.lists(st.sampled_from(self.chunks), min_size=1, max_size=3))
        if self.attempt(lambda: self.store.lease(group)):
            self.held.append(group)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        group = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.attempt(lambda: self.store.release(group))

    @precondition(lambda self: self.chunks)
    @rule(data=st.data())
    def release_too_often(self, data: st.DataObject) -> None:
        chunk = data.draw(st.sampled_from(self.chunks))
        if not self.num_leases(chunk):
            with pytest.raises(InternalError, match="more often than leased"):
                self.store.release([chunk])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), delivered=st.integers(0, 2))
    def write_through_lease(self, data: st.DataObject, delivered: int) -> None:
        """Also while a write of the chunk is under way, which may end before it is marked."""
        leased = [p for p in self.storages if self.num_leases(p[0])]
        if not leased:
            return
        self.overwrite(data.draw(st.sampled_from(leased)), delivered)

    @precondition(lambda self: self.storages)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(list(self.storages)))
        if self.attempt(lambda: self.store.drop(*place)):
            assert self.storages.pop(place).nbytes() == 0
            del self.expected[place]
            self.pointers.pop(place, None)

    @precondition(lambda self: self.storages)
    @rule(data=st.data())
    def free_from_store(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(list(self.storages)))
        done = self.attempt(lambda: self.store.free_from_store(*place))
        assert done == (place[0].storages[place[1]] is None) or self.failures
        if place[0].storages[place[1]] is None:
            self.let_go.append((self.storages.pop(place), self.expected.pop(place)))
            self.pointers.pop(place, None)

    @rule(nbytes=st.sampled_from([0, 1, PAGE, 3 * PAGE, 8 * PAGE, 20 * PAGE]))
    def make_room(self, nbytes: int) -> None:
        if self.attempt(lambda: self.store.make_room(nbytes)):
            assert self.ledger.can_reserve(nbytes)

    @rule()
    def end_step(self) -> None:
        self.store.trace.end_step()

    @precondition(lambda self: self.chunks)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        chunk = data.draw(st.sampled_from(self.chunks))
        if self.num_leases(chunk) or chunk.home is None:
            with pytest.raises(InternalError, match="evicted while leased"):
                self.store.evict(chunk)
        elif self.attempt(lambda: self.store.evict(chunk)):
            assert chunk.resident_bytes == 0
            assert all(storage.nbytes() == 0 for _, storage in chunk.present())

    @rule(count=st.integers(1, 4))
    def deliver(self, count: int) -> None:
        self.lower.deliver(count)

    @precondition(lambda self: self.failures)
    @rule()
    def fail_next(self) -> None:
        self.lower.fail_next()

    # -- invariants -------------------------------------------------------------------------------

    @precondition(lambda self: hasattr(self, "store"))
    @invariant()
    def nothing_is_wrong(self) -> None:
        limit = self.ledger.limit_bytes
        assert limit is not None
        assert self.ledger.peak_bytes <= limit
        resident = sum(chunk.resident_bytes for chunk in self.chunks)
        assert self.ledger.used_bytes == resident + self.store.pool.idle_bytes
        for chunk in self.chunks:
            assert chunk.leases == self.num_leases(chunk), f"leases of {chunk.label}"
            assert chunk.writing is None or chunk.is_resident, "written from memory given back"
            for index, storage in chunk.present():
                place = (chunk, index)
                assert storage is self.storages[place]
                if chunk.leases or storage.nbytes():
                    assert bytes_of(storage) == self.expected[place], f"{chunk.label} {index}"
        for storage, content in self.let_go:
            assert bytes_of(storage) == content
        for place, pointer in self.pointers.items():
            if self.num_leases(place[0]):
                assert self.storages[place].data_ptr() == pointer, "moved while leased"
        self.note_pointers()

    def teardown(self) -> None:
        self.patch.undo()
        if hasattr(self, "store"):
            self.lower.num_failures_due = 0
            self.end()
        self.lower.close()

    def end(self) -> None:
        """Give all back, then see every byte once more, as ordinary memory."""
        for group in self.held:
            self.attempt(lambda group=group: self.store.release(group))  # type: ignore[misc]
        self.held = []
        for chunk in self.chunks:
            assert chunk.leases == 0
        for chunk in self.chunks:  # meet the failures that nobody has met yet
            self.attempt(lambda chunk=chunk: self.store.lease([chunk]))  # type: ignore[misc]
        self.store.begin_closing()
        for (chunk, index), storage in self.storages.items():
            self.store.free_from_store(chunk, index)
            assert bytes_of(storage) == self.expected[chunk, index]
        assert self.store.lost == []
        self.store.pool.trim()
        assert self.ledger.by_tag() == {}


class FailingMachine(StoreMachine):
    """Transfers fail now and then."""

    failures = True


class DiskMachine(StoreMachine):
    """The same over files, with their checksums."""

    def make_lower(self) -> Tier:
        self.folder = Path(tempfile.mkdtemp())
        return DiskTier([self.folder], num_threads=1, block_bytes=PAGE)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            shutil.rmtree(self.folder)


@pytest.mark.parametrize(
    ("machine", "examples"), [(StoreMachine, 80), (FailingMachine, 60), (DiskMachine, 15)]
)
def test_store_machine(machine: type[StoreMachine], examples: int) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=30, deadline=None)
    )
