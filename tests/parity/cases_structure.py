"""Module trees that are not a plain chain: shared, borrowed, unused, frozen, tiny parameters."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from .harness import Observations, Start, case
from .models import (
    HIDDEN,
    INPUTS,
    OUTPUTS,
    LanguageModel,
    Perceptron,
    perceptron_loss,
    points,
    tokens,
    train,
    train_language,
)


def _register_heads() -> None:
    for head in ("own", "tied", "borrowed"):

        @case(f"language_model_{head}")
        def program(start: Start, head: str = head) -> Observations:
            model = LanguageModel(head=head)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            with start(model, optimizer):
                yield from train_language(model, optimizer, range(6))


_register_heads()


class Recurrent(nn.Module):
    """One layer applied several times, between layers applied once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.shared = nn.Linear(HIDDEN, HIDDEN)
        self.between = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.alias = nn.Sequential(self.shared, nn.Tanh())
        self.last = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Alternate the shared layer, by either of its names, with the others."""
        x = torch.tanh(self.first(x))
        for number, layer in enumerate(self.between):
            x = self.alias(x) if number % 2 else torch.tanh(self.shared(x))
            x = torch.tanh(layer(x))
        return self.last(self.shared(self.shared(x)))


@case("module_called_several_times")
def module_called_several_times(start: Start) -> Observations:
    """A module used at six places of one forward, under two names."""
    model = Recurrent()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        yield from train(model, optimizer, range(6))


class Branches(nn.Module):
    """Several branches of which a step uses some."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.branches = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(count))
        self.last = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        """Apply the chosen branches, in the order given."""
        x = torch.tanh(self.first(x))
        for number in chosen:
            x = x + torch.tanh(self.branches[number](x))
        return self.last(x)


def _train_branches(
    start: Start, orders: list[list[int]], optimizer_class: type = torch.optim.AdamW
) -> Observations:
    model = Branches()
    optimizer = optimizer_class(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step, chosen in enumerate(orders):
            x, y = points(step)
            loss = F.mse_loss(model(x, chosen), y)
            loss.backward()
            yield "without gradient", [n for n, p in model.named_parameters() if p.grad is None]
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss


@case("unused_this_step")
def unused_this_step(start: Start) -> Observations:
    """Other branches unused in every step: their parameters and state must not move."""
    orders = [[0, 1], [2, 3], [4, 5], [0, 5], [1, 4], [3, 2], [0, 1, 2, 3, 4, 5]]
    yield from _train_branches(start, orders)


@case("never_used")
def never_used(start: Start) -> Observations:
    """Branches 2 and 4 never get a gradient; weight decay must not touch them."""
    yield from _train_branches(start, [[0, 1, 3, 5]] * 6)


@case("order_changes")
def order_changes(start: Start) -> Observations:
    """The same modules, every step in another order, some twice."""
    orders = [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 0, 4, 1, 5, 3], [1, 1, 0, 3, 3, 2]]
    yield from _train_branches(start, [*orders, orders[0], orders[2]])


@case("frozen_then_unfrozen")
def frozen_then_unfrozen(start: Start) -> Observations:
    """One more layer learns every second step, as in gradual unfreezing."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    layers = [model.first, *model.middle]
    for layer in layers:
        layer.requires_grad_(False)
    with start(model, optimizer):
        for step in range(8):
            if step % 2 and layers:
                layers.pop().requires_grad_(True)
            yield from train(model, optimizer, range(step, step + 1))


def _register_freezing() -> None:
    for set_to_none in (True, False):

        @case(f"freeze_later_set_to_none_{set_to_none}".lower())
        def program(start: Start, set_to_none: bool = set_to_none) -> Observations:
            model = Perceptron()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            with start(model, optimizer):
                for step in range(6):
                    if step == 2:
                        model.middle[1].requires_grad_(False)
                    if step == 4:
                        model.first.weight.requires_grad = False
                    loss = perceptron_loss(model, step)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=set_to_none)
                    yield "loss", loss


_register_freezing()


class Counting(nn.Module):
    """Buffers of every kind: batch norm's, one changed in place, one replaced, one not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(
            nn.Linear(INPUTS if i == 0 else HIDDEN, HIDDEN) for i in range(7)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(HIDDEN) for _ in range(7))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(HIDDEN))
        self.register_buffer("scratch", torch.ones(HIDDEN), persistent=False)
        self.last = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Change the buffers while training."""
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = torch.tanh(norm(linear(x)))
        if self.training:
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            self.scratch.mul_(0.5)
        return self.last(x - self.mean * self.scratch)


@case("buffers")
def buffers(start: Start) -> Observations:
    """Buffers change in training and are used in eval."""
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)
    with start(model, optimizer):
        for step in range(6):
            model.train()
            yield from train(model, optimizer, range(step, step + 1))
            model.eval()
            with torch.no_grad():
                value = perceptron_loss(model, 100 + step)
            yield "eval", value
            yield "buffers", dict(model.named_buffers())


class Adapter(nn.Module):
    """LoRA: a frozen layer and a low-rank correction that learns."""

    def __init__(self, base: nn.Linear, rank: int = 26) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The frozen layer plus the correction."""
        return self.base(x) + (x @ self.down.t()) @ self.up.t()


