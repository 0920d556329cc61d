"""Saved activations go to disk and come back: exact, in time, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeepo
from zeepo.engine.tuning import tuned
from zeepo.errors import CorruptionError, DiskError

MOVE_ALL = {"smallest_activation_bytes": 1, "activation_window_bytes": 4096}


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    rows = torch.randn(128, 64, generator=torch.Generator().manual_seed(step))
    return model(rows).square().mean()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def open_session(
    model: nn.Module, optimizer: torch.optim.Optimizer, disk: Path, **options: str
) -> zeepo.Session:
    with tuned(**MOVE_ALL):
        return zeepo.init(model, optimizer, ram="1GiB", disk=disk, activations="disk", **options)


def test_everything_saved_goes_and_comes_back(tmp_path: Path) -> None:
    plain = build()
    model, optimizer = build()
    with open_session(model, optimizer, tmp_path) as session:
        losses = train(model, optimizer, range(4))
        stats = session.stats()
        assert stats.activations_spilled >= 4 * 12
        assert stats.activations_fetched >= 4 * 11
        assert session._activations._in_ram_bytes == 0, "nothing is kept after backward"
        assert session._activations._by_address == {}, "nor remembered"
    torch.manual_seed(0)
    assert losses == train(*build(), range(4)) != train(*plain, range(1, 5))
    assert list(tmp_path.iterdir()) == []


def test_activations_go_to_disk_when_all_else_rests_in_ram(tmp_path: Path) -> None:
    model, optimizer = build()
    in_ram = dict.fromkeys(("params", "grads", "optimizer_state"), "ram")
    with open_session(model, optimizer, tmp_path, **in_ram) as session:
        losses = train(model, optimizer, range(2))
        assert session.stats().activations_fetched > 10
        assert "staging" in session.plan.items()
    assert losses == train(*build(), range(2))
    assert list(tmp_path.iterdir()) == []


def test_what_is_larger_than_the_window_is_let_go_too(tmp_path: Path) -> None:
    """It is sent down while it is being saved: nobody of ours may keep its memory after that."""
    model, optimizer = build()
    with open_session(model, optimizer, tmp_path) as session:
        loss = loss_of(model, 0)
        session._activations._finish_writes(leave_bytes=0)
        references = session._activations._on_disk.values()
        handles = [h() for saved in references for h in saved().handles]
        assert len(handles) >= 10
        assert all(handle.tensor is None for handle in handles if handle is not None)
        loss.backward()


def test_a_graph_that_outlives_the_session_is_whole(tmp_path: Path) -> None:
    model, optimizer = build()
    session = open_session(model, optimizer, tmp_path)
    loss = loss_of(model, 0)
    assert session.stats().activations_spilled > 0
    session.close()
    loss.backward()
    expected, _ = build()
    loss_of(expected, 0).backward()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_a_graph_that_is_dropped_gives_its_place_back(tmp_path: Path) -> None:
    model, optimizer = build()
    with open_session(model, optimizer, tmp_path) as session:
        train(model, optimizer, range(2))
        before = session.stats().bytes_now["disk"]
        for step in range(5):
            loss_of(model, step)  # no backward
        train(model, optimizer, range(1))
        assert session.stats().bytes_now["disk"] <= before + (1 << 20)


def test_the_users_own_hooks_see_what_they_would(tmp_path: Path) -> None:
    def run(model: nn.Module) -> tuple[list[torch.Size], list[torch.Tensor]]:
        seen: list[torch.Size] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            seen.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(model, 0)
        loss.backward()
        return seen, [p.grad.clone() for p in model.parameters()]

    expected_seen, expected = run(build()[0])
    model, optimizer = build()
    with open_session(model, optimizer, tmp_path):
        seen, grads = run(model)
    assert seen == expected_seen
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_a_block_of_other_hooks_is_left_as_it_was(tmp_path: Path) -> None:
    model, optimizer = build()
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        session = open_session(model, optimizer, tmp_path)
        loss_of(model, 0).backward()
    num_packed = len(packed)
    assert num_packed > 0
    loss_of(model, 1).backward()
    assert len(packed) == num_packed, "the user's hooks ended with their block"
    session.close()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_closing_inside_a_block_of_other_hooks(tmp_path: Path) -> None:
    """Hooks of ours that stayed would keep every later session from seeing what is saved."""
    model, optimizer = build()
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor

    session = open_session(model, optimizer, tmp_path)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        session.close()
        loss_of(model, 0).backward()
        assert packed
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    with open_session(model, optimizer, tmp_path) as session:
        train(model, optimizer, range(1))
        assert session.stats().activations_spilled > 10


def test_a_change_in_place_is_refused_as_torch_does(tmp_path: Path) -> None:
    model, optimizer = build()
    for mode in ("auto", "disk"):
        with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path, activations=mode):
            x = torch.randn(300, 64, requires_grad=True)
            y = torch.tanh(model[0][0](x))
            z = y * y
            with torch.no_grad():
                y.add_(1.0)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                z.sum().backward()


@pytest.mark.usefixtures("python_blocks")
def test_what_is_changed_on_its_way_to_disk_and_saved_again_is_saved_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plainly this is no error: nobody goes back through what was saved before the change."""
    real = os.pwritev

    def pwritev(*arguments: Any) -> int:
        time.sleep(0.2)
        return real(*arguments)

    monkeypatch.setattr(os, "pwritev", pwritev)
    model, optimizer = build()
    with tuned(smallest_activation_bytes=1, activation_window_bytes=200_000):
        session = zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path, activations="disk")
    with session:
        weight = torch.ones(500, 64, requires_grad=True)
        hidden = weight + 1
        looked_at = hidden.sin()  # keeps a graph that saved `hidden` as it is now
        other = weight.exp()  # sends `hidden` on its way
        hidden.mul_(3)
        loss = (hidden.detach() * weight).sum()
        session._activations._finish_writes(leave_bytes=0)
        (gradient,) = torch.autograd.grad(loss, weight)
        assert torch.equal(gradient, hidden)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            looked_at.sum().backward()
        del other


