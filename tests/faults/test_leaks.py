"""Nothing grows: memory, files, threads, objects; over steps and over sessions."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.small import build, loss_of, open_at_minimum, train
from zeepo.chunks.chunk import Chunk
from zeepo.engine.backward import NodeLeases, _NodeLease
from zeepo.engine.managed import Home, ManagedParameter, ManagedTensor
from zeepo.memory.block_io import DiskExtent
from zeepo.memory.ledger import Reservation
from zeepo.memory.pool import Buffer

OURS = (
    Chunk,
    NodeLeases,
    _NodeLease,
    Home,
    ManagedParameter,
    ManagedTensor,
    Reservation,
    Buffer,
    DiskExtent,
)
MiB = 1 << 20


def resident_bytes() -> int:
    """What the process has in memory now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def counts() -> dict[str, int]:
    """Files, threads, and objects of our classes."""
    gc.collect()
    found = Counter(type(obj).__name__ for obj in gc.get_objects() if type(obj) in OURS)
    files = len(os.listdir("/proc/self/fd"))
    return {**found, "files": files, "threads": threading.active_count()}


def without_held(found: dict[str, int], chunks: list[Chunk]) -> dict[str, int]:
    """Without what chunks hold: which of them are here, and which ever had to leave, depends on how
    fast the disk was."""
    held = {
        "Buffer": sum(chunk.buffer is not None for chunk in chunks),
        "DiskExtent": sum(chunk.extent is not None for chunk in chunks),
    }
    return {name: count - held.get(name, 0) for name, count in found.items()}


@pytest.mark.parametrize(
    ("num_before", "num_steps"), [(20, 60), pytest.param(50, 250, marks=pytest.mark.slow)]
)
def test_many_steps(tmp_path: Path, num_before: int, num_steps: int) -> None:
    model, optimizer = build()
    with open_at_minimum(model, optimizer, tmp_path) as session:
        train(model, optimizer, range(num_before))
        chunks = session._store.chunks()
        before = without_held(counts(), chunks)
        resident, held = resident_bytes(), session.stats().bytes_now
        train(model, optimizer, range(num_steps))
        after = without_held(counts(), chunks)
        assert resident_bytes() - resident < 4 * MiB
        assert after == before
        assert session.stats().bytes_now["disk"] <= held["disk"] * 1.1
        assert session.stats().bytes_now["ram"] <= session.plan.managed_bytes


def test_odd_steps_do_not_leak_either(tmp_path: Path) -> None:
    """Failing forwards, dropped graphs, reads and held gradients, again and again."""
    model, optimizer = build()

    def odd_step(step: int) -> None:
        loss_of(model, step)  # a graph that is never used
        model.fail_at = 4
        with pytest.raises(ValueError, match="fails"):
            loss_of(model, step)
        model.fail_at = None
        loss_of(model, step).backward(retain_graph=True)
        held = [p.grad for p in model.parameters()]
        model.state_dict()
        optimizer.state_dict()
        model.layers[0].weight.detach().numpy().sum()
        optimizer.step()
        optimizer.zero_grad()
        del held

    with open_at_minimum(model, optimizer, tmp_path, extra=65536) as session:
        for step in range(5):
            odd_step(step)
        chunks = session._store.chunks()
        before = without_held(counts(), chunks)
        for step in range(15):
            odd_step(step)
        assert without_held(counts(), chunks) == before
        assert all(chunk.leases == 0 for chunk in chunks)


@pytest.mark.parametrize("num_sessions", [5, pytest.param(17, marks=pytest.mark.slow)])
def test_many_sessions(tmp_path: Path, num_sessions: int) -> None:
    model, optimizer = build()

    def one_session() -> None:
        with open_at_minimum(model, optimizer, tmp_path):
            train(model, optimizer, range(2))

    for _ in range(3):
        one_session()
    before, resident = counts(), resident_bytes()
    for _ in range(num_sessions):
        one_session()
    assert counts() == before
    assert resident_bytes() - resident < 6 * MiB
    assert before.get("ManagedParameter", 0) == before.get("ManagedTensor", 0) == 0
