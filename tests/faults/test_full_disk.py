"""Disks that are full, unwritable or not there."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import zeepo
from tests.faults.small import (
    assert_ordinary,
    assert_same,
    build,
    loss_of,
    open_at_minimum,
    scratch_files,
    touch_everything,
    train,
    train_step,
)
from zeepo.engine.update import ChunkUpdate
from zeepo.errors import DiskError


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch, python_blocks: None) -> Iterator[list[int]]:
    """A list; while it holds a number n, the n-th write from now and all later ones fail."""
    left: list[int] = []
    real = os.pwritev

    def pwritev(*arguments):
        if left:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(os, "pwritev", pwritev)
    yield left
    left.clear()


@pytest.mark.parametrize("num_writes", [0, 3, 11, 20, 31])
def test_full_in_the_middle_of_training(
    tmp_path: Path, full_disk: list[int], num_writes: int
) -> None:
    model, optimizer = build()
    plain, plain_optimizer = build()
    session = open_at_minimum(model, optimizer, tmp_path)
    train(model, optimizer, range(2))
    train(plain, plain_optimizer, range(2))
    full_disk.append(num_writes)
    with pytest.raises(DiskError, match=r"layers\.\d.*No space left.*Free some space"):
        train(model, optimizer, range(2, 6))
    with pytest.raises(DiskError, match=r"whole and true.* KiB more than ram allows.*No space"):
        session.close()
    assert session.is_closed
    assert scratch_files(tmp_path) == []
    assert_ordinary(model, optimizer)
    assert torch.isfinite(torch.tensor(touch_everything(model, optimizer)))
    full_disk.clear()


def test_training_goes_on_once_there_is_room_again(tmp_path: Path, full_disk: list[int]) -> None:
    """A forward that failed for want of room can be run again."""
    model, optimizer = build()
    plain, plain_optimizer = build()
    session = open_at_minimum(model, optimizer, tmp_path)
    train(model, optimizer, range(2))
    train(plain, plain_optimizer, range(2))
    for p in model.parameters():
        p.data.mul_(1.0)  # something to be written
    full_disk.append(0)

    def change_and_run() -> None:
        for _ in range(3):
            model(torch.ones(2, 32)).sum().item()
            for p in model.parameters():
                p.data.mul_(1.0)

    with pytest.raises(DiskError):
        change_and_run()
    full_disk.clear()
    train(model, optimizer, range(2, 4))
    train(plain, plain_optimizer, range(2, 4))
    session.close()
    assert_same(model, optimizer, plain, plain_optimizer)


def test_disk_limit_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """Parameters fit, optimizer state does not (as if init had been wrong about the need)."""
    model, optimizer = build()
    before = [p.detach().clone() for p in model.parameters()]
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    session = open_at_minimum(model, optimizer, tmp_path)
    session._disk.limit_bytes = int(nbytes * 2.2) + (64 << 10)
    with pytest.raises(DiskError, match="Raise disk_limit"):
        train(model, optimizer, range(3))
    session.close()
    assert_ordinary(model, optimizer)
    assert torch.isfinite(torch.tensor(touch_everything(model, optimizer)))
    assert [p.shape for p in model.parameters()] == [p.shape for p in before]
    assert scratch_files(tmp_path) == []
    train_step(model, optimizer, 9)


def test_init_on_a_full_disk_changes_nothing(tmp_path: Path, full_disk: list[int]) -> None:
    model, optimizer = build()
    train(model, optimizer, range(2))
    plain, plain_optimizer = build()
    train(plain, plain_optimizer, range(2))
    probe = zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path)
    ram = probe.plan.minimum_ram
    probe.close()
    for num_writes in (0, 1, 2, 9, 17):
        full_disk[:] = [num_writes]
        with pytest.raises(DiskError):
            zeepo.init(model, optimizer, ram=ram, disk=tmp_path)
        full_disk.clear()
        assert zeepo.current_session() is None
        assert scratch_files(tmp_path) == []
        assert_ordinary(model, optimizer)
        assert_same(model, optimizer, plain, plain_optimizer)
    limited = {"ram": ram, "disk": tmp_path, "disk_limit": 8192}
    with pytest.raises(DiskError, match="disk_limit"):
        zeepo.init(model, optimizer, **limited)
    assert_ordinary(model, optimizer)
    assert_same(model, optimizer, plain, plain_optimizer)
    assert train(model, optimizer, [2, 3]) == train(plain, plain_optimizer, [2, 3])


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    model, optimizer = build()
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(DiskError, match="does not exist"):
        zeepo.init(model, optimizer, disk=tmp_path / "missing")
    with pytest.raises(DiskError, match="not a directory"):
        zeepo.init(model, optimizer, disk=file)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if os.geteuid() != 0:
        with pytest.raises(DiskError, match="not writable"):
            zeepo.init(model, optimizer, disk=closed)
    assert_ordinary(model, optimizer)
    assert zeepo.current_session() is None
    assert list(tmp_path.glob("*scratch*")) == []


@pytest.mark.usefixtures("python_blocks")
def test_a_disk_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EIO on reads stops training by name; once the disk answers again nothing is lost."""
    model, optimizer = build()
    plain, plain_optimizer = build()
    session = open_at_minimum(model, optimizer, tmp_path)
    train(model, optimizer, range(2))
    train(plain, plain_optimizer, range(2))

    def preadv(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", preadv)
        with pytest.raises(DiskError, match=r"layers\.\d.*Input/output error.*dmesg"):
            train(model, optimizer, [2])
    assert train(model, optimizer, [2, 3]) == train(plain, plain_optimizer, [2, 3])
    session.close()
    assert_same(model, optimizer, plain, plain_optimizer)


def test_an_update_that_is_tried_again_updates_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one piece, parameters with states come before those without; between them a lease fails.

    Only a parameter that had a gradient while momentum was on has a state.
    """

    def run(session_of, is_failing: bool) -> torch.nn.Module:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        session = session_of(model, optimizer)
        for layer in model:
            layer.bias.requires_grad_(False)
        model(torch.ones(2, 32)).sum().backward()
        optimizer.step()
        for layer in model:
            layer.bias.requires_grad_(True)
        optimizer.param_groups[0]["momentum"] = 0.0
        optimizer.zero_grad()
        model(torch.ones(2, 32)).sum().backward()
        optimizer.step()
        if is_failing:
            fail_once_between_batches(monkeypatch)
            with pytest.raises(DiskError, match="as told"):
                model(torch.ones(2, 32))
        model(torch.ones(2, 32))
        if session is not None:
            session.close()
        return model

    plain = run(lambda model, optimizer: None, is_failing=False)
    managed = run(lambda model, optimizer: open_at_minimum(model, optimizer, tmp_path), True)
    for p, q in zip(plain.parameters(), managed.parameters(), strict=True):
        assert torch.equal(p, q)


def fail_once_between_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the second lease of the next update fail."""
    updated: list[bool] = []
    real = ChunkUpdate._update_batch

    def update_batch(self, batch):
        updated.append(batch.has_states)
        if updated == [True, False]:
            raise DiskError("as told")
        real(self, batch)

    monkeypatch.setattr(ChunkUpdate, "_update_batch", update_batch)


@pytest.mark.parametrize("num_writes", [0, 4, 9, 17])
@pytest.mark.parametrize("how", ["step again", "step twice again", "next batch", "state_dict"])
def test_a_first_step_goes_on_once_there_is_room_again(
    tmp_path: Path, full_disk: list[int], num_writes: int, how: str
) -> None:
    """States are made in the first step: that is when a disk fills."""
    (model, optimizer), (plain, plain_optimizer) = build(), build()
    session = open_at_minimum(model, optimizer, tmp_path)
    for each in (model, plain):
        loss_of(each, 0).backward()
    plain_optimizer.step()
    full_disk.append(num_writes)
    with pytest.raises(DiskError, match="No space left"):
        optimizer.step()
    if how == "step twice again":
        with pytest.raises(DiskError, match="No space left"):
            optimizer.step()
    full_disk.clear()
    if how.startswith("step"):
        optimizer.step()
    elif how == "state_dict":
        states = optimizer.state_dict()["state"]
        assert sorted(states) == sorted(plain_optimizer.state_dict()["state"])
        assert all(float(state["step"]) == 1 for state in states.values())
    for each in (optimizer, plain_optimizer):
        each.zero_grad()
    assert train(model, optimizer, range(1, 4)) == train(plain, plain_optimizer, range(1, 4))
    session.close()
    assert_same(model, optimizer, plain, plain_optimizer)
    assert [list(s) for s in optimizer.state.values()] == [
        list(s) for s in plain_optimizer.state.values()
    ]


def test_a_stopped_step_is_finished_by_close(tmp_path: Path, full_disk: list[int]) -> None:
    (model, optimizer), (plain, plain_optimizer) = build(), build()
    session = open_at_minimum(model, optimizer, tmp_path)
    for each in (model, plain):
        loss_of(each, 0).backward()
    plain_optimizer.step()
    full_disk.append(9)
    with pytest.raises(DiskError, match="No space left"):
        optimizer.step()
    full_disk.clear()
    session.close()
    assert_same(model, optimizer, plain, plain_optimizer)


def test_the_next_step_after_a_stopped_one_is_another(tmp_path: Path, full_disk: list[int]) -> None:
    """Gradients that were added to, or changed, are those of a step of its own."""
    (model, optimizer), (plain, plain_optimizer) = build(), build()
    session = open_at_minimum(model, optimizer, tmp_path)
    for each in (model, plain):
        loss_of(each, 0).backward()
    plain_optimizer.step()
    full_disk.append(9)
    with pytest.raises(DiskError, match="No space left"):
        optimizer.step()
    full_disk.clear()
    for each, each_optimizer in ((model, optimizer), (plain, plain_optimizer)):
        loss_of(each, 1).backward()
        torch.nn.utils.clip_grad_norm_(each.parameters(), 0.01)
        each_optimizer.step()
    session.close()
    assert_same(model, optimizer, plain, plain_optimizer)
