"""Reading whole values inside the budget: close, state_dict, torch.save, deepcopy, gathered."""

from __future__ import annotations

import copy
import gc
import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeepo
from tests.faults.small import assert_ordinary, assert_same, states_of
from zeepo.engine.tuning import tuned
from zeepo.errors import BudgetError, DiskError

WIDTH = 256
DEPTH = 6
LAYER_BYTES = (WIDTH * WIDTH + WIDTH) * 4


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Six layers of 257 KiB each."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Plain training that leaves the last gradients in place."""
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()


def open_session(
    model: nn.Module, optimizer: torch.optim.Optimizer, disk: Path, extra: int = 0, **options: Any
) -> zeepo.Session:
    """At the least ram, and `extra` bytes."""
    probe = zeepo.init(model, optimizer, ram="1GiB", disk=disk, **options)
    ram = probe.plan.minimum_ram + extra
    probe.close()
    return zeepo.init(model, optimizer, ram=ram, disk=disk, **options)


def plain_run(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = build()
    train(model, optimizer, range(steps))
    return model, optimizer


def num_mapped(tensors: list[torch.Tensor]) -> int:
    """How many of these lie in mappings of unlinked files."""
    spans = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("whole.bin (deleted)"):
            low, high = line.split()[0].split("-")
            spans.append((int(low, 16), int(high, 16)))
    return sum(any(low <= t.data_ptr() < high for low, high in spans) for t in tensors)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return list(model.parameters())


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def large_states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [state for state in states_of(optimizer) if state.numel() > 1]


# -- close -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece_bytes", [32 << 20, 20_032], ids=["whole", "cut"])
def test_what_does_not_fit_is_mapped_and_trains_on(tmp_path: Path, piece_bytes: int) -> None:
    model, optimizer = build()
    with tuned(piece_bytes=piece_bytes):
        session = open_session(model, optimizer, tmp_path)
    train(model, optimizer, range(3))
    view = model.state_dict()["0.weight"]
    limit = session._ledger.limit_bytes
    session.close()
    assert session._ledger.peak_bytes <= limit
    assert session._ledger.limit_bytes == limit
    assert_ordinary(model, optimizer)
    plain, plain_optimizer = plain_run(3)
    assert_same(model, optimizer, plain, plain_optimizer)
    assert view.data_ptr() == model[0].weight.data_ptr()
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    mapped = num_mapped([*weights(model), *grads(model), *large_states(optimizer)])
    assert mapped >= 2 * DEPTH * 2  # at least as many as all states
    assert num_mapped(weights(model)) < len(weights(model)), "parameters are kept first"
    assert list(tmp_path.iterdir()) == []
    train(model, optimizer, range(3, 6))
    train(plain, plain_optimizer, range(3, 6))
    assert_same(model, optimizer, plain, plain_optimizer)
    del model, optimizer, view, session
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_parameters_are_kept_before_gradients_before_states(tmp_path: Path) -> None:
    model, optimizer = build()
    session = open_session(model, optimizer, tmp_path, extra=DEPTH * LAYER_BYTES)
    train(model, optimizer, range(2))
    session.close()
    assert num_mapped(weights(model)) == 0
    assert 0 < num_mapped(grads(model)) < 2 * DEPTH
    assert num_mapped(large_states(optimizer)) == 2 * 2 * DEPTH
    assert_same(model, optimizer, *plain_run(2))


@pytest.mark.parametrize("has_disk", [True, False])
def test_what_fits_is_plain_memory(tmp_path: Path, has_disk: bool) -> None:
    model, optimizer = build()
    options = {"disk": tmp_path} if has_disk else {}
    with (
        tuned(piece_bytes=20_032),
        zeepo.init(model, optimizer, ram="1GiB", **options) as session,
    ):
        train(model, optimizer, range(2))
        before = session.stats().bytes_peak["ram"]
    assert session._ledger.peak_bytes <= before + LAYER_BYTES
    assert num_mapped([*weights(model), *grads(model), *large_states(optimizer)]) == 0
    assert_same(model, optimizer, *plain_run(2))


@pytest.mark.parametrize(
    "placement",
    [
        {"params": "ram", "grads": "ram"},
        {"optimizer_state": "ram"},
        {"params": "ram", "optimizer_state": "ram"},
    ],
)
def test_what_rests_in_ram_stays_there(tmp_path: Path, placement: dict[str, str]) -> None:
    model, optimizer = build()
    with tuned(piece_bytes=20_032):
        session = open_session(model, optimizer, tmp_path, **placement)
    train(model, optimizer, range(2))
    limit = session._ledger.limit_bytes
    session.close()
    assert session._ledger.peak_bytes <= limit
    assert_same(model, optimizer, *plain_run(2))
    if placement.get("params") == "ram":
        assert num_mapped(weights(model)) == 0
    if placement.get("optimizer_state") == "ram":
        assert num_mapped(large_states(optimizer)) == 0


def test_closing_with_raw_addresses_and_a_changed_state(tmp_path: Path) -> None:
    """A numpy array goes on showing its parameter; a cut state written as a whole is kept."""
    model, optimizer = build()
    with tuned(piece_bytes=20_032):
        session = open_session(model, optimizer, tmp_path, extra=LAYER_BYTES)
    train(model, optimizer, range(2))
    optimizer.state[model[3].weight]["exp_avg"].fill_(0.25)
    array = model[5].weight.detach().numpy()
    array[0, 0] = 77.0
    session.close()
    plain, plain_optimizer = plain_run(2)
    plain_optimizer.state[plain[3].weight]["exp_avg"].fill_(0.25)
    with torch.no_grad():
        plain[5].weight[0, 0] = 77.0
    assert_same(model, optimizer, plain, plain_optimizer)
    array[1, 1] = 5.0
    assert float(model[5].weight.detach()[1, 1]) == 5.0


def test_without_room_on_the_disk_the_session_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = build()
    session = open_session(model, optimizer, tmp_path)
    train(model, optimizer, range(2))
    with monkeypatch.context() as full:
        full.setattr("zeepo.memory.reclaimable._free_bytes", lambda directory: 0)
        full.setattr(type(session._disk), "used_bytes", 0)
        with pytest.raises(DiskError, match=r"do not fit in ram.*Free another .*try again"):
            session.close()
    assert not session.is_closed
    train(model, optimizer, range(2, 3))
    session.close()
    assert_same(model, optimizer, *plain_run(3))


def test_a_disk_that_is_gone_loses_nothing(tmp_path: Path) -> None:
    """The open file still has the values; there is no place for new ones."""
    model, optimizer = build()
    session = open_session(model, optimizer, tmp_path)
    train(model, optimizer, range(2))
    shutil.rmtree(tmp_path)
    with pytest.raises(DiskError, match=r"whole and true.*MiB more than ram allows.*Create the"):
        session.close()
    assert session.is_closed
    assert_ordinary(model, optimizer)
    assert_same(model, optimizer, *plain_run(2))


# -- state_dict, torch.save, deepcopy --------------------------------------------------------------


@pytest.mark.parametrize("piece_bytes", [32 << 20, 20_032], ids=["whole", "cut"])
def test_holding_a_state_dict_takes_no_memory(tmp_path: Path, piece_bytes: int) -> None:
    model, optimizer = build()
    with tuned(piece_bytes=piece_bytes):
        session = open_session(model, optimizer, tmp_path)
    train(model, optimizer, range(2))
    num_fetches = session.stats().fetches
    held = model.state_dict(), optimizer.state_dict()
    assert session.stats().fetches == num_fetches
    assert not session._store.has_leases()
    plain, plain_optimizer = plain_run(2)
    for name, value in plain.state_dict().items():
        assert torch.equal(held[0][name], value)
    for key, state in plain_optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(held[1]["state"][key][name], value)
    assert not session._store.has_leases()
    stats = session.stats()
    assert stats.bytes_peak["ram"] <= session.plan.managed_bytes
    assert "copies" not in stats.bytes_by_tag
    session.close()


@pytest.mark.parametrize("piece_bytes", [32 << 20, 20_032], ids=["whole", "cut"])
def test_saved_files_are_those_of_plain_torch(tmp_path: Path, piece_bytes: int) -> None:
    model, optimizer = build()
    disk = tmp_path / "disk"
    disk.mkdir()
    with tuned(piece_bytes=piece_bytes):
        session = open_session(model, optimizer, disk, params="ram", grads="ram")
    train(model, optimizer, range(2))
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "saved.pt")
    assert session.stats().bytes_peak["ram"] <= session.plan.managed_bytes
    train(model, optimizer, range(2, 3))
    session.close()
    plain, plain_optimizer = plain_run(2)
    loaded_model, loaded_optimizer = build()
    states = torch.load(tmp_path / "saved.pt", weights_only=True)
    loaded_model.load_state_dict(states[0])
    loaded_optimizer.load_state_dict(states[1])
    plain_optimizer.zero_grad()
    assert_same(loaded_model, loaded_optimizer, plain, plain_optimizer)
    buffer = io.BytesIO()
    torch.save((plain.state_dict(), plain_optimizer.state_dict()), buffer)
    assert abs((tmp_path / "saved.pt").stat().st_size - len(buffer.getvalue())) < 4096


