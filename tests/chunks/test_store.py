"""The store, story by story: residency, versions, leases, budget, reading ahead, failing disks."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from tests.chunks.late_tier import Boom, LateTier
from zeepo.chunks import moves as moves_module
from zeepo.chunks.chunk import Chunk, Kind
from zeepo.chunks.layout import pack
from zeepo.chunks.store import ChunkStore
from zeepo.chunks.wholes import rest_on
from zeepo.errors import BudgetError, DiskError, InternalError
from zeepo.memory.ledger import Ledger
from zeepo.memory.pool import IDLE_TAG, BufferPool
from zeepo.memory.ram_tier import RamTier

PAGE = 4096
NUMEL = PAGE // 4


class Bench:
    """A store with room for a few pages, chunks of one page each, and a late tier beneath."""

    def __init__(self, pages: int, *, prefetch: bool = False, guaranteed_pages: int = 0) -> None:
        self.lower = LateTier(RamTier(Ledger("lower", None)))
        self.ledger = Ledger("ram", pages * PAGE)
        self.pool = BufferPool(self.ledger)
        self.store = ChunkStore(
            self.pool, prefetch=prefetch, guaranteed_bytes=guaranteed_pages * PAGE
        )
        self.tensors: dict[Chunk, torch.Tensor] = {}

    def chunk(self, value: float, *, stays: bool = False, pages: int = 1) -> Chunk:
        """A chunk whose one slot, a tensor, fills a page or more with `value`."""
        label = f"chunk{len(self.tensors)}"
        layout = pack([(f"{label}.weight", pages * PAGE)])
        chunk = self.store.create(Kind.PARAM, label, layout, None if stays else self.lower)
        self.tensors[chunk] = torch.full((pages * NUMEL,), value)
        self.store.adopt(chunk, 0, self.tensors[chunk].untyped_storage())
        return chunk

    def use(self, *chunks: Chunk) -> None:
        for chunk in chunks:
            self.store.lease([chunk])
            self.store.release([chunk])

    def change(self, chunk: Chunk, value: float) -> None:
        self.store.lease([chunk])
        self.tensors[chunk].fill_(value)
        self.store.mark_changed(chunk)
        self.store.release([chunk])

    def value(self, chunk: Chunk) -> float:
        self.store.lease([chunk])
        try:
            assert bool((self.tensors[chunk] == self.tensors[chunk][0]).all()), "mixed bytes"
            return float(self.tensors[chunk][0])
        finally:
            self.store.release([chunk])

    def resident(self) -> list[str]:
        return [c.label for c in self.tensors if c.is_resident]

    def writes(self) -> list[str]:
        return [f.extent.label for f in self.lower.pending if f.what == "write"]


# -- residency and versions -----------------------------------------------------------------------


def test_every_view_is_valid_again_after_a_fetch() -> None:
    bench = Bench(2)
    chunk = bench.chunk(1.0)
    tensor = bench.tensors[chunk]
    tensor[:] = torch.arange(NUMEL)
    expected, view = tensor.clone(), tensor.view(-1, 4)[3:7].t()
    expected_view = view.clone()
    bench.store.evict(chunk)
    assert tensor.untyped_storage().nbytes() == 0
    assert bench.ledger.used_bytes == 0
    bench.store.lease([chunk])
    assert torch.equal(tensor, expected)
    assert torch.equal(view, expected_view)
    bench.store.release([chunk])


def test_a_clean_chunk_leaves_without_a_write() -> None:
    bench = Bench(2)
    chunk = bench.chunk(1.0)
    bench.store.evict(chunk)
    bench.use(chunk)
    bench.store.evict(chunk)
    assert (bench.store.counters.num_writes, bench.store.counters.num_evictions) == (1, 2)
    bench.change(chunk, 2.0)
    bench.store.evict(chunk)
    assert bench.store.counters.num_writes == 2
    assert bench.value(chunk) == 2.0


def test_slots_of_one_chunk_are_apart() -> None:
    bench = Bench(2)
    layout = pack([("a", 4), ("nothing", 0), ("b", 100), ("c", 68)])
    chunk = bench.store.create(Kind.STATE, "several", layout, bench.lower)
    tensors = [torch.full((n // 4,), float(i + 1)) for i, n in enumerate((4, 0, 100, 68))]
    for index, tensor in enumerate(tensors):
        bench.store.adopt(chunk, index, tensor.untyped_storage())
    for _ in range(2):
        bench.store.evict(chunk)
        bench.store.lease([chunk])
        for index, tensor in enumerate(tensors):
            assert bool((tensor == index + 1).all())
        bench.store.release([chunk])
    bench.store.drop(chunk, 2)
    bench.store.evict(chunk)
    late = torch.full((25,), 9.0)
    bench.store.adopt(chunk, 2, late.untyped_storage())
    bench.store.evict(chunk)
    bench.store.lease([chunk])
    assert [float(t[0]) for t in (tensors[0], late, tensors[3])] == [1.0, 9.0, 4.0]


def forecast_early_writes(bench: Bench, patch: pytest.MonkeyPatch) -> list[Chunk]:
    """Four chunks, all in RAM, each used far enough ahead to be written early when changed."""
    patch.setattr(moves_module, "LOOKAHEAD_CHUNKS", 1)
    chunks = [bench.chunk(float(i)) for i in range(4)]
    bench.use(*chunks)
    bench.store.trace.end_step()
    return chunks


def test_one_that_stays_is_not_written_early(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(5, prefetch=True)
    chunks = forecast_early_writes(bench, monkeypatch)
    bench.store.moves.residents.keys = frozenset({chunks[0].key})
    bench.change(chunks[0], 5.0)
    bench.change(chunks[1], 6.0)
    assert bench.writes() == ["chunk1"]


def test_one_that_stays_leaves_when_nothing_else_can() -> None:
    bench = Bench(3)
    first, second, third = (bench.chunk(float(i)) for i in range(3))
    bench.store.moves.residents.keys = frozenset({first.key})
    bench.use(third)
    bench.chunk(3.0)
    bench.chunk(4.0)
    assert first.is_resident
    bench.store.lease([second, third])
    assert not bench.store.moves.residents._left
    bench.chunk(5.0)
    assert not first.is_resident
    assert bench.store.moves.residents._left == {first.key: PAGE}
    assert bench.value(first) == 0.0


def test_a_chunk_without_bytes_comes_into_a_full_store() -> None:
    bench = Bench(2)
    bench.chunk(1.0)
    bench.chunk(2.0)
    bench.chunk(3.0)  # one had to leave, so new content goes into buffers
    bench.store.lease([c for c in bench.tensors if c.is_resident])
    empty = bench.store.create(Kind.PARAM, "empty", pack([("empty.weight", 0)]), bench.lower)
    bench.store.adopt(empty, 0, torch.empty(0).untyped_storage())
    bench.use(empty)


def test_a_change_during_a_write_leaves_the_chunk_dirty(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(5, prefetch=True)
    chunk = forecast_early_writes(bench, monkeypatch)[0]
    bench.change(chunk, 5.0)
    assert bench.writes() == ["chunk0"]
    bench.store.lease([chunk])
    bench.tensors[chunk].fill_(6.0)
    bench.lower.deliver(1)
    bench.store.mark_changed(chunk)
    bench.store.release([chunk])
    bench.store.evict(chunk)
    assert bench.store.counters.num_writes == 2
    assert bench.value(chunk) == 6.0


@pytest.mark.parametrize(("pages", "early"), [(5, ["chunk0"]), (50, [])])
def test_an_early_write_under_pressure(
    pages: int, early: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(pages, prefetch=True)
    chunk = forecast_early_writes(bench, monkeypatch)[0]
    bench.change(chunk, 5.0)
    assert bench.writes() == early
    bench.store.evict(chunk)
    assert bench.store.counters.num_writes == 1
    assert bench.value(chunk) == 5.0


def test_a_write_behind_the_stores_back_is_noticed() -> None:
    bench = Bench(2)
    chunk = bench.chunk(1.0)
    bench.store.evict(chunk)
    assert chunk.extent is not None
    bench.lower.write(chunk.extent, [(0, memoryview(bytes(PAGE)))])
    with pytest.raises(InternalError, match="behind the store's back"):
        bench.store.lease([chunk])
    assert chunk.leases == 0


# -- who goes, who comes ---------------------------------------------------------------------------


def test_room_for_nothing_moves_nothing_though_the_limit_has_fallen() -> None:
    bench = Bench(pages=4)
    chunk = bench.chunk(1.0)
    bench.store.lease([chunk])
    bench.ledger.limit_bytes = 0
    bench.store.make_room(0)
    assert chunk.is_resident
    bench.store.release([chunk])
    bench.store.moves.fit_ledger()
    assert not chunk.is_resident
    assert bench.ledger.used_bytes == 0


def test_the_furthest_next_use_goes() -> None:
    bench = Bench(3)
    a, b, c = (bench.chunk(float(i)) for i in range(3))
    bench.use(a, b, c, b, a)
    bench.store.trace.end_step()
    bench.use(a, b)  # next: c, b, a
    bench.store.make_room(PAGE)
    assert bench.resident() == ["chunk1", "chunk2"]


def test_what_has_no_home_and_what_is_leased_stays() -> None:
    bench = Bench(3)
    bench.chunk(0.0, stays=True)
    leased, _free = bench.chunk(1.0), bench.chunk(2.0)
    bench.store.lease([leased])
    bench.store.make_room(PAGE)
    assert bench.resident() == ["chunk0", "chunk1"]
    with pytest.raises(BudgetError, match=r"in use at this moment: 4.0 KiB \(chunk1\)"):
        bench.store.make_room(2 * PAGE)
    with pytest.raises(InternalError, match="evicted while leased"):
        bench.store.evict(leased)


def test_idle_buffers_go_before_chunks() -> None:
    bench = Bench(3)
    first, second = bench.chunk(1.0), bench.chunk(2.0)
    bench.store.evict(first)
    bench.use(first)
    bench.store.drop(first, 0)
    assert bench.ledger.by_tag() == {IDLE_TAG: PAGE, "params": PAGE}
    bench.store.make_room(2 * PAGE)
    assert second.is_resident


@pytest.mark.parametrize(
    ("present", "runs"),
    [
        ([0, 1, 2, 3], [(0, 4)]),
        ([0, 2, 3], [(0, 1), (2, 4)]),
        ([1, 2], [(1, 3)]),
        ([3], [(3, 4)]),
    ],
)
def test_a_slot_that_holds_nothing_is_nobodys(
    present: list[int], runs: list[tuple[int, int]]
) -> None:
    """Its place in a buffer has the bytes of the last holder: other ranks would add them."""
    bench = Bench(8)
    layout = pack([(f"g{number}", PAGE) for number in range(4)])
    chunk = bench.store.create(Kind.GRAD, "grads", layout, bench.lower)
    for number in present:
        value = torch.full((NUMEL,), float(number + 1))
        bench.store.adopt(chunk, number, value.untyped_storage())
    bench.store.evict(chunk)
    left = bench.pool.acquire(4 * PAGE, "garbage")
    left.memory[:] = b"\xff" * (4 * PAGE)
    left.release()
    bench.store.lease([chunk])
    assert chunk.buffer is not None
    assert [(at, at + piece.nbytes) for at, piece in chunk.pieces()] == [
        (low * PAGE, high * PAGE) for low, high in runs
    ]


def test_what_can_leave_has_left_before_the_guarantee_is_asked() -> None:
    bench = Bench(4, guaranteed_pages=3)
    leased, other, movable, wanted = (bench.chunk(float(n)) for n in range(4))
    bench.store.evict(wanted)
    bench.store.lease([leased, other])
    bench.use(movable)
    bench.ledger.limit_bytes = 2 * PAGE  # torch has taken the rest: `movable` alone is not enough
    bench.store.lease([wanted])
    assert bench.resident() == [leased.label, other.label, wanted.label]
    with pytest.raises(BudgetError):  # a fourth is not guaranteed
        bench.store.lease([movable])


def test_what_buffers_have_beyond_their_chunks_does_not_count_in_the_guarantee() -> None:
    bench = Bench(20, guaranteed_pages=12)
    first, second, wanted = (bench.chunk(float(n), pages=4) for n in range(3))
    for chunk in (first, second, wanted):
        bench.store.evict(chunk)
    bench.pool.trim()
    larger = [bench.pool.acquire(5 * PAGE, "larger") for _ in range(2)]
    for buffer in larger:
        buffer.release()
    bench.store.lease([first, second])
    assert bench.ledger.used_bytes == 10 * PAGE  # each has a page to spare
    bench.ledger.limit_bytes = 8 * PAGE
    bench.store.lease([wanted])
    assert bench.ledger.used_bytes == bench.ledger.limit_bytes == 12 * PAGE
    assert [c.resident_bytes for c in (first, second, wanted)] == [4 * PAGE] * 3
    bench.store.release([first, second, wanted])
    assert [bench.value(c) for c in (first, second, wanted)] == [0.0, 1.0, 2.0]


def test_a_refusal_leaves_everything_as_it_was() -> None:
    bench = Bench(2)
    first, second = bench.chunk(1.0), bench.chunk(2.0)
    third = bench.chunk(3.0)
    with pytest.raises(BudgetError, match="cannot place"):
        bench.store.lease([first, second, third])
    assert [c.leases for c in (first, second, third)] == [0, 0, 0]
    extra = torch.full((NUMEL,), 4.0)
    empty = bench.store.create(Kind.GRAD, "empty", pack([("g", PAGE)]), bench.lower)
    bench.store.lease([first, third])
    with pytest.raises(BudgetError, match="cannot place"):
        bench.store.adopt(empty, 0, extra.untyped_storage())
    assert empty.is_empty
    assert float(extra[0]) == 4.0
    bench.store.release([first, third])
    assert [bench.value(c) for c in (first, second, third)] == [1.0, 2.0, 3.0]


def prepared_for_prefetch(prefetch: bool) -> tuple[Bench, list[Chunk]]:
    """Four chunks used in order, room for two, the step just over."""
    bench = Bench(2, prefetch=prefetch)
    chunks = [bench.chunk(float(i)) for i in range(4)]
    bench.use(*chunks)
    bench.store.trace.end_step()
    return bench, chunks


@pytest.mark.parametrize("prefetch", [True, False])
def test_what_comes_next_is_read_ahead(prefetch: bool) -> None:
    bench, chunks = prepared_for_prefetch(prefetch)
    bench.store.make_room(2 * PAGE)
    bench.use(chunks[0])
    assert [c.fetching is not None for c in chunks[1:]] == [prefetch, False, False]
    assert bench.store.counters.num_prefetches == int(prefetch)
    assert [bench.value(c) for c in chunks] == [0.0, 1.0, 2.0, 3.0]


def test_reading_ahead_does_not_push_out_what_is_needed_before() -> None:
    bench, chunks = prepared_for_prefetch(True)
    bench.store.make_room(2 * PAGE)
    bench.use(chunks[0])  # chunk1 comes; chunk2 may not push it out, chunk0 is needed last
    bench.use(chunks[1])  # now chunk0 goes for chunk2
    assert chunks[1].is_resident
    assert chunks[2].fetching is not None
    assert not chunks[0].is_resident


def test_adopting_needs_the_right_size_and_a_free_slot() -> None:
    bench = Bench(2)
    chunk = bench.chunk(1.0)
    with pytest.raises(InternalError, match="taken"):
        bench.store.adopt(chunk, 0, torch.zeros(NUMEL).untyped_storage())
    with pytest.raises(InternalError, match="its slot 4096"):
        bench.store.adopt(chunk, 0, torch.zeros(3).untyped_storage())
    assert chunk.leases == 0


def test_a_freed_slot_has_ordinary_memory_of_its_own() -> None:
    bench = Bench(1)
    chunk, other = bench.chunk(1.0), bench.chunk(2.0)
    tensor = bench.tensors[chunk]
    bench.store.free_from_store(chunk, 0)
    assert float(tensor[0]) == 1.0
    assert bench.value(other) == 2.0  # reuses the buffer
    assert bool((tensor == 1.0).all())
    assert chunk.is_empty
    assert chunk.resident_bytes == 0


def test_a_dropped_slot_can_be_filled_anew() -> None:
    bench = Bench(1)
    chunk = bench.chunk(1.0)
    bench.store.evict(chunk)
    bench.store.drop(chunk, 0)
    bench.tensors[chunk] = torch.full((NUMEL,), 7.0)
    bench.store.adopt(chunk, 0, bench.tensors[chunk].untyped_storage())
    bench.store.evict(chunk)
    assert bench.value(chunk) == 7.0


def test_nothing_is_under_way_from_memory_that_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Letting the last slot of a changed chunk go starts no write of the buffer it leaves."""
    bench = Bench(5, prefetch=True)
    chunk = forecast_early_writes(bench, monkeypatch)[0]
    bench.store.evict(chunk)
    limit, bench.ledger.limit_bytes = bench.ledger.limit_bytes, None
    bench.change(chunk, 5.0)  # no limit, no pressure: not written early
    bench.ledger.limit_bytes = limit
    assert bench.writes() == []
    bench.store.free_from_store(chunk, 0)
    assert bench.writes() == []
    assert chunk.writing is None
    assert float(bench.tensors[chunk][0]) == 5.0


