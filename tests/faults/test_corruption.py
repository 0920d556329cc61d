"""Bytes that change on disk: named, never trained on, and the interpreter survives."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

import zeepo
from tests.faults.small import (
    assert_ordinary,
    build,
    chunk_file,
    open_at_minimum,
    run_program,
    scratch_files,
    touch_everything,
    train,
    train_step,
)
from zeepo.errors import CorruptionError


def flip_every_page(path: Path) -> None:
    """Change one bit in each page that has anything in it."""
    data = bytearray(path.read_bytes())
    for start in range(0, len(data), 4096):
        data[start] ^= 1
    with path.open("r+b") as file:
        file.write(data)
        os.fsync(file.fileno())


def truncate(path: Path) -> None:
    """Leave the file with one page."""
    os.truncate(path, 4096)


@pytest.mark.parametrize("damage", [flip_every_page, truncate])
def test_damage_is_named_and_stops_training(tmp_path: Path, damage) -> None:
    model, optimizer = build()
    plain, plain_optimizer = build()
    expected = train(plain, plain_optimizer, range(6))
    session = open_at_minimum(model, optimizer, tmp_path)
    assert train(model, optimizer, range(3)) == expected[:3]
    damage(chunk_file(tmp_path))
    losses: list[float] = []

    def train_on() -> None:
        for step in range(3, 6):
            losses.append(train_step(model, optimizer, step))

    with pytest.raises(CorruptionError, match=r"layers\.\d\.(weight|bias)"):
        train_on()
    assert losses == expected[3 : 3 + len(losses)]
    with pytest.raises(
        CorruptionError, match=r"lost: .*layers\.\d\.weight.*filled with NaN"
    ) as closing:
        session.close()
    assert session.is_closed
    assert zeepo.current_session() is None
    assert scratch_files(tmp_path) == []
    assert_ordinary(model, optimizer)
    assert math.isnan(touch_everything(model, optimizer))
    for name, p in model.named_parameters():
        is_lost = bool(torch.isnan(p.detach()).all())
        assert is_lost == (f"{name}," in str(closing.value).replace(". They", ",")), name
        assert is_lost or bool(torch.isfinite(p.detach()).all()), name
    session.close()


@pytest.mark.parametrize("an_update_waits", [True, False])
def test_one_flipped_byte_loses_one_chunk_only(tmp_path: Path, an_update_waits: bool) -> None:
    """Its states too if an update was to change them together with it."""
    model, optimizer = build()
    plain, plain_optimizer = build()
    train(plain, plain_optimizer, range(3))
    session = open_at_minimum(model, optimizer, tmp_path)
    train(model, optimizer, range(3))
    if not an_update_waits:
        assert all(bool(p.isfinite().all()) for p in model.parameters())
    extent = session._manager.home(model.layers[2].weight).chunk.extent
    session._store.evict(session._manager.home(model.layers[2].weight).chunk)
    with chunk_file(tmp_path).open("r+b") as file:
        file.seek(extent.regions[0][0] + 77)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))
    with pytest.raises(CorruptionError, match=r"layers\.2\.weight"):
        train(model, optimizer, [3])
    lost = "2 tensors .*layers.2.weight, layers.2.bias. They"
    if an_update_waits:
        lost = "6 tensors .*layers.2.weight, layers.2.bias, .*exp_avg_sq. They"
    with pytest.raises(CorruptionError, match=lost):
        session.close()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        if name.startswith("layers.2."):
            assert torch.isnan(p).all()
        else:
            assert torch.equal(p, q), name
    model.load_state_dict(plain.state_dict())
    train(model, optimizer, [3])


def test_what_is_not_trained_again_can_be_dropped_though_unreadable(tmp_path: Path) -> None:
    """zero_grad() on gradients whose bytes are damaged needs no bytes."""
    model, optimizer = build()
    session = open_at_minimum(model, optimizer, tmp_path)
    model(torch.ones(1, 32)).sum().backward()
    damaged = [session._manager.grad_chunks[h.chunk.key] for h in session._manager.homes.values()]
    for chunk in {c.key: c for c in damaged}.values():
        session._store.evict(chunk)
        with chunk_file(tmp_path).open("r+b") as file:
            file.seek(chunk.extent.regions[0][0])
            file.write(b"damage")
    optimizer.zero_grad()
    train(model, optimizer, range(2))
    session.close()
    plain, plain_optimizer = build()
    train(plain, plain_optimizer, range(2))
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


PROGRAM = """
import sys, os
from pathlib import Path
from tests.faults.small import *
from tests.faults.test_corruption import flip_every_page
from zeepo.engine.tuning import tuned
disk = Path(sys.argv[1])
model, optimizer = build()
views = [p.detach()[1:] for p in model.parameters()]
with tuned(piece_bytes=1024):
    session = open_at_minimum(model, optimizer, disk)
train(model, optimizer, range(2))
states = states_of(optimizer)
views += [p.detach() for p in model.parameters()]
loss = loss_of(model, 2)
flip_every_page(chunk_file(disk))
try:
    loss.backward()
    train(model, optimizer, range(2))
except Exception as error:
    print(type(error).__name__)
try:
    session.close()
except Exception as error:
    print(type(error).__name__)
touch_everything(model, optimizer)
print(sum(float(t.sum()) for t in views + states) is not None, repr(model.layers[0].weight)[:9])
train(model, optimizer, range(1))
print("alive", os.listdir(disk))
"""


def test_the_interpreter_survives_damage_with_views_and_cut_states(tmp_path: Path) -> None:
    done = run_program(PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["CorruptionError", "CorruptionError"], done.stdout
    assert "alive []" in done.stdout


def test_damage_with_the_session_as_a_context(tmp_path: Path) -> None:
    model, optimizer = build()
    session = open_at_minimum(model, optimizer, tmp_path)
    train(model, optimizer, range(2))

    def damaged_training() -> None:
        with session:
            flip_every_page(chunk_file(tmp_path))
            train(model, optimizer, range(2))

    with pytest.raises(CorruptionError, match="lost") as caught:
        damaged_training()
    chain, error = [], caught.value
    while error is not None:
        chain.append(str(error))
        error = error.__context__
    assert any("came back wrong from disk" in text and "lost" not in text for text in chain)