def test_a_deep_copy_beyond_the_budget_is_mapped(tmp_path: Path) -> None:
    model, optimizer = build()
    session = open_session(model, optimizer, tmp_path)
    train(model, optimizer, range(2))
    copied = copy.deepcopy(model)
    rows = copy.deepcopy(model[0].weight.detach()[:, ::2])
    assert num_mapped(weights(copied)) == DEPTH  # biases are small
    assert num_mapped([rows]) == 1
    assert session.stats().bytes_peak["ram"] <= session.plan.managed_bytes
    train(model, optimizer, range(2, 3))
    session.close()
    plain, _ = plain_run(2)
    assert all(type(p) is nn.Parameter for p in copied.parameters())
    for p, q in zip(copied.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
    assert torch.equal(rows, plain[0].weight.detach()[:, ::2])
    plain.zero_grad()
    copied(torch.ones(1, WIDTH)).sum().backward()
    plain(torch.ones(1, WIDTH)).sum().backward()
    assert torch.equal(copied[0].weight.grad, plain[0].weight.grad)


def test_copies_take_what_is_left_of_the_budget_and_give_it_back(tmp_path: Path) -> None:
    model, optimizer = build()
    session = open_session(model, optimizer, tmp_path, extra=3 * LAYER_BYTES)
    train(model, optimizer, range(2))
    first = copy.deepcopy(model)
    in_ram = session.stats().bytes_by_tag["copies"]
    assert in_ram == 3 * WIDTH * WIDTH * 4
    assert num_mapped(weights(first)) == DEPTH - 3
    train(model, optimizer, range(2, 3))
    alias = first[0].weight.detach()
    del first
    gc.collect()
    model[0].weight.sum()
    assert session.stats().bytes_by_tag["copies"] == WIDTH * WIDTH * 4
    del alias
    gc.collect()
    model[0].weight.sum()
    assert "copies" not in session.stats().bytes_by_tag
    session.close()
    assert_same(model, optimizer, *plain_run(3))


def test_copies_respect_the_disk_limit(tmp_path: Path) -> None:
    model, optimizer = build()
    session = open_session(model, optimizer, tmp_path)
    train(model, optimizer, range(2))
    session._disk.limit_bytes = session._disk.used_bytes + LAYER_BYTES
    with pytest.raises(DiskError, match=r"a copy of '1\.weight' \(256\.0 KiB\).*disk_limit"):
        copy.deepcopy(model)
    session._disk.limit_bytes = None
    session.close()


# -- gathered --------------------------------------------------------------------------------------


def test_gathering_too_much_is_refused_with_what_it_needs(tmp_path: Path) -> None:
    model, optimizer = build()
    session = open_session(model, optimizer, tmp_path)
    train(model, optimizer, range(2))
    with (
        pytest.raises(BudgetError, match=r"gathered needs 1\.5 MiB .* Raise ram by .* fewer"),
        session.gathered(model),
    ):
        raise AssertionError("not reached")
    assert not session._store.has_leases()
    with session.gathered(model[2]) as parameters:
        parameters[0].data.mul_(2.0)
    train(model, optimizer, range(2, 3))
    session.close()