# -- a disk that fails ----------------------------------------------------------------------------


def test_a_failed_read_is_named_and_can_be_tried_again() -> None:
    bench = Bench(2)
    chunk = bench.chunk(1.0)
    bench.store.evict(chunk)
    bench.lower.fail_next()
    with pytest.raises(Boom, match="chunk0"):
        bench.store.lease([chunk])
    assert chunk.leases == 0
    assert bench.ledger.used_bytes == bench.pool.idle_bytes
    assert bench.value(chunk) == 1.0


def test_a_failed_write_keeps_the_bytes_in_ram() -> None:
    bench = Bench(1)
    chunk = bench.chunk(1.0)
    bench.lower.fail_next()
    with pytest.raises(Boom, match="chunk0"):
        bench.store.make_room(PAGE)
    assert chunk.is_resident
    assert chunk.is_dirty
    assert bench.value(chunk) == 1.0
    bench.store.evict(chunk)
    assert bench.value(chunk) == 1.0


def test_reading_ahead_that_fails_does_not_fail_the_lease() -> None:
    bench, chunks = prepared_for_prefetch(True)
    bench.store.make_room(2 * PAGE)
    bench.use(chunks[0])
    bench.lower.fail_next()
    bench.lower.deliver(1)
    bench.use(chunks[0])
    assert bench.value(chunks[1]) == 1.0, "the read is tried again when it is needed"
    bench.store.evict(chunks[1])
    bench.lower.fail_next()
    with pytest.raises(Boom, match="chunk1"):
        bench.use(chunks[1])
    assert [c.leases for c in chunks] == [0, 0, 0, 0]


