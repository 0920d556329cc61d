"""Budgets that change while training goes on; no number changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import zeepo
from zeepo.errors import BudgetError, ConfigError, SessionError
from zeepo.units import MiB


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(12)])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    rows = torch.randn(8, 300, generator=torch.Generator().manual_seed(number))
    loss = model(rows).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_down_and_up_in_the_middle_of_training(tmp_path: Path) -> None:
    expected = [step(*pair, n) for pair in [build()] for n in range(8)]
    model, optimizer = build()
    with zeepo.init(model, optimizer, ram="1GiB", disk=tmp_path) as session:

        def evictions_of(steps: range) -> int:
            before = session.stats().evictions
            losses.extend(step(model, optimizer, n) for n in steps)
            return session.stats().evictions - before

        losses: list[float] = []
        roomy = evictions_of(range(2))
        least = session.plan.minimum_ram
        session.resize(ram=least)
        assert session.plan.ram == least
        assert session.stats().bytes_now["ram"] <= session.plan.managed_bytes
        tight = evictions_of(range(2, 5))
        assert tight > roomy + 30
        session.resize(ram="1GiB")
        evictions_of(range(5, 6))
        assert evictions_of(range(6, 8)) < tight / 4
    assert losses == expected


def test_between_forward_and_backward(tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer, resize) -> list[torch.Tensor]:
        for number in range(3):
            rows = torch.randn(8, 300, generator=torch.Generator().manual_seed(number))
            loss = model(rows).square().mean()
            resize(number)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    expected = run(*build(), lambda number: None)
    model, optimizer = build()
    with zeepo.init(model, optimizer, ram="400MiB", disk=tmp_path) as session:
        budgets = [session.plan.minimum_ram + 64 * MiB, "200MiB", session.plan.minimum_ram]
        actual = run(model, optimizer, lambda number: session.resize(ram=budgets[number]))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_what_is_too_little_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    model, optimizer = build()
    with zeepo.init(model, optimizer, ram="400MiB", disk=tmp_path) as session:
        step(model, optimizer, 0)
        with pytest.raises(BudgetError, match="too little"):
            session.resize(ram=session.plan.minimum_ram - 1)
        assert session.plan.ram == 400 * MiB
        with pytest.raises(ConfigError, match="ram"):
            session.resize(ram="much")
        with pytest.raises(ConfigError, match="needs a size"):
            session.resize(ram=None)  # type: ignore[arg-type]
    with pytest.raises(SessionError, match="closed"):
        session.resize(ram="1GiB")
    with zeepo.init(model, optimizer, ram="400MiB") as session, pytest.raises(BudgetError):
        session.resize(ram="500MiB")


def test_a_system_that_runs_short_makes_it_shrink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if other processes had taken the memory: what it keeps follows, no number changes."""
    expected = [step(*pair, n) for pair in [build()] for n in range(6)]
    spare: list[int | None] = [None]
    monkeypatch.setattr("zeepo.engine.allowance.spare_bytes", lambda: spare[0])
    monkeypatch.setattr("zeepo.memory.system_room.ASK_SYSTEM_SECONDS", 0.0)
    model, optimizer = build()
    with zeepo.init(model, optimizer, ram="400MiB", disk=tmp_path) as session:
        losses = [step(model, optimizer, n) for n in range(2)]
        before = session.stats().evictions
        spare[0] = 0
        losses += [step(model, optimizer, n) for n in range(2, 5)]
        assert session.stats().evictions > before + 20
        spare[0] = None
        losses += [step(model, optimizer, n) for n in range(5, 6)]
    assert losses == expected
