"""What users do with autograd: accumulation, several backwards, penalties, custom functions."""

from __future__ import annotations

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
)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _register_accumulation() -> None:
    for set_to_none in (True, False):

        @case(f"accumulation_set_to_none_{set_to_none}".lower())
        def program(start: Start, set_to_none: bool = set_to_none) -> Observations:
            model = LanguageModel()
            optimizer = _adamw(model)
            with start(model, optimizer):
                for step in range(5):
                    for part in range(3):
                        loss = model(*tokens(10 * step + part)) / 3
                        loss.backward()
                        yield "loss", loss
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=set_to_none)


_register_accumulation()


@case("accumulation_never_zeroed")
def accumulation_never_zeroed(start: Start) -> Observations:
    """Gradients grow over the whole run; model.zero_grad once in the middle."""
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with start(model, optimizer):
        for step in range(6):
            loss = perceptron_loss(model, step)
            loss.backward()
            optimizer.step()
            if step == 3:
                model.zero_grad()
            yield "loss", loss


class TwoHeads(nn.Module):
    """A shared trunk and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(INPUTS, HIDDEN),
            *(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(4)),
        )
        self.left = nn.Linear(HIDDEN, OUTPUTS)
        self.right = nn.Linear(HIDDEN, OUTPUTS)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both heads' outputs."""
        hidden = self.trunk(x)
        return self.left(hidden), self.right(hidden)


@case("several_losses")
def several_losses(start: Start) -> Observations:
    """Losses of two heads, summed one step, one after the other through one graph the next."""
    model = TwoHeads()
    optimizer = _adamw(model)
    with start(model, optimizer):
        for step in range(6):
            x, y = points(step)
            left, right = model(x)
            first, second = F.mse_loss(left, y), F.l1_loss(right, y)
            if step % 2:
                (first + 0.3 * second).backward()
            else:
                first.backward(retain_graph=True)
                second.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", (first, second)


@case("several_forwards_then_backwards")
def several_forwards_then_backwards(start: Start) -> Observations:
    """Three graphs alive at once, run backward in another order than they were built."""
    model = LanguageModel(head="tied")
    optimizer = _adamw(model)
    with start(model, optimizer):
        for step in range(5):
            losses = [model(*tokens(10 * step + part)) for part in range(3)]
            losses[1].backward()
            (losses[0] + losses[2]).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", losses


