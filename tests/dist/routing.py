"""Ranks that run different modules, or a different number of them, in a step."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeepo
from zeepo.engine.tuning import tuned


class Experts(nn.Module):
    """Of several blocks a forward runs those it is told to, in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(13, 19)
        self.experts = nn.ModuleList(nn.Linear(19, 19) for _ in range(6))
        self.last = nn.Linear(19, 3)

    def forward(self, x: torch.Tensor, route: list[int]) -> torch.Tensor:
        x = self.first(x)
        for number in route:
            x = x + torch.tanh(self.experts[number](x))
        return self.last(x)


def make() -> tuple[Experts, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Experts()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def route_of(step: int, rank: int) -> list[int]:
    """None at all, one twice, or all of them: seeded by step and rank."""
    chance = random.Random(1000 * step + rank)
    return [chance.randrange(6) for _ in range(chance.randrange(8))]


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(5, 13, generator=torch.Generator().manual_seed(77 * step + rank))
    return model(x, route_of(step, rank)).square().mean()


def reference(num_ranks: int, steps: int) -> dict[str, Any]:
    """One process that computes every rank's gradients and adds them in the order of the ranks."""
    model, optimizer = make()
    losses = []
    for step in range(steps):
        totals: dict[nn.Parameter, torch.Tensor] = {}
        seen: dict[nn.Parameter, int] = {}
        of_rank = []
        for rank in range(num_ranks):
            optimizer.zero_grad()
            loss = loss_of(model, step, rank)
            loss.backward()
            of_rank.append(loss.item())
            for p in model.parameters():
                if p.grad is not None:
                    part = p.grad * (1.0 / num_ranks)
                    totals[p] = totals[p] + part if p in totals else part
                    seen[p] = seen.get(p, 0) + 1
        for p in model.parameters():
            p.grad = totals[p] + 0.0 if p in totals and seen[p] < num_ranks else totals.get(p)
        optimizer.step()
        losses.append(of_rank)
    return {"losses": losses, "values": [p.detach().numpy().tobytes() for p in model.parameters()]}


def routed(steps: int, disk: str | None, stage: int) -> dict[str, Any]:
    """The same as ranks."""
    model, optimizer = make()
    with tuned(estimate=False, least_ram=disk is not None, piece_bytes=1 << 10):
        session = zeepo.init(model, optimizer, stage=stage, disk=disk)
    losses = []
    rank = dist.get_rank()
    for step in range(steps):
        loss = loss_of(model, step, rank)
        loss.backward()
        losses.append(loss.item())
        if rank == step % 3:  # one rank alone reads whole values
            for value in model.state_dict().values():
                value.sum()
        optimizer.step()
        optimizer.zero_grad()
    stats = dict(session.stats())
    session.close()
    values = [p.detach().numpy().tobytes() for p in model.parameters()]
    return {"losses": losses, "values": values, "stats": stats}
