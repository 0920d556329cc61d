"""What the launchers here start: a small model, trained by as many ranks as there are.

Every rank trains on batches of its own. Rank 0 prints the mean loss of all ranks, step by step.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import zeepo


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer; the values are rank 0's on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """The loss on a rank's batch of this step."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 32, generator=random)
    return (model(x) - x.roll(1, 1)).square().mean()


def train(num_steps: int) -> list[float]:
    """Train under zeepo and return the mean losses of all ranks."""
    model, optimizer = build()
    losses = []
    with zeepo.init(model, optimizer, stage=3):  # joins the other ranks, if there are any
        rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        for step in range(num_steps):
            loss = loss_of(model, step, rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach() / num_ranks
            if num_ranks > 1:
                dist.all_reduce(mean)
            losses.append(mean.item())
    return losses


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    losses = train(parser.parse_args().steps)
    if int(os.environ.get("RANK", 0)) == 0:
        num_ranks = os.environ.get("WORLD_SIZE", "1")
        for step, loss in enumerate(losses):
            print(f"step {step}, {num_ranks} ranks, loss {loss!r}")


if __name__ == "__main__":
    main()