def test_a_full_disk_while_releasing_gives_every_lease_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The early write is what fails; the chunks named after it are released all the same."""
    bench = Bench(5, prefetch=True)
    chunks = forecast_early_writes(bench, monkeypatch)

    def full(*args: object) -> None:
        raise DiskError("the disk is full")

    monkeypatch.setattr(bench.lower, "allocate", full)
    bench.store.lease(chunks)
    for chunk in chunks:
        bench.store.mark_changed(chunk)
    with contextlib.suppress(DiskError):
        bench.store.release(chunks)
    assert [c.leases for c in chunks] == [0, 0, 0, 0]


def test_closing_names_what_is_lost_and_fills_it_with_nan() -> None:
    bench = Bench(2)
    lost, kept = bench.chunk(1.0), bench.chunk(2.0)
    bench.store.evict(lost)
    bench.store.begin_closing()
    bench.lower.fail_next()
    for chunk in (lost, kept):
        bench.store.free_from_store(chunk, 0)
    assert [name for name, _ in bench.store.lost] == ["chunk0.weight"]
    assert bool(bench.tensors[lost].isnan().all())
    assert float(bench.tensors[kept][0]) == 2.0


def test_threads_may_lease_at_once() -> None:
    bench = Bench(3)
    bench.lower = LateTier(RamTier(Ledger("lower", None), num_threads=2))
    chunks = [bench.chunk(float(i)) for i in range(6)]
    errors: list[object] = []

    def work(mine: list[Chunk]) -> None:
        for number in range(60):
            chunk = mine[number % 3]
            if bench.value(chunk) != float(chunks.index(chunk)):
                errors.append(chunk.label)

    threads = [threading.Thread(target=work, args=(chunks[i::2],)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all(c.leases == 0 for c in chunks)


# -- what has to be done before a use -----------------------------------------------------------


def put_off(bench: Bench, chunk: Chunk, value: float) -> list[str]:
    """A change that waits for the chunk's next use; returns the log of its runs."""
    log: list[str] = []

    def change() -> None:
        chunk.before_use = None
        log.append("done")
        bench.change(chunk, value)

    chunk.before_use = change
    return log