@case("retain_graph_twice")
def retain_graph_twice(start: Start) -> Observations:
    """One graph run backward twice, with eval of other data between."""
    model = LanguageModel()
    optimizer = _adamw(model)
    with start(model, optimizer):
        for step in range(5):
            loss = model(*tokens(step))
            loss.backward(retain_graph=True)
            with torch.no_grad():
                other = model(*tokens(50 + step))
            (2 * loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", (loss, other)


@case("eval_between_forward_and_backward")
def eval_between_forward_and_backward(start: Start) -> Observations:
    """Another forward walks over every weight while a graph still needs them."""
    model = LanguageModel(head="borrowed")
    optimizer = _adamw(model)
    with start(model, optimizer):
        for step in range(6):
            loss = model(*tokens(step))
            with torch.no_grad():
                other = model(*tokens(50 + step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", (loss, other)


@case("graph_dropped")
def graph_dropped(start: Start) -> Observations:
    """Losses that are not finite enough are thrown away without backward."""
    model = LanguageModel()
    optimizer = _adamw(model)
    with start(model, optimizer):
        for step in range(8):
            loss = model(*tokens(step))
            if step % 3 == 1:
                del loss
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss


@case("gradient_penalty")
def gradient_penalty(start: Start) -> Observations:
    """WGAN-GP: a gradient with a graph, and its norm in the loss."""
    model = Perceptron()
    optimizer = _adamw(model)
    with start(model, optimizer):
        for step in range(6):
            x, y = points(step)
            x.requires_grad_()
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = F.mse_loss(out, y) + ((slope.norm(2, dim=1) - 1) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss


@case("hessian_vector_product")
def hessian_vector_product(start: Start) -> Observations:
    """Double backward through all parameters, with autograd.grad on a list of them."""
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    parameters = list(model.parameters())
    with start(model, optimizer):
        for step in range(5):
            loss = perceptron_loss(model, step)
            grads = torch.autograd.grad(loss, parameters, create_graph=True)
            length = sum(grad.pow(2).sum() for grad in grads)
            (loss + 0.1 * length).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", (loss, length)


@case("autograd_grad_assigned")
def autograd_grad_assigned(start: Start) -> Observations:
    """torch.autograd.grad instead of backward, and the user puts the gradients in place."""
    model = LanguageModel(head="tied")
    optimizer = _adamw(model)
    with start(model, optimizer):
        for step in range(5):
            loss = model(*tokens(step))
            parameters = list(model.parameters())
            for p, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                p.grad = grad
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss


class ScaledMatmul(torch.autograd.Function):
    """A user's own function of an input, a weight and a view of a weight."""

    @staticmethod
    def forward(ctx, x, weight, transposed):  # type: ignore[no-untyped-def]
        """x @ weight.T + x @ transposed, saving all three."""
        ctx.save_for_backward(x, weight, transposed)
        return x @ weight.t() + x @ transposed

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        """The gradients by hand."""
        x, weight, transposed = ctx.saved_tensors
        return grad @ weight + grad @ transposed.t(), grad.t() @ x, x.t() @ grad


class Custom(nn.Module):
    """Calls the user's function with its weight and the weight's transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the function."""
        return torch.tanh(ScaledMatmul.apply(x, self.weight, self.weight.t()))


class Einsum(nn.Module):
    """Views of a weight in an einsum: heads, slices, chunks, a transpose and an expand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN + 1, HIDDEN) / 6)
        self.gain = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix through views."""
        heads = self.weight[1:].view(HIDDEN, 1, HIDDEN)
        mixed = torch.einsum("bi,iho->bho", x, heads).squeeze(1)
        low, high = self.weight[: HIDDEN - 1].t().chunk(2, dim=1)
        mixed = mixed + (x @ low @ high.t()) * 0.1
        return torch.tanh(mixed * self.gain.expand(x.shape[0], HIDDEN))


def _register_layers() -> None:
    for name, layer in (("custom_function", Custom), ("einsum_of_views", Einsum)):

        @case(name)
        def program(start: Start, layer: type[nn.Module] = layer) -> Observations:
            model = nn.Sequential(
                nn.Linear(INPUTS, HIDDEN),
                *(layer() for _ in range(4)),
                nn.Linear(HIDDEN, OUTPUTS),
            )
            optimizer = _adamw(model)
            with start(model, optimizer):
                yield from train(model, optimizer, range(6))


_register_layers()


@case("backward_inputs")
def backward_inputs(start: Start) -> Observations:
    """backward(inputs=...) reaches only some parameters."""
    model = Perceptron()
    optimizer = _adamw(model)
    with start(model, optimizer):
        for step in range(6):
            loss = perceptron_loss(model, step)
            skipped = set(model.middle[step % 5].parameters())
            chosen = [p for p in model.parameters() if p not in skipped]
            loss.backward(inputs=chosen)
            yield "without gradient", [n for n, p in model.named_parameters() if p.grad is None]
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss


@case("penalty_over_all_parameters")
def penalty_over_all_parameters(start: Start) -> Observations:
    """An L2 penalty in the loss: every parameter is used outside its module."""
    model = LanguageModel(head="tied")
    optimizer = _adamw(model)
    with start(model, optimizer):
        for step in range(6):
            loss = model(*tokens(step))
            loss = loss + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss


@case("penalty_over_concatenation", whole=True)
def penalty_over_concatenation(start: Start) -> Observations:
    """All parameters as one vector, made by the user with torch.cat."""
    model = Perceptron()
    optimizer = _adamw(model)
    with start(model, optimizer):
        for step in range(6):
            vector = torch.cat([p.view(-1) for p in model.parameters()])
            loss = perceptron_loss(model, step) + 1e-2 * (vector * vector.sin()).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss


@case("saved_tensors_on_cpu")
def saved_tensors_on_cpu(start: Start) -> Observations:
    """The user's own saved-tensor hooks around the forward copy what is saved."""
    model = LanguageModel()
    optimizer = _adamw(model)
    with start(model, optimizer):
        for step in range(5):
            with torch.autograd.graph.save_on_cpu():
                loss = model(*tokens(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss


@case("anomaly_mode")
def anomaly_mode(start: Start) -> Observations:
    """detect_anomaly around forward and backward."""
    model = Perceptron()
    optimizer = _adamw(model)
    with start(model, optimizer):
        for step in range(5):
            with torch.autograd.detect_anomaly():
                loss = perceptron_loss(model, step)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield "loss", loss
