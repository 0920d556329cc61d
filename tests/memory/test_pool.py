"""The buffer pool: every mapped byte in the ledger, buffers reused, views that stay valid."""

import gc
import itertools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeepo.errors import BudgetError, InternalError
from zeepo.memory import mapping
from zeepo.memory.ledger import Ledger
from zeepo.memory.mapping import HUGE_PAGE_BYTES, PAGE_BYTES, address_of
from zeepo.memory.pool import IDLE_TAG, BufferPool
from zeepo.planner.machine import resident_bytes
from zeepo.units import KiB, MiB


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, MiB, 2 * MiB, 3 * MiB + 5])
def test_alignment_and_capacity(nbytes: int) -> None:
    buffer = BufferPool(Ledger("ram", None)).acquire(nbytes, "params")
    assert buffer.capacity_bytes >= max(nbytes, 1)
    assert buffer.capacity_bytes % PAGE_BYTES == 0
    assert buffer.capacity_bytes < nbytes + 2 * PAGE_BYTES
    aligned_to = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else PAGE_BYTES
    assert buffer.address % aligned_to == 0
    memory = buffer.memory
    assert address_of(memory) == buffer.address
    assert (memory.format, memory.readonly, memory.nbytes) == ("B", False, buffer.capacity_bytes)
    memory[0] = memory[-1] = 255


def test_storage_aliases_the_buffer() -> None:
    buffer = BufferPool(Ledger("ram", None)).acquire(64 * KiB, "params")
    storage = buffer.storage(4096 + 64, 400)
    assert storage.nbytes() == 400
    assert storage.data_ptr() == buffer.address + 4096 + 64
    tensor = torch.empty(0, dtype=torch.float32).set_(storage, 0, (100,))
    tensor.fill_(1.5)
    assert (
        torch.frombuffer(buffer.memory, dtype=torch.float32)[1024 + 16 : 1024 + 116].eq(1.5).all()
    )
    assert buffer.storage(8, 0).nbytes() == 0
    with pytest.raises(InternalError, match="outside"):
        buffer.storage(60 * KiB, 4 * KiB + 1)


def test_a_storage_outlives_the_pool() -> None:
    pool = BufferPool(Ledger("ram", None))
    buffer = pool.acquire(4 * MiB, "params")
    storage = buffer.storage(MiB, MiB)
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (MiB,)).fill_(7)
    del storage
    buffer.release()
    pool.trim()
    del buffer, pool
    gc.collect()
    assert tensor.eq(7).all()


def test_reuse_moves_bytes_between_tags() -> None:
    ledger = Ledger("ram", 10 * MiB)
    pool = BufferPool(ledger)
    buffer = pool.acquire(4 * MiB, "params")
    address = buffer.address
    buffer.release()
    buffer.release()
    assert ledger.by_tag() == {IDLE_TAG: 4 * MiB}
    assert pool.idle_bytes == 4 * MiB
    again = pool.acquire(4 * MiB - 100, "grads")
    assert again.address == address
    assert pool.num_reuses == 1
    assert pool.idle_bytes == 0
    assert ledger.by_tag() == {"grads": 4 * MiB}
    again.retag("state")
    assert (again.tag, ledger.by_tag()) == ("state", {"state": 4 * MiB})


def test_a_buffer_much_too_large_is_not_reused() -> None:
    pool = BufferPool(Ledger("ram", None))
    pool.acquire(5 * MiB, "params").release()
    assert pool.acquire(4 * MiB, "params").capacity_bytes == 5 * MiB  # Exactly 1.25 times.
    pool.acquire(5 * MiB + 4096, "params").release()
    assert pool.acquire(4 * MiB, "params").capacity_bytes == 4 * MiB
    assert pool.num_reuses == 1


def test_the_best_fit_wins() -> None:
    pool = BufferPool(Ledger("ram", None))
    buffers = [pool.acquire(mib * MiB, "params") for mib in (12, 10, 11)]
    for buffer in buffers:
        buffer.release()
    assert pool.acquire(10 * MiB, "params").capacity_bytes == 10 * MiB


def test_idle_buffers_make_room() -> None:
    ledger = Ledger("ram", 8 * MiB)
    pool = BufferPool(ledger)
    small = [pool.acquire(2 * MiB, "params") for _ in range(4)]
    assert not pool.can_acquire(1)
    for buffer in small[:2]:
        buffer.release()
    assert pool.can_acquire(4 * MiB)
    assert not pool.can_acquire(4 * MiB + 1)
    pool.acquire(4 * MiB, "grads")
    assert ledger.by_tag() == {"grads": 4 * MiB, "params": 4 * MiB}
    assert pool.idle_bytes == 0


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * PAGE_BYTES


