"""Every elementwise optimizer of torch.optim, each in the ways it can run on CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from .harness import USUAL, Observations, Start, case
from .models import LanguageModel, Perceptron, perceptron_loss, tokens, train, train_language

ELEMENTWISE: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "adamw_amsgrad_maximize": (
        torch.optim.AdamW,
        {"lr": 1e-3, "amsgrad": True, "maximize": True},
    ),
    "adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "adam_amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 1e-1}),
    "sgd_momentum": (
        torch.optim.SGD,
        {"lr": 1e-1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 1e-2},
    ),
    "sgd_nesterov": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "nesterov": True}),
    "sgd_maximize": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "maximize": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-1, "lr_decay": 0.1, "weight_decay": 1e-2}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2}),
    "rmsprop_centered_momentum": (
        torch.optim.RMSprop,
        {"lr": 1e-2, "centered": True, "momentum": 0.9, "weight_decay": 1e-2},
    ),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2, "weight_decay": 1e-2}),
    "radam": (torch.optim.RAdam, {"lr": 1e-2, "decoupled_weight_decay": True}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-2, "weight_decay": 1e-2}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0, "weight_decay": 1e-2}),
    "asgd": (torch.optim.ASGD, {"lr": 1e-1, "t0": 2.0, "weight_decay": 1e-2}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-2}),
}
FUSED = {"adamw", "adamw_amsgrad_maximize", "adam", "adam_amsgrad", "sgd", "sgd_momentum"}
FUSED |= {"sgd_nesterov", "adagrad"}


def _register_elementwise() -> None:
    for name, (kind, options) in ELEMENTWISE.items():
        ways = {"single": {"foreach": False}, "foreach": {"foreach": True}}
        if name in FUSED:
            ways["fused"] = {"fused": True}
        for way, choice in ways.items():

            @case(f"optimizer_{name}_{way}", placements=(*USUAL, "pieces"))
            def program(
                start: Start,
                kind: type[torch.optim.Optimizer] = kind,
                options: dict[str, Any] = {**options, **choice},  # noqa: B006
            ) -> Observations:
                model = Perceptron()
                optimizer = kind(model.parameters(), **options)
                with start(model, optimizer):
                    yield from train(model, optimizer, range(6))


_register_elementwise()


class Wide(nn.Module):
    """Parameters large enough to be cut into several pieces, of odd lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(11 if number == 0 else 151, 7 if number == 6 else 151) for number in range(7)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map inputs to outputs."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _register_wide() -> None:
    kinds: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
        "adamw_fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
        "adagrad_fused": (torch.optim.Adagrad, {"lr": 1e-2, "fused": True}),
        "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    }
    for name, (kind, options) in kinds.items():

        @case(f"wide_parameters_{name}", placements=(*USUAL, "pieces"))
        def program(
            start: Start,
            kind: type[torch.optim.Optimizer] = kind,
            options: dict[str, Any] = options,
        ) -> Observations:
            model = Wide()
            optimizer = kind(model.parameters(), **options)
            with start(model, optimizer):
                yield from train(model, optimizer, range(5))


_register_wide()


def _register_tensor_lr() -> None:
    for way, choice in (("single", {"foreach": False}), ("fused", {"fused": True})):

        @case(f"tensor_learning_rate_{way}")
        def program(start: Start, choice: dict[str, bool] = choice) -> Observations:
            model = Perceptron()
            rate = torch.tensor(1e-2)
            optimizer = torch.optim.AdamW(model.parameters(), lr=rate, **choice)
            with start(model, optimizer):
                for step in range(6):
                    yield from train(model, optimizer, range(step, step + 1))
                    rate.mul_(0.8)


_register_tensor_lr()


def _register_clipping() -> None:
    for norm_type in (2.0, 1.0, float("inf")):
        for foreach in (None, True, False):

            @case(f"clip_grad_norm_{norm_type}_foreach_{foreach}".lower().replace(".0", ""))
            def program(
                start: Start, norm_type: float = norm_type, foreach: bool | None = foreach
            ) -> Observations:
                model = LanguageModel(head="tied")
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
                with start(model, optimizer):
                    for step in range(5):
                        loss = model(*tokens(step))
                        loss.backward()
                        norm = clip_grad_norm_(
                            model.parameters(), 0.1, norm_type=norm_type, foreach=foreach
                        )
                        optimizer.step()
                        optimizer.zero_grad()
                        yield "loss", (loss, norm)


_register_clipping()


@case("clip_grad_value")
def clip_grad_value(start: Start) -> Observations:
    """clip_grad_value_ with both of its loops."""
    model = LanguageModel(head="tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step in range(6):
            loss = model(*tokens(step))
            loss.backward()
            clip_grad_value_(model.parameters(), 0.01, foreach=bool(step % 2))
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss


@case("clip_parts")
def clip_parts(start: Start) -> Observations:
    """Clipping by module and by list, with the norm of the rest only looked at."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step in range(6):
            loss = perceptron_loss(model, step)
            loss.backward()
            norms = [
                nn.utils.clip_grad_norm_(model.middle[1].parameters(), 0.01),
                nn.utils.clip_grad_norm_(model.last.weight, 0.02),
                nn.utils.get_total_norm([p.grad for p in model.parameters()]),
                torch.nn.utils.clip_grad_norm_(list(model.parameters()), 1e9),
            ]
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", (loss, norms)


@case("closure")
def closure(start: Start) -> Observations:
    """optimizer.step(closure): forward and backward happen inside the step."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step in range(6):

            def compute(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = perceptron_loss(model, step)
                loss.backward()
                return loss

            yield "loss", optimizer.step(compute)


@case("two_optimizers_one_model")
def two_optimizers_one_model(start: Start) -> Observations:
    """Disjoint parts of one model under two optimizers, the second stepping half as often."""
    model = LanguageModel()
    blocks = torch.optim.AdamW(model.blocks.parameters(), lr=1e-2)
    rest = torch.optim.SGD(
        [model.embed.weight, model.position, *model.norm.parameters(), model.head.weight],
        lr=1e-1,
        momentum=0.9,
    )
    with start(model, [blocks, rest]):
        for step in range(6):
            loss = model(*tokens(step))
            loss.backward()
            blocks.step()
            blocks.zero_grad()
            if step % 2:
                rest.step()
                rest.zero_grad()
            yield "loss", loss


@case("optimizer_knows_a_part")
def optimizer_knows_a_part(start: Start) -> Observations:
    """The optimizer has only the head; the rest gets gradients that nobody takes away."""
    model = LanguageModel()
    optimizer = torch.optim.AdamW([model.head.weight, model.blocks[3].up.weight], lr=1e-1)
    with start(model, optimizer):
        yield from train_language(model, optimizer, range(6))
