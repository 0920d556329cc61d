"""Programs that were wrong once. Each found a hole that no other case had shown."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from .cases_backward import Custom
from .harness import Observations, Start, case
from .models import HIDDEN, Perceptron, perceptron_loss, points


@case("gradients_changed_by_the_optimizer")
def gradients_changed_by_the_optimizer(start: Start) -> Observations:
    """foreach SGD with Nesterov momentum adds to the gradients, which nobody sets to zero."""
    model = Perceptron()
    options = {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "foreach": True}
    optimizer = torch.optim.SGD(model.parameters(), **options)
    with start(model, optimizer):
        for step in range(6):
            loss = perceptron_loss(model, step)
            loss.backward()
            optimizer.step()
            yield "gradients", [p.grad for p in model.parameters()]
            yield "loss", loss


@case("gradients_unscaled_by_the_optimizer")
def gradients_unscaled_by_the_optimizer(start: Start) -> Observations:
    """A fused optimizer under GradScaler unscales the gradients in its own kernel."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    with start(model, optimizer):
        for step in range(6):
            loss = perceptron_loss(model, step)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            yield "gradients", [p.grad for p in model.parameters()]
            optimizer.zero_grad()
            yield "loss", loss


class OwnAdamW(torch.optim.AdamW):
    """A subclass: its own step() runs, on managed tensors."""


@case("own_optimizer_with_fused_kernel")
def own_optimizer_with_fused_kernel(start: Start) -> Observations:
    model = Perceptron()
    optimizer = OwnAdamW(model.parameters(), lr=1e-2, fused=True, amsgrad=True)
    with start(model, optimizer):
        for step in range(7):
            loss = perceptron_loss(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss


@case("gradient_held_with_its_address", whole=True)
def gradient_held_with_its_address(start: Start) -> Observations:
    """Its memory stays its own after it was dropped, though its neighbour's slot lives on."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    held = None
    with start(model, optimizer):
        for step in range(8):
            loss = perceptron_loss(model, step)
            loss.backward()
            optimizer.step()
            if step == 2:
                held = model.first.weight.grad
                assert held is not None
                held.data_ptr()
                model.first.weight.grad = None
            if step == 4 and held is not None:
                held.fill_(1e3)
            yield "held", held
            yield "loss", loss


@case("settings_in_a_list")
def settings_in_a_list(start: Start) -> Observations:
    model = Perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    optimizer.param_groups[0]["betas"] = [0.9, 0.99]
    with start(model, optimizer):
        for step in range(6):
            loss = perceptron_loss(model, step)
            loss.backward()
            optimizer.step()
            optimizer.param_groups[0]["betas"][0] = 0.9 / (step + 1)
            optimizer.zero_grad()
            yield "loss", loss


@case("other_strides_later", placements=("disk", "params_ram", "ram", "pieces"))
def other_strides_later(start: Start) -> Observations:
    """`p.data = ...` brings other strides when the states are there already."""
    model = Perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step in range(6):
            loss = perceptron_loss(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for p in model.parameters():
                if p.ndim == 2 and step % 2:
                    p.data = p.data.t().contiguous().t()
            yield "strides", [p.stride() for p in model.parameters()]
            yield "loss", loss


@case("conjugate_gradients", placements=("disk", "pieces"))
def conjugate_gradients(start: Start) -> Observations:
    """Gradients of a conjugated weight carry torch's conjugate bit."""

    class Conjugated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN, dtype=torch.complex64) * 0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.conj()

    model = nn.Sequential(*[Conjugated() for _ in range(5)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    generator = torch.Generator().manual_seed(3)
    with start(model, optimizer):
        for _ in range(6):
            x = torch.randn(4, HIDDEN, dtype=torch.complex64, generator=generator)
            loss = model(x).abs().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss


@case("states_read_after_step", placements=("disk", "params_ram", "pieces"))
def states_read_after_step(start: Start) -> Observations:
    """Also when they are assembled from pieces while their update waits."""
    model = Perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step in range(6):
            loss = perceptron_loss(model, step)
            loss.backward()
            optimizer.step()
            yield "states", [state["exp_avg"].sum() for state in optimizer.state.values()]
            optimizer.zero_grad()
            yield "loss", loss


@case("functions_of_the_input", whole=True)
def functions_of_the_input(start: Start) -> Observations:
    """torch.func over the input of a model whose parameters are only captured."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step in range(6):
            x, _ = points(step)
            yield "by row", torch.vmap(model)(x)
            yield "gradient", torch.func.grad(lambda v: model(v).sum())(x)
            yield "jacobian", torch.func.jacrev(model)(x[0])
            loss = perceptron_loss(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss


@case("state_made_later_than_its_neighbour")
def state_made_later_than_its_neighbour(start: Start) -> Observations:
    """Biases have no gradient in the first steps; weights of the same unit do."""
    model = Perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step in range(6):
            loss = perceptron_loss(model, step)
            loss.backward()
            for number, p in enumerate(model.parameters()):
                if step < 3 and number % 2 == (number // 4) % 2:
                    p.grad = None
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss


@case("custom_function_in_others_hooks")
def custom_function_in_others_hooks(start: Start) -> Observations:
    """What it saved comes back through checkpointing, or a user's hooks, as another tensor."""
    model = nn.Sequential(*(Custom() for _ in range(5)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step in range(6):
            x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(step))
            x.requires_grad_()
            for layer in model[:3]:
                x = checkpoint(layer, x, use_reentrant=step % 2 == 1)
            with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                x = model[4](model[3](x))
            node = x.grad_fn.next_functions[0][0]
            yield "saved", [tensor.sum() for tensor in node.saved_tensors]
            loss = x.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss
