"""One small program as ranks, under zeepo or plainly with every backward averaged by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeepo
from tests.dist.programs import averaging_by_hand
from tests.dist.training import Net, batch, loss_of
from zeepo.engine.tuning import tuned


@contextmanager
def under(
    stage: int | None, disk: str | None, model: nn.Module, optimizers: Any, **options: Any
) -> Iterator[zeepo.Session | None]:
    """A session of this stage, at the least ram if there is a disk; none without a stage."""
    if stage is None:
        with averaging_by_hand(model):
            yield None
        return
    with tuned(estimate=False, least_ram=disk is not None, piece_bytes=1 << 10):
        session = zeepo.init(model, optimizers, stage=stage, disk=disk, **options)
    yield session
    session.close()


def make(kind: Any = torch.optim.AdamW, **options: Any) -> tuple[Net, Any]:
    """The same model on every rank, and its optimizer."""
    torch.manual_seed(0)
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, kind(trained, lr=1e-2, **options)


def backward(model: nn.Module, step: int) -> None:
    """Every rank with its own batch."""
    loss_of(model, batch(step, dist.get_rank())).backward()


def values(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> dict[str, bytes]:
    """Everything that training left, after the session."""
    found = {name: p.detach().numpy().tobytes() for name, p in model.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                flat = torch.as_tensor(value).reshape(-1).view(torch.uint8)
                found[f"{number}.{index}.{name}"] = flat.numpy().tobytes()
    return found
