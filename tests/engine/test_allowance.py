"""What the system has left counts, whatever `ram` says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import zeepo
from zeepo.engine import allowance
from zeepo.units import MiB


def test_a_system_with_less_than_the_least_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2048, 2048)
    before = model.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with zeepo.init(model, optimizer, ram="4GiB", disk=tmp_path) as session:
        least = session.plan.minimum_ram
    monkeypatch.setattr(allowance.Allowance, "growth_bytes", lambda self: 10 * MiB)
    monkeypatch.setattr(allowance, "spare_bytes", lambda: least - 10 * MiB - 1)
    with pytest.raises(zeepo.BudgetError, match="whatever ram says: this session needs") as raised:
        zeepo.init(model, optimizer, ram="4GiB", disk=tmp_path)
    assert "torch itself" in str(raised.value), "the bill"
    assert torch.equal(model.weight, before)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(allowance, "spare_bytes", lambda: least - 10 * MiB)
    zeepo.init(model, optimizer, ram="4GiB", disk=tmp_path).close()