def test_what_was_put_off_is_done_once_before_the_next_lease() -> None:
    bench = Bench(2)
    chunk, other = bench.chunk(1.0), bench.chunk(2.0)
    log = put_off(bench, chunk, 5.0)
    bench.use(other)
    bench.store.evict(chunk)  # leaving and coming back is no use of the bytes
    assert log == []
    assert bench.value(chunk) == 5.0
    assert bench.value(chunk) == 5.0
    assert log == ["done"]


def test_what_was_put_off_is_done_before_a_slot_is_filled() -> None:
    bench = Bench(2)
    chunk = bench.chunk(1.0)
    tensor = torch.full((NUMEL,), 3.0)

    def empty_the_slot() -> None:
        chunk.before_use = None
        bench.store.drop(chunk, 0)

    chunk.before_use = empty_the_slot
    bench.store.adopt(chunk, 0, tensor.untyped_storage())
    bench.tensors[chunk] = tensor
    assert bench.value(chunk) == 3.0


def test_a_failure_of_what_was_put_off_leaves_no_lease() -> None:
    bench = Bench(2)
    chunk, other = bench.chunk(1.0), bench.chunk(2.0)

    def fail() -> None:
        raise DiskError("no")

    chunk.before_use = fail
    with pytest.raises(DiskError, match="no"):
        bench.store.lease([other, chunk])
    assert (other.leases, chunk.leases) == (0, 0)


