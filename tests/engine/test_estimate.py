"""What a step will need is told beforehand, and asking leaves no trace."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeepo
from zeepo.engine import estimate as estimate_module
from zeepo.engine.estimate import estimate, in_child
from zeepo.errors import BudgetError
from zeepo.planner.plan import Footprint
from zeepo.units import MiB

ROWS, WIDTH = 512, 256
HIDDEN_BYTES = ROWS * WIDTH * 4
WEIGHT_BYTES = WIDTH * WIDTH * 4


class Net(nn.Module):
    """Layers with tanh between them; each saves its input, and tanh its output: the same bytes."""

    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8))
        self.is_checkpointed = is_checkpointed
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
            x = torch.tanh(x)
        return x.square().mean()


def footprint(model: nn.Module, *args: Any, spills: bool) -> Footprint | str:
    chunk_of = {id(p): index for index, p in enumerate(model.parameters())}
    sizes = {i: p.numel() * p.element_size() for i, p in enumerate(model.parameters())}
    names = {index: name for index, (name, _) in enumerate(model.named_parameters())}
    return estimate(model, args, {}, chunk_of, sizes, names, spills=spills)


def test_what_is_saved_and_what_is_held() -> None:
    rows = torch.randn(ROWS, WIDTH)
    kept = footprint(Net(), rows, spills=False)
    assert isinstance(kept, Footprint)
    assert kept.saved_bytes == 9 * HIDDEN_BYTES  # the rows and eight outputs of tanh
    assert kept.torch_bytes >= 9 * HIDDEN_BYTES
    assert kept.leased_bytes in (0, WEIGHT_BYTES)
    spilled = footprint(Net(), rows, spills=True)
    assert isinstance(spilled, Footprint)
    assert spilled.saved_bytes == kept.saved_bytes
    assert spilled.torch_bytes <= 6 * HIDDEN_BYTES + 4096
    assert "layers." in spilled.moment or "aten::" in spilled.moment


def test_a_larger_batch_needs_more() -> None:
    small = footprint(Net(), torch.randn(64, WIDTH), spills=False)
    large = footprint(Net(), torch.randn(640, WIDTH), spills=False)
    assert isinstance(small, Footprint)
    assert isinstance(large, Footprint)
    assert large.saved_bytes == 10 * small.saved_bytes


def test_checkpointing_is_seen() -> None:
    rows = torch.randn(ROWS, WIDTH, requires_grad=True)
    plain, saved = (footprint(Net(flag), rows, spills=False) for flag in (False, True))
    assert isinstance(plain, Footprint)
    assert isinstance(saved, Footprint)
    assert saved.peak_bytes <= plain.peak_bytes + WEIGHT_BYTES


seen: list[int] = []


class Meddler(Net):
    """A forward with effects of every kind."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        print("a forward")
        noise = random.random() + float(np.random.rand())
        return super().forward(x + noise + torch.rand(1))


def test_asking_leaves_no_trace(capfd: pytest.CaptureFixture[str]) -> None:
    model = Meddler()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    values = [p.detach().clone() for p in model.parameters()]
    found = footprint(model, torch.randn(4, WIDTH, generator=torch.Generator()), spills=True)
    assert isinstance(found, Footprint), found
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert (model.calls, seen) == (0, [])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), values, strict=True))
    assert capfd.readouterr().out == ""


def test_code_that_looks_at_values_cannot_be_foretold(tmp_path: Path) -> None:
    class Looks(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if x.sum().item() > 0 else -x)

    model = Looks()
    assert "DataDependent" in str(footprint(model, torch.ones(4, WIDTH), spills=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zeepo.init(model, optimizer, ram="400MiB", disk=tmp_path) as session:
        model(torch.ones(4, WIDTH)).backward()
        optimizer.step()
        assert "cannot be told beforehand" in session.plan.explain()


def test_a_child_that_hangs_or_dies_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate_module, "PATIENCE_SECONDS", 0.2)

    def hang() -> dict[str, Any]:
        time.sleep(60)
        return {}

    began = time.monotonic()
    assert in_child(hang) == "the model did not finish on shapes alone"
    assert time.monotonic() - began < 10

    def die() -> dict[str, Any]:
        raise MemoryError("none left")

    assert "none left" in str(in_child(die))


def test_a_batch_that_cannot_fit_is_refused_before_it_is_computed(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zeepo.init(model, optimizer, ram="200MiB", disk=tmp_path, activations="ram") as session:
        with pytest.raises(BudgetError, match="too little") as refusal:
            model(torch.empty(40_000, WIDTH))
        with pytest.raises(BudgetError, match="too little"):  # asking twice is no way around it
            model(torch.empty(40_000, WIDTH))
        assert model.calls == 0
        assert "activations" in str(refusal.value)
        least = session.plan.minimum_ram
        assert least > 9 * 40_000 * WIDTH * 4
        with pytest.raises(BudgetError):
            session.resize(ram=least - 1)
        model(torch.randn(8, WIDTH)).backward()  # a smaller batch goes on
        optimizer.step()
    assert least // MiB > 350


def test_small_saved_tensors_stay_in_ram() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(50)])
    rows = torch.randn(16, 64)  # 4 KiB, saved fifty times and more
    chunks = {id(p): 0 for p in model.parameters()}, {0: 0}, {0: "all"}
    everything_goes = estimate(model, [rows], {}, *chunks, spills=True)
    small_ones_stay = estimate(model, [rows], {}, *chunks, spills=True, smallest_bytes=1 << 16)
    assert isinstance(everything_goes, Footprint)
    assert isinstance(small_ones_stay, Footprint)
    assert everything_goes.kept_bytes == 0
    assert small_ones_stay.kept_bytes >= 50 * rows.nbytes
    assert small_ones_stay.torch_bytes >= everything_goes.torch_bytes + 45 * rows.nbytes


def test_the_loss_is_reckoned_like_a_cross_entropy() -> None:
    model = nn.Linear(8, 1 << 16, bias=False)
    found = estimate(model, [torch.randn(16, 8)], {}, {}, {}, {}, spills=True)
    assert isinstance(found, Footprint)
    assert found.torch_bytes >= 3 * 16 * (1 << 16) * 4, "logits' gradient, log-softmax and its own"


def test_a_slice_of_the_data_counts_as_what_is_seen_of_it(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.zeros(150_000, WIDTH)
    columns = torch.zeros(WIDTH, 150_000)
    needed = []
    for batch in (torch.zeros(300, WIDTH), data[:300], columns.T[:300]):
        with zeepo.init(model, optimizer, ram="300MiB", disk=tmp_path) as session:
            model(batch).backward()
            assert session.plan.footprint is not None
            needed.append((session.plan.footprint.peak_bytes, session.plan.footprint.saved_bytes))
    assert needed[0] == needed[1] == needed[2]


class Masked(nn.Module):
    """A block that uses a large buffer and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout, self.norm = nn.Dropout(0.1), nn.BatchNorm1d(WIDTH)
        self.register_buffer("mask", torch.ones(ROWS, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(torch.tanh(self.up(self.norm(x * self.mask))))
        return x + self.down(hidden)


def test_recomputing_is_foretold(tmp_path: Path) -> None:
    """Beside the inputs of the blocks the inside of one is there, however many there are."""
    torch_bytes = {}
    for mode in ("ram", "recompute"):
        for depth in (4, 8):
            model = nn.Sequential(*(Masked() for _ in range(depth)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path, activations=mode) as s:
                model(torch.randn(ROWS, WIDTH)).sum().backward()
                assert s.plan.footprint is not None, s.plan.unknown_because
                torch_bytes[mode, depth] = s.plan.footprint.torch_bytes
    assert torch_bytes["ram", 8] - torch_bytes["ram", 4] > 4 * 8 * HIDDEN_BYTES
    assert torch_bytes["recompute", 8] - torch_bytes["recompute", 4] < 4 * 3 * HIDDEN_BYTES
    assert torch_bytes["recompute", 8] < 0.6 * torch_bytes["ram", 8]
