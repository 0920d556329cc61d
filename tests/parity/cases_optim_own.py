"""zeepo's own optimizers, with each way of keeping states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

import zeepo

from .cases_optim import Wide
from .harness import USUAL, Observations, Start, case
from .models import images, perceptron_loss, points, train

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (zeepo.optim.AdamW, {"lr": 1e-2}),
    "adam": (zeepo.optim.Adam, {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}),
    "sgd": (zeepo.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "nesterov": True}),
    "adagrad": (zeepo.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    "lion": (zeepo.optim.Lion, {"lr": 1e-3, "weight_decay": 0.1}),
}
FORMATS = ("fp32", "bf16", "8bit")
PLACES = (*USUAL, "pieces")


class WithScalar(Wide):
    """Odd lengths, and parameters smaller than a block of a packed state."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.few = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map inputs to outputs."""
        return super().forward(x) * self.few * self.gain


def _register_kinds() -> None:
    for name, (kind, options) in KINDS.items():
        for state_dtype in FORMATS:

            @case(f"own_{name}_{state_dtype}", placements=PLACES)
            def program(
                start: Start,
                kind: type[torch.optim.Optimizer] = kind,
                options: dict[str, Any] = {**options, "state_dtype": state_dtype},  # noqa: B006
            ) -> Observations:
                model = WithScalar()
                optimizer = kind(model.parameters(), **options)
                schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
                with start(model, optimizer):
                    for step in range(5):
                        optimizer.clip_factor = 0.7 if step % 2 else None
                        yield from train(model, optimizer, range(step, step + 1))
                        yield "clip factor", str(optimizer.clip_factor)
                        schedule.step()


def _register_masters() -> None:
    for state_dtype in FORMATS:

        @case(f"own_masters_{state_dtype}", placements=PLACES)
        def program(start: Start, state_dtype: str = state_dtype) -> Observations:
            model = Wide().to(torch.bfloat16)
            model.layers[2].float()
            optimizer = zeepo.optim.AdamW(
                model.parameters(), lr=1e-2, state_dtype=state_dtype, master_weights=True
            )
            with start(model, optimizer):
                yield from _train_narrow(model, optimizer, range(5))


def _train_narrow(
    model: Wide, optimizer: torch.optim.Optimizer, steps: Iterable[int]
) -> Observations:
    """Each layer in its own type."""
    for step in steps:
        x, y = points(step)
        for layer in model.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        loss = nn.functional.mse_loss(x.float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield f"loss {step}", loss


@case("own_mixed", placements=PLACES)
def own_mixed(start: Start) -> Observations:
    """One optimizer keeps states in several ways, also inside one module."""
    model = Wide()
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if "weight" in n and "1" not in n], "state_dtype": "8bit"},
        {"params": [p for n, p in named if "bias" in n], "state_dtype": "bf16"},
        {"params": [p for n, p in named if "weight" in n and "1" in n]},
    ]
    optimizer = zeepo.optim.AdamW(groups, lr=1e-2)
    with start(model, optimizer):
        yield from train(model, optimizer, range(5))


@case("own_loaded_between_steps", placements=PLACES)
def own_loaded_between_steps(start: Start) -> Observations:
    """A state of torch's optimizer, and one that was saved before, take the place of what is."""
    model = Wide()
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number, p in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(number)
        p.grad = torch.randn(p.shape, generator=generator)
    theirs.step()
    optimizer = zeepo.optim.AdamW(model.parameters(), lr=1e-2, state_dtype="8bit")
    optimizer.load_state_dict(theirs.state_dict())
    with start(model, optimizer):
        yield from train(model, optimizer, range(2))
        state = optimizer.state_dict()
        saved = {n: {k: v.clone() for k, v in s.items()} for n, s in state["state"].items()}
        yield "saved", saved[0]["exp_avg"]
        yield from train(model, optimizer, range(2, 4))
        optimizer.load_state_dict({**state, "state": saved})
        yield from train(model, optimizer, range(4, 6))
        yield "read", optimizer.state[model.layers[3].weight]["exp_avg_sq"].sum()


@case("own_grad_scaler", placements=PLACES)
def own_grad_scaler(start: Start) -> Observations:
    """The scale is divided out in the pass of the update; a step with an infinity is skipped."""
    model = Wide()
    optimizer = zeepo.optim.AdamW(model.parameters(), lr=1e-2, state_dtype="8bit")
    scaler = torch.amp.GradScaler("cpu", init_scale=48.0, growth_interval=2)
    with start(model, optimizer):
        for step in range(6):
            loss = perceptron_loss(model, step)
            scaler.scale(loss).backward()
            if step == 3:
                model.layers[1].bias.grad[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            yield f"loss {step}", loss


@case("own_channels_last", placements=PLACES)
def own_channels_last(start: Start) -> Observations:
    """Blocks lie in the order of memory, whatever the order of the dimensions."""
    layers = [nn.Conv2d(3 if i == 0 else 13, 13, 3, padding=1) for i in range(5)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(13 * 81, 3))
    model.to(memory_format=torch.channels_last)
    optimizer = zeepo.optim.Adam(model.parameters(), lr=1e-3, state_dtype="8bit")
    with start(model, optimizer):
        for step in range(5):
            loss = model(images(step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield f"loss {step}", loss


_register_kinds()
_register_masters()
