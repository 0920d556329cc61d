"""What users do with gradients between backward and step, as ranks."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeepo
from tests.dist.training import batch, loss_of
from tests.dist.under import backward, make, under, values


def norms_after_changes(stage: int | None, disk: str | None) -> list[float]:
    """A norm, a change, and again a norm: of what is there now."""
    model, optimizer = make()
    seen = []
    with under(stage, disk, model, optimizer):
        for step in range(2):
            backward(model, step)
            weight = model.layers[0].weight
            seen.append(torch.linalg.vector_norm(weight.grad).item())
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.add_(1.0)
            model.unused.weight.grad = torch.full((7, 29), 0.5)
            seen.append(torch.linalg.vector_norm(weight.grad).item())
            seen.append(torch.linalg.vector_norm(model.unused.weight.grad).item())
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
            optimizer.step()
            optimizer.zero_grad()
    return seen


def read_while_others_change(stage: int | None, disk: str | None) -> dict[str, bytes]:
    """One rank is late to read its gradients; the others clip or clear theirs meanwhile."""
    model, optimizer = make()
    rank = dist.get_rank()
    with under(stage, disk, model, optimizer):
        for step in range(4):
            backward(model, step)
            if rank == step % 2:
                time.sleep(0.1)
            _read_gradients(model)
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            if rank != step % 2:
                time.sleep(0.1)
                _read_gradients(model)
            optimizer.zero_grad(set_to_none=False)
    return values(model, [optimizer])


def _read_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            assert torch.isfinite(p.grad).all()


def norm_on_one_rank(stage: int | None, disk: str | None) -> list[float]:
    """One rank writes norms into its log; they are those that clipping sees."""
    model, optimizer = make()
    seen = []
    with under(stage, disk, model, optimizer):
        for step in range(2):
            backward(model, step)
            if dist.get_rank() == 1:
                alone = [p.grad.norm().item() for p in model.layers.parameters()]
            together = [torch.linalg.vector_norm(p.grad).item() for p in model.layers.parameters()]
            if dist.get_rank() == 1:
                assert alone == together
            seen += together
            optimizer.step()
            optimizer.zero_grad()
    return seen


def hold_addresses(stage: int | None, disk: str | None) -> list[bytes]:
    """Numpy arrays of a gradient and a parameter see every change."""
    model, optimizer = make()
    weight = model.layers[2].weight
    seen = []
    with under(stage, disk, model, optimizer):
        parameter = weight.detach().numpy()
        for step in range(2):
            backward(model, step)
            gradient = weight.grad.numpy()
            seen.append(gradient.tobytes())
            backward(model, 10 + step)
            seen.append(gradient.tobytes())
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            seen.append(gradient.tobytes())
            optimizer.step()
            seen.append(parameter.tobytes())
            optimizer.zero_grad()
    return [*seen, parameter.tobytes()]


def unscaled_by_the_step(stage: int | None, disk: str | None) -> list[Any]:
    """A fused optimizer unscales in its step; gradients are read before and after it."""
    model, optimizer = make(fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    seen: list[Any] = []
    with under(stage, disk, model, optimizer):
        for step in range(3):
            scaler.scale(loss_of(model, batch(step, dist.get_rank()))).backward()
            seen.append([p.grad.tolist() for p in model.layers.parameters()])
            scaler.step(optimizer)
            scaler.update()
            seen.append([p.grad.tolist() for p in model.layers.parameters()])
            optimizer.zero_grad()
    return [*seen, values(model, [optimizer])]


def told_by_events(path: str) -> dict[str, Any]:
    """Two steps; what this rank's statistics are at their end."""
    model, optimizer = make()
    with under(3, None, model, optimizer, events=path) as session:
        assert session is not None
        for step in range(2):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        return dict(session.stats())


def differing(how: str) -> str:
    """Ranks that do not do the same: what they are told."""
    model, optimizer = make()
    other = torch.optim.SGD([model.unused.bias], lr=1e-2)
    rank = dist.get_rank()
    session = zeepo.init(model, [optimizer, other], stage=1)
    backward(model, 0)
    message = ""
    try:
        DIFFERENCES[how](model, optimizer, rank)
        (other if how == "optimizer" and rank else optimizer).step()
    except zeepo.RankError as error:
        message = str(error)
    dist.barrier()
    session.close()
    return message


def _clip(model: nn.Module, optimizer: Any, rank: int) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.01 * (rank + 1))


def _learn_faster(model: nn.Module, optimizer: Any, rank: int) -> None:
    optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)


def _forget_a_gradient(model: nn.Module, optimizer: Any, rank: int) -> None:
    if rank:
        next(model.parameters()).grad = None


DIFFERENCES: dict[str, Any] = {
    "clip": _clip,
    "lr": _learn_faster,
    "gradients": _forget_a_gradient,
    "optimizer": lambda *_: None,
}
