"""Hooks of the user on modules, tensors, gradients and the optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from .harness import Observations, Start, case
from .models import LanguageModel, Perceptron, perceptron_loss, tokens, train


@case("module_hooks")
def module_hooks(start: Start) -> Observations:
    """Forward, pre-forward, full backward and backward-pre hooks; some read parameters."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[float] = []

    def before(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        seen.append(float(module.weight.detach().sum()))
        return (args[0] * 1.5,)

    def after(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        seen.append(float(out.detach().sum()))
        return out * 0.5 + module.bias

    def backward(module: nn.Module, grad_in: Any, grad_out: Any) -> Any:
        seen.append(float(grad_out[0].sum()))
        return tuple(None if grad is None else grad * 1.1 for grad in grad_in)

    def before_backward(module: nn.Module, grad_out: Any) -> Any:
        seen.append(float(module.weight.detach().norm()))
        return (grad_out[0] * 0.9,)

    model.middle[0].register_forward_pre_hook(before)
    model.middle[1].register_forward_hook(after)
    model.middle[2].register_full_backward_hook(backward)
    model.middle[3].register_full_backward_pre_hook(before_backward)
    with start(model, optimizer):
        handle = model.last.register_forward_hook(after)
        for step in range(6):
            if step == 3:
                handle.remove()
                model.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
            yield from train(model, optimizer, range(step, step + 1))
            yield "seen by hooks", list(seen)
            seen.clear()


@case("global_module_hooks")
def global_module_hooks(start: Start) -> Observations:
    """A hook on every module of the process."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    calls: list[str] = []

    def called(module: nn.Module, args: Any, out: Any) -> None:
        calls.append(type(module).__name__)

    handle = nn.modules.module.register_module_forward_hook(called)
    try:
        with start(model, optimizer):
            for step in range(5):
                yield from train(model, optimizer, range(step, step + 1))
                yield "modules called", list(calls)
                calls.clear()
    finally:
        handle.remove()


@case("parameter_hooks")
def parameter_hooks(start: Start) -> Observations:
    """Tensor hooks that scale gradients, registered before init and after it."""
    model = LanguageModel(head="tied")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fired: list[float] = []

    def scale(grad: torch.Tensor) -> torch.Tensor:
        fired.append(float(grad.sum()))
        return grad * 0.5

    model.embed.weight.register_hook(scale)
    model.blocks[1].up.weight.register_hook(scale)
    with start(model, optimizer):
        model.blocks[2].down.bias.register_hook(scale)
        handle = model.blocks[3].down.weight.register_hook(scale)
        for step in range(6):
            if step == 3:
                handle.remove()
            loss = model(*tokens(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss
            yield "gradient sums", list(fired)
            fired.clear()


@case("post_accumulate_hooks")
def post_accumulate_hooks(start: Start) -> Observations:
    """Hooks that see and change p.grad once it is accumulated."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fired: list[float] = []

    def clamp(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        fired.append(float(parameter.grad.norm()))
        parameter.grad.clamp_(-0.01, 0.01)

    for layer in model.middle:
        layer.weight.register_post_accumulate_grad_hook(clamp)
    with start(model, optimizer):
        model.last.weight.register_post_accumulate_grad_hook(clamp)
        for step in range(6):
            yield from train(model, optimizer, range(step, step + 1))
            yield "gradient norms", list(fired)
            fired.clear()


@case("step_in_backward")
def step_in_backward(start: Start) -> Observations:
    """One optimizer per parameter, stepped inside backward; the gradient is dropped at once."""
    model = Perceptron()
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    with start(model, list(optimizers.values())):
        for step in range(5):
            loss = perceptron_loss(model, step)
            loss.backward()
            yield "loss", loss


@case("activation_hooks")
def activation_hooks(start: Start) -> Observations:
    """retain_grad and tensor hooks on activations, and feature extraction by a hook."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kept: list[torch.Tensor] = []

    def keep(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.retain_grad()
            out.register_hook(lambda grad: grad * 1.25)
            kept.append(out)

    model.middle[2].register_forward_hook(keep)
    with start(model, optimizer):
        for step in range(5):
            yield from train(model, optimizer, range(step, step + 1))
            yield "activation gradient", [out.grad for out in kept]
            kept.clear()


def _counting_optimizer(model: nn.Module, counts: dict[str, int]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def before(opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        counts["before"] += 1
        opt.param_groups[0]["lr"] *= 0.9

    def after(opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        counts["after"] += 1

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer


@case("optimizer_step_hooks")
def optimizer_step_hooks(start: Start) -> Observations:
    """Step hooks fire once per step; the pre-hook changes the learning rate of that very step."""
    model = Perceptron()
    counts = {"before": 0, "after": 0, "global": 0}
    optimizer = _counting_optimizer(model, counts)

    def everywhere(opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        counts["global"] += 1

    handle = register_optimizer_step_post_hook(everywhere)
    try:
        with start(model, optimizer):
            for step in range(6):
                yield from train(model, optimizer, range(step, step + 1))
                yield "calls", dict(counts)
    finally:
        handle.remove()


@case("optimizer_step_hooks_touch_values")
def optimizer_step_hooks_touch_values(start: Start) -> Observations:
    """A pre-hook that changes gradients and a post-hook that clamps weights."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-1)

    def before(opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in opt.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)

    def after(opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for group in opt.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-0.2, 0.2)

    optimizer.register_step_pre_hook(before)
    with start(model, optimizer):
        optimizer.register_step_post_hook(after)
        yield from train(model, optimizer, range(6))


@case("state_dict_hooks")
def state_dict_hooks(start: Start) -> Observations:
    """Hooks on the state_dict of model and optimizer see true values."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[float] = []

    def of_model(module: nn.Module, state: dict[str, Any], prefix: str, local: Any) -> None:
        seen.append(float(sum(value.sum() for value in state.values())))

    def of_optimizer(opt: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        seen.append(float(sum(entry["exp_avg"].sum() for entry in state["state"].values())))

    model.register_state_dict_post_hook(of_model)
    optimizer.register_state_dict_post_hook(of_optimizer)
    with start(model, optimizer):
        for step in range(5):
            yield from train(model, optimizer, range(step, step + 1))
            model.state_dict()
            optimizer.state_dict()
            yield "sums", list(seen)
            seen.clear()
