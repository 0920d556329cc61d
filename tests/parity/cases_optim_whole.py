"""Optimizers that need whole parameters, and optimizers that users wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .harness import Observations, Start, case
from .models import LanguageModel, Perceptron, train, train_language


@case("muon")
def muon(start: Start) -> Observations:
    """Muon for the matrices of the blocks, AdamW for everything else."""
    model = LanguageModel()
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    known = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in known]
    optimizers = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]
    with start(model, optimizers):
        for step in range(5):
            for optimizer in optimizers:
                optimizer.zero_grad()
            yield from train_language(model, optimizers[0], range(step, step + 1))
            optimizers[1].step()


def _register_adafactor() -> None:
    for foreach in (False, True):

        @case(f"adafactor_{'foreach' if foreach else 'single'}")
        def program(start: Start, foreach: bool = foreach) -> Observations:
            model = LanguageModel(head="tied")
            optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-1, foreach=foreach)
            with start(model, optimizer):
                yield from train_language(model, optimizer, range(5))


_register_adafactor()


class Lion(torch.optim.Optimizer):
    """A user's elementwise optimizer: the sign of an interpolated momentum."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update."""
        for group in self.param_groups:
            fast, slow = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                move = state["momentum"] * fast + p.grad * (1 - fast)
                p.add_(move.sign_(), alpha=-group["lr"])
                state["momentum"].lerp_(p.grad, 1 - slow)
        return None


class Lamb(torch.optim.Optimizer):
    """A user's optimizer with one norm per parameter, a Python counter and a global state."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """One update."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.num_steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "step" not in state:
                    state["step"] = 0
                    state["first"] = torch.zeros_like(p)
                    state["second"] = torch.zeros_like(p)
                state["step"] += 1
                state["first"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["second"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                move = state["first"] / (state["second"].sqrt() + 1e-6) + 0.01 * p
                trust = float(p.norm() / (move.norm() + 1e-6))
                state["trust"] = trust
                p.add_(move, alpha=-group["lr"] * min(max(trust, 0.01), 10.0))
        return loss


class GloballyNormed(torch.optim.Optimizer):
    """A user's optimizer that looks at all gradients before it moves anything."""

    def __init__(self, params: Any, lr: float = 1e-1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One update."""
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] / norm))


def _register_written() -> None:
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "lion": Lion,
        "lamb": Lamb,
        "globally_normed": GloballyNormed,
    }
    for name, kind in kinds.items():

        @case(f"written_by_user_{name}")
        def program(
            start: Start, kind: Callable[[Any], torch.optim.Optimizer] = kind
        ) -> Observations:
            model = LanguageModel(depth=6, head="tied")
            optimizer = kind(model.parameters())
            with start(model, optimizer):
                for step in range(6):
                    yield from train_language(model, optimizer, range(step, step + 1))
                    yield "steps", getattr(optimizer, "num_steps", None)


_register_written()


class SlowerAdamW(torch.optim.AdamW):
    """A subclass of a torch optimizer whose step does something more."""

    def step(self, closure: Any = None) -> Any:
        """Shrink the learning rate, then update."""
        for group in self.param_groups:
            group["lr"] = group["lr"] * 0.9
        return super().step(closure)


@case("subclass_of_adamw")
def subclass_of_adamw(start: Start) -> Observations:
    """A subclass that overrides step."""
    model = Perceptron()
    optimizer = SlowerAdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        yield from train(model, optimizer, range(6))


class Lookahead:
    """A wrapper around an optimizer that is no optimizer itself: slow weights every two steps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.count = 0
        self.slow = [p.detach().clone() for g in inner.param_groups for p in g["params"]]

    def step(self) -> None:
        """The inner step, and sometimes a move of the slow weights."""
        self.inner.step()
        self.count += 1
        if self.count % 2:
            return
        params = [p for g in self.inner.param_groups for p in g["params"]]
        with torch.no_grad():
            for p, slow in zip(params, self.slow, strict=True):
                slow.add_(p - slow, alpha=0.5)
                p.copy_(slow)


@case("wrapper_around_optimizer")
def wrapper_around_optimizer(start: Start) -> Observations:
    """Lookahead over SGD."""
    model: nn.Module = Perceptron()
    inner = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9)
    outer = Lookahead(inner)
    with start(model, inner):
        for step in range(6):
            x = torch.randn(4, 11)
            loss = model(x).pow(2).mean()
            loss.backward()
            outer.step()
            inner.zero_grad()
            yield "loss", loss
            yield "slow", outer.slow[step]
