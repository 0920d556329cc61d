"""Values that users change by hand, and parameters that come late, as ranks."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import zeepo
from tests.dist.training import batch, loss_of
from tests.dist.under import backward, make, under, values
from zeepo.engine.ranks import Ranks as RanksOfSession
from zeepo.engine.sharded import Sharded


def written_by_numpy(stage: int | None, disk: str | None) -> dict[str, bytes]:
    """Parameters and gradients are changed through arrays that live, or not, until the step."""
    model, optimizer = make()
    held = []
    with under(stage, disk, model, optimizer):
        for step in range(3):
            for layer in model.layers:
                layer.weight.detach().numpy()[:] *= 0.9
            backward(model, step)
            model.layers[0].weight.grad.numpy()[:] *= 0.5
            gradient = model.layers[1].weight.grad.numpy()
            gradient *= 2.0
            backward(model, 10 + step)
            gradient *= 0.5
            held.append(model.layers[2].weight.detach().numpy())
            held[-1][0] = 0.25
            optimizer.step()
            optimizer.zero_grad()
    del held
    return values(model, [optimizer])


def swapped_on_one_rank(stage: int | None, disk: str | None) -> dict[str, bytes]:
    """One rank tries other weights between steps, and puts its own back."""
    model, optimizer = make()
    with under(stage, disk, model, optimizer):
        for step in range(2):
            backward(model, step)
            if dist.get_rank() == 1:
                with torch.no_grad():
                    before = model.norm.weight.clone()
                    model.norm.weight.zero_()
                    model.norm.weight.copy_(before)
            optimizer.step()
            optimizer.zero_grad()
    return values(model, [optimizer])


def changed_right_after_the_step(stage: int | None, disk: str | None) -> dict[str, bytes]:
    """Rank 0 goes on while rank 1 still takes what rank 0 has updated."""
    model, optimizer = make()
    exchange = RanksOfSession.exchange

    def exchange_late(self: RanksOfSession, sharded: Sharded) -> None:
        time.sleep(0.1 * self.rank)
        exchange(self, sharded)

    with under(stage, disk, model, optimizer), patch.object(
        RanksOfSession, "exchange", exchange_late
    ):
        for step in range(2):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for p in reversed(list(model.parameters())):
                    p.mul_(0.9)
    return values(model, [optimizer])


def left_different(stage: int) -> str:
    """Each rank writes other values into the block of gathered."""
    model, optimizer = make()
    message = ""
    session = zeepo.init(model, optimizer, stage=stage)
    try:
        with torch.no_grad(), session.gathered(model.layers[2]):
            model.layers[2].weight.fill_(float(dist.get_rank()))
        backward(model, 0)
        optimizer.step()
    except zeepo.RankError as error:
        message = str(error)
    dist.barrier()
    session.close()
    return message


def late_parameters(stage: int | None, disk: str | None) -> dict[str, bytes]:
    """A layer that comes after init, with a gradient before its step."""
    model, optimizer = make()
    with under(stage, disk, model, optimizer):
        for step in range(3):
            if step == 1:
                torch.manual_seed(7)
                model.extra = nn.Linear(29, 30)
                optimizer.add_param_group({"params": list(model.extra.parameters())})
            loss = loss_of(model, batch(step, dist.get_rank()))
            if step:
                loss = loss + model.extra(model.norm.weight * (1 + dist.get_rank())).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return values(model, [optimizer])


def closed_without_sync(stage: int | None, disk: str | None) -> dict[str, Any]:
    """What `no_sync` piled up is there after the session."""
    model, optimizer = make()
    if stage is None:
        backward(model, 0)
    else:
        with under(stage, disk, model, optimizer) as session:
            assert session is not None
            with session.no_sync():
                backward(model, 0)
    return {n: None if p.grad is None else p.grad.tolist() for n, p in model.named_parameters()}


def unreducible(kind: str) -> str:
    """Gradients that would stay this rank's own."""
    model: nn.Module = nn.Sequential(nn.Embedding(37, 8, sparse=kind == "sparse"), nn.Linear(8, 37))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = zeepo.init(model, optimizer, stage=3)
    message = ""
    try:
        loss_of(model, batch(0, 0)).backward(create_graph=kind == "graph")
    except zeepo.UnsupportedError as error:
        message = str(error)
    for p in model.parameters():
        p.grad = None
    dist.barrier()
    session.close()
    return message


def two_backwards_of_uneven_batches(stage: int, disk: str | None) -> bool:
    """Weighted by samples both times, whatever was evaluated before; whether it is so."""
    counts = [3, 5]
    rank = dist.get_rank()

    def loss_on(model: nn.Module, who: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(who)
        return loss_of(model, torch.randint(0, 37, (counts[who], 11), generator=random))

    plain, _ = make()
    expected: list[torch.Tensor] = []
    for who, count in enumerate(counts):
        grads = torch.autograd.grad(loss_on(plain, who), list(plain.layers.parameters()))
        parts = [grad * (count / sum(counts)) for grad in grads]
        expected = [a + b for a, b in zip(expected, parts, strict=True)] if expected else parts
    model, optimizer = make()
    with under(stage, disk, model, optimizer):
        if rank:
            loss_of(model, batch(1, 0))  # gradients are enabled, but no backward follows
        loss = loss_on(model, rank)
        loss.backward(retain_graph=True)
        loss.backward()
        pairs = zip(model.layers.parameters(), expected, strict=True)
        return all(torch.equal(p.grad, grad + grad) for p, grad in pairs)


def read_by_one_rank(stage: int | None, disk: str | None) -> tuple[float, dict[str, bytes]]:
    """Rank 0 alone reads slices and exports; nobody waits for a change."""
    model, optimizer = make()
    seen = 0.0
    with under(stage, disk, model, optimizer) as session:
        for step in range(2):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                seen += sum(p[:2].double().sum().item() for p in model.parameters())
                if session is not None and disk is not None:
                    session.export(f"{disk}/exported{step}.safetensors")
        with torch.no_grad():  # a write by index is a change still
            for p in model.parameters():
                p[:1] += 0.5
    return seen, values(model, [optimizer])
