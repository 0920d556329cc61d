"""Optimizer state that ranks share: read early, of several optimizers, loaded again."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeepo
from tests.dist.training import Net
from tests.dist.under import backward, make, under, values


def sums(optimizer: torch.optim.Optimizer, name: str) -> list[float]:
    return [state[name].double().sum().item() for state in optimizer.state_dict()["state"].values()]


def state_before_the_first_step(
    stage: int | None, disk: str | None, kind: str
) -> tuple[list[float], dict[str, bytes]]:
    """Adagrad makes its state when it is made; other state comes from a step before init."""
    model, optimizer = make(torch.optim.Adagrad if kind == "adagrad" else torch.optim.AdamW)
    if kind == "stepped":
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()
    with under(stage, disk, model, optimizer):
        seen = sums(optimizer, "sum" if kind == "adagrad" else "exp_avg")
        for step in range(2):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    return seen, values(model, [optimizer])


def two_optimizers_of_one_chunk(
    stage: int | None, disk: str | None
) -> tuple[list[float], dict[str, bytes]]:
    """Weights and biases of the same modules: the state of one is read after the other's step."""
    torch.manual_seed(0)
    model = Net()
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    first = torch.optim.AdamW([p for n, p in named if "weight" in n], lr=1e-2)
    second = torch.optim.SGD([p for n, p in named if "bias" in n], lr=1e-2, momentum=0.9)
    seen = []
    with under(stage, disk, model, [first, second]):
        for step in range(2):
            backward(model, step)
            first.step()
            second.step()
            if dist.get_rank() == step:
                sums(first, "exp_avg")
            seen += sums(first, "exp_avg")
            first.zero_grad()
            second.zero_grad()
    return seen, values(model, [first, second])


def state_on_one_rank_only() -> str:
    """A checkpoint was loaded on rank 0 alone."""
    model, optimizer = make()
    if dist.get_rank() == 0:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()
    try:
        zeepo.init(model, optimizer, stage=1)
    except zeepo.RankError as error:
        return str(error)
    return ""


class Odd(nn.Module):
    """Parameters of no, one and few elements: fewer than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.one = nn.Parameter(torch.ones(1))
        self.slope = nn.PReLU()
        self.empty = nn.Module()
        self.empty.weight = nn.Parameter(torch.zeros(0))
        self.last = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        none = self.nothing.sum() + self.empty.weight.sum()
        return self.last(self.slope(self.first(x)) * self.gain + self.one + none)


def tiny_parameters(stage: int | None, disk: str | None, kind: str) -> dict[str, bytes]:
    """In two groups, with everything loaded again in the middle."""
    torch.manual_seed(0)
    model = Odd()
    few = [model.gain, model.one, model.nothing]
    rest = [p for p in model.parameters() if all(p is not q for q in few)]
    groups: list[dict[str, Any]] = [{"params": few, "lr": 0.1}, {"params": rest}]
    if kind.startswith("zeepo"):
        optimizer = zeepo.optim.AdamW(groups, lr=0.01, state_dtype=kind.split(".")[1])
    else:
        optimizer = getattr(torch.optim, kind)(groups, lr=0.01)
    with under(stage, disk, model, optimizer):
        for step in range(4):
            random = torch.Generator().manual_seed(10 * step + dist.get_rank())
            model(torch.randn(4, 5, generator=random)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    return values(model, [optimizer])


def other_model(stage: int) -> str:
    """Rank 1 builds one layer more."""
    sizes = [nn.Linear(4, 4) for _ in range(2 + dist.get_rank())]
    model = nn.Sequential(*sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        zeepo.init(model, optimizer, stage=stage)
    except zeepo.RankError as error:
        return str(error)
    return "accepted"
