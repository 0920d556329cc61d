"""Parameter groups and learning-rate schedulers, before init and after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from .harness import Observations, Start, case
from .models import HIDDEN, LanguageModel, Perceptron, perceptron_loss, tokens, train

Scheduler = Callable[[torch.optim.Optimizer], Any]
SCHEDULERS: dict[str, Scheduler] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "one_cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.8**epoch),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6),
}


def _register_schedulers() -> None:
    for name, make in SCHEDULERS.items():
        for inside in (False, True):

            @case(f"scheduler_{name}_{'after' if inside else 'before'}_init")
            def program(
                start: Start, make: Scheduler = make, inside: bool = inside
            ) -> Observations:
                model = Perceptron()
                optimizer = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)
                scheduler = None if inside else make(optimizer)
                with start(model, optimizer):
                    scheduler = scheduler or make(optimizer)
                    for step in range(6):
                        yield from train(model, optimizer, range(step, step + 1))
                        scheduler.step()
                        yield "rate", scheduler.get_last_lr()
                    yield "scheduler", scheduler.state_dict()


_register_schedulers()


@case("scheduler_one_cycle_adamw")
def scheduler_one_cycle_adamw(start: Start) -> Observations:
    """OneCycleLR on AdamW cycles the betas."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
    with start(model, optimizer):
        for step in range(6):
            yield from train(model, optimizer, range(step, step + 1))
            scheduler.step()
            yield "betas", optimizer.param_groups[0]["betas"]


def _register_plateau() -> None:
    for inside in (False, True):

        @case(f"scheduler_plateau_{'after' if inside else 'before'}_init")
        def program(start: Start, inside: bool = inside) -> Observations:
            model = Perceptron()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-1)

            def make() -> lr_scheduler.ReduceLROnPlateau:
                return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)

            scheduler = None if inside else make()
            with start(model, optimizer):
                scheduler = scheduler or make()
                for step in range(6):
                    loss = perceptron_loss(model, step)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step(loss.item())
                    yield "loss", loss
                    yield "rate", optimizer.param_groups[0]["lr"]


_register_plateau()


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Decay for matrices, none for the rest, and another rate for the embedding."""
    named = [(n, p) for n, p in model.named_parameters() if not n.startswith("embed")]
    return [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0, "betas": (0.8, 0.9)},
        {"params": [model.embed.weight], "lr": 3e-2, "amsgrad": True},
    ]


@case("parameter_groups")
def parameter_groups(start: Start) -> Observations:
    """Groups that cut across modules, and rates the user changes by hand."""
    model = LanguageModel()
    optimizer = torch.optim.AdamW(_groups(model), lr=1e-2)
    with start(model, optimizer):
        for step in range(6):
            loss = model(*tokens(step))
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            optimizer.param_groups[1]["weight_decay"] = 0.01 * step
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss


@case("parameter_groups_by_name")
def parameter_groups_by_name(start: Start) -> Observations:
    """An optimizer over named_parameters keeps the names in its groups."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1)
    with start(model, optimizer):
        yield from train(model, optimizer, range(5))
        yield "names", optimizer.param_groups[0]["param_names"]


@case("add_param_group_frozen", placements=("disk", "params_ram"))  # in ram: not in the plan
def add_param_group_frozen(start: Start) -> Observations:
    """Formerly frozen layers join the optimizer in a group of their own."""
    model = Perceptron()
    model.middle.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with start(model, optimizer):
        yield from train(model, optimizer, range(2))
        model.middle[4].requires_grad_(True)
        optimizer.add_param_group({"params": model.middle[4].parameters(), "lr": 1e-3})
        yield from train(model, optimizer, range(2, 5))
        model.middle[1].requires_grad_(True)
        optimizer.add_param_group({"params": [*model.middle[1].parameters()], "weight_decay": 0.5})
        yield from train(model, optimizer, range(5, 8))


@case("add_param_group_new_module", whole=True)
def add_param_group_new_module(start: Start) -> Observations:
    """A module that did not exist at init is added to the model and to the optimizer."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        yield from train(model, optimizer, range(3))
        model.middle.append(nn.Linear(HIDDEN, HIDDEN))
        optimizer.add_param_group({"params": model.middle[5].parameters(), "lr": 1e-3})
        yield from train(model, optimizer, range(3, 7))


@case("add_param_group_foreign")
def add_param_group_foreign(start: Start) -> Observations:
    """A parameter of no module, in the optimizer from the start and in the loss."""
    model = Perceptron()
    temperature = nn.Parameter(torch.tensor(1.5))
    optimizer = torch.optim.AdamW([*model.parameters(), temperature], lr=1e-2)
    with start(model, optimizer):
        for step in range(6):
            loss = perceptron_loss(model, step) * temperature
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss
            yield "temperature", temperature
