"""Control flow that changes from step to step, and activation checkpointing."""

from __future__ import annotations

import random
import weakref

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from .harness import Observations, Start, case
from .models import (
    HIDDEN,
    INPUTS,
    OUTPUTS,
    WIDTH,
    Block,
    LanguageModel,
    perceptron_loss,
    points,
    tokens,
    train_language,
)


class EarlyExit(LanguageModel):
    """Leaves the stack when the hidden states are small enough for this step."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor, depth: int) -> torch.Tensor:
        """The loss after the first `depth` blocks."""
        hidden = self.embed(x) + self.position[: x.shape[1]]
        for number, block in enumerate(self.blocks):
            if number >= depth:
                break
            hidden = block(hidden)
        return F.cross_entropy(self.logits(hidden).flatten(0, 1), targets.flatten())


@case("early_exit")
def early_exit(start: Start) -> Observations:
    """A different number of blocks in every step, down to none."""
    model = EarlyExit(depth=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step, depth in enumerate((5, 2, 4, 0, 1, 5, 3)):
            loss = model(*tokens(step), depth)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss


class LayerDrop(LanguageModel):
    """Skips blocks at random, by Python's generator and by torch's."""

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Call the block, or not."""
        if self.training and (random.random() < 0.25 or torch.rand(()).item() < 0.25):
            return x
        return block(x)


@case("random_layer_drop")
def random_layer_drop(start: Start) -> Observations:
    """Stochastic depth."""
    model = LayerDrop(depth=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        yield from train_language(model, optimizer, range(7))


class Experts(nn.Module):
    """A layer of experts; every row goes to the one its router likes best."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN))
            for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Route each row to one expert."""
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().squeeze(1)
            out = out.index_add(0, rows, self.experts[number](x[rows]) * weight[rows, None])
        return x + out


@case("mixture_of_experts")
def mixture_of_experts(start: Start) -> Observations:
    """Top-1 routing: the experts used, and their order, follow the data."""
    model = nn.Sequential(
        nn.Linear(INPUTS, HIDDEN), Experts(), Experts(), nn.Linear(HIDDEN, OUTPUTS)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    with start(model, optimizer):
        for step in range(7):
            loss = perceptron_loss(model, step, rows=4)
            loss.backward()
            used = sum(p.grad is not None for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss
            yield "parameters used", used


class Watched(nn.Module):
    """A block that counts how many of its inner activations are alive."""

    live = 0

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(dropout=0.1)
        self.extra = nn.Linear(WIDTH, WIDTH)

    @classmethod
    def watch(cls, tensor: torch.Tensor) -> None:
        """Count this activation until its memory is given back."""

        def gone() -> None:
            cls.live -= 1

        cls.live += 1
        weakref.finalize(tensor.untyped_storage(), gone)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block, with a watched activation."""
        inner = self.extra(x)
        self.watch(inner)
        return self.block(F.gelu(inner))


def _train_watched(start: Start, model: LanguageModel) -> Observations:
    """Train and observe how many inner activations the graph holds: as few as plainly."""
    for number in range(len(model.blocks)):
        model.blocks[number] = Watched()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step in range(6):
            Watched.live = 0
            loss = model(*tokens(step))
            yield "activations alive after forward", Watched.live
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss


@case("checkpoint_none", shows_activations=True)
def checkpoint_none(start: Start) -> Observations:
    """The same model without checkpointing: every block's activation stays alive."""
    yield from _train_watched(start, LanguageModel())


@case("checkpoint_reentrant")
def checkpoint_reentrant(start: Start) -> Observations:
    """Reentrant checkpointing: a backward inside the backward for every block."""
    yield from _train_watched(start, LanguageModel(use_reentrant=True))


@case("checkpoint_non_reentrant")
def checkpoint_non_reentrant(start: Start) -> Observations:
    """Checkpointing by saved-tensor hooks."""
    yield from _train_watched(start, LanguageModel(use_reentrant=False))


@case("checkpoint_tied_reentrant")
def checkpoint_tied_reentrant(start: Start) -> Observations:
    """A weight shared by two checkpointed segments gets its gradient in two pieces."""
    model = LanguageModel(head="tied", use_reentrant=True)
    model.blocks[3].up.weight = model.blocks[0].up.weight
    model.blocks[2].attention = model.blocks[1].attention
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        yield from train_language(model, optimizer, range(6))


class Nested(LanguageModel):
    """Checkpoints pairs of blocks, and each block inside the pair."""

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss, recomputing twice."""

        def pair(hidden: torch.Tensor, first: int) -> torch.Tensor:
            hidden = checkpoint(self.blocks[first], hidden, use_reentrant=False)
            return checkpoint(self.blocks[first + 1], hidden, use_reentrant=False)

        hidden = self.embed(x) + self.position[: x.shape[1]]
        for first in range(0, len(self.blocks), 2):
            hidden = checkpoint(pair, hidden, first, use_reentrant=False)
        return F.cross_entropy(self.logits(hidden).flatten(0, 1), targets.flatten())


@case("checkpoint_nested")
def checkpoint_nested(start: Start) -> Observations:
    """Checkpointing inside checkpointing."""
    yield from _train_watched(start, Nested())


def _register_sequential() -> None:
    for use_reentrant in (True, False):

        @case(f"checkpoint_sequential_{'re' if use_reentrant else 'non_re'}entrant")
        def program(start: Start, use_reentrant: bool = use_reentrant) -> Observations:
            layers: list[nn.Module] = [nn.Linear(INPUTS, HIDDEN)]
            for _ in range(5):
                layers += [nn.Dropout(0.1), nn.Linear(HIDDEN, HIDDEN), nn.Tanh()]
            model = nn.Sequential(*layers, nn.Linear(HIDDEN, OUTPUTS))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            with start(model, optimizer):
                for step in range(6):
                    x, y = points(step)
                    x.requires_grad_()
                    out = checkpoint_sequential(model, 3, x, use_reentrant=use_reentrant)
                    loss = F.mse_loss(out, y)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    yield "loss", loss
                    yield "input gradient", x.grad


_register_sequential()


@case("checkpoint_inside_one_module")
def checkpoint_inside_one_module(start: Start) -> Observations:
    """A checkpointed function that reads parameters of the module around it, by closure."""

    class Inside(nn.Module):
        def __init__(self, use_reentrant: bool) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 6)
            self.linear = nn.Linear(HIDDEN, HIDDEN)
            self.use_reentrant = use_reentrant

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def inner(value: torch.Tensor) -> torch.Tensor:
                return torch.tanh(self.linear(torch.sin(value @ self.weight.t())))

            return checkpoint(inner, x, use_reentrant=self.use_reentrant)

    model = nn.Sequential(
        nn.Linear(INPUTS, HIDDEN),
        *(Inside(use_reentrant=bool(number % 2)) for number in range(4)),
        nn.Linear(HIDDEN, OUTPUTS),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step in range(6):
            loss = perceptron_loss(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss
