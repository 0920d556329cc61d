"""A small model whose every unit moves, and ways to run and compare it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zeepo

REPOSITORY = Path(__file__).parents[2]
WIDTH = 32
DEPTH = 8


class Deep(nn.Module):
    """Linear layers one after the other, with places to fail in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.fail_at: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers; raise in the middle when told to."""
        for number, layer in enumerate(self.layers):
            if number == self.fail_at:
                raise ValueError(f"layer {number} fails")
            x = torch.tanh(layer(x))
        return x


def build(seed: int = 0) -> tuple[Deep, torch.optim.Optimizer]:
    """The model and its optimizer, always with the same values."""
    torch.manual_seed(seed)
    model = Deep()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(step: int) -> torch.Tensor:
    """The data of a step."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """The loss on the batch of a step."""
    return model(batch(step)).square().mean()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One plain training step; the loss."""
    loss = loss_of(model, step)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> list[float]:
    """Plain training; the losses."""
    return [train_step(model, optimizer, step) for step in steps]


def open_at_minimum(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    disk: Path,
    *,
    extra: int = 0,
    **options: Any,
) -> zeepo.Session:
    """A session with everything on disk at the least ram it accepts, and `extra` bytes."""
    probe = zeepo.init(model, optimizer, ram="1GiB", disk=disk)
    ram = probe.plan.minimum_ram + extra
    probe.close()
    return zeepo.init(model, optimizer, ram=ram, disk=disk, **options)


def scratch_files(disk: Path) -> list[Path]:
    """What zeepo keeps in a directory."""
    return sorted(path for path in disk.rglob("*") if path.is_file())


def chunk_file(disk: Path) -> Path:
    """The one file with values."""
    (path,) = disk.glob("*/chunks.bin")
    return path


def states_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Every tensor in the optimizer's state, in order."""
    return [
        value
        for group in optimizer.param_groups
        for p in group["params"]
        for value in optimizer.state.get(p, {}).values()
        if isinstance(value, torch.Tensor)
    ]


def assert_same(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    other: nn.Module,
    other_optimizer: torch.optim.Optimizer,
) -> None:
    """Every parameter, gradient and state has the same bits."""
    pairs = zip(model.named_parameters(), other.parameters(), strict=True)
    for (name, a), b in pairs:
        assert torch.equal(a.detach(), b.detach()), name
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None and b.grad is not None:
            assert torch.equal(a.grad, b.grad), name
    for a, b in zip(states_of(optimizer), states_of(other_optimizer), strict=True):
        assert torch.equal(a, b)


def assert_ordinary(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Nothing of zeepo is left on the user's objects."""
    for name, p in model.named_parameters():
        assert type(p) is nn.Parameter, name
        assert not any(key.startswith("_zeepo") for key in p.__dict__), name
        assert not p._post_accumulate_grad_hooks, name
        if p.grad is not None:
            assert type(p.grad) is torch.Tensor, name
    assert all(type(value) is torch.Tensor for value in states_of(optimizer))
    assert "step" not in optimizer.__dict__
    assert all(not module._forward_hooks for module in model.modules())


def touch_everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Read every byte: what has no memory crashes here."""
    total = 0.0
    for p in model.parameters():
        total += float(p.detach().sum()) + p.detach().clone().numpy().sum()
        if p.grad is not None:
            total += float(p.grad.sum())
    return total + sum(float(state.sum()) for state in states_of(optimizer))


def run_program(
    source: str, *arguments: object, timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run Python source in a process of its own, from the repository."""
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "src")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONFAULTHANDLER": "1"}
    return subprocess.run(
        [sys.executable, "-c", source, *map(str, arguments)],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