@case("lora")
def lora(start: Start) -> Observations:
    """Only the adapters learn; the optimizer knows only them."""
    model = LanguageModel().requires_grad_(False)
    for block in model.blocks:
        block.attention.qkv = Adapter(block.attention.qkv)
        block.up = Adapter(block.up)
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-2)
    with start(model, optimizer):
        yield from train_language(model, optimizer, range(6))
    yield "merged", model.blocks[0].up.base.weight + model.blocks[0].up.up @ model.blocks[0].up.down


@case("deepcopy_before_init")
def deepcopy_before_init(start: Start) -> Observations:
    """A frozen copy made before init teaches the model; it stays an ordinary module."""
    model = Perceptron()
    teacher = copy.deepcopy(model).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step in range(6):
            x, y = points(step)
            with torch.no_grad():
                taught = teacher(x)
            out = model(x)
            loss = F.mse_loss(out, y) + F.mse_loss(out, taught)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss
    yield "teacher", teacher.state_dict()


class Containers(nn.Module):
    """ParameterList, ParameterDict, parameters of the root, and the smallest parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)
        self.weights = nn.ParameterList(torch.randn(HIDDEN, HIDDEN) / 7 for _ in range(2))
        self.shifts = nn.ParameterDict({"a": torch.zeros(HIDDEN), "b": torch.ones(HIDDEN)})
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0))
        self.empty_matrix = nn.Parameter(torch.zeros(0, 5))
        self.one = nn.Parameter(torch.full((1,), 0.1))
        self.layers = nn.ModuleDict({n: nn.Linear(HIDDEN, HIDDEN) for n in "stuvwxyz"})
        self.last = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use every one of them, the empty ones too."""
        x = torch.tanh(self.first(x)) * self.scale + self.shifts["a"]
        for weight in self.weights:
            x = torch.tanh(x @ weight + self.shifts["b"] * self.one)
        for name in self.layers:
            x = torch.tanh(self.layers[name](x))
        return self.last(x) + self.empty.sum() + self.empty_matrix.sum()


@case("containers_and_tiny_parameters")
def containers_and_tiny_parameters(start: Start) -> Observations:
    """0-dim, empty and one-element parameters beside parameters in containers."""
    model = Containers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step in range(6):
            yield from train(model, optimizer, range(step, step + 1))
            yield "scale", model.scale.item()


@case("tied_between_blocks")
def tied_between_blocks(start: Start) -> Observations:
    """Neighbouring blocks share one matrix, by registration and by whole modules."""
    model = LanguageModel(depth=5)
    model.blocks[3].up.weight = model.blocks[0].up.weight
    model.blocks[4].attention = model.blocks[1].attention
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        yield from train_language(model, optimizer, range(6))


@case("goes_on_after_close")
def goes_on_after_close(start: Start) -> Observations:
    """Training goes on plainly after close, and then in a second session."""
    model = LanguageModel(head="tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        yield from train_language(model, optimizer, range(3))
    yield from train_language(model, optimizer, range(3, 6))
    with start(model, optimizer):
        yield from train_language(model, optimizer, range(6, 9))


@case("gradients_held_at_init_and_close")
def gradients_held_at_init_and_close(start: Start) -> Observations:
    """The session begins and ends between a backward and its step."""
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    yield from train_language(model, optimizer, range(2))
    model(*tokens(2)).backward()
    with start(model, optimizer):
        for step in range(3, 7):
            loss = model(*tokens(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss
        model(*tokens(7)).backward()
    optimizer.step()
    optimizer.zero_grad()
    yield from train_language(model, optimizer, range(8, 9))
