"""Small training programs that run as ranks, plainly under DDP and under zeepo."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeepo
from zeepo.engine.tuning import tuned


class Net(nn.Module):
    """Odd sizes, a tied weight, a frozen layer and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 29)
        self.layers = nn.ModuleList(nn.Linear(29, 29) for _ in range(4))
        self.norm = nn.LayerNorm(29)
        self.frozen = nn.Linear(29, 29).requires_grad_(False)
        self.unused = nn.Linear(29, 7)
        self.head = nn.Linear(29, 37, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = h + torch.tanh(layer(self.frozen(h)))
        return self.head(self.norm(h))


def batch(step: int, rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 37, (3, 11), generator=random)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x[:, :-1])
    return nn.functional.cross_entropy(out.flatten(0, 1), x[:, 1:].flatten())


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2, fused=True)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sync: Any,
    steps: int = 4,
    clip: float | None = None,
    micro: int = 1,
) -> list[Any]:
    """Losses, and norms when clipping."""
    seen = []
    for step in range(steps):
        for part in range(micro - 1):
            with sync():
                loss = loss_of(model, batch(100 * part + step, dist.get_rank()))
                loss.backward()
                seen.append(loss.item())
        loss = loss_of(model, batch(step, dist.get_rank()))
        loss.backward()
        seen.append(loss.item())
        if clip is not None:
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
    return seen


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    values = {name: p.detach().numpy().tobytes() for name, p in model.named_parameters()}
    for number, state in enumerate(optimizer.state_dict()["state"].values()):
        for name, value in state.items():
            values[f"{number}.{name}"] = torch.as_tensor(value).numpy().tobytes()
    return values


def under_ddp(**options: Any) -> dict[str, Any]:
    model, optimizer = make(0)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    seen = train(wrapped, optimizer, wrapped.no_sync, **options)
    return {"seen": seen, "values": digest(model, optimizer)}


def under_zeepo(stage: int, disk: str | None, placement: dict[str, str], **options: Any) -> Any:
    model, optimizer = make(dist.get_rank())  # rank 0's values count
    ram = None
    with tuned(estimate=False, least_ram=disk is not None, piece_bytes=1 << 10):
        session = zeepo.init(model, optimizer, stage=stage, ram=ram, disk=disk, **placement)
    seen = train(model, optimizer, session.no_sync, **options)
    stats = session.stats()
    session.close()
    return {"seen": seen, "values": digest(model, optimizer), "stats": dict(stats)}


def with_unequal_ram(stage: int) -> dict[str, Any]:
    """Rank 0 has three times the memory of the others."""
    model, optimizer = make(dist.get_rank())
    ram = "900MiB" if dist.get_rank() == 0 else "300MiB"
    with tuned(estimate=False, piece_bytes=1 << 10):
        session = zeepo.init(model, optimizer, stage=stage, ram=ram)
    seen = train(model, optimizer, session.no_sync)
    held = session.stats().bytes_by_tag["optimizer state"]
    text = session.plan.explain()
    session.close()
    values = digest(model, optimizer)
    return {"seen": seen, "values": values, "held": held, "text": text}


def change_by_hand(
    model: nn.Module, inner: nn.Module, optimizer: torch.optim.Optimizer, gathered: Any
) -> None:
    """Gradients and parameters are changed by the user's code, the same way on every rank."""
    for step in range(3):
        loss_of(model, batch(step, dist.get_rank())).backward()
        for p in inner.parameters():
            if p.grad is not None:
                p.grad.add_(p.detach(), alpha=0.1)
        nn.utils.clip_grad_value_(inner.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)
        with torch.no_grad(), gathered(inner.layers[1]):
            inner.layers[1].weight.mul_(0.9)
        if dist.get_rank() == 0:
            inner.embed.weight.norm().item()


def with_own_changes(stage: int, disk: str | None) -> dict[str, Any]:
    model, optimizer = make(dist.get_rank())
    with tuned(estimate=False, least_ram=disk is not None, piece_bytes=1 << 10):
        session = zeepo.init(model, optimizer, stage=stage, disk=disk)
    change_by_hand(model, model, optimizer, session.gathered)
    session.close()
    return {"values": digest(model, optimizer)}


def with_own_changes_plainly() -> dict[str, Any]:
    model, optimizer = make(0)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    change_by_hand(wrapped, model, optimizer, contextlib.nullcontext)
    return {"values": digest(model, optimizer)}


def with_different_changes() -> str:
    """Each rank writes other values: refused by name."""
    model, optimizer = make(0)
    session = zeepo.init(model, optimizer, stage=3)
    message = ""
    try:
        with torch.no_grad():
            model.layers[2].weight.fill_(float(dist.get_rank()))
    except zeepo.RankError as error:
        message = str(error)
    dist.barrier()
    session.close()
    return message


def rows(step: int, rank: int, count: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(500 * step + rank)
    return torch.randint(0, 37, (count, 11), generator=random)


def on_uneven_batches(stage: int, disk: str | None, counts: list[int]) -> dict[str, Any]:
    """Each rank has another number of rows in its batch."""
    model, optimizer = make(0)
    rank = dist.get_rank()
    with tuned(estimate=False, least_ram=disk is not None, piece_bytes=1 << 10):
        session = zeepo.init(model, optimizer, stage=stage, disk=disk)
    for step in range(3):
        loss_of(model, rows(step, rank, counts[rank])).backward()
        optimizer.step()
        optimizer.zero_grad()
    session.close()
    return {"values": digest(model, optimizer)}


def on_one_batch(counts: list[int]) -> dict[str, bytes]:
    """One process: every rank's gradients, weighted and added in the order of the ranks."""
    model, optimizer = make(0)
    for step in range(3):
        totals: dict[nn.Parameter, torch.Tensor] = {}
        for rank, count in enumerate(counts):
            optimizer.zero_grad()
            loss_of(model, rows(step, rank, count)).backward()
            for p in model.parameters():
                if p.grad is not None:
                    part = p.grad * (count / sum(counts))
                    totals[p] = totals[p] + part if p in totals else part
        for p in model.parameters():
            p.grad = totals.get(p)
        optimizer.step()
    return digest(model, optimizer)


def set_gradients(model: nn.Module, inner: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """`p.grad = ...`: a gradient is replaced, one is taken away, one is given to a parameter that
    had none."""
    for step in range(3):
        loss_of(model, batch(step, dist.get_rank())).backward()
        grad = inner.layers[0].weight.grad
        assert grad is not None
        inner.layers[0].weight.grad = grad * 2.0 + 0.25
        inner.layers[1].weight.grad = None
        inner.unused.weight.grad = torch.full((7, 29), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)


def with_set_gradients(stage: int | None, disk: str | None) -> dict[str, Any]:
    """Under zeepo, or without a stage under DDP."""
    model, optimizer = make(0)
    if stage is None:
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        set_gradients(wrapped, model, optimizer)
    else:
        with tuned(estimate=False, least_ram=disk is not None, piece_bytes=1 << 10):
            session = zeepo.init(model, optimizer, stage=stage, disk=disk)
        set_gradients(model, model, optimizer)
        session.close()
    return {"values": digest(model, optimizer)}


def step_without_sync() -> str:
    """The gradients of `no_sync` are each rank's own."""
    model, optimizer = make(0)
    session = zeepo.init(model, optimizer, stage=3)
    with session.no_sync():
        loss_of(model, batch(0, dist.get_rank())).backward()
    message = ""
    try:
        optimizer.step()
    except zeepo.RankError as error:
        message = str(error)
    optimizer.zero_grad()
    session.close()
    return message