def test_a_slice_of_the_users_data_is_not_written(tmp_path: Path) -> None:
    """All of the data would be, in every step, and its memory would still be the user's."""
    model, optimizer = build()
    data = torch.randn(10_000, 64, generator=torch.Generator().manual_seed(0))
    with open_session(model, optimizer, tmp_path) as session:
        model(data[100:228]).square().mean().backward()
        assert session.stats().activations_spilled > 10
        assert session._disk.bytes_written < data.nbytes


def test_slices_of_an_activation_go_once_it_is_let_go(tmp_path: Path) -> None:
    model, optimizer = build()
    with open_session(model, optimizer, tmp_path) as session:

        def forward() -> torch.Tensor:
            rows = model[0](torch.ones(512, 64))
            return torch.stack([(part * part).sum() for part in rows.split(64)]).sum()

        loss = forward()
        loss = loss + loss_of(model, 0)
        in_ram = [reference() for reference in session._activations._in_ram.values()]
        assert not any(saved.is_part for saved in in_ram if saved is not None)
        loss.backward()


def test_a_flipped_bit_stops_backward_and_is_named(tmp_path: Path) -> None:
    model, optimizer = build()
    session = open_session(model, optimizer, tmp_path)
    train(model, optimizer, range(1))
    loss = loss_of(model, 1)
    session._activations._finish_writes(leave_bytes=0)
    (path,) = tmp_path.glob("*/chunks.bin")
    data = bytearray(path.read_bytes())
    changed = bytes(byte ^ 1 for byte in data)
    path.write_bytes(changed)
    with pytest.raises(CorruptionError, match="activation"):
        loss.backward()
    path.write_bytes(bytes(data))
    session.close()


def test_an_unreadable_activation_costs_its_graph_and_nothing_else(tmp_path: Path) -> None:
    model, optimizer = build()
    session = open_session(model, optimizer, tmp_path)
    train(model, optimizer, range(2))
    loss = loss_of(model, 2)
    session._activations._finish_writes(leave_bytes=0)
    for chunk in session._store.chunks():
        if chunk.is_resident:
            session._store.evict(chunk)
    spoilt = list(session._activations._on_disk.values())[5]()
    (path,) = tmp_path.glob("*/chunks.bin")
    data = bytearray(path.read_bytes())
    data[spoilt.extent.regions[0][0]] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CorruptionError, match="activation"):
        session.close()
    with pytest.raises(CorruptionError, match="Run its forward again"):
        loss.backward()
    optimizer.zero_grad()
    plain = build()
    train(*plain, range(2))
    assert all(map(torch.equal, model.parameters(), plain[0].parameters()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("python_blocks")
def test_a_full_disk_stops_forward_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = build()
    with open_session(model, optimizer, tmp_path):
        real, is_full = os.pwritev, [True]

        def pwritev(*arguments: object) -> int:
            if is_full[0]:
                raise OSError(28, "No space left on device")
            return real(*arguments)

        monkeypatch.setattr(os, "pwritev", pwritev)
        state = torch.get_rng_state()
        with pytest.raises(DiskError, match="activation"):
            loss_of(model, 0).backward()
        is_full[0] = False
        torch.set_rng_state(state)
        optimizer.zero_grad()
        losses = train(model, optimizer, range(3))
    assert losses == train(*build(), range(3))


PROGRAM = """
import sys, torch, zeepo
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(128, 1024), nn.Linear(1024, 128)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

def peak_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

model = nn.Sequential(*[Block() for _ in range(16)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = zeepo.init(model, optimizer, disk=sys.argv[2], ram=sys.argv[3], activations=sys.argv[1])
for rows in (2, 4096):
    before = peak_kib()
    model(torch.randn(rows, 128)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(peak_kib() - before)
"""


def growth_mib(mode: str, ram: str, disk: Path) -> float:
    disk.mkdir()
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(64 << 10), "MALLOC_TRIM_THRESHOLD_": "0"}
    command = [sys.executable, "-c", PROGRAM, mode, str(disk), ram]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0, done.stderr
    return int(done.stdout) / 1024


@pytest.mark.parametrize(("mode", "ram"), [("disk", "1GiB"), ("auto", "260MiB")])
@pytest.mark.slow
def test_memory_is_really_freed(tmp_path: Path, mode: str, ram: str) -> None:
    """Sixteen blocks save 16 MiB behind their tanh and 2 MiB before."""
    in_ram = growth_mib("ram", "1GiB", tmp_path / "ram")
    assert in_ram > 280
    assert growth_mib(mode, ram, tmp_path / mode) < 0.6 * in_ram