def test_pages_of_dropped_buffers_are_handed_on() -> None:
    """A new size is made of the old buffers' pages: no more memory, nothing cleared, rest kept."""
    ledger = Ledger("ram", 64 * MiB)
    pool = BufferPool(ledger)
    old = [pool.acquire(32 * MiB, "params") for _ in range(2)]
    views = [torch.frombuffer(buffer.memory, dtype=torch.uint8) for buffer in old]
    for number, view in enumerate(views, start=1):
        view.fill_(number)
    before = _resident_bytes()
    for buffer in old:
        buffer.release()
    del buffer
    new = pool.acquire(40 * MiB, "grads")
    content = torch.frombuffer(new.memory, dtype=torch.uint8)
    assert (int(content.min()), int(content.max())) == (1, 2)
    assert ledger.by_tag() == {"grads": 40 * MiB, IDLE_TAG: 24 * MiB}
    rest = torch.frombuffer(pool.acquire(24 * MiB, "params").memory, dtype=torch.uint8)
    assert int(rest.min()) >= 1
    assert abs(_resident_bytes() - before) < 8 * MiB
    assert int(views[0].max()) == 0, "an old view is valid and has lost its bytes"


def test_a_dropped_buffer_that_was_not_needed_stays() -> None:
    """Idle ones are dropped from the oldest on until there is enough; the last may be all it
    takes, and then the others were dropped for nothing."""
    ledger = Ledger("ram", 64 * MiB)
    pool = BufferPool(ledger)
    small, large = pool.acquire(4 * MiB, "params"), pool.acquire(32 * MiB, "params")
    small.release()
    large.release()
    pool.acquire(16 * MiB, "grads")
    assert ledger.by_tag() == {"grads": 16 * MiB, IDLE_TAG: 20 * MiB}
    assert pool.fresh_bytes == 36 * MiB - 20 * MiB - 16 * MiB
    assert pool.mapped_bytes == 36 * MiB


def test_idle_pages_are_used_before_fresh_ones() -> None:
    """Buffers of one size after those of another do not add up, also where there is no limit."""
    pool = BufferPool(Ledger("ram", None))
    for nbytes in (8 * MiB, 2 * MiB, 6 * MiB, 8 * MiB):
        pool.acquire(nbytes, "chunks").release()
        assert pool.mapped_bytes == 8 * MiB
    small = pool.acquire(PAGE_BYTES, "chunks")  # too small to be worth cutting a large one up
    assert pool.mapped_bytes == 8 * MiB + PAGE_BYTES
    small.release()


def test_where_pages_cannot_be_moved_fresh_ones_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_can_move_pages", False)
    ledger = Ledger("ram", 8 * MiB)
    pool = BufferPool(ledger)
    pool.acquire(8 * MiB, "params").release()
    new = pool.acquire(4 * MiB, "grads")
    assert bytes(new.memory[:10]) == bytes(10)
    assert ledger.by_tag() == {"grads": 4 * MiB}


