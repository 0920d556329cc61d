"""Models of blocks, in which recomputing is not just computing: random numbers, statistics."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn

from .harness import Observations, Start, case
from .models import (
    HIDDEN,
    INPUTS,
    OUTPUTS,
    WIDTH,
    Block,
    LanguageModel,
    images,
    train,
    train_language,
)


class Stochastic(Block):
    """Drops its inner layers by Python's generator and its activations by torch's."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block, sometimes with one more layer."""
        if random.random() < 0.5:
            x = self.extra(self.dropout(x)).sin()
        return super().forward(self.dropout(x))


@case("blocks_with_random_numbers")
def blocks_with_random_numbers(start: Start) -> Observations:
    """Dropout, and layer drop inside the blocks."""
    model = LanguageModel(depth=0)
    model.blocks.extend(Stochastic() for _ in range(5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        yield from train_language(model, optimizer, range(6))


class Bottleneck(nn.Module):
    """Three convolutions with BatchNorm, as in a ResNet; the ReLUs work in place."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner, momentum=None)
        self.conv3, self.bn3 = nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the bottleneck to its input."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x
        return self.relu(out)


@case("bottlenecks", placements=("disk",))  # too small to leave ram in part
def bottlenecks(start: Start) -> Observations:
    """A small ResNet; its statistics are used between the steps."""
    stages = [nn.Sequential(*(Bottleneck(13, 9) for _ in range(count))) for count in (1, 3)]
    model = nn.Sequential(nn.Conv2d(3, 13, 3), nn.BatchNorm2d(13), nn.ReLU(inplace=True), *stages)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(13, OUTPUTS))
    model.extend(head)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    with start(model, optimizer):
        for step in range(6):
            model.train()
            loss = model(images(step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss
            model.eval()
            with torch.no_grad():
                yield "eval", model(images(100 + step))


@case("deep_sequential")
def deep_sequential(start: Start) -> Observations:
    """Nothing but layers one after the other."""
    layers: list[nn.Module] = [nn.Linear(INPUTS, HIDDEN)]
    for _ in range(15):
        layers += [nn.Linear(HIDDEN, HIDDEN), nn.ReLU(inplace=True), nn.Dropout(0.1)]
    model = nn.Sequential(*layers, nn.Linear(HIDDEN, OUTPUTS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with start(model, optimizer):
        yield from train(model, optimizer, range(6))


class Shared(LanguageModel):
    """Runs every block twice, the second time on what came out of all of them."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss after two rounds."""
        hidden = self.embed(x) + self.position[: x.shape[1]]
        for _ in range(2):
            for block in self.blocks:
                hidden = block(hidden)
        return F.cross_entropy(self.logits(hidden).flatten(0, 1), targets.flatten())


@case("blocks_run_twice")
def blocks_run_twice(start: Start) -> Observations:
    """Each block twice in a forward, with a tied head, and two forwards for one backward."""
    model = Shared(head="tied", dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        yield from train_language(model, optimizer, range(6))
