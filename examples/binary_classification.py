"""The idea behind ZeRO by hand, in one process, and the same training under zeepo.

    python examples/binary_classification.py

A network learns to tell benign from malignant tumours (scikit-learn's breast cancer data). Data and
parameters are cut into ten parts, as if ten owners trained together: each computes gradients on its
own data, the gradients are merged, and each updates its own tenth of the parameters, so it needs
the optimizer's state of that tenth only. Plain PyTorch and zeepo train the same network beside it.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn

import zeepo

PARTS = 10
LEARNING_RATE = 1e-3
Batches = list[tuple[Tensor, Tensor]]


def load_data() -> tuple[Tensor, Tensor]:
    """569 tumours: 30 measures of each, and whether it is benign; in random order."""
    measures, benign = load_breast_cancer(return_X_y=True)
    x, y = torch.tensor(measures).float(), torch.tensor(benign).float()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return ((x - x.mean(0)) / x.std(0))[order], y[order]


def make_model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(30, width), nn.ReLU(), *hidden, nn.Linear(width, 1))


def loss_of(model: nn.Module, x: Tensor, y: Tensor, num_parts: int) -> Tensor:
    """This part's share of the loss."""
    return F.binary_cross_entropy_with_logits(model(x).squeeze(1), y) / num_parts


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Batches, steps: int) -> None:
    """The ordinary loop: gradients of all batches add up in `p.grad`, then one step."""
    for _ in range(steps):
        for x, y in data:
            loss_of(model, x, y, len(data)).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_by_hand(model: nn.Module, data: Batches, steps: int) -> None:
    """ZeRO: what `train` does, but owner i holds part i of parameters, gradients and state."""
    parameters = list(model.parameters())
    whole = nn.utils.parameters_to_vector(parameters).detach()
    owned = [nn.Parameter(part.clone()) for part in whole.tensor_split(PARTS)]
    optimizers = [torch.optim.Adam([part], lr=LEARNING_RATE) for part in owned]
    for _ in range(steps):
        gradients = []
        for x, y in data:  # each owner, on its own data
            pieces = torch.autograd.grad(loss_of(model, x, y, len(data)), parameters)
            gradients.append(torch.cat([piece.flatten() for piece in pieces]))
        merged = sum(gradients[1:], start=gradients[0])
        for part, optimizer, gradient in zip(
            owned, optimizers, merged.tensor_split(PARTS), strict=True
        ):  # each owner, its own part
            part.grad = gradient
            optimizer.step()
        nn.utils.vector_to_parameters(torch.cat([part.detach() for part in owned]), parameters)


def train_with_zeepo(width: int, data: Batches, steps: int, ram: str, disk: str) -> nn.Module:
    """The ordinary loop again; zeepo keeps in RAM what fits and the rest on disk."""
    with zeepo.lazy(ram=ram, disk=disk):
        model = make_model(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    with zeepo.init(model, optimizer, ram=ram, disk=disk) as session:
        train(model, optimizer, data, steps)
        print(f"zeepo moved {sum(session.stats().bytes_moved.values()) / 2**20:,.0f} MiB\n")
    return model


def report(name: str, model: nn.Module, plain: nn.Module, x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        accuracy = ((model(x).squeeze(1) > 0) == (y > 0)).float().mean().item()
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    is_equal = all(torch.equal(p, q) for p, q in pairs)
    furthest = max((p - q).abs().max().item() for p, q in pairs)
    difference = "none, equal bit for bit" if is_equal else f"{furthest:.1e} at most"
    print(f"{name:32}{accuracy:9.2%}   {difference}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=1024, help="of the network's layers")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ram", default="150MiB", help="how much the process may grow by")
    parser.add_argument("--disk", default="/var/tmp", help="a folder for what does not fit")
    args = parser.parse_args()

    x, y = load_data()
    learn, test = slice(0, 450), slice(450, None)
    data = list(zip(x[learn].split(45), y[learn].split(45), strict=True))  # ten parts

    with_zeepo = train_with_zeepo(args.width, data, args.steps, args.ram, args.disk)
    plain, at_once, by_hand = (make_model(args.width) for _ in range(3))
    train(plain, torch.optim.Adam(plain.parameters(), lr=LEARNING_RATE), data, args.steps)
    optimizer = torch.optim.Adam(at_once.parameters(), lr=LEARNING_RATE)
    train(at_once, optimizer, [(x[learn], y[learn])], args.steps)
    train_by_hand(by_hand, data, args.steps)

    print(f"{sum(p.numel() for p in plain.parameters()):,} parameters, {args.steps} steps\n")
    print(f"{'':32}{'accuracy':>9}   parameters' difference from the first line")
    report("plain PyTorch, ten batches", plain, plain, x[test], y[test])
    report("plain PyTorch, all data at once", at_once, plain, x[test], y[test])
    report("by hand, ten owners", by_hand, plain, x[test], y[test])
    report(f"zeepo, ram={args.ram}", with_zeepo, plain, x[test], y[test])


if __name__ == "__main__":
    main()
