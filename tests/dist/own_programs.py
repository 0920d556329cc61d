"""zeepo's own optimizers as ranks: each updates blocks of its own range."""

from __future__ import annotations

import torch
import torch.distributed as dist

import zeepo
from tests.dist.under import backward, make, under, values


def train_own(
    stage: int | None, disk: str | None, kind: str, state_dtype: str
) -> tuple[list[float], dict[str, bytes]]:
    """Clipped in some steps, with a state read by one rank in the middle."""
    model, optimizer = make(getattr(zeepo.optim, kind), state_dtype=state_dtype)
    name = {"SGD": "momentum_buffer"}.get(kind, "exp_avg")
    for group in optimizer.param_groups:
        group["momentum"] = 0.9
    seen = []
    with under(stage, disk, model, optimizer):
        for step in range(4):
            backward(model, step)
            optimizer.clip_factor = 0.3 if step % 2 else None
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == step % 2:
                state = optimizer.state[model.layers[1].weight][name]
                seen.append(state.view(torch.uint8).double().sum().item())
    return seen, values(model, [optimizer])


def other_clip_factors(stage: int) -> str:
    """Each rank clips by its own number."""
    model, optimizer = make(zeepo.optim.AdamW)
    with under(stage, None, model, optimizer):
        backward(model, 0)
        optimizer.clip_factor = 0.5 + dist.get_rank()
        try:
            optimizer.step()
        except zeepo.RankError as error:
            return str(error)
    return ""
