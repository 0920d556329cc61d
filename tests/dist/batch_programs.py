"""Ranks that train on the same batches, or on their own."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeepo
from zeepo.engine.tuning import tuned


class Sized(nn.Module):
    """Makes its own data when it is given a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor | int) -> torch.Tensor:
        out: torch.Tensor = self.layer(x if isinstance(x, torch.Tensor) else torch.ones(x, 5))
        return out


def batches_of(kind: str) -> list[Any]:
    rank = dist.get_rank()
    random = torch.Generator().manual_seed(0)
    same = [torch.randn(4, 5, generator=random) for _ in range(3)]
    if kind == "same":
        return same
    if kind == "own":
        return [batch + rank for batch in same]
    if kind == "same later":
        return [same[0] + rank, *same[1:]]
    if kind == "other in its last element":
        same[0][-1, -1] += rank
        return same
    if kind == "no tensors":
        return [4, 4, 4]
    assert kind == "tensors on one rank"
    return same if rank else [4, 4, 4]


def said(kind: str, is_late: bool = False, num_local: int = 0, **options: Any) -> list[str]:
    """The lines on stderr of three steps, some of them with backwards under no_sync."""
    torch.manual_seed(0)
    model = Sized()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    written = io.StringIO()
    with contextlib.redirect_stderr(written), tuned(estimate=False):
        what = () if is_late else (model, optimizer)
        session = zeepo.init(*what, stage=3, **options)
        for batch in batches_of(kind):
            for _ in range(num_local):
                with session.no_sync():
                    model(batch).square().mean().backward()
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.close()
    return written.getvalue().splitlines()
