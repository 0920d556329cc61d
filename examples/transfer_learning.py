"""Transfer learning: a frozen backbone and a new head, in plain PyTorch and under zeepo.

    python examples/transfer_learning.py

A small convolutional network learns the handwritten digits 0 to 4 (scikit-learn's 8 x 8 images).
Then it is frozen and only a new last layer learns 5 to 9, from few examples. What is frozen has no
gradients and no optimizer state, under zeepo as in plain PyTorch.
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import zeepo


def load_digit_images() -> tuple[Tensor, Tensor]:
    pixels, digits = load_digits(return_X_y=True)
    return torch.tensor(pixels).float().view(-1, 1, 8, 8) / 16, torch.tensor(digits)


def make_backbone(channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    )  # fmt: skip


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, epochs: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(32):
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args(arguments)

    x, y = load_digit_images()
    low = y < 5
    torch.manual_seed(0)
    pretrained = nn.Sequential(make_backbone(args.channels), nn.Linear(4 * args.channels, 5))
    optimizer = torch.optim.AdamW(pretrained.parameters(), lr=2e-3)
    train(pretrained, optimizer, x[low], y[low], args.epochs)
    print(f"backbone trained on 0 to 4: {accuracy(pretrained, x[low], y[low]):.1%} right")

    # The new task: 5 to 9, learnt from 200 images, tested on the others.
    x, y = x[~low], y[~low] - 5
    model = nn.Sequential(pretrained[0].requires_grad_(False), nn.Linear(4 * args.channels, 5))
    print(f"new head on 5 to 9, untrained:  {accuracy(model, x[200:], y[200:]):.1%} right")
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    train(plain, optimizer, x[:200], y[:200], args.epochs)
    print(f"trained by plain PyTorch:       {accuracy(plain, x[200:], y[200:]):.1%} right")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # the frozen ones too: harmless
    with zeepo.init(model, optimizer) as session:
        train(model, optimizer, x[:200], y[:200], args.epochs)
        print(f"trained under zeepo:            {accuracy(model, x[200:], y[200:]):.1%} right\n")
        held = session.stats().bytes_by_tag
        with_state = [name for name, p in model.named_parameters() if p in optimizer.state]
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    is_equal = all(torch.equal(p, q) for p, q in pairs)
    print(f"parameters equal to plain PyTorch's bit for bit: {'yes' if is_equal else 'NO'}")
    for name, part in (("backbone", model[0]), ("head", model[1])):
        print(f"{name} has {sum(p.nbytes for p in part.parameters()):,} bytes of parameters")
    print(f"zeepo held {held['params']:,} bytes of parameters at the end,")
    print(f"           {held['optimizer state']:,} bytes of optimizer state, of {with_state}")


if __name__ == "__main__":
    main()