def test_a_kernel_that_fails_after_unmapping_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older kernels unmap the target of mremap before they find out that they cannot move."""
    libc = mapping._LIBC
    calls: list[int] = []

    def unmap_and_fail(source: Any, size: Any, new_size: Any, flags: int, target: Any) -> int:
        calls.append(target.value)
        assert libc.munmap(target, size) == 0
        return -1

    monkeypatch.setattr(mapping, "_can_move_pages", True)
    monkeypatch.setattr(mapping, "_LIBC", SimpleNamespace(mremap=unmap_and_fail, mmap=libc.mmap))
    pool = BufferPool(Ledger("ram", 8 * MiB))
    pool.acquire(8 * MiB, "params").release()
    new = pool.acquire(4 * MiB, "grads")
    new.memory[:] = b"x" * new.capacity_bytes
    assert bytes(new.memory[-3:]) == b"xxx"
    new.release()
    pool.acquire(8 * MiB, "params")
    assert len(calls) == 1, "it is not tried again"


def test_a_refusal_costs_no_idle_buffer_and_shows_the_bill() -> None:
    pool = BufferPool(Ledger("ram", 8 * MiB))
    held = pool.acquire(4 * MiB, "params")
    pool.acquire(2 * MiB, "params").release()
    with pytest.raises(BudgetError, match=r"params 4\.0 MiB, idle buffers 2\.0 MiB"):
        pool.acquire(6 * MiB, "grads")
    assert pool.idle_bytes == 2 * MiB
    held.release()
    assert pool.acquire(6 * MiB, "grads").capacity_bytes == 6 * MiB


def test_trim_longest_idle_first() -> None:
    ledger = Ledger("ram", None)
    pool = BufferPool(ledger)
    buffers = [pool.acquire(nbytes * 4096, "params") for nbytes in (1, 2, 3)]
    for buffer in buffers:
        buffer.release()
    assert pool.trim(1) == 4096
    assert pool.trim(2 * 4096 + 1) == 5 * 4096
    assert pool.trim() == 0
    assert ledger.used_bytes == 0


def test_what_nobody_needed_for_a_whole_step_is_unmapped() -> None:
    pool = BufferPool(Ledger("ram", None))
    large, small = pool.acquire(3 * MiB, "params"), pool.acquire(MiB, "params")
    large.release()
    small.release()
    pool.end_step()
    assert pool.idle_bytes == 4 * MiB
    pool.acquire(MiB, "params").release()
    pool.end_step()
    assert pool.idle_bytes == MiB
    pool.end_step()
    assert (pool.idle_bytes, pool.mapped_bytes, pool.ledger.used_bytes) == (0, 0, 0)


@pytest.mark.parametrize("is_touched", [False, True])
def test_a_buffer_gives_back_what_it_has_beyond_its_use(is_touched: bool) -> None:
    ledger = Ledger("ram", 16 * MiB)
    pool = BufferPool(ledger)
    buffer = pool.acquire(10 * MiB, "params")
    whole, address = buffer.memory, buffer.address
    if is_touched:
        for low in range(0, 10 * MiB, PAGE_BYTES):
            whole[low] = 7
        buffer.touched()
        before_bytes = resident_bytes()
    assert buffer.shrink(8 * MiB + 5) == 2 * MiB - PAGE_BYTES
    kept_bytes = 8 * MiB + PAGE_BYTES
    assert (buffer.capacity_bytes, buffer.address) == (kept_bytes, address)
    assert buffer.memory.nbytes == pool.mapped_bytes == ledger.used_bytes == kept_bytes
    assert pool.fresh_bytes == (0 if is_touched else kept_bytes)
    if is_touched:
        assert whole[kept_bytes - PAGE_BYTES] == 7
        assert resident_bytes() <= before_bytes - 2 * MiB + 64 * KiB
    assert whole[kept_bytes] == 0  # not there any more, and no fault
    assert buffer.shrink(9 * MiB) == 0
    buffer.release()
    assert pool.acquire(8 * MiB, "grads").address == address


def test_use_after_release_is_refused() -> None:
    buffer = BufferPool(Ledger("ram", None)).acquire(4096, "params")
    buffer.release()
    with pytest.raises(InternalError, match="after its release"):
        _ = buffer.memory
    with pytest.raises(InternalError, match="after its release"):
        buffer.storage(0, 1)
    with pytest.raises(InternalError, match="after its release"):
        buffer.retag("grads")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40_000)), max_size=30))
def test_the_ledger_always_shows_what_is_mapped(steps: list[tuple[int, int]]) -> None:
    ledger = Ledger("ram", 100_000)
    pool = BufferPool(ledger)
    held = []
    for action, nbytes in steps:
        if action == 0:
            pool.trim(nbytes)
        elif action <= 2 and held:
            held.pop(0).release()
        elif pool.can_acquire(nbytes):
            held.append(pool.acquire(nbytes, "params"))
            held[-1].memory[:nbytes] = b"\1" * nbytes
        else:
            with pytest.raises(BudgetError):
                pool.acquire(nbytes, "params")
        held_bytes = sum(buffer.capacity_bytes for buffer in held)
        assert ledger.by_tag().get("params", 0) == held_bytes
        assert ledger.used_bytes == held_bytes + pool.idle_bytes <= 100_000
    ranges = sorted((b.address, b.address + b.capacity_bytes) for b in held)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))


def test_threads_never_share_a_buffer() -> None:
    pool = BufferPool(Ledger("ram", 16 * 4096))
    clashes = []

    def work(mark: int) -> None:
        for _ in range(300):
            buffer = pool.acquire(4096, "params")
            buffer.memory[:] = bytes([mark]) * 4096
            if bytes(buffer.memory) != bytes([mark]) * 4096:
                clashes.append(mark)
            buffer.release()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []
    assert pool.ledger.used_bytes == pool.idle_bytes
