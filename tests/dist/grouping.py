"""The same training with its parameters in few or in many units: what moves together between ranks
has another size, and nothing else is different."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import zeepo
from zeepo.engine.tuning import tuned

NUM_WEIGHTS = 12
WIDTH = 23


class Group(nn.Module):
    """Several layers whose weights belong to one module, and so to one unit."""

    def __init__(self, weights: list[torch.Tensor]):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(weight) for weight in weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


def in_groups(stage: int, disk: str | None, group_size: int, clip: bool) -> dict[str, object]:
    random = torch.Generator().manual_seed(5)
    weights = [torch.randn(WIDTH, WIDTH, generator=random) / 4 for _ in range(NUM_WEIGHTS)]
    groups = [weights[i : i + group_size] for i in range(0, NUM_WEIGHTS, group_size)]
    model = nn.Sequential(*(Group(group) for group in groups))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with tuned(estimate=False, least_ram=disk is not None, piece_bytes=1 << 10):
        session = zeepo.init(model, optimizer, stage=stage, disk=disk)
    seen = []
    for step in range(4):
        rows = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(rows * (1 + dist.get_rank())).square().mean()
        loss.backward()
        if clip:
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01).item())
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    stats = session.stats()
    num_units = session.plan.num_units
    session.close()
    values = [p.detach().numpy().tobytes() for p in model.parameters()]
    sent = sum(stats.bytes_sent.values())
    return {"seen": seen, "values": values, "sent": sent, "num_units": num_units}
