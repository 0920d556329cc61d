"""ZeRO in a few lines of torch.distributed, checked against zeepo.

    torchrun --nproc-per-node 2 examples/simple_zero.py

Every rank keeps one part of the parameters and the optimizer's state of that part. For a step, the
ranks gather the whole model, compute gradients on their own data, add them up so that each gets the
sum of its own part, and update that part. (Here the whole model is there during forward and
backward; zeepo gathers unit by unit, so that it never is.)
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeepo

STEPS = int(os.environ.get("STEPS", "20"))


def make_model() -> nn.Module:
    torch.manual_seed(0)  # the same values on every rank
    return nn.Sequential(
        nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64)
    )


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    """Every rank has its own data; the task is to sort 64 numbers."""
    x = torch.rand(32, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
    return nn.functional.mse_loss(model(x), x.sort().values)


def train_by_hand(rank: int, num_ranks: int) -> nn.Module:
    model = make_model()
    parameters = list(model.parameters())
    whole = nn.utils.parameters_to_vector(parameters).detach()
    padding = -len(whole) % num_ranks
    parts = nn.functional.pad(whole, (0, padding)).chunk(num_ranks)  # split: all of the same size
    own = nn.Parameter(parts[rank].clone())
    optimizer = torch.optim.AdamW([own], lr=1e-3)  # has the state of this part only
    for step in range(STEPS):
        loss_of(model, step, rank).backward()  # local gradients
        gradient = torch.cat([p.grad.flatten() for p in parameters] + [torch.zeros(padding)])
        outgoing = (gradient * (1 / num_ranks)).chunk(num_ranks)
        incoming = [torch.empty_like(own) for _ in range(num_ranks)]
        dist.all_to_all(incoming, list(outgoing))  # rank i gets everybody's gradient of part i
        own.grad = sum(incoming[1:], start=incoming[0])  # aggregate, in the order of the ranks
        optimizer.step()  # update the own part
        dist.all_gather(incoming, own.detach())  # gather
        nn.utils.vector_to_parameters(torch.cat(incoming), parameters)
        model.zero_grad()
    return model


def train_with_zeepo(rank: int) -> nn.Module:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with zeepo.init(model, optimizer, stage=3):
        for step in range(STEPS):
            loss = loss_of(model, step, rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and step % 5 == 0:
                print(f"step {step:2}  loss {loss.item():.4f}")
    return model


dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
by_hand, with_zeepo = train_by_hand(rank, num_ranks), train_with_zeepo(rank)
pairs = list(zip(by_hand.parameters(), with_zeepo.parameters(), strict=True))
equal = "equal bit for bit" if all(torch.equal(p, q) for p, q in pairs) else "not the same bits"
furthest = max((p - q).abs().max().item() for p, q in pairs)
print(f"rank {rank}: by hand and with zeepo: {equal} (largest difference {furthest:.1e})\n", end="")
dist.destroy_process_group()