def test_what_another_rank_reads_stays_where_it_is_while_closing() -> None:
    bench = Bench(pages=2)
    lent, other = bench.chunk(1.0), bench.chunk(2.0)
    lent.leases = lent.loans = 1

    def come_back() -> bool:
        had_loan = lent.loans > 0
        seen.append(lent.is_resident and bench.tensors[lent].data_ptr() == address)
        lent.leases = lent.loans = 0
        return had_loan

    seen: list[bool] = []
    address = bench.tensors[lent].data_ptr()
    bench.store.moves.wait_for_loan = come_back
    bench.store.begin_closing()
    bench.store.make_room(PAGE)
    assert not other.is_resident, "what nobody reads makes room"
    assert lent.is_resident
    ordinary = torch.full((NUMEL,), 1.0).untyped_storage()
    bench.store.settle(lent, {0: (ordinary, bench.ledger.reserve("test", 0))})
    assert seen == [True], "its memory is exchanged only when the loan is over"


def test_a_loan_that_is_not_back_yet_is_waited_for_before_a_chunk_rests_elsewhere() -> None:
    bench = Bench(pages=2)
    lent = bench.chunk(1.0)
    bench.store.evict(lent)
    bench.use(lent)
    lent.leases = lent.loans = 1

    def come_back() -> bool:
        lent.leases = lent.loans = 0
        return True

    bench.store.moves.wait_for_loan = come_back
    rest_on(bench.store, lent, bench.lower)
    assert not lent.is_resident
